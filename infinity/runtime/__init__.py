"""Floor 5. The runtime: `initialize` puts everything together, the engine trains, checkpoints come and go."""

from infinity.runtime.arguments import add_config_arguments
from infinity.runtime.engine import Engine, EngineStats
from infinity.runtime.first_values import init_empty
from infinity.runtime.initialize import initialize
from infinity.runtime.process_group import init_distributed

__all__ = ["Engine", "EngineStats", "add_config_arguments", "init_distributed", "init_empty", "initialize"]
