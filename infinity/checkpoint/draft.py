"""A checkpoint of any format until it has its name: written in a hidden folder, renamed when complete, `latest` last.

Handles names and files, not their content. Only one rank writes here. Training thread only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import torch.distributed as dist
from torch import nn

from infinity.checkpoint.checks import failing_as
from infinity.checkpoint.manifest import (
    FILE_NAME,
    LATEST,
    Manifest,
    StateFormat,
    damage,
    find_checkpoint,
    is_checkpoint,
    is_deepspeed_checkpoint,
    load_manifest,
    read_latest,
    remove_named,
)
from infinity.checkpoint.work_folder import WorkFolder, abandoned, work_path
from infinity.errors import CheckpointError
from infinity.fsdp2.names import buffer_names, parameter_names
from infinity.fsdp2.scalars import scalar_names
from infinity.ranks.all_ranks import from_all_ranks, from_first_rank, raise_on_all_ranks
from infinity.store.files import StoredFile, is_own_folder, sync, write_durably

log = logging.getLogger("infinity")


class Draft:
    """A checkpoint until it has its name, `root/tag`. All ranks have one and write to its folder, which rank 0 creates
    and completes or discards. See [Note: What a save may remove] in infinity/checkpoint/work_folder.py."""

    def __init__(self, directory: str | os.PathLike[str], tag: str) -> None:
        """Create a draft with the same folder on all ranks. A collective."""
        self.root, self.tag, self.identity = Path(directory), tag, from_first_rank(secrets.token_hex(8))
        self.work_folder = work_path(self.root, self.identity)
        self.folder = self.work_folder / "new"
        self._work: WorkFolder | None = None

    @property
    def task(self) -> str:
        return f"writing the checkpoint {self.root / self.tag}"

    def make(self, nbytes: int) -> None:
        """Create the folder for files of `nbytes` bytes, after clearing what killed saves left."""
        with failing_as(f"writing a checkpoint to {self.root}"):
            _check_name(self.root / self.tag)
            latest = self.root / LATEST
            if os.path.lexists(latest) and not stat.S_ISREG(latest.lstat().st_mode):
                raise CheckpointError(
                    f"{latest} is not a file, but its name is needed to record the latest checkpoint: move it away, or "
                    "choose another folder"
                )
            self._work = WorkFolder.make(self.root, self.tag, nbytes, "a checkpoint", identity=self.identity)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest, the last file. If another file is missing or has another length, ranks see different
        folders, or the file system lost it."""
        for name, why in damage(self.folder, manifest, contents=False):
            raise CheckpointError(
                f"{self.task} failed (of the ranks' files, {name} is {why}): save to a folder that all ranks share"
            )
        with failing_as(self.task):
            write_durably(self.folder / FILE_NAME, manifest.to_json())

    @contextlib.contextmanager
    def proving(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            reason = str(error).replace(f"{self.folder}{os.sep}", "").rpartition(": ")[0] or error
            raise CheckpointError(
                f"{self.task} failed (the new checkpoint could not be loaded: {reason}): the previous one stays; check "
                "the drive, or save elsewhere"
            ) from None

    def complete(self, keep: int) -> None:
        """Give the written and verified checkpoint its name, and remove the oldest beyond `keep`."""
        assert self._work is not None
        with failing_as(self.task):
            self._publish(self._work)
        self._work.remove()
        _rotate(self.root, self.tag, keep)

    def complete_on_all_ranks(
        self, manifest: Manifest, files: dict[str, StoredFile], prove: Callable[[], object], keep: int
    ) -> None:
        """Run `write_manifest` and `complete` once every rank has written its `files`. A collective. `prove` reads back
        what this rank needs for loading. Raises CheckpointError on every rank if any rank fails."""
        everything = from_all_ranks(files)
        with raise_on_all_ranks():
            if dist.get_rank() == 0:
                all_files = {name: file for of_rank in everything for name, file in of_rank.items()}
                self.write_manifest(replace(manifest, files=all_files))
        with raise_on_all_ranks(), self.proving():
            prove()
        with raise_on_all_ranks():
            if dist.get_rank() == 0:
                self.complete(keep)

    def discard(self) -> None:
        """Remove it, if it has no name yet. Idempotent; does nothing on ranks that did not create it."""
        if self._work is not None:
            self._work.remove()

    def _publish(self, work: WorkFolder) -> None:
        """Rename the folder. At every moment a complete checkpoint has the name, or is set aside for `find`."""
        final, note = self.root / self.tag, work.path / LATEST
        sync(work.new)
        write_durably(note, self.tag.encode())
        while True:
            if final.exists():
                _check_name(final)
                work.set_aside(final)
            try:
                work.new.rename(final)
                break
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another save took the name first
                    raise
        sync(self.root)
        _rename_latest(note, self.root)


def _rename_latest(note: Path, root: Path) -> None:
    note.rename(root / LATEST)
    sync(root)


def holds_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder names its latest checkpoint, is one or has one, for `find` to load or to refuse."""
    root = Path(directory)
    folders = [root, *root.iterdir()] if root.is_dir() else []
    return (root / LATEST).exists() or any(is_checkpoint(one) or is_deepspeed_checkpoint(one) for one in folders)


def find(directory: str | os.PathLike[str], tag: str | None) -> Path:
    """Return the folder of the checkpoint `tag` in a folder; None for the latest. A collective.

    First restores what a save set aside, if it was killed before the new checkpoint had the name.
    """
    root = Path(directory)
    with raise_on_all_ranks():
        for work in abandoned(root) if dist.get_rank() == 0 else ():
            work.put_back()
    with raise_on_all_ranks():
        return find_checkpoint(root, tag or read_latest(root))


def _check_name(final: Path) -> None:
    """Raise CheckpointError unless a checkpoint may take this name: it is free, or has a checkpoint of ours to replace."""
    if not os.path.lexists(final) or (is_own_folder(final) and not any(final.iterdir())):
        return
    why = "no manifest says that save_checkpoint wrote it"
    try:
        if is_own_folder(final) and load_manifest(final) is not None:
            return
    except CheckpointError as error:
        why = str(error).partition(": load")[0]
    raise CheckpointError(f"{final} exists already, and {why}: move it away, or choose another tag")


def _rotate(root: Path, tag: str, keep: int) -> None:
    """Remove the oldest checkpoints down to `keep`. `tag` stays, and so do renamed and copied ones."""
    checkpoints = []
    for folder in root.iterdir() if keep else ():
        if is_own_folder(folder) and not folder.name.startswith(".") and folder.name != tag:
            with contextlib.suppress(CheckpointError):
                manifest = load_manifest(folder)
                if manifest is not None and manifest.tag in ("", folder.name):
                    checkpoints.append((manifest.saved, manifest.global_steps, folder, manifest))
    checkpoints.sort(key=lambda entry: entry[:3], reverse=True)
    for _, _, folder, manifest in checkpoints[keep - 1 :]:
        try:
            remove_named(folder, manifest)
        except OSError as error:
            log.warning("checkpoint %s is beyond the %d that are kept, but can't be removed: %s", folder, keep, error)


def manifest_of(model: nn.Module, global_steps: int, tag: str, state_format: StateFormat) -> Manifest:
    return Manifest(
        saved=datetime.now(timezone.utc).isoformat(),
        global_steps=global_steps,
        state_format=state_format,
        ranks=dist.get_world_size(),
        files={},
        aliases={alias: names[0] for names in parameter_names(model).values() for alias in names[1:]},
        buffers=[name for names in buffer_names(model, persistent=True).values() for name in names],
        tag=tag,
        scalars=sorted(scalar_names(model)),
    )
