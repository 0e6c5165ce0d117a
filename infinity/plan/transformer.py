"""A transformer for the planner: parameters, operations, activations.

The formulas are those of Rajbhandari et al., ZeRO-Infinity (SC'21, arXiv:2104.07857), sections 3 and 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_FACTOR = 12
"""Parameters of a block over hidden size squared: 4 of attention, 8 of the feed-forward (section 3)."""


LINEAR_FACTOR = 18
"""Inputs and outputs of its linear layers over hidden size: 4 times 2 of attention, 2 times 5 of the feed-forward."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a mixture, of which each token uses a few. (Shared ones are a part of the block.)

    linear_width: inputs and outputs of one expert's linear layers. blocks: numbers of the blocks that have experts.
    dense_block_numel, dense_linear_width: values of a block without experts.
    """

    count: int
    per_token: int
    numel: int
    linear_width: int
    blocks: tuple[int, ...]
    dense_block_numel: int = 0
    dense_linear_width: int = 0

    def distinct(self, tokens: int) -> float:
        """Return the expected number of a block's E experts that T tokens use: E · (1 − (1 − k / E)^T). Each token uses
        k different experts, all equally likely, independent of other tokens."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True)
class Transformer:
    """The shape of a model."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    block_numel: int
    """Parameters of a block; of a block with experts, if there are any."""
    root_numel: int
    """Parameters outside the blocks: embeddings, the head, the last norm."""
    linear_width: int | None = None
    """Inputs and outputs of a block's linear layers, with experts if there are any; None for a GPT's."""
    cache_width: int | None = None
    """Numbers that generation keeps per token and block, its keys and values; None for 2 · hidden."""
    experts: Experts | None = None
    vector_numel: int = 0
    """Known parameters of a block that are in no matrix: norms and biases."""
    matrices: tuple[tuple[int, int], ...] | None = None
    """Shapes of a block's matrices; None for a GPT's."""
    tied_numel: int = 0
    """Parameters of the token embedding, if the head shares them."""
    root_vector_numel: int = 0
    """Known parameters outside the blocks that are neither in the embedding nor in the head: norms, positions."""
    key_value_heads: int | None = None
    """None for as many as `heads`; 0 if unknown, as for a model of which only the size is."""

    @property
    def block_matrices(self) -> tuple[tuple[int, int], ...]:
        """Shapes of a block's matrices, without experts, which are three-dimensional tensors."""
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
        """Parameters of each block that are in routed experts."""
        if (experts := self.experts) is None:
            return [0] * self.layers
        numel = experts.count * experts.numel
        return [numel if number in experts.blocks else 0 for number in range(self.layers)]

    @property
    def numel(self) -> int:
        return sum(self.block_numels) + self.root_numel

    @property
    def active_numel(self) -> int:
        """Parameters that a token uses: all except the experts that it is not routed to."""
        if self.experts is None:
            return self.numel
        idle = self.experts.count - self.experts.per_token
        return self.numel - len(self.experts.blocks) * idle * self.experts.numel

    def adapter_numel(self, rank: int) -> int:
        """Return the parameters of LoRA adapters of this rank on all linear layers of the blocks except routed experts.
        They are rank · (inputs + outputs) of each layer (Hu et al., arXiv:2106.09685, section 4.1)."""
        width = LINEAR_FACTOR * self.hidden if self.linear_width is None else self.linear_width
        if self.experts is None:
            return rank * self.layers * width
        sparse = len(self.experts.blocks)
        width -= self.experts.count * self.experts.linear_width
        return rank * (sparse * width + (self.layers - sparse) * self.experts.dense_linear_width)

    def cache_bytes(self, samples: int) -> int:
        width = 2 * self.hidden if self.cache_width is None else self.cache_width
        return 2 * samples * self.seq * self.layers * width

    def flops(self, samples: int, *, checkpointing: bool) -> float:
        """Return the floating-point operations of a forward and a backward. 2 and 4 per token and active parameter, and
        2 more if the forward is recomputed, which makes 8 · bsz · seq · P (section 4.1)."""
        return (8 if checkpointing else 6) * samples * self.seq * self.active_numel

    @property
    def muon_flops_per_element(self) -> float:
        """Floating-point operations of Muon's five Newton-Schulz iterations, per element of a block's matrices. Each
        iteration multiplies an m x n matrix (m <= n) by its transpose, that product by itself, and the sum by the
        matrix: 4 m^2 n + 2 m^3 (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""
        sorted_shapes = [(min(shape), max(shape)) for shape in self.block_matrices]
        iterations = 5 * sum(4 * m * m * n + 2 * m**3 for m, n in sorted_shapes)
        return iterations / sum(m * n for m, n in sorted_shapes)

    def checkpoint_bytes(self, samples: int) -> int:
        """Return the bytes of checkpoints, one per block: 2 · bsz · seq · hd · nl (section 3)."""
        return 2 * samples * self.seq * self.hidden * self.layers

    def activation_bytes(self, samples: int, blocks: int = 1, *, tensor_ranks: int = 1) -> int:
        """Return the activation bytes between checkpoints: bsz · seq · ci · (16 · hd + 2 · heads · seq) (section 3).
        Tensor ranks divide all but the inputs and outputs of attention and feed-forward, 10 bytes of 34 per hidden
        number (Korthikanti et al., arXiv:2205.05198, section 4.2)."""
        divided = 16 * self.hidden * 24 // 34 + 2 * self.heads * self.seq
        whole = 16 * self.hidden + 2 * self.heads * self.seq - divided
        return samples * self.seq * blocks * (whole + -(-divided // tensor_ranks))

    def saved_bytes(self, samples: int, *, checkpointing: bool, tensor_ranks: int = 1) -> int:
        """Return the bytes that one block saves for its backward: its checkpoint, or all of its activations."""
        if checkpointing:
            return self.checkpoint_bytes(samples) // self.layers
        return self.activation_bytes(samples, tensor_ranks=tensor_ranks)

    def saved_tensor_bytes(self, samples: int, *, checkpointing: bool) -> int:
        """Return the bytes of its largest 16-bit tensor: a checkpoint, or the inner activation of the feed-forward."""
        return 2 * samples * self.seq * self.hidden * (1 if checkpointing else 4)

    def logits_bytes(self, samples: int) -> int:
        """Return the bytes of the logits and their gradient, in fp32."""
        return 8 * samples * self.seq * self.vocab


def dense_transformer(*, layers: int, hidden: int, heads: int, seq: int, vocab: int) -> Transformer:
    """Return a GPT of this shape: 12 · hd², biases and norms per block; tied token embedding; positions."""
    vectors = 13 * hidden
    block = BLOCK_FACTOR * hidden * hidden + vectors
    embeddings = vocab * hidden, (seq + 2) * hidden
    return Transformer(
        layers,
        hidden,
        heads,
        seq,
        vocab,
        block,
        sum(embeddings),
        vector_numel=vectors,
        tied_numel=embeddings[0],
        root_vector_numel=embeddings[1],
    )


def transformer_of(numel: int, *, seq: int, vocab: int) -> Transformer:
    """Return a transformer of exactly `numel` parameters, with the usual shape of its size.

    The hidden size is a multiple of 64. It is 64 times the layers at 40 M parameters, about 110 times at 7 B and 200
    times at 1 T, as in ZeRO-Infinity. The embedding has at most a tenth of the parameters. Raises ValueError if `numel`
    is too small.
    """
    slimness = 64 * (numel / 40e6) ** 0.11
    exact = (slimness * numel / BLOCK_FACTOR) ** (1 / 3)
    hidden = max(64, 64 * round(exact / 64))
    vocab = max(1, min(vocab, numel // 10 // hidden))
    layers = round((numel - vocab * hidden) / (BLOCK_FACTOR * hidden * hidden))
    if layers < 1:
        raise ValueError(
            f"{numel} parameters are too few for a transformer: give 1M or more, or layers and hidden size"
        )
    block = (numel - vocab * hidden) // layers
    root = numel - layers * block
    known = layers, hidden, hidden // 64, seq, vocab, block, root
    return Transformer(*known, tied_numel=vocab * hidden, key_value_heads=0)


def heads_for(hidden: int) -> int:
    """Return the usual number of heads: 128 wide from a hidden size of 2048 on, else 64; one if neither divides it."""
    width = 128 if hidden >= 2048 else 64
    return hidden // width if hidden % width == 0 else 1
