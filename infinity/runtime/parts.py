"""The objects that train one model, which an engine shares with its helpers. Training thread only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.activations.saved_tensors import Activations
from infinity.checkpoint.commits import Commits
from infinity.fsdp2.live import LiveParameters
from infinity.fsdp2.routes import Routes
from infinity.fsdp2.vertical import Vertical
from infinity.ranks.peers import Peers
from infinity.runtime.in_memory import InMemory, NoCommits
from infinity.runtime.meshes import Grid
from infinity.runtime.pipeline import Ties
from infinity.runtime.resolved import Resolved
from infinity.store.durable import DurableRun
from infinity.swap import PagedOptimizer, SwapManager
from infinity.swap.health import ModelHealth
from infinity.swap.paging import Paging


@dataclass(eq=False, kw_only=True)
class Parts:
    """Made by `initialize`. storage, paging and updater: what holds the model, makes its passes and steps it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    """The schedule that `step` steps, or None. Trainers may replace it."""
    resolved: Resolved
    """Replaced when the batch sizes change."""
    swap: SwapManager | None
    run: DurableRun | None
    live: LiveParameters | None
    activations: Activations | None
    routes: Routes | None
    peers: Peers
    grid: Grid
    ties: Ties

    def __post_init__(self) -> None:
        swap, optimizer = self.swap, self.optimizer
        self.storage: SwapManager | InMemory
        self.paging: Paging | InMemory
        self.updater: PagedOptimizer | InMemory
        self.health: ModelHealth
        if swap is not None:
            assert isinstance(optimizer, PagedOptimizer)
            self.storage, self.paging, self.updater = swap, swap.paging, optimizer
            self.health = swap.paged.health
        else:
            self.storage = self.paging = self.updater = in_memory = InMemory(self.module, optimizer)
            self.health = in_memory.health
        self.commits = Commits(self.run, swap) if self.run is not None and swap is not None else NoCommits()
        self.vertical = Vertical(self.module, self.paging.recover)
