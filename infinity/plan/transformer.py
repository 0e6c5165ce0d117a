"""Floor 7. A transformer as the planner sees it: parameters, operations, activations.

The formulas are those of Rajbhandari et al., ZeRO-Infinity (SC'21, arXiv:2104.07857), sections 3 and 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_FACTOR = 12
"""Parameters of a block over hidden size squared: 4 of attention, 8 of the feed-forward (section 3)."""


@dataclass(frozen=True)
class Transformer:
    """The shape of a model.

    Attributes:
        layers: its blocks, each a group of its own.
        hidden: hidden size.
        heads: of attention.
        seq: tokens of a sample.
        vocab: tokens there are.
        block_numel: parameters of a block.
        root_numel: parameters outside of the blocks: embeddings, the head, the last norm.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    block_numel: int
    root_numel: int

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.block_numel + self.root_numel

    def flops(self, samples: int, *, checkpointing: bool) -> float:
        """Floating-point operations of a forward and a backward: 2 and 4 per token and parameter, and 2 more where the
        forward is computed again, which makes 8 · bsz · seq · P (section 4.1)."""
        return (8 if checkpointing else 6) * samples * self.seq * self.numel

    def checkpoint_bytes(self, samples: int) -> int:
        """Activations kept from forward to backward: 2 · bsz · seq · hd · nl bytes (section 3, a checkpoint per block)."""
        return 2 * samples * self.seq * self.hidden * self.layers

    def activation_bytes(self, samples: int, blocks: int = 1) -> int:
        """What `blocks` blocks hold between two checkpoints: bsz · seq · ci · (16 · hd + 2 · heads · seq) (section 3)."""
        return samples * self.seq * blocks * (16 * self.hidden + 2 * self.heads * self.seq)

    def saved_bytes(self, samples: int, *, checkpointing: bool) -> int:
        """What one block saves for its backward: its checkpoint, or all that it holds."""
        whole = self.checkpoint_bytes(samples) if checkpointing else self.activation_bytes(samples, self.layers)
        return whole // self.layers

    def saved_tensor_bytes(self, samples: int, *, checkpointing: bool) -> int:
        """The largest tensor of it in 16 bits: a checkpoint, or what the feed-forward is inside."""
        return 2 * samples * self.seq * self.hidden * (1 if checkpointing else 4)

    def logits_bytes(self, samples: int) -> int:
        """The logits and their gradient, in fp32."""
        return 8 * samples * self.seq * self.vocab


def dense_transformer(*, layers: int, hidden: int, heads: int, seq: int, vocab: int) -> Transformer:
    """A GPT of this shape: 12 · hd² and the biases and norms a block; token embedding shared with the head, positions."""
    block = BLOCK_FACTOR * hidden * hidden + 13 * hidden
    return Transformer(layers, hidden, heads, seq, vocab, block, (vocab + seq + 2) * hidden)


def transformer_of(numel: int, *, seq: int, vocab: int) -> Transformer:
    """A transformer of just `numel` parameters, shaped like those that are trained at its size.

    The hidden size is a multiple of 64, and 64 times the layers at 40 M parameters, about 110 times at 7 B and 200 times at
    1 T, as in the models of ZeRO-Infinity and their like. The embedding takes a tenth of the parameters at most.
    Raises ValueError for a number that makes no transformer.
    """
    slimness = 64 * (numel / 40e6) ** 0.11
    exact = (slimness * numel / BLOCK_FACTOR) ** (1 / 3)
    hidden = max(64, 64 * round(exact / 64))
    vocab = max(1, min(vocab, numel // 10 // hidden))
    layers = round((numel - vocab * hidden) / (BLOCK_FACTOR * hidden * hidden))
    if layers < 1:
        raise ValueError(f"{numel} parameters make no transformer: give at least 1M, or layers and hidden size")
    block = (numel - vocab * hidden) // layers
    return Transformer(layers, hidden, hidden // 64, seq, vocab, block, numel - layers * block)


def heads_for(hidden: int) -> int:
    """As many heads as is usual: 128 wide from a hidden size of 2048 on, else 64; one where neither divides it."""
    width = 128 if hidden >= 2048 else 64
    return hidden // width if hidden % width == 0 else 1
