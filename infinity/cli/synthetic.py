"""A synthetic transformer of any size for timing steps: shapes and arithmetic of a GPT, random tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from infinity.plan.transformer import BLOCK_FACTOR
from infinity.plan.transformer import Transformer as Shape

VOCABULARY = 256
HEAD = 64


def shape_of(layers: int, hidden: int, *, seq: int) -> Shape:
    """Return the shape for a hidden size that is a multiple of 64. No biases or learned norms; the head is the
    embedding."""
    block, embedding = BLOCK_FACTOR * hidden**2, VOCABULARY * hidden
    return Shape(layers, hidden, hidden // HEAD, seq, VOCABULARY, block, embedding)


def shape_for(numel: int, *, seq: int) -> Shape:
    """Return the shape nearest to `numel` parameters among those about 64 times as wide as deep, like GPTs."""
    shapes = [shape_of(layers, HEAD * width, seq=seq) for layers in range(2, 129) for width in range(1, 257)]
    return min(shapes, key=lambda s: 20 * abs(s.numel / numel - 1) + abs(s.hidden / (64 * s.layers) - 1))


class Block(nn.Module):
    """Attention and MLP, pre-norm, without biases. Input and output: (batch, length, hidden)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_in = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_in = nn.Linear(hidden, 4 * hidden, bias=False)
        self.mlp_out = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        normed = F.rms_norm(x, (hidden,))
        heads = self.attention_in(normed).view(batch, length, 3, self.heads, hidden // self.heads).transpose(1, 3)
        q, k, v = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        inner: torch.Tensor = self.mlp_out(F.gelu(self.mlp_in(F.rms_norm(x, (hidden,)))))
        return x + inner


class Transformer(nn.Module):
    """A model from (batch, length) token numbers to the mean cross entropy of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads) for _ in range(shape.layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(F.rms_norm(x, (x.shape[-1],)), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def tokens(samples: int, seq: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.randint(VOCABULARY, (samples, seq + 1), device=device)


def make_training(
    shape: Shape, samples: int, device: torch.device
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    torch.manual_seed(0)
    with device:
        model = Transformer(shape)
    return model, lambda trained: trained(tokens(samples, shape.seq, device))
