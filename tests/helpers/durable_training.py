"""A training whose steps are committed and that is broken off again and again; it must end as if it never had been.

Used by the tests, in their process and as a script under torchrun: `durable_training.py FOLDER`.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import infinity

STEPS = 7
BREAKS = ((2, ""), (4, "forward"), (5, "backward"))
"""After which step the training is broken off, and in the middle of what."""


class Crash(Exception):
    """What breaks a training off."""


@dataclass(frozen=True)
class Case:
    update: str = "forward"
    master: str = "split"
    clipping: float = 0.0
    accumulation: int = 1
    fp16: bool = False
    frozen: bool = False
    threshold: int = 100
    parameters_on: str = "nvme"
    sub_group_size: int = 4096
    meta: bool = False
    gradient_bytes_max: int | str = "auto"
    optimizer: str = "AdamW"
    moments: str = "fp32"


CASES = {
    "step": Case(update="step", clipping=1.0),
    "step, masters in full": Case(update="step", master="full", accumulation=2),
    "forward": Case(accumulation=2, clipping=1.0),
    "forward, masters in full": Case(master="full", threshold=0),
    "backward": Case(update="backward"),
    "backward, masters in full": Case(update="backward", master="full", threshold=0, meta=True),
    "fp16 that skips steps": Case(fp16=True, clipping=0.5),
    "frozen parameters": Case(frozen=True, meta=True),
    "gradients on NVMe": Case(clipping=1.0, gradient_bytes_max=0, threshold=0),
    "copies in host memory": Case(parameters_on="none", sub_group_size=8192),
    "SGD": Case(optimizer="SGD", accumulation=2),
    "SGD without momentum": Case(optimizer="SGD without momentum", update="backward", threshold=0),
    "Muon": Case(optimizer="Muon", clipping=1.0, threshold=0),
    "Muon, backward": Case(update="backward", optimizer="Muon", clipping=1.0, threshold=0),
    "bf16 moments": Case(moments="bf16", clipping=1e3, threshold=0),
    "8-bit moments": Case(moments="8bit", clipping=1e3, threshold=0),
}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"weight_decay": 0.1}},
    "SGD": {"type": "SGD", "params": {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3}},
    "SGD without momentum": {"type": "SGD", "params": {"weight_decay": 0.1}},
    "Muon": {"type": "Muon", "params": {"momentum": 0.9}},
}


ON_SEVERAL_RANKS = ("backward", "Muon, backward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.odd = nn.Linear(64, 7)  # uneven over two ranks
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x)))) + self.odd(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64, affine=False)
        if case.frozen:
            self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x.float())


def config(path: Path | str | list[str], case: Case, **own: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": path if isinstance(path, list) else str(path)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "bf16": {"enabled": not case.fp16},
        "fp16": {"enabled": case.fp16, "initial_scale_power": 24, "hysteresis": 1},
        "optimizer": OPTIMIZERS[case.optimizer],
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "aio": {"block_size": 16384},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": case.sub_group_size,
            "stage3_param_persistence_threshold": case.threshold,
            "offload_param": place if case.parameters_on == "nvme" else {"device": "none"},
            "offload_optimizer": place,
        },
        "infinity": {
            "pinned_bytes_max": "12MiB",
            "update": case.update,
            "master_weights": case.master,
            "moments_dtype": case.moments,
            "durability": "step",
            "gradient_bytes_max": case.gradient_bytes_max,
            **own,
        },
    }


def make(path: Path | str | list[str], case: Case, *, resume: Any = False, **own: Any) -> infinity.Engine:
    torch.manual_seed(0)
    with torch.device("meta" if case.meta else "cpu"):
        model = Model(case)
    engine, *_ = infinity.initialize(model=model, config=config(path, case, **own), resume=resume)
    return engine


def batch(number: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * number + 10 * micro + dist.get_rank()))


def step(engine: infinity.Engine, *, until: str = "") -> list[float]:
    """The next step, or a part of it: its losses and the norm of its gradient."""
    number = engine.global_steps
    losses = []
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(batch(number, micro)).square().sin().mean()
        losses.append(loss.item())
        if until == "forward":
            break
        engine.backward(loss)
        if until == "backward":
            break
        if engine.is_gradient_accumulation_boundary():
            engine.client_state = {"batches": number + 1}
        engine.step()
    norm = engine.get_global_grad_norm()
    return [*losses, norm if norm is not None and norm == norm else -1.0]


def evaluate(engine: infinity.Engine) -> None:
    """A forward without a backward, which leaves the root's parameters gathered."""
    engine.eval()
    with torch.no_grad():
        engine(batch(0, 0))
    engine.train()


def weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    found = {name: value.full_tensor() + 0 for name, value in engine.module.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


Outcome = tuple[list[list[float]], dict[str, torch.Tensor]]


def whole(path: Path, case: Case) -> Outcome:
    """The training without a break, and without commits."""
    with make(path, case, durability="none") as engine:
        losses = [step(engine) for _ in range(STEPS)]
        assert (engine.skipped_steps > 0) == case.fp16
        return losses, weights(engine)


def broken(path: Path, case: Case) -> Outcome:
    """The same, interrupted and resumed at each of BREAKS."""
    losses: list[list[float]] = []
    for stop, middle in BREAKS:
        try:
            with make(path, case, resume=True) as engine:
                go_on(engine, losses, stop)
                if middle:
                    step(engine, until=middle)
                raise Crash
        except Crash:
            pass
    with make(path, case, resume=True) as engine:
        go_on(engine, losses, STEPS)
        return losses, weights(engine)


def go_on(engine: infinity.Engine, losses: list[list[float]], stop: int) -> None:
    first = engine.global_steps
    assert len(losses) - 1 <= first <= len(losses), f"at step {first} after {len(losses)}"
    assert engine.client_state == ({"batches": first} if first else {})
    del losses[first:]
    while engine.global_steps < stop:
        losses.append(step(engine))


def differences(expected: Outcome, got: Outcome) -> list[str]:
    """What differs in any bit."""
    found = [f"step {i}: {a} and {b}" for i, (a, b) in enumerate(zip(expected[0], got[0], strict=True)) if a != b]
    return found + [name for name in expected[1] if not torch.equal(expected[1][name], got[1][name])]


def main() -> int:
    dist.init_process_group("gloo")
    folder, failed = Path(sys.argv[1]), 0
    for name in ON_SEVERAL_RANKS:
        case = CASES[name]
        place = folder / name.replace(" ", "-").replace(",", "")
        wrong = differences(whole(place, case), broken(place, case))
        failed += bool(wrong)
        print(f"rank {dist.get_rank()} {name}: {wrong[:3] or 'equal'}", flush=True)
        dist.barrier()
        shutil.rmtree(place, ignore_errors=True)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
