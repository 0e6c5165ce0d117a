"""Quantised parameters: each module reads the files of one family of formats and decodes their codes into values.

[Note: Coded weights]
A coded parameter is several tensors of a file: its codes, and scales for rows or blocks. They are read as they are, so
1 or about 0.55 bytes per element come from the drive and go to the device. There they are decoded into the dtype of
compute.

`quant_method` in the `quantization_config` of the files' config.json selects the family. A family's `parameters`
returns the parameters that the tensors of files hold, by their names in the model. Other tensors stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infinity.errors import parsing
from infinity.store.files import read_small
from infinity.store.foreign import StoredParameter, StoredTensor
from infinity.store.formats import bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from infinity.store.quantization_config import METHODS, quantization_of
from infinity.units import MIB

_CONFIG_BYTES_MAX = 16 * MIB

_FAMILIES: dict[str, Callable[[Mapping[str, StoredTensor], Mapping[str, Any]], dict[str, StoredParameter]]] = {
    "bitsandbytes": bitsandbytes.parameters,
    "fp8": fp8.parameters,
    "mxfp8": fp8.parameters,
    "compressed-tensors": compressed_tensors.parameters,
    "modelopt": compressed_tensors.modelopt_parameters,
    "mxfp4": mxfp4.parameters,
    "gptq": gptq.gptq_parameters,
    "awq": gptq.awq_parameters,
}
assert (*_FAMILIES,) == METHODS


def parameters_in(tensors: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredParameter]:
    """Return the parameters that tensors of safetensors hold, by name, including plain tensors.

    folder: the folder of the files, in which config.json is optional. Raises CheckpointError if the tensors of a
    parameter do not fit together or config.json is damaged, ConfigError if the format is not supported or a package
    that decodes it is missing.
    """
    config: dict[str, Any] = {}
    if (path := folder / "config.json").is_file():
        with parsing(f"{path} is damaged or not the config.json of a model", "fetch or save it again"):
            config = dict(json.loads(read_small(path, _CONFIG_BYTES_MAX)))
    method, described = quantization_of(config, path)
    with parsing(f"{path}: its quantization_config is damaged", "fetch or save it again"):
        return _FAMILIES[method](tensors, described)
