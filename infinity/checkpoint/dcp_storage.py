"""Writes the files of torch.distributed.checkpoint with hashes, and reads them safely. Any thread, one at a time.

[Note: No code from a checkpoint]
DCP's `.metadata` is a pickle, and so is everything but tensors in its files; a pickle can run any code. We keep the
format, so that stock training and infinity can read each other's checkpoints. But our unpickler permits only DCP's
classes, torch's dtypes and sizes, and bounds what they take (careful_pickle.py). Other parts go through
torch.load(weights_only=True), which permits as little. With a manifest, the small files are also compared with their
hashes before they are parsed.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from infinity.checkpoint.careful_pickle import CarefulUnpickler
from infinity.checkpoint.manifest import is_name
from infinity.config.rules import names_of
from infinity.errors import parsing
from infinity.store.files import StoredFile, create_private, open_regular
from infinity.units import MIB

_PATHS = {"Path", "PosixPath", "PurePosixPath"}
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": names_of("""
        BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata
        _MEM_FORMAT_ENCODING
    """),
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
"""The names that may be unpickled, by module; also the dtypes of torch."""
_SHARED_MAX = 1000
"""Factor by which a `.metadata` may expand: names, types and places are shared."""


class _Unpickler(CarefulUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not permitted in a checkpoint")


class _HashingFile(io.BufferedWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(create_private(path).detach())
        self.digest = hashlib.sha256()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.nbytes += memoryview(data).nbytes
        return super().write(data)

    def fileno(self) -> int:
        self.flush()  # the caller wants to sync
        return super().fileno()


class CarefulFiles(FileSystem):
    """DCP's file access: see [Note: Places that others can write to]. Keeps the hashes of written files."""

    def __init__(self) -> None:
        self.written: dict[str, StoredFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with open_regular(path) as file:
                yield file
            return
        with _HashingFile(path) as written:
            yield written
        self.written[Path(path).name] = StoredFile(written.nbytes, written.digest.hexdigest())

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """Writer of a file per tensor, because DCP holds all tensors of a file until it is complete."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=False, thread_count=1, overwrite=True)
        self.fs = files = CarefulFiles()
        self.written = files.written
        """The files of this rank, by name."""

    def storage_meta(self) -> StorageMeta:
        """Return no place or time of writing: the same state makes the same files."""
        return StorageMeta()


class Reader(dcp.FileSystemReader):
    """Reader of what `Writer` or DCP's own writer wrote; runs no code in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = CarefulFiles()
        self._folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            path = self._folder / ".metadata"
            with parsing(f"{path} is damaged", "load another checkpoint"), open_regular(path) as file:
                self._metadata = _parse_metadata(file.read())
        return self._metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        stored = self.read_metadata().state_dict_metadata
        return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _parse_metadata(content: bytes) -> Metadata:
    metadata = _Unpickler(content, _SHARED_MAX * len(content) + MIB).load()
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}")
    for info in metadata.storage_data.values():
        name = info.relative_path
        if not isinstance(name, str) or not is_name(name):
            raise ValueError(f"{name!r} is not the name of a file in it")
        if not (isinstance(info.offset, int) and isinstance(info.length, int) and info.offset >= 0 <= info.length):
            raise ValueError(f"{name} has no bytes from {info.offset!r} on")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def cause_of(error: dcp.CheckpointException) -> BaseException | str:
    """Return the first failure; with several ranks, a message with the rank. Re-raises Ctrl-C, which DCP catches."""
    for cause, _ in error.failures.values():
        if isinstance(cause, (KeyboardInterrupt, SystemExit)):
            raise cause from None
    rank, (cause, _) = next(iter(error.failures.items()))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return cause
    return f"rank {rank}: {type(cause).__name__}: {cause}"


class Planner(dcp.DefaultLoadPlanner):
    """DCP's own plan, except that non-tensors are read without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
