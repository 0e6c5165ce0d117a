"""The part of DeepSpeed's API that scripts use, under DeepSpeed's import paths.

The files in this folder are the API. `MODULE_OF` maps DeepSpeed's paths to them, and the finder below serves those paths:
`import infinity.zero`, `from infinity.ops.adam import FusedAdam`, `python -m infinity.utils.zero_to_fp32`. Nothing is loaded
before its first use.
"""

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

from infinity.deepspeed.refused import refusal_of

if TYPE_CHECKING:
    from infinity.deepspeed import adam as adam
    from infinity.deepspeed import zero_to_fp32 as zero_to_fp32

MODULE_OF = {
    "infinity.accelerator": "infinity.deepspeed.accelerator",
    "infinity.checkpointing": "infinity.deepspeed.checkpointing",
    "infinity.comm": "infinity.deepspeed.comm",
    "infinity.moe.utils": "infinity.deepspeed.moe",
    "infinity.ops.adam": "infinity.deepspeed.adam",
    "infinity.ops.op_builder": "infinity.deepspeed.aio_handle",
    "infinity.pipe": "infinity.deepspeed.pipe",
    "infinity.runtime.pipe.module": "infinity.deepspeed.pipe",
    "infinity.runtime.utils": "infinity.deepspeed.utils",
    "infinity.runtime.zero.offload_config": "infinity.deepspeed.offload_config",
    "infinity.runtime.zero.stage3": "infinity.deepspeed.memory_needs",
    "infinity.runtime.zero.stage_1_and_2": "infinity.deepspeed.memory_needs",
    "infinity.utils": "infinity.deepspeed.utils",
    "infinity.utils.logging": "infinity.deepspeed.utils",
    "infinity.utils.tensor_fragment": "infinity.deepspeed.tensor_fragment",
    "infinity.utils.zero_to_fp32": "infinity.deepspeed.zero_to_fp32",
    "infinity.zero": "infinity.deepspeed.zero",
}
"""Import path as in DeepSpeed → the module that is imported."""

PACKAGES = ("infinity.moe", "infinity.ops", "infinity.runtime.pipe", "infinity.runtime.zero")
"""Paths that only lead to those below them."""


class AliasFinder(MetaPathFinder, Loader):
    """Finds and loads the modules of `MODULE_OF` under their aliases: one module object, however it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULE_OF or fullname in PACKAGES:
            return ModuleSpec(fullname, self, is_package=fullname in PACKAGES)
        if refusal := refusal_of(fullname):
            raise refusal
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in MODULE_OF:
            sys.modules[name] = import_module(MODULE_OF[name])  # the import statement takes what stands here afterwards
            return

        def load_attribute(attribute: str) -> ModuleType:
            if f"{name}.{attribute}" in MODULE_OF:
                return import_module(f"{name}.{attribute}")
            if refusal := refusal_of(f"{name}.{attribute}"):
                raise refusal
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

        module.__dict__["__getattr__"] = load_attribute

    def get_code(self, fullname: str) -> CodeType | None:
        """The code that `python -m` runs."""
        spec = util.find_spec(MODULE_OF[fullname])
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)


sys.meta_path.append(AliasFinder())
