"""What the `quantization_config` of a config.json says of the files that lie with it. No torch is needed for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError, parsing, printable

METHODS = ("bitsandbytes", "fp8", "mxfp8", "compressed-tensors", "modelopt", "mxfp4", "gptq", "awq")
"""The families of formats that are read, by `quant_method`."""


def quantization_of(config: Mapping[str, Any], path: Path) -> tuple[str, Mapping[str, Any]]:
    """The `quant_method` of a config.json, and what it says of it; "bitsandbytes" and nothing where it says nothing, as those
    files say it themselves. Raises ConfigError for a method that is not read, CheckpointError where it is damaged."""
    with parsing(f"{path}: its quantization_config is damaged", "fetch or save it again"):
        of_text = config.get("text_config")
        text = dict(of_text) if isinstance(of_text, Mapping) else {}
        described = dict(config.get("quantization_config") or text.get("quantization_config") or {})
    method = str(described.get("quant_method", "bitsandbytes"))
    if method not in METHODS:
        raise ConfigError(
            f"{path} says that its weights are quantised by {printable(method)!r}, which is not read: take weights in 16 bits, "
            f"or by one of {', '.join(METHODS)}"
        )
    return method, described
