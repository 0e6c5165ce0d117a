"""A transformer as the planner sees it: parameters, operations, activations.

The formulas are those of Rajbhandari et al., ZeRO-Infinity (SC'21, arXiv:2104.07857), sections 3 and 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_FACTOR = 12
"""Parameters of a block over hidden size squared: 4 of attention, 8 of the feed-forward (section 3)."""


LINEAR_FACTOR = 18
"""Inputs and outputs of the linear layers of such a block over hidden size: 4 times 2 of attention, 2 times 5 of the
feed-forward."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a mixture: feed-forwards of which each token passes through a few. Shared ones, through which all
    tokens pass, are a part of the block like attention.

    Attributes:
        count: of a block that has them.
        per_token: how many a token passes through in such a block.
        numel: parameters of one.
        linear_width: inputs and outputs of its linear layers.
        blocks: the numbers of the blocks that have them.
        dense_block_numel, dense_linear_width: of a block that has none.
    """

    count: int
    per_token: int
    numel: int
    linear_width: int
    blocks: tuple[int, ...]
    dense_block_numel: int = 0
    dense_linear_width: int = 0

    def distinct(self, tokens: int) -> float:
        """How many of a block's E experts T tokens pass through, expected: E · (1 − (1 − k / E)^T), where each token takes k
        different ones, all equally likely, whatever the others take."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True)
class Transformer:
    """The shape of a model.

    Attributes:
        layers: its blocks, each a group of its own.
        hidden: hidden size.
        heads: of attention.
        seq: tokens of a sample.
        vocab: tokens there are.
        block_numel: parameters of a block; of one that has experts, where there are such.
        root_numel: parameters outside of the blocks: embeddings, the head, the last norm.
        linear_width: inputs and outputs of a block's linear layers, of one that has experts again; a GPT's where None.
        vector_numel: parameters of a block that are in no matrix, as far as they are known: norms and biases.
        matrices: the shapes of a block's matrices; a GPT's where None.
        cache_width: numbers that generation keeps of a token in a block, its keys and values; 2 · hidden where None.
        experts: of a mixture of experts; None for a dense model.
        tied_numel: parameters of the token embedding, if the head shares them.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    block_numel: int
    root_numel: int
    linear_width: int | None = None
    cache_width: int | None = None
    experts: Experts | None = None
    vector_numel: int = 0
    matrices: tuple[tuple[int, int], ...] | None = None
    tied_numel: int = 0

    @property
    def block_matrices(self) -> tuple[tuple[int, int], ...]:
        """The shapes of a block's matrices, experts left out, which are kept as tensors of three dimensions."""
        hidden = self.hidden
        gpt = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
        return gpt if self.matrices is None else self.matrices

    @property
    def block_numels(self) -> list[int]:
        return [
            self.block_numel
            if self.experts is None or number in self.experts.blocks
            else self.experts.dense_block_numel
            for number in range(self.layers)
        ]

    @property
    def expert_numels(self) -> list[int]:
        """Those of each block that are in routed experts."""
        if (experts := self.experts) is None:
            return [0] * self.layers
        numel = experts.count * experts.numel
        return [numel if number in experts.blocks else 0 for number in range(self.layers)]

    @property
    def numel(self) -> int:
        return sum(self.block_numels) + self.root_numel

    @property
    def active_numel(self) -> int:
        """Those that a token passes through: all but the experts that it isn't routed to."""
        if self.experts is None:
            return self.numel
        idle = self.experts.count - self.experts.per_token
        return self.numel - len(self.experts.blocks) * idle * self.experts.numel

    def adapter_numel(self, rank: int) -> int:
        """Parameters of LoRA's adapters of this rank on all linear layers of the blocks outside of routed experts: rank ·
        (inputs + outputs) of each layer (Hu et al., arXiv:2106.09685, section 4.1)."""
        width = LINEAR_FACTOR * self.hidden if self.linear_width is None else self.linear_width
        if self.experts is None:
            return rank * self.layers * width
        sparse = len(self.experts.blocks)
        width -= self.experts.count * self.experts.linear_width
        return rank * (sparse * width + (self.layers - sparse) * self.experts.dense_linear_width)

    def cache_bytes(self, samples: int) -> int:
        """Keys and values of all tokens of so many samples, in 16 bits."""
        width = 2 * self.hidden if self.cache_width is None else self.cache_width
        return 2 * samples * self.seq * self.layers * width

    def flops(self, samples: int, *, checkpointing: bool) -> float:
        """Floating-point operations of a forward and a backward: 2 and 4 per token and active parameter, and 2 more where the
        forward is computed again, which makes 8 · bsz · seq · P (section 4.1)."""
        return (8 if checkpointing else 6) * samples * self.seq * self.active_numel

    @property
    def muon_flops_per_element(self) -> float:
        """Floating-point operations of Muon's five Newton-Schulz iterations, per element of a block's matrices: each multiplies
        an m x n matrix (m <= n) by its transpose, that product by itself, and the sum by the matrix, 4 m^2 n + 2 m^3
        (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""
        sorted_shapes = [(min(shape), max(shape)) for shape in self.block_matrices]
        iterations = 5 * sum(4 * m * m * n + 2 * m**3 for m, n in sorted_shapes)
        return iterations / sum(m * n for m, n in sorted_shapes)

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
    vectors = 13 * hidden
    block = BLOCK_FACTOR * hidden * hidden + vectors
    embeddings = vocab * hidden, (seq + 2) * hidden
    return Transformer(
        layers, hidden, heads, seq, vocab, block, sum(embeddings), vector_numel=vectors, tied_numel=embeddings[0]
    )


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
    root = numel - layers * block
    return Transformer(layers, hidden, hidden // 64, seq, vocab, block, root, tied_numel=vocab * hidden)


def heads_for(hidden: int) -> int:
    """As many heads as is usual: 128 wide from a hidden size of 2048 on, else 64; one where neither divides it."""
    width = 128 if hidden >= 2048 else 64
    return hidden // width if hidden % width == 0 else 1
