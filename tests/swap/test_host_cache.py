"""What the host cache promises: it holds what spares most, field by field, and never more than it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.device import Device
from infinity.schedule.scheme import Scheme
from infinity.store.layout import SPACE_ALIGN, Cached, Field, Layout, PartKey, Shard, plan_layout
from infinity.swap.plan import plan_cache

IN_STEP = Scheme("full", "step")
PAGE = 4096


def laid_out(shards: list[Shard], *, groups: int, cached: dict[PartKey, Cached] | None = None, **how: object) -> Layout:
    settings = {"compute_itemsize": 2, "sub_group_numel_max": 4 * SPACE_ALIGN, "matrix_moments": 1, **how}
    return plan_layout(shards, groups=groups, cached=cached, **settings)  # type: ignore[arg-type]


def pages(count: int, group: int, **how: bool) -> Shard:
    return Shard(f"p{group}{how}", group, count * SPACE_ALIGN, **how)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Shard], dict[str, object]]:
    groups = draw(st.integers(1, 4))
    shards = [
        Shard(
            f"p{i}",
            draw(st.integers(0, groups - 1)),
            draw(st.integers(0, 10 * SPACE_ALIGN)),
            trained := draw(st.booleans()),
            draw(st.booleans()),
            whole=trained and draw(st.booleans()),
        )
        for i in range(draw(st.integers(1, 8)))
    ]
    compute_itemsize, hold_state = draw(st.sampled_from([(2, False), (0, False), (2, True), (4, True)]))
    return shards, {"groups": groups, "compute_itemsize": compute_itemsize, "hold_state": hold_state}


@given(model=models(), cache_bytes=st.integers(0, 1 << 21), gathers=st.lists(st.integers(1, 2), min_size=4, max_size=4))
def test_no_more_is_cached_than_there_is_room_for(
    model: tuple[list[Shard], dict[str, object]], cache_bytes: int, gathers: list[int]
) -> None:
    shards, how = model
    plain = laid_out(shards, **how)  # type: ignore[arg-type]
    layout = laid_out(shards, cached=plan_cache(plain, IN_STEP, gathers, cache_bytes), **how)  # type: ignore[arg-type]
    assert layout.cached_bytes <= cache_bytes
    assert layout.nbytes + layout.cached_bytes == plain.nbytes


@given(model=models())
def test_with_room_for_all_of_it_no_step_reads_or_writes(model: tuple[list[Shard], dict[str, object]]) -> None:
    shards, how = model
    layout = laid_out(shards, cached=plan_cache(laid_out(shards, **how), IN_STEP, [2] * 4, 1 << 40), **how)  # type: ignore[arg-type]
    for sub in layout.sub_groups:
        gathered = [] if sub.space == layout.resident_space else [sub.gathered]
        assert not sub.trained or not sub.nbytes
        assert sub.trained or not set(gathered) & set(sub.on_nvme)  # frozen: unread masters stay on the drive


def test_copies_come_first_then_those_of_groups_that_are_gathered_once_then_state() -> None:
    shards = [pages(2, 0), pages(3, 1), pages(3, 2)]
    plain = laid_out(shards, groups=3)

    def kept(cache_bytes: int) -> list[tuple[int, int]]:
        found = plan_cache(plain, IN_STEP, [1, 2, 2], cache_bytes)
        return [
            (
                found[PartKey(space, True)].gathered_numel // SPACE_ALIGN,
                found[PartKey(space, True)].state_numel // SPACE_ALIGN,
            )
            for space in range(3)
        ]

    assert kept(4 * PAGE) == [(0, 0), (3, 0), (1, 0)]
    assert kept(7 * PAGE) == [(1, 0), (3, 0), (3, 0)]
    assert kept(8 * PAGE + 5 * PAGE) == [(2, 0), (3, 0), (3, 0)]  # no page of each field of the state fits in five
    assert kept(8 * PAGE + 6 * PAGE) == [(2, 1), (3, 0), (3, 0)]


def test_of_resident_shards_masters_and_moments_are_kept_together() -> None:
    found = plan_cache(laid_out([pages(3, 0, resident=True)], groups=1), IN_STEP, [2], 2 * 6 * PAGE)
    assert found[PartKey(1, True)] == Cached(2 * SPACE_ALIGN, 2 * SPACE_ALIGN)


def test_whole_matrices_stay_whole() -> None:
    shards = [Shard(f"m{i}", 0, 3 * SPACE_ALIGN, whole=True) for i in range(3)]
    plain = laid_out(shards, groups=1)
    for pages_each, matrices in ((2, 0), (3, 1), (8, 2), (9, 3)):  # what is gathered, a page of each unit
        found = plan_cache(plain, IN_STEP, [2], pages_each * PAGE)
        assert found == {PartKey(0, True, True): Cached(3 * matrices * SPACE_ALIGN, 0)}
        layout = laid_out(shards, groups=1, cached=found)
        assert [len(sub.pieces) for sub in layout.sub_groups if Field.COMPUTE in sub.cached] == [1] * matrices


def test_where_the_master_is_gathered_it_comes_before_the_moments() -> None:
    layout = laid_out([pages(2, 0)], groups=1, compute_itemsize=0)
    cached = plan_cache(layout, IN_STEP, [2], 4 * PAGE)
    (sub,) = laid_out([pages(2, 0)], groups=1, compute_itemsize=0, cached=cached).sub_groups
    assert (sub.cached, sub.on_nvme) == ((Field.MASTER,), (Field.MOMENT_1, Field.MOMENT_2))


def model_of(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(hidden, hidden), nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(4))))


def started(
    nvme_path: Path, cache_bytes: int, *, hidden: int = 64, pinned_bytes: int | str = "auto", update: str = "auto"
) -> infinity.Engine:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
        },
        "infinity": {
            "wrap": ["Linear"],
            "host_cache_bytes": cache_bytes,
            "pinned_bytes_max": pinned_bytes,
            "update": update,
        },
    }
    return infinity.initialize(model=model_of(hidden), config=config)[0]


def step(engine: infinity.Engine) -> float:
    loss = engine(torch.ones(2, 64)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


class LateLanding:
    """The device copies when it is asked whether it has: the bytes must still be those it was given."""

    def __init__(self, taken: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.taken = taken

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        for staged, taken in self.taken:
            assert torch.equal(staged, taken), "bytes changed before the device had copied them"
        self.taken.clear()


class LateIncoming:
    def __init__(self, taken: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.copy_event = LateLanding(taken)
        self.tensor = taken[-1][1]

    def on_device(self) -> torch.Tensor:
        return self.tensor


class LateDevice(Device):
    is_discrete = True

    def __init__(self) -> None:
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start_h2d(self, staged: torch.Tensor) -> LateIncoming:
        self.taken.append((staged, staged.clone()))
        return LateIncoming(self.taken)

    def copy_event(self) -> LateLanding:
        return LateLanding(self.taken)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_cached_copies_are_stepped_once_the_device_has_them(
    nvme_path: Path, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(nvme_path, 1 << 30, update=update) as engine:
        assert engine.swap is not None
        late = LateDevice()
        monkeypatch.setattr(engine.swap.stager, "device", late)
        for _ in range(3):
            loss = engine(torch.ones(2, 64)).float().square().mean()
            assert late.taken
            engine.backward(loss)
            engine.step()
            assert not late.taken


@pytest.mark.usefixtures("one_rank")
def test_cache_is_a_part_of_the_pinned_budget(nvme_path: Path) -> None:
    with started(nvme_path, 0) as engine:
        plain = engine.swap_stats()
    with started(nvme_path, 100_000) as engine:
        step(engine)
        stats = engine.swap_stats()
    assert plain is not None and stats is not None
    assert 0 < stats.cached_bytes <= 100_000
    assert stats.arena_bytes == plain.arena_bytes - stats.cached_bytes
    assert stats.pinned_peak_bytes <= stats.pinned_bytes
    with pytest.raises(infinity.BudgetError, match="host_cache_bytes"):
        started(nvme_path, 8 << 20, hidden=512, pinned_bytes="8MiB")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("cache_bytes", [100_000, 1 << 30])
def test_checkpoint_holds_what_is_cached(nvme_path: Path, tmp_path: Path, cache_bytes: int) -> None:
    with started(nvme_path, cache_bytes) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path)
        expected = [step(engine) for _ in range(3)]
        engine.load_checkpoint(tmp_path)
        assert [step(engine) for _ in range(3)] == expected
    with started(nvme_path, 0) as engine:
        engine.load_checkpoint(tmp_path)
        assert [step(engine) for _ in range(3)] == expected
    with pytest.raises(infinity.InfinityError, match="closed"):
        next(iter(engine.module.parameters())).data.clone()
