"""How a model will rest: its layout, and the pinned pool that this takes. Decided before anything is moved.

Pure but for one look at how much memory the machine has available.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from infinity.errors import ConfigError
from infinity.fsdp2.sharding import GroupOutline, padded_shape
from infinity.schedule.pinned import (
    GATHERS_IN_USE,
    SUB_GROUP_NUMEL_DEFAULT,
    PinnedBudget,
    comfortable_bytes,
    gather_bytes,
    look_ahead_room,
    pipeline_bytes,
    whole_bytes,
)
from infinity.schedule.residency import choose_staying, choose_to_stay
from infinity.schedule.scheme import MasterWeights, Scheme
from infinity.schedule.spilling import GRADIENT_BYTES, groups_that_spill
from infinity.store.foreign import FOREIGN_DTYPES, ForeignPart, ForeignRows, StoredParameter, StoredTensor, lay_out
from infinity.store.layout import SPACE_ALIGN, Layout, Shard, plan_layout
from infinity.swap import budget
from infinity.swap.host_cache import plan_cache
from infinity.swap.options import PagingOptions


@dataclass(frozen=True)
class ModelOutline:
    """A model that is to be paged.

    groups: what FSDP2 gathers together. ranks: over how many it is sharded; rank: this one's number among them. dtype: in which
    it is gathered. stored: the parameters that rest in files of the user, by name.
    """

    groups: Sequence[GroupOutline]
    ranks: int
    dtype: torch.dtype
    rank: int = 0
    stored: Mapping[str, StoredParameter] = field(default_factory=dict)


FEW_SHARE = 1 / 4
"""Parameters outside files are few where they have at most so many elements for each one in files."""


class ModelPlan(NamedTuple):
    """The model's layout, the size of the pool (bytes), and the groups that stay staged in it, by number."""

    layout: Layout
    pinned_bytes: int
    staying: frozenset[int]


def plan_model(model: ModelOutline, options: PagingOptions, pinned_bytes: int | None, memory_bytes: float) -> ModelPlan:
    """What the pinned budget allows.

    Args:
        model, options: what is paged, and how.
        pinned_bytes: the budget; None takes what the model needs to run at full speed.
        memory_bytes: this rank's share of the memory that is available, `budget.memory_of_rank`.

    Raises BudgetError where the budget, or the memory available, is too small, ConfigError for names that no matrix has.
    """
    groups, dtype = model.groups, model.dtype
    _check_matrices(model, options)
    shards = _shards(model, options)
    foreign = _foreign_parts(model)
    numel = min(options.sub_group_size or SUB_GROUP_NUMEL_DEFAULT, SUB_GROUP_NUMEL_DEFAULT)
    make = partial(
        plan_layout,
        shards,
        groups=len(groups),
        foreign=foreign,
        compute_itemsize=dtype.itemsize if dtype.itemsize < 4 or options.hold_state else 0,
        split_master=options.master_weights == "split" and dtype is torch.bfloat16,
        hold_state=options.hold_state,
        moments=len(options.moments),
        matrix_moments=len(options.matrix_moments),
        moment_itemsize=options.moments_dtype.itemsize,
    )
    scheme = Scheme(options.master_weights, options.update)
    bare = make(sub_group_numel_max=numel)
    cached = plan_cache(bare, scheme, [group.gathers for group in groups], options.host_cache_bytes)
    make = partial(make, gradient_itemsizes=_spilled(bare, options))
    layout = make(sub_group_numel_max=numel, cached=cached)
    group_bytes = [_staged_bytes(layout, index) for index in range(len(groups))]
    largest = max(range(len(groups)), key=group_bytes.__getitem__)
    largest_bytes = group_bytes[largest]
    if pinned_bytes is not None:
        room = pinned_bytes - layout.cached_bytes - options.activation_buffer_bytes - GATHERS_IN_USE * largest_bytes
        bytes_per_element = max(
            (-(-sub.lease_bytes // sub.numel) for sub in layout.sub_groups if sub.trained), default=0
        )
        fitting = budget.sub_group_numel_for(room, max(1, bytes_per_element))
        numel = min(options.sub_group_size or SUB_GROUP_NUMEL_DEFAULT, max(fitting, SPACE_ALIGN))
        layout = make(sub_group_numel_max=numel, cached=cached)
    gather, stepped = gather_bytes(largest_bytes), layout.sub_group_bytes_max
    reserved = layout.cached_bytes + options.activation_buffer_bytes
    waiting = _waiting_bytes(layout, group_bytes) if options.update == "backward" else 0
    comfortable = comfortable_bytes(gather, stepped, waiting)
    only_run = not any(shard.trained for shard in shards)
    spared = [0 if only_run else _spared_reads(layout, options, k, group.gathers) for k, group in enumerate(groups)]
    pinned = pinned_bytes
    if pinned is None:
        held = _held_gradient_bytes(layout, options)
        may_stay = sum(nbytes for nbytes, reads in zip(group_bytes, spared, strict=True) if reads)
        pinned = comfortable_bytes(gather, stepped, waiting, memory_bytes, held, may_stay) + reserved
        if only_run:  # what the pool holds of it is not read again
            pinned = max(pinned, int(min(whole_bytes(group_bytes) + reserved, memory_bytes // 2)))
    if only_run:
        always = [index for index, group in enumerate(groups) if not group.is_expert]
        room_bytes = look_ahead_room(pinned - reserved, largest_bytes)
        staying = [always[place] for place in choose_to_stay([group_bytes[index] for index in always], room_bytes)]
    else:
        staying = choose_staying(group_bytes, spared, max(0, pinned - reserved - comfortable))
    budget.check_available(pinned, memory_bytes)
    pipeline = pipeline_bytes(largest_bytes, stepped)
    need = PinnedBudget(
        gather, pipeline, cache_bytes=layout.cached_bytes, activation_bytes=options.activation_buffer_bytes
    )
    budget.check_budget(pinned, need, groups[largest].name, largest_bytes)
    return ModelPlan(layout, pinned, frozenset(staying))


def _check_matrices(model: ModelOutline, options: PagingOptions) -> None:
    shapes = {parameter.name: parameter.shape for group in model.groups for parameter in group.parameters}
    wrong = sorted(name for name in options.matrices if name not in shapes or len(shapes[name]) != 2)
    if wrong:
        others = ", ..." if len(wrong) > 3 else ""
        raise ConfigError(f"PagingOptions.matrices: {', '.join(wrong[:3])}{others} is no matrix of the model")


def _shards(model: ModelOutline, options: PagingOptions) -> list[Shard]:
    """What the layout needs to know of each parameter, and which copies stay resident.

    Where masters and optimizer state stay in host memory, and the others are few beside those that rest in files, they stay
    resident, too: nothing has to be written then.
    """
    shards = []
    groups, ranks, stored = model.groups, model.ranks, model.stored
    numels = {p.name: p.shape.numel() for group in groups for p in group.parameters}
    foreign_numel = sum(numels[name] for name in stored)
    few = sum(numels.values()) - foreign_numel <= FEW_SHARE * foreign_numel
    hold_all = options.hold_parameters or (options.hold_state and few and bool(stored))
    left = options.max_in_cpu
    small_left = math.inf if options.model_persistence_threshold is None else options.model_persistence_threshold
    for index, group in enumerate(groups):
        for parameter in group.parameters:
            numel = padded_shape(parameter.shape, ranks).numel()
            whole_numel = parameter.shape.numel()
            foreign = parameter.name in stored
            small = not foreign and whole_numel < options.param_persistence_threshold and whole_numel <= small_left
            small_left -= whole_numel if small else 0
            resident = not foreign and (hold_all or small)
            if not resident and not foreign and numel <= left:
                resident = True
                left -= numel
            whole = parameter.trained and parameter.name in options.matrices
            shards.append(Shard(parameter.name, index, numel, parameter.trained, resident, foreign, whole))
    return shards


def _foreign_parts(model: ModelOutline) -> list[ForeignPart]:
    """By group, what this rank reads of files of the user."""
    parts = []
    numbers = count()
    for group in model.groups:
        rows = {}
        for parameter in group.parameters:
            shard, stored = next(numbers), model.stored.get(parameter.name)
            if stored is None:
                continue
            padded = padded_shape(parameter.shape, model.ranks)
            first = min(model.rank * padded[0], parameter.shape[0])
            itemsize = FOREIGN_DTYPES[stored.dtype].itemsize if isinstance(stored, StoredTensor) else 0
            rows[shard] = ForeignRows(
                stored, first, min(padded[0], parameter.shape[0] - first), padded.numel() * itemsize
            )
        parts.append(lay_out(rows))
    return parts


def _spilled(layout: Layout, options: PagingOptions) -> dict[int, int]:
    """Bytes per element of gradients that wait on NVMe, by flat space. Those of resident shards never do, and come first."""
    if not options.all_gradients_wait or options.gradient_bytes_max is None:
        return {}
    itemsize = options.gradient_dtype.itemsize
    *numels, resident = (sum(sub.numel for sub in members if sub.trained) for members in layout.by_space)
    left = options.gradient_bytes_max - GRADIENT_BYTES * resident
    return dict.fromkeys(groups_that_spill([itemsize * numel for numel in numels], max(0, left)), itemsize)


def _held_gradient_bytes(layout: Layout, options: PagingOptions) -> int:
    """Of the gradients that wait in host memory."""
    *groups, resident = layout.by_space
    waiting = [members for group, members in enumerate(groups) if options.timing_of(group).gradients_wait]
    waiting += [resident] if options.all_gradients_wait else []
    trained = sum(sub.numel for members in waiting for sub in members if sub.trained)
    return trained * options.gradient_dtype.itemsize - layout.gradient_bytes


def _waiting_bytes(layout: Layout, group_bytes: Sequence[int]) -> int:
    """The copies and the state of the two groups that have most of them: see [Note: What waits for its gradients]."""
    states = (sum(sub.lease_bytes for sub in members if sub.trained) for members in layout.by_space)
    return sum(sorted(copies + state for copies, state in zip(group_bytes, states, strict=False))[-2:])


def _spared_reads(layout: Layout, options: PagingOptions, group: int, gathers: int) -> int:
    """How often a step reads a group's compute parameters less if they stay staged: see [Note: Staying staged]. `gathers`: by
    each micro-batch."""
    trained = [sub for sub in layout.by_space[group] if sub.trained]
    if not trained:
        return gathers
    masters: MasterWeights = "split" if any(sub.split for sub in trained) else "full"
    return Scheme(masters, options.timing_of(group).update).compute_reads(gathers)


def _staged_bytes(layout: Layout, group: int) -> int:
    """What the group's lease takes: all of what is gathered, unless all of it is cached."""
    foreign = layout.foreign[group].nbytes
    away = foreign or any(sub.gathered not in sub.cached for sub in layout.by_space[group])
    return layout.gathered_bytes(group) + foreign if away else 0
