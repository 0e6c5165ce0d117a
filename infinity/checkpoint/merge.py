"""Merges LoRA adapters into the weights that they were trained on, tensor by tensor, without the model.

Results are those of PEFT's `merge_and_unload` on a CPU: W + (B A) · scaling, computed in fp32, rounded once to the
dtype of W. The scaling is alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA (https://arxiv.org/abs/2312.03732).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import safe_open

from infinity.checkpoint.consolidate import Progress, write_model
from infinity.errors import CheckpointError, parsing, printable
from infinity.fsdp2.materialize import open_tensors, stored_parameters
from infinity.store.files import parse_json
from infinity.store.foreign import StoredTensor
from infinity.units import MIB

_PATTERNS = {"lora_A.weight": "down", "lora_B.weight": "up"}
_INSTEAD = "use PEFT's merge_and_unload"
_CONFIG_BYTES_MAX = 16 * MIB
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MATCHING_SECONDS = 10.0
_MATCHING = r"""
import json, re, sys
patterns, modules = json.load(sys.stdin)
print(json.dumps([next((p for p in patterns if re.match(rf"(.*\.)?({p})$", m)), None) for m in modules]))
"""


def merge(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int], Progress] = lambda total: lambda nbytes: None,
) -> list[Path]:
    """Write the model `base` (as for `initialize(weights=)`) with a merged LoRA adapter as safetensors into the folder
    `output`. A folder's config, tokenizer and the like are copied, too. Returns the files.

    Raises CheckpointError if the adapter is of another model or of a kind that can't be merged so, if a file is
    damaged, or if `output` holds a model, can't be written or lacks the space; no files are then left in it.
    """
    source = Path(base)
    lora = _Adapter(Path(adapter))
    with parsing(f"{adapter} can't be merged into {source}", _INSTEAD), ExitStack() as stack:
        where = open_tensors(source, stack)
        if not all(isinstance(stored, StoredTensor) for stored in stored_parameters(source).values()):
            raise CheckpointError(
                f"{source} is in 4 or 8 bits, which adapters can't be merged into: name its 16- or 32-bit "
                "original, whose dtype the merged model gets"
            )
        tensors = {name: _dtype_and_shape(where[name], name) for name in sorted(where)}
        lora.check_fits(tensors, source)
        kinds = (".json", ".txt", ".model", ".jinja")  # config.json, the tokenizer and the like
        files = [file for file in sorted(source.iterdir()) if file.suffix in kinds] if source.is_dir() else []
        descriptions = [file for file in files if file.is_file() and not file.name.endswith(".index.json")]
        return write_model(
            Path(output),
            tensors,
            lambda name: [lora.merged(name, where[name].get_tensor(name))],
            bytes_max=max_shard_bytes,
            progress=progress,
            copied=descriptions,
        )


_Rank = Annotated[int, Field(ge=1)]
_Alpha = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class _Settings:
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: bool | None = None
    fan_in_fan_out: bool | None = None
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None


class _Adapter:
    """A LoRA adapter as PEFT saves it, its tensors in memory. Raises CheckpointError if it can't be merged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        problem = f"{folder} is not an adapter saved by PEFT"
        with parsing(problem, "name the folder with adapter_config.json and adapter_model.safetensors"):
            config = folder / "adapter_config.json"
            if config.stat().st_size > _CONFIG_BYTES_MAX:
                raise ValueError("its config is too large")
            content = config.read_bytes()
            self._check_kind(dict(json.loads(content)))
            self._settings = parse_json(_Settings, content)
            with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
                tensors = [(name.removeprefix("base_model.model."), file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
        self._pairs: dict[str, dict[str, torch.Tensor]] = {}
        self._whole: dict[str, torch.Tensor] = {}
        """Tensors of modules that were trained as a whole."""
        for name, tensor in tensors:
            kind = next((kind for suffix, kind in _PATTERNS.items() if name.endswith(f".{suffix}")), None)
            if kind is None and "lora_" in name:
                raise CheckpointError(f"{folder}: {name} can't be merged; {_INSTEAD}")
            module = name.rpartition(".lora_")[0]
            holder, key = (self._whole, name) if kind is None else (self._pairs.setdefault(module, {}), kind)
            if key in holder or tensor.dtype not in _DTYPES or (kind is not None and tensor.dim() != 2):
                raise CheckpointError(f"{folder}: {name} can't be merged, as it is not a matrix of numbers; {_INSTEAD}")
            holder[key] = tensor

    def check_fits(self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], base: Path) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._whole.items()}
        settings, modules = self._settings, list(self._pairs)
        ranks = self._matching(settings.rank_pattern or {}, modules, settings.r)
        alphas = self._matching(settings.alpha_pattern or {}, modules, settings.lora_alpha)
        self._scaling = {
            module: alpha / (math.sqrt(rank) if settings.use_rslora else rank)
            for module, alpha, rank in zip(modules, alphas, ranks, strict=True)
        }
        for rank, (module, pair) in zip(ranks, self._pairs.items(), strict=True):
            name = f"{module}.weight"
            if len(pair) != 2:
                raise CheckpointError(f"{self.folder} has only one of lora_A and lora_B of {module}: save it again")
            if not pair["up"].shape[1] == pair["down"].shape[0] == rank:
                raise CheckpointError(
                    f"{self.folder}: {module} has matrices of the ranks {pair['down'].shape[0]} and {pair['up'].shape[1]}, and "
                    f"the rank {rank} in adapter_config.json: save it again"
                )
            if name in shapes:
                raise CheckpointError(f"{self.folder} holds {name} as a whole, and an adapter of it: save it again")
            rows, columns = pair["up"].shape[0], pair["down"].shape[1]
            shapes[name] = (columns, rows) if settings.fan_in_fan_out else (rows, columns)
        for name, wanted in shapes.items():
            dtype, shape = tensors.get(name, (None, None))
            if shape != wanted:
                raise CheckpointError(
                    f"{self.folder} is of another model than {base}: that has no {name} of shape {wanted}"
                )
            if dtype not in _DTYPES:
                raise CheckpointError(f"{base}: {name} is in {dtype}, which can't be merged into; {_INSTEAD}")

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name in self._whole:
            return self._whole[name].to(weight.dtype)
        module = name.removesuffix(".weight")
        pair = self._pairs.get(module) if module != name else None
        if pair is None:
            return weight
        delta = pair["up"].float() @ pair["down"].float()
        if self._settings.fan_in_fan_out:
            delta = delta.T
        delta = delta * self._scaling[module]
        if not delta.isfinite().all():
            raise CheckpointError(
                f"{self.folder}: the adapter of {module} has numbers that are not finite: train it again"
            )
        return weight.add_(delta)

    def _matching(self, patterns: Mapping[str, Any], modules: list[str], default: Any) -> list[Any]:
        """Return the value for each module as PEFT looks it up: of the first pattern that matches the end of its name.
        Patterns are matched in a separate process, since a regular expression may never end."""
        if not patterns:
            return [default] * len(modules)
        command = [sys.executable, "-I", "-S", "-c", _MATCHING]
        asked = json.dumps([list(patterns), modules])
        try:
            matched = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=_MATCHING_SECONDS)
        except subprocess.TimeoutExpired:
            raise CheckpointError(
                f"{self.folder} has rank patterns that take more than {_MATCHING_SECONDS:g} s to match; {_INSTEAD}"
            ) from None
        if matched.returncode:
            raise CheckpointError(f"{self.folder} has rank patterns that are not regular expressions; {_INSTEAD}")
        return [default if pattern is None else patterns[pattern] for pattern in json.loads(matched.stdout)]

    def _check_kind(self, config: Mapping[str, Any]) -> None:
        if (kind := config.get("peft_type")) != "LORA":
            raise CheckpointError(
                f"{self.folder} is of the kind {printable(str(kind))}: only LoRA can be merged here; {_INSTEAD}"
            )
        keys = "use_dora use_qalora use_bdlora layer_replication target_parameters trainable_token_indices"
        for key in keys.split():
            if config.get(key):
                raise CheckpointError(f"{self.folder} has {key}, which can't be merged here: {_INSTEAD}")
        if config.get("bias", "none") != "none" or config.get("lora_bias"):
            raise CheckpointError(f"{self.folder} has trained biases, which can't be merged here: {_INSTEAD}")


def _dtype_and_shape(file: Any, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    rows = file.get_slice(name)
    shape = tuple(rows.get_shape())
    return (rows[:0] if shape else file.get_tensor(name)).dtype, shape
