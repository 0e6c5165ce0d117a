"""infinity: train models larger than the machine's memory, with parameters and optimizer state on NVMe.

The names below are loaded on first use, so that `import infinity` and every command's --help do not wait for torch.
They include the names of `import deepspeed` that scripts use: `import infinity as deepspeed`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from infinity.deepspeed import MODULE_OF, PACKAGES
from infinity.deepspeed.refused import refusal_of

if TYPE_CHECKING:
    from infinity import deepspeed as moe
    from infinity import deepspeed as ops
    from infinity.checkpoint.consolidate import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
    )
    from infinity.deepspeed import accelerator, checkpointing, comm, pipe, utils, zero
    from infinity.deepspeed.accelerator import get_accelerator
    from infinity.deepspeed.memory_needs import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from infinity.drive.measure import DriveRates, measure_drive
    from infinity.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        InfinityError,
        IntegrityError,
        IoError,
        StoreError,
    )
    from infinity.runtime import Engine, add_config_arguments, init_distributed, init_empty
    from infinity.runtime.engine import Engine as DeepSpeedEngine
    from infinity.runtime.inference import InferenceEngine, generate, init_inference
    from infinity.runtime.initialize import initialize
    from infinity.runtime.pipeline import PipelineModule
    from infinity.swap import PagedAdam, PagedAdamW, PagedMuon, PagedSGD, PagingOptions, SwapManager, TensorStore

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DeepSpeedEngine",
    "DriveRates",
    "Engine",
    "InferenceEngine",
    "InfinityError",
    "IntegrityError",
    "IoError",
    "PagedAdam",
    "PagedAdamW",
    "PagedMuon",
    "PagedSGD",
    "PagingOptions",
    "PipelineModule",
    "StoreError",
    "SwapManager",
    "TensorStore",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "generate",
    "get_accelerator",
    "get_fp32_state_dict_from_zero_checkpoint",
    "init_distributed",
    "init_empty",
    "init_inference",
    "initialize",
    "measure_drive",
    "moe",
    "ops",
    "pipe",
    "utils",
    "zero",
]

_NAMES_OF = {
    "infinity.errors": "BudgetError CheckpointError ConfigError InfinityError IntegrityError IoError StoreError",
    "infinity.deepspeed.accelerator": "get_accelerator",
    "infinity.deepspeed.memory_needs": (
        "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live "
        "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live"
    ),
    "infinity.runtime": "Engine add_config_arguments init_distributed init_empty initialize",
    "infinity.runtime.inference": "InferenceEngine generate init_inference",
    "infinity.runtime.pipeline": "PipelineModule",
    "infinity.checkpoint.consolidate": (
        "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint"
    ),
    "infinity.drive.measure": "DriveRates measure_drive",
    "infinity.swap": "PagedAdam PagedAdamW PagedMuon PagedSGD PagingOptions SwapManager TensorStore",
}
_ALIASES = {"DeepSpeedConfigError": "ConfigError", "DeepSpeedEngine": "Engine"}
_OF_ANOTHER_INFINITY = ("inf", "is_infinite")
_HOME = {name: home for home, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> object:
    path = f"infinity.{name}"
    if path in MODULE_OF or path in PACKAGES:
        return import_module(path)
    real_name = _ALIASES.get(name, name)
    if name in _OF_ANOTHER_INFINITY:
        raise ImportError(
            f"{name!r} belongs to the distribution `infinity`, which infinity-offload hides: `import infinity` can "
            "load only one of them; use a separate environment for each",
            name="infinity",
        )
    if refusal := refusal_of(path):
        raise refusal
    if real_name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[real_name]), real_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
