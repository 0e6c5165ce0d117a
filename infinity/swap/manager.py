"""The swap manager: the floor's public face, over one run's drives and pinned pool.

Two faces, in fact. `page(model)` hands a model that FSDP2 sharded over to the arena, and returns what moves it from then on
(paging.py); `tensors` does the same for plain tensors of any other engine. Both share drives, engine and pool.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.aio import DriveStats, IoSettings
from infinity.device import CpuDevice, Device, device_for
from infinity.errors import BudgetError, CheckpointError, InfinityError
from infinity.fsdp2.buffers import reuse_buffers
from infinity.fsdp2.materialize import frozen_in_files
from infinity.fsdp2.sharding import (
    ShardedGroup,
    gathered_dtype,
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
from infinity.store.arena import Arena
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
    """Pinned bytes that hold what stays from step to step."""
    arena_bytes: int
    drives: tuple[DriveStats, ...]
    """What each drive moved, in the order of the paths."""

    @staticmethod
    def of(machinery: Machinery, paging: Paging | None) -> SwapStats:
        """The counters now."""
        engine, pool = machinery.engine, machinery.pool
        return SwapStats(
            read_bytes=engine.read_bytes,
            written_bytes=engine.written_bytes,
            stall_seconds=engine.stall_seconds,
            demand_reads=machinery.stager.demand_reads,
            mispredictions=paging.policy.mispredictions if paging is not None else 0,
            pinned_bytes=pool.nbytes,
            pinned_peak_bytes=pool.peak_bytes,
            cached_bytes=paging.paged.layout.cached_bytes if paging is not None else 0,
            arena_bytes=machinery.arena.nbytes,
            drives=tuple(engine.drives),
        )


class SwapManager:
    """Moves a model, or plain tensors, between NVMe and a fixed amount of pinned host memory.

    Args:
        path: a folder on the drive, or several on as many drives, over which everything is striped by their bandwidth.
            This run makes a folder of its own in each and removes it at the end. None of them where nothing is to be written,
            because all that rests on NVMe is in files of the user (`page(weights=...)`).
        pinned_bytes_max: pinned host memory (bytes, or "2GiB"); "auto" takes what the model needs to run at full speed
            (see infinity/swap/plan.py), 512 MiB for plain tensors.
        io: how the drives are driven.
        bandwidths: of the drives (any one unit); with several and None they are measured, which takes a second.
        lock_memory: ask the kernel to lock the pinned pages.
        pin_memory: register host memory with the GPU, where there is one, so that copies run beside what it computes.
        checksums: keep a CRC-32C of every 4 KiB that is written, and raise IntegrityError, naming the file and the place,
            before anybody uses bytes that come back otherwise (docs/reliability.md, "Integrity").
        run: files that stay, under these paths, for a model whose steps are committed; `infinity.initialize` makes it.
        io_options: fields of `io` by name, which count instead: `backend="threads"`.

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
        self._memory_bytes = memory_of_rank()
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
        self._device: Device = CpuDevice()
        self._tensors: TensorStore | None = None
        self._paging: Paging | None = None
        self._closed = False

    # Plain tensors.

    @property
    def tensors(self) -> TensorStore:
        """Plain tensors on these drives, by name."""
        if self._tensors is None:
            self._tensors = TensorStore(self._open())
        return self._tensors

    def flush(self) -> None:
        """Run what waits, and wait until everything is on the drives (fdatasync). Raises IoError when a write failed."""
        if self._machinery is None and not self._closed:
            return  # nothing was ever stored
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

        After this the model's parameters are paged tensors (fp32 masters), every gather reads its 16-bit compute parameters
        from NVMe, and `PagedAdamW(model.parameters(), swap=self)` steps it. Parameters on the meta device get their place
        without ever being held; give them values (`load_state_dict`, `infinity.initialize`) before they are used.

        Args:
            options: what rests where, and when it is updated; the defaults where None.
            weights: safetensors (as for `initialize`) in which frozen parameters stay: they are read from there and take no
                place in the arena, where their dtype there is one of 8 to 32 bits. A durable run keeps all in its own files.

        A collective of the ranks that the model is sharded over. Raises ConfigError for a model that can't be paged,
        BudgetError when the pool is too small for one group or three sub-groups (naming the number that would do), StoreError
        without space, on all ranks when on one; the model is unchanged then.
        """
        if self._paging is not None:
            raise InfinityError("this SwapManager has paged a model already: make another one for a second model")
        release(model)  # what a forward before this has gathered
        groups = sharded_groups(model)
        dtype = gathered_dtype(model)
        mesh = groups[0].sharded[0].device_mesh
        options = (options or PagingOptions()).for_ranks(mesh.size(-1))
        with raise_on_all_ranks(mesh.get_group() if mesh.ndim == 1 else None):
            stored = self._rest_in_files(model, weights, options)
            rank = mesh.get_local_rank(mesh.ndim - 1)
            outline = ModelOutline(groups, mesh.size(-1), dtype, rank, stored)
            layout, pinned_bytes, staying = plan_model(outline, options, self._budget_bytes, self._memory_bytes)
            files = sorted({file.path for parameter in stored.values() for file in parameter.ranges(0, 0)})
            foreign = self._drives.open_foreign(files) if files else None
            place = _checked_place(self.run, layout, outline, options)
            self._device = _device_of(groups)  # before the pool is made, which is to lie near it
            machinery = self._open(pinned_bytes)
            machinery.foreign = foreign
            machinery.adopt(self._device, pin=self._pin_memory)
            paged = PagedModel(
                layout=layout,
                group_names=[group.name for group in groups],
                shapes=[shard_shapes(parameter) for group in groups for parameter in group.sharded],
                shard_rank=outline.rank,
                compute_dtype=dtype,
                options=options,
                staying=staying,
                gather_in_place=mesh.size() == 1 and not self._device.is_discrete,
                durable=self.run is not None,
                stager=machinery.stager,
                arena=machinery.arena,
                host_memory=machinery.host_memory,
                foreign=foreign,
                stored=options.stored_in_words(durable=self.run is not None),
            )
            place = _on_drives(place, machinery.arena)
            alone = mesh.size(-1) == 1
            paging = Paging(self, machinery, paged, options, place, self._tensors, alone=alone)
            resumes = self.run is not None and self.run.resumed is not None
            replacements = paging.take_over(groups, resumes=resumes)
        self._paging = paging
        paging.install(model, groups, replacements)
        if not self._device.is_discrete:
            reuse_buffers(groups, alone=alone)
        return paging

    def check_fits(
        self,
        model: nn.Module,
        wrap: Sequence[nn.Module],
        *,
        ranks: int,
        dtype: torch.dtype,
        options: PagingOptions,
        weights: str | os.PathLike[str] | None = None,
        unasked: bool = False,
    ) -> bool:
        """Raise what `page` would raise for want of memory or space, while the model isn't sharded and can be used on. Returns
        whether `options.speculative` has any effect.

        Args:
            wrap: the modules that will be groups of their own, beside the root.
            ranks: over how many it will be sharded.
            dtype: in which it will be gathered.
            options, weights: as for `page`.
            unasked: whether nobody asked for speculative updates. Second slots for them are to leave as much space free as they
                take, with those of all ranks here.
        """
        options = options.for_ranks(ranks)
        stored = self._rest_in_files(model, weights, options)
        outline = ModelOutline(outlined_groups(model, wrap), ranks, dtype, dist.get_rank() % ranks, stored)
        layout = plan_model(outline, options, self._budget_bytes, self._memory_bytes).layout
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
        """The paged model and all that moves it. Raises InfinityError before `page`."""
        if self._paging is None:
            raise InfinityError("no model is paged yet: call page(model) first")
        return self._paging

    @property
    def paged(self) -> PagedModel:
        """The paged model. Raises InfinityError before `page`."""
        return self.paging.paged

    @property
    def stager(self) -> Stager:
        """What moves the chunks, for a look at what is in flight."""
        return self._open().stager

    # What it took.

    @property
    def backend(self) -> str:
        """The I/O backend in use."""
        return self._open().engine.backend

    @property
    def notes(self) -> list[str]:
        """What the machine refused and what was done instead, a line each."""
        return [*self._open().notes, *(self._paging.paged.notes if self._paging is not None else ())]

    def stats(self) -> SwapStats:
        """The counters."""
        return SwapStats.of(self._open(), self._paging)

    def step_bytes(self, *, micro_batches: int = 1, gathers: Mapping[str, int] | None = None) -> tuple[int, int]:
        """Bytes (read, written) that a step moves in which every trained parameter has a gradient.

        Once a step was taken: what the next one like it moves, to the byte. Before: the sum for `micro_batches` that gather
        every group for forward and for backward, or as often in a step as `gathers` says, by name.
        """
        return self.paging.step_bytes(micro_batches, gathers)

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
        if self._paging is not None:
            self._paging.trace_into(timeline)

    def close(self) -> None:
        """Wait for what is in flight, give memory and drive space back. Idempotent.

        Raises IoError when a write failed that nobody waited for; InfinityError on another thread while a pass is going on.
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

    # How.

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
        """The frozen parameters that stay in the user's files, by name."""
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
    """How the state lies, the drives aside. Raises CheckpointError where what a durable run goes on from lies in another
    way."""
    shapes = [parameter.shape for group in model.groups for parameter in group.parameters]
    kind = str(model.dtype).removeprefix("torch.")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = describe(
        layout,
        shapes,
        rank=rank,
        ranks=world,
        shards=model.ranks,
        compute_dtype=kind,
        moments=options.moments,
        matrix_moments=options.matrix_moments,
        moments_dtype=str(options.moments_dtype).removeprefix("torch."),
    )
    if run is None or run.resumed is None:
        return place
    if why := list(differences(run.resumed.layout, place)):
        raise CheckpointError(
            f"what {run.where} holds is of another training: {'; '.join(why)}; resume with the model and config of "
            "that run, or start without resume under another infinity.run_name"
        )
    return place


def _on_drives(place: ArenaLayout, arena: Arena) -> ArenaLayout:
    return replace(place, pattern=arena.pattern, stripe_bytes=arena.stripe_bytes, arena_bytes=arena.nbytes)


def _device_of(groups: Sequence[ShardedGroup]) -> Device:
    """Where the model computes: the device of the mesh it was sharded over."""
    kind = groups[0].sharded[0].device_mesh.device_type
    return device_for(torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
