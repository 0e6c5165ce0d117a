"""Floor 4. Where bytes rest: the run folder and its arena, and the layout of a model in it."""

from infinity.store.arena import Arena, Extent, Scratch, check_free
from infinity.store.commit import ArenaLayout
from infinity.store.durable import DurableRun
from infinity.store.layout import Cached, Field, Layout, Shard, SubGroup, plan_layout
from infinity.store.run_folder import Folder, RunFolder

__all__ = [
    "Arena",
    "ArenaLayout",
    "Cached",
    "DurableRun",
    "Extent",
    "Field",
    "Folder",
    "Layout",
    "RunFolder",
    "Scratch",
    "Shard",
    "SubGroup",
    "check_free",
    "plan_layout",
]
