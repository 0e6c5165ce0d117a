"""Chooses how storage is driven: from the config, else the drive's profile, else the limits of its queue."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.aio import IoSettings, probe
from infinity.config import Config
from infinity.drive.describe import LOCAL, Drive, default_block_bytes, drive_of, existing
from infinity.drive.profile import DriveProfile, load_profile
from infinity.store.placement import step_bandwidth
from infinity.units import MIB, format_bytes

IN_FLIGHT_BYTES = 32 * MIB
"""Default per ring: drives reach their limit with 8 to 64 MiB in flight."""


@dataclass(frozen=True)
class StorageChoice:
    """How storage is driven. bandwidths: as for `SwapManager`. notes: messages that say which drives these are and where the
    choice comes from. warnings: messages for drives that are poor places to train from."""

    io: IoSettings
    bandwidths: tuple[float, ...] | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def choose_storage(config: Config, weights: str | os.PathLike[str] | None = None) -> StorageChoice:
    """Choose how the drives of `config.nvme_paths` are driven; where there are none, the drive on which the `weights` are.

    Keys of `aio` and `infinity` that the config sets count. Others are taken from the profile that `infinity-bench sweep` left
    on the first drive; without one, from the limits of its block queue. Where each of several drives has a profile, they get
    shares of the bytes by these; otherwise the swap manager measures.
    """
    paths = config.nvme_paths or ((os.fspath(weights),) if weights is not None else ())
    aio, settings = config.aio, config.infinity
    profiles = [load_profile(path) for path in paths]
    profile = profiles[0] if profiles else None
    drives = [drive_of(existing(path)) for path in paths]
    notes, warnings = [], []
    for path, drive in zip(paths, drives, strict=True):
        disks = f" ({drive.model})" if drive.disks else ""
        place = f"{Path(path).absolute()} is on {drive.file_system}, device {drive.device or drive.source}{disks}"
        if drive.weaknesses:
            warnings.append(f"{place}, which {', and '.join(drive.weaknesses)}: {LOCAL}")
        else:
            notes.append(place)
    if profile is not None:
        notes.append(f"drive profile of {profile.written} found for {paths[0]} (infinity-bench sweep)")
    block_bytes = aio.block_size if "block_size" in aio.model_fields_set else _block_bytes(profile, drives)
    queue_depth = aio.queue_depth if "queue_depth" in aio.model_fields_set else _queue_depth(profile, block_bytes)
    rings_set = "rings" in settings.model_fields_set or "intra_op_parallelism" in aio.model_fields_set
    backend, refusal = _backend(settings.backend, profile, polls=settings.iopoll or settings.sqpoll)
    notes += refusal
    io = IoSettings(
        backend=backend,
        block_bytes=block_bytes,
        queue_depth=queue_depth,
        rings=config.io_rings if rings_set or profile is None else profile.rings,
        mix=settings.mix if settings.mix != "auto" else profile.mix if profile else "interleaved",
        iopoll=settings.iopoll,
        sqpoll=settings.sqpoll,
    )
    bandwidths = None
    if len(profiles) > 1 and all(profiles):
        bandwidths = tuple(step_bandwidth(p.read_bytes_per_s, p.write_bytes_per_s) for p in profiles if p)
    notes.append(
        f"transfers in blocks of {format_bytes(block_bytes)}, {queue_depth} in flight on each of {io.rings} ring(s), "
        f"reads and writes {'in ' if io.mix == 'bursts' else ''}{io.mix}"
    )
    return StorageChoice(io, bandwidths, tuple(notes), tuple(warnings))


def _block_bytes(profile: DriveProfile | None, drives: Sequence[Drive]) -> int:
    if profile is not None:
        return profile.block_bytes
    return default_block_bytes(drives[0]) if drives else MIB


def _queue_depth(profile: DriveProfile | None, block_bytes: int) -> int:
    if profile is not None and profile.block_bytes == block_bytes:
        return profile.queue_depth
    return min(max(IN_FLIGHT_BYTES // block_bytes, 4), 64)


def _backend(wanted: str, profile: DriveProfile | None, *, polls: bool) -> tuple[str, list[str]]:
    """(backend, notes): the profile's only if it works here, since it may come from another container."""
    if wanted != "auto" or profile is None or polls:
        return wanted, []
    reasons = {name: reason for name, available, reason in probe() if not available}
    if profile.backend not in reasons:
        return profile.backend, []
    return "auto", [f"the drive's profile names {profile.backend}: {reasons[profile.backend]}"]
