"""Saves in DeepSpeed's files, made without DeepSpeed: see [Note: DeepSpeed's files] in infinity/checkpoint/deepspeed_files.py.

The classes in them are of a module `deepspeed` that is there only while a save is made, as in a process that reads one later.
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn

TAG = "global_step3"


class DynamicLossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 256.0, 5, 1, 2


class ZeroStageEnum(IntEnum):
    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclass
class fragment_address:
    numel: int
    start: int


_MODULES = {
    "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@contextlib.contextmanager
def _deepspeed() -> Iterator[None]:
    """Its classes under their names."""
    names = {".".join(name.split(".")[:n]) for name in _MODULES for n in range(1, 6)}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: types.ModuleType(name) for name in names})
    for name, kind in _MODULES.items():
        setattr(sys.modules[name], kind.__name__, kind)
        kind.__module__ = name
    yield
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


@dataclass
class Save:
    """The model and its torch.optim.AdamW, as DeepSpeed would have saved them from so many ranks.

    sub_group_numel: of stage 3. client_state, more: entries of the model states.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ranks: int = 2
    sub_group_numel: int = 2000
    bf16: bool = True

    def __post_init__(self) -> None:
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        state = self.model.state_dict()
        self.buffers = [name for name, _ in self.model.named_buffers() if name in state]
        self.frozen = {name: p.detach() for p, name in self.names.items() if not p.requires_grad}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        self.tied = {alias: self.names[p] for alias, p in every.items() if alias != self.names[p]}
        self.model_state: dict[str, Any] = {
            "buffer_names": self.buffers,
            "optimizer": None,
            "shared_params": self.tied,
            "lr_scheduler": {"last_batch_iteration": 2},
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 1,
            "global_steps": 3,
            "global_samples": 24,
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "ds_config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}},
            "ds_version": "0.19.8",
            "seen": 12,
            "more": ["a", {"b": torch.ones(2)}],
        }

    def groups(self, sub_group_numel: float) -> Iterator[tuple[int, list[nn.Parameter]]]:
        """(number of the optimizer's group, parameters) of each flat tensor."""
        for number, group in enumerate(self.optimizer.param_groups):
            taken: list[nn.Parameter] = []
            for parameter in group["params"]:
                taken.append(parameter)
                if sum(p.numel() for p in taken) > sub_group_numel:
                    yield number, taken
                    taken = []
            if taken:
                yield number, taken

    def value(self, parameter: nn.Parameter, field: str) -> torch.Tensor:
        value = parameter if field == "fp32" else self.optimizer.state[parameter][field]
        return value.detach().reshape(-1)

    def param_groups(self, flat: list[tuple[int, list[nn.Parameter]]]) -> list[dict[str, Any]]:
        return [
            {**group, "params": [index for index, (of, _) in enumerate(flat) if of == number]}
            for number, group in enumerate(self.optimizer.param_groups)
        ]

    def module(self, rank: int | None) -> OrderedDict[str, torch.Tensor]:
        """The model's state dict; of stage 3, where the parameters are empty, for a `rank`."""
        state = self.model.state_dict()
        return OrderedDict(
            (name, value if rank is None or name in self.buffers else torch.empty(0)) for name, value in state.items()
        )

    def shapes(self, flat: list[tuple[int, list[nn.Parameter]]]) -> list[OrderedDict[str, torch.Size]]:
        return [OrderedDict((self.names[p], p.shape) for p in parameters) for _, parameters in flat]

    def write_stage3(self, root: Path) -> Path:
        folder = self._folder(root)
        flat = list(self.groups(self.sub_group_numel))
        for rank in range(self.ranks):
            shared = {} if rank else self.tied
            self._save(
                folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
                self.model_state
                | {
                    "module": self.module(rank),
                    "shared_params": shared,
                    "param_shapes": self.shapes(flat),
                    "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in self.frozen.items()),
                    "frozen_param_fragments": {
                        name: self._part(value.reshape(-1), rank) for name, value in self.frozen.items()
                    },
                },
            )
            parts = {
                field: [torch.cat([self._part(self.value(p, field), rank) for p in ps]) for _, ps in flat]
                for field in ("fp32", "exp_avg", "exp_avg_sq")
            }
            state = {
                "zero_stage": ZeroStageEnum.weights,
                "loss_scaler": DynamicLossScaler(),
                "partition_count": self.ranks,
                "fp32_flat_groups": parts["fp32"],
                "optimizer_state_dict": {
                    "state": self._state(flat, parts),
                    "param_groups": self.param_groups(flat),
                },
            }
            self._save_optimizer(folder, rank, state)
        return folder

    def write_stage2(self, root: Path, stage: int = 2) -> Path:
        folder = self._folder(root)
        flat = list(self.groups(math.inf))
        with_frozen = {"frozen_param_shapes": None, "frozen_param_fragments": None}
        model_state = self.model_state | with_frozen | {"module": self.module(None), "param_shapes": self.shapes(flat)}
        self._save(folder / "mp_rank_00_model_states.pt", model_state)
        for rank in range(self.ranks):
            parts: dict[str, list[torch.Tensor]] = {"fp32": [], "exp_avg": [], "exp_avg_sq": []}
            slices: list[OrderedDict[str, Any]] = []
            for _, parameters in flat:
                numel = sum(p.numel() for p in parameters)
                part = math.ceil(numel / (2 * self.ranks)) * 2
                begin, end = rank * part, min(numel, (rank + 1) * part)
                for field, tensors in parts.items():
                    whole = torch.cat([self.value(p, field) for p in parameters])[begin:end]
                    tensors.append(nn.functional.pad(whole, (0, part - len(whole)), value=math.nan))
                slices.append(OrderedDict())
                start = 0
                for parameter in parameters:
                    first, last = max(begin, start), min(end, start + parameter.numel())
                    if first < last:
                        slices[-1][self.names[parameter]] = fragment_address(last - first, first - begin)
                    start += parameter.numel()
            state = {
                "zero_stage": ZeroStageEnum(stage),
                "loss_scaler": DynamicLossScaler(),
                "partition_count": [self.ranks] * len(flat),
                "single_partition_of_fp32_groups": parts["fp32"],
                "base_optimizer_state": {"state": self._state(flat, parts), "param_groups": self.param_groups(flat)},
                "param_slice_mappings": slices,
            }
            self._save_optimizer(folder, rank, state)
        return folder

    def write_universal(self, root: Path) -> Path:
        """What ds_to_universal makes of a save of stage 2."""
        folder = self._folder(root, latest="latest_universal", tag=f"{TAG}_universal")
        flat = list(self.groups(math.inf))
        model_state = self.model_state | {"module": self.module(None), "param_shapes": self.shapes(flat)}
        self._save(folder / "mp_rank_00_model_states.pt", model_state)
        (folder / "zero").mkdir()
        self._save(folder / "zero" / "optimizer_state.pt", {"param_groups": self.param_groups(flat)})
        for _, parameters in flat:
            for parameter in parameters:
                of_parameter = folder / "zero" / self.names[parameter]
                of_parameter.mkdir()
                for field in ("fp32", "exp_avg", "exp_avg_sq"):
                    value = self.value(parameter, field).view(parameter.shape).clone()
                    self._save(of_parameter / f"{field}.pt", {"cat_dim": 0, "param": value})
                self._save(of_parameter / "step.pt", self.optimizer.state[parameter]["step"])
        return folder

    def _state(
        self, flat: list[tuple[int, list[nn.Parameter]]], parts: dict[str, list[torch.Tensor]]
    ) -> dict[int, dict[str, Any]]:
        return {
            number: {
                **{k: v for k, v in self.optimizer.state[parameters[0]].items() if k == "step"},
                "exp_avg": parts["exp_avg"][number],
                "exp_avg_sq": parts["exp_avg_sq"][number],
            }
            for number, (_, parameters) in enumerate(flat)
        }

    def _part(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a rank, filled up with what must not be read."""
        numel = math.ceil(value.numel() / self.ranks)
        part = value[rank * numel : (rank + 1) * numel]
        return nn.functional.pad(part, (0, numel - part.numel()), value=math.nan)

    def _save_optimizer(self, folder: Path, rank: int, state: dict[str, Any]) -> None:
        name = f"{'bf16_' if self.bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        self._save(folder / name, {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"})

    def _folder(self, root: Path, latest: str = "latest", tag: str = TAG) -> Path:
        (root / tag).mkdir(parents=True)
        (root / latest).write_text(tag)
        return root / tag

    @staticmethod
    def _save(path: Path, content: Any) -> None:
        with _deepspeed():
            torch.save(content, path)


def change(path: Path, **entries: Any) -> None:
    """Set entries of what is in a file of a save; `a__0__b=1` is `["a"][0]["b"] = 1`."""
    with _deepspeed():
        content = torch.load(path, weights_only=False)
        for names, value in entries.items():
            *above, last = (int(name) if name.isdigit() else name for name in names.split("__"))
            place = content
            for name in above:
                place = place[name]
            place[last] = value
        torch.save(content, path)
