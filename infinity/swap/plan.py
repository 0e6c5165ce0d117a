"""How a model will be stored: its layout, the size of the pinned pool, and the groups that stay in it. Moves no data.

Pure, except for one read of the machine's available memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from infinity.aio import absent_bytes
from infinity.errors import BudgetError, ConfigError
from infinity.fsdp2.sharding import GroupOutline, padded_shape
from infinity.host_memory import available_bytes, ranks_here
from infinity.schedule.pinned import (
    ACCESS_BYTES,
    GROUPS_HELD,
    PIPELINE_DEPTH,
    SUB_GROUP_NUMEL_DEFAULT,
    SUB_GROUP_NUMEL_IN_MEMORY,
    PinnedBudget,
    comfortable_bytes,
    gather_bytes,
    look_ahead_room,
    pipeline_bytes,
    whole_bytes,
)
from infinity.schedule.residency import Candidate, choose_resident, choose_staying, choose_to_stay
from infinity.schedule.scheme import MasterWeights, Scheme
from infinity.schedule.spilling import GRADIENT_BYTES, groups_that_spill
from infinity.store.foreign import FOREIGN_DTYPES, ForeignPart, ForeignRows, StoredParameter, StoredTensor, lay_out
from infinity.store.layout import SPACE_ALIGN, Cached, Field, Layout, PartKey, Shard, SubGroup, plan_layout
from infinity.swap.options import PagingOptions
from infinity.units import MIB, PAGE_BYTES, align_up, format_bytes


@dataclass(frozen=True)
class ModelOutline:
    """A model that is to be paged.

    groups: in the order of FSDP2. dtype: of the gather. stored: the parameters in foreign files, by name.
    """

    groups: Sequence[GroupOutline]
    dtype: torch.dtype
    stored: Mapping[str, StoredParameter] = field(default_factory=dict)


FEW_SHARE = 1 / 4
"""Parameters outside files count as few if they have at most this share of the elements in files."""


class ModelPlan(NamedTuple):
    """The model's layout, the size of the pool (bytes), and the numbers of the groups that stay staged in it."""

    layout: Layout
    pinned_bytes: int
    staying: frozenset[int]


def plan_model(model: ModelOutline, options: PagingOptions, pinned_bytes: int | None, memory_bytes: float) -> ModelPlan:
    """Plan a model for a pinned budget.

    Args:
        model, options: the model, and how it is paged.
        pinned_bytes: the budget; None takes as much as the model needs to run at full speed.
        memory_bytes: this rank's share of the available memory, `memory_of_rank`.

    Raises BudgetError if the budget or the available memory is too small, ConfigError for a name that no matrix has.
    """
    groups, dtype = model.groups, model.dtype
    _check_matrices(model, options)
    shards = _shards(model, options)
    foreign = _foreign_parts(model)
    numel_max = SUB_GROUP_NUMEL_IN_MEMORY if options.in_host_memory else SUB_GROUP_NUMEL_DEFAULT
    numel = min(options.sub_group_size or numel_max, numel_max)
    make = partial(
        plan_layout,
        shards,
        groups=len(groups),
        foreign=foreign,
        compute_itemsize=0
        if dtype.itemsize == 4 and (options.in_host_memory or not options.hold_state)
        else dtype.itemsize,
        split_master=options.master_weights == "split" and dtype is torch.bfloat16,
        hold_state=options.hold_state,
        cache_gathered=options.in_host_memory,
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
        room = pinned_bytes - layout.cached_bytes - options.activation_buffer_bytes - largest_bytes
        bytes_per_element = max(
            (-(-sub.lease_bytes // sub.numel) for sub in layout.sub_groups if sub.trained), default=0
        )
        fitting = sub_group_numel_for(room, max(1, bytes_per_element))
        numel = min(options.sub_group_size or numel_max, max(fitting, SPACE_ALIGN))
        layout = make(sub_group_numel_max=numel, cached=cached)
    gather, stepped = gather_bytes(largest_bytes), layout.sub_group_bytes_max
    reserved = layout.cached_bytes + options.activation_buffer_bytes
    waiting = _waiting_bytes(layout, group_bytes) if options.update == "backward" else 0
    comfortable = comfortable_bytes(gather, stepped, waiting)
    only_run = not any(shard.trained for shard in shards)
    none_stays = only_run or options.keeps_gathered
    spared = [0 if none_stays else _spared_reads(layout, options, k, group.gathers) for k, group in enumerate(groups)]
    pinned = pinned_bytes
    if pinned is None:
        waiting_gradients = _held_gradient_bytes(layout, options)
        may_stay = sum(nbytes for nbytes, reads in zip(group_bytes, spared, strict=True) if reads)
        pinned = comfortable_bytes(gather, stepped, waiting, memory_bytes, waiting_gradients, may_stay) + reserved
        if only_run:  # groups that stay in the pool are not read again
            pinned = max(pinned, int(min(whole_bytes(group_bytes) + reserved, memory_bytes // 2)))
    if only_run:
        always = [index for index, group in enumerate(groups) if not group.is_expert]
        room_bytes = look_ahead_room(pinned - reserved, largest_bytes)
        staying = [always[place] for place in choose_to_stay([group_bytes[index] for index in always], room_bytes)]
    else:
        staying = choose_staying(group_bytes, spared, max(0, pinned - reserved - comfortable))
    held = sum(sub.field_bytes(name) for sub in layout.sub_groups for name in sub.fields if name in sub.held)
    check_available(pinned, memory_bytes, held_bytes=held)
    pipeline = pipeline_bytes(largest_bytes, stepped)
    need = PinnedBudget(
        gather, pipeline, cache_bytes=layout.cached_bytes, activation_bytes=options.activation_buffer_bytes
    )
    check_budget(pinned, need, groups[largest].name, largest_bytes)
    return ModelPlan(layout, pinned, frozenset(staying))


def _check_matrices(model: ModelOutline, options: PagingOptions) -> None:
    shapes = {parameter.name: parameter.shape for group in model.groups for parameter in group.parameters}
    wrong = sorted(name for name in options.matrices if name not in shapes or len(shapes[name]) != 2)
    if wrong:
        others = ", ..." if len(wrong) > 3 else ""
        raise ConfigError(f"PagingOptions.matrices: {', '.join(wrong[:3])}{others} is no matrix of the model")


def _shards(model: ModelOutline, options: PagingOptions) -> list[Shard]:
    """Describe each parameter for the layout, and decide which compute parameters stay resident.

    If masters and optimizer state stay in host memory, and the parameters outside foreign files are few, these stay
    resident too: then nothing has to be written.
    """
    shards = []
    groups, stored = model.groups, model.stored
    numels = {p.name: p.shape.numel() for group in groups for p in group.parameters}
    foreign_numel = sum(numels[name] for name in stored)
    few = sum(numels.values()) - foreign_numel <= FEW_SHARE * foreign_numel
    beside_files = options.hold_state and few and bool(stored)
    hold_all = not options.in_host_memory and (options.hold_parameters or beside_files)
    left = 0 if options.in_host_memory else options.max_in_cpu
    small_left = math.inf if options.model_persistence_threshold is None else options.model_persistence_threshold
    for index, group in enumerate(groups):
        for parameter in group.parameters:
            numel = padded_shape(parameter.shape, group.ranks).numel()
            whole_numel = parameter.shape.numel()
            foreign = parameter.name in stored
            small = not foreign and whole_numel < options.param_persistence_threshold and whole_numel <= small_left
            small_left -= whole_numel if small else 0
            resident = not foreign and (hold_all or small or parameter.name in options.tied)
            if not resident and not foreign and numel <= left:
                resident = True
                left -= numel
            whole = parameter.trained and parameter.name in options.matrices
            shards.append(Shard(parameter.name, index, numel, parameter.trained, resident, foreign, whole))
    return shards


def _foreign_parts(model: ModelOutline) -> list[ForeignPart]:
    """Return, by group, what this rank reads of foreign files."""
    parts = []
    numbers = count()
    for group in model.groups:
        rows = {}
        for parameter in group.parameters:
            shard, stored = next(numbers), model.stored.get(parameter.name)
            if stored is None:
                continue
            padded = padded_shape(parameter.shape, group.ranks)
            first = min(group.rank * padded[0], parameter.shape[0])
            itemsize = FOREIGN_DTYPES[stored.dtype].itemsize if isinstance(stored, StoredTensor) else 0
            rows[shard] = ForeignRows(
                stored,
                parameter.first_row + first,
                min(padded[0], parameter.shape[0] - first),
                padded.numel() * itemsize,
            )
        parts.append(lay_out(rows))
    return parts


def _spilled(layout: Layout, options: PagingOptions) -> dict[int, int]:
    """Return the bytes per element of gradients that wait on NVMe, by flat space. Those of resident shards never do."""
    if not options.all_gradients_wait or options.gradient_bytes_max is None:
        return {}
    itemsize = options.gradient_dtype.itemsize
    *numels, resident = (sum(sub.numel for sub in members if sub.trained) for members in layout.by_space)
    left = options.gradient_bytes_max - GRADIENT_BYTES * resident
    return dict.fromkeys(groups_that_spill([itemsize * numel for numel in numels], max(0, left)), itemsize)


def _held_gradient_bytes(layout: Layout, options: PagingOptions) -> int:
    """Return the bytes of gradients that wait in host memory."""
    *groups, resident = layout.by_space
    waiting = [members for group, members in enumerate(groups) if options.timing_of(group).gradients_wait]
    waiting += [resident] if options.all_gradients_wait else []
    trained = sum(sub.numel for members in waiting for sub in members if sub.trained)
    return trained * options.gradient_dtype.itemsize - layout.gradient_bytes


def _waiting_bytes(layout: Layout, group_bytes: Sequence[int]) -> int:
    """Return the two largest groups' compute parameters and state (bytes): [Note: What waits for its gradients]."""
    states = (sum(sub.lease_bytes for sub in members if sub.trained) for members in layout.by_space)
    return sum(sorted(copies + state for copies, state in zip(group_bytes, states, strict=False))[-2:])


def _spared_reads(layout: Layout, options: PagingOptions, group: int, gathers: int) -> int:
    """Return the reads of a step that a group saves if it stays: see [Note: Staying staged]. `gathers`: per
    micro-batch."""
    trained = [sub for sub in layout.by_space[group] if sub.trained]
    if not trained:
        return gathers
    masters: MasterWeights = "split" if any(sub.split for sub in trained) else "full"
    return Scheme(masters, options.timing_of(group).update).compute_reads(gathers)


def _staged_bytes(layout: Layout, group: int) -> int:
    """Return the size of the group's lease: all gathered bytes, or 0 if all of them are cached."""
    foreign = layout.foreign[group].nbytes
    away = foreign or any(sub.gathered not in sub.cached for sub in layout.by_space[group])
    return layout.gathered_bytes(group) + foreign if away else 0


_PAGES_ROUNDED_UP = 3
"""In a sub-group with coded moments, two pages of codes and one of scales may be partly filled."""


@dataclass(frozen=True)
class _Part:
    """One part of a flat space. `like`: one of its sub-groups, all of which have the same fields. `ends`: the ends of
    whole matrices (elements from the part's start, ascending); empty if the cached part may end anywhere."""

    key: PartKey
    numel: int
    like: SubGroup
    ends: tuple[int, ...]

    def stays(self, units: int) -> int:
        """Return the number of elements that stay if there is room for so many units."""
        numel = units * SPACE_ALIGN
        if not self.key.whole:
            return numel
        return (0, *self.ends)[bisect_right(self.ends, numel)]


def plan_cache(layout: Layout, scheme: Scheme, gathers: Sequence[int], cache_bytes: int) -> dict[PartKey, Cached]:
    """Choose what of each part of each flat space stays in `cache_bytes`, as `plan_layout` takes it (`cached`).

    Args:
        layout: of the model with nothing cached.
        scheme: when groups are updated, and whether their masters are split if possible.
        gathers: by group, how often each micro-batch gathers it. The first groups are cached first, because the groups
            used at the end of forward and the beginning of backward may stay staged in between.
    """
    parts = _parts(layout)
    candidates: list[Candidate] = []
    owners: list[tuple[PartKey, bool]] = []
    for part in parts:
        resident = part.key.space == layout.resident_space
        for gathered, fields in _sets_of_fields(part.like, resident):
            unit_bytes = sum(part.like.field_numel(f, SPACE_ALIGN) * part.like.itemsize(f) for f in fields)
            stepped = part.like.trained
            reads = _compute_reads(part.like, scheme, gathers[part.key.space]) if gathered else int(stepped)
            candidates.append(Candidate(part.numel // SPACE_ALIGN, unit_bytes, reads, int(stepped)))
            owners.append((part.key, gathered))
    if coded := sum(sub.coded for sub in layout.sub_groups):  # including those cut at the end of what stays of a part
        cache_bytes -= _PAGES_ROUNDED_UP * PAGE_BYTES * (coded + 2 * len(parts))
    resident_units = dict(zip(owners, choose_resident(candidates, max(0, cache_bytes)), strict=True))
    cached = {}
    for part in parts:
        state = part.stays(resident_units.get((part.key, False), 0))
        resident = part.key.space == layout.resident_space
        cached[part.key] = Cached(state if resident else part.stays(resident_units.get((part.key, True), 0)), state)
    return cached


def _compute_reads(sub: SubGroup, scheme: Scheme, gathers: int) -> int:
    """Return how often a step reads a sub-group's gathered field if that doesn't stay."""
    if not sub.trained:
        return gathers
    scheme_of_sub = Scheme("split" if sub.split else "full", scheme.update)
    return gathers if sub.held else scheme_of_sub.compute_reads(gathers, sub.itemsize(sub.gathered))


def _parts(layout: Layout) -> list[_Part]:
    parts = []
    for space, cuts in enumerate(layout.by_space):
        for key in dict.fromkeys(PartKey(space, sub.trained, sub.whole) for sub in cuts):
            members = [sub for sub in cuts if (sub.trained, sub.whole) == (key.trained, key.whole)]
            ends = tuple(
                align_up(sub.start + piece.offset + piece.numel, SPACE_ALIGN) - members[0].start
                for sub in members
                for piece in sub.pieces
                if key.whole
            )
            parts.append(_Part(key, sum(sub.numel for sub in members), members[0], ends))
    return parts


def _sets_of_fields(sub: SubGroup, resident: bool) -> list[tuple[bool, tuple[Field, ...]]]:
    """Return the sets of fields that are cached together: (True for the gathered field, fields)."""
    gathered = () if resident else tuple(field for field in sub.on_nvme if field is sub.gathered)
    state = tuple(field for field in sub.on_nvme if field not in gathered)
    return [(is_gathered, fields) for is_gathered, fields in ((True, gathered), (False, state)) if fields]


PINNED_BYTES_DEFAULT = 512 * MIB


def sub_group_numel_for(pinned_bytes: int, bytes_per_element: int) -> int:
    """Return the largest sub-group (elements, aligned to SPACE_ALIGN) that fits PIPELINE_DEPTH times in the pool."""
    numel = (pinned_bytes - ACCESS_BYTES) // PIPELINE_DEPTH // bytes_per_element
    return max(0, numel) // SPACE_ALIGN * SPACE_ALIGN


def check_budget(pinned_bytes: int, need: PinnedBudget, largest_group: str, largest_group_bytes: int) -> None:
    """Raise BudgetError, with a sufficient size, if `pinned_bytes` is less than `need`."""
    gathering = need.nbytes - max(need.gather_bytes, need.pipeline_bytes) + need.gather_bytes
    cached = f"the {format_bytes(need.cache_bytes)} that stay in it (host_cache_bytes, parameters on the cpu)"
    also = f" with {cached}" if need.cache_bytes else ""
    if need.activation_bytes:
        also += f" and the {format_bytes(need.activation_bytes)} of offload_activations.buffer_bytes"
    if need.nbytes > pinned_bytes and not largest_group_bytes:
        raise BudgetError(
            f"pinned_bytes_max of {format_bytes(pinned_bytes)} is too small for {cached} and "
            f"{format_bytes(need.nbytes - need.cache_bytes)} more: raise it to at least {need.nbytes} bytes "
            f'({format_bytes(need.nbytes)}), or leave it "auto"'
        )
    if gathering > pinned_bytes:
        raise BudgetError(
            f"pinned_bytes_max of {format_bytes(pinned_bytes)} is too small for group {largest_group} of "
            f"{format_bytes(largest_group_bytes)}: it must hold {GROUPS_HELD} such groups and "
            f"{format_bytes(need.access_bytes)}{also}; raise it to at least {gathering} bytes ({format_bytes(gathering)}), "
            "or wrap smaller modules"
        )
    if need.nbytes > pinned_bytes:
        sub_group_bytes = (need.pipeline_bytes - align_up(largest_group_bytes)) // PIPELINE_DEPTH
        raise BudgetError(
            f"pinned_bytes_max of {format_bytes(pinned_bytes)} is too small for {PIPELINE_DEPTH} "
            f"sub-groups of {format_bytes(sub_group_bytes)} and a group{also}: raise it to at least "
            f"{need.nbytes} bytes ({format_bytes(need.nbytes)}), or set a smaller sub_group_size"
        )


def check_available(pinned_bytes: int, memory_bytes: float, *, held_bytes: int = 0) -> None:
    """Raise BudgetError if the pool and the held state exceed this rank's share of memory (`memory_of_rank`)."""
    if pinned_bytes + held_bytes > memory_bytes:
        ranks = ranks_here()
        shared = f" to each of the {ranks} ranks on this machine" if ranks > 1 else ""
        held = f" and {format_bytes(held_bytes)} of masters and optimizer state are" if held_bytes else " is"
        remedies = "put them on NVMe, " if held_bytes else "lower pinned_bytes_max, "
        raise BudgetError(
            f"a pinned pool of {format_bytes(pinned_bytes)}{held} more than the {format_bytes(memory_bytes)} of memory that "
            f"are available{shared}: {remedies}raise the limit of the container or job if it has one, or wrap smaller modules "
            "if a group asks for that much"
        )


def memory_of_rank() -> float:
    """Return this rank's share of the memory available to the ranks of this machine (bytes); infinite if unknown.

    Call before any rank allocates its part: a later call would divide what is left once more.
    """
    available = available_bytes()
    return math.inf if available is None else (available - absent_bytes()) / ranks_here()
