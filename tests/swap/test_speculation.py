"""Updates in the backward that the step accepts or discards: the numbers are those of memory, whatever it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Model, batch, sharded
from quiet import come_to_rest
from staying import SHARES, share_of, staying
from torch import nn
from worse_drives import FaultPlan, worse_drives

import infinity
from infinity import PagingOptions
from infinity.optim.hosted import Stepper
from infinity.schedule.scheme import APART
from infinity.store.layout import Field
from infinity.swap.health import Health
from infinity.swap.hosted_optimizer import HostedOptimizer
from infinity.swap.paged_optimizer import PagedOptimizer
from infinity.swap.pending_updates import Speculation
from infinity.swap.sub_group import PagedSubGroup

pytestmark = pytest.mark.usefixtures("one_rank")

ACCEPTED, CLIPPED, SKIPPED = 1.0, 0.37, None


def options(**own: Any) -> PagingOptions:
    defaults: dict[str, Any] = {
        "sub_group_size": 2048,
        "param_persistence_threshold": 0,
        "gradient_dtype": torch.bfloat16,
    }
    return PagingOptions(**{**defaults, "update": "backward", "speculative": True, **own})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    factors: Iterable[float | None],
    micro_batches: int = 1,
    twice: bool = False,
) -> Iterator[float]:
    """One step for each of the factors: what the gradients are multiplied by; None skips the step."""
    for number, factor in enumerate(factors):
        for micro_batch in range(micro_batches):
            if isinstance(optimizer, PagedOptimizer):
                optimizer.expect(1.0 if micro_batch == micro_batches - 1 else None)
            loss = model(batch(10 * number + micro_batch), twice=twice).float().square().mean()
            loss.backward()
            yield loss.item()
        if isinstance(optimizer, PagedOptimizer):
            optimizer.skip() if factor is None else optimizer.step(grad_scale=factor)
        elif factor is not None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            optimizer.step()
        optimizer.zero_grad()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All weights and moments."""
    states = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    moments = [of[name].full_tensor() + 0 for of in states for name in sorted(of) if of[name].dim()]
    return [*(p.detach().full_tensor() + 0 for p in model.parameters()), *moments]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def updated_early(swap: infinity.SwapManager) -> int:
    """How many sub-groups the backward updates: all but those that are left to the forward."""
    return sum(sub.layout.index % APART != APART - 1 for sub in swap.paged.sub_groups)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sub-groups each step accepts."""
    counts: list[int] = []
    accept = Speculation.accept

    def counting(self: Speculation, inputs: Mapping[int, Any], grad_scale: float) -> set[PagedSubGroup]:
        accepted = accept(self, inputs, grad_scale)
        counts.append(len(accepted))
        return accepted

    monkeypatch.setattr(Speculation, "accept", counting)
    return counts


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "SGD that changes gradients", "RMSprop", "Adagrad"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"micro_batches": 3, "gradient_dtype": torch.float32},
        {"twice": True},
        {"host_cache_bytes": 20_000},
        {"param_persistence_threshold": 1000, "master_weights": "full"},
        {"gradient_bytes_max": 9000},
    ],
    ids=["plain", "accumulated", "used twice", "partly cached", "some resident", "some gradients on NVMe"],
)
def test_whatever_the_step_does_the_numbers_are_those_of_memory(
    how: dict[str, Any], kind: str, nvme_path: Path, accepted: list[int]
) -> None:
    if "changes" in kind:
        how = {"gradient_dtype": torch.float32, **how}
    passes = {name: how[name] for name in ("micro_batches", "twice") if name in how}
    paging = {name: value for name, value in how.items() if name not in passes}
    factors = [ACCEPTED, ACCEPTED, CLIPPED, ACCEPTED, SKIPPED, CLIPPED, CLIPPED, *[ACCEPTED] * 5]

    def made(parameters: Any) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {"weight_decay": 0.1}
        if kind.startswith("SGD"):
            settings |= {"momentum": 0.9, "nesterov": True}
        if "changes" in kind:  # adds the momentum to `.grad` itself
            settings |= {"weight_decay": 0.0, "foreach": True}
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind.split()[0])(parameters, lr=1e-2, **settings)
        return optimizer

    memory = sharded()
    oracle = made(memory.parameters())
    expected = [*train(memory, oracle, factors, **passes)]
    stepper = Stepper(made([nn.Parameter(torch.zeros(1))]))
    moments = ("exp_avg", "exp_avg_sq") if kind == "AdamW" else stepper.moments
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        with staying(share_of((how, kind))):
            swap.page(nvme, options(moments=moments, **paging))
        optimizer: PagedOptimizer
        if kind == "AdamW":
            optimizer = infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2, weight_decay=0.1)
        else:
            optimizer = HostedOptimizer(nvme.parameters(), swap=swap, like=stepper)
        assert [*train(nvme, optimizer, factors, **passes)] == expected
        assert_same(state(nvme, optimizer), state(memory, oracle))
    subs = updated_early(swap)
    if not paging and not passes:
        assert accepted == [
            subs,
            subs,
            0,
            subs,
            0,
            0,
            0,
            0,
            0,
            subs,
            subs,
        ]  # how the policy learns: test_speculation_policy.py
    assert max(accepted) > 0


@pytest.mark.parametrize("masters", ["split", "full"])
@pytest.mark.parametrize("way", ["step", "forward", "backward", "speculative"])
def test_of_what_stays_a_step_reads_the_other_state_alone(way: str, masters: str, nvme_path: Path) -> None:
    """In every kind of update, for a gather and for a look at the values."""
    how: dict[str, Any] = {"update": "backward"} if way == "speculative" else {"update": way, "speculative": False}
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        swap.page(nvme, options(master_weights=masters, **how))
        root, *blocks = swap.paged.groups
        assert all(group.stays for group in blocks)  # the root is gathered once, and perhaps of what its update makes
        optimizer = infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2)
        other = sum(sub.layout.nbytes - sub.layout.field_bytes(Field.COMPUTE) for sub in swap.paged.sub_groups)
        for number in range(8):
            before = swap.stats().read_bytes
            optimizer.expect(ACCEPTED)
            nvme(batch(number)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number > 4:
                swap.paging.finish_updates()  # as a look at all weights does
            come_to_rest(swap)
            read = swap.stats().read_bytes - before
            if number in (3, 4):
                assert read == swap.paging.policy.step_bytes(1, None)[0] == other
            if number in (6, 7):  # the first look makes updates that the next step would
                assert read == other + (0 if root.stays else root.fetched_bytes)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("factor", [ACCEPTED, CLIPPED, SKIPPED])
@pytest.mark.parametrize("masters", ["split", "full"])
def test_what_stays_is_the_step_befores_until_the_step_accepts_it(
    masters: str, factor: float | None, share: float, nvme_path: Path
) -> None:
    """A look between backward and step sees the old values; a look after the step sees the new ones."""
    memory, looks = sharded(), []
    oracle = torch.optim.AdamW(memory.parameters(), lr=1e-2)

    def look(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            seen: torch.Tensor = model(batch(99))
        model.reshard()  # type: ignore[operator]  # FSDP2 would keep the root as it is now beyond the step
        return seen

    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        with staying(share):
            swap.page(nvme, options(master_weights=masters))
        optimizer = infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2)
        for factors in ([ACCEPTED], [factor], [ACCEPTED]):
            steps = [train(model, each, factors) for model, each in ((memory, oracle), (nvme, optimizer))]
            old = look(memory)
            assert next(steps[0]) == next(steps[1])
            early = [group.chunk.early for group in swap.paged.groups if group.chunk is not None]
            assert any(early) == (share > 0)
            assert torch.equal(look(nvme), old)
            assert [[*step] for step in steps] == [[], []]
            looks.append(look(memory))
            assert torch.equal(look(nvme), looks[-1])
        assert_same(state(nvme, optimizer), state(memory, oracle))
    assert torch.equal(looks[0], looks[1]) == (factor is SKIPPED)


@pytest.mark.parametrize("seed", range(18))
def test_a_transfer_that_fails_leaves_the_step_before_or_refuses(seed: int, nvme_path: Path) -> None:
    factors = [ACCEPTED, CLIPPED, ACCEPTED, ACCEPTED, CLIPPED, ACCEPTED]
    memory = sharded()
    oracle = torch.optim.AdamW(memory.parameters(), lr=1e-2)
    expected = [*train(memory, oracle, factors)]
    faults = FaultPlan(io=0.004, seed=seed, after_blocks=40)
    with (
        worse_drives(faults=faults),
        contextlib.suppress(OSError),  # a write that fails at the end
        infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap,
    ):
        nvme = sharded()
        swap.page(nvme, options(master_weights="split" if seed < 12 else "full"))
        optimizer = infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2)
        done, failed = 0, 0
        while done < len(factors):
            try:
                optimizer.expect(1.0)
                loss = nvme(batch(10 * done)).float().square().mean()
                loss.backward()
                optimizer.step(grad_scale=factors[done])
            except (OSError, infinity.InfinityError):
                failed += 1
                if swap.paged.health.state is not Health.WHOLE:
                    with pytest.raises(infinity.InfinityError):
                        optimizer.step()
                    return
                optimizer.zero_grad()
                continue
            assert loss.item() == expected[done]
            done += 1
        print("survived", seed, failed)
        assert_same(state(nvme, optimizer), state(memory, oracle))


@pytest.mark.parametrize("meddle", ["the learning rate", "a weight", "a moment"])
def test_what_changes_between_backward_and_step_counts(meddle: str, nvme_path: Path, accepted: list[int]) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for number in range(4):
            if isinstance(optimizer, PagedOptimizer):
                optimizer.expect(1.0)
            model(batch(number)).float().square().mean().backward()
            if number == 2:
                weight = model.blocks[1].weight  # type: ignore[union-attr,index]
                if meddle == "the learning rate":
                    optimizer.param_groups[0]["lr"] = 3e-3
                else:
                    changed = weight if meddle == "a weight" else optimizer.state[weight]["exp_avg"]
                    with torch.no_grad():
                        changed.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return state(model, optimizer)

    memory = sharded()
    expected = run(memory, torch.optim.AdamW(memory.parameters(), lr=1e-2))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        swap.page(nvme, options())
        assert_same(run(nvme, infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2)), expected)
        subs = updated_early(swap)
    assert accepted[:2] == [subs, subs] and accepted[3] == subs
    assert accepted[2] == 0 if meddle == "the learning rate" else 0 < accepted[2] < subs


def test_a_parameter_that_leaves_between_backward_and_step_is_not_stepped_with_others(
    nvme_path: Path, accepted: list[int]
) -> None:
    """Of the two parameters of a sub-group that was updated early."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for number in range(2):
            if isinstance(optimizer, PagedOptimizer):
                optimizer.expect(1.0)
            model(batch(number)).float().square().mean().backward()
            if number == 1:
                of_biases = {id(block.bias) for block in model.blocks}  # type: ignore[union-attr]
                group = optimizer.param_groups[0]
                group["params"] = [p for p in group["params"] if id(p) not in of_biases]
            optimizer.step()
            if number == 0:
                optimizer.zero_grad()
        return [p.detach().full_tensor() + 0 for p in model.parameters()]  # type: ignore[attr-defined]

    memory = sharded()
    expected = run(memory, torch.optim.AdamW(memory.parameters(), lr=1e-2))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        swap.page(nvme, options(sub_group_size=1 << 16))
        assert_same(run(nvme, infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2)), expected)
    assert accepted[1] < accepted[0]


def test_a_loop_that_sets_the_rate_before_each_step_is_not_updated_ahead_for_long(nvme_path: Path) -> None:
    ahead = []
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        swap.page(nvme, options())
        optimizer = infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2)
        for number in range(7):
            optimizer.expect(1.0)
            nvme(batch(number)).float().square().mean().backward()
            ahead.append(len([*swap.paged.updates.speculation]))
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()
        subs = updated_early(swap)
    assert ahead == [subs, subs, 0, 0, 0, subs, subs]


@pytest.mark.parametrize(
    "paging",
    [{}, {"host_cache_bytes": 20_000}, {"gradient_bytes_max": 9000}, {"param_persistence_threshold": 1000}],
    ids=str,
)
def test_what_is_not_updated_ahead_has_one_slot(paging: dict[str, int], nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(sharded(), options(**paging))
        slots = {sub: len(sub.slots) for sub in swap.paged.sub_groups}
        for sub, count in slots.items():
            resident = sub.layout.space == swap.paged.layout.resident_space
            left = sub.layout.index % APART == APART - 1 and "gradient_bytes_max" not in paging
            waits = left or sub.rests_in_host or sub.gradient_extent is not None or resident
            assert count == (1 if waits else 2)
        assert {*slots.values()} == {1, 2}
        taken = sum(count * sub.layout.nbytes + sub.layout.gradient_bytes for sub, count in slots.items())
        assert swap.stats().arena_bytes == taken


@pytest.mark.parametrize("missing", range(4))
def test_state_that_was_read_for_a_group_which_a_step_left_out_is_whole_in_the_next(
    missing: int, nvme_path: Path
) -> None:
    """It was read without the compute parameter, as for an update in the backward; then steps clip, and updates wait."""
    steps = [
        (ACCEPTED, None),
        (CLIPPED, None),
        (ACCEPTED, None),
        (CLIPPED, missing),
        (CLIPPED, missing),
        (CLIPPED, None),
    ]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for number, (factor, without) in enumerate(steps):
            if isinstance(optimizer, PagedOptimizer):
                optimizer.expect(1.0)
            model(batch(number), without=without).float().square().mean().backward()
            if isinstance(optimizer, PagedOptimizer):
                optimizer.step(grad_scale=factor)
            else:
                if factor != 1.0:
                    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], factor)
                optimizer.step()
            optimizer.zero_grad()
        return state(model, optimizer)

    memory = sharded()
    expected = run(memory, torch.optim.SGD(memory.parameters(), lr=1e-2, momentum=0.9))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="64MiB", checksums=False) as swap:
        nvme = sharded()
        stepper = Stepper(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2, momentum=0.9))
        swap.page(nvme, options(moments=stepper.moments))
        assert_same(run(nvme, HostedOptimizer(nvme.parameters(), swap=swap, like=stepper)), expected)


@pytest.mark.parametrize("format", ["dcp", "arena"])
def test_a_checkpoint_holds_what_was_accepted(format: str, nvme_path: Path, tmp_path: Path) -> None:
    def made(place: str) -> infinity.Engine:
        device = {"device": place, "nvme_path": str(nvme_path / place)} if place == "nvme" else {"device": "none"}
        (nvme_path / place).mkdir(exist_ok=True)
        config = {
            "bf16": {"enabled": True},
            "gradient_clipping": 1e3,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": device,
                "offload_optimizer": device,
                "stage3_param_persistence_threshold": 0,
                "sub_group_size": 2048,
            },
            "infinity": {"pinned_bytes_max": "16MiB", "wrap": ["Linear"]}
            | ({"update": "backward"} if place == "nvme" else {}),
        }
        engine, *_ = infinity.initialize(model=Model(), config=config)
        return engine

    def step(engine: infinity.Engine) -> float:
        loss = engine(batch(engine.global_steps)).float().square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    with made("memory") as engine:
        expected = [step(engine) for _ in range(6)]
    with made("nvme") as engine:
        assert [step(engine) for _ in range(3)] == expected[:3]
        engine.save_checkpoint(tmp_path, format=format)
        assert [step(engine) for _ in range(2)] == expected[3:5]
        engine.load_checkpoint(tmp_path)
        assert [step(engine) for _ in range(3)] == expected[3:]
    with made("nvme") as engine:
        engine.load_checkpoint(tmp_path)
        assert [step(engine) for _ in range(3)] == expected[3:]
