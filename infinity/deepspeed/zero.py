"""DeepSpeed's `zero`: models built without memory, parameters gathered to be read or set."""

from infinity.fsdp2.gathered import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
