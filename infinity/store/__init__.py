"""Floor 2. Where bytes rest: the run folder and its arena, and the layout of a model in it."""

from infinity.store.arena import Arena, Extent, check_free
from infinity.store.layout import Cached, Field, Layout, Piece, Shard, SubGroup, plan_layout
from infinity.store.run_folder import RunFolder

__all__ = [
    "Arena",
    "Cached",
    "Extent",
    "Field",
    "Layout",
    "Piece",
    "RunFolder",
    "Shard",
    "SubGroup",
    "check_free",
    "plan_layout",
]
