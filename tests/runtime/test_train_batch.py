"""`Engine.train_batch`: whole steps, in the vertical schedule and one micro-batch after the other, of models of all kinds."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import gc
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.fsdp2.vertical import Vertical
from infinity.runtime import batch_parts
from infinity.runtime import engine as engine_module
from infinity.swap.health import Health

pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH, TOKENS, WORDS = 48, 6, 31


class Block(nn.Module):
    """Keyword arguments in, a tuple out, as Hugging Face's are."""

    def __init__(self, dropout: float = 0.0, *, crosses: bool = False) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.across = nn.Linear(WIDTH, WIDTH) if crosses else None

    def forward(
        self, hidden: torch.Tensor, *, mask: torch.Tensor | None = None, encoded: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        inner = self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))
        if self.across is not None:
            assert encoded is not None
            inner = inner + self.across(encoded).mean(1, keepdim=True)
        return hidden + (inner if mask is None else inner * mask), None


class Model(nn.Module):
    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.embedding(tokens), (tokens > 2).unsqueeze(-1)
        for block in self.blocks:
            hidden, _ = self.call(block, hidden, mask)
        return hidden

    def call(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        return block(hidden, mask=mask)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.run(tokens))
        return {"logits": logits, "loss": F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())}


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Checkpointed(Model):
    """The block is called inside the checkpoint, so a pause is there, too. Dropout is drawn again in the backward."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def call(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        return checkpoint(block, hidden, mask=mask, use_reentrant=False)


class FrozenBelow(Model):
    """No gradient reaches the input of the first trained block, and blocks below it are frozen."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.embedding.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class OnlyTheHead(Model):
    """No output of a block has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks.requires_grad_(False)


class EncoderDecoder(Model):
    """What the encoder gives goes into every block of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Block(crosses=True) for _ in range(3))

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        encoded, hidden = self.norm(super().run(tokens)), self.embedding(tokens.flip(1))
        for block in self.decoder:
            hidden, _ = block(hidden, encoded=encoded)
        return hidden


class Branching(Model):
    """Micro-batches skip different blocks, and one of them skips all that others share."""

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, skipped = self.embedding(tokens), int(tokens[0, 0]) % 4
        for number, block in enumerate(self.blocks):
            if number != skipped:
                hidden, _ = block(hidden)
        return hidden


class Unused(Model):
    """What a block gives is left out of the loss of some micro-batches, so that no gradient comes back to it."""

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            passed, _ = block(hidden)
            hidden = hidden if number == 1 and int(tokens[0, 0]) % 2 else passed
        return hidden


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.one(hidden) + self.other(hidden).tanh()


class NestedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.before, self.after = nn.LayerNorm(WIDTH), Experts(), Experts()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        hidden = super().forward(self.before(self.first(hidden)), **kwargs)[0]
        return hidden + self.last(self.after(hidden)), None


class Nested(Model):
    """Groups in groups in groups, of which each computes before it calls others."""

    wrap = ("NestedBlock", "Experts", "Linear")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NestedBlock() for _ in range(2))


@dataclass
class State:
    hidden: torch.Tensor
    mask: torch.Tensor


class StateBlock(Block):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.hidden, mask=state.mask)[0], state.mask)


class PassesState(Model):
    """What FSDP2 finds a gradient in, and torch's own trees don't."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StateBlock() for _ in range(3))

    def call(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        return block(State(hidden, mask)).hidden, None


class ReentrantBlock(Block):
    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden + checkpoint(lambda h: self.down(F.gelu(self.up(h))), self.norm(hidden), use_reentrant=True), None


class ReentrantWithin(Model):
    """The recomputation uses the gathered parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReentrantBlock() for _ in range(3))


class MeanBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        if self.training:
            self.note(hidden.detach())
        return super().forward(hidden - self.mean.to(hidden.dtype), **kwargs)

    def note(self, hidden: torch.Tensor) -> None:
        self.mean.lerp_(hidden.mean((0, 1)).to(self.mean.dtype), 0.1)


class RunningMean(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MeanBlock() for _ in range(3))


class NewMeanBlock(MeanBlock):
    def note(self, hidden: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + hidden.float().mean((0, 1))


class ReplacedMean(Model):
    """The buffer is another tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NewMeanBlock() for _ in range(3))


class LeavingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.left: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        self.left[:] = [hidden.float().square().mean()]
        return super().forward(hidden, **kwargs)


class LeavesLosses(Model):
    """Losses that blocks leave for the end, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LeavingBlock() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = super().forward(tokens)
        return {"loss": outputs["loss"] + sum(block.left[0] for block in self.blocks)}


SCALE = contextvars.ContextVar("SCALE", default=0.0)


class Stateful(Model):
    """From the time it is switched on, each micro-batch depends on what those before it have left."""

    on = ""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.kept: list[torch.Tensor] = []
        self.ranges = nn.BatchNorm1d(WIDTH, affine=False).eval()

    def call(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        hidden, _ = super().call(block, hidden, mask)
        if self.on == "batch norm":
            hidden = self.ranges(hidden.float().transpose(1, 2)).transpose(1, 2).to(hidden.dtype)
        elif self.on == "random numbers":
            hidden = hidden * random.random() * np.random.rand()
        elif self.on == "losses in a list":
            self.kept.append(hidden.float().square().mean())
        return hidden * (1 + SCALE.get()), None

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.on == "context variable":
            SCALE.set(SCALE.get() / 2 + 0.1)
        if self.on == "batch norm":
            self.ranges.train(self.training)
        loss = super().forward(tokens)["loss"] + sum(self.kept) * len(self.kept)
        self.kept.clear()
        return {"loss": loss}


class Caching(Model):
    """The first forward keeps a tensor for all others."""

    mask: torch.Tensor | None = None

    def call(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        self.mask = torch.ones(TOKENS, 1) if self.mask is None else self.mask
        return super().call(block, hidden * self.mask.to(hidden.dtype), mask)


class Mixed(Model):
    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.embedding(tokens), (tokens > 2).unsqueeze(-1)
        hidden = hidden.detach() if int(tokens[0, 0]) % 2 else hidden
        for block in self.blocks:
            hidden, _ = self.call(block, hidden, mask)
        return hidden


class Twice(Model):
    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](super().run(tokens))[0]


class Reentrant(Model):
    def call(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        return checkpoint(lambda h, m: block(h, mask=m), hidden, mask, use_reentrant=True)


class Autocast(Model):
    def call(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(hidden, mask=mask)


MODELS: list[Callable[[], nn.Module]] = [
    Model,
    Tied,
    lambda: Model(dropout=0.3),
    Checkpointed,
    FrozenBelow,
    OnlyTheHead,
    EncoderDecoder,
    Unused,
    Nested,
    PassesState,
    ReentrantWithin,
]
NAMES = [
    "plain",
    "tied",
    "dropout",
    "checkpointed",
    "frozen below",
    "only the head trains",
    "encoder and decoder",
    "unused",
    "nested",
    "a dataclass as input",
    "reentrant checkpoints within",
]


def batches(seed: int = 0) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, WORDS, (2, TOKENS), generator=generator)


def start(
    make: Callable[[], nn.Module], path: Path, *, accumulation: int = 3, clipping: float = 0.0, **own: Any
) -> infinity.Engine:
    torch.manual_seed(0)
    own = {"wrap": getattr(make, "wrap", "auto"), **own}
    place = {"device": "nvme", "nvme_path": str(path)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
        },
        "flops_profiler": {"enabled": own.pop("profile", False), "detailed": False},
        "infinity": {"pinned_bytes_max": "16MiB", **own},
    }
    return infinity.initialize(model=make(), config=config)[0]


def weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    state = engine.module.state_dict()
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() + 0 for name, v in state.items()}


def train(make: Callable[[], nn.Module], path: Path, *, steps: int = 4, **config: Any) -> tuple[Any, ...]:
    with start(make, path, **config) as engine:
        data = batches()
        losses = [engine.train_batch(data).item() for _ in range(steps)]
        losses.append(engine.eval_batch(batches(9)).item())
        return losses, weights(engine)


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == other[0]
    assert len(set(one[0])) > 1
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


def some_steps(engine: infinity.Engine) -> None:
    data = batches()
    for _ in range(4):
        engine.train_batch(data)


@pytest.mark.parametrize("clipping", [0.0, 0.3])
@pytest.mark.parametrize("make", MODELS, ids=NAMES)
def test_both_schedules_give_the_same_bits(make: Callable[[], nn.Module], clipping: float, nvme_path: Path) -> None:
    expected = train(make, nvme_path, schedule="horizontal", clipping=clipping)
    assert_same(expected, train(make, nvme_path, schedule="vertical", clipping=clipping))
    assert not list(nvme_path.iterdir())


class Another(Model):
    """The group that is last in module order is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([Block()])

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.first[0](self.embedding(tokens))
        for block in self.blocks:
            hidden, _ = block(hidden)
        return hidden


class AroundAllGroups(Model):
    """The loss comes from more than what enters the last group."""

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        around = self.embedding(tokens).tanh()
        return super().run(tokens) + around


COLLECTED = contextvars.ContextVar[Any]("COLLECTED", default=None)


class Collects(Model):
    """A context variable is set during each forward, as transformers' models do."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        token = COLLECTED.set({})
        try:
            return super().forward(tokens)
        finally:
            COLLECTED.reset(token)


class SharedThrice(EncoderDecoder):
    """One table for encoder, decoder and head."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class NestedLast(Nested):
    wrap = ("NestedBlock", "Experts")


MODELS += [Another, AroundAllGroups, NestedLast, Collects, SharedThrice]
NAMES += ["another order", "around all groups", "nested up to the last", "a context variable", "a weight thrice"]
AT_ONCE = {"a weight thrice", "nested up to the last", "a dataclass as input", "around all groups"}
"""Of which all forwards end before a backward begins."""


class Mark:
    """Lives as long as the node of autograd that has it."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, mark: Mark) -> torch.Tensor:
        ctx.mark = mark
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


@pytest.mark.parametrize("make", MODELS, ids=NAMES)
def test_what_a_loss_saves_exists_for_one_micro_batch_at_a_time(
    make: Callable[[], nn.Module], nvme_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    living: weakref.WeakSet[Mark] = weakref.WeakSet()
    counts = []

    def watched(*of: Any) -> torch.Tensor:
        counts.append(len(living))
        mark = Mark()
        living.add(mark)
        loss: torch.Tensor = Marked.apply(loss_of(*of), mark)
        return loss

    loss_of = engine_module.loss_in
    monkeypatch.setattr(engine_module, "loss_in", watched)
    with start(make, nvme_path, schedule="vertical", accumulation=4) as engine:
        for _ in range(3):
            counts.clear()
            engine.train_batch(batches())
            assert not living
        assert engine.swap is not None
        assert engine.swap.stats().mispredictions == 0  # also where the first forward was run again
        assert counts == ([0, 1, 2, 3] if request.node.callspec.id in AT_ONCE else [0, 0, 0, 0])


def in_parts(make: Callable[[], nn.Module], path: Path, *, steps: int = 4, **config: Any) -> tuple[Any, ...]:
    """As `train`, through an ordinary loop whose batch of a step the engine splits."""
    with start(make, path, accumulation=1, micro_batches=3, **config) as engine:
        data, losses = batches(), []
        for _ in range(steps):
            loss = engine(torch.cat([next(data) for _ in range(3)]))["loss"]
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        losses.append(engine.eval_batch(batches(9)).item())
        return losses, weights(engine)


class OneElement(Model):
    """The loss has a dimension."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(tokens)["loss"].view(1)}


@pytest.mark.parametrize("make", [*MODELS, OneElement], ids=[*NAMES, "a loss of one element"])
def test_a_batch_that_is_split_gives_the_bits_of_accumulation(make: Callable[[], nn.Module], nvme_path: Path) -> None:
    expected, split = train(make, nvme_path, schedule="horizontal"), in_parts(make, nvme_path)
    assert expected[0][:-1] == pytest.approx(split[0][:-1], rel=1e-6)  # the sum is divided there, the terms are here
    assert_same((split[0], expected[1]), split)


def _looked_at(engine: infinity.Engine, loss: torch.Tensor, tokens: torch.Tensor) -> None:
    engine.module.state_dict()
    engine.backward(loss)


def _evaluated(engine: infinity.Engine, loss: torch.Tensor, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        engine(tokens)
    engine.backward(loss)


def _another(engine: infinity.Engine, loss: torch.Tensor, tokens: torch.Tensor) -> None:
    engine(tokens)
    engine.backward(loss)


def _both(engine: infinity.Engine, loss: torch.Tensor, tokens: torch.Tensor) -> None:
    engine.backward(loss + engine(tokens)["loss"])


def _past_the_engine(engine: infinity.Engine, loss: torch.Tensor, tokens: torch.Tensor) -> None:
    engine.module(tokens)
    engine.backward(loss)


def _scaled(engine: infinity.Engine, loss: torch.Tensor, tokens: torch.Tensor) -> None:
    engine.backward(2 * loss)


BETWEEN = (_looked_at, _evaluated, _another, _both, _past_the_engine, _scaled)
"""What comes between a split forward and its backward, which refuses then."""


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.zeros(8, 2), torch.zeros(6)), {}, "tensors have 6, 8 rows"),
        ((torch.zeros(8, 2), [1.0] * 8), {}, "a list of 8 values"),
        ((), {"x": torch.zeros(8, 2), "y": np.zeros(8)}, "can't split a ndarray"),
    ],
)
def test_what_cannot_be_split_is_refused(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(infinity.ConfigError, match=words):
        batch_parts.split(args, kwargs, 4)


def test_one_row_or_none_is_not_split() -> None:
    whole: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((torch.zeros(1, 6), torch.zeros(6)), {}),
        ((torch.zeros(0, 6),), {}),
        ((), {"cu_seq_lens": torch.zeros(5), "input_ids": torch.zeros(1, 9)}),
    ]
    for args, kwargs in whole:
        assert len(batch_parts.split(args, kwargs, 4)) == 1
    first, second = batch_parts.split((torch.arange(3), torch.ones(1)), {"scale": 2.0}, 2)
    assert [*map(torch.Tensor.tolist, first.args)] == [[0, 1], [1.0]] and first.kwargs == {"scale": 2.0}
    assert second.args[0].tolist() == [2]


def test_an_output_is_of_the_models_own_class() -> None:
    loss = torch.ones(())
    made = collections.namedtuple("made", ["logits", "loss"])
    assert batch_parts.with_loss({"loss": 0, "logits": 1}, loss) == {"loss": loss}
    assert batch_parts.with_loss(made(1, 2), loss) == made(None, loss)
    assert batch_parts.with_loss((1, 2), loss) == (loss,)
    with pytest.raises(TypeError, match="returns a State, which can't be made of a loss alone"):
        batch_parts.with_loss(State(loss, loss), loss)


def test_what_a_batch_that_is_split_refuses(nvme_path: Path) -> None:
    tokens = next(batches()).repeat(3, 1)
    with start(Model, nvme_path, accumulation=1, micro_batches=4, clipping=0.3) as engine:
        before = weights(engine)
        with pytest.raises(infinity.ConfigError, match="tensors have 5, 6 rows"):
            engine(tokens, torch.zeros(5))
        engine.backward(engine(tokens)["loss"])
        engine.zero_grad()
        with pytest.raises(infinity.InfinityError, match=r"gradient is 0\.5 instead of 1"):
            engine.backward(engine(tokens)["loss"] / 2)
        engine.zero_grad()
        engine(tokens)  # without its backward
        engine.backward(engine(tokens)["loss"])
        engine.zero_grad()
        after = weights(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.backward(engine(tokens[:1])["loss"])  # one row
        engine.step()
    for between in BETWEEN:
        with start(Model, nvme_path, accumulation=1, micro_batches=3, clipping=0.3) as engine:
            before, loss = weights(engine), engine(tokens)["loss"]
            for _ in range(2):  # once more: it stays refused
                with pytest.raises(
                    infinity.InfinityError, match=r"cannot run the backward|are those of a part of the model"
                ):
                    between(engine, loss, tokens)
            engine.zero_grad()
            after = weights(engine)
            assert all(torch.equal(before[name], after[name]) for name in before)
            engine.backward(engine(tokens)["loss"])
            engine.step()
    with (
        start(Twice, nvme_path, accumulation=1, micro_batches=2) as engine,
        pytest.raises(infinity.ConfigError, match=r"blocks\.0 is called twice.*set infinity\.micro_batches to 1"),
    ):
        engine(tokens)
    with pytest.raises(infinity.ConfigError, match=r"micro_batches: got 2 with gradient_accumulation_steps 3"):
        start(Model, nvme_path, accumulation=3, micro_batches=2)


def test_hooks_on_a_tied_weight_see_whole_gradients(nvme_path: Path) -> None:
    outcomes = []
    for schedule in ("horizontal", "vertical"):
        with start(Tied, nvme_path, schedule=schedule) as engine:
            seen: list[torch.Tensor] = []
            next(engine.module.parameters()).register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
            engine.train_batch(batches())
            engine.train_batch(batches())
            outcomes.append(seen)
    assert len(outcomes[0]) == 6
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("make", MODELS, ids=NAMES)
def test_some_micro_batches_at_once_give_the_same_bits(make: Callable[[], nn.Module], nvme_path: Path) -> None:
    common: dict[str, Any] = {"accumulation": 4, "clipping": 1e3}
    if make is ReentrantWithin:
        engine = start(make, nvme_path, schedule="vertical", micro_batches_at_once=2, **common)
        with engine, pytest.raises(infinity.InfinityError, match="use_reentrant=False"):
            engine.train_batch(batches())
        return
    expected = train(make, nvme_path, schedule="horizontal", **common)
    assert_same(expected, train(make, nvme_path, schedule="vertical", micro_batches_at_once=2, **common))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Twice, "group blocks.0 is called twice"),
        (Reentrant, "called inside a context"),
        (Autocast, "called inside a context"),
        (Mixed, "inputs of group blocks.0 have gradients in some micro-batches only"),
        (Branching, "they take different routes through its groups"),
        (RunningMean, "buffer blocks.0.mean is changed by a forward"),
        (ReplacedMean, "buffer blocks.0.mean is changed by a forward"),
        (LeavesLosses, "attribute left of blocks.0 is changed by a forward"),
        (lambda: Model(layers=1), "it has only one group"),
    ],
    ids=[
        "a group twice",
        "reentrant checkpoints",
        "autocast inside",
        "gradients of some inputs",
        "branches",
        "buffers",
        "other buffers",
        "attributes",
        "one group",
    ],
)
def test_what_cannot_take_turns_goes_one_after_the_other(
    make: Callable[[], nn.Module], why: str, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="infinity"):
        fallen_back = train(make, nvme_path)
    said = [record.getMessage() for record in caplog.records if 'is "horizontal" here' in record.getMessage()]
    assert len(said) == 1 and why in said[0]
    assert_same(train(make, nvme_path, schedule="horizontal"), fallen_back)
    with (
        start(make, nvme_path, schedule="vertical") as engine,
        pytest.raises(infinity.ConfigError, match=r"can't take turns.*set infinity.schedule to"),
    ):
        some_steps(engine)


def after_switching(on: str, path: Path, schedule: str) -> tuple[Any, ...]:
    random.seed(0)
    np.random.seed(0)
    SCALE.set(0.25)
    with start(Stateful, path, schedule=schedule) as engine:
        data = batches()
        losses = [engine.train_batch(data).item()]
        engine.module.on = on
        if on == "hook of the model":
            engine.module.register_forward_hook(lambda module, args, output: {"loss": output["loss"] / 2})
        losses += [engine.train_batch(data).item() for _ in range(2)]
        return losses, weights(engine), (random.random(), np.random.rand(), SCALE.get())


@pytest.mark.parametrize(
    "on", ["context variable", "batch norm", "random numbers", "losses in a list", "hook of the model"]
)
def test_state_that_forwards_begin_to_keep_later_is_in_the_order_of_a_loop(on: str, nvme_path: Path) -> None:
    def trained(schedule: str) -> tuple[Any, ...]:
        return contextvars.copy_context().run(after_switching, on, nvme_path, schedule)

    expected, found = trained("horizontal"), trained("auto")
    assert_same(expected, found)
    assert expected[2] == found[2]
    if on == "context variable":
        with pytest.raises(infinity.ConfigError, match=r"context variable SCALE.*set infinity.schedule to"):
            trained("vertical")


def test_what_only_the_first_forward_keeps_costs_one_step_of_the_vertical_schedule(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="infinity"):
        assert_same(train(Caching, nvme_path, steps=3, schedule="horizontal"), train(Caching, nvme_path, steps=3))
    assert not [record for record in caplog.records if 'is "horizontal" here' in record.getMessage()]


def test_micro_batches_that_would_not_fit_go_one_after_the_other(
    nvme_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = itertools.count(0, 400 << 20)  # a block takes 400 MiB
    monkeypatch.setattr("infinity.runtime.micro_batches.taken_bytes", lambda: next(taken))
    monkeypatch.setattr("infinity.runtime.micro_batches.available_bytes", lambda: 1000 << 20)
    with caplog.at_level(logging.INFO, logger="infinity"):
        fallen_back = train(lambda: Model(layers=4), nvme_path)
    said = [record.getMessage() for record in caplog.records if 'is "horizontal" here' in record.getMessage()]
    assert len(said) == 1 and "would take 1.17 GiB, and 1000.00 MiB is available" in said[0]
    assert_same(train(lambda: Model(layers=4), nvme_path, schedule="horizontal"), fallen_back)


def test_as_many_are_at_once_as_take_no_more_than_plain_pytorch(
    nvme_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> nn.Module:
        return Model(layers=4)

    # There is plenty of memory. A block takes 600 MiB in the first pass, and all states are less than 1 GiB.
    monkeypatch.setattr("infinity.runtime.micro_batches.available_bytes", lambda: 1 << 40)
    for schedule, said in (
        (
            "auto",
            "2 of 4 micro-batches at once: saved activations would take 1.76 GiB, and plain PyTorch takes 1.00 GiB more",
        ),
        (
            "vertical",
            "4 micro-batches at once: saved activations would take 1.76 GiB, and plain PyTorch takes 1.00 GiB more",
        ),
    ):
        taken = itertools.chain([0, 600 << 20], itertools.repeat(0))
        monkeypatch.setattr("infinity.runtime.micro_batches.taken_bytes", lambda it=taken: next(it))
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="infinity"):
            trained = train(model, nvme_path, schedule=schedule, accumulation=4)
        assert len([record for record in caplog.records if said in record.getMessage()]) == 1
        assert_same(train(model, nvme_path, schedule="horizontal", accumulation=4), trained)


@pytest.mark.parametrize("little", [-9.0, 9.0])
def test_auto_is_horizontal_if_more_at_once_would_save_little(
    little: float, nvme_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.runtime.micro_batches._SAVED_BYTES", 0)  # no model is too small to try
    monkeypatch.setattr("infinity.runtime.micro_batches._LITTLE", little)
    monkeypatch.setattr("infinity.runtime.micro_batches.taken_bytes", lambda: 0)
    at_once, forward = [], Vertical.forward

    def noted(self: Vertical, calls: Sequence[Any], *args: Any, **others: Any) -> bool:
        at_once.append(len(calls))
        return forward(self, calls, *args, **others)

    with caplog.at_level(logging.INFO, logger="infinity"):
        expected = train(Model, nvme_path, steps=8, accumulation=4, schedule="vertical")
        monkeypatch.setattr(Vertical, "forward", noted)
        trained = train(Model, nvme_path, steps=8, accumulation=4)
    assert at_once == [2] * 6 + ([4] * 2 if little < 0 else [])
    assert ("less memory" in caplog.text) is (little > 0)
    assert_same(expected, trained)


@pytest.mark.parametrize("accumulation", [1, 2, 16])
def test_a_step_moves_as_many_bytes_for_any_number_of_micro_batches(accumulation: int, nvme_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 512), nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))))

    moved = []
    with start(make, nvme_path, accumulation=accumulation, schedule="vertical", pinned_bytes_max="8MiB") as engine:
        data = itertools.repeat((torch.ones(1, 8), torch.zeros(())))
        for _ in range(5):
            before = engine.swap_stats()
            engine.train_batch(data, loss_fn=lambda output, target: (output.float() - target).square().mean())
            assert engine.swap is not None
            engine.swap.stager.settle_all()
            after = engine.swap_stats()
            assert before is not None and after is not None
            read, written = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
            moved.append((read / engine.shard_numel, written / engine.shard_numel))
    for read, written in moved[2:]:
        assert 12 <= read <= 14.5
        assert 11.9 <= written <= 12.3


class Interrupts(Model):
    """Raises at a given place, in the forward or backward of a block."""

    at: int | None = None
    calls = itertools.count(1)

    def call(self, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        hidden = super().call(block, hidden, mask)[0]
        self.interrupt()
        hidden.register_hook(lambda grad: self.interrupt()) if hidden.requires_grad else None
        return hidden, None

    def interrupt(self) -> None:
        if next(self.calls) == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("schedule", ["vertical", "auto"])
@pytest.mark.parametrize("at", range(1, 19, 3))
def test_a_step_that_an_exception_ended_is_taken_again(at: int, schedule: str, nvme_path: Path) -> None:
    """3 micro-batches x 3 blocks, forward and backward. A vertical step that has applied gradients is torn, and says so."""
    expected = train(Interrupts, nvme_path, schedule=schedule)
    with start(Interrupts, nvme_path, schedule=schedule) as engine:
        data, losses = batches(), []
        losses.append(engine.train_batch(data).item())
        micro_batches = list(itertools.islice(data, 3))
        torch_state = torch.get_rng_state()
        model = engine.module
        model.at, model.calls = at, itertools.count(1)
        with pytest.raises(KeyboardInterrupt):
            engine.train_batch(iter(micro_batches))
        model.at = None
        torch.set_rng_state(torch_state)
        with contextlib.suppress(infinity.InfinityError):
            engine.zero_grad()
        if engine.health.state is Health.TORN:  # some groups were updated already, to stay
            assert schedule == "vertical" and at > 9
            with pytest.raises(infinity.InfinityError, match="torn"):
                engine.train_batch(iter(micro_batches))
            return
        losses.append(engine.train_batch(iter(micro_batches)).item())
        losses += [engine.train_batch(data).item() for _ in range(2)]
        losses.append(engine.eval_batch(batches(9)).item())
        assert_same(expected, (losses, weights(engine)))


@pytest.mark.parametrize("make", [Model, Checkpointed], ids=["plain", "checkpointed"])
def test_saved_activations_of_all_micro_batches_wait_on_nvme(make: Callable[[], nn.Module], nvme_path: Path) -> None:
    offload = {"device": "nvme", "bytes_min": 100, "buffer_bytes": "1MiB"}
    expected = train(make, nvme_path, schedule="horizontal")
    assert_same(expected, train(make, nvme_path, schedule="vertical", offload_activations=offload))


def test_the_report_of_operations_counts_all_micro_batches(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for schedule in ("horizontal", "vertical"):
        with start(Model, nvme_path, schedule=schedule, profile=True) as engine:
            data = batches()
            for _ in range(3):
                engine.train_batch(data)
        reports.append(capsys.readouterr().out)
    assert "of its first micro-batch on rank 0" in reports[0] and "of its 3 micro-batches on rank 0" in reports[1]


def test_evaluation_and_loops_between_vertical_steps(nvme_path: Path) -> None:
    def mixed(schedule: str) -> tuple[Any, ...]:
        with start(Model, nvme_path, schedule=schedule, clipping=0.3) as engine:
            data, losses = batches(), []
            for step in range(6):
                losses.append(engine.train_batch(data).item())
                if step % 2:
                    losses.append(engine.eval_batch(batches(step)).item())
                    for tokens in itertools.islice(data, 3):
                        engine.backward(engine(tokens)["loss"])
                        engine.step()
            return losses, weights(engine)

    assert_same(mixed("horizontal"), mixed("auto"))


def test_a_step_after_a_boundary_that_the_caller_set_is_taken(nvme_path: Path) -> None:
    with start(Model, nvme_path) as engine:
        data = batches()
        for _ in range(2):
            engine.backward(engine(next(data))["loss"])
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        engine.train_batch(data)
        assert engine.global_steps == 2


def test_a_random_loss_draws_from_the_stream_of_its_micro_batch(nvme_path: Path) -> None:
    def loss_fn(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        logits = F.dropout(outputs["logits"].float(), 0.3)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    outcomes = []
    for schedule in ("horizontal", "vertical"):
        with start(lambda: Model(dropout=0.2), nvme_path, schedule=schedule) as engine:
            data = ((tokens, tokens) for tokens in batches())
            losses = [engine.train_batch(data, loss_fn=loss_fn).item() for _ in range(3)]
            outcomes.append((losses, weights(engine)))
    assert_same(*outcomes)


@pytest.mark.parametrize("make", [Model, Unused], ids=["plain", "unused"])
def test_an_engine_that_trained_whole_steps_is_collected(make: Callable[[], nn.Module], nvme_path: Path) -> None:
    engine = start(make, nvme_path, schedule="vertical")
    some_steps(engine)
    engine.close()
    left = [weakref.ref(part) for part in (engine, engine.module, engine.optimizer, engine.swap)]
    del engine
    for _ in range(3):  # what tensors hold is seen when they are gone
        gc.collect()
    assert [part() for part in left] == [None] * 4


def test_what_train_batch_refuses(nvme_path: Path) -> None:
    with start(Model, nvme_path, schedule="vertical") as engine:
        before = weights(engine)
        with pytest.raises(StopIteration, match="after 2 of the 3 micro-batches"):
            engine.train_batch(itertools.islice(batches(), 2))
        with pytest.raises(TypeError, match=r"is a list: make an iterator of it once"):
            engine.train_batch(list(itertools.islice(batches(), 3)))  # type: ignore[arg-type]
        with pytest.raises(infinity.ConfigError, match="needs data_iter"):
            engine.train_batch()
        with pytest.raises(infinity.ConfigError, match=r'"vertical" runs all micro-batches.*call engine.train_batch'):
            engine.backward(engine(next(batches()))["loss"])
        with pytest.raises(TypeError, match=r"micro-batch is \(inputs, labels\), got a Tensor"):
            engine.train_batch(batches(), loss_fn=lambda output, labels: output)
        after = weights(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert engine.global_steps == 0
        engine.train_batch(batches())
    with start(Model, nvme_path) as engine:
        engine.backward(engine(next(batches()))["loss"])
        with pytest.raises(infinity.InfinityError, match=r"this one has begun: call step\(\) or zero_grad\(\) first"):
            engine.train_batch(batches())
        engine.zero_grad()
        engine.train_batch(batches())


def test_the_loader_that_initialize_made_is_gone_through_again_and_again(nvme_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.arange(4 * TOKENS).reshape(4, TOKENS) % WORDS
    engine, _, loader, _ = infinity.initialize(
        model=Model(),
        training_data=list(tokens),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(nvme_path)}},
            "infinity": {"pinned_bytes_max": "16MiB"},
        },
    )
    with engine:
        assert len(loader) == 2
        assert len({engine.train_batch().item() for _ in range(4)}) == 4
        assert engine.global_steps == 4
