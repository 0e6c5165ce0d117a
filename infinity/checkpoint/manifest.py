"""The manifest of a checkpoint: its files with their lengths and hashes. Also finds checkpoints. No torch here.

A manifest is not trusted: every field is checked before any is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from infinity.errors import CheckpointError
from infinity.store.files import StoredFile, open_regular, parse_json, read_small
from infinity.units import MIB

FILE_NAME = "manifest.json"
LATEST = "latest"
FIRST_RECORD = "rank0.record"
"""A file of every arena checkpoint."""
_NBYTES_MAX = 256 * MIB
_PIECE_BYTES = 4 * MIB

StateFormat = Literal["dcp", "arena"]
"""The format of masters and moments: that of torch.distributed.checkpoint, or the bytes of the arenas."""

_FileName = Annotated[str, Field(pattern=r"^\.?[A-Za-z0-9_-][A-Za-z0-9._-]{0,250}$")]
"""The name of a file in the checkpoint's folder; no path that leads out of it."""
_Count = Annotated[int, Field(ge=0, le=2**62)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, and what kind of checkpoint it is."""

    format: Literal["infinity-checkpoint"] = "infinity-checkpoint"
    version: Literal[1] = 1
    saved: str
    """ISO 8601 in UTC."""
    global_steps: _Count
    ranks: Annotated[int, Field(ge=1, le=2**31)]
    files: dict[_FileName, StoredFile]
    """All files but this one."""
    state_format: StateFormat = "dcp"
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied parameters, each with the name that stores the values."""
    buffers: list[str] = field(default_factory=list)
    tag: str = ""
    """Name of its folder when it was saved; "" in older manifests. A folder of another name was copied or renamed."""
    scalars: list[str] = field(default_factory=list)
    """Names of parameters without dimensions, which are stored in the shape (1,)."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def stored_file(content: bytes) -> StoredFile:
    return StoredFile(len(content), hashlib.sha256(content).hexdigest())


def load_manifest(checkpoint: Path) -> Manifest | None:
    """Read the manifest in a checkpoint's folder; None if there is none."""
    path = checkpoint / FILE_NAME
    try:
        return parse_json(Manifest, read_small(path, _NBYTES_MAX))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): load another checkpoint") from None


def is_name(text: str) -> bool:
    return text == Path(text).name != ".." and text != "" and "\0" not in text


def find_checkpoint(directory: str | os.PathLike[str], tag: str | None = None) -> Path:
    """Return a checkpoint's folder: `directory` itself if it is one, else the one in it called `tag`, else its
    latest."""
    root = Path(directory)
    if tag is None and is_checkpoint(root):
        return root
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder: name one that save_checkpoint wrote to")
    _refuse_deepspeed(root)
    if tag is None:
        tag = read_latest(root)
    if not is_name(tag):
        raise CheckpointError(f"a checkpoint tag is one folder name, got {tag!r}; {others(root)}")
    if not is_checkpoint(root / tag):
        _refuse_deepspeed(root / tag)
        raise CheckpointError(
            f"{root / tag} is not a checkpoint (no .metadata or rank0.record in it); {others(root, but=tag)}"
        )
    return root / tag


def is_checkpoint(path: Path) -> bool:
    """Return True if there is a checkpoint of either format, even a damaged one."""
    return (path / ".metadata").is_file() or (path / FIRST_RECORD).is_file()


def is_deepspeed_checkpoint(path: Path) -> bool:
    return any(path.glob("*mp_rank_*_model_states.pt"))


def _refuse_deepspeed(path: Path) -> None:
    if is_deepspeed_checkpoint(path):
        raise CheckpointError(f"{path} is DeepSpeed's: convert it with infinity-ckpt import {path} OUT")


def read_latest(root: Path) -> str:
    try:
        tag = read_small(root / LATEST, 4096).decode(errors="replace").strip()
    except FileNotFoundError:
        raise CheckpointError(
            f"{root} holds no checkpoint: there is no file named {LATEST!r}; name a tag, or another folder"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{root / LATEST} can't be read ({error.strerror}); {others(root)}") from None
    if not is_name(tag):
        raise CheckpointError(f"{root / LATEST} is damaged: it names no checkpoint; {others(root)}")
    return tag


def others(root: Path, *, but: str = "") -> str:
    tags = {file.parent.name for name in (".metadata", FIRST_RECORD) for file in root.glob(f"*/{name}")} - {but}
    if not tags:
        return "there is no other in that folder"
    return f"there is also the tag {', '.join(map(repr, sorted(tags)))}"


def damage(
    checkpoint: Path,
    manifest: Manifest,
    progress: Callable[[int], None] = lambda nbytes: None,
    *,
    contents: bool = True,
) -> Iterator[tuple[str, str]]:
    for name in sorted(manifest.files):
        if why := difference(checkpoint / name, manifest.files[name], progress, contents=contents):
            yield name, why


def remove_named(checkpoint: Path, manifest: Manifest) -> None:
    """Remove the files that a checkpoint's manifest names, the manifest, and the folder if it is then empty.

    The file that makes it a checkpoint is removed first, the manifest last: after an interruption it is no longer a
    checkpoint, and can still be removed. Raises OSError.
    """
    first = [name for name in (".metadata", FIRST_RECORD) if name in manifest.files]
    for name in [*first, *sorted(manifest.files.keys() - {*first}), FILE_NAME]:
        (checkpoint / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        checkpoint.rmdir()


def difference(
    path: Path, stored: StoredFile, progress: Callable[[int], None] = lambda nbytes: None, *, contents: bool = True
) -> str:
    """Return what is wrong with a file, compared with its entry in a manifest; "" if nothing is. `progress` is called
    with the number of bytes just read. Without `contents`, only existence and length are compared."""
    digest, nbytes = hashlib.sha256(), 0
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != stored.nbytes:
                progress(stored.nbytes)
                return f"{size} bytes instead of {stored.nbytes}"
            if not contents:
                return ""
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                nbytes += len(piece)
                progress(len(piece))
    except FileNotFoundError:
        progress(stored.nbytes)
        return "missing"
    except OSError as error:
        progress(stored.nbytes - nbytes)
        return f"unreadable ({error.strerror})"
    return "" if digest.hexdigest() == stored.sha256 else "its bytes have changed (SHA-256)"
