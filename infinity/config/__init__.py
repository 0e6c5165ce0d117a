"""The training config: DeepSpeed's JSON, read into frozen and documented models. Runs once, at start, on the caller's
thread.

From the bottom: `rules` (what a value may be) ← `blocks`, `optimizers` (the models) ← `whole` (the
config: which values contradict each other, and how "auto" is filled) ← `read`, `__main__`, which prints docs/config.md.
"""

from infinity.config.blocks import ZeroConfig
from infinity.config.read import load_config
from infinity.config.whole import Batch, Config

__all__ = ["Batch", "Config", "ZeroConfig", "load_config"]
