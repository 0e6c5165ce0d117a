"""The work folder of a save: hidden, in the folder that is saved to, and locked while the save runs.

[Note: What a save may remove]
Users keep other files in the folders that we save to, and several jobs may save to one folder. So an incomplete
checkpoint is in `ROOT/.infinity-saving-IDENTITY/`, which belongs to one save; `about.json` in it says so, and is locked
(flock) until that save ends. A later save removes such a folder only if its name, its owner, `about.json` and a free
lock all say that a killed save left it. Not all file systems show a lock to other machines, so a folder from another
machine must also be untouched for a day. Without locks nothing is removed. Of a named checkpoint, only files in a
manifest of ours are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from infinity.checkpoint.checks import check_space, failing_as
from infinity.checkpoint.manifest import is_name, load_manifest, remove_named
from infinity.errors import CheckpointError
from infinity.store.files import is_own_folder, parse_json, sync

log = logging.getLogger("infinity")

PREFIX = ".infinity-saving-"
_ABOUT = "about.json"
_ABOUT_BYTES_MAX = 4096
_LEFT_ALONE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class About:
    """The content of `about.json`. target: the name that the new folder in it will get."""

    target: str
    host: str
    pid: int
    format: Literal["infinity-saving"] = "infinity-saving"


def work_path(root: Path, identity: str) -> Path:
    return root / f"{PREFIX}{identity}"


class WorkFolder:
    """The folder `work_path` of one save, and its lock. One process has it at a time: see [Note: What a save may
    remove]. new: the empty folder in it to write to."""

    def __init__(self, path: Path, target: str, lock: int) -> None:
        self.path, self.new = path, path / "new"
        self._final = path.parent / target
        self._lock = lock

    @classmethod
    def make(
        cls, root: Path, target: str, nbytes: int = 0, name: str = "", *, identity: str | None = None
    ) -> WorkFolder:
        """Create the work folder for what will be `root/target`, after clearing what killed saves left in `root`.

        Raises OSError, and CheckpointError unless `nbytes` bytes are free; `name` names them in the message.
        """
        root.mkdir(parents=True, exist_ok=True)
        for work in abandoned(root):
            work.remove()
        check_space(root, nbytes, name)
        path = work_path(root, identity or secrets.token_hex(8))
        about = About(target, socket.gethostname(), os.getpid())
        path.mkdir(mode=0o700)
        lock = -1
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(path / _ABOUT, flags, 0o600)
            if _lock(lock, wait=True):  # without a lock the file stays empty, so that no save removes the folder
                os.write(lock, (json.dumps(asdict(about)) + "\n").encode())
            (path / "new").mkdir(mode=0o700)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path, target, lock)

    def set_aside(self, path: Path) -> None:
        path.rename(self.path / f"replaced-{len(self.replaced)}")
        sync(self.path)

    @property
    def replaced(self) -> list[Path]:
        return sorted(self.path.glob("replaced-*"))

    def put_back(self) -> None:
        for replaced in reversed(self.replaced):
            if not os.path.lexists(self._final):
                with failing_as(f"recovering {self._final} from {replaced}"):
                    replaced.rename(self._final)

    def remove(self) -> None:
        """Remove the folder, and release the lock. Idempotent.

        A checkpoint that was set aside gets its name back if that is free. Else its files are removed, and foreign files among
        them move to the checkpoint that has the name now. If something has to stay, since it is not ours or another rank is
        writing, a later save finds it.
        """
        if self._lock < 0:
            return
        self.put_back()
        for replaced in self.replaced:
            with contextlib.suppress(OSError, CheckpointError):
                manifest = load_manifest(replaced)
                if manifest is not None:
                    remove_named(replaced, manifest)
                for foreign in replaced.iterdir() if replaced.exists() else ():
                    moved = self._final / foreign.name
                    if not os.path.lexists(moved):
                        foreign.rename(moved)
                if replaced.exists():
                    replaced.rmdir()
        for replaced in self.replaced:
            log.warning("%s holds files of %s that infinity did not write: move them away", replaced, self._final)
        shutil.rmtree(self.new, ignore_errors=True)
        if not self.replaced and not self.new.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            os.close(lock)


def abandoned(root: Path) -> Iterator[WorkFolder]:
    """Yield the work folders that killed saves left in `root`, locked one at a time, to `remove` or `release`."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if is_own_folder(path) and (work := _take(path)) is not None:
                yield work
                work.release()


def _take(path: Path) -> WorkFolder | None:
    """Return the folder, locked; None if its save may still run. Raises OSError, ValueError if that is unknown."""
    # Opened for writing, which NFS requires for an exclusive lock.
    lock = os.open(path / _ABOUT, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if _lock(lock, wait=False):
            about = parse_json(About, os.read(lock, _ABOUT_BYTES_MAX))
            if not is_name(about.target):
                raise ValueError(f"{about.target!r} is no name")
            changed = max(place.lstat().st_mtime for place in (path, *path.rglob("*")))
            if about.host == socket.gethostname() or time.time() - changed > _LEFT_ALONE_SECONDS:
                return WorkFolder(path, about.target, lock)
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Lock the file. Returns False if another holds the lock, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
