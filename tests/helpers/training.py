"""A small training with everything that goes wrong easily, held in memory or on NVMe: the two must agree bit for bit.

Used by the tests, in their process and as a script of several ranks.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from staying import share_of, staying
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.optim.coded_moments import decode, encode
from infinity.optim.small_moments import key_of, round_moments

VOCABULARY = 53  # uneven over 2 and 3 ranks
HIDDEN = 64
BLOCK_NUMEL = 8 * HIDDEN * HIDDEN + 14 * HIDDEN + 7
STEPS = 10


@dataclass(frozen=True)
class Case:
    """One training. Both sides of a comparison run it, one of them on NVMe."""

    accumulation: int = 1
    clipping: float = 0.0
    checkpointing: bool = False
    bf16: bool = True
    fused: bool = True
    frozen: bool = False
    evaluate: bool = False
    optimizer: str = "AdamW"
    reduce_dtype: str = "fp32"
    loss_scale: float | None = None  # fp16; 0 adapts
    whole_steps: bool = False  # by train_batch, where it is on NVMe
    split: bool = False  # by forwards of the batch of a step, which the engine splits where it is on NVMe
    moments: str = "fp32"
    # What only the NVMe side has.
    backend: str = "auto"
    pinned_bytes_max: int | str = "16MiB"
    sub_group_size: int | str = "auto"
    persistence_threshold: int = 1000
    max_in_cpu: int = 0
    parameters_on: str = "nvme"
    state_on: str = "nvme"
    live: int | str = "auto"
    reuse: int | str = "auto"
    prefetch: int | str = "auto"
    update: str = "auto"
    schedule: str = "auto"
    at_once: int | str = "auto"
    master: str = "split"
    cached: float = 0.0  # this part of the state stays in host memory
    gradients_in_memory: int | str = "auto"  # bytes
    stays: float | None = None  # this part of the compute parameters stays staged; None: some part
    sleeps: int = 0  # at this level, after every other step


CASES = {
    "plain": Case(),
    "accumulation and clipping": Case(accumulation=2, clipping=0.5),
    "activation checkpointing": Case(checkpointing=True, accumulation=2),
    "frozen parameters": Case(frozen=True, clipping=1.0),
    "evaluation between steps": Case(evaluate=True),
    "sub-groups that cut parameters": Case(sub_group_size=4096, clipping=1.0),
    "nothing resident": Case(persistence_threshold=0),
    "everything resident": Case(persistence_threshold=10**9),
    "some of it resident": Case(max_in_cpu=40_000),
    "fp32": Case(bf16=False, sub_group_size=4096),
    "fp16": Case(bf16=False, loss_scale=0, clipping=0.5),
    "fp16, fixed loss scale": Case(bf16=False, loss_scale=100, accumulation=2, sub_group_size=4096),
    "the plain kernel": Case(fused=False),
    "Adam": Case(optimizer="Adam"),
    "SGD": Case(optimizer="SGD"),
    "SGD, accumulation and clipping": Case(optimizer="SGD", accumulation=2, clipping=0.5, sub_group_size=4096),
    "SGD, updated in the step": Case(optimizer="SGD", update="step", evaluate=True, persistence_threshold=0),
    "SGD, masters in full": Case(optimizer="SGD", master="full", update="forward", frozen=True, sub_group_size=4096),
    "SGD, fp16": Case(optimizer="SGD", bf16=False, loss_scale=0, clipping=0.5),
    "SGD with dampening": Case(optimizer="SGD with dampening", max_in_cpu=40_000),
    "SGD without momentum": Case(optimizer="SGD without momentum"),
    "SGD without momentum, updated in forward": Case(
        optimizer="SGD without momentum", update="forward", persistence_threshold=0, sub_group_size=4096, clipping=0.5
    ),
    "SGD without momentum, fp32, half cached": Case(
        optimizer="SGD without momentum", bf16=False, cached=0.5, persistence_threshold=0
    ),
    "Muon": Case(optimizer="Muon"),
    "Muon, accumulation and clipping": Case(optimizer="Muon", accumulation=2, clipping=0.5, sub_group_size=4096),
    "Muon, nothing resident, half cached": Case(optimizer="Muon", persistence_threshold=0, cached=0.5),
    "Muon, everything resident": Case(optimizer="Muon", persistence_threshold=10**9, frozen=True),
    "Muon, masters in full": Case(optimizer="Muon", master="full", update="forward", frozen=True, evaluate=True),
    "Muon, fp32": Case(optimizer="Muon", bf16=False, update="step", max_in_cpu=40_000),
    "Muon, fp16": Case(optimizer="Muon", bf16=False, loss_scale=0, clipping=0.5),
    "Muon, speculative": Case(optimizer="Muon", update="backward", clipping=1e3, persistence_threshold=0),
    "Muon, speculative, clipped": Case(optimizer="Muon", update="backward", clipping=0.5, persistence_threshold=0),
    "Muon, gradients on NVMe": Case(optimizer="Muon", clipping=1.0, gradients_in_memory=0, persistence_threshold=0),
    "Muon, only parameters on NVMe": Case(optimizer="Muon", state_on="none", sub_group_size=8192),
    "Muon, only the optimizer on NVMe": Case(optimizer="Muon", parameters_on="none", sub_group_size=8192),
    "bf16 moments": Case(moments="bf16"),
    "bf16 moments, accumulation and clipping": Case(moments="bf16", accumulation=2, clipping=0.5, sub_group_size=4096),
    "bf16 moments, the plain kernel": Case(moments="bf16", fused=False, sub_group_size=4096, persistence_threshold=0),
    "bf16 moments, Adam, masters in full": Case(
        moments="bf16", optimizer="Adam", master="full", update="step", evaluate=True, persistence_threshold=0
    ),
    "bf16 moments, fp32": Case(moments="bf16", bf16=False, update="forward", sub_group_size=4096, frozen=True),
    "bf16 moments, fp16": Case(moments="bf16", bf16=False, loss_scale=0, clipping=0.5),
    "bf16 moments, updated in backward": Case(moments="bf16", update="backward", persistence_threshold=0),
    "bf16 moments, speculative": Case(moments="bf16", update="backward", clipping=1e3, sub_group_size=4096),
    "bf16 moments, speculative, clipped": Case(moments="bf16", update="backward", clipping=0.5, evaluate=True),
    "bf16 moments, half cached": Case(moments="bf16", cached=0.5, persistence_threshold=0),
    "bf16 moments, only parameters on NVMe": Case(moments="bf16", state_on="none", sub_group_size=8192),
    "bf16 moments, only the optimizer on NVMe": Case(moments="bf16", parameters_on="none", sub_group_size=8192),
    "bf16 moments, gradients on NVMe": Case(moments="bf16", gradients_in_memory=0, clipping=1.0, sub_group_size=4096),
    "8-bit moments": Case(moments="8bit"),
    "8-bit moments, accumulation and clipping": Case(moments="8bit", accumulation=2, clipping=0.5, sub_group_size=4096),
    "8-bit moments, the plain kernel": Case(moments="8bit", fused=False, sub_group_size=4096, persistence_threshold=0),
    "8-bit moments, Adam, masters in full": Case(
        moments="8bit", optimizer="Adam", master="full", update="step", evaluate=True, persistence_threshold=0
    ),
    "8-bit moments, fp32": Case(moments="8bit", bf16=False, update="forward", sub_group_size=4096, frozen=True),
    "8-bit moments, fp16": Case(moments="8bit", bf16=False, loss_scale=0, clipping=0.5),
    "8-bit moments, updated in backward": Case(moments="8bit", update="backward", persistence_threshold=0),
    "8-bit moments, speculative": Case(moments="8bit", update="backward", clipping=1e3, sub_group_size=4096),
    "8-bit moments, speculative, clipped": Case(moments="8bit", update="backward", clipping=0.5, evaluate=True),
    "8-bit moments, half cached": Case(moments="8bit", cached=0.5, persistence_threshold=0),
    "8-bit moments, only parameters on NVMe": Case(moments="8bit", state_on="none", sub_group_size=8192),
    "8-bit moments, only the optimizer on NVMe": Case(moments="8bit", parameters_on="none", sub_group_size=8192),
    "8-bit moments, gradients on NVMe": Case(moments="8bit", gradients_in_memory=0, clipping=1.0, sub_group_size=4096),
    "bf16 reduction": Case(reduce_dtype="bf16"),
    "only parameters on NVMe": Case(state_on="none", sub_group_size=8192, clipping=1.0),
    "only parameters on NVMe, fp32": Case(state_on="none", bf16=False),
    "only the optimizer on NVMe": Case(parameters_on="none", sub_group_size=8192),
    **{
        f"host memory, {name}": dataclasses.replace(case, parameters_on="cpu", state_on="cpu", pinned_bytes_max="auto")
        for name, case in {
            "plain": Case(evaluate=True),
            "accumulation and clipping": Case(accumulation=2, clipping=0.5, checkpointing=True),
            "updated in the step": Case(update="step", persistence_threshold=0, sub_group_size=4096),
            "updated in forward": Case(update="forward", clipping=1e3, frozen=True, evaluate=True),
            "updated in backward": Case(update="backward", persistence_threshold=0, sub_group_size=4096),
            "masters in full": Case(master="full", clipping=0.5),
            "fp32": Case(bf16=False, sub_group_size=4096),
            "fp16": Case(bf16=False, loss_scale=0, clipping=0.5),
            "SGD": Case(optimizer="SGD", clipping=0.5),
            "Muon": Case(optimizer="Muon", accumulation=2, clipping=0.5),
            "8-bit moments": Case(moments="8bit", clipping=0.5),
            "frozen, some resident": Case(frozen=True, update="backward", max_in_cpu=40_000),
            "vertical": Case(schedule="vertical", accumulation=4, whole_steps=True, clipping=0.5),
        }.items()
    },
    **{
        f"only the optimizer in host memory, {name}": dataclasses.replace(case, parameters_on="none", state_on="cpu")
        for name, case in {
            "clipping": Case(clipping=0.5, accumulation=2, evaluate=True, pinned_bytes_max="auto"),
            "updated in the step": Case(update="step", frozen=True, pinned_bytes_max="auto", persistence_threshold=0),
            "updated in backward": Case(update="backward", pinned_bytes_max="auto", sub_group_size=4096),
        }.items()
    },
    "parameters in host memory, the optimizer on NVMe": Case(parameters_on="cpu", clipping=1e3),
    "parameters on NVMe, the optimizer in host memory": Case(state_on="cpu", clipping=1e3),
    **{
        f"asleep between steps, {name}": case
        for name, case in {
            "the device's memory": Case(sleeps=1, clipping=1e3, evaluate=True),
            "speculative": Case(sleeps=2, clipping=1e3, evaluate=True, persistence_threshold=0),
            "clipped, accumulated": Case(sleeps=2, clipping=0.5, accumulation=2, sub_group_size=4096),
            "updated in backward": Case(sleeps=2, update="backward", stays=1.0, persistence_threshold=0),
            "updated in forward": Case(sleeps=2, update="forward", frozen=True, stays=0.5, max_in_cpu=40_000),
            "updated in the step, half cached": Case(sleeps=2, update="step", cached=0.5, persistence_threshold=0),
            "Muon, gradients on NVMe": Case(sleeps=2, optimizer="Muon", clipping=1.0, gradients_in_memory=0),
            "host memory": Case(sleeps=2, parameters_on="cpu", state_on="cpu", pinned_bytes_max="auto", clipping=0.5),
            "vertical": Case(sleeps=2, schedule="vertical", accumulation=2, whole_steps=True, persistence_threshold=0),
        }.items()
    },
    "the smallest pool": Case(pinned_bytes_max="8MiB"),
    "updated in forward": Case(update="forward", evaluate=True),
    "updated in forward, accumulation and clipping": Case(
        update="forward", accumulation=2, clipping=0.5, evaluate=True
    ),
    "updated in forward, fp16": Case(update="forward", bf16=False, loss_scale=0, clipping=0.5),
    "updated in forward, small sub-groups": Case(update="forward", sub_group_size=4096, persistence_threshold=0),
    "updated in backward": Case(update="backward", evaluate=True, checkpointing=True),
    "updated in backward, small sub-groups": Case(update="backward", sub_group_size=4096, persistence_threshold=0),
    "updated in backward, masters in full": Case(update="backward", master="full", persistence_threshold=0),
    "updated in backward, kept gathered": Case(update="backward", reuse=2 * BLOCK_NUMEL, persistence_threshold=0),
    "speculative": Case(update="backward", clipping=1e3, evaluate=True, checkpointing=True),
    "speculative, clipped": Case(update="backward", clipping=0.5, sub_group_size=4096, persistence_threshold=0),
    **{
        f"{share:.0%} stays, {name}": dataclasses.replace(case, stays=share, persistence_threshold=0, evaluate=True)
        for share in (0.5, 1.0)
        for name, case in {
            "updated in backward": Case(update="backward", checkpointing=True),
            "updated in backward, masters in full": Case(update="backward", master="full", sub_group_size=4096),
            "updated in forward": Case(update="forward", sub_group_size=4096),
            "updated in the step": Case(update="step", frozen=True),
            "speculative, clipped": Case(update="backward", clipping=0.5, sub_group_size=4096),
            "speculative, accumulated, half cached": Case(update="backward", accumulation=2, clipping=1e3, cached=0.5),
        }.items()
    },
    "speculative, accumulated": Case(
        update="backward", accumulation=2, clipping=1e3, persistence_threshold=0, frozen=True
    ),
    "speculative, accumulated without clipping": Case(update="backward", accumulation=2, sub_group_size=4096),
    "speculative, fp16": Case(update="backward", bf16=False, loss_scale=0, clipping=1e3, persistence_threshold=0),
    "speculative, SGD, masters in full": Case(
        update="backward", optimizer="SGD", master="full", clipping=1e3, persistence_threshold=0
    ),
    "speculative, half cached": Case(update="backward", clipping=1e3, cached=0.5, persistence_threshold=0),
    "updated in the step": Case(update="step", accumulation=2, clipping=0.5, evaluate=True),
    "updated in the step, small sub-groups": Case(update="step", sub_group_size=4096, persistence_threshold=0),
    "masters in full": Case(master="full", clipping=0.5, evaluate=True),
    "masters in full, updated in the step": Case(master="full", update="step", persistence_threshold=0),
    "few live parameters": Case(live=2 * BLOCK_NUMEL, prefetch=0, accumulation=2, clipping=1.0, evaluate=True),
    "groups that stay gathered": Case(reuse=10**9, accumulation=2, evaluate=True, persistence_threshold=0),
    "some that stay, some ahead": Case(
        live=4 * BLOCK_NUMEL,
        reuse=2 * BLOCK_NUMEL,
        prefetch=BLOCK_NUMEL,
        checkpointing=True,
        evaluate=True,
        accumulation=2,
    ),
    "finer groups": Case(live=BLOCK_NUMEL, reuse=10**9, prefetch=10**9, evaluate=True, clipping=1.0),
    "a tenth cached": Case(cached=0.1, persistence_threshold=0, sub_group_size=8192),
    "a quarter cached": Case(cached=0.25, accumulation=2, clipping=0.5),
    "half cached": Case(cached=0.5, persistence_threshold=0, sub_group_size=4096, evaluate=True),
    "nine tenths cached": Case(cached=0.9, persistence_threshold=0, checkpointing=True),
    "everything cached": Case(cached=1.1, clipping=1.0),
    "a quarter cached, frozen parameters": Case(cached=0.25, frozen=True, persistence_threshold=0),
    "a quarter cached, fp32": Case(cached=0.25, bf16=False, sub_group_size=4096, persistence_threshold=0),
    "a tenth cached, only parameters on NVMe": Case(cached=0.1, state_on="none", persistence_threshold=0),
    "half cached, only the optimizer on NVMe": Case(cached=0.5, parameters_on="none", sub_group_size=8192),
    "gradients on NVMe": Case(gradients_in_memory=0, clipping=0.5, persistence_threshold=0),
    "some gradients on NVMe, accumulated": Case(
        gradients_in_memory=300_000, accumulation=3, clipping=0.5, sub_group_size=4096, evaluate=True
    ),
    "gradients on NVMe, updated in the step": Case(gradients_in_memory=0, update="step", sub_group_size=4096),
    "gradients on NVMe, bf16 reduction": Case(gradients_in_memory=0, update="forward", reduce_dtype="bf16"),
    "gradients on NVMe, fp32": Case(gradients_in_memory=0, bf16=False, update="forward", sub_group_size=4096),
    "gradients on NVMe, fp16": Case(gradients_in_memory=0, bf16=False, loss_scale=0, clipping=0.5),
    "gradients on NVMe, frozen parameters": Case(gradients_in_memory=100_000, frozen=True, clipping=1.0),
    "gradients and parameters on NVMe": Case(gradients_in_memory=0, state_on="none", clipping=1.0, sub_group_size=8192),
    "gradients and the optimizer on NVMe": Case(gradients_in_memory=0, parameters_on="none", sub_group_size=8192),
    "gradients on NVMe, everything else cached": Case(
        gradients_in_memory=0, cached=1.1, clipping=1.0, persistence_threshold=0
    ),
    **{
        f"train_batch, {name}": dataclasses.replace(case, whole_steps=True)
        for name, case in {
            "vertical": Case(schedule="vertical", accumulation=4, persistence_threshold=0),
            "vertical, one micro-batch": Case(schedule="vertical"),
            "vertical, 8 micro-batches": Case(schedule="vertical", accumulation=8, sub_group_size=4096, evaluate=True),
            "vertical, clipped": Case(schedule="vertical", accumulation=2, clipping=0.5, persistence_threshold=0),
            "vertical, speculative": Case(accumulation=4, clipping=1e3, sub_group_size=4096, evaluate=True),
            "vertical, forward": Case(schedule="vertical", accumulation=2, update="forward", evaluate=True),
            "vertical, step": Case(schedule="vertical", accumulation=2, update="step", persistence_threshold=0),
            "vertical, activation checkpointing": Case(schedule="vertical", accumulation=2, checkpointing=True),
            "vertical, frozen parameters": Case(schedule="vertical", accumulation=2, clipping=1e3, frozen=True),
            "vertical, fp32": Case(schedule="vertical", accumulation=4, bf16=False, sub_group_size=4096),
            "vertical, fp16": Case(schedule="vertical", accumulation=2, bf16=False, loss_scale=0, clipping=0.5),
            "vertical, bf16 reduction": Case(schedule="vertical", accumulation=2, reduce_dtype="bf16"),
            "vertical, SGD, masters in full": Case(schedule="vertical", accumulation=2, optimizer="SGD", master="full"),
            "vertical, half cached": Case(schedule="vertical", accumulation=2, cached=0.5, persistence_threshold=0),
            "vertical, gradients on NVMe": Case(
                schedule="vertical", accumulation=2, gradients_in_memory=0, clipping=0.5, sub_group_size=4096
            ),
            "vertical, few live parameters": Case(
                schedule="vertical", live=2 * BLOCK_NUMEL, prefetch=0, accumulation=2, evaluate=True
            ),
            "vertical, some that stay, some ahead": Case(
                live=4 * BLOCK_NUMEL,
                reuse=2 * BLOCK_NUMEL,
                prefetch=BLOCK_NUMEL,
                checkpointing=True,
                evaluate=True,
                accumulation=4,
            ),
            "vertical, only the optimizer on NVMe": Case(schedule="vertical", accumulation=2, parameters_on="none"),
            "two at once": Case(at_once=2, accumulation=4, clipping=1e3, evaluate=True, persistence_threshold=0),
            "two at once, gradients on NVMe": Case(
                at_once=2, accumulation=4, gradients_in_memory=0, clipping=0.5, sub_group_size=4096
            ),
            "split": Case(split=True, accumulation=4, evaluate=True, persistence_threshold=0),
            "split, fp16": Case(split=True, accumulation=2, bf16=False, loss_scale=100, clipping=0.5),
            "split, checkpointing, some frozen": Case(split=True, accumulation=3, checkpointing=True, frozen=True),
            "horizontal": Case(schedule="horizontal", accumulation=2, evaluate=True),
        }.items()
    },
}

VERTICAL = {
    f"{way}, {micro_batches} micro-batches, {timing}": Case(
        schedule="vertical",
        whole_steps=True,
        split=way == "split",
        at_once=2 if way == "two at once" else "auto",
        accumulation=micro_batches,
        evaluate=True,
        persistence_threshold=0,
        **how,
    )
    for way, numbers in {"vertical": (1, 2, 4, 8, 16), "two at once": (4, 16), "split": (2, 16)}.items()
    for micro_batches in numbers
    for timing, how in {
        "updated in the step": {"update": "step"},
        "updated in forward": {"update": "forward"},
        "updated in backward": {"update": "backward"},
        "speculative": {"update": "backward", "clipping": 1e3},
        "speculative, clipped": {"update": "backward", "clipping": 0.5},
    }.items()
}
"""Every update timing with every number of micro-batches."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"weight_decay": 0.1}},
    "Adam": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}},
    "SGD": {"type": "SGD", "params": {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}},
    "SGD with dampening": {"type": "SGD", "params": {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3}},
    "SGD without momentum": {"type": "SGD", "params": {"weight_decay": 0.1}},
    "Muon": {"type": "Muon", "params": {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}},
}

SHARDED = {name: case for name, case in CASES.items() if (case.optimizer, case.update) != ("Muon", "forward")}
"""Those that run on several ranks, which update matrices together."""

ON_SEVERAL_RANKS = (
    "accumulation and clipping",
    "updated in backward, small sub-groups",
    "8-bit moments, accumulation and clipping",
    "Muon, speculative, clipped",
    "train_batch, vertical, speculative",
    "asleep between steps, speculative",
)
"""Cases that several ranks make different: shards cut unevenly, reductions, agreements. The others take minutes there."""


class Block(nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.odd = nn.Linear(HIDDEN, 7)  # 7 rows: uneven, or empty on the last of many ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing and self.training:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) + self.odd(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(case.checkpointing) for _ in range(4))
        self.unused = nn.Linear(33, 5)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        if case.frozen:
            self.blocks[1].up.weight.requires_grad_(False)
            self.blocks[2].norm.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, own_loss: bool = False) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return loss_fn(logits, x) if own_loss else logits


Outcome = tuple[list[float], dict[str, torch.Tensor]]


def batch(step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randint(0, VOCABULARY, (4, 12), generator=generator)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return loss_fn(model(x), x)


def loss_fn(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())


def train_step(engine: infinity.Engine, case: Case, step: int, *, in_memory: bool) -> list[float]:
    """A step, and its losses: of each micro-batch, or their mean over all ranks."""
    batches = [batch(step, micro) for micro in range(case.accumulation)]
    if case.split and not in_memory:
        loss = engine(torch.cat(batches), own_loss=True)
        engine.backward(loss)
        engine.step()
        return [loss.dim()]
    if case.whole_steps and not in_memory:
        return [engine.train_batch(iter([(x, x) for x in batches]), loss_fn=loss_fn).item()]
    losses = []
    for x in batches:
        loss = loss_of(engine, x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    if case.split:
        return [0]  # theirs is a sum of terms that were divided
    if not case.whole_steps:
        return [loss.item() for loss in losses]
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return [(mean / dist.get_world_size()).item()]


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: whole(p.data).clone() for name, p in model.named_parameters()}


def whole(data: Any) -> torch.Tensor:
    full = data.full_tensor()
    return full.clone() + 0  # on one rank that is the paged tensor itself


def with_engine(case: Case, nvme_path: str | None) -> Outcome:
    """Through `infinity.initialize`; in memory where `nvme_path` is None."""

    def offload(device: str) -> dict[str, Any]:
        if nvme_path is None:
            return {"device": "none"}
        return {"device": device, "nvme_path": nvme_path} if device == "nvme" else {"device": device}

    bounds = {
        "stage3_max_live_parameters": case.live,
        "stage3_max_reuse_distance": case.reuse,
        "stage3_prefetch_bucket_size": case.prefetch,
    }
    torch.manual_seed(0)
    model = Model(case)
    state_bytes = 14 * sum(p.numel() for p in model.parameters()) // dist.get_world_size()
    lr = (
        1e-2 if case.clipping or not case.optimizer.startswith("SGD") else 1e-5
    )  # not too much for gradients this large
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1 if case.split and nvme_path else case.accumulation,
        "gradient_clipping": case.clipping,
        "bf16": {"enabled": case.bf16},
        "fp16": {"enabled": case.loss_scale is not None, "loss_scale": case.loss_scale or 0, "initial_scale_power": 24},
        "optimizer": OPTIMIZERS[case.optimizer],
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": lr, "warmup_num_steps": 4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": case.sub_group_size,
            "stage3_param_persistence_threshold": case.persistence_threshold,
            **(bounds if nvme_path else {}),
            "offload_param": {**offload(case.parameters_on), "max_in_cpu": case.max_in_cpu},
            "offload_optimizer": offload(case.state_on),
        },
        "infinity": {
            "pinned_bytes_max": case.pinned_bytes_max,
            "host_cache_bytes": int(case.cached * state_bytes),
            "gradient_bytes_max": case.gradients_in_memory,
            "backend": case.backend,
            "update": case.update,
            "schedule": case.schedule if nvme_path else "auto",
            "micro_batches_at_once": case.at_once if nvme_path else "auto",
            "micro_batches": case.accumulation if case.split and nvme_path else 1,
            "master_weights": case.master,
            "fused": case.fused,
            "moments_dtype": case.moments if nvme_path else "fp32",
            "reduce_dtype": case.reduce_dtype,
        },
    }
    with staying(share_of(case) if case.stays is None else case.stays):
        engine, _, _, _ = infinity.initialize(model=model, config=config)
    if case.moments != "fp32" and not nvme_path:
        engine.optimizer.register_step_post_hook(partial(round_after_step, engine.module, case.moments))
    losses = []
    with engine:
        for step in range(STEPS):
            losses += train_step(engine, case, step, in_memory=nvme_path is None)
            norm = engine.get_global_grad_norm()
            assert norm is not None
            losses.append(norm if math.isfinite(norm) else -1.0)  # NaN is not equal to itself
            if case.sleeps and step % 2 and nvme_path:
                engine.sleep(case.sleeps)
                engine.wake()
            if case.evaluate and step % 2:
                engine.eval()
                with torch.no_grad():
                    losses += [loss_of(engine, batch(step, 9)).item() for _ in range(2)]
                engine.train()
        assert (engine.skipped_steps > 0) == (case.loss_scale == 0)
        return losses, full_weights(engine.module)


def round_after_step(model: nn.Module, dtype: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What a step leaves of the moments, where they are kept in bf16 or in 8 bits."""
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if not state:
            continue
        sharded = parameter.data
        rows = -(-sharded.shape[0] // sharded.device_mesh.size())
        place = dist.get_rank() * rows * math.prod(sharded.shape[1:])
        moments = [state[moment].to_local() for moment in ("exp_avg", "exp_avg_sq")]
        flat = [moment.flatten() for moment in moments]
        rounded = [decode(*encode(m, signed=s), signed=s) for m, s in zip(flat, (True, False), strict=True)]
        if dtype == "bf16":
            rounded = [*round_moments(*flat, key=key_of(name), step=int(state["step"]), place=place)]
        for moment, values in zip(moments, rounded, strict=True):
            moment.copy_(values.view_as(moment))


IN_MEMORY = (
    *(
        "accumulation",
        "clipping",
        "checkpointing",
        "bf16",
        "fused",
        "frozen",
        "evaluate",
        "optimizer",
        "reduce_dtype",
        "loss_scale",
        "whole_steps",
        "split",
        "moments",
    ),
)
"""What of a case its training in memory depends on: cases that differ in the rest have it in common."""

_held_in_memory: dict[tuple[Any, ...], Outcome] = {}


def in_memory(train: Callable[[Case, str | None], Outcome], case: Case) -> Outcome:
    """The outcome of `train` with everything in memory, on this process's ranks; trained once for each that differs."""
    key = (train, dist.get_world_size(), *(getattr(case, name) for name in IN_MEMORY))
    if key not in _held_in_memory:
        plain = Case(**{name: getattr(case, name) for name in IN_MEMORY})
        _held_in_memory[key] = train(plain, None)
    return _held_in_memory[key]


def with_own_loop(case: Case, nvme_path: str | None) -> Outcome:
    """A loop of one's own: stock FSDP2 and torch.optim.AdamW, or the four lines that put them on NVMe."""
    torch.manual_seed(0)
    model = Model(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if case.bf16 else None, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True if case.fused else None}
    stock, paged, moments = torch.optim.AdamW, infinity.PagedAdamW, ["exp_avg", "exp_avg_sq"]
    if case.optimizer == "SGD":
        settings = {"lr": 1e-5, **OPTIMIZERS["SGD"]["params"]}
        stock, paged, moments = torch.optim.SGD, infinity.PagedSGD, ["momentum_buffer"]  # type: ignore[assignment]
    matrices = frozenset(name for name, p in model.named_parameters() if p.ndim == 2 and case.optimizer == "Muon")
    of_muon = [p for name, p in model.named_parameters() if name in matrices]
    others = [p for name, p in model.named_parameters() if name not in matrices]
    swap = None
    if nvme_path is None:
        optimizers = [stock(others, **settings)]
        if of_muon:
            optimizers.append(torch.optim.Muon(of_muon, lr=1e-2, weight_decay=0.1))
    else:
        swap = infinity.SwapManager(nvme_path, pinned_bytes_max=case.pinned_bytes_max, backend=case.backend)
        options = infinity.PagingOptions(param_persistence_threshold=case.persistence_threshold, moments=moments)
        if matrices:
            options = dataclasses.replace(options, matrices=matrices, matrix_moments=("momentum_buffer",))
        with staying(share_of(case)):
            swap.page(model, options)
        if matrices:  # they are other objects now
            named = dict(model.named_parameters())
            groups = [{"params": [p for name, p in named.items() if (name in matrices) is of]} for of in (True, False)]
            groups[0] |= {"use_muon": True, "lr": 1e-2, "weight_decay": 0.1}
            optimizers = [infinity.PagedMuon(groups, swap=swap, **settings)]
        else:
            optimizers = [paged(model.parameters(), swap=swap, **settings)]
    losses = []
    try:
        for step in range(STEPS):
            for micro in range(case.accumulation):
                loss = loss_of(model, batch(step, micro))
                (loss / case.accumulation).backward()
                losses.append(loss.item())
            if case.clipping:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return losses, full_weights(model)
    finally:
        if swap is not None:
            swap.close()


def differences(expected: Outcome, got: Outcome) -> list[str]:
    """What differs in any bit: names of weights, numbers of losses."""
    found = [f"loss {i}: {a!r} and {b!r}" for i, (a, b) in enumerate(zip(expected[0], got[0], strict=True)) if a != b]
    found += [name for name in expected[1] if not torch.equal(expected[1][name], got[1][name])]
    assert expected[1].keys() == got[1].keys()
    assert any(value != expected[0][0] for value in expected[0])  # it did learn something
    return found


def main() -> int:
    """`training.py FOLDER BACKENDS [all|vertical]`: cases on all ranks, each backend in turn; prints what differs.

    Without the last, a few cases of a few steps.
    """
    global STEPS
    nvme_path, backends = sys.argv[1], sys.argv[2].split(",")
    few = {name: CASES[name] for name in ON_SEVERAL_RANKS}
    cases = {"all": SHARDED, "vertical": VERTICAL}[sys.argv[3]] if sys.argv[3:] else few
    STEPS = STEPS if sys.argv[3:] else 5
    dist.init_process_group("gloo")
    failed = 0
    for number, (name, case) in enumerate(cases.items()):
        for run in (with_engine, with_own_loop):
            if run is with_own_loop and name not in ("plain", "accumulation and clipping", "frozen parameters", "Muon"):
                continue
            ours = dataclasses.replace(case, backend=backends[number % len(backends)])
            wrong = differences(in_memory(run, case), run(ours, nvme_path))
            failed += bool(wrong)
            print(f"rank {dist.get_rank()} {run.__name__} {name}: {wrong[:4] or 'equal'}", flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
