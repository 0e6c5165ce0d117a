"""DeepSpeed's `zero`: models built without memory, parameters gathered to be read or set."""

from typing import Any

from infinity.deepspeed.refused import refusal_of
from infinity.fsdp2.gathered import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


def __getattr__(name: str) -> Any:
    path = f"infinity.runtime.zero.partition_parameters.{name}"
    raise refusal_of(path) or AttributeError(f"module 'infinity.zero' has no attribute {name!r}")
