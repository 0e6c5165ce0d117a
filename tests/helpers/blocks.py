"""A model of blocks that are a group each, as it is or sharded, and what it is trained on."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BLOCKS = 4
WIDTH = 64


class Model(nn.Module):
    """Blocks of which a pass may leave some out, or use the first one twice."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor, without: int | None = None, twice: bool = False) -> torch.Tensor:
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != without:
                h = h + block(h).tanh()
        return h + self.blocks[0](h) if twice else h


def sharded(width: int = WIDTH) -> nn.Module:
    """The model under FSDP2, computing in bf16."""
    model = Model(width=width)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
