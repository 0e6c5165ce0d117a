"""The swap manager: the public API of this package, over one run's drives and pinned pool.

It has two APIs: `page(model)` moves a model that FSDP2 sharded into the arena and returns the object that moves it from
then on (paging.py); `tensors` stores plain tensors for any other engine. Both share drives, engine and pool.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.aio import DriveStats, IoSettings
from infinity.device import Device, device_for
from infinity.errors import BudgetError, CheckpointError, InfinityError
from infinity.fsdp2.buffers import ReusedBuffers, reuse_buffers
from infinity.fsdp2.materialize import frozen_in_files
from infinity.fsdp2.placements import copy_ranks
from infinity.fsdp2.sharding import (
    ShardedGroup,
    gathered_dtype,
    is_alone,
    outlined_groups,
    release,
    shard_shapes,
    sharded_groups,
)
from infinity.host_memory import ranks_here
from infinity.plan.estimate import record_bytes
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.schedule.pinned import ACCESS_BYTES
from infinity.schedule.timeline import TraceSummary
from infinity.store.commit import ArenaLayout, describe, differences
from infinity.store.durable import DurableRun
from infinity.store.foreign import StoredParameter
from infinity.store.layout import Layout
from infinity.swap.machinery import Drives, Machinery
from infinity.swap.options import PagingOptions, second_slot_bytes
from infinity.swap.paged_model import PagedModel
from infinity.swap.paging import Paging
from infinity.swap.plan import PINNED_BYTES_DEFAULT, ModelOutline, memory_of_rank, plan_model
from infinity.swap.stager import Stager
from infinity.swap.tensor_store import TensorStore
from infinity.swap.timeline import Timeline
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
    """Pinned bytes that are kept from step to step."""
    arena_bytes: int
    drives: tuple[DriveStats, ...]
    """The bytes that each drive moved, in the order of the paths."""


class SwapManager:
    """Moves a model, or plain tensors, between NVMe and a fixed amount of pinned host memory.

    Args:
        path: a folder on the drive, or one on each of several drives, over which all data is striped by bandwidth. The
            run makes a folder of its own in each, and removes it at the end. Empty if nothing is to be written, because
            all offloaded parameters are in foreign files (`page(weights=...)`).
        pinned_bytes_max: pinned host memory (bytes, or "2GiB"). "auto" takes as much as the model needs to run at full
            speed (infinity/swap/plan.py), 512 MiB for plain tensors.
        io: the I/O settings.
        bandwidths: of the drives, in any one unit. None: several drives are measured, which takes a second.
        lock_memory: ask the kernel to lock the pinned pages.
        pin_memory: register host memory with the GPU, if there is one, so that copies overlap with compute.
        checksums: keep a CRC-32C of every 4 KiB page written. A mismatch raises IntegrityError with file and offset,
            before the bytes are used (docs/reliability.md, "Integrity").
        run: a durable run with files under these paths, whose steps are committed; `infinity.initialize` makes it.
        io_options: fields of `io` by name, which override it: `backend="threads"`.

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
        checksums: bool = True,
        bandwidths: Sequence[float] | None = None,
        run: DurableRun | None = None,
        **io_options: Any,
    ) -> None:
        self.run = run
        self.memory_bytes = memory_of_rank()
        """This rank's share of the memory that was available."""
        self._pinned_bytes = None if pinned_bytes_max == "auto" else parse_bytes(pinned_bytes_max)
        if self._pinned_bytes is not None and self._pinned_bytes < 2 * ACCESS_BYTES:
            raise BudgetError(
                f"pinned_bytes_max of {format_bytes(self._pinned_bytes)} is below the "
                f'least that works, {format_bytes(2 * ACCESS_BYTES)}: raise it, or leave it "auto"'
            )
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        io = replace(io or IoSettings(), **io_options)
        self._drives = Drives(paths, io, bandwidths=bandwidths, run=run, checksums=checksums)
        self._lock_memory, self._pin_memory = lock_memory, pin_memory
        self._machinery: Machinery | None = None
        self._device = Device()
        self._tensors: TensorStore | None = None
        self._paging: Paging | None = None
        self._buffers: ReusedBuffers | None = None
        self._closed = self._sleeps = False
        """`_sleeps`: the pinned memory is given back."""

    # Plain tensors.

    @property
    def tensors(self) -> TensorStore:
        """The plain tensors on these drives, by name."""
        if self._tensors is None:
            self._tensors = TensorStore(self._open())
        return self._tensors

    def flush(self) -> None:
        """Run deferred updates, and wait until all data is on the drives (fdatasync). Raises IoError."""
        if self._machinery is None and not self._closed:
            return  # nothing was stored yet
        machinery = self._open()
        with self._paging.entered() if self._paging is not None else contextlib.nullcontext():
            if self._paging is not None:
                self._paging.finish_updates()
            machinery.stager.settle_all()
            machinery.arena.file.sync()

    # A model.

    def page(
        self,
        model: nn.Module,
        options: PagingOptions | None = None,
        *,
        weights: str | os.PathLike[str] | None = None,
    ) -> Paging:
        """Move the parameters of a model that `fully_shard` was applied to into the arena, in place.

        The parameters are then paged tensors (fp32 masters), every gather reads its 16-bit compute parameters from
        NVMe, and `PagedAdamW(model.parameters(), swap=self)` steps them. Parameters on the meta device get space in the
        arena without ever being in memory; give them values (`load_state_dict`, `infinity.initialize`) before use.

        Args:
            options: where state is stored, and when it is updated; None: the defaults.
            weights: safetensors (as for `initialize`) in which frozen parameters stay, without space in the arena, if
                their dtype there has 8 to 32 bits. A durable run keeps everything in its own files.

        A collective of the ranks that the model is sharded over. Raises ConfigError for a model that can't be paged,
        BudgetError if the pool is too small for one group or three sub-groups (with a sufficient size), StoreError if
        space is missing. They raise on every rank if any rank fails, and leave the model unchanged.
        """
        if self._paging is not None:
            raise InfinityError("this SwapManager has paged a model already: make another one for a second model")
        release(model)  # the groups that an earlier forward has gathered
        groups = sharded_groups(model)
        dtype = gathered_dtype(model)
        sharded = [parameter for group in groups for parameter in group.sharded]
        mesh, *others = {parameter.device_mesh for parameter in sharded}
        options = (options or PagingOptions()).for_ranks(max(map(copy_ranks, sharded)))
        with raise_on_all_ranks(mesh.get_group() if not others and mesh.ndim == 1 else None):
            stored = self._rest_in_files(model, weights, options)
            outline = ModelOutline(groups, dtype, stored)
            layout, pinned_bytes, staying = plan_model(outline, options, self._budget_bytes, self.memory_bytes)
            files = sorted({file.path for parameter in stored.values() for file in parameter.ranges(0, 0)})
            foreign = self._drives.open_foreign(files) if files else None
            place = _checked_place(self.run, layout, outline, options)
            self._device = _device_of(groups)  # before the pool, which is allocated near it
            machinery = self._open(pinned_bytes)
            machinery.foreign = foreign
            machinery.adopt(self._device, pin=self._pin_memory)
            paged = PagedModel(
                layout=layout,
                group_names=[group.name for group in groups],
                shapes=[*map(shard_shapes, sharded)],
                group_ranks=[group.rank for group in groups],
                compute_dtype=dtype,
                options=options,
                staying=staying,
                gather_in_place=all(map(is_alone, sharded)) and not self._device.is_discrete,
                durable=self.run is not None,
                stager=machinery.stager,
                arena=machinery.arena,
                host_memory=machinery.host_memory,
                foreign=foreign,
                stored=options.stored_in_words(durable=self.run is not None),
            )
            arena = machinery.arena
            place = replace(place, pattern=arena.pattern, stripe_bytes=arena.stripe_bytes, arena_bytes=arena.nbytes)
            alone = all(group.ranks == 1 for group in groups)
            paging = Paging(self, machinery, paged, options, place, self._tensors)
            resumes = self.run is not None and self.run.resumed is not None
            replacements = paging.take_over(groups, resumes=resumes)
        self._paging = paging
        paging.install(model, groups, replacements)
        if not self._device.is_discrete:
            self._buffers = reuse_buffers(groups, alone=alone)
        return paging

    @property
    def room_for_gradients(self) -> float:
        """Memory (bytes) for gradients that wait, which leaves half of this rank's available memory to the model."""
        return max(0, self.memory_bytes / 2 - (self._pinned_bytes or 0))

    def check_fits(
        self,
        model: nn.Module,
        wrap: Sequence[nn.Module],
        *,
        ranks: int,
        dtype: torch.dtype,
        options: PagingOptions,
        ranks_of: Callable[[nn.Module], tuple[int, int]],
        weights: str | os.PathLike[str] | None = None,
        unasked: bool = False,
    ) -> bool:
        """Raise the errors for missing memory or space that `page` would raise, before the model is sharded. Returns
        True if `options.speculative` has any effect.

        Args:
            wrap: the modules that will be groups of their own, besides the root.
            ranks: number of ranks that share a copy of it.
            dtype: of the gather.
            ranks_of: as for `outlined_groups`.
            options, weights: as for `page`.
            unasked: the user did not ask for speculative updates. Their second slots, with those of all ranks here,
                must then leave as much space free as they take.
        """
        options = options.for_ranks(ranks)
        stored = self._rest_in_files(model, weights, options)
        outline = ModelOutline(outlined_groups(model, wrap, ranks_of), dtype, stored)
        layout = plan_model(outline, options, self._budget_bytes, self.memory_bytes).layout
        _checked_place(self.run, layout, outline, options)
        second = second_slot_bytes(layout, options)
        nbytes = layout.nbytes + layout.gradient_bytes
        if self.run is not None:
            nbytes += layout.nbytes + record_bytes(layout.nbytes)
        elif unasked:
            nbytes = ranks_here() * (nbytes + 2 * second)
        else:
            nbytes += second
        stored_in_words = options.stored_in_words(durable=self.run is not None)
        self._drives.check_free(nbytes, stored_in_words + ", and as much left free" * unasked)
        return second > 0

    @property
    def paging(self) -> Paging:
        """The paged model with everything that moves it. Raises InfinityError before `page`."""
        if self._paging is None:
            raise InfinityError("no model is paged yet: call page(model) first")
        return self._paging

    @property
    def paged(self) -> PagedModel:
        """The paged model. Raises InfinityError before `page`."""
        return self.paging.paged

    @property
    def stager(self) -> Stager:
        """The stager, for inspecting transfers in flight."""
        return self._open().stager

    # Statistics.

    @property
    def backend(self) -> str:
        """The I/O backend in use."""
        return self._open().engine.backend

    @property
    def notes(self) -> list[str]:
        """Requests that the machine refused, with the fallback, one line each."""
        return [*self._open().notes, *(self._paging.paged.notes if self._paging is not None else ())]

    def stats(self) -> SwapStats:
        """Return the counters."""
        machinery, paging = self._open(), self._paging
        return SwapStats(
            *self.transferred(),
            demand_reads=machinery.stager.demand_reads,
            mispredictions=paging.policy.mispredictions if paging is not None else 0,
            pinned_bytes=machinery.pool.nbytes,
            pinned_peak_bytes=machinery.pool.peak_bytes,
            cached_bytes=paging.paged.layout.cached_bytes if paging is not None else 0,
            arena_bytes=machinery.arena.nbytes,
            drives=tuple(machinery.engine.drives),
        )

    def transferred(self) -> tuple[int, int, float]:
        """Return the bytes read, the bytes written, and the seconds that the training thread waited, since the start."""
        engine = self._open().engine
        return engine.read_bytes, engine.written_bytes, engine.stall_seconds

    def step_bytes(self, *, micro_batches: int = 1, gathers: Mapping[str, int] | None = None) -> tuple[int, int]:
        """Return the bytes (read, written) of a step in which every trained parameter has a gradient.

        After a first step: exactly those of the next step, if it is like the last one. Before: the sum if every
        micro-batch gathers each group twice, or if each step gathers groups as often as `gathers` says, by name.
        """
        return self.paging.step_bytes(micro_batches, gathers)

    # Tracing.

    @property
    def timeline(self) -> Timeline | None:
        """The recorder of the running trace; None if no trace runs."""
        return self._machinery.stager.timeline if self._machinery is not None else None

    def start_trace(self) -> None:
        """Start a trace, which records events until `stop_trace`. First waits until the drives are idle, so that it
        contains whole transfers only. Raises InfinityError if a trace runs already.
        """
        if self.timeline is not None:
            raise InfinityError("a trace runs already: call stop_trace() first")
        machinery = self._open()
        self._trace_into(Timeline(machinery.engine))

    def stop_trace(self, path: str | os.PathLike[str] | None = None) -> TraceSummary:
        """Wait until the drives are idle, end the trace, and return its figures. See docs/timeline.md.

        `path`: the file for this rank's events, in the format of Chrome's and Perfetto's trace viewers (JSON). Raises
        InfinityError if no trace runs, OSError if the file can't be written; the trace has then ended too.
        """
        timeline = self.timeline
        if timeline is None:
            raise InfinityError("no trace runs: call start_trace() first")
        self._trace_into(None)
        return timeline.stop(path, rank=int(os.environ.get("RANK", "0")))

    def _trace_into(self, timeline: Timeline | None) -> None:
        self.stager.timeline = timeline
        if self._paging is not None:
            self._paging.trace_into(timeline)

    def sleep(self, *, pinned: bool) -> None:
        """Between two steps: give back what a paged model takes of the device until `wake`; if `pinned`, also the pinned memory
        whose bytes are on NVMe. Raises IoError; `wake` is to be called then, too.
        """
        if self.timeline is not None:
            raise InfinityError("a trace runs, and does not outlast a sleep: call stop_trace() first")
        self.paging.give_back_memory()
        if self._buffers is not None:
            self._buffers.release()
        if pinned:
            self._sleeps = True
            tensors = self._tensors.leases if self._tensors is not None else ()
            self._open().sleep([*self.paged.only_copies, *tensors])

    def wake(self) -> None:
        """After `sleep`. What the next pass needs first is on its way when this returns. Raises IoError, MemoryError."""
        if self._sleeps:
            self._open().wake()
            self._sleeps = False
        with self.paging.entered():
            self.paging.parameters.look_ahead()

    def close(self) -> None:
        """Wait for transfers in flight, and release memory and drive space. Idempotent.

        Raises IoError if a write that nothing waited for has failed; InfinityError on another thread during a pass.
        """
        paging = self._paging
        with paging.alone() if paging is not None else contextlib.nullcontext():
            if self._closed:
                return
            if paging is not None:
                paging.check_thread()
                paging.recover_if_broken()
            self._closed = True
            machinery, self._machinery = self._machinery, None
            try:
                if self._tensors is not None:
                    self._tensors.close()
                if paging is not None:
                    paging.close()
                if machinery is not None:
                    machinery.close()
            finally:
                self._drives.close()

    def __enter__(self) -> SwapManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Implementation.

    def _open(self, pinned_bytes: int | None = None) -> Machinery:
        if self._machinery is None:
            if self._closed:
                raise InfinityError("this SwapManager is closed")
            size = self._pinned_bytes or pinned_bytes or PINNED_BYTES_DEFAULT
            self._machinery = Machinery(size, self._drives, self._device, lock_memory=self._lock_memory)
        return self._machinery

    def _rest_in_files(
        self, model: nn.Module, weights: str | os.PathLike[str] | None, options: PagingOptions
    ) -> dict[str, StoredParameter]:
        """Return the frozen parameters that stay in foreign files, by name."""
        if weights is None or self.run is not None or options.hold_parameters:
            return {}
        return frozen_in_files(model, weights)

    @property
    def _budget_bytes(self) -> int | None:
        return self._machinery.pool.nbytes if self._machinery else self._pinned_bytes


def _checked_place(
    run: DurableRun | None,
    layout: Layout,
    model: ModelOutline,
    options: PagingOptions,
) -> ArenaLayout:
    """Return the layout of the state, without the drives. Raises CheckpointError if the resumed run differs."""
    shapes = [parameter.shape for group in model.groups for parameter in group.parameters]
    kind = str(model.dtype).removeprefix("torch.")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = describe(
        layout,
        shapes,
        rank=rank,
        ranks=world,
        shards=max(group.ranks for group in model.groups),
        compute_dtype=kind,
        moments=options.moments,
        matrix_moments=options.matrix_moments,
        moments_dtype=str(options.moments_dtype).removeprefix("torch."),
    )
    if run is None or run.resumed is None:
        return place
    if why := list(differences(run.resumed.layout, place)):
        raise CheckpointError(
            f"the run in {run.where} belongs to a different training: {'; '.join(why)}; resume with the model and "
            "config of that run, or start without resume under another infinity.run_name"
        )
    return place


def _device_of(groups: Sequence[ShardedGroup]) -> Device:
    """Return the device that the model computes on: that of the mesh it was sharded over."""
    kind = groups[0].sharded[0].device_mesh.device_type
    return device_for(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
