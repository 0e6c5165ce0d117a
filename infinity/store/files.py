"""Careful ways to open files: new files are private, links are not followed, only regular files are read.

[Note: Places that others can write to]
Under /tmp, or on a drive that everybody may write to, another user can put links, pipes and folders under the names that we
use. So files and folders that we create must be new (O_EXCL) and private (0600, folders 0700); files that we open must be
regular, and a link in the last part of the path is not followed (O_NOFOLLOW); folders that we remove must belong to us.
Links on the way to a folder are the user's own and are followed.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from infinity.errors import StoreError
from infinity.units import format_bytes

_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredFile:
    """Length (bytes) and SHA-256 (hexadecimal) of one file."""

    nbytes: Annotated[int, Field(ge=0, le=2**62)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def create_private(path: str | os.PathLike[str]) -> BufferedWriter:
    """Create a file for writing, mode 0600 whatever the umask. Raises OSError, also where the name is taken."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open an existing file for reading. Raises OSError, also where it is not a regular file (a link, a pipe)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{os.fspath(path)} is a symbolic link: put the file itself there") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{os.fspath(path)} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_small(path: str | os.PathLike[str], nbytes_max: int) -> bytes:
    """Read a whole file that should be small. Raises OSError, also where it has more than `nbytes_max` bytes, or more than
    memory holds."""
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > nbytes_max:
            raise OSError(errno.EFBIG, f"{os.fspath(path)} has more than {format_bytes(nbytes_max)}")
        try:
            content = file.read(nbytes)
        except MemoryError:
            raise OSError(
                errno.ENOMEM, f"{os.fspath(path)} has {format_bytes(nbytes)}, for which there is no memory"
            ) from None
        if len(content) < nbytes or file.read(1):
            raise OSError(errno.EIO, f"{os.fspath(path)} was changed while it was read")
    return content


def parse_json(kind: type[_T], content: bytes | str) -> _T:
    """`content` as a `kind`, each of its fields checked. Raises ValueError that says what is wrong, and where."""
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))) from None


def remove_file(path: Path) -> None:
    """Remove a file of ours, if it exists. Raises OSError; StoreError where a folder is in its place."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM) or not stat.S_ISDIR(path.lstat().st_mode):
            raise
        raise StoreError(
            errno.EISDIR, f"{path} is a folder where a file of infinity's belongs: move it away, and start again"
        ) from None


def write_durably(path: str | os.PathLike[str], content: bytes) -> None:
    """Create a private file; its bytes are on the drive on return. Raises OSError."""
    with create_private(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """As `write_durably`, but in the place of a file that may have the name: at any instant the whole of one of them has it.

    Its name lasts on return, too. If killed before, `.NAME.partial` may stay.
    """
    partial = path.with_name(f".{path.name}.partial")
    remove_file(partial)
    write_durably(partial, content)
    partial.rename(path)
    sync(path.parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until a file, or the names in a folder, are on the drive. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_in_the_way(path: Path) -> Path | None:
    """The file, at `path` or above it, that keeps `path` from being a folder; None where there is none."""
    return next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), None)


def is_own_folder(path: Path) -> bool:
    """Whether `path` is a folder, not a link to one, that belongs to this user."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
