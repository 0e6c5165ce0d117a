"""Writes a model's safetensors files into a folder that may hold foreign files. Rank 0; training thread only.

[Note: A model in the place of another]
Readers look for `model.safetensors`, or for `model.safetensors.index.json`, which names several files. An older
model there stays complete until the new one is: new files get free names, then one rename replaces the file that
readers look for, and only then is the older model removed. Only files that we wrote are removed: their headers say so,
and the index names them if there are several. Foreign files keep their names; only one with a name above is moved
aside.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save

from infinity.checkpoint.manifest import is_name
from infinity.checkpoint.work_folder import WorkFolder
from infinity.errors import CheckpointError
from infinity.fsdp2.materialize import INDEX, SINGLE
from infinity.store.files import open_regular, read_small, sync
from infinity.units import GIB, MIB

log = logging.getLogger("infinity")

SAFETENSORS_BYTES_MAX = 2 * GIB
"""Bytes per file of a 16-bit model."""

_WRITER = {"writer": "infinity"}
_HEADER_BYTES_MAX = 100 * MIB
_PIECE_NUMEL = 4 << 20
"""Elements that are converted and written at once."""

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class ModelFiles:
    """Writer of a model's tensors in the order of `tensors`; the files get their names when all are written. bytes_max:
    of a file; a larger tensor has a file to itself. tell: called with the number of bytes just written."""

    def __init__(self, root: Path, tensors: Tensors, *, bytes_max: int) -> None:
        """Raises OSError if `root` can't be written to, CheckpointError for too little space or unsupported dtypes."""
        self._root, self._tensors = root, tensors
        self.tell: Callable[[int], None] = lambda nbytes: None
        self._files = _cut(tensors, bytes_max)
        self._headers = [_header({name: tensors[name] for name in names}) for names in self._files]
        self.nbytes = sum(_nbytes(*entry) for entry in tensors.values())
        self._begun = 0
        self._file: BinaryIO | None = None
        self._named: list[Path] = []
        """Files that have their names but belong to no model yet."""
        self._identity = secrets.token_hex(4)
        self._work = WorkFolder.make(root, SINGLE, self.nbytes, "the model")

    def add(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        if self._begun < len(self._files) and name == self._files[self._begun][0]:
            self._end_file()
            self._file = self._path(self._begun).open("xb")
            self._file.write(self._headers[self._begun])
            self._begun += 1
        assert self._file is not None
        dtype, _ = self._tensors[name]
        for piece in pieces:
            for numbers in piece.reshape(-1).split(_PIECE_NUMEL):
                self._file.write(numbers.to(dtype).view(torch.uint8).numpy().data)
                self.tell(numbers.numel() * dtype.itemsize)

    def finish(self) -> list[Path]:
        """Name the files, the index last: see [Note: A model in the place of another]. Raises OSError."""
        self._end_file()
        former = _parts_of(self._root / INDEX)
        single = len(self._files) == 1
        name, former_name = (SINGLE, INDEX) if single else (INDEX, SINGLE)
        written = self._path(0) if single else self._indexed()
        self._move_aside_of_others(name)
        named = [*self._named, written.rename(self._root / name)]
        self._named.clear()
        sync(self._root)
        self._move_aside_of_others(former_name)
        for path in (self._root / former_name, *former):
            path.unlink(missing_ok=True)
        sync(self._root)
        return named

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        for path in self._named:
            path.unlink(missing_ok=True)
        self._named.clear()
        self._work.remove()

    def _indexed(self) -> Path:
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
        index = {"metadata": {"total_size": self.nbytes, **_WRITER}, "weight_map": weight_map}
        written = self._work.new / INDEX
        written.write_text(json.dumps(index, indent=2) + "\n")  # with the permissions of the other files
        sync(written)
        return written

    def _move_aside_of_others(self, name: str) -> None:
        """Free a name that readers look for, if a foreign file has it."""
        path = self._root / name
        if os.path.lexists(path) and _header_of_ours(path) is None:
            aside = f"{name}.replaced-{self._identity}"
            path.rename(self._root / aside)
            log.warning("%s was not written by save_16bit_model: renamed to %s", path, aside)

    def _end_file(self) -> None:
        if self._file is not None:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())

    def _path(self, number: int) -> Path:
        return self._work.new / f"part{number}.safetensors"


def _cut(tensors: Tensors, bytes_max: int) -> list[list[str]]:
    files: list[list[str]] = []
    room = -1
    for name, entry in tensors.items():
        nbytes = _nbytes(*entry)
        if nbytes > room:
            files.append([])
            room = max(bytes_max, nbytes)
        files[-1].append(name)
        room -= nbytes
    return files


def _header(tensors: Tensors) -> bytes:
    """Return the header of a file: 8 bytes of length, then JSON, padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **_WRITER}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + _nbytes(dtype, shape)
        try:
            entries[name] = {"dtype": _name_of(dtype), "shape": list(shape), "data_offsets": [at, end]}
        except KeyError:
            raise CheckpointError(f"{name} has the type {dtype}, which safetensors does not support") from None
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype. Raises KeyError for one that it lacks."""
    return str(json.loads(save({"": torch.empty(0, dtype=dtype)})[8:])[""]["dtype"])


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _header_of_ours(path: Path) -> dict[str, Any] | None:
    """Return the header of a file, or the content of an index; None if we did not write it."""
    try:
        if path.name == INDEX:
            header, metadata = json.loads(read_small(path, _HEADER_BYTES_MAX)), "metadata"
        else:
            with open_regular(path) as file:
                nbytes = int.from_bytes(file.read(8), "little")
                if nbytes > min(_HEADER_BYTES_MAX, os.fstat(file.fileno()).st_size):
                    return None
                header, metadata = json.loads(file.read(nbytes)), "__metadata__"
        return header if header[metadata]["writer"] == _WRITER["writer"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _parts_of(index: Path) -> list[Path]:
    names = (_header_of_ours(index) or {}).get("weight_map")
    if not isinstance(names, dict):
        return []
    files = {name for name in names.values() if isinstance(name, str) and is_name(name)}
    return [index.parent / name for name in sorted(files) if _header_of_ours(index.parent / name)]
