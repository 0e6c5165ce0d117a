"""A durable run: folders and files that stay when the process ends, and the commit records in them.

Owned by one process per rank, which holds the lock. Training thread only.

[Note: What a record promises]
Each sub-group has two extents in the arena, its A/B slots. A record names the slot with the state after its step; later
updates write the other slot. Three rules make every record on a drive true for its rank:

  1. A record gets its name only when all it refers to is on the drive: first the arena is synced, then the record, which is
     renamed then, then the folder.
  2. A slot that a record names is written only after that record was removed and the folder synced. Once step k+1 is
     committed, step k+2 may write the slots of step k, so the record of k is removed right after that commit, ...
  3. ... but not before all ranks have their record of k+1 (a barrier).

The first record of a run has none before it. Where some ranks have it and the others have none, though the same launch began
their files, it was never made by all: nothing is committed.

A rank that can't learn whether the others have theirs, because one died, keeps both records and writes nothing more.

So whenever a rank is killed, it has one record, or two between a commit and that barrier; by rules 1 and 2 both are whole. By
rule 3 all ranks still have the record of k if any lacks that of k+1. So there is always a commit that all ranks have; the run
resumes from the newest of these, and later records are removed before anything is written. A damaged record is not used.
Where the one before it still exists on all ranks, its bytes are there by rule 2; else there is nothing to go on from.

[Note: Whose commits a folder holds]
A rank looks for its records in the first of its folders. Where no rank finds any, there may still be commits: of other ranks,
if nodes changed places, or on the other drives, if the first is not mounted. A new start would begin a second history, or
overwrite the first. So with its first record a rank notes on each of its other drives that they hold a part of commits; a new
start looks for such notes, and for records of other ranks (`others`).

[Note: Writes of a killed process]
The lock of a rank (flock) ends with its process. Writes of a killed process that the kernel has accepted may end later. So the
arena file is locked too, through the open file that such writes keep alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.aio import File
from infinity.errors import CheckpointError, IoError, StoreError
from infinity.store.arena import file_bytes
from infinity.store.commit import RECORD_BYTES_MAX, Record, parse_record
from infinity.store.files import is_own_folder, read_small, remove_file, replace_durably, sync
from infinity.store.run_folder import Folder, keep_from_children, make_writable
from infinity.units import MIB, format_bytes

PREFIX = "infinity-durable-"
_SLOTS = 2
_ENDING_SECONDS_MAX = 30.0
"""How long to wait for the lock of a dead process, until the kernel is done with it."""


class DurableFolder(Folder):
    """`root/infinity-durable-NAME/`, created if needed, and one rank's files in it, locked for this process.

    Raises StoreError where the folder can't be created or is not private, and where a live process uses this rank's files.
    """

    def __init__(self, root: str | os.PathLike[str], name: str, rank: int) -> None:
        super().__init__(root)
        make_writable(self.root)
        self.path = self.root / f"{PREFIX}{name}"
        self._rank_name = f"rank{rank}"
        self.fresh = True
        """True if the arena is to be created, replacing one that exists."""
        self._arena: tuple[Path, os.stat_result] | None = None
        """The path of the arena, and the file that was opened there."""
        try:
            _make_own(self.path)
            self._lock = _lock(self.path / f"{self._rank_name}.lock")
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                error.errno or 0, f"{self.path} can't be used ({error.strerror}): choose another nvme_path"
            ) from None
        self._finalizer = weakref.finalize(self, os.close, self._lock)
        keep_from_children(self)

    def open_arena(self, name: str, drive: int, *, checksums: bool = False) -> File:
        deadline = time.monotonic() + _ENDING_SECONDS_MAX
        while True:
            try:
                file = File(self.path / name, create=self.fresh, drive=drive, exclusive=True, checksums=checksums)
                self._arena = self.path / name, os.fstat(file.fileno())
                return file
            except IoError as error:
                if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)  # see [Note: Writes of a killed process]

    def check_in_place(self, arena: str) -> None:
        """Raise CheckpointError where the arena, or the note that it is `arena`, no longer has its name, as after `rm` or `mv`:
        no run could resume from it."""
        noted = {self.file("json"): self.noted().get("arena") == arena}
        if self._arena is not None:
            path, opened = self._arena
            try:
                noted[path] = os.path.samestat(path.lstat(), opened)
            except OSError:
                noted[path] = False
        gone = [str(path) for path, is_there in noted.items() if not is_there]
        if gone:
            raise CheckpointError(
                f"{' and '.join(gone)} was removed or replaced while this run used it, so nothing can be resumed from there: "
                "write a checkpoint with save_checkpoint, and load it into a run of another infinity.run_name"
            )

    def file(self, suffix: str) -> Path:
        """The path of this rank's file with that suffix."""
        return self.path / f"{self._rank_name}.{suffix}"

    def noted(self) -> dict[str, Any]:
        """The note about this rank's files; empty where it can't be read."""
        return _noted(self.file("json"))

    def note(self, about: dict[str, Any]) -> None:
        """Replace the note about this rank's files. Raises OSError."""
        replace_durably(self.file("json"), (json.dumps(about) + "\n").encode())

    def others(self) -> set[str]:
        """Other ranks with records here, as their files name them ("rank1")."""
        return {path.name.split(".")[0] for path in self.path.glob("rank*.commit-*")} - {self._rank_name}

    def shared(self) -> set[str]:
        """Ranks that have noted that a part of their commits is here, as their files name them."""
        names = {path.name.split(".")[0] for path in self.path.glob("rank*.json")}
        return {name for name in names if _noted(self.path / f"{name}.json").get(_COMMITTED)}

    def remove_own(self) -> None:
        """Remove this rank's files, but not its lock."""
        for path in [*self.path.glob(f"{self._rank_name}.*"), *self.path.glob(f".{self._rank_name}.*")]:
            if path.name != f"{self._rank_name}.lock":
                remove_file(path)
        sync(self.path)

    def close(self) -> None:
        self._finalizer()

    def give_up(self, made: str | None) -> None:
        """Close, and remove what a failed start has created: this rank's files if they still belong to the arena `made` (None:
        it created none), the lock if no file is left, the folder if it is empty. Leaves what another process has locked or
        created meanwhile."""
        self.close()
        with contextlib.suppress(OSError):
            lock = _lock(self.path / f"{self._rank_name}.lock", wait=False)
            try:
                if made is not None and self.noted().get("arena") == made:
                    self.remove_own()
                if not [path for path in self.path.glob(f"{self._rank_name}.*") if path.suffix != ".lock"]:
                    self.file("lock").unlink()
                    self.path.rmdir()
                    sync(self.root)
            finally:
                os.close(lock)


class DurableRun:
    """The durable files of one rank of a run, one folder per drive. The records are in the first.

    records: the whole records, by sequence number. damaged: messages about files that have a record's name and are none.
    others: messages about commits of other ranks or drives: see [Note: Whose commits a folder holds].
    resumed: the record that this process resumes from; None if it starts from the beginning.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], name: str, rank: int) -> None:
        self.rank = rank
        self.folders: list[DurableFolder] = []
        self.resumed: Record | None = None
        self.launch = ""
        self.sequence = 0
        """Number of the record that exists; 0 before the first."""
        self._shares_noted = False
        self.arena = secrets.token_hex(8)
        """Identity of the arena files."""
        try:
            for path in paths:
                self.folders.append(DurableFolder(path, name, rank))
            self._check_drives()
            self.records, self.damaged = self._scan()
            self.others = self._look_around()
        except BaseException:
            self.give_up()
            raise

    @property
    def where(self) -> str:
        """The folders, for messages."""
        return " and ".join(str(folder.path) for folder in self.folders)

    @property
    def began_without_commit(self) -> str | None:
        """The launch that began these files and committed nothing since; None where one did, or none began them."""
        launch = self.folders[0].noted().get(_LAUNCH)
        return launch if isinstance(launch, str) and not self.records and not self.damaged else None

    def start_anew(self, launch: str) -> None:
        """Remove this rank's files, which no commit refers to. `launch`: identity of this launch, the same on all ranks."""
        self.launch = launch
        for number, folder in enumerate(self.folders):
            folder.remove_own()
            folder.fresh = True
            about = {"arena": self.arena, _LAUNCH: launch, "drive": number, "drives": len(self.folders)}
            about |= {"host": socket.gethostname(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            folder.note(about)

    def go_on(self, sequence: int, launch: str) -> Record:
        """Go on from the record with this number, which all ranks have.

        Raises CheckpointError where the record's arena is not there as a whole.
        """
        record = self.records[sequence]
        self._check_arena(record)
        self.resumed, self.launch = record, launch
        self.arena = record.commit.arena
        self.leave_one(sequence)
        for folder in self.folders:
            folder.fresh = False
        return record

    def check_in_place(self) -> None:
        """Raise CheckpointError where a file of this run, but its records, no longer has its name."""
        for folder in self.folders:
            folder.check_in_place(self.arena)

    def write(self, record: Record) -> None:
        """Write the record of a commit whose state is on the drive already. Raises OSError."""
        content = record.to_bytes()
        if len(content) > RECORD_BYTES_MAX:  # it could not be read
            raise OSError(errno.EFBIG, f"its record has more than {format_bytes(RECORD_BYTES_MAX)}")
        replace_durably(self._slot(record.commit.sequence), content)
        if not self._shares_noted:
            for other in self.folders[1:]:
                other.note(other.noted() | {_COMMITTED: True})
            self._shares_noted = True

    def read_back(self, written: Record) -> None:
        """Raise CheckpointError unless the record on the drive is the one that was written, of an arena that is there as a
        whole."""
        self._check_arena(written)
        path = self._slot(written.commit.sequence)
        try:
            if parse_record(read_small(path, RECORD_BYTES_MAX), written.layout) != written:
                raise ValueError("it is another one")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"the record of step {written.commit.step} was written to {path}, and can't be read back ({why}): see to the "
                "health of the drive (smartctl -a, dmesg)"
            ) from None

    def leave_one(self, sequence: int) -> None:
        """Keep the record with this number (0 for none) and remove the other, whose slots may be overwritten then. Raises
        OSError."""
        obsolete = [self._slot(sequence + 1), *self.folders[0].path.glob(f".{self._slot(sequence).stem}.*.partial")]
        for path in obsolete:
            remove_file(path)
        sync(self.folders[0].path)
        self.sequence = sequence

    def close(self) -> None:
        """Release the locks. Idempotent; nothing is removed."""
        for folder in self.folders:
            folder.close()

    def give_up(self) -> None:
        """Close, and remove what this start has created, since it failed. All that is committed stays."""
        committed = any(self._slot(slot).exists() for slot in range(_SLOTS)) if self.folders else False
        created = self.resumed is None and self.launch != "" and not committed
        for folder in self.folders:
            folder.give_up(self.arena if created else None)

    def _slot(self, sequence: int) -> Path:
        return self.folders[0].file(f"commit-{sequence % _SLOTS}")

    def _scan(self) -> tuple[dict[int, Record], list[str]]:
        records, damaged = {}, []
        for path in (self._slot(slot) for slot in range(_SLOTS)):
            try:
                record = parse_record(read_small(path, RECORD_BYTES_MAX))
                if self._slot(record.commit.sequence) != path:
                    raise ValueError(f"it is number {record.commit.sequence}, which has another name")
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                damaged.append(f"{path} is damaged ({getattr(error, 'strerror', None) or error})")
            else:
                records[record.commit.sequence] = record
        return records, damaged

    def _look_around(self) -> list[str]:
        messages = []
        for number, folder in enumerate(self.folders):
            mine = {folder._rank_name} if self.records or self.damaged else set()
            shares = folder.shared() - mine if number else set()
            for ranks, stored in ((folder.others(), "commits"), (shares, "a share of the commits")):
                if ranks:
                    messages.append(f"{folder.path} holds {stored} of {_in_words(ranks)}")
        return messages

    def _check_drives(self) -> None:
        """Raise CheckpointError where a folder belongs to another drive of a run, whose record is elsewhere."""
        for number, folder in enumerate(self.folders):
            noted = folder.noted()
            with contextlib.suppress(*_UNREADABLE):
                if (noted["drive"], noted["drives"]) != (number, len(self.folders)):
                    raise CheckpointError(
                        f"{folder.path} is drive {noted['drive'] + 1} of the {noted['drives']} of a run: name all of its paths "
                        "in nvme_path, in the order in which they were, or remove the folder to start from scratch"
                    )

    def _check_arena(self, record: Record) -> None:
        layout = record.layout
        drives = len(self.folders)
        if max(layout.pattern) >= drives:
            raise CheckpointError(
                f"{self.where}: the run was on {max(layout.pattern) + 1} drives: name all in nvme_path"
            )
        expected = (
            file_bytes(layout.pattern, layout.stripe_bytes, layout.arena_bytes) if drives > 1 else [layout.arena_bytes]
        )
        for number, folder in enumerate(self.folders):
            about = folder.file("json")
            try:
                same = json.loads(read_small(about, MIB))["arena"] == record.commit.arena
            except _UNREADABLE as error:
                raise CheckpointError(f"{about} is damaged or missing ({error}): {_ADVICE}") from None
            if not same:
                raise CheckpointError(f"{folder.path} belongs to another run: name the paths in nvme_path as they were")
            if number < len(expected) and layout.pattern.count(number):
                _check_length(folder.file("arena"), expected[number])


_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError)
_COMMITTED = "committed"
_LAUNCH = "launch"
_ADVICE = "load a checkpoint into a run of another infinity.run_name, or remove the folder to start from scratch"


def _noted(path: Path) -> dict[str, Any]:
    with contextlib.suppress(*_UNREADABLE):
        about = json.loads(read_small(path, MIB))
        if isinstance(about, dict):
            return about
    return {}


def _in_words(ranks: set[str]) -> str:
    """Ranks, given by the names of their files, for messages."""
    numbers = sorted((name.removeprefix("rank") for name in ranks), key=lambda number: (len(number), number))
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _check_length(path: Path, nbytes: int) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path} is missing or can't be read ({error.strerror}): {_ADVICE}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes:
        raise CheckpointError(f"{path} has {status.st_size} bytes instead of {nbytes}, so it is damaged: {_ADVICE}")


def _make_own(path: Path) -> None:
    """Create a private folder. Raises StoreError where another file or folder is in its place."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync(path.parent)
    if not is_own_folder(path) or path.stat().st_mode & 0o077:
        raise StoreError(
            errno.EPERM,
            f"{path} is not a folder that only this user can enter: remove it, or choose another infinity.run_name",
        )


def _lock(path: Path, *, wait: bool = True) -> int:
    """A descriptor that holds the lock. Raises StoreError where a live process has it; without `wait`, where any has."""
    deadline = time.monotonic() + (_ENDING_SECONDS_MAX if wait else 0.0)
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        lock = os.open(path, flags, 0o600)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_there = os.path.samestat(path.lstat(), os.fstat(lock))
            except BlockingIOError:
                holder = os.pread(lock, 64, 0).decode(errors="replace").strip()
                if _is_alive(holder) or time.monotonic() > deadline:
                    raise StoreError(
                        errno.EBUSY,
                        f"{path.parent} is in use by process {holder or 'unknown'}: wait for its end, or choose another "
                        "infinity.run_name for a second run",
                    ) from None
                time.sleep(0.1)
                continue
            except FileNotFoundError:  # its holder has removed the file meanwhile
                continue
            if is_there:
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                undo.pop_all()
                return lock


def _is_alive(holder: str) -> bool:
    try:
        os.kill(int(holder), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        pass
    return True
