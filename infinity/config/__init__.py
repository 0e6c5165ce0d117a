"""The training config: DeepSpeed's JSON, read into frozen and documented models.

What each key means, which values it may take and how "auto" is filled. Runs once, at start, on the caller's thread; touches
nothing but the config file. `python -m infinity.config` prints the reference (docs/config.md).

From the bottom: `rules` (what a value may be) ← `blocks`, `infinity_block`, `optimizers` (the models) ← `whole`
(the config: which values contradict each other, and how "auto" is filled) ← `read`, `__main__`.
"""

from infinity.config.blocks import FlopsProfilerConfig, Fp16Config, ZeroConfig
from infinity.config.optimizers import (
    AdamConfig,
    LRRangeTestConfig,
    MuonConfig,
    OneCycleConfig,
    SchedulerConfig,
    SGDConfig,
    WarmupCosineLRConfig,
    WarmupDecayLRConfig,
)
from infinity.config.read import load_config
from infinity.config.rules import WarmupType
from infinity.config.whole import Batch, Config

__all__ = [
    "AdamConfig",
    "Batch",
    "Config",
    "FlopsProfilerConfig",
    "Fp16Config",
    "LRRangeTestConfig",
    "MuonConfig",
    "OneCycleConfig",
    "SGDConfig",
    "SchedulerConfig",
    "WarmupCosineLRConfig",
    "WarmupDecayLRConfig",
    "WarmupType",
    "ZeroConfig",
    "load_config",
]
