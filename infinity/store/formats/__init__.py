"""Parameters that libraries quantise: each module knows the files of one family, and how their codes become values.

[Note: Coded weights]
A coded parameter is several tensors of a file: its codes, and scales for rows or blocks of it. They are read as they are, so 1
or about 0.53 bytes per element come from the drive and go to the device. There they are decoded into the dtype of compute.
"""

from __future__ import annotations

from collections.abc import Mapping

from infinity.store.foreign import StoredParameter, StoredTensor
from infinity.store.formats import bitsandbytes


def parameters_in(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredParameter]:
    """The parameters that tensors of safetensors hold, by name, those that are not coded included.

    Raises CheckpointError where the tensors of one don't fit together, ConfigError where what decodes them is not installed.
    """
    return bitsandbytes.parameters(tensors)
