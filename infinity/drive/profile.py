"""The profile of a drive: its measured rates and best settings, in a file on it, for later runs."""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from infinity.store.files import read_small, write_durably
from infinity.units import GIB, MIB, PAGE_BYTES

log = logging.getLogger("infinity")

FILE_NAME = ".infinity-drive.json"
VERSION = 1

_NBYTES_MAX = MIB
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class DriveProfile:
    """The settings that serve a training step best on one drive, and their rates.

    Attributes:
        version: of this format.
        written: date and time of the measurement, ISO 8601.
        path: the folder that was measured.
        drive: the drive under it, for people to read.
        backend, block_bytes, queue_depth, rings, mix: fields of `infinity.aio.IoSettings`.
        read_bytes_per_s, write_bytes_per_s: of one alone.
        mixed_bytes_per_s: bytes read and written, both counted, while reading and writing as much of each.
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
    """Write `profile` into `folder`, atomically and readable by everybody; returns its path. Raises OSError."""
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
    """The profile for `nvme_path`: in the folder itself or the nearest one above it on the same file system.

    `nvme_path` need not exist yet. A file that can't be read or understood counts as absent; the log names it.
    """
    folder = Path(os.path.realpath(nvme_path))
    while not folder.exists():
        folder = folder.parent
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
        values = json.loads(read_small(path, _NBYTES_MAX))
        if isinstance(values, dict) and isinstance(values.get("version"), int) and values["version"] > VERSION:
            log.warning("drive profile %s has version %d, newer than %d: %s", path, values["version"], VERSION, advice)
            return None
        return TypeAdapter(DriveProfile).validate_json(json.dumps(values), strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
        log.warning("drive profile %s is damaged (%s): %s", path, reason, advice)
    except (OSError, ValueError, RecursionError) as error:
        log.warning("drive profile %s can't be read (%s): %s", path, error, advice)
    return None
