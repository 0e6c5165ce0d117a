"""DeepSpeed's `utils`: the log, a loader without end, and whole values of sharded parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from infinity.deepspeed import tensor_fragment

__all__ = ["RepeatingLoader", "log_dist", "logger", "set_z3_leaf_modules", *tensor_fragment.__all__]

__path__: list[str] = []  # modules are found below it

_T = TypeVar("_T")

logger = logging.getLogger("infinity")


def __getattr__(name: str) -> Any:
    if name == "zero_to_fp32":
        return import_module("infinity.deepspeed.zero_to_fp32")
    if name in tensor_fragment.__all__:
        return getattr(tensor_fragment, name)
    raise AttributeError(f"module 'infinity.utils' has no attribute {name!r}")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a line on these ranks; on all where None or -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader(Iterable[_T]):
    """Gives what a loader gives, again and again. An epoch that a DistributedSampler draws is another one each time."""

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
    """Accepted, without effect: experts that no token comes to need no help here. Returns the modules of these classes."""
    names = {kind if isinstance(kind, str) else kind.__name__ for kind in leaf_module_classes}
    return [module for module in model.modules() if type(module).__name__ in names]
