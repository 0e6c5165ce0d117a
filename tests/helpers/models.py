"""Six standard models, and the record of three of their steps after a warm-up.

`models.py NAME FOLDER RECORD` is one of several ranks: it uses FOLDER as its drive and writes its record to RECORD.<rank>.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from recorder import Record, recording
from safetensors.torch import save_file
from torch import nn

import infinity

WARM_UP, STEPS, BLOCKS = 3, 3, 5
WIDTH, WORDS = 256, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """(batch, tokens) of word numbers to a loss."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(BLOCKS))
        if tied:
            self.head.weight = self.embedding.weight

    def make_block(self) -> nn.Module:
        return Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


class Expert(nn.Linear):
    """A group of its own, gathered if a token is routed to it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).tanh()


class MixtureBlock(nn.Module):
    """Each batch goes to two of four experts, by its first tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, hidden: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        inner = self.norm(hidden)
        return hidden + sum(self.experts[number](inner) for number in chosen)


class Mixture(Model):
    def make_block(self) -> nn.Module:
        return MixtureBlock()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, chosen = self.embedding(tokens), sorted({int(word) % 4 for word in tokens[0, :2]})
        for block in self.blocks[:2]:
            hidden = block(hidden, chosen)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


class AdaptedBlock(Block):
    """A frozen block with a trained map of small rank."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + self.lora_b(self.lora_a(hidden))


class Adapted(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)

    def make_block(self) -> nn.Module:
        return AdaptedBlock()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = Model
    ranks: int = 1
    micro_batches: int = 1
    clipping: float = 0.0
    weights_in_files: bool = False
    evaluates: bool = False
    """Whether a forward without gradients follows each step."""
    wrap: tuple[str, ...] = ("Block",)
    own: dict[str, Any] = field(default_factory=dict)


CASES = {
    "dense": Case(clipping=1e6),
    "tied": Case(lambda: Model(tied=True), evaluates=True, own={"update": "forward"}),
    "mixture": Case(Mixture, wrap=("Expert",), own={"update": "step"}),
    "adapters": Case(Adapted, weights_in_files=True, wrap=("AdaptedBlock",)),
    "vertical": Case(micro_batches=4, clipping=1e6),
    "two_ranks": Case(ranks=2, clipping=1e6),
}


def record(name: str, folder: Path) -> list[str]:
    """The lines of this rank."""
    case = CASES[name]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = case.make()
    weights = None
    if case.weights_in_files:
        weights = folder / f"weights{dist.get_rank()}"
        weights.mkdir()
        tensors = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
        save_file(tensors, weights / "model.safetensors")
    place = {"device": "nvme", "nvme_path": str(folder)}
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 1000,
            "sub_group_size": 1 << 16,
        },
        "infinity": {"wrap": [*case.wrap], "pinned_bytes_max": "8MiB", **case.own},
    }
    trace = Record()
    steps = []
    with recording(trace):
        engine, *_ = infinity.initialize(model=model, weights=weights, config=config)
        with engine:
            for number in range(WARM_UP + STEPS):
                if number == WARM_UP:
                    engine.swap._trace_into(trace)
                trace.lines = []
                _step(engine, case, number, trace)
                steps.append(trace.lines)
            trace.lines = []  # the end drops what is staged
            engine.swap._trace_into(None)
    lines = []
    for number in range(WARM_UP, WARM_UP + STEPS):
        lines.append(f"step {number}")
        repeats = number > WARM_UP and steps[number] == steps[number - 1]
        lines += [f"  as step {number - 1}"] if repeats else steps[number]
    return lines


def _step(engine: infinity.Engine, case: Case, number: int, trace: Record) -> None:
    batches = [_tokens(10 * number + place) for place in range(case.micro_batches)]
    if case.micro_batches > 1:
        engine.train_batch(iter(batches))
    else:
        engine.backward(engine(batches[0]))
        trace.lines.append("  step()")
        engine.step()
    if case.evaluates:
        trace.lines.append("  evaluation")
        with torch.no_grad():
            engine.eval()(batches[0])
        engine.train()


def _tokens(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randint(0, WORDS, (2, 4), generator=generator)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    text = "\n".join(record(sys.argv[1], Path(sys.argv[2])))
    Path(f"{sys.argv[3]}.{dist.get_rank()}").write_text(text + "\n")
    dist.destroy_process_group()
