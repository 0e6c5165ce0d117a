"""A small training whose every step is known, and the same as a program: `scene.py FOLDER [--save DIR] [--steps N] ...`.

The program prints "ready", then a line per step with its loss to the last bit. With `--durable` its steps are committed, and it
resumes from the last one; `--die` kills it at one instant of a commit.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from staying import SHARES, staying
from torch import nn

import infinity
from infinity.aio import File
from infinity.checkpoint.commits import Commits
from infinity.store import files
from infinity.store.durable import DurableRun

STEPS = 4
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
IO_URING_SETUP = 425


@dataclass(frozen=True)
class Way:
    """How a step is taken."""

    update: str
    clipping: float = 1.0
    micro_batches: int = 1  # several: in the vertical schedule
    optimizer: str = "AdamW"
    moments: str = "fp32"  # on NVMe


WAYS = {
    **{update: Way(update) for update in ("auto", "step", "forward")},
    "backward": Way("backward", clipping=0.0),
    "speculative": Way("backward", clipping=7.0),  # clips one of four steps
    "vertical": Way("backward", clipping=7.0, micro_batches=3),
    "Muon": Way("backward", clipping=7.0, optimizer="Muon"),
    "8-bit": Way("backward", clipping=7.0, moments="8bit"),
}


def config(path: Path | None, way: Way) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(path)} if path else {"device": "none"}
    return {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": way.micro_batches,
        "gradient_clipping": way.clipping,
        "optimizer": {"type": way.optimizer, "params": {"lr": 0.01}},
        "aio": {"block_size": 16384, "queue_depth": 4},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 8192,
        },
        "infinity": {
            "pinned_bytes_max": "12MiB",
            "update": way.update,
            "moments_dtype": way.moments if path else "fp32",
            "schedule": "vertical" if way.micro_batches > 1 and path else "auto",
        },
    }


class Model(nn.Module):
    """Three blocks of which each is a group."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(96, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def make(path: Path | None, way: str = "auto", *, resume: bool = False, **own: Any) -> infinity.Engine:
    torch.manual_seed(0)
    settings = config(path, WAYS[way])
    settings["infinity"] |= own
    with staying(SHARES[(1 + [*WAYS].index(way)) % len(SHARES)]):
        engine, *_ = infinity.initialize(model=Model(), config=settings, resume=resume)
    return engine


def step(engine: infinity.Engine, number: int) -> float:
    x, *more = torch.randn(engine.gradient_accumulation_steps(), 4, 16, generator=torch.Generator().manual_seed(number))
    if more:
        batches = ((x, x) for x in (x, *more))
        return engine.train_batch(batches, loss_fn=lambda y, _: y.float().square().mean()).item()
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() + 0 for name, value in engine.state_dict().items()}


def train(args: argparse.Namespace) -> None:
    """The program. On one thread: that is faster for such small tensors, most of all next to other work."""
    torch.set_num_threads(1)
    if args.no_io_uring:
        refuse_io_uring()
    if args.ranks > 1:
        os.environ |= {"RANK": str(args.rank), "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": str(args.rank)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(args.port)}
    if args.die:
        die_at(*args.die.split(":"))
    own = {"durability": "step"} if args.durable else {}
    engine = make(Path(args.folder), args.way, resume=args.durable, **own)
    with engine:
        assert engine.swap is not None
        say("ready", engine.swap.backend, "; ".join(engine.swap.notes))
        if args.resume and not args.durable:
            engine.load_checkpoint(args.save)
        while engine.global_steps < args.steps:
            number = engine.global_steps
            say("step", number, step(engine, number).hex())
            if args.save:
                engine.save_checkpoint(args.save)
    say("done")


def say(*words: object) -> None:
    """A line, in one piece: another rank may write to the same pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


INSTANTS: dict[str, tuple[Any, str, bool]] = {
    "before the sync": (File, "sync", False),
    "before the record": (files, "write_durably", False),
    "before its name": (Path, "rename", False),
    "after its name": (Path, "rename", True),
    "before the barrier": (DurableRun, "write", True),
    "after the barrier": (DurableRun, "leave_one", False),
    "after the older went": (DurableRun, "leave_one", True),
    "after the commit": (Commits, "make", True),
}
"""Of a commit, in their order: whose call, and whether the instant is after it."""


def die_at(instant: str, count: str) -> None:
    """From now on, kill this process at that instant, when it comes for the `count`th time since the first step's commit began.

    Blanks of the instant are given as underscores.
    """
    owner, name, after = INSTANTS[instant.replace("_", " ")]
    commits = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal commits
        commits += args[0]._pending is not None
        return make_commit(*args, **kwargs)

    make_commit: Callable[..., Any] = Commits.make
    Commits.make = counted  # type: ignore[method-assign]
    original = getattr(owner, name)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        due = commits == int(count)
        if due and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if commits == int(count) and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def refuse_io_uring() -> None:
    """As the seccomp profile of a container does: io_uring_setup is not permitted from now on."""
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (load, 0, 0, 0),  # the number of the system call
            (jump_if_equal, 0, 1, IO_URING_SETUP),
            (give, 0, 0, 0x00050000 | 1),  # EPERM
            (give, 0, 0, 0x7FFF0000),  # go on
        )
    )
    text = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--save")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--way", choices=WAYS, default="auto")
    parser.add_argument("--die", metavar="INSTANT:COUNT")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--no-io-uring", action="store_true")
    return parser


if __name__ == "__main__":
    train(parser().parse_args())
