"""Reads a DeepSpeed checkpoint: parameters by name, with their masters and moments. Any thread; reads only.

Sources: `runtime/engine.py`, `runtime/zero/stage3.py`, `runtime/zero/stage_1_and_2.py`, `utils/zero_to_fp32.py` and
`checkpoint/ds_to_universal.py` of DeepSpeed 0.19. See [Note: DeepSpeed's files]. No code in them is run:
foreign_pickle.py.

[Note: DeepSpeed's files]
A save is a folder, named by the file `latest` next to it. `*_model_states.pt` has the shapes of the parameters by group
or sub-group of the optimizer, counters, schedule and the user's state. `*_optim_states.pt` of each rank has flat
tensors of masters and moments, one for each (sub-)group. Stage 3 cuts each parameter into equal parts, one per rank,
the last ones padded with arbitrary values, and the flat tensor of a rank is its parts in order; a frozen parameter's
parts are with the model states. Stages 1 and 2 cut the flat tensor of a group, and say where each parameter begins in
it. A universal checkpoint has a folder `zero/NAME` for each parameter with its master and moments as whole tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.foreign_pickle import Inert, PickledTensor, load_foreign
from infinity.checkpoint.manifest import is_deepspeed_checkpoint, is_name
from infinity.errors import CheckpointError, parsing
from infinity.store.files import read_small
from infinity.store.foreign import parse_shape

MASTER = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_UNSUPPORTED = {
    r"layer_\d+_expert_.*|expert_.*|expp_rank_.*": "it has expert files of DeepSpeed's MoE layers",
    r"layer_\d+-model_.*": "it has layer files of a pipeline-parallel run",
    r"offloaded_tensors": "the optimizer's state is in offloaded_tensors, swap files that only their run can read",
}
_COUNT_MAX = 2**53
_ADVICE = "resume it in DeepSpeed with ZeRO-3 alone and the optimizer not on NVMe, and save again"


@dataclass(frozen=True)
class PartitionRange:
    """The part of a parameter that one of several tensors holds: `numel` elements from its index `first` on."""

    tensor: int
    first: int
    numel: int


@dataclass(frozen=True)
class Parameter:
    """A parameter in DeepSpeed's files. Raises ValueError unless the tensors hold all of its elements.

    values: the flat tensors that `extents` refer to, for "fp32" and, if it is trained, each moment. group, steps: of
    the optimizer; None if it is frozen.
    """

    name: str
    shape: tuple[int, ...]
    extents: Sequence[PartitionRange]
    values: Mapping[str, Sequence[PickledTensor]]
    group: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        short = any(
            extent.first < 0 or extent.numel < 0 or extent.first + extent.numel > tensors[extent.tensor].numel
            for tensors in self.values.values()
            for extent in self.extents
        )
        if short or sum(extent.numel for extent in self.extents) != math.prod(self.shape):
            raise _other_numel(self.name, self.shape)

    def read(self, field: str, first: int, numel: int) -> torch.Tensor:
        elements = torch.empty(numel)
        start = 0
        for extent in self.extents:
            begin, end = max(first, start), min(first + numel, start + extent.numel)
            if begin < end:
                part = self.values[field][extent.tensor].read(extent.first + begin - start, end - begin)
                elements[begin - first : end - first] = part
            start += extent.numel
        return elements


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """The content of one DeepSpeed save. aliases: further names of tied parameters. groups: the optimizer's, as in its
    state dict. model_state: what rank 0 saved besides parameters."""

    path: Path
    kind: str
    ranks: int
    parameters: Sequence[Parameter]
    aliases: Mapping[str, str]
    buffers: Mapping[str, PickledTensor]
    groups: Sequence[Mapping[str, Any]]
    model_state: Mapping[str, Any]
    loss_scaler: Mapping[str, Any]

    @property
    def optimizer_config(self) -> Mapping[str, Any]:
        config = self.model_state.get("ds_config")
        return (config.get("optimizer") or {}) if isinstance(config, dict) else {}


def open_deepspeed(directory: str | os.PathLike[str], tag: str | None = None) -> DeepSpeedCheckpoint:
    """Read all but the tensors of a checkpoint: `directory` itself if it is one, else the one in it called `tag`, else
    its latest."""
    path = _find(Path(directory), tag)
    for pattern, why in _UNSUPPORTED.items():
        if any(re.fullmatch(pattern, file.name) for file in path.iterdir()):
            raise _refused(path, why)
    model_files = _by_rank(path, _MODEL_FILE)
    states = [_ModelState(file) for file in model_files]
    if len(steps := {state.global_steps for state in states}) > 1:
        raise _mixed(path, "ranks", steps)
    universal = (path / "zero").is_dir()
    with as_expected(path):
        return _universal(path, states) if universal else _partitioned(path, states)


def _find(root: Path, tag: str | None) -> Path:
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder: name one that DeepSpeed's save_checkpoint wrote to")
    if tag is None and is_deepspeed_checkpoint(root):
        return root
    for name in ("latest", "latest_universal"):
        if tag is None:
            with contextlib.suppress(OSError):
                tag = read_small(root / name, 4096).decode(errors="replace").strip()
    if tag is None:
        raise CheckpointError(f"{root} holds no DeepSpeed checkpoint: there is no file named 'latest'; name a tag")
    if not is_name(tag):
        raise CheckpointError(f"a checkpoint tag is one folder name, got {tag!r}: name another")
    if not is_deepspeed_checkpoint(root / tag):
        raise CheckpointError(
            f"{root / tag} is not a DeepSpeed checkpoint (no *_model_states.pt in it): name another tag"
        )
    return root / tag


def _by_rank(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    files: dict[int, Path] = {}
    for file in path.iterdir():
        if (match := pattern.fullmatch(file.name)) is None:
            continue
        if int(match[2]):
            raise _refused(path, "it is of a tensor- or pipeline-parallel run")
        files[int(match[1] or 0)] = file
    missing = next((rank for rank in range(len(files)) if rank not in files), None)
    if missing is not None:
        example = re.sub(r"rank_\d+_mp", f"rank_{missing}_mp", files[max(files)].name)
        raise CheckpointError(f"{path} lacks {example}: copy the files of all its ranks")
    return [files[rank] for rank in range(len(files))]


class _ModelState:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = load_foreign(path)
        with as_expected(path):
            self.module: dict[str, Any] = _by_name(self.content["module"])
            self.global_steps = count_of(self.content["global_steps"])
            self.shapes = [_shapes(group) for group in self.content["param_shapes"]]
            self.frozen_shapes = _shapes(self.content.get("frozen_param_shapes") or {})
            self.frozen_parts = _by_name(self.content.get("frozen_param_fragments") or {})
            self.aliases: dict[str, str] = _by_name(self.content.get("shared_params") or {})
            self.buffers = {n: self.module[n] for n in self.content["buffer_names"] if n in self.module}
            if self.content.get("mp_world_size", 1) != 1:
                raise _refused(path, "it is of a tensor- or pipeline-parallel run")


def _partitioned(path: Path, states: list[_ModelState]) -> DeepSpeedCheckpoint:
    """Read a save of ZeRO, with a file `*_optim_states.pt` for each rank."""
    files = _by_rank(path, _OPTIMIZER_FILE)
    if not files:
        raise CheckpointError(f"{path} has no *_optim_states.pt: copy the files of all its ranks, or save it with ZeRO")
    optimizers = [load_foreign(file)["optimizer_state_dict"] for file in files]
    first = optimizers[0]
    stage3 = "fp32_flat_groups" in first
    base_key = "optimizer_state_dict" if stage3 else "base_optimizer_state"
    if not stage3 and (not isinstance(first.get(base_key), dict) or "param_slice_mappings" not in first):
        raise _refused(path, "it is of another stage, elastic, or from DeepSpeed before 0.8")
    counts = first["partition_count"]
    ranks = max(counts) if isinstance(counts, (list, tuple)) else counts
    there = {len(files), len(states)} if stage3 else {len(files)}
    if there != {ranks}:
        raise CheckpointError(
            f"{path} has files of {min(there - {ranks})} ranks instead of {ranks}: copy the files of all its ranks, "
            "and none of another save (MiCS and expert groups are not supported)"
        )
    all_shapes, groups = states[0].shapes, first[base_key]["param_groups"]
    all_masters = [state["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"] for state in optimizers]
    if len(all_shapes) != len(all_masters[0]):
        raise _refused(path, "its version of DeepSpeed groups parameters differently")
    group_of = _groups_by_number(groups)
    parameters = []
    for number, shapes in enumerate(all_shapes):
        masters = [_tensor(of_rank[number]) for of_rank in all_masters]
        of_ranks = [_adam_state(path, state[base_key]["state"].get(number)) for state in optimizers]
        values = {MASTER: masters} | {name: [_tensor(state[name]) for state in of_ranks] for name in MOMENTS}
        group = group_of[number]
        steps = {count_of(state.get("step", groups[group].get("step"))) for state in of_ranks}
        if len(steps) > 1:
            raise _mixed(path, "optimizers", steps)
        if stage3:
            extents = _extents_of_stage3(path, number, shapes, masters)
        else:
            extents = _extents_of_fragments(shapes, [state["param_slice_mappings"][number] for state in optimizers])
        parameters += [Parameter(name, shape, extents[name], values, group, *steps) for name, shape in shapes.items()]
    stage = next(iter(getattr(first.get("zero_stage"), "arguments", ())), 0)
    stage = stage if stage in (1, 2, 3) else 3 if stage3 else "1 or 2"
    return _checkpoint_of(path, f"ZeRO stage {stage}", ranks, states, parameters, first, groups)


def _extents_of_stage3(
    path: Path, number: int, shapes: Mapping[str, tuple[int, ...]], masters: Sequence[PickledTensor]
) -> dict[str, list[PartitionRange]]:
    first, extents = 0, {}
    for name, shape in shapes.items():
        extents[name] = _equal_parts(shape, len(masters), first)
        first += math.ceil(math.prod(shape) / len(masters))
    for rank, master in enumerate(masters):
        if master.numel != first:
            why = f"rank {rank} has {master.numel} elements of sub-group {number} instead of {first}"
            raise _refused(path, why)
    return extents


def _extents_of_fragments(
    shapes: Mapping[str, tuple[int, ...]], fragments_of_ranks: Iterable[Mapping[str, Any]]
) -> dict[str, list[PartitionRange]]:
    extents: dict[str, list[PartitionRange]] = {name: [] for name in shapes}
    for rank, fragments in enumerate(fragments_of_ranks):
        for name, fragment in fragments.items():
            address = fragment.attributes()
            extents[name].append(PartitionRange(rank, count_of(address["start"]), count_of(address["numel"])))
    return extents


def _universal(path: Path, states: list[_ModelState]) -> DeepSpeedCheckpoint:
    """Read the output of DeepSpeed's `ds_to_universal`."""
    optimizer = load_foreign(path / "zero" / "optimizer_state.pt")
    groups = optimizer["param_groups"]
    base = optimizer.get("optimizer_state_dict") or {}
    group_of = _groups_by_number(groups)
    parameters = []
    for number, shapes in enumerate(states[0].shapes):
        group = group_of[number]
        steps = (base.get("state") or {}).get(number, {}).get("step", groups[group].get("step"))
        for name, shape in shapes.items():
            if not is_name(name):
                raise ValueError(f"{name!r} is not the name of a folder in it")
            folder, numel = path / "zero" / name, math.prod(shape)
            values = {}
            for field in (MASTER, *MOMENTS):
                content = load_foreign(folder / f"{field}.pt")
                values[field] = [_tensor(content["param"] if isinstance(content, dict) else content)]
                if values[field][0].numel != numel:
                    raise _other_numel(name, shape)
            noted = folder / "step.pt"
            of_parameter = count_of(load_foreign(noted) if noted.exists() else steps)
            parameters.append(Parameter(name, shape, [PartitionRange(0, 0, numel)], values, group, of_parameter))
    return _checkpoint_of(path, "universal", len(states), states, parameters, optimizer, groups)


def _checkpoint_of(
    path: Path,
    kind: str,
    ranks: int,
    states: list[_ModelState],
    trained: list[Parameter],
    optimizer: Mapping[str, Any],
    groups: Any,
) -> DeepSpeedCheckpoint:
    """Return the checkpoint with these trained parameters; all others in the model's state dict are frozen."""
    model, scaler = states[0], optimizer.get("loss_scaler")
    known = {parameter.name for parameter in trained} | model.aliases.keys() | model.buffers.keys()
    whole = not model.path.name.startswith("zero_pp_rank_")  # up to stage 2 the state dict holds their values
    frozen = []
    for name in [n for n in model.module if n not in known] if whole else model.frozen_shapes:
        parts = [_tensor(state.module[name] if whole else state.frozen_parts[name]) for state in states]
        shape = parts[0].shape if whole else model.frozen_shapes[name]
        frozen.append(Parameter(name, shape, _equal_parts(shape, len(parts), 0), {MASTER: parts}))
    parameters = [*trained, *frozen]
    names = [*(parameter.name for parameter in parameters), *model.aliases, *model.buffers]
    if len(names) > len(set(names)):
        raise ValueError("it has two values under one name")
    if lacking := sorted(model.module.keys() - set(names)):
        raise _refused(model.path, f"it has no values of {lacking[0]} ({len(lacking)} parameters in all)")
    return DeepSpeedCheckpoint(
        path=path,
        kind=kind,
        ranks=ranks,
        parameters=parameters,
        aliases=model.aliases,
        buffers={name: _tensor(buffer) for name, buffer in model.buffers.items()},
        groups=[_adam_group(path, group) for group in groups],
        model_state=model.content,
        loss_scaler=scaler.attributes() if isinstance(scaler, Inert) else {},
    )


def _equal_parts(shape: tuple[int, ...], ranks: int, first: int) -> list[PartitionRange]:
    """Cut a parameter into equal parts, each at `first` of its rank's tensor; the last may be shorter, or empty."""
    numel = math.prod(shape)
    part = math.ceil(numel / ranks)
    return [PartitionRange(rank, first, max(0, min(part, numel - rank * part))) for rank in range(ranks)]


def _other_numel(name: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(f"its number of elements of {name} is not {math.prod(shape)}")


def _groups_by_number(groups: Any) -> dict[int, int]:
    return {number: index for index, group in enumerate(groups) for number in group["params"]}


def _adam_group(path: Path, group: Mapping[str, Any]) -> Mapping[str, Any]:
    if not {"lr", "betas", "eps", "weight_decay"} <= group.keys():
        raise _refused(path, f"its optimizer is not Adam (its settings are {', '.join(sorted(group))})")
    if group.get("amsgrad") or not group.get("bias_correction", True):
        raise _refused(path, "its optimizer is Adam with amsgrad, or without bias_correction, which is not supported")
    return group


def _adam_state(path: Path, state: Any) -> Mapping[str, Any]:
    if not isinstance(state, dict) or not state:
        raise _refused(path, "its optimizer has no moments (the run took no step, or kept them elsewhere)")
    if state.keys() - {"step"} != {*MOMENTS}:
        raise _refused(path, f"its optimizer is not Adam (its state is {', '.join(sorted(map(str, state)))})")
    return state


def _tensor(value: Any) -> PickledTensor:
    if not isinstance(value, PickledTensor):
        raise TypeError(f"expected a tensor, got a {getattr(value, 'of', type(value).__name__)}")
    return value


def _shapes(group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: parse_shape(shape) for name, shape in _by_name(group).items()}


def _by_name(values: Mapping[Any, Any]) -> dict[str, Any]:
    values = dict(values)
    if not all(isinstance(name, str) and name.isprintable() for name in values):
        raise ValueError("a parameter's name is not text")
    return values


def number_of(value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return an untrusted number, or a tensor's single element. Raises ValueError unless it is finite and in range."""
    if isinstance(value, PickledTensor) and value.numel == 1:
        value = value.read().item()
    if not isinstance(value, (int, float)):
        raise ValueError(f"expected a number, got a {getattr(value, 'of', type(value).__name__)}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("it has a number that is not finite")
    if not low <= number <= high:
        raise ValueError(f"it has the impossible number {number:g}")
    return number


def count_of(value: Any, low: int = 0) -> int:
    number = number_of(value, low, _COUNT_MAX)
    if number != int(number):
        raise ValueError(f"it has the impossible number {number:g}")
    return int(number)


def as_expected(path: Path) -> contextlib.AbstractContextManager[None]:
    return parsing(f"{path} is not in the format of DeepSpeed 0.8 to 0.19 with ZeRO", _ADVICE)


def _mixed(path: Path, of: str, steps: Iterable[int]) -> CheckpointError:
    told = ", ".join(str(number) for number in sorted(steps))
    return CheckpointError(f"{path} is mixed: its {of} are at steps {told}; copy all files of one save")


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} can't be read: {why}; {_ADVICE}")
