"""Saved activations elsewhere: the numbers stay the same, what moves is what is worth it, and nothing is kept for ever."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import training
from fake import FakeRuntime
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import infinity
from infinity.activations.saved_tensors import Activations
from infinity.activations.stores import ArenaActivationStore, HostActivationStore
from infinity.aio import PinnedPool, PoolPart
from infinity.device import Device, HostBuffers, StreamDevice
from infinity.schedule.spilling import bytes_on_drive
from infinity.swap import manager
from infinity.swap.stager import Stager
from infinity.units import PAGE_BYTES


def kept_bytes(activations: Activations) -> int:
    """Bytes of what is stored now."""
    activations._forget()
    items = [entry.item for entry in activations._entries.values()]
    return sum(getattr(item, "buffer", item).nbytes for item in items)  # on the host, an item has a buffer


def trained(
    case: training.Case, path: Path, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[training.Outcome, int, int]:
    """The outcome with activations offloaded; how many were moved, and the bytes of those that are kept at its end."""
    made: list[infinity.Engine] = []
    initialize = infinity.initialize

    def with_more(*, model: nn.Module, config: dict[str, Any]) -> Any:
        config["infinity"] |= own
        made.append(found := initialize(model=model, config=config)[0])
        close = found.close

        def noting() -> None:
            assert found.activations is not None
            counts.append((found.activations.moved, kept_bytes(found.activations)))
            close()

        monkeypatch.setattr(found, "close", noting)
        return found, None, None, None

    counts: list[tuple[int, int]] = []
    monkeypatch.setattr(infinity, "initialize", with_more)
    outcome = training.with_engine(dataclasses.replace(case, pinned_bytes_max="32MiB"), str(path))
    monkeypatch.setattr(infinity, "initialize", initialize)
    return outcome, *counts[-1]


NVME = {"offload_activations": {"device": "nvme", "bytes_min": 4096, "buffer_bytes": "256KiB"}}
HOST = {"offload_activations": {"device": "cpu", "bytes_min": 4096}}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("name", "own", "late"),
    [
        ("accumulation and clipping", NVME, False),
        ("activation checkpointing", NVME, False),
        ("evaluation between steps", NVME, True),
        ("activation checkpointing", HOST, True),
        ("plain", HOST, True),
    ],
)
def test_training_is_the_same_bit_for_bit(
    name: str, own: dict[str, Any], late: bool, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "STEPS", 3)
    case, runtime = training.CASES[name], FakeRuntime()
    expected = training.with_engine(case, None)
    if late:
        monkeypatch.setattr(manager, "device_for", lambda torch_device: StreamDevice(runtime))
        with runtime.watching():
            outcome, moved, stored_bytes = trained(case, nvme_path, own, monkeypatch)
    else:
        outcome, moved, stored_bytes = trained(case, nvme_path, own, monkeypatch)
    assert not training.differences(expected, outcome)
    assert moved > 0 and stored_bytes == 0


@pytest.mark.usefixtures("one_rank")
def test_on_a_cpu_host_memory_is_no_other_place(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    with caplog.at_level("INFO"), infinity.initialize(model=nn.Linear(4, 4), config=config)[0] as engine:
        assert engine.activations is None
    assert "the model computes on the CPU" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_the_buffer_is_a_line_of_the_pinned_sum(nvme_path: Path) -> None:
    device = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
        "infinity": {"pinned_bytes_max": "16MiB", "offload_activations": {"device": "nvme", "buffer_bytes": "15MiB"}},
    }
    with pytest.raises(infinity.BudgetError, match=r"15.00 MiB of offload_activations.buffer_bytes"):
        infinity.initialize(model=nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), config=config)


class Bench:
    """Activations on one store, with a small network of which every second tensor is worth moving."""

    def __init__(self, store: HostActivationStore | ArenaActivationStore, bytes_min: int = 1024) -> None:
        self.activations = Activations(store, bytes_min=bytes_min)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.x = torch.randn(64, 32)

    def loss(self) -> torch.Tensor:
        with self.activations.saving():
            return self.net(self.x).sum()

    def gradients(self, loss: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        self.net.zero_grad()
        loss.backward(**options)
        return [p.grad.clone() for p in self.net.parameters() if p.grad is not None]


def in_host(bytes_max: int | None = None) -> HostActivationStore:
    return HostActivationStore(Device(), HostBuffers(Device(), pin=False, bytes_max=bytes_max))


@pytest.fixture(params=["host", "arena"])
def bench(request: pytest.FixtureRequest, nvme_path: Path) -> Iterator[Bench]:
    if request.param == "host":
        yield Bench(in_host())
        return
    with infinity.SwapManager(str(nvme_path), pinned_bytes_max="16MiB") as swap:
        machinery = swap._open()
        part = PoolPart(machinery.stager.make_room(32768, "the test"))
        made = Bench(
            ArenaActivationStore(Stager(machinery.engine, part, machinery.arena, Device()), part, machinery.arena)
        )
        yield made
        made.activations.close()


def test_gradients_are_the_same_and_nothing_is_kept_after_the_backward(bench: Bench) -> None:
    expected = bench.gradients(bench.net(bench.x).sum())
    for _ in range(3):
        found = bench.gradients(bench.loss())
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert kept_bytes(bench.activations) == 0
    assert bench.activations.moved >= 9


def test_a_backward_may_come_twice(bench: Bench) -> None:
    loss = bench.loss()
    first = bench.gradients(loss, retain_graph=True)
    assert kept_bytes(bench.activations) > 0
    again = bench.gradients(loss)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    del loss
    assert kept_bytes(bench.activations) == 0


def test_a_loss_that_is_thrown_away_leaves_nothing(bench: Bench) -> None:
    for _ in range(5):
        bench.loss()
        assert kept_bytes(bench.activations) == 0


def test_a_forward_that_fails_leaves_nothing(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="shapes"), bench.activations.saving():
        bench.net[2](bench.net[1](bench.net[0](bench.x)))[:, :5] @ torch.ones(7, 7)
    assert bench.activations.moved > 0
    assert kept_bytes(bench.activations) == 0


class LateLanding:
    """A copy that ends when it is waited for, and not before."""

    def __init__(self) -> None:
        self.waited = False

    def done(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True


class LateDevice(Device):
    """Its copies to host memory end late, as those of a GPU that the program runs ahead of."""

    def start_d2h(self, found: torch.Tensor, into: torch.Tensor) -> LateLanding:  # type: ignore[override]
        into.copy_(found)
        return LateLanding()


@contextlib.contextmanager
def arena_store(nvme_path: Path, device: Device, pages: int) -> Iterator[ArenaActivationStore]:
    with infinity.SwapManager(str(nvme_path), pinned_bytes_max="16MiB") as swap:
        machinery = swap._open()
        part = PoolPart(machinery.stager.make_room(pages * PAGE_BYTES, "the test"))
        store = ArenaActivationStore(Stager(machinery.engine, part, machinery.arena, device), part, machinery.arena)
        yield store
        store.close()


@pytest.mark.parametrize("device", [Device, LateDevice])
def test_what_was_put_first_may_be_asked_for_first(device: type[Device], nvme_path: Path) -> None:
    """By all blocks, say, which saved the same table: while what came last still fills the buffer."""
    with arena_store(nvme_path, device(), pages=64) as store:
        items = [store.try_put(torch.full((16 * PAGE_BYTES // 4,), float(number))) for number in range(8)]
        for number in (0, 7, 3, 0, 6, 5, 4, 3, 2, 1, 0):
            item = items[number]
            assert item is not None
            assert (store.fetch(item) == number).all()
        for item in items:
            assert item is not None
            store.drop(item)


@pytest.mark.parametrize("device", [Device, LateDevice])
@hypothesis.settings(
    max_examples=hypothesis.settings.default.max_examples * 3 // 10,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(random=st.randoms(use_true_random=False))
def test_any_order_of_putting_and_taking_finds_room(device: type[Device], nvme_path: Path, random: Random) -> None:
    with arena_store(nvme_path, device(), pages=64) as store:
        kept: list[tuple[Any, int]] = []
        for number in range(40):
            pages = random.choice([1, 15, 16, 16, 5, 11])
            kept.append((store.try_put(torch.full((pages * PAGE_BYTES // 4,), float(number))), number))
            if random.random() < 0.5:
                store.drop(kept.pop(random.randrange(len(kept)))[0])
            if kept and random.random() < 0.3:
                item, value = random.choice(kept)
                assert (store.fetch(item) == value).all()
        for item, _ in kept:
            store.drop(item)


def test_places_are_used_again_so_that_the_arena_grows_no_more(nvme_path: Path) -> None:
    with infinity.SwapManager(str(nvme_path), pinned_bytes_max="16MiB") as swap:
        machinery = swap._open()
        part = PoolPart(machinery.stager.make_room(32768, "the test"))
        bench = Bench(
            ArenaActivationStore(Stager(machinery.engine, part, machinery.arena, Device()), part, machinery.arena)
        )
        grown = []
        for _ in range(4):
            bench.gradients(bench.loss())
            machinery.engine.drain()
            grown.append(swap.stats().arena_bytes)
        assert grown[1] == grown[-1] > 0
        assert swap.stats().written_bytes > 0, "what the buffer can't hold went to the drive"
        assert part.leased_bytes == 0
        bench.activations.close()


@pytest.mark.parametrize("where", ["host", "arena"])
def test_shapes_that_vary_take_what_the_largest_step_takes(where: str, nvme_path: Path) -> None:
    """Steps of ever other sequence lengths: places of other sizes serve, so 40 of them need what the longest one needs."""
    random = Random(1)
    with contextlib.ExitStack() as closing:
        store = in_host() if where == "host" else closing.enter_context(arena_store(nvme_path, Device(), pages=64))
        most = 0
        for step in range(40):
            length = 1.0 if step == 0 else random.uniform(0.3, 1)
            pages = [max(1, int(length * share)) for share in (16, 3, 9, 16, 5, 16)]
            items = []
            for number, count in enumerate(pages):
                items.append(store.try_put(torch.full((count * PAGE_BYTES,), number, dtype=torch.uint8)))
            most = max(most, sum(pages) * PAGE_BYTES)
            for number, item in reversed(list(enumerate(items))):
                assert item is not None
                assert store.fetch(item).unique().tolist() == [number]
                store.drop(item)
        held = store._places.nbytes if isinstance(store, ArenaActivationStore) else store._host_memory.nbytes
        assert held == most == sum((16, 3, 9, 16, 5, 16)) * PAGE_BYTES


@pytest.mark.parametrize("pages", [[1] * 9, [1, 2, 2, 1, 1, 2, 1, 1, 2, 1], [1, 3, 1]])
def test_the_drive_moves_what_the_sum_says(pages: list[int], nvme_path: Path) -> None:
    """All but what came last and fits half of the buffer; a tensor that is too large for it is not taken."""
    sizes = [4096 * each for each in pages]
    with infinity.SwapManager(str(nvme_path), pinned_bytes_max="16MiB") as swap:
        machinery = swap._open()
        part = PoolPart(machinery.stager.make_room(8 * 4096, "the test"))
        store = ArenaActivationStore(Stager(machinery.engine, part, machinery.arena, Device()), part, machinery.arena)
        items = []
        for number, nbytes in enumerate(sizes):
            items.append(store.try_put(torch.full((nbytes,), number, dtype=torch.uint8)))
        for number, item in reversed(list(enumerate(items))):
            if item is None:
                continue
            assert store.fetch(item).unique().tolist() == [number]
            store.start_fetch([each for each in reversed(items[:number]) if each is not None])
            store.drop(item)
        machinery.engine.drain()
        moved = sum(bytes_on_drive(sizes, part.nbytes))
        assert store.drive_bytes == (moved, moved)
        assert (swap.stats().read_bytes, swap.stats().written_bytes) == (moved, moved)
        store.close()


@pytest.mark.usefixtures("one_rank")
def test_the_bytes_of_a_step_count_what_saved_activations_move(nvme_path: Path) -> None:
    device = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
        "infinity": {"pinned_bytes_max": "16MiB", **NVME},
    }
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    with infinity.initialize(model=nn.Sequential(*layers), config=config)[0] as engine:
        assert engine.swap is not None and engine.activations is not None
        x = torch.randn(256, 64)  # 64 KiB, a quarter of the buffer, so that two stay in hand
        for _ in range(3):
            engine.backward(engine(x).sum())
            engine.step()
            engine.swap.stager.settle_all()
            engine.swap._open().engine.drain()
        read, written = engine.activations.step_bytes
        rates = {"read_bytes_per_s": 1.0, "write_bytes_per_s": 1.0}
        assert read > 0 and written > 0
        moved = sum(engine.swap.step_bytes()) + read + written
        assert engine.step_lower_bound_seconds(compute_seconds=0.0, **rates) == moved
        assert engine.step_lower_bound_seconds(compute_seconds=moved + 1, **rates) == moved + 1  # hides the drive


def test_parameters_parts_of_buffers_and_small_tensors_stay() -> None:
    bench = Bench(in_host(), bytes_min=1024)
    moved = []
    put = bench.activations._put
    bench.activations._put = lambda tensor: moved.append(tensor.shape) or put(tensor)  # type: ignore[method-assign, func-returns-value]
    bench.gradients(bench.loss())
    assert moved and set(moved) == {torch.Size([64, 32])}, "the weights are 32 x 32"
    with bench.activations.saving():
        (torch.randn(4, 1, requires_grad=True) * torch.randn(64, 64)[:4]).sum().backward()
        bench.net[0].weight[:16].pow(2).sum().backward()  # type: ignore[index, union-attr]
        (torch.randn(4, requires_grad=True) * 2).pow(2).sum().backward()
    assert set(moved) == {torch.Size([64, 32])}


class OfParts(nn.Module):
    """Computes with this rank's part of a parameter that was split before, as experts do."""

    def __init__(self, split: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(32, 32), split, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local()  # type: ignore[attr-defined]
        return self.last(self.first(x) @ weight.t()).square().mean()


class Stopped(nn.Module):
    """Computes with a weight through which no gradient goes."""

    def __init__(self, split: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) @ self.first.weight.detach().t()).square().mean()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("model", [OfParts, Stopped])
def test_what_changes_between_steps_is_not_that_of_a_graph_that_is_kept(
    model: Callable[[DeviceMesh], nn.Module], nvme_path: Path
) -> None:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    outcomes = []
    for own in ({}, {"pinned_bytes_max": "32MiB", **NVME}):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "part"))
        settings = {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "infinity": own,
        }
        kept, norms = [], []
        with infinity.initialize(model=model(mesh["part"]), config=settings, mesh=mesh)[0] as engine:
            for step in range(3):
                x = torch.randn(128, 32, generator=torch.Generator().manual_seed(step))
                kept.append(engine(x))
                engine.backward(engine(x))
                engine.step()
                norms.append(engine.get_global_grad_norm())
            assert engine.activations is None or engine.activations.moved > 0
        outcomes.append(norms)
    assert outcomes[0] == outcomes[1]


def test_views_of_one_storage_move_with_it_once(bench: Bench) -> None:
    """As queries, keys and values do, each transposed and at an offset of its own."""
    project = nn.Linear(32, 24)

    def gradients(saving: contextlib.AbstractContextManager[None]) -> list[torch.Tensor]:
        x = bench.x.clone().requires_grad_()
        with saving:
            q, k, v = (part.view(2, 32, 4, 2).transpose(1, 2) for part in project(x * 1).split(8, -1))
            loss = nn.functional.scaled_dot_product_attention(q, k, v).pow(2).sum()
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    expected, before = gradients(contextlib.nullcontext()), bench.activations.moved
    found = gradients(bench.activations.saving())
    assert torch.equal(expected[0], found[0])
    assert bench.activations.moved - before == 4, (
        "x * 1, all of q, k and v, the attention's output, its sums of exponents"
    )
    assert kept_bytes(bench.activations) == 0


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_the_gates_of_a_recurrent_layer_are_told_apart(kind: type[nn.Module]) -> None:
    """Its gates are parts of one storage, and are computed in place one after the other. Each has its own version."""
    torch.manual_seed(0)
    layer, x = kind(8, 8), torch.randn(5, 4, 8)

    def gradients(saving: contextlib.AbstractContextManager[None]) -> list[torch.Tensor]:
        with saving:
            loss = layer(x)[0].pow(2).sum()
        return [*torch.autograd.grad(loss, [*layer.parameters()])]

    activations = Activations(in_host(), bytes_min=64)
    expected, found = gradients(contextlib.nullcontext()), gradients(activations.saving())
    assert activations.moved > 0 and all(map(torch.equal, expected, found))


def test_what_several_operations_save_moves_once_and_what_changed_moves_again() -> None:
    activations = Activations(in_host(), bytes_min=1024)
    x = torch.randn(32, 32, requires_grad=True) * 1
    with activations.saving():
        loss = x.sin().sum() + x.cos().sum() + x.pow(2).sum()
    assert activations.moved == 1
    loss.backward()
    y = torch.randn(32, 32, requires_grad=True) * 1
    with activations.saving():
        a = y.detach().sin_()
        first = (a * torch.ones(1, requires_grad=True)).sum()
        a.add_(1)
        second = (a * torch.ones(1, requires_grad=True)).sum()
    assert activations.moved == 3
    del first, second
    assert kept_bytes(activations) == 0


def test_what_stays_may_not_change_before_its_backward() -> None:
    """torch compares versions only if there are no hooks."""
    activations = Activations(in_host(), bytes_min=1024)
    with activations.saving():
        y = torch.ones(4, requires_grad=True).exp()
        y.add_(1)
    with pytest.raises(infinity.InfinityError, match="changed in place"):
        y.sum().backward()


def test_host_memory_has_a_bound_and_the_rest_stays() -> None:
    store = in_host(bytes_max=16384)
    bench = Bench(store)
    expected = bench.gradients(bench.net(bench.x).sum())
    put, refused = store.try_put, []

    def noting(tensor: torch.Tensor) -> Any:
        item = put(tensor)
        refused.append(item is None)
        return item

    store.try_put = noting  # type: ignore[method-assign]
    found = bench.gradients(bench.loss())
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert bench.activations.moved == 2 and sum(refused) >= 1


def test_a_part_of_the_pool_lends_what_is_its_own() -> None:
    pool = PinnedPool(1 << 16)
    first = pool.lease(4096)
    part = PoolPart(pool.lease(8192))
    one, two = part.try_lease(1), part.try_lease(4096)
    assert one is not None and two is not None and part.try_lease(1) is None
    assert part.leased_bytes == part.nbytes == 8192
    one.view(torch.uint8).fill_(1)
    two.view(torch.uint8).fill_(2)
    assert part.lease.view(torch.uint8).unique().tolist() == [1, 2]
    one.give_back()
    assert part.leased_bytes == 4096 and pool.leased_bytes == 12288
    two.give_back()
    part.lease.give_back()
    first.give_back()
    assert pool.leased_bytes == 0
