"""Extracts the whole model of a checkpoint, as safetensors or as a state dict. One process, no ranks.

Memory is bounded by one shard of one tensor: tensors are cut by rows, so the shards in order are the tensor, and are
written piece by piece. (A tensor that another program cut in another way is assembled in memory first.)
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from infinity.checkpoint.checks import damaged, failing_as, verify_file
from infinity.checkpoint.dcp_storage import Reader
from infinity.checkpoint.manifest import Manifest, find_checkpoint, load_manifest
from infinity.checkpoint.model_files import ModelFiles, Tensors
from infinity.checkpoint.stored_arena import StoredArena, is_arena_checkpoint
from infinity.errors import CheckpointError
from infinity.store.files import file_in_the_way
from infinity.store.layout import Field
from infinity.units import parse_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PREFIX = "model."
_PIECE_NUMEL = 4 << 20

Progress = Callable[[int], None]


class StoredModel(ABC):
    """The model in a checkpoint: parameters and buffers, read one at a time. See `open_model`.

    tensors: dtype and shape in the model, by name; tied ones once. aliases: further names of tied parameters. manifest:
    None if another program wrote the checkpoint.
    """

    def __init__(self, path: Path, manifest: Manifest | None, stored: Tensors) -> None:
        self.path, self.manifest = path, manifest
        scalars, aliases = (manifest.scalars, manifest.aliases) if manifest else ([], {})
        self.buffers = frozenset(manifest.buffers if manifest else ())
        self.aliases = {alias: name for alias, name in aliases.items() if name in stored}
        self.tensors = {
            name: (dtype, () if shape == (1,) and name in scalars else shape)
            for name, (dtype, shape) in stored.items()
            if name not in self.aliases
        }

    def tensors_in(self, dtype: torch.dtype) -> Tensors:
        return {
            name: (stored if name in self.buffers or not stored.is_floating_point else dtype, shape)
            for name, (stored, shape) in self.tensors.items()
        }

    @abstractmethod
    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of `name` in order, as flat tensors. Raises CheckpointError."""


@contextlib.contextmanager
def open_model(directory: str | os.PathLike[str], tag: str | None = None) -> Iterator[StoredModel]:
    """Open the model in a checkpoint for a `with` block."""
    path = find_checkpoint(directory, tag)
    if is_arena_checkpoint(path):
        with StoredArena(path) as stored:
            yield _ArenaModel(stored)
    else:
        yield _DcpModel(path)


class _ArenaModel(StoredModel):
    """The model of an arena checkpoint. A file is verified when the first of its bytes are needed."""

    def __init__(self, stored: StoredArena) -> None:
        self._stored = stored
        self._buffers: dict[str, torch.Tensor] = stored.unpaged_state(0)["buffers"]
        tensors = {param.name: (torch.float32, param.shape) for param in stored.layout.parameters}
        tensors |= {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in self._buffers.items()}
        super().__init__(stored.path, stored.manifest, tensors)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        if name in self._buffers:
            yield self._buffers[name].reshape(-1)
            return
        numel = math.prod(self.tensors[name][1])
        for start in range(0, numel, _PIECE_NUMEL):
            count = min(_PIECE_NUMEL, numel - start)
            yield self._stored.read_verified(name, Field.MASTER, start, count)


class _DcpModel(StoredModel):
    def __init__(self, path: Path) -> None:
        manifest = load_manifest(path)
        self._reader = Reader(path)
        self._verify = (
            functools.cache(functools.partial(verify_file, path, manifest)) if manifest else lambda name: None
        )
        self._verify(".metadata")
        self._stored = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in self._reader.tensors().items()
            if name.startswith(_PREFIX)
        }
        if not self._stored:
            raise CheckpointError(f"{path} holds no model: no tensor's name begins with {_PREFIX!r}")
        tensors = {name: (stored.properties.dtype, tuple(stored.size)) for name, stored in self._stored.items()}
        super().__init__(path, manifest, tensors)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        stored = self._stored[name]
        shape = tuple(stored.size)
        chunks = sorted((c for c in stored.chunks if math.prod(c.sizes)), key=lambda chunk: tuple(chunk.offsets))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
            raise damaged(self.path, f"{name}: its parts don't make up the whole")
        if _are_rows(chunks, shape):
            for chunk in chunks:
                yield self._read(name, chunk).reshape(-1)
            return
        whole = torch.empty(shape, dtype=stored.properties.dtype)
        for chunk in chunks:
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place].copy_(self._read(name, chunk))
        yield whole.reshape(-1)

    def _read(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        info = self._reader.read_metadata().storage_data.get(MetadataIndex(_PREFIX + name, chunk.offsets))
        if info is None:
            raise damaged(self.path, f"{name}: a part of it is in no file")
        self._verify(info.relative_path)
        file = self.path / info.relative_path
        try:
            with self._reader.fs.create_stream(file, "rb") as stream:
                part = torch.load(self._reader._slice_file(stream, info), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load may raise anything for arbitrary bytes
            raise damaged(file, error) from None
        fits = isinstance(part, torch.Tensor) and part.shape == torch.Size(chunk.sizes)
        if not fits or part.dtype is not self._stored[name].properties.dtype:
            raise damaged(file, f"it does not hold a part of {name}")
        whole: torch.Tensor = part.detach()
        return whole


def _are_rows(chunks: Sequence[ChunkStorageMetadata], shape: tuple[int, ...]) -> bool:
    row = 0
    for chunk in chunks:
        if not shape:
            return len(chunks) == 1
        if tuple(chunk.sizes[1:]) != shape[1:] or any(chunk.offsets[1:]) or chunk.offsets[0] != row:
            return False
        row += chunk.sizes[0]
    return True


def consolidate(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int], Progress] = lambda total: lambda nbytes: None,
) -> list[Path]:
    """Write the model in a checkpoint as safetensors into the folder `output`. Returns the files, the index last.

    tag: None for the latest in `directory`. dtype: of the parameters; buffers keep theirs. max_shard_bytes: a larger
    model is split, with an index; a larger tensor has a file to itself. progress: called with the number of bytes to
    write; it returns a function that is called with those just written.

    Raises CheckpointError if the checkpoint is damaged, or `output` holds a model, can't be written or lacks the space;
    no files are then left in it.
    """
    with open_model(directory, tag) as model:
        tensors = model.tensors_in(dtype)
        return write_model(Path(output), tensors, model.pieces, bytes_max=max_shard_bytes, progress=progress)


def write_model(
    root: Path,
    tensors: Tensors,
    pieces: Callable[[str], Iterable[torch.Tensor]],
    *,
    bytes_max: int,
    progress: Callable[[int], Progress],
    copied: Iterable[Path] = (),
) -> list[Path]:
    """Write a model into the folder `root`, which has none: `pieces` gives the elements of each tensor in order.
    copied: files to copy there before the model has its name. Errors as for `consolidate`."""
    with failing_as(f"writing the model to {root}"):
        if (file := file_in_the_way(root)) is not None:
            raise CheckpointError(f"{file} is a file, not a folder: name another")
        if any(root.glob("model*.safetensors*")):
            raise CheckpointError(f"{root} holds a model already: remove it, or name another folder")
        copies = {root / file.name: file for file in copied}
        if taken := [copy for copy in copies if os.path.lexists(copy)]:
            raise CheckpointError(f"{taken[0]} exists already: move it away, or name another folder")
        made = not root.exists()
        try:
            with contextlib.closing(ModelFiles(root, tensors, bytes_max=bytes_max)) as files:
                files.tell = progress(files.nbytes)
                for name in tensors:
                    files.add(name, pieces(name))
                for copy, file in copies.items():
                    shutil.copy(file, copy)
                return files.finish()
        except BaseException:
            for copy in copies:
                copy.unlink(missing_ok=True)
            if made and root.is_dir() and not any(root.iterdir()):
                root.rmdir()
            raise


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole model in a checkpoint, parameters in fp32, on the CPU. Tied parameters share memory.

    Raises CheckpointError.
    """
    with open_model(checkpoint_dir, tag) as model:
        state: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in model.tensors_in(torch.float32).items():
            state[name] = torch.empty(shape, dtype=dtype)
            at = 0
            for piece in model.pieces(name):
                state[name].view(-1)[at : at + piece.numel()].copy_(piece)
                at += piece.numel()
        return state | {alias: state[name] for alias, name in model.aliases.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
) -> None:
    """Write the model in a checkpoint as safetensors with fp32 parameters into `output_dir`: see `infinity-ckpt consolidate`.

    `max_shard_size`: bytes per file, or "5GB". Raises CheckpointError, ValueError.
    """
    if not safe_serialization:
        raise ValueError("only safetensors are written: leave safe_serialization out")
    consolidate(checkpoint_dir, output_dir, tag=tag, max_shard_bytes=parse_bytes(max_shard_size))
