"""Chooses I/O settings: from the config, else the drive's profile (a file on it), else the limits of its queue."""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from infinity.aio import IoSettings, probe
from infinity.config import Config
from infinity.drive.describe import LOCAL, default_block_bytes, drive_of, existing
from infinity.store.arena import step_bandwidth
from infinity.store.files import parse_json, read_small, write_durably
from infinity.units import GIB, MIB, PAGE_BYTES, format_bytes

log = logging.getLogger("infinity")

FILE_NAME = ".infinity-drive.json"
VERSION = 1

_NBYTES_MAX = MIB
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class DriveProfile:
    """The best I/O settings for a training step on one drive (fields of `infinity.aio.IoSettings`), and their rates.

    written: ISO 8601. drive: for people. mixed_bytes_per_s: reading and writing at once in equal parts, both counted.
    cpu_seconds_per_gib: user and system time of the process per GiB of the mixed load.
    """

    version: Annotated[int, Field(ge=1)] = VERSION
    written: str
    path: str
    drive: str
    backend: Annotated[str, Field(pattern="^(io_uring|linux_aio|threads)$")]
    block_bytes: Annotated[int, Field(ge=PAGE_BYTES, le=GIB, multiple_of=PAGE_BYTES)]
    queue_depth: Annotated[int, Field(ge=1, le=4096)]
    rings: Annotated[int, Field(ge=1, le=64)]
    mix: Annotated[str, Field(pattern="^(interleaved|bursts)$")]
    read_bytes_per_s: _Rate
    write_bytes_per_s: _Rate
    mixed_bytes_per_s: _Rate
    cpu_seconds_per_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def save_profile(profile: DriveProfile, folder: str | os.PathLike[str]) -> Path:
    """Write `profile` into `folder`, atomically and readable by all users. Raises OSError."""
    path = Path(folder) / FILE_NAME
    temporary = path.with_name(f"{FILE_NAME}.{secrets.token_hex(4)}")
    try:
        write_durably(temporary, (json.dumps(asdict(profile), indent=2) + "\n").encode())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load_profile(nvme_path: str | os.PathLike[str]) -> DriveProfile | None:
    """Return the profile for `nvme_path`: from the folder, or the nearest one above it on the same file system.

    `nvme_path` need not exist yet. A file that is unreadable or invalid counts as absent, with a log line.
    """
    folder = existing(nvme_path).resolve()
    file_system = folder.stat().st_dev
    for place in (folder, *folder.parents):
        if place.stat().st_dev != file_system:
            return None
        if (profile := _read(place / FILE_NAME)) is not None:
            return profile
    return None


def _read(path: Path) -> DriveProfile | None:
    advice = "it is ignored; run `infinity-bench sweep` again to replace it"
    try:
        content = read_small(path, _NBYTES_MAX)
        values = json.loads(content)
        if isinstance(values, dict) and isinstance(values.get("version"), int) and values["version"] > VERSION:
            log.warning("drive profile %s has version %d, newer than %d: %s", path, values["version"], VERSION, advice)
            return None
        return parse_json(DriveProfile, content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("drive profile %s is damaged or can't be read (%s): %s", path, error, advice)
    return None


IN_FLIGHT_BYTES = 32 * MIB
"""Default bytes in flight per ring: drives reach their limit with 8 to 64 MiB in flight."""


@dataclass(frozen=True)
class StorageChoice:
    """The chosen I/O settings. bandwidths: as for `SwapManager`. warnings: about drives that are unsuitable for
    training."""

    io: IoSettings
    bandwidths: tuple[float, ...] | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def choose_storage(config: Config, weights: str | os.PathLike[str] | None = None) -> StorageChoice:
    """Choose the I/O settings for the drives of `config.nvme_paths`; without any, for the drive of the `weights`.

    Keys of `aio` and `infinity` in the config take precedence. Others come from the profile on the first drive, else
    from the limits of its block queue. If all of several drives have a profile, their shares of the bytes follow the
    profiles.
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
        notes.append(f"using the drive profile of {profile.written} for {paths[0]} (infinity-bench sweep)")
    if "block_size" in aio.model_fields_set:
        block_bytes = aio.block_size
    elif profile is not None:
        block_bytes = profile.block_bytes
    else:
        block_bytes = default_block_bytes(drives[0]) if drives else MIB
    if "queue_depth" in aio.model_fields_set:
        queue_depth = aio.queue_depth
    elif profile is not None and profile.block_bytes == block_bytes:
        queue_depth = profile.queue_depth
    else:
        queue_depth = min(max(IN_FLIGHT_BYTES // block_bytes, 4), 64)
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
    if paths:
        notes.append(
            f"transfers in blocks of {format_bytes(block_bytes)}, {queue_depth} in flight on each of {io.rings} "
            f"ring(s), reads and writes {'in ' if io.mix == 'bursts' else ''}{io.mix}"
        )
    return StorageChoice(io, bandwidths, tuple(notes), tuple(warnings))


def _backend(wanted: str, profile: DriveProfile | None, *, polls: bool) -> tuple[str, list[str]]:
    """Return (backend, notes). The profile's backend is used only if it works in this container."""
    if wanted != "auto" or profile is None or polls:
        return wanted, []
    reasons = {name: reason for name, available, reason in probe() if not available}
    if profile.backend not in reasons:
        return profile.backend, []
    return "auto", [f"the drive profile asks for {profile.backend}, which is not available: {reasons[profile.backend]}"]
