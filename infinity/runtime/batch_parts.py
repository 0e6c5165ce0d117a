"""Splits a batch into micro-batches, and makes the model's output for all of them. Training thread only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.errors import ConfigError
from infinity.fsdp2.vertical import MicroBatch
from infinity.ranks.all_ranks import from_all_ranks, raise_on_all_ranks


def split_alike(args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> list[MicroBatch]:
    """As `split`, into the same number of parts on each rank. A collective."""
    with raise_on_all_ranks():
        rows = rows_of(MicroBatch(args, kwargs))
    return split(args, kwargs, min(from_all_ranks(min(parts, rows))))


def split(args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> list[MicroBatch]:
    """Split a batch along dimension 0 into `parts` of about equal size, or fewer if it has fewer rows.

    Tensors with one row, or none, are in every part. Raises ConfigError as `rows_of`.
    """
    whole = MicroBatch(args, kwargs)
    count = rows_of(whole)

    def part(rows: torch.Tensor) -> MicroBatch:
        first, end = int(rows[0]), int(rows[-1]) + 1
        cut = tree_map_only(torch.Tensor, lambda t: t[first:end] if t.ndim and len(t) == count else t, (args, kwargs))
        return MicroBatch(*cut)

    return [whole] if count <= 1 else [*map(part, torch.arange(count).tensor_split(min(parts, count)))]


def rows_of(batch: MicroBatch) -> int:
    """Return the rows (dimension 0) of `input_ids`, or else of the first tensor that has dimensions.

    Raises ConfigError if another tensor has a different number other than one, and for containers that can't be split.
    """
    leaves = tree_leaves(batch[:2])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    first = batch.kwargs.get("input_ids", tensors[0] if tensors else None)
    rows = len(first) if isinstance(first, torch.Tensor) else 1
    if rows <= 1:
        return rows
    cannot = "infinity.micro_batches can't split a"
    if others := {len(tensor) for tensor in tensors} - {1, rows}:
        counts = ", ".join(map(str, sorted({rows, *others})))
        raise ConfigError(f"{cannot} batch whose tensors have {counts} rows: all must have the same number, or one")
    for leaf in leaves:
        if isinstance(leaf, (Mapping, np.ndarray)) or is_dataclass(leaf):
            raise ConfigError(f"{cannot} {type(leaf).__name__}: pass tensors")
    for values in (*batch.args, *batch.kwargs.values()):
        if isinstance(values, (list, tuple)) and len(values) == rows and not isinstance(values[0], torch.Tensor):
            raise ConfigError(f"{cannot} {type(values).__name__} of {rows} values: pass a tensor")
    return rows


def with_loss(output: Any, loss: torch.Tensor) -> Any:
    """Return an output of the model's type with only this loss. Raises TypeError if that type needs more."""
    if isinstance(output, torch.Tensor):
        return loss
    make: Any = type(output)
    try:
        if isinstance(output, Mapping):
            return make(loss=loss)
        if is_dataclass(output) or hasattr(output, "_fields"):
            names = [field.name for field in fields(output)] if is_dataclass(output) else output._fields
            return make(**{**dict.fromkeys(names), "loss": loss})
    except TypeError as error:
        raise TypeError(f"the model returns a {make.__name__}, which can't be made of a loss alone: {error}") from error
    if make in (tuple, list):
        return make([loss])
    raise TypeError(
        f"the model returns a {make.__name__}: with infinity.micro_batches, return the loss or a dict with it"
    )
