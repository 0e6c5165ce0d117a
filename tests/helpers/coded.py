"""Weights in 8 and 4 bits as bitsandbytes' users have them, or in a published format, and their values, element by element."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import published
import torch

STATE = ".quant_state.bitsandbytes__"


def is_coded(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and "embedding" not in name and "base" in name


def encode(tensors: Mapping[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    """`how`: int8, nf4, fp4 or "nf4 twice", whose scales are coded again; or a format of published.py."""
    if how in published.FORMATS:
        return published.encode(tensors, how, is_coded)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not is_coded(name, tensor):
            made[name] = tensor
        elif how == "int8":
            scales = tensor.half().abs().amax(1).float()
            made[name] = (tensor.float() * 127 / scales[:, None]).round().to(torch.int8)
            made[f"{name.removesuffix('.weight')}.SCB"] = scales
            made[f"{name.removesuffix('.weight')}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        else:
            import bitsandbytes.functional

            kind, *twice = how.split()
            codes, state = bitsandbytes.functional.quantize_4bit(
                tensor.bfloat16(), blocksize=64, quant_type=kind, compress_statistics=bool(twice)
            )
            made[name] = codes
            made |= {f"{name}.{part}": value.contiguous() for part, value in state.as_dict(packed=True).items()}
    return made


def decode(tensors: Mapping[str, torch.Tensor], how: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if how in published.FORMATS:
        return published.decode(tensors, how, dtype)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            scales = tensors[f"{name.removesuffix('.weight')}.SCB"]
            made[name] = (tensor.float() * (scales * (1 / 127))[:, None]).to(dtype)
        elif STATE in name:
            whole = name[: name.index(STATE)]
            made[whole] = _four_bits(tensors, whole, json.loads(bytes(tensor.tolist())), dtype)
        elif tensor.dtype.is_floating_point and not any(mark in name for mark in (".SCB", "absmax", "quant_map")):
            made[name] = tensor
    return made


def _four_bits(
    tensors: Mapping[str, torch.Tensor], name: str, state: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    codes, scales = tensors[name].flatten(), tensors[f"{name}.absmax"]
    if "nested_offset" in state:
        coarse = tensors[f"{name}.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: scales.numel()]
        scales = tensors[f"{name}.nested_quant_map"][scales.long()] * coarse + state["nested_offset"]
    indices = torch.stack([codes >> 4, codes & 15], 1).flatten().long()
    values = tensors[f"{name}.quant_map"][indices] * scales.repeat_interleave(state["blocksize"])[: indices.numel()]
    return values.to(dtype).view(state["shape"])
