"""Reads the `quantization_config` of a config.json, which describes the weights next to it. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError, parsing, printable

METHODS = ("bitsandbytes", "fp8", "mxfp8", "compressed-tensors", "modelopt", "mxfp4", "gptq", "awq")
"""The supported families of formats, by `quant_method`."""


def quantization_of(config: Mapping[str, Any], path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the `quant_method` of a config.json, and its `quantization_config`. Without one, return "bitsandbytes" and
    {}: the files of bitsandbytes describe themselves.

    Raises ConfigError if the method is not supported, CheckpointError if the config is damaged.
    """
    with parsing(f"{path}: its quantization_config is damaged", "fetch or save it again"):
        of_text = config.get("text_config")
        text = dict(of_text) if isinstance(of_text, Mapping) else {}
        described = dict(config.get("quantization_config") or text.get("quantization_config") or {})
    if described and not {"quant_method", "load_in_4bit", "load_in_8bit"} & described.keys():
        raise ConfigError(f"{path}: its quantization_config has no quant_method: fetch or save it again")
    method = str(described.get("quant_method", "bitsandbytes"))
    if method not in METHODS:
        raise ConfigError(
            f"{path}: the quant_method {printable(method)!r} is not supported: use weights in 16 bits, or one of "
            f"{', '.join(METHODS)}"
        )
    return method, described


def bits_of(config: Mapping[str, Any], path: Path) -> int:
    """Return the bits of most matrices in the files of a config.json: 4, 8 or 16.

    Raises as `quantization_of`, and ConfigError for other bits.
    """
    method, described = quantization_of(config, path)
    with parsing(f"{path}: its quantization_config is damaged", "fetch or save it again"):
        if method == "compressed-tensors":
            schemes = [group.get("weights") or {} for group in described["config_groups"].values()]
            bits = min((int(scheme["num_bits"]) for scheme in schemes if "num_bits" in scheme), default=16)
        elif method in ("gptq", "awq"):
            bits = int(described["bits"])
        elif described.get("load_in_4bit") or method == "mxfp4" or "FP4" in str(described.get("quant_algo")):
            bits = 4
        else:
            bits = 8 if described.get("load_in_8bit") or method != "bitsandbytes" else 16
    if bits not in (4, 8, 16):
        raise ConfigError(f"{path}: weights with {bits} bits are not supported: use weights in 4, 8 or 16 bits")
    return bits
