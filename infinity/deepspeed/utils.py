"""DeepSpeed's `utils`, `utils.logging` and `runtime.utils`: the log, a loader without end, values of sharded parameters."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from logging import INFO, getLogger
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from infinity.deepspeed import tensor_fragment
from infinity.deepspeed.accelerator import get_accelerator
from infinity.host_memory import available_bytes
from infinity.units import GIB

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "see_memory_usage",
    "set_random_seed",
    "set_z3_leaf_modules",
    *tensor_fragment.__all__,
]

__path__: list[str] = []  # modules are found below it

_T = TypeVar("_T")

logger = getLogger("infinity")


def __getattr__(name: str) -> Any:
    if name == "zero_to_fp32":
        return import_module("infinity.deepspeed.zero_to_fp32")
    if name in tensor_fragment.__all__:
        return getattr(tensor_fragment, name)
    raise AttributeError(f"module 'infinity.utils' has no attribute {name!r}")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a line on these ranks; on all of them for None or -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """If `force`, log on rank 0 the GPU memory allocated now and at most, and the host memory that is available."""
    if force:
        device = get_accelerator()
        now, most = device.memory_allocated() / GIB, device.max_memory_allocated() / GIB
        left = (available_bytes() or 0) / GIB
        log_dist(f"{message}: GPU {now:.2f} GiB, at most {most:.2f} GiB; host {left:.2f} GiB available", [0])


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python and torch; numpy's, too, if it is imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


class RepeatingLoader(Iterable[_T]):
    """Yields the batches of a loader again and again. A DistributedSampler draws another epoch each time."""

    def __init__(self, loader: Iterable[_T]) -> None:
        self.loader = loader
        self._epoch = 0
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        try:
            return next(self._batches)
        except StopIteration:
            self._epoch += 1
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
            self._batches = iter(self.loader)
            return next(self._batches)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the modules of these classes. Has no other effect: experts without tokens are no problem here."""
    names = {kind if isinstance(kind, str) else kind.__name__ for kind in leaf_module_classes}
    return [module for module in model.modules() if type(module).__name__ in names]
