"""The runtime: `initialize` puts everything together, the engine trains, checkpoints come and go."""

from infinity.fsdp2.first_values import init_empty
from infinity.ranks.process_group import init_distributed
from infinity.runtime.engine import Engine
from infinity.runtime.initialize import add_config_arguments, initialize
from infinity.runtime.observe import EngineStats

__all__ = ["Engine", "EngineStats", "add_config_arguments", "init_distributed", "init_empty", "initialize"]
