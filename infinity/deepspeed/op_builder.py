"""DeepSpeed's `ops.op_builder`: the builder of its I/O handle, which is infinity's and needs no compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from infinity.deepspeed.aio_handle import AioHandle
from infinity.deepspeed.refused import refusal_of

__all__ = ["AsyncIOBuilder"]


class AsyncIOBuilder:
    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> SimpleNamespace:
        """Return what has the class `aio_handle`."""
        return SimpleNamespace(aio_handle=AioHandle)


def __getattr__(name: str) -> Any:
    raise refusal_of(f"infinity.ops.op_builder.{name}") or AttributeError(f"infinity has no op_builder.{name}")
