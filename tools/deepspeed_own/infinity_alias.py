"""A pytest plugin under which DeepSpeed's own tests find infinity as `deepspeed`, also in the processes that they start.

Names of DeepSpeed that infinity doesn't have are stand-ins that raise `InsideError` on any use, so that a file of tests is
collected although one of them needs such a name. Of parametrised tests the first INFINITY_PARAMETERS_MAX are run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import _pytest.raises
import torch

import infinity
from infinity.accelerator import get_accelerator
from infinity.deepspeed import MODULE_OF, PACKAGES

CONSTANTS: dict[str, object] = {
    "ADAM_OPTIMIZER": "adam",
    "LR_RANGE_TEST": "LRRangeTest",
    "MUON_OPTIMIZER": "muon",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_LINEAR_RATE": "linear",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LR": "WarmupLR",
    "MIN_SWAPPABLE_BYTES": 1 << 20,
}
"""Names of keys and values in the config. All others are their names in small letters."""


class InsideError(Exception):
    """A test uses what only DeepSpeed has."""


class _Inside(type):
    """Of a stand-in for a name of DeepSpeed."""

    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        raise InsideError(f"{cls.__name__} is inside of DeepSpeed")

    __call__ = __instancecheck__ = __getattr__ = __iter__ = __enter__ = _refuse


class _Builders(type):
    """Of a name of a compiled op."""

    def __call__(cls) -> Any:
        return cls

    def is_compatible(cls, *_: Any) -> bool:
        return True


def _named(module: str) -> Callable[[str], Any]:
    def attribute(name: str) -> Any:
        if name in ON_THE_SIDE:
            return ON_THE_SIDE[name]
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():
            return CONSTANTS.get(name, name.lower())
        if name.endswith("Builder"):
            return _Builders(name, (), {"NAME": name})
        if name in infinity.__all__ or name == "DeepSpeedEngine":
            return getattr(infinity, name)
        return _Inside(f"{module}.{name}", (), {})

    return attribute


ON_THE_SIDE: dict[str, Any] = {
    "compatible_ops": defaultdict(lambda: True),
    "__compatible_ops__": defaultdict(lambda: True),
    "is_compile_supported": lambda: True,
    "register_grad_hook": lambda parameter, hook: parameter.register_post_accumulate_grad_hook(hook),
    "required_torch_version": lambda *_, **__: True,
    "see_memory_usage": lambda *_, **__: None,
}
"""Names that tests call besides those they test."""


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `deepspeed.x` as `infinity.x` where that has DeepSpeed's names, else as a module of stand-ins."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            if fullname.startswith("deepspeed.")
            else None
        )

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        ours = name.replace("deepspeed", "infinity", 1)
        if ours in MODULE_OF or ours in PACKAGES:
            found = importlib.import_module(ours)
            for attribute, value in vars(found).items():
                if not attribute.startswith("__") or attribute == "__all__":
                    module.__dict__[attribute] = value
            before = vars(found).get("__getattr__")
        else:
            before = None
        module.__dict__["__getattr__"] = _first_of(before, _named(name))


def _first_of(before: Callable[[str], Any] | None, after: Callable[[str], Any]) -> Callable[[str], Any]:
    def attribute(name: str) -> Any:
        if before is not None:
            try:
                return before(name)
            except AttributeError:
                pass
        return after(name)

    return attribute


def _fail(reason: str, **_: Any) -> NoReturn:
    """As pytest's, by an exception that a pool of processes brings back: another one ends the process, and the test hangs."""
    raise AssertionError(reason)


_pytest.raises.fail = _fail  # type: ignore[assignment]
sys.meta_path.insert(0, _Alias())
sys.modules["deepspeed"] = infinity
infinity.ops.__dict__["__compatible_ops__"] = ON_THE_SIDE["__compatible_ops__"]  # type: ignore[index]
if not torch.cuda.is_available():
    get_accelerator().__dict__.update(device_count=lambda: 2, is_available=lambda: True)
multiprocessing.set_forkserver_preload([__name__])  # whose processes import nothing of this one's


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out further parameters of the same test."""
    most, seen = int(os.environ.get("INFINITY_PARAMETERS_MAX", "2")), Counter[str]()
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if seen[name] <= most:
            kept.append(item)
    items[:] = kept
