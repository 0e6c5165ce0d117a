"""A pending update is never visible: a look at values applies it first, and no failure loses it."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Model
from torch import nn
from torch.distributed.fsdp import FSDPModule

import infinity
from infinity.aio import page_checksums
from infinity.swap import paged_adam
from infinity.swap.gradient_lap import RefusingGradient, trained_shard
from infinity.swap.paged_optimizer import PagedOptimizer
from infinity.swap.stager import Chunk, ChunkIo, ChunkState, Stager

BLOCKS = 5
WIDTH = 96


pytestmark = pytest.mark.usefixtures("one_rank")


def made(
    nvme_path: Path | None,
    model: nn.Module | None = None,
    clipping: float = 0.1,
    parameters: str = "nvme",
    **own: Any,
) -> infinity.Engine:
    place = {"device": "nvme", "nvme_path": str(nvme_path)} if nvme_path else {"device": "none"}
    held = place if parameters == "nvme" else {"device": parameters}
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": held,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 4096,
        },
        "infinity": {"pinned_bytes_max": "16MiB", "wrap": ["Linear"], "update": "forward", **own},
    }
    engine, *_ = infinity.initialize(model=model or Model(BLOCKS, WIDTH), config=config)
    return engine


@pytest.fixture
def both(nvme_path: Path) -> Iterator[list[infinity.Engine]]:
    """The same training in memory and on NVMe."""
    engines = [made(None), made(nvme_path)]
    yield engines
    for engine in engines:
        engine.close()


def step(engine: infinity.Engine, without: int | None = None) -> float:
    loss = engine(torch.ones(2, 8), without).float().square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def waiting(engine: infinity.Engine) -> int:
    assert engine.swap is not None
    return len(engine.swap.paged.updates.waiting)


def released(engine: infinity.Engine) -> dict[str, nn.Parameter]:
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(engine.module.named_parameters())


def weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor() + 0 for name, p in released(engine).items()}


def moments(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": engine.optimizer.state[p][key].full_tensor() + 0
        for name, p in released(engine).items()
        for key in ("exp_avg", "exp_avg_sq")
    }


def state_of_model(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    released(engine)
    return {name: value.full_tensor() + 0 for name, value in engine.state_dict().items()}


def evaluation(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    engine.eval()
    with torch.no_grad():
        value = engine(torch.ones(3, 8)).float()
    engine.train()
    return {"output": value}


@pytest.mark.parametrize("look", [weights, moments, state_of_model, evaluation])
def test_whoever_looks_sees_what_was_updated(
    both: list[infinity.Engine], look: Callable[[infinity.Engine], dict[str, torch.Tensor]]
) -> None:
    for _ in range(3):
        for engine in both:
            step(engine)
        assert waiting(both[1]) > 0
        expected, got = (look(engine) for engine in both)
        for name, value in expected.items():
            assert torch.equal(value, got[name]), name


def test_a_weight_set_by_hand_after_a_step_stays_as_it_was_set(both: list[infinity.Engine]) -> None:
    for engine in both:
        step(engine)
        weight = released(engine)["blocks.2.weight"]
        with torch.no_grad():
            weight.fill_(0.5)
    assert waiting(both[1]) > 0
    for _ in range(2):
        assert len({step(engine) for engine in both}) == 1
    for look in (weights, moments):
        expected, got = (look(engine) for engine in both)
        assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_a_checkpoint_right_after_a_step_holds_the_step(both: list[infinity.Engine], tmp_path: Path) -> None:
    memory, nvme = both
    for engine in both:
        step(engine)
    nvme.save_checkpoint(tmp_path)
    expected = [step(memory) for _ in range(3)]
    step(nvme)
    memory.load_checkpoint(tmp_path)
    assert [step(memory) for _ in range(3)] == expected
    nvme.load_checkpoint(tmp_path)
    assert [step(nvme) for _ in range(3)] == expected


def test_what_the_next_forward_leaves_out_is_updated_all_the_same(both: list[infinity.Engine]) -> None:
    for without in (None, 3, 1, 3, None):
        assert len({step(engine, without) for engine in both}) == 1
    expected, got = (weights(engine) for engine in both)
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_a_step_takes_the_gradients_and_a_forward_frees_them(both: list[infinity.Engine]) -> None:
    nvme = both[1]
    nvme.backward(nvme(torch.ones(2, 8)).float().square().mean())
    assert nvme.swap is not None
    held = nvme.swap.paging.waiting_gradients._held
    left = [p.grad for p in nvme.parameters() if not isinstance(p.grad._local_tensor, RefusingGradient)]  # type: ignore[union-attr]
    grads = [weakref.ref(each) for each in (*held.values(), *left)]
    del left
    nvme.step()
    assert all(p.grad is None for p in nvme.parameters())
    with torch.no_grad():
        nvme(torch.ones(2, 8))
    gc.collect()
    assert waiting(nvme) == 0
    assert all(grad() is None for grad in grads)


def test_a_read_that_fails_loses_no_update(both: list[infinity.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    memory, nvme = both
    for engine in both:
        step(engine)
    acquire, seen = Stager.acquire, iter(range(1000))

    def acquire_or_fail(self: Stager, chunk: Any) -> Any:
        if chunk.name.startswith("sub-group") and next(seen) == 3:
            raise infinity.IoError("read of rank0.arena: EIO", errno.EIO, "read")
        return acquire(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(Stager, "acquire", acquire_or_fail)
        with pytest.raises(infinity.IoError, match="EIO"):
            weights(nvme)
    for _ in range(2):
        assert step(nvme) == step(memory)
    expected, got = weights(memory), weights(nvme)
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_setting_weights_by_hand_forgets_what_stays_once(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(nvme_path)
    step(engine)
    assert engine.swap is not None
    weight = released(engine)["blocks.2.weight"]
    group = trained_shard(weight).group
    assert group.stays and len(engine.swap.paged.updates.of(group)) > 2
    started: list[object] = []
    start = ChunkIo.start_read

    def counting(io: ChunkIo, chunk: Chunk, *args: Any) -> Any:
        started.append(chunk)
        return start(io, chunk, *args)

    monkeypatch.setattr(ChunkIo, "start_read", counting)
    with torch.no_grad():
        weight.to_local().copy_(torch.zeros(WIDTH, WIDTH))  # type: ignore[attr-defined]
    assert group.chunk not in started  # the updates that waited took what it had, all of them
    engine.close()


def flip(engine: infinity.Engine, offset: int, *, back: bool = False) -> None:
    """The lowest bit of a byte of the arena, on the drive; what was read ahead of it is forgotten, or not when it is flipped
    back."""
    assert engine.swap is not None
    if not back:
        engine.swap.stager.settle_all()
        engine.swap.stager.drop_all()
    with arena_of(engine) as arena:
        (value,) = os.pread(arena.fileno(), 1, offset)
        os.pwrite(arena.fileno(), bytes([value ^ 1]), offset)


def arena_of(engine: infinity.Engine) -> Any:
    """Its file, opened again for ordinary reads and writes."""
    assert engine.swap is not None
    (file,) = engine.swap._open().arena.descriptors
    return Path(f"/proc/self/fd/{file}").open("r+b", buffering=0)


class Pending:
    """A copy event that fires at a wait."""

    fired = False

    def done(self) -> bool:
        return self.fired

    def wait(self) -> None:
        self.fired = True


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("at", [0, -1])
def test_a_page_that_an_update_finds_wrong_loses_no_update(
    both: list[infinity.Engine], at: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update verifies by itself what was read for it; its sub-group waits on, and the drive may be mended. `busy`: the
    device is, with copies out of the pool."""
    memory, nvme = both
    for _ in range(2):
        for engine in both:
            step(engine)
    assert nvme.swap is not None
    sub = list(nvme.swap.paged.updates.waiting)[2]
    assert sub.chunk.verified_by_caller
    (read,) = sub.chunk.reads
    offset = read.offset + at % read.nbytes
    flip(nvme, offset)
    with monkeypatch.context() as patch:
        if busy:
            patch.setattr(type(nvme.swap.stager.device), "copy_event", lambda device: Pending())
        with pytest.raises(infinity.IntegrityError, match="doesn't hold what was written there") as caught:
            nvme.swap.flush()
    assert sub.chunk.name in str(caught.value) and caught.value.page_offset == offset // 4096 * 4096
    assert sub in nvme.swap.paged.updates.waiting
    flip(nvme, offset, back=True)
    for _ in range(2):
        assert step(nvme) == step(memory)
    expected, got = weights(memory), weights(nvme)
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_an_optimizer_that_does_not_verify_has_it_done_before(
    both: list[infinity.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infinity.PagedAdam, "_step_and_verify", PagedOptimizer._step_and_verify)
    memory, nvme = both
    for engine in both:
        step(engine)
    assert nvme.swap is not None
    sub = list(nvme.swap.paged.updates.waiting)[2]
    flip(nvme, sub.extent.offset)
    with pytest.raises(infinity.IntegrityError, match="doesn't hold what was written there"):
        nvme.swap.flush()
    flip(nvme, sub.extent.offset)
    for _ in range(2):
        assert step(nvme) == step(memory)


@pytest.mark.parametrize("verifier", ["update", "engine"])
@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_what_an_update_wrote_is_summed(
    nvme_path: Path, update: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the update itself, or by the engine."""
    by_update: list[Any] = []
    update_in_one_pass = paged_adam.kernel.update

    def counted(*args: Any, **given: Any) -> Any:
        if "remainder" in given:
            by_update.append(given["sums"])
        return update_in_one_pass(*args, **given)

    monkeypatch.setattr(paged_adam.kernel, "update", counted)
    engine = made(nvme_path, clipping=0.0, update=update)
    assert engine.swap is not None
    if verifier == "engine":
        for sub in engine.swap.paged.sub_groups:
            sub.chunk.verified_by_caller = False
    for _ in range(3):
        step(engine)
    engine.swap.flush()
    split = [sub for sub in engine.swap.paged.sub_groups if sub.layout.split]
    assert len(by_update) == 3 * len(split)
    assert all((sums is None) == (verifier == "engine") for sums in by_update)
    for sub in split:
        engine.swap.stager.settle(sub.chunk)
        with arena_of(engine) as arena:
            stored = os.pread(arena.fileno(), sub.layout.nbytes, sub.extent.offset)
        assert page_checksums(stored) == engine.swap._open().arena.checksums(sub.extent.offset, sub.layout.nbytes)
    engine.close()


def make_updates_fail(patch: pytest.MonkeyPatch) -> None:
    """Those of masters that are split."""
    update_in_one_pass = paged_adam.kernel.update

    def fail(*args: Any, **given: Any) -> Any:
        if "master" in given:
            return update_in_one_pass(*args, **given)
        raise RuntimeError("the kernel failed")

    patch.setattr(paged_adam, "adam_", fail)
    patch.setattr(paged_adam.kernel, "update", fail)


def test_an_update_that_fails_before_its_write_still_waits(
    both: list[infinity.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, nvme = both
    for engine in both:
        step(engine)
    waited = waiting(nvme)

    with monkeypatch.context() as patch:
        make_updates_fail(patch)
        with pytest.raises(RuntimeError, match="the kernel failed"):
            nvme(torch.ones(2, 8))
    assert 0 < waiting(nvme) <= waited
    assert [step(nvme) for _ in range(2)] == [step(memory) for _ in range(2)]
    assert same(both, weights)


def test_a_flush_leaves_nothing_to_do(both: list[infinity.Engine]) -> None:
    nvme = both[1]
    step(nvme)
    assert nvme.swap is not None
    nvme.swap.flush()
    assert waiting(nvme) == 0
    assert step(nvme) == [step(both[0]) for _ in range(2)][1]


def test_closing_forgets_what_waits(nvme_path: Path) -> None:
    engine = made(nvme_path)
    step(engine)
    assert waiting(engine) > 0
    engine.close()
    assert waiting(engine) == 0


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_weights_full_of_ties_train_as_in_memory(nvme_path: Path, update: str) -> None:
    """A checkpoint in fp16 has a tie in every eighth weight: just half-way between two bf16 numbers."""

    def model() -> Model:
        model = Model(BLOCKS, WIDTH)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half().float())
        return model

    engines = [made(None, model(), 0.0), made(nvme_path, model(), 0.0, update=update)]
    assert engines[1].swap is not None
    assert sum(sub.ties.numel() for sub in engines[1].swap.paged.sub_groups) > 1000
    before = [weights(engine) for engine in engines]
    for name, value in before[0].items():
        assert torch.equal(value, before[1][name]), name
    for _ in range(3):
        assert len({step(engine, without=2) for engine in engines}) == 1  # some stay as they are
    expected, got = (weights(engine) for engine in engines)
    assert all(torch.equal(value, got[name]) for name, value in expected.items())
    for engine in engines:
        engine.close()


@pytest.fixture
def eager(nvme_path: Path) -> Iterator[list[infinity.Engine]]:
    """The same training in memory and on NVMe, where it is updated in the backward."""
    engines = [made(None, clipping=0.0), made(nvme_path, clipping=0.0, update="auto")]
    assert engines[1].swap is not None
    assert engines[1].swap.paging.options.update == "backward"
    yield engines
    for engine in engines:
        engine.close()


def backward(engine: infinity.Engine, without: int | None = None) -> None:
    engine.backward(engine(torch.ones(2, 8), without).float().square().mean())


def same(engines: list[infinity.Engine], look: Callable[[infinity.Engine], dict[str, torch.Tensor]]) -> bool:
    expected, got = (look(engine) for engine in engines)
    return all(torch.equal(value, got[name]) for name, value in expected.items())


def test_a_backward_takes_the_gradients_of_what_it_updates(eager: list[infinity.Engine]) -> None:
    for _ in range(3):
        for engine in eager:
            backward(engine)
        nvme = eager[1]
        assert nvme.swap is not None
        kept = {name for name, p in released(nvme).items() if not isinstance(p.grad._local_tensor, RefusingGradient)}  # type: ignore[union-attr]
        resident = {shard.name for shard in nvme.swap.paged.shards if shard.resident is not None}
        assert kept == resident
        for engine in eager:
            engine.step()
        assert eager[0].get_global_grad_norm() == nvme.get_global_grad_norm()
    assert same(eager, weights)
    assert same(eager, moments)


def test_what_has_no_gradient_or_is_used_twice_is_left_to_the_step(eager: list[infinity.Engine]) -> None:
    class Twice(nn.Module):
        """Uses its first block a second time."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, without: int | None) -> Any:
            h = self.model(x, without)
            return h + self.model.blocks[0](h)

    for number, without in enumerate((None, 3, 1, 3, None)):
        losses = []
        for engine in eager:
            loss = (Twice(engine.module) if number % 2 else engine)(torch.ones(2, 8), without).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert same(eager, weights)


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda engine, path: backward(engine), infinity.InfinityError, r"call step\(\) first.*infinity\.update"),
        (lambda engine, path: engine.zero_grad(), infinity.InfinityError, r"applied in the backward.*forward"),
        (lambda engine, path: engine.save_checkpoint(path), infinity.CheckpointError, r"middle of a step"),
        (
            lambda engine, path: (engine.optimizer.param_groups[0].update(lr=1.0), engine.step()),
            infinity.InfinityError,
            "other settings",
        ),
    ],
    ids=["another backward", "zero_grad", "a checkpoint", "another learning rate"],
)
def test_what_would_come_too_late_is_refused(
    eager: list[infinity.Engine], tmp_path: Path, act: Any, error: type[Exception], match: str
) -> None:
    nvme = eager[1]
    nvme.save_checkpoint(tmp_path, tag="before")
    expected = [step(nvme) for _ in range(2)]
    backward(nvme)
    with pytest.raises(error, match=match):
        act(nvme, tmp_path)
    released(nvme)
    nvme.load_checkpoint(tmp_path, tag="before")
    assert [step(nvme) for _ in range(2)] == expected


def test_accumulation_by_hand_is_refused(eager: list[infinity.Engine]) -> None:
    with pytest.raises(infinity.ConfigError, match=r"accumulated.*forward"):
        eager[1].set_gradient_accumulation_boundary(False)


def test_a_weight_set_by_hand_before_a_backward_is_what_it_updates(eager: list[infinity.Engine]) -> None:
    """Its state may have been read ahead."""
    for _ in range(3):
        for engine in eager:
            loss = engine(torch.ones(2, 8)).float().square().mean()
            with torch.no_grad():
                released(engine)["blocks.4.weight"].fill_(0.25)
            engine.backward(loss)
            engine.step()
    assert same(eager, weights)


def test_a_kernel_that_fails_in_the_backward_tears_the_values(
    eager: list[infinity.Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme = eager[1]
    nvme.save_checkpoint(tmp_path)
    expected = step(nvme)
    weights(nvme)  # nothing waits for the forward now

    with monkeypatch.context() as patch:
        make_updates_fail(patch)
        with pytest.raises(RuntimeError, match="the kernel failed"):
            backward(nvme)
    with pytest.raises(infinity.InfinityError, match=r"torn.*the kernel failed.*load a checkpoint"):
        weights(nvme)
    released(nvme)
    nvme.load_checkpoint(tmp_path)
    assert step(nvme) == expected


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_what_is_forgotten_is_collected_with_its_files(nvme_path: Path, update: str, closed: bool) -> None:
    engine = made(nvme_path, clipping=0.0, update=update)
    step(engine)  # which leaves updates that wait
    if closed:
        engine.close()
    left = [weakref.ref(each) for each in (engine, engine.module, engine.optimizer, engine.swap)]
    paged = weakref.ref(engine.swap.paged)  # type: ignore[union-attr]
    del engine
    for _ in range(3):  # what tensors hold is seen when they are gone
        gc.collect()
    assert [each() for each in (*left, paged)] == [None] * 5
    assert not [*nvme_path.iterdir()]


def test_a_forward_without_a_backward_keeps_no_file(nvme_path: Path) -> None:
    engine = made(nvme_path, offload_activations={"device": "nvme", "buffer_bytes": "4MiB"})
    engine(torch.ones(2, 8))
    del engine
    for _ in range(3):
        gc.collect()
    assert not [*nvme_path.iterdir()]


@pytest.fixture(params=["step", "forward"])
def early(request: pytest.FixtureRequest, nvme_path: Path) -> Iterator[list[infinity.Engine]]:
    """The same training in memory and on NVMe after two steps and a backward, which read the first state ahead."""
    engines = [made(None), made(nvme_path, update=request.param)]
    for engine in engines:
        for _ in range(2):
            step(engine)
        written_and_backward(engine)
    assert read_ahead(engines[1])
    yield engines
    for engine in engines:
        engine.close()


def written_and_backward(engine: infinity.Engine, without: int | None = None) -> None:
    """Of a step, when all updates before it are written."""
    loss = engine(torch.ones(2, 8), without).float().square().mean()
    if engine.swap is not None:
        engine.swap.stager.settle_all()
    engine.backward(loss)


def read_ahead(engine: infinity.Engine) -> list[Any]:
    """The sub-groups whose state is in the pool, or on its way there."""
    assert engine.swap is not None
    states = (ChunkState.READING, ChunkState.STAGED)
    return [sub for sub in engine.swap.paged.sub_groups if sub.chunk.state in states]


def go_on_as_in_memory(engines: list[infinity.Engine]) -> None:
    for engine in engines:
        engine.step()
    assert len({step(engine) for engine in engines}) == 1
    for look in (weights, moments):
        expected, got = (look(engine) for engine in engines)
        assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_what_a_backward_read_ahead_a_step_does_not_read_again(
    early: list[infinity.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme = early[1]
    assert waiting(nvme) == 0
    before = {sub.chunk.name for sub in read_ahead(nvme)}
    start, read = Stager._start_read, []

    def start_and_note(self: Stager, chunk: Any, *args: Any) -> None:
        if waiting(nvme):  # the rest is for the next step
            read.append(chunk.name)
        start(self, chunk, *args)

    assert nvme.swap is not None
    with monkeypatch.context() as patch:
        patch.setattr(Stager, "_start_read", start_and_note)
        for engine in early:
            engine.step()
        nvme.swap.flush()
    stepped = [sub.chunk.name for sub in nvme.swap.paged.sub_groups if sub.moves and sub.layout.trained]
    assert sorted(each for each in read if each.startswith("sub-group")) == sorted(set(stepped) - before)
    assert len({step(engine) for engine in early}) == 1


def test_what_is_set_by_hand_before_a_step_is_what_it_steps(early: list[infinity.Engine]) -> None:
    name = next(iter(released(early[1])))
    shard = trained_shard(released(early[1])[name])
    assert set(shard.sub_groups) <= set(read_ahead(early[1]))
    for engine in early:
        weight = released(engine)[name]
        with torch.no_grad():
            weight.fill_(0.5)
    assert not set(shard.sub_groups) & set(read_ahead(early[1]))
    go_on_as_in_memory(early)


def test_so_is_a_moment(early: list[infinity.Engine]) -> None:
    for engine in early:
        first = next(iter(released(engine).values()))
        engine.optimizer.state[first]["exp_avg"].fill_(0.25)
    go_on_as_in_memory(early)


@pytest.mark.parametrize("form", ["dcp", "arena"])
def test_a_checkpoint_that_is_loaded_instead_of_a_step_takes_its_place(
    form: str, nvme_path: Path, tmp_path: Path
) -> None:
    engine = made(nvme_path, update="step", checkpoint_format=form)
    with engine:
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(tmp_path)
        engine.finish_checkpoint()
        expected = [step(engine) for _ in range(3)]
        written_and_backward(engine)
        assert read_ahead(engine)
        engine.load_checkpoint(tmp_path)
        assert [step(engine) for _ in range(3)] == expected


def test_state_whose_gradients_wait_on_the_drive_is_read_with_them(nvme_path: Path) -> None:
    engines = [made(None), made(nvme_path, update="step", gradient_bytes_max=0)]
    for engine in engines:
        for _ in range(2):
            step(engine)
        written_and_backward(engine)
    assert engines[1].swap is not None
    assert engines[1].swap.paged.sub_groups[0].gradient_extent is not None
    assert not read_ahead(engines[1])
    go_on_as_in_memory(engines)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("update", ["step", "forward"])
def test_state_that_no_step_takes_is_not_read(update: str, nvme_path: Path) -> None:
    with made(nvme_path, update=update) as engine:
        for _ in range(2):
            step(engine, without=0)
        written_and_backward(engine, without=0)
        ahead = {piece.shard for sub in read_ahead(engine) for piece in sub.layout.pieces}
        unused = {
            trained_shard(p).index for n, p in engine.module.named_parameters() if n.startswith("blocks.0.weight")
        }
        assert ahead and unused and not ahead & unused


def test_where_parameters_stay_in_host_memory_state_is_read_before_the_step_too(nvme_path: Path) -> None:
    engines = [made(None), made(nvme_path, parameters="cpu", update="step")]
    for engine in engines:
        for _ in range(2):
            step(engine)
        written_and_backward(engine)
    assert read_ahead(engines[1])
    go_on_as_in_memory(engines)
    for engine in engines:
        engine.close()


def test_an_evaluation_before_the_step_may_take_its_room(early: list[infinity.Engine]) -> None:
    expected, got = (evaluation(engine)["output"] for engine in early)
    assert torch.equal(expected, got)
    go_on_as_in_memory(early)
