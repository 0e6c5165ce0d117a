"""A small GPT over bytes: pre-norm blocks, learned positions, tied output. It does not depend on infinity.

Every module with parameters initialises them in `reset_parameters`, so the model can be built on the meta device and
filled later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model; `hidden_size` is a multiple of 64, the width of one attention head."""

    layers: int
    hidden_size: int
    context: int
    checkpoint_activations: bool = False

    @property
    def heads(self) -> int:
        return self.hidden_size // 64

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        block = 12 * self.hidden_size**2 + 13 * self.hidden_size
        return self.layers * block + (VOCABULARY + self.context + 2) * self.hidden_size


def config_for(numel: int, context: int, *, checkpoint_activations: bool = False) -> GPTConfig:
    """Return the shape nearest to `numel` parameters among those about as wide as 64 times their depth."""
    shapes = [
        GPTConfig(layers, 64 * k, context, checkpoint_activations) for layers in range(2, 129) for k in range(1, 129)
    ]

    def distance(shape: GPTConfig) -> float:
        size = abs(math.log(shape.numel / numel))
        slimness = abs(math.log(shape.hidden_size / (64 * shape.layers)))
        return 20 * size + slimness

    return min(shapes, key=distance)


class Linear(nn.Linear):
    """A linear layer with normal first values of a given standard deviation."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with small normal first values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(hidden)
        self.qkv = Linear(hidden, 3 * hidden, 0.02)
        self.out = Linear(hidden, hidden, 0.02 / math.sqrt(2 * config.layers))
        self.norm_mlp = nn.LayerNorm(hidden)
        self.up = Linear(hidden, 4 * hidden, 0.02)
        self.down = Linear(4 * hidden, hidden, 0.02 / math.sqrt(2 * config.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class GPT(nn.Module):
    """Logits over the next byte. Input: (batch, length) bytes as int64; output: (batch, length, 256)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = Embedding(VOCABULARY, config.hidden_size)
        self.positions = Embedding(config.context, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            if self.config.checkpoint_activations and self.training:
                h = checkpoint(block, h, use_reentrant=False)
            else:
                h = block(h)
        logits: torch.Tensor = self.head(self.norm(h))
        return logits
