"""Floor 1. The training config: DeepSpeed's JSON, read into frozen and documented models.

What each key means, which values it may take and how "auto" is filled. Runs once, at start, on the caller's thread; touches
nothing but the config file. `python -m infinity.config` prints the reference (docs/config.md).

From the bottom: `rules` (what a value may be) ← `blocks`, `infinity_block`, `optimizers` (the models) ← `top_level` (the keys
of all of it) ← `known` (every key by its path), `check` (values to a config) ← `resolve` ← `whole` (the config, and which
values contradict each other) ← `read`, `reference`.
"""

from infinity.config.blocks import (
    ActivationCheckpointingConfig,
    AioConfig,
    Bf16Config,
    FlopsProfilerConfig,
    Fp16Config,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    ZeroConfig,
)
from infinity.config.infinity_block import InfinityConfig
from infinity.config.optimizers import (
    AdamConfig,
    OneCycleConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
    WarmupCosineLRConfig,
    WarmupDecayLRConfig,
    WarmupLRConfig,
)
from infinity.config.read import load_config
from infinity.config.reference import render_reference
from infinity.config.rules import WarmupType
from infinity.config.top_level import Batch, solve_batch
from infinity.config.whole import Config

__all__ = [
    "ActivationCheckpointingConfig",
    "AdamConfig",
    "AioConfig",
    "Batch",
    "Bf16Config",
    "Config",
    "FlopsProfilerConfig",
    "Fp16Config",
    "InfinityConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OneCycleConfig",
    "OptimizerConfig",
    "SGDConfig",
    "SchedulerConfig",
    "WarmupCosineLRConfig",
    "WarmupDecayLRConfig",
    "WarmupLRConfig",
    "WarmupType",
    "ZeroConfig",
    "load_config",
    "render_reference",
    "solve_batch",
]
