"""The I/O machinery of a run: its drives, and the pinned pool, engine, arena and stager on top of them.

The drives are known at the start; all else is made once the pool's size is known. Training thread only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from infinity.aio import IoEngine, IoSettings, Lease, PinnedPool, near
from infinity.device import Device, HostBuffers
from infinity.drive.describe import drive_of
from infinity.drive.measure import measure_drive
from infinity.store.arena import Arena, check_free, step_bandwidth
from infinity.store.durable import DurableRun
from infinity.store.foreign import ForeignFiles
from infinity.store.run_folder import Folder, NoFolder, RunFolder
from infinity.swap.stager import Stager
from infinity.swap.waiting_gradients import HostGradients

_MEASURE_BYTES = 64 << 20
"""Written and read, twice, to compare the drives."""


class Drives:
    """A folder on each drive, the drives' bandwidths, and their I/O settings. Arguments as for `SwapManager`."""

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        io: IoSettings,
        *,
        bandwidths: Sequence[float] | None,
        run: DurableRun | None,
        checksums: bool,
    ) -> None:
        self._io = io
        self._checksums = checksums
        self._rank = str(run.rank) if run is not None else os.environ.get("RANK", "0")
        self._resumed_layout = run.resumed.layout if run is not None and run.resumed is not None else None
        measures = bandwidths is None and len(paths) > 1 and self._resumed_layout is None
        self._bandwidths = self._measure(paths) if measures else bandwidths
        self._folders: Sequence[Folder] = run.folders if run is not None else _make_folders(paths)
        self._devices = [folder.root.stat().st_dev for folder in self._folders if not isinstance(folder, NoFolder)]
        """The device number of each drive, including drives with only foreign files."""
        self._is_open = False
        """True once an engine uses the drives, after which none can be added."""

    @property
    def count(self) -> int:
        """The number of drives of the arena."""
        return len(self._folders)

    def open_foreign(self, paths: Sequence[Path]) -> ForeignFiles:
        """Open foreign files, for the caller to close; before `make_engine`, because they may be on other drives."""

        def drive_of(path: Path) -> int:
            device = path.stat().st_dev
            if device not in self._devices and not self._is_open:
                self._devices.append(device)
            return self._devices.index(device) if device in self._devices else 0

        return ForeignFiles(paths, drive_of, checksums=self._checksums)

    @property
    def numa_node(self) -> int | None:
        """The NUMA node of the first drive that reports one; None if none does."""
        nodes = (disk.numa_node for folder in self._folders for disk in drive_of(folder.root).disks)
        return next((node for node in nodes if node is not None), None)

    def make_engine(self, pool: PinnedPool) -> IoEngine:
        """Make an engine over all drives, for the caller to close."""
        self._is_open = True
        return IoEngine(pool, self._io, drives=max(1, len(self._devices)))

    def make_arena(self, engine: IoEngine) -> Arena:
        """Make this rank's arena, for the caller to close."""
        return Arena(
            self._folders,
            engine,
            name=f"rank{self._rank}.arena",
            bandwidths=self._bandwidths,
            existing=self._resumed_layout,
            checksums=self._checksums,
        )

    def check_free(self, nbytes: int, stored: str) -> None:
        """Raise StoreError, naming `stored`, if the drives neither have `nbytes` free nor hold the state already."""
        if self._resumed_layout is None:
            check_free(self._folders, self._bandwidths, nbytes, stored)

    def close(self) -> None:
        """Remove the folders, or unlock those that stay."""
        for folder in self._folders:
            folder.close()

    def _measure(self, paths: Sequence[str | os.PathLike[str]]) -> list[float]:
        """Measure the bandwidth of each path's drive for the reads and writes of a step (bytes per second)."""
        bandwidths = []
        for path in paths:
            rates = measure_drive(path, nbytes=_MEASURE_BYTES, rounds=2, io=self._io)
            bandwidths.append(step_bandwidth(rates.read_bytes_per_s, rates.write_bytes_per_s))
        return bandwidths


class Machinery:
    """Pool, engine, arena and stager, made together and closed together. Also closes `foreign`."""

    def __init__(self, pinned_bytes: int, drives: Drives, device: Device, *, lock_memory: bool) -> None:
        self._notes: list[str] = []
        self._node = device.numa_node if device.numa_node is not None else drives.numa_node
        self._pins = False
        """Whether host memory is registered with the device."""
        with near(self._node, self._notes):
            self.pool = PinnedPool(pinned_bytes, lock=lock_memory, in_background=True)
            self.engine = drives.make_engine(self.pool)
        self.arena = drives.make_arena(self.engine)
        self.stager = Stager(self.engine, self.pool, self.arena, device)
        self.foreign: ForeignFiles | None = None
        """The foreign files that hold a part of the model."""
        self._take_device(device, pin=False)
        if drives.count > 1:
            parts = ", ".join(f"{share:.0%} on {path}" for path, share in self.arena.shares)
            self._notes.append(f"striping over {len(self.arena.shares)} drives by their bandwidth: {parts}")

    @property
    def notes(self) -> list[str]:
        """Requests that the machine refused, with the fallback, one line each."""
        foreign = self.foreign.notes if self.foreign is not None else []
        return [
            *self.engine.notes,
            *self.pool.notes,
            *self.arena.notes,
            *foreign,
            *self._notes,
            *self.host_memory.notes,
        ]

    def adopt(self, device: Device, *, pin: bool) -> None:
        """Compute on `device` from now on. `pin`: register host memory with it."""
        self._take_device(device, pin=pin)
        self._pins = pin
        self._register()

    def sleep(self, keep: Iterable[Lease]) -> None:
        """Give the pinned memory of all but these leases back until `wake`. Nothing may be in flight, and no other lease in
        use. Raises IoError as `close`."""
        self.engine.pause()
        self.stager.device.unregister(self.pool.slab)
        self.pool.release(keep)
        self.host_memory.trim()

    def wake(self) -> None:
        """After `sleep`: the memory is there again, with other bytes. Raises IoError."""
        with near(self._node, []):
            self.pool.fill_again()
            self.engine.resume()
        self._register()

    def _register(self) -> None:
        refused = self.stager.device.register(self.pool.slab) if self._pins else None
        if refused and refused not in self._notes:
            self._notes.append(refused)

    def close(self) -> None:
        """Wait for all transfers and release everything. Raises IoError if a write failed that nothing waited for."""
        with contextlib.ExitStack() as closing:  # in reverse order, even if one fails
            closing.callback(self.stager.close)
            closing.callback(self.arena.close)
            if self.foreign is not None:
                closing.callback(self.foreign.close)
            closing.callback(self.stager.device.unregister, self.pool.slab)
            closing.callback(self.host_memory.close)
            closing.callback(self.engine.close)
            closing.callback(self.stager.drop_all)
            closing.callback(self.host_gradients.settle)
            self.stager.settle_all()

    def _take_device(self, device: Device, *, pin: bool) -> None:
        self.stager.device = device
        self.host_memory = HostBuffers(device, pin=pin)
        self.host_gradients = HostGradients(device, self.host_memory)


def _make_folders(paths: Sequence[str | os.PathLike[str]]) -> list[Folder]:
    """Make a run folder under each path, or none if one fails. Without paths nothing can be written."""
    if not paths:
        return [NoFolder()]
    folders: list[Folder] = []
    try:
        for path in paths:
            folders.append(RunFolder(path))
    except BaseException:
        for folder in folders:
            folder.close()
        raise
    return folders
