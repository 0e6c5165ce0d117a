"""The run folder: a locked folder under the user's path that is gone when the run ends.

[Note: Leaving nothing behind]
A run keeps its files in `PATH/infinity-run-PID-RANDOM/` and holds an flock on the `lock` in it for as long as it lives.
The arenas in it are scratch, so each is unlinked as soon as it is open and its space is reserved: however the process ends,
a power cut included, the kernel gives the space back. What a killed process can leave is the folder with two tiny files;
the next run on the same path removes every folder of its own user whose lock is free. (See also [Note: Places that others can
write to] in files.py.)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

from infinity.aio import File
from infinity.errors import StoreError
from infinity.store.files import file_in_the_way, is_own_folder, write_durably
from infinity.units import format_bytes

_PREFIX = "infinity-run-"
_MAKING_SECONDS_MAX = 600
"""A folder that still has its first, hidden name after so long was left by a run that was killed while creating it."""


class Folder(ABC):
    """A folder of ours under the user's path `root`, in which arenas lie."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    @abstractmethod
    def open_arena(self, name: str, drive: int, *, checksums: bool = False) -> File:
        """The arena file `name`, on the drive of that number; `checksums` as for `Arena`.

        Raises StoreError or IoError.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the folder. Idempotent."""

    def leave_to_parent(self) -> None:
        """In a forked child (a data loader's worker): keep no lock, so that none outlives the process that made it."""
        self.close()

    @property
    def notes(self) -> list[str]:
        """Messages: what is unsafe about the folder."""
        return [
            f"everybody may rename and remove what is in {place}: chmod +t {place}, or take away others' right to write"
            for place in (self.root.resolve(), *self.root.resolve().parents)
            if place.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
        ]

    def check_free(self, nbytes: int, purpose: str) -> None:
        """Raise StoreError unless `nbytes` bytes are free here; `purpose` says in the message what they are for."""
        free = free_bytes(self.root)
        if nbytes > free:
            raise StoreError(
                errno.ENOSPC,
                f"{purpose}: {format_bytes(nbytes)} are needed on {self.root}, where {format_bytes(free)} are free: "
                f"free {format_bytes(nbytes - free)} more or choose another nvme_path",
            )


class NoFolder(Folder):
    """Stands for a folder where nothing is to be written: an arena in it must stay empty."""

    def __init__(self) -> None:
        super().__init__("/")

    def open_arena(self, name: str, drive: int, *, checksums: bool = False) -> File:
        descriptor = os.memfd_create(name)
        try:
            return File(f"/proc/self/fd/{descriptor}", drive=drive, checksums=checksums)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        pass

    @property
    def notes(self) -> list[str]:
        return []

    def check_free(self, nbytes: int, purpose: str) -> None:
        if nbytes:
            raise StoreError(
                errno.ENOSPC,
                f"{purpose}: {format_bytes(nbytes)} must rest on NVMe, and no nvme_path says where: set it in offload_param to "
                "a folder on the drive (it can be left out where all frozen parameters rest in the files of weights=, and "
                "nothing else is to rest on NVMe)",
            )


class RunFolder(Folder):
    """This process's folder under `root`.

    Raises StoreError when `root` can't be created or written to, and says what to do.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        make_writable(self.root)
        remove_stale(self.root)
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        hidden = self.root / f".{name}"  # takes its real name once locked, so that no other run finds it stale before
        self.path = self.root / name
        try:
            self._lock = _fill(hidden)
            hidden.rename(self.path)
        except BaseException as error:  # Ctrl-C too: no other run removes a folder that is still hidden
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise StoreError(
                    error.errno or 0,
                    f"no run folder can be made in {self.root} ({error.strerror}): free space or choose another nvme_path",
                ) from None
            raise
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._finalizer = weakref.finalize(self, _remove, self.path, (self._lock, self._descriptor), os.getpid())
        keep_from_children(self)

    def open_arena(self, name: str, drive: int, *, checksums: bool = False) -> File:
        file = File(self.path / name, create=True, drive=drive, checksums=checksums)
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except BaseException as error:
            file.close()
            if isinstance(error, FileNotFoundError):
                raise StoreError(
                    errno.ESTALE,
                    f"{self.path} was moved or replaced while {name} was made in it: choose an nvme_path where others can't "
                    "write",
                ) from None
            raise
        return file

    def close(self) -> None:
        """Remove the folder. Idempotent; also done at interpreter exit."""
        self._finalizer()

    def leave_to_parent(self) -> None:
        if self._finalizer.detach() is not None:
            os.close(self._lock)
            os.close(self._descriptor)


_with_locks: weakref.WeakSet[Folder] = weakref.WeakSet()


def keep_from_children(folder: Folder) -> None:
    """Have forked children leave the folder to this process; the core does so with its files (process.h)."""
    _with_locks.add(folder)


def _leave_to_parent() -> None:
    for folder in list(_with_locks):
        folder.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write on the file system of `path`; sys.maxsize where it has no count (ramfs)."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else sys.maxsize


def remove_stale(root: Path) -> None:
    """Remove the folders of runs that have ended: those whose lock is free."""
    aged = [folder for folder in root.glob(f".{_PREFIX}*") if _is_aged(folder)]
    for folder in [*root.glob(f"{_PREFIX}*"), *aged]:
        if not is_own_folder(folder):
            continue  # another user's, or a link
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue  # being made or removed right now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # alive
        finally:
            os.close(lock)


def _is_aged(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > _MAKING_SECONDS_MAX
    except FileNotFoundError:
        return False  # it has just taken its real name


def _fill(folder: Path) -> int:
    """Create the folder and its files; returns the descriptor that holds the lock."""
    folder.mkdir(mode=0o700)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_durably(folder / "run.json", (json.dumps(about) + "\n").encode())
    except BaseException:
        os.close(lock)
        raise
    return lock


def make_writable(root: Path) -> None:
    """Create the folder if needed, but none above it: a path that is misspelled, or whose drive isn't mounted, would lead to
    the system's drive. Raises StoreError where it can't be written to."""
    try:
        root.mkdir(exist_ok=True)
    except OSError as error:
        if (file := file_in_the_way(root)) is not None:
            raise StoreError(error.errno or 0, f"{file} is a file, not a folder: choose another nvme_path") from None
        missing = [place for place in root.parents if not place.exists()]
        why = f"{missing[-1]} does not exist" if missing else error.strerror
        raise StoreError(
            error.errno or 0, f"nvme_path {root} can't be made ({why}): create it or choose another path"
        ) from None
    try:
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise StoreError(
            error.errno or 0, f"nvme_path {root} is not writable ({error.strerror}): change its owner or choose another"
        ) from None


def _remove(path: Path, descriptors: tuple[int, ...], pid: int) -> None:
    if os.getpid() == pid:  # a forked child (a data loader's worker) must not remove its parent's folder
        shutil.rmtree(path, ignore_errors=True)
        for descriptor in descriptors:
            os.close(descriptor)
