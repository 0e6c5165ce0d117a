"""Floor 4. The swap manager: one run's pool, engine and arena, and what moves between them.

Two faces. `page(model)` hands a model that FSDP2 sharded over to the arena; `register / prefetch / use / update / flush` do
the same for plain tensors of any other engine. All calls come from the training thread.

[Note: When a group has been copied]
FSDP2 asks for all shards of a group, one after the other, and copies them at once into the buffer it gathers from; only then
does it turn to another group. So when a shard of another group is asked for, the one before has been copied, and its lease goes
back: not only when FSDP2 reports it gathered, which it does when the group is used. However many groups are prefetched
(`set_modules_to_forward_prefetch` takes any list), no more than two leases are in use. On a single rank FSDP2 copies when it
uses, one group at a time, and reports at once.

[Note: Phases]
Training and evaluation have a trace each. A gather is training's when it happens in a backward, or in a forward of the whole
model in training mode with gradients; anything else, generation included, is evaluation's, whatever mode one submodule is in.
The optimizer step ends a cycle of training, the end of a forward one of evaluation; where parts of the model are called without
the whole, an evaluation begins anew when a group comes again. Reads are each rank's own affair: no collective depends on a
trace, so where the traces of two ranks differ, no more than their reads on demand do.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.aio import DriveLimit, DriveStats, FaultPlan, IoEngine, Lease, PinnedPool
from infinity.device import CpuDevice, Device, device_for
from infinity.errors import BudgetError, InfinityError
from infinity.schedule.lookahead import cycle_read_bytes, groups_to_stage
from infinity.schedule.scheme import Scheme, Update
from infinity.schedule.timeline import TraceSummary
from infinity.schedule.trace import Trace
from infinity.store import Arena, Field, Layout, RunFolder, Shard, check_free, plan_layout
from infinity.store.layout import SPACE_ALIGN
from infinity.store.placement import step_bandwidth
from infinity.store.probe import measure_drive
from infinity.swap import budget
from infinity.swap.chunk import Chunk, ChunkState, Span
from infinity.swap.fsdp2 import (
    GroupOutline,
    ShardedGroup,
    gathered_dtype,
    in_backward,
    install,
    outlined_groups,
    padded_shape,
    sharded_groups,
)
from infinity.swap.host_cache import plan_cache
from infinity.swap.host_gradients import HostGradients
from infinity.swap.paged_model import PagedGroup, PagedModel, PagedShard, PagedSubGroup
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.stager import Stager
from infinity.swap.timeline import Timeline, measured
from infinity.swap.together import together
from infinity.swap.updates import finish_updates
from infinity.units import align_up, format_bytes, parse_bytes

log = logging.getLogger("infinity")

_MEASURE_BYTES = 64 << 20
"""Written and read, twice, to weigh one drive against another."""


@dataclass(frozen=True)
class SwapStats:
    """Counters since the start (bytes, seconds)."""

    read_bytes: int
    written_bytes: int
    stall_seconds: float
    demand_reads: int
    surprises: int
    pinned_bytes: int
    pinned_peak_bytes: int
    cached_bytes: int
    """Pinned bytes that hold what stays from step to step."""
    arena_bytes: int
    drives: tuple[DriveStats, ...]
    """What each drive moved, in the order of the paths."""


@dataclass(eq=False)
class _Tensor:
    """A plain tensor that was registered. `lost`: why what was written of it last is not what is stored."""

    chunk: Chunk
    shape: torch.Size
    dtype: torch.dtype
    lost: str | None = None

    def lose(self, why: str) -> None:
        self.lost = why


class SwapManager:
    """Moves a model, or plain tensors, between NVMe and a fixed amount of pinned host memory.

    Args:
        path: a folder on the drive, or several on as many drives, over which everything is striped by their bandwidth.
            This run makes a folder of its own in each and removes it at the end.
        host_bytes_max: pinned host memory (bytes, or "2GiB"); "auto" takes what the model needs to run at full speed
            (see infinity/swap/budget.py), 512 MiB for plain tensors.
        backend, block_bytes, queue_depth, rings, mix, iopoll, sqpoll: see `infinity.aio.IoEngine`.
        bandwidths: of the drives (any one unit); with several and None they are measured, which takes a second.
        drive_limits: one per drive, to make drives slower than they are; for experiments.
        faults: makes them fail; for tests.
        lock_memory: ask the kernel to lock the pinned pages.
        pin_memory: register the pool with the GPU, where there is one, so that copies run beside what it computes.

    Raises StoreError (path), IoError (backend), MemoryError (pool). Use it as a context manager, or call `close()`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        host_bytes_max: int | str = "auto",
        backend: str = "auto",
        block_bytes: int = 1 << 20,
        queue_depth: int = 32,
        rings: int = 1,
        mix: str = "interleaved",
        iopoll: bool = False,
        sqpoll: bool = False,
        lock_memory: bool = False,
        pin_memory: bool = True,
        bandwidths: Sequence[float] | None = None,
        drive_limits: Sequence[DriveLimit] = (),
        faults: FaultPlan | None = None,
    ) -> None:
        self._pinned_bytes = None if host_bytes_max == "auto" else parse_bytes(host_bytes_max)
        if self._pinned_bytes is not None and self._pinned_bytes < 2 * budget.ACCESS_BYTES:
            raise BudgetError(
                f"host_bytes_max of {format_bytes(self._pinned_bytes)} is below the least that works, "
                f"{format_bytes(2 * budget.ACCESS_BYTES)}"
            )
        self._engine_options: dict[str, Any] = {
            "backend": backend,
            "block_bytes": block_bytes,
            "queue_depth": queue_depth,
            "rings": rings,
            "mix": mix,
            "iopoll": iopoll,
            "sqpoll": sqpoll,
        }
        self._lock_memory = lock_memory
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        self._drive_limits = list(drive_limits)
        self._faults = faults
        if bandwidths is None and len(paths) > 1:
            bandwidths = self._measure(paths)
        self._bandwidths = bandwidths
        self._folders = _make_folders(paths)
        self._machinery: _Machinery | None = None
        self._tensors: dict[str, _Tensor] = {}
        self._paged: PagedModel | None = None
        self._traces = {True: Trace(), False: Trace()}
        self._pass_trains: bool | None = None
        """Whether the forward of the whole model that is going on is training's; None where none is going on."""
        self._room_bytes = 0
        """Bytes of the pool that reads ahead may hold ..."""
        self._look_ahead_bytes = 0
        """... and as many of them as the user allows."""
        self._units: list[Chunk | None] = []
        """What is staged: by number of its group, then by number of its sub-group."""
        self._unit_bytes: list[int] = []
        self._gathered_bytes: list[int] = []
        """The same, but nothing for sub-groups."""
        self.update_at: Update = "step"
        """When the optimizer updates the paged parameters: `update` of `page`."""
        self._forwards: Counter[int] = Counter()
        """By group: how often it was called in training since the last step."""
        self._phase = True
        """Whether it was training that used a group last."""
        self._device: Device = CpuDevice()
        self._pin_memory = pin_memory
        self.host_gradients = HostGradients(lambda: self._device, pin=pin_memory)
        """Brings gradients from the device to where the optimizer uses them."""
        self._copying: PagedGroup | None = None
        """The group whose shards FSDP2 asks for, or asked for last."""
        self._ahead: list[PagedGroup] = []
        """Whose copies are on their way to the device before anybody asks for them."""
        self.device_ahead_bytes = 0
        """How many bytes of the device such copies may take."""
        self.demand_copies = 0
        """Groups whose copies were not on their way to the device when they were asked for."""
        self._alone = True
        """Whether the model is sharded over one rank: then FSDP2 gathers a group as soon as it has it."""
        self._told_surprise = False
        self._closed = False

    # Plain tensors.

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Store a copy of `tensor` (any shape and dtype, on the CPU) in the arena under `name`.

        Raises ValueError for a name that is taken, StoreError without space, BudgetError when the pool is smaller than it.
        """
        if name in self._tensors:
            raise ValueError(f"a tensor named {name!r} is registered already: use update() to change it")
        if tensor.numel() == 0:
            raise ValueError(f"tensor {name!r} has no elements")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(
                f"tensor {name!r} is {tensor.layout} on {tensor.device}: only ordinary dense tensors are stored"
            )
        nbytes = tensor.numel() * tensor.itemsize
        machinery = self._open()
        if align_up(nbytes) > machinery.pool.nbytes:
            raise BudgetError(
                f"tensor {name!r} of {format_bytes(nbytes)} is larger than the pinned pool of "
                f"{format_bytes(machinery.pool.nbytes)}: host_bytes_max={align_up(nbytes)} would do"
            )
        extent = machinery.arena.reserve([nbytes], f"tensor {name!r}")[0]
        span = (Span(extent.offset, 0, extent.nbytes),)
        entry = _Tensor(Chunk(name, extent.nbytes, span, span), tensor.shape, tensor.dtype)
        entry.chunk.on_lost = entry.lose
        lease = machinery.stager.occupy(entry.chunk)
        try:
            lease.view(tensor.dtype, 0, tensor.numel()).view(tensor.shape).copy_(tensor.detach())
        except BaseException:
            machinery.stager.release(entry.chunk, keep=False)
            raise
        machinery.stager.write_back(entry.chunk)
        self._tensors[name] = entry

    def prefetch(self, name: str) -> bool:
        """Start reading `name` if there is room now; whether it is on its way or here."""
        entry = self._tensor(name)
        if entry.chunk.state is not ChunkState.RESTING:
            return entry.chunk.state is not ChunkState.WRITING
        return self._open().stager.prefetch(entry.chunk)

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor in pinned memory, for reading only, until the end of the block."""
        entry, tensor = self._acquire(name)
        try:
            yield tensor
        finally:
            self._open().stager.release(entry.chunk, keep=False)

    @contextlib.contextmanager
    def update(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor in pinned memory, to be changed in place; written back in the background after the block.

        A block that raises leaves the stored bytes as they were.
        """
        entry, tensor = self._acquire(name)
        try:
            yield tensor
        except BaseException:
            self._open().stager.release(entry.chunk, keep=False)
            raise
        self._open().stager.write_back(entry.chunk)

    def flush(self) -> None:
        """Wait until everything updated is on the drive (fdatasync). Raises IoError when a write failed."""
        if self._machinery is None and not self._closed:
            return  # nothing was ever stored
        machinery = self._open()
        if self._paged is not None:
            self.finish_updates()
        machinery.stager.settle_all()
        machinery.arena.sync()

    # A model.

    def page(
        self,
        model: nn.Module,
        *,
        sub_group_size: int | None = None,
        resident_numel_below: int = 100_000,
        resident_numel_max: int = 0,
        cache_bytes: int = 0,
        look_ahead_bytes: int | None = None,
        update: Update = "step",
        split_master: bool = True,
        hold_parameters: bool = False,
        hold_state: bool = False,
    ) -> None:
        """Move the parameters of a model that `fully_shard` was applied to into the arena, in place.

        After this the model's parameters are paged tensors (fp32 masters), every gather reads its 16-bit copy from NVMe, and
        `PagedAdamW(model.parameters(), swap=self)` steps it. Parameters on the meta device get their place without ever
        being held; give them values (`load_state_dict`, `infinity.initialize`) before they are used.

        Args:
            sub_group_size: at most this many elements are stepped together: as many as the pinned budget holds three of
                where None, never more than the default unless the budget is given too.
            resident_numel_below: parameters with fewer elements keep their copy in host memory.
            resident_numel_max: beside those, so many elements of this rank's shards keep theirs too, first groups first.
            cache_bytes: so much of the pinned memory keeps copies and optimizer state from step to step, the best of them:
                see [Note: What stays] in infinity/schedule/residency.py.
            look_ahead_bytes: how far reads run ahead of use (the next group is always read); as far as the pool allows
                where None.
            update: when the optimizer updates a parameter: in its `step` ("step"), or just before it is gathered next or looked
                at in any other way ("forward"): the same numbers and 2 bytes less to read per element, while the model
                computes. `step` returns at once then and takes the gradients: `.grad` is None after it. With "backward" most
                are updated, and their gradients taken, as soon as these are reduced, which needs no memory for gradients; it
                is for loops in which every backward is followed by a step with the gradients as they are (no clipping, no
                accumulation) and with the learning rate that was set before it.
            split_master: where parameters are gathered in bf16, keep what that leaves of each master beside it instead of the
                whole master, 12 bytes an element instead of 14: see [Note: Copy and remainder] in infinity/optim/split.py.
            hold_parameters: keep all copies in host memory (only optimizer state rests on NVMe).
            hold_state: keep masters and optimizer state in host memory (only the copies rest on NVMe).

        A collective of the ranks that the model is sharded over. Raises ConfigError for a model that can't be paged,
        BudgetError when the pool is too small for one group or three sub-groups (naming the number that would do), StoreError
        without space, on all ranks when on one; the model is unchanged then.
        """
        if self._paged is not None:
            raise InfinityError("this SwapManager has paged a model already: make another one for a second model")
        groups = sharded_groups(model)
        dtype = gathered_dtype(model)
        mesh = groups[0].parameters[0].sharded.device_mesh
        with together(mesh.get_group() if mesh.ndim == 1 else None):
            self._alone = mesh.size(-1) == 1
            layout, pinned_bytes = self._plan(
                [group.outline for group in groups],
                mesh.size(-1),
                dtype,
                sub_group_size,
                math.inf if hold_parameters else resident_numel_below,
                resident_numel_max,
                cache_bytes,
                update,
                split_master,
                hold_state,
            )
            machinery = self._open(pinned_bytes)
            machinery.adopt(self._device_of(groups), pin=self._pin_memory)
            paged = PagedModel(
                layout=layout,
                group_names=[group.name for group in groups],
                shapes=[(p.local.shape, p.padded_shape) for group in groups for p in group.parameters],
                copy_dtype=dtype,
                in_backward=update == "backward",
                stager=machinery.stager,
                arena=machinery.arena,
                what=_what_is_stored(hold_state),
            )
            replacements = self._take_over(groups, paged)
        self._paged, self.update_at = paged, update
        chunks = [group.chunk for group in paged.groups]
        self._units = [*chunks, *(sub.chunk if sub.moves else None for sub in paged.sub_groups)]
        self._unit_bytes = [chunk.lease_bytes if chunk is not None else 0 for chunk in self._units]
        largest_group = max(self._unit_bytes[: len(chunks)])
        self.device_ahead_bytes = largest_group
        self._gathered_bytes = [*self._unit_bytes[: len(chunks)], *[0] * len(paged.sub_groups)]
        self._room_bytes = budget.look_ahead_room(machinery.pool.nbytes - layout.cached_bytes, largest_group)
        self._look_ahead_bytes = self._room_bytes
        if look_ahead_bytes is not None:
            # One is gathered for the backward before another, whose copies wait for its update, is done with them.
            least = 2 * largest_group if update == "backward" else 0
            self._look_ahead_bytes = min(self._room_bytes, max(look_ahead_bytes, least))
        install(model, replacements)
        if update == "backward":
            for number, group in enumerate(groups):
                cast(nn.Module, group.module).register_forward_pre_hook(partial(self._count_forward, number))
        model.register_forward_pre_hook(self._begin_pass, prepend=True)  # before FSDP2 gathers
        model.register_forward_hook(self._end_pass)

    def check_fits(
        self,
        model: nn.Module,
        wrap: Sequence[nn.Module],
        *,
        ranks: int,
        dtype: torch.dtype,
        sub_group_size: int | None = None,
        resident_numel_below: int = 100_000,
        resident_numel_max: int = 0,
        cache_bytes: int = 0,
        update: Update = "step",
        split_master: bool = True,
        hold_parameters: bool = False,
        hold_state: bool = False,
    ) -> None:
        """Raise what `page` would raise for want of memory or space, while the model isn't sharded and can be used on.

        Args:
            wrap: the modules that will be groups of their own, beside the root.
            ranks: over how many it will be sharded.
            dtype: in which it will be gathered.
            others: as for `page`.
        """
        layout, _ = self._plan(
            outlined_groups(model, wrap),
            ranks,
            dtype,
            sub_group_size,
            math.inf if hold_parameters else resident_numel_below,
            resident_numel_max,
            cache_bytes,
            update,
            split_master,
            hold_state,
        )
        check_free(self._folders, self._bandwidths, layout.nbytes, _what_is_stored(hold_state))

    @property
    def paged(self) -> PagedModel:
        """The paged model. Raises InfinityError before `page`."""
        if self._paged is None:
            raise InfinityError("no model is paged yet: call page(model) first")
        return self._paged

    @property
    def stager(self) -> Stager:
        """What moves the chunks. Which are staged when, this manager decides; for a look at what is in flight."""
        return self._open().stager

    def gather(self, shard: PagedShard, *, training: bool, dtype: torch.dtype) -> torch.Tensor:
        """For the paged tensor: the shard's copy (1-D, padded) on the device, its group staged and in use."""
        timeline = self.timeline
        if timeline is None:
            return self._gather(shard, training=training, dtype=dtype)
        with timeline.gathering(shard.group.name):
            return self._gather(shard, training=training, dtype=dtype)

    def _gather(self, shard: PagedShard, *, training: bool, dtype: torch.dtype) -> torch.Tensor:
        model = shard.model
        model.check_whole()
        if dtype != model.copy_dtype:
            raise InfinityError(f"{shard.name} is gathered in {dtype}, but was paged for {model.copy_dtype}")
        if not shard.filled:
            raise InfinityError(f"{shard.name} was never given values: load or initialise it before the first forward")
        if shard.resident is not None:
            for sub in shard.sub_groups:
                model.catch_up(sub)
        else:
            if self._copying is not shard.group:
                self._give_back_copied()
                self._copying = shard.group
            chunk = shard.group.chunk
            if chunk is None:
                model.acquire(shard.group, self._look_ahead)
            elif chunk.state is not ChunkState.IN_USE:
                self._use(shard.group, training)
            shard.group.gathering.add(shard.index)
        self.demand_copies += self._device.copies and shard.resident is None and shard.group.incoming is None
        with measured(self.timeline if self._device.copies else None, "copy", shard.name):
            taken = model.gathered_view(shard)
        if shard.group.gathering and shard.group.handed_over:
            shard.group.incoming = None  # the device's memory is FSDP2's now
            self._stage_on_device()
        return taken

    def gathered(self, shard: PagedShard) -> None:
        """For the paged tensor: FSDP2 has gathered the shard. The group's lease goes back with its last one, or earlier."""
        group = shard.group
        if self.timeline is not None:
            self.timeline.gathered(group.name, at_once=self._alone)
        if shard.resident is not None:
            return
        group.gathering.discard(shard.index)
        if not group.gathering:
            self._give_back(group)
            self._stage_on_device()

    def finish_updates(self) -> None:
        """Run the updates that an optimizer step left for later: see [Note: Updates that wait] in paged_model.py.

        Nobody has to: they run by themselves before anybody sees what they change. But before many things are looked at, all
        at once is faster. Raises IoError when a transfer failed: where that was a read, the rest still waits.
        """
        layout, machinery = self.paged.layout, self._open()
        ahead = budget.sub_groups_ahead(machinery.pool.nbytes - layout.cached_bytes, layout.sub_group_bytes_max)
        finish_updates(self.paged, machinery.stager, ahead)

    def gradients_are_final(self, group: PagedGroup) -> bool:
        """For the optimizer, in a backward: whether the gradients of a group, once all are there, are all that come."""
        return self._forwards[group.index] == 1

    def update_in_backward(
        self, group: PagedGroup, updates: Mapping[PagedSubGroup, Callable[[Lease | None], None]]
    ) -> None:
        """For the optimizer: update members of a group now; see [Note: Updates in the backward] in paged_model.py."""
        self._phase = True
        self._forwards[group.index] += 1  # whoever brings more gradients is too late

        def look_ahead() -> None:
            trace.use(self._unit(next(left)))
            self._look_ahead()

        trace, left = self._traces[True], iter(updates)
        self.paged.update_in_backward(group, updates, look_ahead)

    def discard_step(self) -> None:
        """For the optimizer: what forward and backward passes did since the last step is void."""
        self._forwards.clear()

    def end_step(self) -> None:
        """For the optimizer: the step is over; the next one's first groups are read as soon as they are written."""
        if self._traces[True].end_cycle():
            self._tell_surprise()
        self._phase = True
        self._forwards.clear()
        if self.timeline is not None:
            self.timeline.steps += 1
        self._look_ahead()
        self._stage_on_device(update=False)

    # What it took.

    @property
    def backend(self) -> str:
        """The I/O backend in use."""
        return self._open().engine.backend

    @property
    def notes(self) -> list[str]:
        """What the machine refused and what was done instead, a line each."""
        machinery = self._open()
        own = [*machinery.notes, *self.host_gradients.notes]
        return [*machinery.engine.notes, *machinery.pool.notes, *machinery.arena.notes, *own]

    def stats(self) -> SwapStats:
        """The counters."""
        machinery = self._open()
        return SwapStats(
            read_bytes=machinery.engine.read_bytes,
            written_bytes=machinery.engine.written_bytes,
            stall_seconds=machinery.engine.stall_seconds,
            demand_reads=machinery.stager.demand_reads,
            surprises=sum(trace.surprises for trace in self._traces.values()),
            pinned_bytes=machinery.pool.nbytes,
            pinned_peak_bytes=machinery.pool.peak_bytes,
            cached_bytes=self._paged.layout.cached_bytes if self._paged is not None else 0,
            arena_bytes=machinery.arena.nbytes,
            drives=tuple(machinery.engine.drives),
        )

    def step_bytes(self, *, micro_batches: int = 1, gathers: Mapping[str, int] | None = None) -> tuple[int, int]:
        """Bytes (read, written) that a step moves in which every trained parameter has a gradient.

        Once a step was taken: what the next one like it moves, to the byte. Before: the sum for `micro_batches` that gather
        every group for forward and for backward, or as often in a step as `gathers` says, by name.
        """
        paged = self.paged
        stepped = [sub for sub in paged.sub_groups if sub.layout.trained]
        read = sum(span.nbytes for sub in stepped for span in sub.chunk.reads)
        written = sum(span.nbytes for sub in stepped for span in sub.chunk.writes)
        cycle = self._traces[True].cycle
        if cycle:
            return read + self._gathers_of(cycle), written
        for group in paged.groups:
            times = 2 * micro_batches if gathers is None else gathers[group.name]
            spared = self.update_at == "forward"  # the first gather after a step takes what was just updated
            if self.update_at == "backward" and group.completes is not None:
                times = max(times, 2)  # its update in the backward takes the copies that were read for it
            frozen = _copy_bytes(group, stepped=False)
            read += frozen * times + (_copy_bytes(group) - frozen) * (times - spared)
        return read, written

    def _gathers_of(self, cycle: Sequence[int]) -> int:
        """Bytes that the gathers of a cycle read, beside what the updates read that come with them."""
        groups = self.paged.groups
        waiting = {sub for sub in self.paged.sub_groups if sub.layout.trained} if self.update_at == "forward" else set()
        uses, reads = [], []
        updating: list[int] = []
        for index in cycle:
            if index >= len(groups):
                *copies, unit = self._with_copies(index)
                if copies != updating:  # in use from the first member's update to the last one's
                    uses += copies
                    reads += [_copy_bytes(groups[each]) for each in copies]
                updating = copies
                uses.append(unit)
                reads.append(0)
                continue
            group = groups[index]
            beside = [sub for sub in group.beside if sub in waiting]
            updated = [sub for sub in group.members if sub in waiting]
            waiting -= {*beside, *updated}
            uses += [*map(self._unit, beside), *map(self._unit, updated), index]
            reads += [0] * (len(beside) + len(updated)) + [_copy_bytes(group, stepped=not updated)]
        return cycle_read_bytes(uses, reads, self._choose)

    # What it does when.

    @property
    def timeline(self) -> Timeline | None:
        """Where what happens is noted; None while no trace runs."""
        return self._machinery.stager.timeline if self._machinery is not None else None

    def start_trace(self) -> None:
        """Note from now on what happens when, until `stop_trace`; first wait until the drives rest, so that the trace begins
        with whole transfers. Raises InfinityError when a trace runs already.
        """
        if self.timeline is not None:
            raise InfinityError("a trace runs already: call stop_trace() first")
        machinery = self._open()
        machinery.stager.timeline = Timeline(machinery.engine)

    def stop_trace(self, path: str | os.PathLike[str] | None = None) -> TraceSummary:
        """Wait until the drives rest, and end the trace: its figures. See docs/timeline.md.

        `path`: gets the events of this rank, in the format of Chrome's and Perfetto's trace viewers (JSON). Raises
        InfinityError when no trace runs, OSError when the file can't be written; the trace has ended then all the same.
        """
        timeline = self.timeline
        if timeline is None:
            raise InfinityError("no trace runs: call start_trace() first")
        self.stager.timeline = None
        return timeline.stop(path, rank=int(os.environ.get("RANK", "0")))

    def close(self) -> None:
        """Wait for what is in flight, give memory and drive space back. Idempotent.

        Raises IoError when a write failed that nobody waited for.
        """
        if self._closed:
            return
        self._closed = True
        machinery, self._machinery = self._machinery, None
        try:
            if self._paged is not None:
                self._paged.close()  # the model outlives this, and must not keep the pool
                self.host_gradients.close()
            if machinery is not None:
                machinery.close()
        finally:
            for folder in self._folders:
                folder.close()

    def __enter__(self) -> SwapManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How.

    def _open(self, pinned_bytes: int | None = None) -> _Machinery:
        if self._machinery is None:
            if self._closed:
                raise InfinityError("this SwapManager is closed")
            size = self._pinned_bytes or pinned_bytes or budget.PINNED_BYTES_DEFAULT
            self._machinery = self._make_machinery(size)
        return self._machinery

    def _make_machinery(self, pinned_bytes: int) -> _Machinery:
        pool = PinnedPool(pinned_bytes, lock=self._lock_memory)
        engine = IoEngine(
            pool,
            drives=len(self._folders),
            limits=self._drive_limits,
            faults=self._faults,
            **self._engine_options,
        )
        rank = os.environ.get("RANK", "0")
        arena = Arena(self._folders, engine, name=f"rank{rank}.arena", bandwidths=self._bandwidths)
        machinery = _Machinery(pool, engine, arena, self._device)
        if len(self._folders) > 1:
            parts = ", ".join(f"{share:.0%} on {path}" for path, share in arena.shares)
            machinery.notes.append(f"striping over {len(arena.shares)} drives by their bandwidth: {parts}")
        return machinery

    def _measure(self, paths: Sequence[str | os.PathLike[str]]) -> list[float]:
        """Bandwidth of the drive of each path for the reads and writes of a step (bytes per second)."""
        found = []
        for number, path in enumerate(paths):
            limits = self._drive_limits[number : number + 1]
            rates = measure_drive(path, nbytes=_MEASURE_BYTES, rounds=2, limits=limits, **self._engine_options)
            found.append(step_bandwidth(rates.read_bytes_per_s, rates.write_bytes_per_s))
        return found

    def _tensor(self, name: str) -> _Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise KeyError(f"no tensor named {name!r} is registered") from None

    def _acquire(self, name: str) -> tuple[_Tensor, torch.Tensor]:
        entry = self._tensor(name)
        if entry.chunk.state is ChunkState.IN_USE:
            raise InfinityError(f"tensor {name!r} is in use already")
        self._open().stager.settle(entry.chunk)
        if entry.lost is not None:
            raise InfinityError(
                f"tensor {name!r} is lost, part of it old and part new, since a write of it failed: {entry.lost}; register it "
                "anew under another name"
            )
        lease = self._open().stager.acquire(entry.chunk)
        return entry, lease.view(entry.dtype, 0, entry.shape.numel()).view(entry.shape)

    def _plan(
        self,
        groups: Sequence[GroupOutline],
        ranks: int,
        dtype: torch.dtype,
        sub_group_size: int | None,
        resident_below: float,
        resident_numel_max: int,
        cache_bytes: int,
        update: Update,
        split_master: bool,
        hold_state: bool,
    ) -> tuple[Layout, int]:
        """The model's layout and the size of the pool (bytes): what the pinned budget allows."""
        copy_itemsize = dtype.itemsize if dtype.itemsize < 4 or hold_state else 0
        shards = _shards(groups, ranks, resident_below, resident_numel_max)
        numel = min(sub_group_size or budget.SUB_GROUP_NUMEL_DEFAULT, budget.SUB_GROUP_NUMEL_DEFAULT)
        lay_out = partial(
            plan_layout,
            shards,
            groups=len(groups),
            copy_itemsize=copy_itemsize,
            split_master=split_master and dtype is torch.bfloat16,
            hold_state=hold_state,
        )
        scheme = Scheme("split" if split_master else "full", update)
        cached = plan_cache(
            lay_out(sub_group_numel_max=numel), scheme, [group.gathers for group in groups], cache_bytes
        )
        layout = lay_out(sub_group_numel_max=numel, cached=cached)
        group_bytes = [_staged_bytes(layout, index) for index in range(len(groups))]
        largest = max(range(len(groups)), key=group_bytes.__getitem__)
        largest_bytes = group_bytes[largest]
        explicit = self._machinery.pool.nbytes if self._machinery else self._pinned_bytes
        if explicit is not None:
            room = explicit - layout.cached_bytes - budget.GATHERS_IN_USE * largest_bytes
            bytes_per_element = max((sub.nbytes // sub.numel for sub in layout.sub_groups if sub.trained), default=0)
            fitting = budget.sub_group_numel_for(room, max(1, bytes_per_element))
            numel = min(sub_group_size or budget.SUB_GROUP_NUMEL_DEFAULT, max(fitting, SPACE_ALIGN))
            layout = lay_out(sub_group_numel_max=numel, cached=cached)
        gather, stepped = budget.gather_bytes(largest_bytes), layout.sub_group_bytes_max
        pinned = explicit or budget.comfortable_bytes(gather, stepped) + layout.cached_bytes
        budget.check_available(pinned)
        pipeline = budget.pipeline_bytes(largest_bytes, stepped)
        need = budget.PinnedBudget(gather, pipeline, cache_bytes=layout.cached_bytes)
        budget.check_budget(pinned, need, groups[largest].name, largest_bytes)
        return layout, pinned

    def _take_over(self, groups: list[ShardedGroup], paged: PagedModel) -> dict[nn.Parameter, nn.Parameter]:
        """Move the values into the arena; the paged tensors that take the parameters' place."""
        parameters = [p for group in groups for p in group.parameters]
        torch_device = self._device.torch_device
        replacements: dict[nn.Parameter, nn.Parameter] = {}
        for shard, source in zip(paged.shards, parameters, strict=True):
            local = PagedTensor.over(shard, Field.MASTER, self, torch_device)
            shard.filled = shard.shape.numel() == 0
            if not source.local.is_meta:
                local.store(source.local.detach())
            sharded = source.sharded
            tensor = DTensor.from_local(
                local,
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
            replacements[source.parameter] = nn.Parameter(tensor, requires_grad=source.parameter.requires_grad)
        return replacements

    def _device_of(self, groups: list[ShardedGroup]) -> Device:
        """Where the model computes: the device of the mesh it was sharded over."""
        kind = groups[0].parameters[0].sharded.device_mesh.device_type
        self._device = device_for(
            torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        )
        return self._device

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():
            self._pass_trains = module.training and torch.is_grad_enabled()

    def _count_forward(self, group: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self._forwards[group] += 1

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not in_backward():
            self._end_evaluation()
            self._pass_trains = None

    def _end_evaluation(self) -> None:
        if self._traces[False].end_cycle():
            self._tell_surprise()

    def _is_training(self, module_trains: bool) -> bool:
        """Whose gather it is: see [Note: Phases]."""
        if in_backward():
            return True
        return module_trains if self._pass_trains is None else self._pass_trains

    def _use(self, group: PagedGroup, training: bool) -> None:
        self._phase = training = self._is_training(training)
        trace = self._traces[training]
        # What one phase leaves gathered, the other doesn't ask for: no other path.
        self._traces[not training].interrupt()
        if not training and self._pass_trains is None and trace.used(group.index):
            self._end_evaluation()
        for sub in group.beside:
            self.paged.catch_up(sub)
        trace.use(group.index)
        self.paged.acquire(group, partial(self._look_ahead, group))
        self._look_ahead()

    def _give_back_copied(self) -> None:
        """The lease of the group that was asked for last, if FSDP2 has all of it."""
        group = self._copying
        if group is not None and group.gathering and group.handed_over:
            self._give_back(group)
            group.gathering.clear()

    def _give_back(self, group: PagedGroup) -> None:
        group.incoming = None
        if group.chunk is not None and group.chunk.state is ChunkState.IN_USE:
            stager = self._open().stager
            stager.release(group.chunk, keep=group.chunk in stager.wanted, landing=group.landing)
        if group.cached is None:  # what is cached must have landed before it is stepped: see PagedModel.forget
            group.landing = None

    def _look_ahead(self, using: PagedGroup | None = None) -> None:
        """Start the reads for what comes next; `using`: the group whose members are being updated now."""
        stager = self._open().stager
        chosen = self._choose(self._upcoming(using))
        stager.wanted = [chunk for index in chosen if (chunk := self._units[index]) is not None]
        for chunk in stager.wanted:
            if chunk.state is ChunkState.RESTING and not stager.prefetch(chunk):
                break

    def _stage_on_device(self, *, update: bool = True) -> None:
        """Begin to copy the groups that come next to a device with memory of its own: see [Note: Ahead on the device]."""
        if not self._device.copies:
            return
        soon = self._soon_on_device()
        for group in self._ahead:
            if group not in soon and group is not self._copying:
                group.incoming = None
        self._ahead = []
        for group in soon:
            if not self.paged.start_ahead(group, partial(self._look_ahead, group), update=update):
                break
            self._ahead.append(group)

    def _soon_on_device(self) -> list[PagedGroup]:
        """The next groups whose copies fit in what may lie on the device ahead of use, until one that is still to change."""
        groups, room = self.paged.groups, self.device_ahead_bytes
        found: list[PagedGroup] = []
        changing: set[int] = set()
        for index in self._traces[self._phase].upcoming(into_next=not self._phase):
            if index >= len(groups):  # an update in the backward
                changing.add(self.paged.sub_groups[index - len(groups)].layout.space)
                continue
            group = groups[index]
            if group in found or (group.chunk is None and group.cached is None):
                continue
            room -= self.paged.copies_bytes(group)
            if room < 0 or index in changing:
                break
            found.append(group)
        return found

    def _choose(self, upcoming: Iterable[int]) -> list[int]:
        """What should be staged now of what comes next: as much as the pool has room for, and gathers as far as they may run
        ahead; what the updates of a group need counts with the group."""
        fitting = groups_to_stage(upcoming, self._unit_bytes, self._room_bytes)
        return groups_to_stage(fitting, self._gathered_bytes, self._look_ahead_bytes)

    def _unit(self, sub: PagedSubGroup) -> int:
        return len(self.paged.groups) + sub.layout.index

    def _upcoming(self, using: PagedGroup | None) -> Iterator[int]:
        """What is to be staged, soonest first, as numbers in `_units`: each group and what its updates need."""
        paged = self.paged
        groups = paged.groups
        if using is not None:
            yield from map(self._unit, paged.waiting(using))
            yield using.index
        for index in self._traces[self._phase].upcoming(into_next=not self._phase):
            if index >= len(groups):  # an update in the backward, which needs the copies too
                yield from self._with_copies(index)
                continue
            group = groups[index]
            yield from (self._unit(sub) for sub in group.beside if sub in paged.updates)
            yield index
            yield from map(self._unit, paged.waiting(group))
        yield from map(self._unit, paged.updates)

    def _with_copies(self, unit: int) -> Iterator[int]:
        """A sub-group that is updated in the backward, and before it the group whose copies that needs."""
        sub = self.paged.sub_groups[unit - len(self.paged.groups)]
        if self.paged.groups[sub.layout.space].completes is not None:
            yield sub.layout.space
        yield unit

    def _tell_surprise(self) -> None:
        if not self._told_surprise:
            self._told_surprise = True
            log.info("the model took another path than in the pass before; reads follow the new one from now on")


class _Machinery:
    """Pool, engine, arena and stager: made together when the size of the pool is known, closed together."""

    def __init__(self, pool: PinnedPool, engine: IoEngine, arena: Arena, device: Device) -> None:
        self.notes: list[str] = []
        self.pool = pool
        self.engine = engine
        self.arena = arena
        self.stager = Stager(engine, pool, arena, device)

    def adopt(self, device: Device, *, pin: bool) -> None:
        """Compute happens on `device` from now on."""
        self.stager.device = device
        refused = device.register(self.pool.slab) if pin else None
        if refused:
            self.notes.append(refused)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # from the last to the first, whatever fails
            closing.callback(self.arena.close)
            closing.callback(self.stager.device.unregister, self.pool.slab)
            closing.callback(self.engine.close)
            closing.callback(self.stager.drop_all)
            self.stager.settle_all()


def _make_folders(paths: Sequence[str | os.PathLike[str]]) -> list[RunFolder]:
    """A run folder under each path, or none."""
    folders: list[RunFolder] = []
    try:
        for path in paths:
            folders.append(RunFolder(path))
    except BaseException:
        for folder in folders:
            folder.close()
        raise
    return folders


def _shards(groups: Sequence[GroupOutline], ranks: int, resident_below: float, resident_numel_max: int) -> list[Shard]:
    """What the layout needs to know of each parameter, and which copies stay resident."""
    shards = []
    left = resident_numel_max
    for index, group in enumerate(groups):
        for parameter in group.parameters:
            numel = padded_shape(parameter.shape, ranks).numel()
            resident = parameter.shape.numel() < resident_below
            if not resident and numel <= left:
                resident = True
                left -= numel
            shards.append(Shard(parameter.name, index, numel, parameter.trained, resident))
    return shards


def _copy_bytes(group: PagedGroup, *, stepped: bool = True) -> int:
    """What gathering a group reads where nothing of it is staged; `stepped`: the copies of what is trained too."""
    members = [sub for sub in group.members if stepped or not sub.layout.trained]
    return sum(sub.layout.numel * sub.layout.itemsize(sub.layout.gathered) for sub in members if sub.rests)


def _staged_bytes(layout: Layout, group: int) -> int:
    """What the group's lease takes: all of what is gathered, unless all of it is cached."""
    members = layout.by_space[group]
    away = any(sub.gathered not in sub.cached for sub in members)
    return sum(sub.numel * sub.itemsize(sub.gathered) for sub in members) if away else 0


def _what_is_stored(hold_state: bool) -> str:
    return "parameters" if hold_state else "parameters and optimizer state"
