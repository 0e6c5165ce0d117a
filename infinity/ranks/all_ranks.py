"""Collective error handling: an error on one rank is raised on all, so that no rank waits for it in a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from infinity import errors
from infinity.errors import InfinityError, IoError, StoreError

_T = TypeVar("_T")


def from_all_ranks(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the values passed by all ranks of `group` (None: all ranks), by rank. A collective."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first_rank(value: _T, group: dist.ProcessGroup | None = None) -> _T:
    """Return the value passed by the first rank of `group` (None: all ranks). A collective."""
    values = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def take_from_first_rank(
    tensors: Iterable[torch.Tensor], device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Give each tensor, except on the meta device, its values on the first rank of `group` (None: all ranks). A
    collective of these. One tensor at a time is on `device`, from which it is sent. Memory that already holds these
    values is not written to."""
    for tensor in tensors if dist.get_world_size(group) > 1 else ():
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            continue
        values = tensor.detach().to(device).contiguous()
        sent = values.clone()
        dist.broadcast(sent.flatten().view(torch.uint8), group=group, group_src=0)
        if not torch.equal(sent.flatten().view(torch.uint8), values.flatten().view(torch.uint8)):
            tensor.data = torch.empty_like(tensor).copy_(sent)


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block without collectives on all ranks of `group`; if it fails on one, it fails on all. A collective at its
    end.

    Ranks that did not fail raise an error of the same kind that names the rank and quotes it.
    """
    try:
        yield
    except Exception as error:
        _exchange(error, group)
        raise
    failure = _exchange(None, group)
    if failure is not None:
        raise failure


def first_of_ranks(value: _T | None, group: dist.ProcessGroup | None = None) -> _T | None:
    """Return the value of the first rank of `group` (None: all ranks) that has one. A collective."""
    return next((other for other in from_all_ranks(value, group) if other is not None), None)


def _exchange(error: Exception | None, group: dist.ProcessGroup | None) -> Exception | None:
    """Send this rank's error, and return the first one, as this rank raises it."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    report = None if error is None else (dist.get_rank(), type(error).__name__, str(error))
    failed = first_of_ranks(report, group)
    return None if failed is None else restated(*failed)


def restated(rank: int, kind: str, text: str) -> Exception:
    error_type = getattr(errors, kind, None)
    if not (isinstance(error_type, type) and issubclass(error_type, InfinityError)):
        return InfinityError(f"rank {rank}: {kind}: {text}" if text else f"rank {rank} was ended by {kind}")
    message = f"rank {rank}: {text}"
    if issubclass(error_type, StoreError):
        return error_type(0, message)
    if issubclass(error_type, IoError):
        return IoError(message)
    return error_type(message)
