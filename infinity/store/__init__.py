"""Where bytes rest: the run folder and its arena, and the layout of a model in it."""

from infinity.store.arena import Arena
from infinity.store.layout import Shard, plan_layout
from infinity.store.run_folder import RunFolder

__all__ = ["Arena", "RunFolder", "Shard", "plan_layout"]
