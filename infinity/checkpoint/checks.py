"""Checks of a checkpoint or a commit before it is written or loaded. Each raises CheckpointError."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError

from infinity.checkpoint.manifest import FILE_NAME, Manifest, difference, is_checkpoint, load_manifest, others
from infinity.errors import CheckpointError, IntegrityError
from infinity.store.run_folder import free_bytes
from infinity.units import format_bytes

log = logging.getLogger("infinity")


def verify(path: Path, parsed: Iterable[str], *, everything: bool) -> None:
    """Compare the files that this rank parses with the manifest; with `everything`, its share of the others too."""
    manifest = load_manifest(path)
    if manifest is None:
        if dist.get_rank() == 0:
            log.warning("%s has no %s: its files can't be verified", path, FILE_NAME)
        return
    names = set(parsed)
    if everything:
        names.update(sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()])
    for name in sorted(names):
        verify_file(path, manifest, name)


def verify_file(path: Path, manifest: Manifest, name: str) -> None:
    if name not in manifest.files:
        raise damaged(path / name, "it is not in the manifest")
    if why := difference(path / name, manifest.files[name]):
        raise damaged(path / name, why)


def damaged(path: Path, why: object) -> CheckpointError:
    """Return the error for a damaged checkpoint. `path`: a checkpoint, or a file of one."""
    checkpoint = path if is_checkpoint(path) else path.parent
    why = "missing" if isinstance(why, FileNotFoundError) else getattr(why, "strerror", None) or why
    reason = str(why).strip().split("\n")[0].split(". ")[0]  # torch adds advice that doesn't fit here
    other = others(checkpoint.parent, but=checkpoint.name)
    return CheckpointError(f"{path} is damaged ({reason or type(why).__name__}): {other}")


def check_same_model(path: Path, ours: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
    both = sorted(ours.keys() & stored.keys())
    troubles = {
        "missing in it": sorted(ours.keys() - stored.keys()),
        "unknown to the model": sorted(stored.keys() - ours.keys()),
        "of another shape": [f"{k} is {stored[k]} in it, {ours[k]} in the model" for k in both if ours[k] != stored[k]],
    }
    parts = [
        f"{len(names)} tensors {trouble} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for trouble, names in troubles.items()
        if names
    ]
    if parts:
        raise CheckpointError(f"{path} is a checkpoint of another model: {'; '.join(parts)}")


def check_resumable(
    moments: Collection[str], steps: Collection[str], *, counts_steps: bool, stepped: Collection[str] | None = None
) -> None:
    """Raise CheckpointError, naming a parameter, unless training can resume exactly from a state.

    Called before the first byte of a checkpoint or commit is written, and before anything of it is loaded. Given are
    names of parameters: with moments, with a known number of steps (unless the optimizer counts none), and, if known,
    those that the optimizer steps.
    """
    lacking = {
        "no place in the optimizer": set() if stepped is None else {*moments} - {*stepped},
        "no number of steps": {*moments} - {*steps} if counts_steps else set(),
    }
    for lack, names in lacking.items():
        if names:
            others = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
            raise CheckpointError(
                f"{min(names)}{others} has moments but {lack}, so training can't resume from it exactly: use another "
                "checkpoint, or its weights alone"
            )


@contextlib.contextmanager
def refusing(task: str) -> Iterator[None]:
    """Guard `check_resumable` in a save: its CheckpointError then says that nothing was written."""
    try:
        yield
    except CheckpointError as error:
        reason = str(error).rpartition(": ")[0]
        raise CheckpointError(
            f"{task} is refused ({reason}), as after an error in a pass: the previous checkpoint stays; load that"
        ) from None


def check_space(root: Path, nbytes: int, name: str) -> None:
    free = free_bytes(root)
    if nbytes > free:
        raise CheckpointError(
            f"{name} takes {format_bytes(nbytes)}, and {root} has {format_bytes(free)} free: free "
            f"{format_bytes(nbytes - free)} more or save elsewhere"
        )


@contextlib.contextmanager
def failing_as(task: str) -> Iterator[None]:
    """Turn system errors in the block into a CheckpointError that begins with `task`."""
    try:
        yield
    except IntegrityError as error:
        raise CheckpointError(f"{task} failed ({error})") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{task} failed ({error}): free space there, or choose another folder") from None
