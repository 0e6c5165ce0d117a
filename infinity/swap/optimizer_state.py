"""Optimizer state of paged parameters: step counts in memory, moments in the arena.

Used by the training thread, and by autograd's threads on its behalf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import ConfigError
from infinity.fsdp2.placements import as_sharded
from infinity.fsdp2.sharding import local_of
from infinity.store.commit import kept_in_words
from infinity.store.layout import MOMENTS as FIELDS
from infinity.swap.gradient_lap import trained_shard
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.paging import Paging
from infinity.swap.shard import PagedShard


class PagedState:
    """Makes, loads and counts an optimizer's `state`. Each call passes `state[parameter]`, because torch replaces
    `state` when it loads.

    Args:
        kind: the optimizer's name, for errors.
        moments: its per-element state, by name.
        counts_steps: True if `state` holds a "step" (fp32, 0-D, on the CPU).

    Raises ConfigError if the arena has no place for the moments.
    """

    def __init__(self, paging: Paging, kind: str, moments: tuple[str, ...], *, counts_steps: bool) -> None:
        self.fields = dict(zip(paging.arena_layout.moments, FIELDS, strict=False))
        """By name of a moment: its field in a sub-group."""
        if not self.fields.keys() >= set(moments):
            raise ConfigError(
                f"{kind} keeps {kept_in_words(moments)} of each element, but the model was paged for "
                f"{kept_in_words(self.fields)}: page it with swap.page(model, PagingOptions(moments={moments!r}))"
            )
        self._paging = paging
        self._moments = moments
        self._counts_steps = counts_steps

    def make(self, parameter: nn.Parameter, state: dict[str, Any], *, zero: bool = True) -> None:
        """Fill an empty state with step 0 and zero moments, as of a parameter that was never stepped. `zero` False:
        keep the arena's moments."""
        if state:
            return
        shard = trained_shard(parameter)
        if self._counts_steps:
            state["step"] = torch.zeros((), dtype=torch.float32)
        was_stepped = shard.stepped
        for name in self._moments_of(shard):
            state[name] = self._paged(parameter, name)
            if zero and was_stepped:
                state[name]._local_tensor.zero_()
        if zero:
            shard.stepped = False

    def _paged(self, parameter: nn.Parameter, name: str) -> DTensor:
        """Return a moment in the arena as a paged tensor."""
        data = parameter.data
        assert isinstance(data, DTensor)
        local = PagedTensor.over(trained_shard(parameter), self.fields[name], self._paging.entered, data.device)
        return as_sharded(local, data)

    def adopted(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Return `state`, or a new dict if moments were set by hand, after moving those into the arena. A new dict,
        because `state_dict()` returns the old one."""
        names = self.replaced(state)
        if not names:
            return state
        replaced = {name: self._paged(parameter, name) for name in names}
        for name, paged in replaced.items():
            paged._local_tensor.copy_(local_of(state[name]))
        return {**state, **replaced, **({"step": state["step"].clone()} if self._counts_steps else {})}

    def replaced(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of moments that are not in the arena, because they were replaced."""
        replaced = []
        for name in self._moments:
            moment = state.get(name)
            if moment is not None and not (
                isinstance(moment, DTensor) and isinstance(moment._local_tensor, PagedTensor)
            ):
                replaced.append(name)
        return replaced

    def load(self, parameter: nn.Parameter, state: dict[str, Any], loaded: Mapping[str, Any]) -> None:
        """Fill an empty `state` from a loaded one. Moments are moved into the arena."""
        names = self._moments_of(trained_shard(parameter))
        moments = {name: loaded[name] for name in names if loaded.get(name) is not None}
        self.make(parameter, state, zero=moments.keys() != {*names})
        for name, moment in moments.items():
            state[name]._local_tensor.copy_(local_of(moment))
        if self._counts_steps:
            state["step"] = torch.as_tensor(loaded["step"], dtype=torch.float32).cpu().clone()

    def begin_step(
        self, parameter: nn.Parameter, shard: PagedShard, state: dict[str, Any]
    ) -> tuple[dict[str, Any], torch.Tensor, bool]:
        """Return the state to step with, made if it is empty and `adopted` otherwise; the step count (0-D, a copy; 0 if
        steps aren't counted); and True if the step is its first one, or the first since the count was set to 0."""
        if not state:
            self.make(parameter, state)
        state = self.adopted(parameter, state)
        if not self._counts_steps:
            return state, torch.zeros(()), not shard.stepped
        steps = state["step"].clone()
        return state, steps, not (shard.stepped and steps)

    def count_step(self, shard: PagedShard, state: dict[str, Any]) -> None:
        if self._counts_steps:
            state["step"] += 1
        shard.stepped = True

    def _moments_of(self, shard: PagedShard) -> list[str]:
        """Return the names of the moments kept for each element of a shard."""
        whole = self._paging.paged.layout.shards[shard.index].whole
        return [name for name in self._paging.arena_layout.moments_of(whole=whole) if name in self._moments]
