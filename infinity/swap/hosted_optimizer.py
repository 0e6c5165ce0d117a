"""Paged versions of other torch optimizers, such as SGD: torch's own code steps each piece while it is in memory.

A sub-group is stepped in parts that fit the CPU caches, because torch's loop passes over its data several times. So a
split master is never joined as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infinity.aio import Lease
from infinity.optim.hosted import Settings, Stepper
from infinity.store.layout import SHARD_ALIGN, Field
from infinity.swap.manager import SwapManager
from infinity.swap.paged_optimizer import PagedOptimizer, SteppedPiece
from infinity.swap.sub_group import PagedSubGroup

_PART_NUMEL = 1 << 19
assert _PART_NUMEL % SHARD_ALIGN == 0


class HostedOptimizer(PagedOptimizer):
    """A torch optimizer for a model that `swap.page` was called on; equals torch's on the CPU, bit for bit.

    Args:
        params: parameters or parameter groups, as in torch; all of them paged by `swap`.
        swap: the manager that paged the model, with the `moments` of `Stepper(like)`.
        like: an optimizer of that kind with those arguments, over any parameters; or a `Stepper` made from one.

    Raises ConfigError for parameters that `swap` did not page or that were frozen then, and for an optimizer that can't
    be stepped in pieces: see infinity/optim/hosted.py.
    """

    def __init__(self, params: Any, *, swap: SwapManager, like: torch.optim.Optimizer | Stepper) -> None:
        self._stepper = like if isinstance(like, Stepper) else Stepper(like)
        self.moments, self.counts_steps = self._stepper.moments, self._stepper.counts_steps
        super().__init__(params, self._stepper.defaults)
        self._adopt(swap)

    @property
    def kind(self) -> str:
        """The name of the torch optimizer."""
        return self._stepper.kind

    def _settings(self, group: dict[str, Any]) -> Settings:
        settings = Settings.of(group)
        self._stepper.check(settings)
        return settings

    def _step_pieces(
        self, sub: PagedSubGroup, batches: Mapping[Settings, list[SteppedPiece]], lease: Lease | None
    ) -> None:
        for settings, batch in batches.items():
            for first in (True, False):
                alike = [piece for piece in batch if piece.stepping.first is first]
                for piece, start, end in _parts(alike):
                    self._step_part(sub, settings, piece, start, end, lease)
        if not sub.layout.split:
            sub.set_master(sub.view(Field.MASTER, lease), lease)

    def _step_part(
        self, sub: PagedSubGroup, settings: Settings, piece: SteppedPiece, start: int, end: int, lease: Lease | None
    ) -> None:
        """Step elements [start, end) of a piece, in place or, for a split master, joined and split again."""
        low, high = piece.offset + start, piece.offset + end
        with sub.part_of_master(low, high, lease) as master:
            self._stepper.step(
                settings,
                masters=[master],
                grads=[piece.scaled(start, end)],
                moments=[{name: sub.view(self._paged_state.fields[name], lease)[low:high] for name in self.moments}],
                steps=[piece.stepping.steps],
                first=piece.stepping.first,
            )


class PagedSGD(HostedOptimizer):
    """`torch.optim.SGD` for a model that was paged with `moments=("momentum_buffer",)`, or `()` without momentum.
    `settings` are torch's. See `HostedOptimizer`."""

    def __init__(self, params: Any, *, swap: SwapManager, lr: float = 1e-3, **settings: Any) -> None:
        given = [*params]
        groups = [stand_in(group) for group in given if isinstance(group, dict)] or [stand_in({})]
        super().__init__(given, swap=swap, like=torch.optim.SGD(groups, lr=lr, **settings))


def stand_in(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group with the same settings over a dummy parameter."""
    return {**group, "params": [nn.Parameter(torch.zeros(1))]}


def _parts(batch: list[SteppedPiece]) -> Iterator[tuple[SteppedPiece, int, int]]:
    """Yield pieces in parts [start, end) that end where a vector of the kernels ends: see SHARD_ALIGN."""
    for piece in batch:
        for start in range(0, piece.numel, _PART_NUMEL):
            yield piece, start, min(start + _PART_NUMEL, piece.numel)
