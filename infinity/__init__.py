"""infinity: train models larger than the machine's memory, with parameters and optimizer state on NVMe."""

from infinity.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    InfinityError,
    IoError,
    StoreError,
)
from infinity.runtime import Engine, init_empty, initialize
from infinity.store.measure import DriveRates, measure_drive
from infinity.swap import PagedAdam, PagedAdamW, SwapManager

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DriveRates",
    "Engine",
    "InfinityError",
    "IoError",
    "PagedAdam",
    "PagedAdamW",
    "StoreError",
    "SwapManager",
    "__version__",
    "init_empty",
    "initialize",
    "measure_drive",
]
