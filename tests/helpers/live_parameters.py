"""What is gathered, sampled whenever FSDP2 gathers or releases a group. As ranks, `live_parameters.py FOLDER [all]`.

The sampler looks at FSDP2's own state, and at the memory behind it; it knows nothing of plans.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import checkpoint

import infinity

WIDTH = 64
BLOCKS = 6
VOCABULARY = 128
ROOT_NUMEL = VOCABULARY * WIDTH
BLOCK_NUMEL = 8 * WIDTH * WIDTH
MODEL_NUMEL = ROOT_NUMEL + BLOCKS * BLOCK_NUMEL
STEPS = 5


class Sampler:
    """The elements gathered, or on their way, after each change; `peak` is the most there ever were."""

    def __init__(self) -> None:
        self.groups: set[FSDPParamGroup] = set()
        self.samples = 0
        self.peak = 0

    def look(self) -> None:
        live = gathered = 0
        for group in self.groups:
            on_the_way = group._all_gather_result is not None and dist.get_world_size() > 1  # a stand-in on one rank
            numel = sum(p._orig_size.numel() for p in group.fsdp_params)
            live += numel if group.is_unsharded or on_the_way else 0
            in_place = not any(out.numel() for p in group.fsdp_params for out in p.all_gather_outputs)
            gathered += numel if group.is_unsharded and not in_place else 0  # in place it is where it was staged
        held = sum(
            out.untyped_storage().size() // out.itemsize
            for group in self.groups
            for param in group.fsdp_params
            for out in (*param.all_gather_outputs, *param._unsharded_inner_tensors)
        )
        assert held == gathered, "the gathered groups are not those that FSDP2 holds memory for"
        self.samples += 1
        self.peak = max(self.peak, live)


@contextlib.contextmanager
def sampled() -> Iterator[Sampler]:
    sampler = Sampler()

    def looking(method: Any) -> Any:
        @functools.wraps(method)
        def call(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            sampler.groups.add(group)
            result = method(group, *args, **kwargs)
            sampler.look()
            return result

        return call

    with contextlib.ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard", "_to_sharded", "finalize_backward"):
            stack.enter_context(mock.patch.object(FSDPParamGroup, name, looking(getattr(FSDPParamGroup, name))))
        yield sampler


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A tied embedding in the root group, and blocks; each may be left out of a pass, and checkpointed as a whole."""

    def __init__(self, checkpointing: bool = False, aside: Collection[int] = ()) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.aside = aside
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for number in aside:
            self.blocks[number].requires_grad_(False)

    def forward(self, x: torch.Tensor, without: Collection[int] = (), again: Sequence[int] = ()) -> torch.Tensor:
        h = self.embedding(x)
        for number in (*range(BLOCKS), *again):
            block = self.blocks[number]
            if number in without:
                continue
            if number in self.aside:
                h = h + block(h.detach())
            else:
                h = checkpoint(block, h, use_reentrant=False) if self.checkpointing and self.training else block(h)
        return self.head(h)


@dataclass(frozen=True)
class Case:
    """A training. `without`: the blocks that a forward leaves out, pass after pass in turn."""

    live: int | str = "auto"
    reuse: int | str = "auto"
    prefetch: int | str = "auto"
    accumulation: int = 1
    checkpointing: bool = False
    evaluate: bool = False
    offload: str = "nvme"
    wrap: tuple[str, ...] | str = "auto"
    without: tuple[tuple[int, ...], ...] = ((),)
    again: tuple[int, ...] = ()
    """Blocks that a forward uses a second time."""
    aside: tuple[int, ...] = ()
    """Frozen blocks on a side branch: they run in the forward, and take no part in the backward."""
    update: str = "auto"


LEAST = ROOT_NUMEL + BLOCK_NUMEL
CASES = {
    "as FSDP2 does by itself": Case(),
    "one group at a time": Case(LEAST, accumulation=2, evaluate=True),
    "one group at a time, asked for more": Case(LEAST, 10**9, 10**9, accumulation=2, evaluate=True, checkpointing=True),
    "three groups, all of them kept": Case(LEAST + 2 * BLOCK_NUMEL, 10**9, 0, accumulation=2, evaluate=True),
    "three groups, far ahead": Case(LEAST + 2 * BLOCK_NUMEL, 0, 10**9, accumulation=2, evaluate=True),
    "some kept, some ahead": Case(
        LEAST + 3 * BLOCK_NUMEL, 2 * BLOCK_NUMEL, BLOCK_NUMEL, evaluate=True, checkpointing=True
    ),
    "kept between micro-batches": Case(LEAST + 3 * BLOCK_NUMEL, 4 * BLOCK_NUMEL, accumulation=3, evaluate=True),
    "everything kept": Case(10**9, 10**9, 10**9, accumulation=2, evaluate=True, checkpointing=True),
    "in memory": Case(LEAST + BLOCK_NUMEL, 10**9, 10**9, accumulation=2, evaluate=True, offload="none"),
    "in host memory": Case(LEAST, accumulation=2, evaluate=True, offload="cpu"),
    "finer groups": Case(ROOT_NUMEL + BLOCK_NUMEL // 2, 10**9, 10**9, evaluate=True),
    "finer groups, in blocks": Case(LEAST, 10**9, 10**9, evaluate=True, wrap=("Mlp", "Linear")),
    "another path each time": Case(
        LEAST + 2 * BLOCK_NUMEL, 0, 2 * BLOCK_NUMEL, evaluate=True, without=((), (1, 2), (0, 4), (5,), (3,))
    ),
    "another path twice": Case(
        LEAST + 2 * BLOCK_NUMEL, 4 * BLOCK_NUMEL, 2 * BLOCK_NUMEL, evaluate=True, without=((), (), (1,), (1,), (1,))
    ),
    "blocks used twice": Case(LEAST + 2 * BLOCK_NUMEL, 2 * BLOCK_NUMEL, BLOCK_NUMEL, evaluate=True, again=(1, 4)),
    "a frozen tower": Case(LEAST + BLOCK_NUMEL, evaluate=True, aside=(2, 3)),
    "a frozen tower, far ahead": Case(LEAST + 2 * BLOCK_NUMEL, 0, 2 * BLOCK_NUMEL, accumulation=2, aside=(1, 2)),
}

ON_SEVERAL_RANKS = (
    "some kept, some ahead",
    "another path each time",
)
"""Where the others' gathers could meet a bound of one's own; each takes seconds there."""


def settings(case: Case, nvme_path: str) -> dict[str, Any]:
    place = {"device": case.offload, **({"nvme_path": nvme_path} if case.offload == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": case.live,
            "stage3_max_reuse_distance": case.reuse,
            "stage3_prefetch_bucket_size": case.prefetch,
        },
        "infinity": {"pinned_bytes_max": "16MiB", "wrap": case.wrap, "update": case.update},
    }


def train(case: Case, nvme_path: str) -> tuple[list[float], Sampler, list[int]]:
    """Losses and weights of a training; what was gathered; bytes read in each step, a value that is only so with NVMe."""
    torch.manual_seed(0)
    model = Model(case.checkpointing, case.aside)
    engine, *_ = infinity.initialize(model=model, config=settings(case, nvme_path))
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    seen: list[float] = []
    reads = [0]
    with engine, sampled() as sampler:
        for step in range(STEPS):
            x = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
            for _ in range(case.accumulation):
                logits = engine(x, case.without[step % len(case.without)], case.again)
                loss = F.cross_entropy(logits.float().flatten(0, 1), x.flatten())
                engine.backward(loss)
                seen.append(loss.item())
                if case.evaluate:
                    seen.append(evaluate(engine, x))
                engine.step()
            norm = engine.get_global_grad_norm()
            assert norm is not None
            seen.append(norm)
            reads.append(bytes_read(engine))
        seen += [float(p.detach().full_tensor().double().sum()) for p in released(engine.module).parameters()]
    return seen, sampler, [after - before for before, after in itertools.pairwise(reads)]


def evaluate(engine: infinity.Engine, x: torch.Tensor) -> float:
    """Between backward and step, where what it leaves gathered would be stale after the step."""
    engine.eval()
    with torch.no_grad():
        value = float(engine(x).float().square().mean())
    engine.train()
    return value


def released(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def bytes_read(engine: infinity.Engine) -> int:
    """So far, with what was on its way when the step ended."""
    if engine.swap is None:
        return 0
    for chunk in engine.swap.stager._leased:
        for transfer in chunk.transfers:
            transfer.wait()
    return engine.swap.stats().read_bytes


def reference(case: Case) -> Case:
    """The same training without a bound, in memory."""
    return Case(
        accumulation=case.accumulation,
        checkpointing=case.checkpointing,
        evaluate=case.evaluate,
        offload="none",
        without=case.without,
        aside=case.aside,
        again=case.again,
    )


def check(name: str, nvme_path: str) -> None:
    case = CASES[name]
    expected, _, _ = train(reference(case), nvme_path)
    got, sampler, _ = train(case, nvme_path)
    assert got == expected, f"{name}: {got} and {expected}"
    assert sampler.samples > STEPS * 2 * BLOCKS
    bound = MODEL_NUMEL if case.live == "auto" else int(case.live)
    assert LEAST - BLOCK_NUMEL // 2 <= sampler.peak <= bound, f"{name}: {sampler.peak} gathered, {bound} allowed"
    print(f"rank {dist.get_rank()}: {name}: {sampler.peak} of {bound}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    for name in CASES if sys.argv[2:] == ["all"] else ON_SEVERAL_RANKS:
        check(name, sys.argv[1])
    dist.destroy_process_group()
    print("the bound held", flush=True)


if __name__ == "__main__":
    main()
