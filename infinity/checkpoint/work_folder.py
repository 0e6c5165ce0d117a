"""Floor 10. Where something is written before it gets its name: a hidden folder beside that name, locked while its maker lives.

[Note: What a save may remove]
Users keep other things in the folders that we save to, and several jobs may save to one. So what isn't whole yet lies in
`ROOT/.infinity-saving-IDENTITY/`, which one save makes for itself and no other save writes to; `about.json` in it says so,
and is locked (flock) until that save has ended. A later save removes such a folder only where all of it says that a killed
save left it: the name, the owner, the words in `about.json`, and the lock, which nobody holds. Not all file systems show a
lock to other machines; so what was made on another one must also have been left alone for a day. Where no lock can be had,
nothing is removed. Of what bears a name already, only that goes which a manifest of ours names
(infinity/checkpoint/draft.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from infinity.store.files import is_own_folder, sync

PREFIX = ".infinity-saving-"
_ABOUT = "about.json"
_ABOUT_BYTES_MAX = 4096
_LEFT_ALONE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class About:
    """What `about.json` says. target: the name, beside the folder, that what is written in it will get."""

    target: str
    host: str
    pid: int
    format: Literal["infinity-saving"] = "infinity-saving"


def work_path(root: Path, identity: str) -> Path:
    """The work folder of the save with this identity."""
    return root / f"{PREFIX}{identity}"


class WorkFolder:
    """The folder `work_path` of one save, and its lock. One process has it at a time: see [Note: What a save may remove].

    path: of the folder. new: the empty folder in it to write to. about: what it says of itself.
    """

    def __init__(self, path: Path, about: About, lock: int) -> None:
        self.path, self.about = path, about
        self.new = path / "new"
        self._lock = lock

    @classmethod
    def make(cls, root: Path, identity: str, target: str) -> WorkFolder:
        """A new one for what will be `root/target`. Raises OSError."""
        path = work_path(root, identity)
        about = About(target, socket.gethostname(), os.getpid())
        path.mkdir(mode=0o700)
        lock = -1
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(path / _ABOUT, flags, 0o600)
            if _lock(lock, wait=True):  # without a lock it stays empty, and so nobody removes it
                os.write(lock, (json.dumps(asdict(about)) + "\n").encode())
            (path / "new").mkdir(mode=0o700)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path, about, lock)

    def set_aside(self, path: Path) -> None:
        """Take its name from a checkpoint that is being replaced. Raises OSError."""
        path.rename(self.path / f"replaced-{len(self.replaced)}")
        sync(self.path)

    @property
    def held(self) -> bool:
        """Whether it is still ours."""
        return self._lock >= 0

    @property
    def replaced(self) -> list[Path]:
        """What was set aside, the oldest first."""
        return sorted(self.path.glob("replaced-*"))

    def remove(self) -> None:
        """Remove it, and release the lock. Idempotent. Where something stays in it, because it was set aside or another rank is
        writing, a later save finds it."""
        if not self.held:
            return
        shutil.rmtree(self.new, ignore_errors=True)
        if not self.replaced and not self.new.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Release the lock and leave everything as it is. Idempotent."""
        if self.held:
            lock, self._lock = self._lock, -1
            os.close(lock)


def abandoned(root: Path) -> Iterator[WorkFolder]:
    """Those that killed saves left in `root`, each ours when it comes, to `remove` or `release`."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if is_own_folder(path) and (work := _take(path)) is not None:
                yield work
                work.release()


def _take(path: Path) -> WorkFolder | None:
    """The folder as ours; None where its maker lives, or may. Raises OSError, ValueError where it can't be told."""
    # For writing, which NFS asks of whom it lends such a lock.
    lock = os.open(path / _ABOUT, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if _lock(lock, wait=False):
            about = _parse(os.read(lock, _ABOUT_BYTES_MAX))
            if about.host == socket.gethostname() or time.time() - _changed(path) > _LEFT_ALONE_SECONDS:
                return WorkFolder(path, about, lock)
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _parse(content: bytes) -> About:
    """Raises ValueError where it isn't what a save of ours writes."""
    try:
        about = TypeAdapter(About).validate_json(content, strict=True)
    except ValidationError:
        raise ValueError("it is something else") from None
    if about.target != Path(about.target).name or about.target in ("", ".", ".."):
        raise ValueError(f"{about.target!r} is no name")
    return about


def _changed(path: Path) -> float:
    """When something in it was changed last."""
    return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Whether it is locked now; not where another has it, or the file system keeps no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
