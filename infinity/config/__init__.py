"""The training config: DeepSpeed's JSON, read into frozen and documented models.

What each key means, which values it may take and how "auto" is filled. Runs once, at start, on the caller's thread; touches
nothing but the config file. `python -m infinity.config` prints the reference (docs/config.md).

From the bottom: `rules` (what a value may be) ← `blocks`, `infinity_block`, `monitors`, `optimizers` (the models) ←
`top_level` (the keys of all of it) ← `known` (every key by its path), `check` (values to a config) ← `whole` (the config:
which values contradict each other, and how "auto" is filled) ← `read`, `reference`.
"""

from infinity.config.blocks import FlopsProfilerConfig, Fp16Config, ZeroConfig
from infinity.config.optimizers import (
    AdamConfig,
    MuonConfig,
    OneCycleConfig,
    SchedulerConfig,
    SGDConfig,
    WarmupCosineLRConfig,
    WarmupDecayLRConfig,
)
from infinity.config.read import load_config
from infinity.config.rules import WarmupType
from infinity.config.top_level import Batch
from infinity.config.whole import Config

__all__ = [
    "AdamConfig",
    "Batch",
    "Config",
    "FlopsProfilerConfig",
    "Fp16Config",
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
