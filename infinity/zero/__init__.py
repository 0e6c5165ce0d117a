"""Floor 14. `zero` as scripts written for DeepSpeed use it: `infinity.zero.Init`, `infinity.zero.GatheredParameters`, ..."""

from infinity.fsdp2.gathered import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
