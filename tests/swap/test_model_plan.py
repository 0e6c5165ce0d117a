"""What the plan of a model promises: what stays is what was asked for, and the pool is the budget or all that is needed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from infinity.errors import BudgetError, ConfigError
from infinity.fsdp2.sharding import GroupOutline, ParameterOutline
from infinity.schedule import pinned
from infinity.store.layout import SPACE_ALIGN, Field, Layout
from infinity.swap.options import PagingOptions
from infinity.swap.plan import ModelOutline, ModelPlan, plan_model
from infinity.units import MIB

ROWS = 64 * SPACE_ALIGN
"""Elements of each large parameter."""

NOTHING_ASKED: dict[str, Any] = {
    "sub_group_size": None,
    "param_persistence_threshold": 0,
    "max_in_cpu": 0,
    "host_cache_bytes": 0,
    "update": "step",
    "master_weights": "split",
    "hold_parameters": False,
    "hold_state": False,
    "gradient_dtype": torch.float32,
    "gradient_bytes_max": None,
}
GROUPS = [
    GroupOutline(
        f"blocks.{index}",
        (
            ParameterOutline(f"blocks.{index}.weight", torch.Size([ROWS, 1]), trained=True),
            ParameterOutline(f"blocks.{index}.bias", torch.Size([8]), trained=True),
        ),
        gathers=2,
    )
    for index in range(4)
]


def planned(pinned_bytes: int | None = None, ranks: int = 1, memory_bytes: float = math.inf, **asked: Any) -> ModelPlan:
    outline = ModelOutline([replace(group, ranks=ranks) for group in GROUPS], torch.bfloat16)
    return plan_model(outline, PagingOptions(**NOTHING_ASKED | asked), pinned_bytes, memory_bytes)


def resident(layout: Layout) -> list[str]:
    return [shard.name for shard in layout.shards if shard.resident]


def test_small_parameters_stay_then_so_many_elements_of_the_first_groups() -> None:
    assert resident(planned().layout) == []
    biases = [f"blocks.{index}.bias" for index in range(4)]
    assert resident(planned(param_persistence_threshold=9).layout) == biases
    layout = planned(param_persistence_threshold=9, max_in_cpu=2 * ROWS + 7).layout
    assert resident(layout) == ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", *biases[1:]]
    assert len(resident(planned(hold_parameters=True).layout)) == 8


def test_host_memory_has_all_of_a_model_that_is_not_on_nvme() -> None:
    """Compute parameters in the pool, exactly; the other half of a split master and the moments in memory that isn't pinned."""
    layout, pinned_bytes, _ = planned(hold_parameters=True, hold_state=True)
    assert layout.nbytes == 0 and resident(layout) == []
    gathered = sum(2 * sub.numel for members in layout.by_space for sub in members)
    assert layout.cached_bytes == gathered and pinned_bytes == gathered + pinned.ACCESS_BYTES
    held = sum(sub.field_bytes(name) for sub in layout.sub_groups for name in sub.fields if name in sub.held)
    assert held == 10 * gathered // 2
    assert planned(hold_parameters=True, hold_state=True, max_in_cpu=10**9).layout == layout
    with pytest.raises(BudgetError, match=rf"that stay in it .* {pinned_bytes} bytes .* leave it .auto"):
        planned(pinned_bytes - 1, hold_parameters=True, hold_state=True)
    with pytest.raises(ConfigError, match="set hold_parameters and hold_state"):
        planned(hold_parameters=True, keep_on_device=True)
    with pytest.raises(BudgetError, match=r"of masters and optimizer state are more than .* put them on NVMe"):
        planned(memory_bytes=pinned_bytes + held - 1, hold_parameters=True, hold_state=True)
    planned(memory_bytes=pinned_bytes + held, hold_parameters=True, hold_state=True)


@pytest.mark.parametrize(("dtype", "trained", "nbytes"), [(torch.float32, True, 12), (torch.bfloat16, False, 4)])
def test_host_memory_holds_no_value_twice(dtype: torch.dtype, trained: bool, nbytes: int) -> None:
    groups = [
        replace(group, parameters=tuple(replace(each, trained=trained) for each in group.parameters))
        for group in GROUPS
    ]
    options = PagingOptions(**NOTHING_ASKED | {"hold_parameters": True, "hold_state": True})
    layout = plan_model(ModelOutline(groups, dtype), options, None, math.inf).layout
    for sub in layout.sub_groups:
        assert {*sub.fields} == {*sub.cached} | ({*sub.fields} & {*sub.held}) and not {*sub.cached} & {*sub.held}
        assert sum(sub.itemsize(name) for name in sub.fields) == nbytes


def test_all_the_small_parameters_that_stay_are_bounded() -> None:
    biases = [f"blocks.{index}.bias" for index in range(4)]
    assert resident(planned(param_persistence_threshold=9, model_persistence_threshold=32).layout) == biases
    assert resident(planned(param_persistence_threshold=9, model_persistence_threshold=31).layout) == biases[:3]
    layout = planned(param_persistence_threshold=9, model_persistence_threshold=16, max_in_cpu=ROWS).layout
    assert resident(layout) == ["blocks.0.weight", *biases[:2]]


def test_a_rank_has_its_share_of_the_elements() -> None:
    whole, shared = (planned(ranks=ranks).layout for ranks in (1, 4))
    assert [shard.numel for shard in whole.shards[:2]] == [ROWS, 8]
    assert [shard.numel for shard in shared.shards[:2]] == [ROWS // 4, 2]


def test_without_a_budget_the_pool_is_the_comfortable_size() -> None:
    layout, pinned_bytes, staying = planned()
    sizes = [2 * sum(sub.numel for sub in members) for members in layout.by_space]
    needs = pinned.gather_bytes(max(sizes)), layout.sub_group_bytes_max
    assert pinned_bytes == pinned.comfortable_bytes(*needs, staying_bytes=sum(sizes))
    assert staying == {*range(len(GROUPS))}
    gradients = 2 * sum(sizes)
    small = planned(memory_bytes=4 * (pinned_bytes + gradients - MIB))
    assert small.pinned_bytes == pinned_bytes - MIB and 0 < len(small.staying) < len(GROUPS)
    assert not planned(memory_bytes=4 * (pinned.comfortable_bytes(*needs) + gradients)).staying
    tight = planned(small.pinned_bytes)
    assert tight.staying == small.staying


def test_what_is_read_most_often_stays_first() -> None:
    """With full masters the fourth group is read once less: left to the forward, its update makes what is gathered."""
    pool, others = planned(memory_bytes=1 << 24, update="backward", master_weights="full"), {0, 1, 2}
    assert not pool.staying
    staying = [
        planned(pool.pinned_bytes + nbytes, update="backward", master_weights="full").staying
        for nbytes in range(0, 2 * MIB, 1 << 16)
    ]
    assert {*staying} >= {frozenset(), frozenset(others), frozenset({*others, 3})}
    assert all(3 not in some or some > others for some in staying)
    split = [planned(pool.pinned_bytes + nbytes, update="backward").staying for nbytes in range(0, 2 * MIB, 1 << 16)]
    assert any(3 in some and not some > others for some in split)
    assert not planned(pool.pinned_bytes + 2 * MIB, update="backward", hold_parameters=True).staying


def test_a_group_updated_in_the_backward_waits_in_the_pool_beside_the_next() -> None:
    small: dict[str, Any] = {
        "sub_group_size": 8 * SPACE_ALIGN,
        "gradient_bytes_max": 1 << 40,
    }  # none waits for the forward
    layout, pool, staying = planned(update="backward", **small)
    least = planned(memory_bytes=1 << 24, **small).pinned_bytes
    sizes = [sum(sub.numel for sub in members) for members in layout.by_space]
    assert len(staying) == len(GROUPS)
    roomy = pool - pinned.align_up(2 * sum(sizes), MIB)
    room = [pinned.look_ahead_room(pool, 2 * max(sizes)) for pool in (roomy, least)]
    assert room[0] >= 28 * max(sizes) > room[1]
    assert planned(update="backward", memory_bytes=4 * (roomy - MIB), **small) == (layout, roomy - MIB, frozenset())
    assert planned(update="backward", memory_bytes=2 * least, **small) == (layout, least, frozenset())
    with pytest.raises(BudgetError, match="memory that are available"):
        planned(update="backward", memory_bytes=least - 1, **small)


def test_sub_groups_are_cut_until_the_budget_holds_them() -> None:
    roomy = planned(64 * MIB).layout
    tight, pinned_bytes, staying = planned(8 * MIB)
    assert not staying
    assert pinned_bytes == 8 * MIB
    assert len(tight.sub_groups) > len(roomy.sub_groups)
    assert pinned.PIPELINE_DEPTH * tight.sub_group_bytes_max < 8 * MIB
    assert max(sub.numel for sub in planned(sub_group_size=2 * SPACE_ALIGN).layout.sub_groups) == 2 * SPACE_ALIGN


def test_a_budget_below_one_group_names_it_and_the_number_that_would_do() -> None:
    with pytest.raises(BudgetError, match=r"group blocks\.\d .* at least \d+ bytes"):
        planned(4 * MIB)


def test_what_is_cached_comes_on_top() -> None:
    # The copies of one group, which leaves the others as they are.
    layout, pinned_bytes, staying = planned(host_cache_bytes=MIB // 3)
    assert len(staying) == 3
    assert 0 < layout.cached_bytes <= MIB // 3
    assert {field for sub in layout.sub_groups for field in sub.cached} == {Field.COMPUTE}
    assert pinned_bytes - layout.cached_bytes == planned(pinned_bytes - layout.cached_bytes).pinned_bytes


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"update": "never"}, "update"),
        ({"host_cache_bytes": -1}, "host_cache_bytes"),
        ({"moments": "abcdefghi"}, "keeps 9 numbers"),
    ],
)
def test_an_option_that_can_not_be_is_named(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PagingOptions(**asked)
