"""Floor 8. The swap manager: the floor's public face, over one run's drives and pinned pool.

Two faces, in fact. `page(model)` hands a model that FSDP2 sharded over to the arena; `register / prefetch / use / update /
flush` do the same for plain tensors of any other engine. What a gather, an update or a step sets off comes together here: what
to stage when is decided in policy.py and carried out by the stager. One thread
at a time: see [Note: Other threads].
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.aio import DriveLimit, DriveStats, FaultPlan, IoSettings, PoolPart
from infinity.device import CpuDevice, Device, device_for
from infinity.errors import BudgetError, CheckpointError, InfinityError
from infinity.fsdp2.sharding import (
    GroupOutline,
    ShardedGroup,
    abandon_unfinished_pass,
    gathered_dtype,
    guard_state_dict,
    in_backward,
    install,
    is_at_rest,
    outlined_groups,
    sharded_groups,
)
from infinity.plan.estimate import record_bytes
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.schedule.pinned import ACCESS_BYTES, sub_groups_ahead
from infinity.schedule.scheme import Update
from infinity.schedule.timeline import TraceSummary
from infinity.store import Arena, ArenaLayout, DurableRun, Field, Layout
from infinity.store.arena_copy import Copying
from infinity.store.commit import describe, differences
from infinity.store.files import StoredFile
from infinity.swap import budget
from infinity.swap.ahead import DeviceAhead
from infinity.swap.gradients import Gradients
from infinity.swap.group import PagedGroup
from infinity.swap.health import Health
from infinity.swap.host_gradients import HostGradients
from infinity.swap.machinery import Drives, Machinery
from infinity.swap.options import PagingOptions, options_from_arguments
from infinity.swap.paged_model import PagedModel
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.parameter_lap import ParameterLap
from infinity.swap.plain_tensors import PlainTensors
from infinity.swap.plan import plan_model
from infinity.swap.policy import StagingPolicy
from infinity.swap.shard import PagedShard
from infinity.swap.stager import Stager
from infinity.swap.sub_group import PagedSubGroup, SubGroupUpdate
from infinity.swap.timeline import Timeline
from infinity.swap.updates import finish_updates
from infinity.units import format_bytes, parse_bytes


@dataclass(frozen=True)
class SwapStats:
    """Counters since the start (bytes, seconds)."""

    read_bytes: int
    written_bytes: int
    stall_seconds: float
    demand_reads: int
    mispredictions: int
    pinned_bytes: int
    pinned_peak_bytes: int
    cached_bytes: int
    """Pinned bytes that hold what stays from step to step."""
    arena_bytes: int
    drives: tuple[DriveStats, ...]
    """What each drive moved, in the order of the paths."""

    @property
    def surprises(self) -> int:  # deprecated
        """Deprecated: `mispredictions`."""
        message = "SwapStats.surprises is deprecated: use SwapStats.mispredictions"  # deprecated
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.mispredictions


class SwapManager:
    """Moves a model, or plain tensors, between NVMe and a fixed amount of pinned host memory.

    Args:
        path: a folder on the drive, or several on as many drives, over which everything is striped by their bandwidth.
            This run makes a folder of its own in each and removes it at the end.
        pinned_bytes_max: pinned host memory (bytes, or "2GiB"); "auto" takes what the model needs to run at full speed
            (see infinity/swap/budget.py), 512 MiB for plain tensors.
        io: how the drives are driven.
        bandwidths: of the drives (any one unit); with several and None they are measured, which takes a second.
        drive_limits: one per drive, to make drives slower than they are; for experiments.
        faults: makes them fail; for tests.
        lock_memory: ask the kernel to lock the pinned pages.
        pin_memory: register host memory with the GPU, where there is one, so that copies run beside what it computes.
        direct: read parameters from the drives to the GPU past host memory, where this can be done (GPUDirect Storage through
            kvikio, and `checksums` off); `notes` say why where it can't. See docs/gpu.md, "Past host memory".
        checksums: keep a CRC-32C of every 4 KiB that is written, and raise IntegrityError, naming the file and the place,
            before anybody uses bytes that come back otherwise (docs/reliability.md, "Integrity").
        run: files that stay, under these paths, for a model whose steps are committed; `infinity.initialize` makes it.
        io_options: fields of `io` by name, which count instead: `backend="threads"`. `host_bytes_max`, the name of
            `pinned_bytes_max` until 0.1, is deprecated.

    Raises StoreError (path), IoError (backend), MemoryError (pool). Use it as a context manager, or call `close()`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        pinned_bytes_max: int | str = "auto",
        io: IoSettings | None = None,
        lock_memory: bool = False,
        pin_memory: bool = True,
        direct: bool = False,
        checksums: bool = True,
        bandwidths: Sequence[float] | None = None,
        drive_limits: Sequence[DriveLimit] = (),
        faults: FaultPlan | None = None,
        run: DurableRun | None = None,
        **io_options: Any,
    ) -> None:
        if "host_bytes_max" in io_options:
            warnings.warn("host_bytes_max of SwapManager is now pinned_bytes_max", DeprecationWarning, stacklevel=2)
            pinned_bytes_max = io_options.pop("host_bytes_max")
        self.run = run
        self._memory_bytes = budget.memory_of_rank()
        self._pinned_bytes = None if pinned_bytes_max == "auto" else parse_bytes(pinned_bytes_max)
        if self._pinned_bytes is not None and self._pinned_bytes < 2 * ACCESS_BYTES:
            raise BudgetError(
                f"pinned_bytes_max of {format_bytes(self._pinned_bytes)} is below the "
                f'least that works, {format_bytes(2 * ACCESS_BYTES)}: raise it, or leave it "auto"'
            )
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        io = replace(io or IoSettings(), **io_options)
        self._drives = Drives(
            paths, io, bandwidths=bandwidths, limits=drive_limits, faults=faults, run=run, checksums=checksums
        )
        self._lock_memory, self._pin_memory, self._wants_direct = lock_memory, pin_memory, direct
        self._machinery: Machinery | None = None
        self._tensors = PlainTensors(self._open)
        self._paged: PagedModel | None = None
        self._place: ArenaLayout | None = None
        self._policy: StagingPolicy | None = None
        """Of the paged model."""
        self._activation_part: PoolPart | None = None
        self._activation_stager: Stager | None = None
        self._gradients: Gradients | None = None
        """The same."""
        self.update_at: Update = "step"
        """When the optimizer updates the paged parameters: `update` of `page`."""
        self._device: Device = CpuDevice()
        self._parameters: ParameterLap | None = None
        self._lock = threading.RLock()
        """Held in whatever another floor sets off here: see `entered`."""
        self._model: weakref.ref[nn.Module] | None = None
        self._thread = threading.get_ident()
        """The training thread: where the last pass began."""
        self._backward_follows = False
        """Whether the last forward was one that a backward may follow."""
        self._in_use = self._broken = False
        """Whether somebody is in here now, or an exception ended what he did."""
        self._closed = False

    # Plain tensors.

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Store a copy of `tensor` (any shape and dtype, on the CPU) in the arena under `name`.

        Raises ValueError for a name that is taken, StoreError without space, BudgetError when the pool is smaller than it.
        """
        self._tensors.register(name, tensor)

    def prefetch(self, name: str) -> bool:
        """Start reading `name` if there is room now; whether it is on its way or here."""
        return self._tensors.prefetch(name)

    def use(self, name: str) -> contextlib.AbstractContextManager[torch.Tensor]:
        """The tensor in pinned memory, for reading only, until the end of the block."""
        return self._tensors.use(name)

    def update(self, name: str) -> contextlib.AbstractContextManager[torch.Tensor]:
        """The tensor in pinned memory, to be changed in place; written back in the background after the block.

        A block that raises leaves the stored bytes as they were.
        """
        return self._tensors.update(name)

    def flush(self) -> None:
        """Wait until everything updated is on the drive (fdatasync). Raises IoError when a write failed."""
        if self._machinery is None and not self._closed:
            return  # nothing was ever stored
        machinery = self._open()
        with self.entered():
            if self._paged is not None:
                self.finish_updates()
            machinery.stager.settle_all()
            machinery.arena.sync()

    # A model.

    def page(
        self,
        model: nn.Module,
        options: PagingOptions | None = None,
        **deprecated: Any,
    ) -> None:
        """Move the parameters of a model that `fully_shard` was applied to into the arena, in place.

        After this the model's parameters are paged tensors (fp32 masters), every gather reads its 16-bit compute parameters
        from NVMe, and `PagedAdamW(model.parameters(), swap=self)` steps it. Parameters on the meta device get their place
        without ever being held; give them values (`load_state_dict`, `infinity.initialize`) before they are used.

        Args:
            options: what rests where, and when it is updated; the defaults where None.
            deprecated: fields of `PagingOptions` by name, or by the name they had as arguments of this method until 0.1.

        A collective of the ranks that the model is sharded over. Raises ConfigError for a model that can't be paged,
        BudgetError when the pool is too small for one group or three sub-groups (naming the number that would do), StoreError
        without space, on all ranks when on one; the model is unchanged then.
        """
        if self._paged is not None:
            raise InfinityError("this SwapManager has paged a model already: make another one for a second model")
        groups = sharded_groups(model)
        dtype = gathered_dtype(model)
        if deprecated:
            if options is not None:
                raise TypeError(f"page() takes either options or keyword arguments, not both: {', '.join(deprecated)}")
            options = options_from_arguments(deprecated, dtype)
        options = options or PagingOptions()
        mesh = groups[0].parameters[0].sharded.device_mesh
        with raise_on_all_ranks(mesh.get_group() if mesh.ndim == 1 else None):
            outlines = [group.outline for group in groups]
            layout, pinned_bytes = self._plan(outlines, mesh.size(-1), dtype, options)
            place = self._checked_place(layout, outlines, mesh.size(-1), dtype, options)
            device = self._device_of(groups)  # before the pool is made, which is to lie near it
            machinery = self._open(pinned_bytes)
            machinery.adopt(device, pin=self._pin_memory, direct=self._wants_direct)
            paged = PagedModel(
                layout=layout,
                group_names=[group.name for group in groups],
                shapes=[(p.local.shape, p.padded_shape) for group in groups for p in group.parameters],
                compute_dtype=dtype,
                in_backward=options.update == "backward",
                durable=self.run is not None,
                stager=machinery.stager,
                arena=machinery.arena,
                host_memory=machinery.host_memory,
                direct=machinery.direct is not None,
                what=options.stored_in_words,
            )
            arena = machinery.arena
            self._place = replace(
                place, pattern=arena.pattern, stripe_bytes=arena.stripe_bytes, arena_bytes=arena.nbytes
            )
            replacements = self._take_over(groups, paged)
        self._paged, self.update_at = paged, options.update
        self._gradients = Gradients(paged, lambda: self.stager, lambda: self.host_gradients, options.gradient_dtype)
        spilling = max(sub.gradient_bytes for sub in layout.sub_groups)  # a lease in the middle of a backward
        room = machinery.pool.nbytes - layout.cached_bytes - spilling - options.activation_buffer_bytes
        if options.activation_buffer_bytes:
            self._activation_part = PoolPart(
                machinery.stager.make_room(options.activation_buffer_bytes, "saved activations")
            )
        look_ahead_bytes = options.look_ahead_bytes(dtype)
        self._policy = StagingPolicy(paged, options.update, room, look_ahead_bytes)
        ahead = self._make_ahead(paged, machinery, look_ahead_bytes)
        self._parameters = ParameterLap(paged, self._policy, machinery.direct, ahead, alone=mesh.size(-1) == 1)
        install(model, replacements)
        self._model = weakref.ref(model)
        guard_state_dict(model, partial(_entered, weakref.ref(self)))
        if options.update == "backward":
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
        options: PagingOptions,
    ) -> None:
        """Raise what `page` would raise for want of memory or space, while the model isn't sharded and can be used on.

        Args:
            wrap: the modules that will be groups of their own, beside the root.
            ranks: over how many it will be sharded.
            dtype: in which it will be gathered.
            options: as for `page`.
        """
        groups = outlined_groups(model, wrap)
        layout, _ = self._plan(groups, ranks, dtype, options)
        self._checked_place(layout, groups, ranks, dtype, options)
        nbytes = layout.nbytes + layout.gradient_bytes
        if self.run is not None:
            nbytes += layout.nbytes + record_bytes(layout.nbytes)
        self._drives.check_free(nbytes, options.stored_in_words)

    @property
    def arena_layout(self) -> ArenaLayout:
        """How the state lies in the arena."""
        assert self._place is not None
        return self._place

    def settle(self) -> None:
        """Run the updates that wait, and wait for what is being written. Raises IoError, InfinityError after a torn step."""
        with self.entered():
            self.finish_updates()
            self.stager.settle_all()
            self.paged.check_whole()

    def start_copying(self, path: Path, finish: Callable[[StoredFile], None]) -> Copying:
        """Begin to copy the model's state as it is now into the new file `path`, while training goes on; then run `finish` with
        it on the thread that copied. To be ended, by `join` or `cancel`, before the next one begins and before `close`.

        No update may wait, and all must be written: see `settle`. Raises IoError, OSError.
        """
        machinery = self._open()
        sections = [sub.sources() for sub in self.paged.sub_groups]
        copying = Copying(machinery.arena, sections, path, finish)
        self.paged.start_copying(copying)
        return copying

    @property
    def paged(self) -> PagedModel:
        """The paged model. Raises InfinityError before `page`."""
        if self._paged is None:
            raise InfinityError("no model is paged yet: call page(model) first")
        return self._paged

    @property
    def gradients(self) -> Gradients:
        """Where its gradients wait for their update. Raises InfinityError before `page`."""
        _ = self.paged
        assert self._gradients is not None
        return self._gradients

    @property
    def stager(self) -> Stager:
        """What moves the chunks. Which are staged when, this manager decides; for a look at what is in flight."""
        return self._open().stager

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Around whatever the paged tensors and the optimizer set off here, which anybody may end with an exception.

        What it leaves is made anew by the next who enters. Raises InfinityError on another thread than the training one while a
        pass is going on: see [Note: Other threads].
        """
        with self._lock:
            if self._in_use:
                yield
                return
            self._check_thread()
            if self._broken:
                self.recover()
            self._in_use = True
            try:
                yield
            except BaseException:
                self._broken = True
                self._in_use = False
                raise
            self._in_use = False

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """Around what no other thread may look into: others wait."""
        return self._lock

    def recover(self) -> None:
        """Where no pass is going on: make anew all that one leaves which an exception ended, at whatever line.

        What was staged, gathered or on its way is dropped, what was being written is waited for, and a change of values that
        never ended tears them (infinity/swap/health.py, [Note: What an exception may end]). Gradients stay as they are.
        """
        with self._lock:
            machinery, paged = self._machinery, self._paged
            if machinery is not None and paged is not None:
                kept = [*self._tensors.leases, *paged.leases]
                if self._activation_part is not None:
                    kept.append(self._activation_part.lease)
                machinery.stager.recover(kept)
                paged.recover()
                self._staging.recover()
                if self._parameters is not None:
                    self._parameters.recover()
            self._in_use = self._broken = False

    def _check_thread(self) -> None:
        """[Note: Other threads]
        A look at a weight or a state_dict moves bytes through the same pool and the same groups as the training thread, and
        makes FSDP2 release what is gathered, which that thread may be computing with. So another thread is let in between
        steps, where nothing is gathered for a backward that may follow, one at a time, and what begins meanwhile waits.
        (Autograd has threads of its own, for devices; what they do is the training thread's.)
        """
        if threading.get_ident() == self._thread or in_backward():
            return
        model = self._model() if self._model is not None else None
        if model is not None and not is_at_rest(model, gathered=not self._backward_follows):
            raise InfinityError(
                "another thread trains the model, whose parameters rest on NVMe, and it is in the middle of a step: look at "
                "them (state_dict, a weight, a forward) on that thread, or on this one between steps"
            )

    def gather(self, shard: PagedShard, *, training: bool, dtype: torch.dtype) -> torch.Tensor:
        """For the paged tensor: the shard's copy (1-D, padded) on the device, its group staged and in use."""
        timeline = self.timeline
        with self.entered(), timeline.gathering(shard.group.name) if timeline is not None else contextlib.nullcontext():
            if not in_backward():
                self._thread = threading.get_ident()
            return self._lap.gather(shard, training=training, dtype=dtype)

    def gathered(self, shard: PagedShard) -> None:
        """For the paged tensor: FSDP2 has gathered the shard. The group's lease goes back with its last one, or earlier."""
        with self.entered():
            self._lap.gathered(shard)

    @property
    def host_gradients(self) -> HostGradients:
        """For the optimizer: brings gradients from the device to where it uses them."""
        return self._open().gradients

    @property
    def device(self) -> Device:
        """Where the paged model computes."""
        return self._device

    def activation_buffers(self) -> tuple[Stager, PoolPart, Arena]:
        """What moves saved activations: a stager over the pinned memory of `PagingOptions.activation_buffer_bytes`, that
        memory, and the arena. Raises InfinityError where that is 0."""
        if self._activation_part is None:
            raise InfinityError(
                "no pinned memory was set aside for saved activations: page with PagingOptions(activation_buffer_bytes=...)"
            )
        machinery = self._open()
        stager = Stager(machinery.engine, self._activation_part, machinery.arena, self._device)
        stager.timeline = self.timeline
        self._activation_stager = stager
        return stager, self._activation_part, machinery.arena

    @property
    def groups_coming(self) -> int:
        """For the optimizer: of how many groups it lets the gradients be on their way while it updates the one before."""
        return int(self._device.is_discrete)

    @property
    def device_ahead(self) -> DeviceAhead | None:
        """What goes to the device before it is gathered, and how much may lie there; None where nothing is copied."""
        return self._parameters.ahead if self._parameters is not None else None

    def finish_updates(self) -> None:
        """Run the updates that an optimizer step left for later: see [Note: Updates that wait] in pending_updates.py.

        Nobody has to: they run by themselves before anybody sees what they change. But before many things are looked at, all
        at once is faster. Raises IoError when a transfer failed: where that was a read, the rest still waits.
        """
        layout, machinery = self.paged.layout, self._open()
        room = (
            machinery.pool.nbytes - layout.cached_bytes - (self._activation_part.nbytes if self._activation_part else 0)
        )
        ahead = sub_groups_ahead(room, layout.sub_group_bytes_max)
        with self.entered():
            finish_updates(self.paged, machinery.stager, ahead)

    def gradients_are_final(self, group: PagedGroup) -> bool:
        """For the optimizer, in a backward: whether the gradients of a group, once all are there, are all that come."""
        return self._staging.gradients_are_final(group)

    def update_in_backward(self, group: PagedGroup, updates: Mapping[PagedSubGroup, SubGroupUpdate]) -> None:
        """For the optimizer: update members of a group now; see [Note: Updates in the backward] in pending_updates.py.

        Raises IoError when a transfer failed; the values are torn then, as after any failure.
        """
        paged, policy, lap = self.paged, self._staging, self._lap
        with self.entered():
            lap.give_back_copied()  # FSDP2 may have asked for it anew, taking it for the next; it drops what it fetched so
            policy.begin_update(group)
            with paged.updates.backward_update(group, [*updates]) as compute:
                for sub, update in updates.items():
                    paged.updates.run_in_backward(sub, update, compute)
                    policy.use_state(sub)
                    lap.look_ahead()

    def discard_step(self) -> None:
        """For the optimizer: what forward and backward passes did since the last step is void."""
        self._staging.discard_step()

    def end_step(self) -> None:
        """For the optimizer: the step is over; the next one's first groups are read as soon as they are written."""
        with self.entered():
            self._staging.end_step()
            if self.timeline is not None:
                self.timeline.steps += 1
            self._lap.look_ahead()
            self._lap.start_ahead(update=False)  # the step returns at once

    # What it took.

    @property
    def backend(self) -> str:
        """The I/O backend in use."""
        return self._open().engine.backend

    @property
    def reads_directly(self) -> bool:
        """Whether parameters go past host memory where they can: see `direct`."""
        return self._open().direct is not None

    @property
    def notes(self) -> list[str]:
        """What the machine refused and what was done instead, a line each."""
        return self._open().notes

    def stats(self) -> SwapStats:
        """The counters."""
        machinery = self._open()
        return SwapStats(
            read_bytes=machinery.engine.read_bytes + (machinery.direct.read_bytes if machinery.direct else 0),
            written_bytes=machinery.engine.written_bytes,
            stall_seconds=machinery.engine.stall_seconds,
            demand_reads=machinery.stager.demand_reads,
            mispredictions=self._policy.mispredictions if self._policy is not None else 0,
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
        moved = self._staging.step_bytes(micro_batches, gathers)
        spilled = self.gradients.step_bytes(micro_batches)
        return moved[0] + spilled[0], moved[1] + spilled[1]

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
        self._trace_into(Timeline(machinery.engine))

    def stop_trace(self, path: str | os.PathLike[str] | None = None) -> TraceSummary:
        """Wait until the drives rest, and end the trace: its figures. See docs/timeline.md.

        `path`: gets the events of this rank, in the format of Chrome's and Perfetto's trace viewers (JSON). Raises
        InfinityError when no trace runs, OSError when the file can't be written; the trace has ended then all the same.
        """
        timeline = self.timeline
        if timeline is None:
            raise InfinityError("no trace runs: call start_trace() first")
        self._trace_into(None)
        return timeline.stop(path, rank=int(os.environ.get("RANK", "0")))

    def _trace_into(self, timeline: Timeline | None) -> None:
        self.stager.timeline = timeline
        if self._activation_stager is not None:
            self._activation_stager.timeline = timeline

    def close(self) -> None:
        """Wait for what is in flight, give memory and drive space back. Idempotent.

        Raises IoError when a write failed that nobody waited for.
        """
        with self._lock:
            if self._closed:
                return
            if self._in_use or self._broken:
                self.recover()
            self._closed = True
            machinery, self._machinery = self._machinery, None
            try:
                if self._gradients is not None:
                    self._gradients.forget()
                if self._paged is not None:
                    self._paged.close()  # the model outlives this, and must not keep the pool
                if machinery is not None:
                    machinery.close()
            finally:
                self._drives.close()

    def __enter__(self) -> SwapManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How.

    def _open(self, pinned_bytes: int | None = None) -> Machinery:
        if self._machinery is None:
            if self._closed:
                raise InfinityError("this SwapManager is closed")
            size = self._pinned_bytes or pinned_bytes or budget.PINNED_BYTES_DEFAULT
            self._machinery = Machinery(size, self._drives, self._device, lock_memory=self._lock_memory)
        return self._machinery

    @property
    def _staging(self) -> StagingPolicy:
        if self._policy is None:
            raise InfinityError("no model is paged yet: call page(model) first")
        return self._policy

    def _plan(
        self, groups: Sequence[GroupOutline], ranks: int, dtype: torch.dtype, options: PagingOptions
    ) -> tuple[Layout, int]:
        pinned_bytes = self._machinery.pool.nbytes if self._machinery else self._pinned_bytes
        return plan_model(groups, ranks, dtype, options, pinned_bytes, self._memory_bytes)

    def _checked_place(
        self, layout: Layout, groups: Sequence[GroupOutline], ranks: int, dtype: torch.dtype, options: PagingOptions
    ) -> ArenaLayout:
        """How the state lies, the drives aside. Raises CheckpointError where what a durable run goes on from lies in another
        way."""
        shapes = [parameter.shape for group in groups for parameter in group.parameters]
        kind = str(dtype).removeprefix("torch.")
        world = dist.get_world_size()
        rank, moments = dist.get_rank(), options.moments
        place = describe(layout, shapes, rank=rank, ranks=world, shards=ranks, compute_dtype=kind, moments=moments)
        if self.run is None or self.run.resumed is None:
            return place
        if why := list(differences(self.run.resumed.layout, place)):
            raise CheckpointError(
                f"what {self.run.where} holds is of another training: {'; '.join(why)}; resume with the model and config of "
                "that run, or start without resume under another infinity.run_name"
            )
        return place

    def _take_over(self, groups: list[ShardedGroup], paged: PagedModel) -> dict[nn.Parameter, nn.Parameter]:
        """Move the values into the arena; the paged tensors that take the parameters' place."""
        parameters = [p for group in groups for p in group.parameters]
        torch_device = self._device.torch_device
        replacements: dict[nn.Parameter, nn.Parameter] = {}
        for shard, source in zip(paged.shards, parameters, strict=True):
            local = PagedTensor.over(shard, Field.MASTER, self, torch_device)
            shard.filled = shard.shape.numel() == 0
            if not source.local.is_meta and (self.run is None or self.run.resumed is None):
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
        if in_backward():
            return
        with self._lock:
            self._check_thread()
            self._thread = threading.get_ident()
            self.leave_unfinished_pass(at_root=True)
            self._staging.begin_pass(trains=module.training and torch.is_grad_enabled())

    def leave_unfinished_pass(self, *, at_root: bool = False) -> None:
        """Where no pass is going on: make anew what is left of one that an exception ended. Where that was a backward which had
        updated a part of the model, the values are torn.

        `at_root`: the root's own forward begins, perhaps out of another method of it that FSDP2 takes for its forward.
        """
        assert self._model is not None
        model = self._model()
        assert model is not None
        began = self._staging.in_pass or self._in_use or self._broken
        unfinished = abandon_unfinished_pass(model, root_may_run=at_root and not began)
        if unfinished and self.paged.health.state is Health.AHEAD:
            self.paged.health.tear("a backward that an exception ended")
        if unfinished or began:
            self.recover()

    def _count_forward(self, group: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self._staging.count_forward(group)

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not in_backward():
            self._backward_follows = torch.is_grad_enabled()
            self._staging.end_pass()

    @property
    def _lap(self) -> ParameterLap:
        assert self._parameters is not None
        return self._parameters

    def _make_ahead(self, paged: PagedModel, machinery: Machinery, look_ahead_bytes: int | None) -> DeviceAhead | None:
        """What comes next on its way to the device, where that has memory of its own."""
        if not self._device.is_discrete:
            return None
        largest = max(group.compute_bytes for group in paged.groups)
        if any(map(paged.may_go_direct, paged.groups)):  # these are read ahead there, and nowhere else
            largest = max(largest, look_ahead_bytes or 0)
        elif machinery.direct is not None:
            machinery.note(
                "nothing of this model goes past host memory, although aio.use_gds is set: the host needs all copies that "
                'are read, for updates in the backward or from a cache (infinity.update "forward" or "step")'
            )
        return DeviceAhead(self._staging, bytes_max=largest)


def _entered(swap: weakref.ref[SwapManager]) -> contextlib.AbstractContextManager[None]:
    """Into what pages a model; one that has outlived it is nobody's."""
    alive = swap()
    return alive.entered() if alive is not None else contextlib.nullcontext()
