"""Floor 10. LoRA's adapters merged into the weights that they were trained on, tensor by tensor, without the model.

The numbers are those of PEFT's `merge_and_unload` on a CPU: W + (B A) · scaling, in fp32 where the adapters are, rounded once
to the dtype of W. The scaling is alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA (https://arxiv.org/abs/2312.03732).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from infinity.checkpoint.consolidate import Progress, write_model
from infinity.checkpoint.draft import failing_as
from infinity.errors import CheckpointError
from infinity.fsdp2.materialize import open_tensors
from infinity.store.coded import parts_of_codes

_PATTERNS = {"lora_A.weight": "down", "lora_B.weight": "up"}


def merge(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int], Progress] = lambda total: lambda nbytes: None,
) -> list[Path]:
    """Write the model `base` with a LoRA adapter merged into it as safetensors into the folder `output`; the files.

    Args:
        base: safetensors (as for `initialize(weights=)`); of a folder, all that is no weight is copied, too.
        adapter: what PEFT's `save_pretrained` wrote: adapter_config.json and adapter_model.safetensors.
        output: a folder without a model.
        max_shard_bytes, progress: as for `consolidate`.

    Raises CheckpointError where the adapter is of another model or of a kind that can't be merged so, where a file is damaged,
    or where `output` holds a model, can't be written or lacks the space; nothing is left in it then.
    """
    root, source = Path(output), Path(base)
    lora = _Adapter(Path(adapter))
    with ExitStack() as stack:
        where = open_tensors(source, stack)
        if parts_of_codes(where):
            raise CheckpointError(
                f"{source} is in 4 or 8 bits, which adapters can't be merged into: name the one in 16 bits that it was made of"
            )
        lora.check_fits(where, source)
        tensors = {name: (_dtype(where, name), _shape(where, name)) for name in sorted(where)}
        written = write_model(
            root,
            tensors,
            lambda name: [lora.merged(name, where[name].get_tensor(name))],
            bytes_max=max_shard_bytes,
            progress=progress,
        )
    if source.is_dir():
        with failing_as(f"writing the model to {root}"):
            _copy_descriptions(source, root)
    return written


class _Adapter:
    """A LoRA adapter as PEFT saves it, its tensors in memory. Raises CheckpointError where it can't be merged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
            with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
                tensors = {name.removeprefix("base_model.model."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder} is no adapter that PEFT has saved ({error}): name the folder with adapter_config.json and "
                "adapter_model.safetensors"
            ) from None
        self._check_kind()
        self._pairs: dict[str, dict[str, torch.Tensor]] = {}
        self._whole: dict[str, torch.Tensor] = {}
        """Modules that were trained as a whole."""
        for name, tensor in tensors.items():
            kind = next((kind for suffix, kind in _PATTERNS.items() if name.endswith(f".{suffix}")), None)
            if kind is not None:
                module = name.rpartition(".lora_")[0]
                self._pairs.setdefault(module, {})[kind] = tensor
            elif "lora_" in name:
                raise CheckpointError(f"{folder}: {name} can't be merged; use PEFT's merge_and_unload")
            else:
                self._whole[name] = tensor

    def check_fits(self, where: Mapping[str, Any], base: Path) -> None:
        """Raise CheckpointError unless all of it belongs to tensors of the model."""
        for module, pair in self._pairs.items():
            name = f"{module}.weight"
            if len(pair) != 2:
                raise CheckpointError(f"{self.folder} has only one of lora_A and lora_B of {module}: save it again")
            shape = (pair["up"].shape[0], pair["down"].shape[1])
            if self._config.get("fan_in_fan_out"):
                shape = shape[::-1]
            if name not in where or _shape(where, name) != shape:
                raise CheckpointError(
                    f"{self.folder} is of another model than {base}: that has no {name} of shape {shape}"
                )
        for name, tensor in self._whole.items():
            if name not in where or _shape(where, name) != tuple(tensor.shape):
                raise CheckpointError(
                    f"{self.folder} is of another model than {base}: that has no {name} of shape {tuple(tensor.shape)}"
                )

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The tensor of that name in the merged model, in its own dtype."""
        if name in self._whole:
            return self._whole[name].to(weight.dtype)
        module = name.removesuffix(".weight")
        pair = self._pairs.get(module) if module != name else None
        if pair is None:
            return weight
        delta = pair["up"].float() @ pair["down"].float()
        if self._config.get("fan_in_fan_out"):
            delta = delta.T
        return weight.add_(delta * self._scaling(module))

    def _scaling(self, module: str) -> float:
        rank = _matching(self._config.get("rank_pattern"), module, self._config["r"])
        alpha = _matching(self._config.get("alpha_pattern"), module, self._config["lora_alpha"])
        return float(alpha / math.sqrt(rank) if self._config.get("use_rslora") else alpha / rank)

    def _check_kind(self) -> None:
        kind = self._config.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(
                f"{self.folder} is of the kind {kind}: only LoRA can be merged here; use PEFT's merge_and_unload"
            )
        for key in (
            "use_dora",
            "use_qalora",
            "use_bdlora",
            "layer_replication",
            "target_parameters",
            "trainable_token_indices",
        ):
            if self._config.get(key):
                raise CheckpointError(
                    f"{self.folder} has {key}, which can't be merged here: use PEFT's merge_and_unload"
                )
        if self._config.get("bias", "none") != "none" or self._config.get("lora_bias"):
            raise CheckpointError(
                f"{self.folder} has trained biases, which can't be merged here: use PEFT's merge_and_unload"
            )


def _matching(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """As PEFT looks up rank_pattern and alpha_pattern: the first key that is the end of the module's name, or matches it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _shape(where: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return tuple(where[name].get_slice(name).get_shape())


def _dtype(where: Mapping[str, Any], name: str) -> torch.dtype:
    has_rows = bool(_shape(where, name))
    some: torch.Tensor = where[name].get_slice(name)[:0] if has_rows else where[name].get_tensor(name)
    return some.dtype


def _copy_descriptions(source: Path, root: Path) -> None:
    """config.json, the tokenizer and the like."""
    for file in source.iterdir():
        if (
            file.is_file()
            and file.suffix in (".json", ".txt", ".model", ".jinja")
            and not file.name.endswith(".index.json")
        ):
            shutil.copy(file, root / file.name)
