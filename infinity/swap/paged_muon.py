"""Muon over paged matrices, and AdamW over the other parameters of a model.

A matrix, or this rank's rows of it, is whole in one sub-group (`PagingOptions.matrices`) and is stepped by
`torch.optim.Muon` itself, so results equal torch's bit for bit. It takes 8 bytes per element: the master and its
momentum. If the model computes on a GPU, so does Muon, whose arithmetic grows with the matrix: master, momentum and
gradient are copied there and back.

[Note: Matrices over several ranks]
If a matrix is sharded, each rank has some of its rows, and torch's Muon runs on DTensors of them; its matrix products
exchange what they need. So results equal those of stock FSDP2 with torch's Muon on as many ranks, bit for bit. They
differ from a single rank's in the last bits, because sums over rows are added up rank by rank.

Such an update is a collective. All ranks run the same updates in the same order, because everything that decides it is
the same on all: the layout (shards are padded), the order in which gradients are reduced, their norm, and the slots of
a commit. A rank never runs one alone: no update is deferred beyond the step (`PagingOptions.updates_are_collective`),
so no gather and no read of a weight starts one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from infinity.aio import Lease
from infinity.errors import ConfigError
from infinity.fsdp2.placements import as_sharded, copy_ranks
from infinity.optim.adam import MOMENTS
from infinity.optim.muon import MATRIX_MOMENTS, MuonSettings, check_matrices, muon_, with_defaults
from infinity.store.layout import Field
from infinity.swap.gradient_lap import trained_shard
from infinity.swap.manager import SwapManager
from infinity.swap.paged_adam import PagedAdam
from infinity.swap.paged_optimizer import SteppedPiece, Stepping
from infinity.swap.sub_group import PagedSubGroup


class PagedMuon(PagedAdam):
    """`torch.optim.Muon` for the parameter groups with `use_muon`, and `torch.optim.AdamW` for the others, of a model
    that `swap.page` was called on.

    Args:
        params: parameter groups, each with `use_muon` and settings as for `torch.optim.Muon` or `torch.optim.AdamW`.
            Groups with Muon hold the parameters that `PagingOptions.matrices` names, and no others.
        swap: the manager that paged the model, with `matrix_moments=("momentum_buffer",)`.
        settings: defaults for the groups, as for `PagedAdam`.

    Raises ConfigError for other parameters, and for those that `PagedAdam` rejects.
    """

    moments = (*MOMENTS, *MATRIX_MOMENTS)

    def __init__(self, params: list[dict[str, Any]], *, swap: SwapManager, **settings: Any) -> None:
        groups = [with_defaults(group) if group.get("use_muon") else {"use_muon": False, **group} for group in params]
        super().__init__(groups, swap=swap, **{"decoupled_weight_decay": True, "weight_decay": 1e-2, **settings})

    def _adopt(self, swap: SwapManager) -> None:
        shards = swap.paging.paged.layout.shards
        for group in self.param_groups:
            if group["use_muon"]:
                check_matrices(group["params"])
            for parameter in group["params"]:
                shard = shards[trained_shard(parameter).index]
                if shard.whole is not group["use_muon"]:
                    said, named = ("with", "not ") if group["use_muon"] else ("without", "")
                    raise ConfigError(
                        f"{shard.name} is in a group {said} use_muon, and was {named}named in PagingOptions.matrices: page the "
                        "model with the names of the parameters that Muon updates, and no others"
                    )
        super()._adopt(swap)

    def _settings(self, group: dict[str, Any]) -> Any:
        return MuonSettings.of(group) if group["use_muon"] else super()._settings(group)

    def _takes_staged(self, sub: PagedSubGroup, batches: Mapping[Any, list[SteppedPiece]]) -> bool:
        return not sub.layout.whole and super()._takes_staged(sub, batches)

    def _step_pieces(self, sub: PagedSubGroup, batches: Mapping[Any, list[SteppedPiece]], lease: Lease | None) -> None:
        if not sub.layout.whole:
            super()._step_pieces(sub, batches, lease)
            return
        momentum = sub.view(self._paged_state.fields[MATRIX_MOMENTS[0]], lease)
        for settings, batch in batches.items():
            for piece in batch:
                buffer = momentum[piece.place]
                if piece.stepping.first:
                    buffer.zero_()
                with sub.part_of_master(piece.place.start, piece.place.stop, lease) as master:
                    device = self._paging.device.torch_device
                    _step_matrix(settings, piece.stepping, device, master, piece.scaled(), buffer)
        if not sub.layout.split:
            sub.set_master(sub.view(Field.MASTER, lease), lease)


def _step_matrix(
    settings: MuonSettings,
    stepping: Stepping,
    device: torch.device,
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor,
) -> None:
    """Step a matrix on `device`, given this rank's rows (1-D, on the CPU). A collective of the matrix's ranks."""
    here = [field.view(stepping.shard.shape) for field in (master, grad, momentum)]
    there = [field.to(device) for field in here]
    fields = [as_sharded(rows, stepping.spec) for rows in there] if copy_ranks(stepping.spec) > 1 else there
    muon_(settings, master=fields[0], grad=fields[1], momentum_buffer=fields[2])
    for rows, changed in ((here[0], there[0]), (here[2], there[2])):
        if rows is not changed:
            rows.copy_(changed)
