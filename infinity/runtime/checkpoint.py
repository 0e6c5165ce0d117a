"""Floor 5. Checkpoints in PyTorch's own format (torch.distributed.checkpoint), and 16-bit models as safetensors.

A checkpoint is `DIR/TAG/`: the masters and moments under the names that FSDP2 + AdamW uses, written tensor by tensor, a small
file per rank with the rest, and a manifest with the hash of every file, taken while it was written. It is written under another
name and renamed when it is whole; `DIR/latest` names it last. DCP reshards on load, so another number of ranks is fine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from infinity.errors import CheckpointError
from infinity.runtime.materialize import named_full_tensors
from infinity.runtime.rest import decode, encode
from infinity.runtime.stored import Planner, Reader, Writer
from infinity.store.files import is_own_folder, open_regular, sync, write_durably
from infinity.store.manifest import (
    FILE_NAME,
    LATEST,
    Manifest,
    StoredFile,
    damage,
    find_checkpoint,
    load_manifest,
    others,
    read_latest,
)
from infinity.swap import PagedAdam
from infinity.swap.names import buffer_names, parameter_names
from infinity.swap.together import together
from infinity.units import GIB, format_bytes

log = logging.getLogger("infinity")

SAFETENSORS_BYTES_MAX = 2 * GIB
"""Bytes per file of a 16-bit model: also what saving holds in memory at once."""


def save(
    directory: str | os.PathLike[str],
    tag: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rest: dict[str, Any],
    *,
    keep: int = 0,
) -> None:
    """Write a checkpoint. `rest` (plain values and tensors only) is this rank's own. A collective.

    `keep`: how many checkpoints stay in `directory` at most, this one among them; 0 for all.

    Raises CheckpointError on all ranks when `rest` of one can't be stored, or the folder can't be written or lacks the space.
    An earlier checkpoint stays then.
    """
    root = Path(directory)
    partial = _partial(root, tag)
    writer = dist.get_rank() == 0
    with together():
        blob = encode(rest)
        if writer:
            _make_place(root, partial)
    try:
        state = _state_of(model, optimizer)
        with together():
            if writer:
                _check_space(root, sum(v.numel() * v.itemsize for v in _tensors(state).values()), "a checkpoint")
        files = Writer(partial)
        failure = _write(state, files)
        own = f"rank{dist.get_rank()}.pt"
        with together():
            if failure is not None:
                raise failure
            with _in_our_words(f"writing the checkpoint {root / tag}"):
                write_durably(partial / own, blob)
        written = {**files.written, own: StoredFile(len(blob), sha256(blob).hexdigest())}
        everything: list[dict[str, StoredFile]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everything, written)
        with together():
            if writer:
                manifest = _manifest_of(model, rest, {k: v for each in everything for k, v in each.items()})
                with _in_our_words(f"writing the checkpoint {root / tag}"):
                    write_durably(partial / FILE_NAME, manifest.to_json())
                    _publish(root, tag)
                _rotate(root, tag, keep)
    except BaseException:
        if writer:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load(
    directory: str | os.PathLike[str],
    tag: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    verify: bool = True,
) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint into the model and the optimizer, whose state must exist. A collective.

    `verify`: read every file once before, each rank its share, and hold it to its hash in the manifest; what is parsed is
    held to it always.

    Returns its folder and what this rank stored beside it (rank 0's, less "rng", where the number of ranks has grown).
    Raises CheckpointError on all ranks when there is none, it is damaged (naming the file), or it is of another model (naming
    the tensors).
    """
    root = Path(directory)
    with together():
        if dist.get_rank() == 0:
            _recover(root)
    with together():
        path = find_checkpoint(root, tag or read_latest(root))
        _verify(path, everything=verify)
        rest = _rest_of(path)
        _reshard(model)  # what is gathered now would be stale
        state = _state_of(model, optimizer)
        _check_fits(path, state)
    with optimizer.loading() if isinstance(optimizer, PagedAdam) else contextlib.nullcontext():
        failure = _read(state, path)
        with together():
            if failure is not None:
                raise failure
    for group, saved in zip(optimizer.param_groups, _saved_groups(state, model, optimizer), strict=True):
        group.update(saved)
    _restore_steps(state, model, optimizer)
    return path, rest


def save_16bit(directory: str | os.PathLike[str], model: nn.Module, dtype: torch.dtype) -> None:
    """Write the whole model as safetensors, in files of at most SAFETENSORS_BYTES_MAX with an index. A collective.

    Raises CheckpointError on all ranks when the folder can't be written or lacks the space.
    """
    root = Path(directory)
    _reshard(model)
    buffers = buffer_names(model, persistent=True)
    parts = _Parts(root) if dist.get_rank() == 0 else None
    what = f"writing the model to {root}"
    with together():
        if parts is not None:
            with _in_our_words(what):
                root.mkdir(parents=True, exist_ok=True)
            nbytes = sum(p.numel() * dtype.itemsize for p in model.parameters())
            _check_space(root, nbytes + sum(b.numel() * b.itemsize for b in buffers), "the model")
    failure: Exception | None = None
    try:
        for name, tensor in named_full_tensors(model, dtype):
            if parts is not None and failure is None:  # after a failure the others still need this rank to gather
                try:
                    parts.add(name, tensor)
                except (OSError, SafetensorError) as error:
                    failure = error
        with together(), _in_our_words(what):
            if failure is not None:
                raise failure
            if parts is not None:
                for buffer, names in buffers.items():
                    parts.add(names[0], buffer.detach().cpu())
                parts.finish()
    finally:
        if parts is not None:
            parts.clean_up()


class _Parts:
    """Tensors that gather in memory and go to a file when they reach SAFETENSORS_BYTES_MAX; named when all are there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: list[list[str]] = []
        self._part: dict[str, torch.Tensor] = {}
        self._part_bytes = 0
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        nbytes = tensor.numel() * tensor.itemsize
        if self._part and self._part_bytes + nbytes > SAFETENSORS_BYTES_MAX:
            self._flush()
        self._part[name] = tensor.contiguous()
        self._part_bytes += nbytes
        self._total_bytes += nbytes

    def finish(self) -> None:
        self._flush()
        for stale in [*self._root.glob("model*.safetensors"), *self._root.glob("model.safetensors.index.json")]:
            stale.unlink()
        if len(self._files) == 1:
            self._path(0).rename(self._root / "model.safetensors")
        else:
            weight_map = {}
            for number, names in enumerate(self._files):
                file = f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"
                self._path(number).rename(self._root / file)
                weight_map.update(dict.fromkeys(names, file))
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2) + "\n"
            path = self._root / "model.safetensors.index.json"
            path.write_text(text)
            sync(path)
        sync(self._root)

    def clean_up(self) -> None:
        """Remove what has not got its name."""
        for number in range(len(self._files) + 1):
            self._path(number).unlink(missing_ok=True)

    def _flush(self) -> None:
        path = self._path(len(self._files))
        save_file(self._part, path, metadata={"format": "pt"})
        sync(path)
        self._files.append(list(self._part))
        self._part.clear()
        self._part_bytes = 0

    def _path(self, number: int) -> Path:
        return self._root / f".part{number}.safetensors"


def _partial(root: Path, tag: str) -> Path:
    return root / f".{tag}.partial"


def _old(root: Path, tag: str) -> Path:
    return root / f".{tag}.old"


def _make_place(root: Path, partial: Path) -> None:
    """An empty folder to write into; what earlier saves left when they were killed goes first."""
    with _in_our_words(f"writing a checkpoint to {root}"):
        root.mkdir(parents=True, exist_ok=True)
        _recover(root)
        for left in [*root.glob(".*.partial"), *root.glob(".*.old")]:
            if is_own_folder(left):
                shutil.rmtree(left, ignore_errors=True)
        _note(root).unlink(missing_ok=True)
        partial.mkdir(mode=0o700)


def _recover(root: Path) -> None:
    """Give a checkpoint its name back that was set aside by a save which was killed before the new one had that name."""
    for old in root.glob(".*.old"):
        final = root / old.name[1 : -len(".old")]
        if old.is_dir() and not final.exists():
            with _in_our_words(f"recovering {final} from {old}"):
                old.rename(final)


def _publish(root: Path, tag: str) -> None:
    """Give what was written its name. A whole checkpoint stands under one of the names all the time."""
    final, partial, old = root / tag, _partial(root, tag), _old(root, tag)
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


def _note(root: Path) -> Path:
    """What becomes `latest`."""
    return root / f".{LATEST}.partial"


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
            gone = folder.rename(_partial(root, folder.name))
        except OSError as error:
            log.warning("checkpoint %s should go, as %d are kept, and can't be removed: %s", folder, keep, error)
        else:
            shutil.rmtree(gone, ignore_errors=True)


def _manifest_of(model: nn.Module, rest: dict[str, Any], files: dict[str, StoredFile]) -> Manifest:
    return Manifest(
        saved=datetime.now(timezone.utc).isoformat(),
        global_steps=rest["global_steps"],
        ranks=dist.get_world_size(),
        files=files,
        aliases={alias: names[0] for names in parameter_names(model).values() for alias in names[1:]},
        buffers=[name for names in buffer_names(model, persistent=True).values() for name in names],
    )


def _verify(path: Path, *, everything: bool) -> None:
    """Hold the files that this rank parses to the manifest, and its share of the others."""
    manifest = load_manifest(path)
    if manifest is None:
        if dist.get_rank() == 0:
            log.warning("%s has no %s: its files can't be verified", path, FILE_NAME)
        return
    names = {".metadata", _own_rest(path).name}
    if unknown := names - manifest.files.keys():
        raise CheckpointError(
            f"{path} is damaged (its manifest doesn't know {', '.join(sorted(unknown))}): {others(path.parent, but=path.name)}"
        )
    if everything:
        names.update(sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()])
    for name, why in damage(path, manifest, sorted(names)):
        raise CheckpointError(f"{path / name} is damaged ({why}): {others(path.parent, but=path.name)}")


def _check_space(root: Path, nbytes: int, what: str) -> None:
    free = _free_bytes(root)
    if nbytes > free:
        raise CheckpointError(
            f"{what} takes {format_bytes(nbytes)}, and {root} has {format_bytes(free)} free: free "
            f"{format_bytes(nbytes - free)} more or save elsewhere"
        )


def _free_bytes(root: Path) -> int:
    usage = shutil.disk_usage(root)
    return usage.free if usage.total else sys.maxsize  # some file systems don't count


@contextlib.contextmanager
def _in_our_words(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} failed ({error}): free space there, or choose another folder") from None


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _write(state: dict[str, Any], files: Writer) -> CheckpointError | None:
    """Write masters and moments. A collective, so the failure is returned."""
    where = Path(files.path).parent
    try:
        dcp.save(state, storage_writer=files)
    except OSError as error:
        return CheckpointError(f"writing a checkpoint to {where} failed: {error}")
    except dcp.CheckpointException as error:
        return CheckpointError(f"writing a checkpoint to {where} failed: {_cause(error)}")
    return None


def _read(state: dict[str, Any], path: Path) -> CheckpointError | None:
    """Read masters and moments into `state`. A collective, so the failure is returned."""
    try:
        dcp.load(state, storage_reader=Reader(path), planner=Planner())
    except dcp.CheckpointException as error:
        return _damaged(path, _cause(error))
    return None


def _cause(error: dcp.CheckpointException) -> str:
    """What failed first, on any rank. DCP catches Ctrl-C too: that stays what it is."""
    for cause, _ in error.failures.values():
        if isinstance(cause, (KeyboardInterrupt, SystemExit)):
            raise cause from None
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}" if dist.get_world_size() > 1 else str(cause)


def _damaged(path: Path, why: object) -> CheckpointError:
    """`path`: a checkpoint, or a file of one."""
    checkpoint = path if (path / ".metadata").exists() else path.parent
    reason = str(why).strip().split("\n")[0].split(". ")[0]  # torch goes on with advice that doesn't fit here
    other = others(checkpoint.parent, but=checkpoint.name)
    return CheckpointError(f"{path} is damaged ({reason or type(why).__name__}): {other}")


def _reshard(model: nn.Module) -> None:
    """Free whatever is gathered, so that the model's parameters are the sharded masters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _check_fits(path: Path, state: dict[str, Any]) -> None:
    try:
        stored = {key: tuple(each.size) for key, each in Reader(path).tensors().items()}
    except CheckpointError as error:
        raise CheckpointError(f"{error}: {others(path.parent, but=path.name)}") from None
    ours = {key: tuple(v.shape) for key, v in _tensors(state).items()}
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


def _flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat.update(_flatten(value, name))
        else:
            flat[name] = value
    return flat


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in _flatten(state).items() if isinstance(value, torch.Tensor)}


def _saved_groups(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The loaded hyper-parameters, in the order of the optimizer's groups (DCP keeps them by parameter name)."""
    names = parameter_names(model)
    groups = state["optimizer"]["param_groups"]
    by_name = {name: group for group in groups for name in group["params"]}
    empty = iter([group for group in groups if not group["params"]])
    found = []
    for group in optimizer.param_groups:
        saved = by_name[names[group["params"][0]][0]] if group["params"] else next(empty, {})
        found.append({key: value for key, value in saved.items() if key != "params"})
    return found


def _restore_steps(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Moments are loaded in place; the step counts are small tensors of their own."""
    for parameter, names in parameter_names(model).items():
        if "step" in optimizer.state.get(parameter, {}):
            loaded = state["optimizer"]["state"][names[0]]["step"]
            optimizer.state[parameter]["step"].copy_(torch.as_tensor(loaded))


def _own_rest(path: Path) -> Path:
    """The file of what this rank stored, or rank 0's where this rank did not exist."""
    own = path / f"rank{dist.get_rank()}.pt"
    return own if own.is_file() else path / "rank0.pt"


def _rest_of(path: Path) -> dict[str, Any]:
    file = _own_rest(path)
    try:
        with open_regular(file) as opened:
            loaded = decode(opened)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no rank0.pt, so save_checkpoint did not write it: read it with torch.distributed.checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from None
    if not {"global_steps", "lr_scheduler", "client_state"} <= loaded.keys():
        raise _damaged(file, "it holds something else")
    if file.name != f"rank{dist.get_rank()}.pt":
        loaded.pop("rng", None)
    return loaded
