"""Floor 5. The runtime: `initialize` puts everything together, the engine trains, checkpoints come and go."""

from infinity.runtime.engine import Engine, EngineStats
from infinity.runtime.initialize import initialize
from infinity.runtime.materialize import init_empty

__all__ = ["Engine", "EngineStats", "init_empty", "initialize"]
