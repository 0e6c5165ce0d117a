"""Floor 10. Writes a model's safetensors files into a folder that others may use, too. Rank 0; training thread only.

[Note: A model in the place of another]
Readers look for `model.safetensors`, or for `model.safetensors.index.json`, which names several files. A model saved there
before stays whole until the new one is: new files get names that are free, then one rename replaces the file that readers look
for, and only then is the older model removed. Only files that we wrote are removed: the header of a file says so, and the
index names it where there are several. Files of others keep their names; only one with a name above is moved aside.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from pathlib import Path

import torch
from safetensors.torch import save_file

from infinity.checkpoint.draft import clear_abandoned
from infinity.checkpoint.work_folder import WorkFolder
from infinity.store.files import open_regular, read_small, sync
from infinity.units import GIB, MIB

log = logging.getLogger("infinity")

SAFETENSORS_BYTES_MAX = 2 * GIB
"""Bytes per file of a 16-bit model, and in memory at once while saving."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WRITER = {"writer": "infinity"}
_HEADER_BYTES_MAX = 100 * MIB


class ModelFiles:
    """Collects tensors in memory and writes a file per SAFETENSORS_BYTES_MAX; files get their names when all are written."""

    def __init__(self, root: Path) -> None:
        """Raises OSError, CheckpointError where nothing can be written to `root`."""
        self._root = root
        self._files: list[list[str]] = []
        self._part: dict[str, torch.Tensor] = {}
        self._part_bytes = 0
        self._total_bytes = 0
        self._named: list[Path] = []
        """Files that have their names but belong to no model yet."""
        self._identity = secrets.token_hex(4)
        root.mkdir(parents=True, exist_ok=True)
        clear_abandoned(root)
        self._work = WorkFolder.make(root, secrets.token_hex(8), SINGLE)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises OSError, SafetensorError."""
        nbytes = tensor.numel() * tensor.itemsize
        if self._part and self._part_bytes + nbytes > SAFETENSORS_BYTES_MAX:
            self._flush()
        self._part[name] = tensor.contiguous()
        self._part_bytes += nbytes
        self._total_bytes += nbytes

    def finish(self) -> None:
        """Name the files: see [Note: A model in the place of another]. Raises OSError, SafetensorError."""
        self._flush()
        former = _parts_of(self._root / INDEX)
        if len(self._files) == 1:
            self._take_place(self._path(0), SINGLE)
            self._free(INDEX)
        else:
            self._take_place(self._indexed(), INDEX)
            self._free(SINGLE)
        for path in former:
            path.unlink()
        sync(self._root)

    def clean_up(self) -> None:
        """Remove files that have become no model. Idempotent."""
        for path in self._named:
            path.unlink(missing_ok=True)
        self._named.clear()
        self._work.remove()

    def _indexed(self) -> Path:
        """Name all files; returns their index, which does not have its name yet."""
        count = len(self._files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if any(os.path.lexists(self._root / name) for name in names):
            names = [f"model-{self._identity}-{name.removeprefix('model-')}" for name in names]
        weight_map = {}
        for number, (name, tensors) in enumerate(zip(names, self._files, strict=True)):
            self._path(number).rename(self._root / name)
            self._named.append(self._root / name)
            weight_map.update(dict.fromkeys(tensors, name))
        sync(self._root)
        index = {"metadata": {"total_size": self._total_bytes, **_WRITER}, "weight_map": weight_map}
        written = self._work.new / INDEX
        written.write_text(json.dumps(index, indent=2) + "\n")  # with the permissions of the other files
        sync(written)
        return written

    def _take_place(self, written: Path, name: str) -> None:
        """Rename the file to the name that readers look for."""
        if not _is_ours(self._root / name):
            self._move_aside(name)
        written.rename(self._root / name)
        self._named.clear()
        sync(self._root)

    def _free(self, name: str) -> None:
        """Remove, or move aside, the file that a model written in the other way has left."""
        if _is_ours(self._root / name):
            (self._root / name).unlink()
        else:
            self._move_aside(name)

    def _move_aside(self, name: str) -> None:
        if os.path.lexists(self._root / name):
            aside = f"{name}.replaced-{self._identity}"
            (self._root / name).rename(self._root / aside)
            log.warning("%s was not written by save_16bit_model: it is %s now", self._root / name, aside)

    def _flush(self) -> None:
        path = self._path(len(self._files))
        save_file(self._part, path, metadata={"format": "pt", **_WRITER})
        sync(path)
        self._files.append(list(self._part))
        self._part.clear()
        self._part_bytes = 0

    def _path(self, number: int) -> Path:
        return self._work.new / f"part{number}.safetensors"


def _is_ours(path: Path) -> bool:
    """Whether we wrote the file, or index, of that name."""
    try:
        if path.name == INDEX:
            return bool(json.loads(read_small(path, _HEADER_BYTES_MAX))["metadata"]["writer"] == _WRITER["writer"])
        with open_regular(path) as file:
            nbytes = int.from_bytes(file.read(8), "little")
            if nbytes > min(_HEADER_BYTES_MAX, os.fstat(file.fileno()).st_size):
                return False
            return bool(json.loads(file.read(nbytes))["__metadata__"]["writer"] == _WRITER["writer"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _parts_of(index: Path) -> list[Path]:
    """Our files that our index names."""
    if not _is_ours(index):
        return []
    names = json.loads(read_small(index, _HEADER_BYTES_MAX)).get("weight_map")
    if not isinstance(names, dict):
        return []
    files = {name for name in names.values() if isinstance(name, str) and name == Path(name).name and name != ".."}
    return [index.parent / name for name in sorted(files) if _is_ours(index.parent / name)]
