"""Adam and AdamW on lists of tensors, by torch's own kernels.

Calls the functions that `torch.optim.AdamW` and `torch.optim.Adam` call, with the same bits for the same `fused`. A
tensor can be cut anywhere except inside a vector of the kernel (see SHARD_ALIGN in infinity/store/layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adam import adam

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Moments of each element, by torch's names."""


@dataclass(frozen=True)
class AdamSettings:
    """The hyper-parameters of one parameter group, named as in `torch.optim.AdamW`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    maximize: bool
    fused: bool | None


def adam_(
    settings: AdamSettings,
    *,
    masters: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
) -> None:
    """Take one Adam step in place (Kingma & Ba 2015, alg. 1; decoupled decay: Loshchilov & Hutter 2019, alg. 2).

    All lists have one length, and entries i one shape. All tensors are fp32; the scalars in `steps` are increased by
    one.
    """
    adam(
        masters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=False,
        fused=bool(settings.fused),
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=settings.maximize,
        decoupled_weight_decay=settings.decoupled_weight_decay,
    )
