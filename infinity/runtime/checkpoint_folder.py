"""Floor 5. The folder that checkpoints of every format are saved to: under another name until they are whole, `latest` last.

Knows names and files, nothing of what is in them. What is written here one rank writes; training thread only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from infinity.errors import CheckpointError, IntegrityError
from infinity.store.files import is_own_folder, sync, write_durably
from infinity.store.manifest import (
    FILE_NAME,
    LATEST,
    Manifest,
    StateFormat,
    StoredFile,
    damage,
    find_checkpoint,
    is_checkpoint,
    load_manifest,
    others,
    read_latest,
)
from infinity.swap.names import buffer_names, parameter_names
from infinity.swap.together import together
from infinity.units import format_bytes

log = logging.getLogger("infinity")


def make_place(root: Path, tag: str) -> Path:
    """An empty folder to write into, `root/.TAG.partial`; what earlier saves left when they were killed goes first."""
    partial = partial_of(root, tag)
    with in_our_words(f"writing a checkpoint to {root}"):
        root.mkdir(parents=True, exist_ok=True)
        recover(root)
        for left in [*root.glob(".*.partial"), *root.glob(".*.old")]:
            if is_own_folder(left):
                shutil.rmtree(left, ignore_errors=True)
        _note(root).unlink(missing_ok=True)
        partial.mkdir(mode=0o700)
    return partial


def complete(root: Path, tag: str, manifest: Manifest, keep: int) -> None:
    """The files of a checkpoint are written: write its manifest, give it its name, and remove the oldest beyond `keep`."""
    with in_our_words(f"writing the checkpoint {root / tag}"):
        write_durably(partial_of(root, tag) / FILE_NAME, manifest.to_json())
        _publish(root, tag)
    _rotate(root, tag, keep)


def find(directory: str | os.PathLike[str], tag: str | None) -> Path:
    """The folder of the checkpoint `tag` in a folder, the latest where None. A collective. Raises CheckpointError."""
    root = Path(directory)
    with together():
        if dist.get_rank() == 0:
            recover(root)
    with together():
        return find_checkpoint(root, tag or read_latest(root))


def verify(path: Path, parsed: Iterable[str], *, everything: bool) -> None:
    """Hold the files that this rank parses to the manifest, and its share of the others. Raises CheckpointError."""
    manifest = load_manifest(path)
    if manifest is None:
        if dist.get_rank() == 0:
            log.warning("%s has no %s: its files can't be verified", path, FILE_NAME)
        return
    names = set(parsed)
    if unknown := names - manifest.files.keys():
        raise CheckpointError(
            f"{path} is damaged (its manifest doesn't know {', '.join(sorted(unknown))}): {others(path.parent, but=path.name)}"
        )
    if everything:
        names.update(sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()])
    for name, why in damage(path, manifest, sorted(names)):
        raise CheckpointError(f"{path / name} is damaged ({why}): {others(path.parent, but=path.name)}")


def damaged(path: Path, why: object) -> CheckpointError:
    """The error that says so. `path`: a checkpoint, or a file of one."""
    checkpoint = path if is_checkpoint(path) else path.parent
    reason = str(why).strip().split("\n")[0].split(". ")[0]  # torch goes on with advice that doesn't fit here
    other = others(checkpoint.parent, but=checkpoint.name)
    return CheckpointError(f"{path} is damaged ({reason or type(why).__name__}): {other}")


def check_same_model(path: Path, ours: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the checkpoint in `path` has the tensors that are here, by name and shape."""
    missing = sorted(set(ours) - set(stored))
    extra = sorted(set(stored) - set(ours))
    reshaped = [
        f"{k} is {stored[k]} there and {ours[k]} here" for k in sorted(set(ours) & set(stored)) if ours[k] != stored[k]
    ]
    if missing or extra or reshaped:
        parts = []
        for what, names in (("missing there", missing), ("unknown here", extra), ("of another shape", reshaped)):
            if names:
                parts.append(f"{len(names)} tensors {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
        raise CheckpointError(f"{path} is a checkpoint of another model: {'; '.join(parts)}")


def recover(root: Path) -> None:
    """Give a checkpoint its name back that was set aside by a save which was killed before the new one had that name."""
    for old in root.glob(".*.old"):
        final = root / old.name[1 : -len(".old")]
        if old.is_dir() and not final.exists():
            with in_our_words(f"recovering {final} from {old}"):
                old.rename(final)


def _publish(root: Path, tag: str) -> None:
    """Give what was written its name. A whole checkpoint stands under one of the names all the time."""
    final, partial, old = root / tag, partial_of(root, tag), _old(root, tag)
    sync(partial)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync(root)
    note = _note(root)
    write_durably(note, tag.encode())
    note.rename(root / LATEST)
    sync(root)
    shutil.rmtree(old, ignore_errors=True)


def _rotate(root: Path, tag: str, keep: int) -> None:
    """Remove the oldest checkpoints that save wrote, down to `keep`; `tag` stays. What goes loses its name first."""
    found = []
    for folder in root.iterdir() if keep else ():
        if is_own_folder(folder) and not folder.name.startswith(".") and folder.name != tag:
            with contextlib.suppress(CheckpointError):
                manifest = load_manifest(folder)
                if manifest is not None:
                    found.append((manifest.saved, manifest.global_steps, folder))
    for _, _, folder in sorted(found, reverse=True)[keep - 1 :]:
        try:
            gone = folder.rename(partial_of(root, folder.name))
        except OSError as error:
            log.warning("checkpoint %s should go, as %d are kept, and can't be removed: %s", folder, keep, error)
        else:
            shutil.rmtree(gone, ignore_errors=True)


def manifest_of(
    model: nn.Module, global_steps: int, files: dict[str, StoredFile], state_format: StateFormat = "dcp"
) -> Manifest:
    """What the manifest of a checkpoint of `model` says."""
    return Manifest(
        saved=datetime.now(timezone.utc).isoformat(),
        global_steps=global_steps,
        state_format=state_format,
        ranks=dist.get_world_size(),
        files=files,
        aliases={alias: names[0] for names in parameter_names(model).values() for alias in names[1:]},
        buffers=[name for names in buffer_names(model, persistent=True).values() for name in names],
    )


def check_space(root: Path, nbytes: int, what: str) -> None:
    """Raise CheckpointError unless `nbytes` are free at `root`; `what` names them."""
    free = free_bytes(root)
    if nbytes > free:
        raise CheckpointError(
            f"{what} takes {format_bytes(nbytes)}, and {root} has {format_bytes(free)} free: free "
            f"{format_bytes(nbytes - free)} more or save elsewhere"
        )


@contextlib.contextmanager
def in_our_words(what: str) -> Iterator[None]:
    """Around writing: what the system refuses becomes a CheckpointError that says what it was for."""
    try:
        yield
    except IntegrityError as error:
        raise CheckpointError(f"{what} failed ({error})") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} failed ({error}): free space there, or choose another folder") from None


def partial_of(root: Path, tag: str) -> Path:
    """Where a checkpoint is while it is written."""
    return root / f".{tag}.partial"


def free_bytes(root: Path) -> int:
    usage = shutil.disk_usage(root)
    return usage.free if usage.total else sys.maxsize  # some file systems don't count


def _old(root: Path, tag: str) -> Path:
    return root / f".{tag}.old"


def _note(root: Path) -> Path:
    """What becomes `latest`."""
    return root / f".{LATEST}.partial"
