"""Trains a few steps with a part of the state cached, and compares the bytes of a step with the optimum. A script for several
ranks too."""

from __future__ import annotations

import sys
from fractions import Fraction

import torch
import torch.distributed as dist
from quiet import come_to_rest
from staying import staying
from torch import nn

import infinity
from infinity.plan.estimate import states_of
from infinity.plan.strategy import STRATEGIES
from infinity.schedule.residency import Candidate, choose_resident, moved_bytes
from infinity.schedule.scheme import APART, Scheme
from infinity.store.layout import SPACE_ALIGN

HIDDEN = 128
BLOCKS = 4
STEPS = 3
SHARES = [Fraction(0), Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(9, 10), Fraction(1)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Every shard is whole pages, so that the bytes of a step are those of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return h


OPTIMIZERS = {
    2: {"type": "AdamW", "params": {"lr": 1e-3}},
    1: {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
    0: {"type": "SGD", "params": {"lr": 1e-3}},
}
"""By how many numbers they keep of each element."""


def cache_bytes_for(share: Fraction, numel: int, moments: int) -> int:
    """About `share` of the state (12 bytes per element with Adam): whole pages of copies, then of the rest."""
    nbytes, copies = int(share * (4 + 4 * moments) * numel), 2 * numel
    unit = SPACE_ALIGN * (2 + 4 * moments if nbytes > copies else 2)
    return copies + (nbytes - copies) // unit * unit


def optimum(ranks: int, cache_bytes: int, update: str, moments: int) -> tuple[int, int]:
    """Return the fewest bytes (read, written) of a step on one rank.

    In addition to the state, copies are read twice: for forward or with the update before it, and for backward, where they
    stay for the update in it, speculative or not. With a look-ahead of one group (of two, where an update in the backward
    needs them) the last block's copy, or that of the last two, stays in the pool from forward to backward. The embedding,
    which stays gathered, is read for the gather alone where that is updated first, and for the update in the backward again.
    """
    embedding, block = 256 * HIDDEN // ranks, 8 * HIDDEN * HIDDEN // ranks
    eager = update != "forward"
    stay = 1 + eager
    copies = [(embedding, 1 + eager), *[(block, 2)] * (BLOCKS - stay), *[(block, 1)] * stay]
    parts = [Candidate(2 * numel, 1, reads, 1) for numel, reads in copies]
    parts.append(Candidate((2 + 4 * moments) * (embedding + BLOCKS * block), 1, 1, 1))
    return moved_bytes(parts, choose_resident(parts, cache_bytes))


def updated_early(ranks: int, cache_bytes: int) -> int:
    """Elements whose updates are speculative: of all groups but the one that is left to the forward, those of which nothing is
    cached. Compute parameters are cached first, those of the first groups before others."""
    groups = [256 * HIDDEN // ranks, *[8 * HIDDEN * HIDDEN // ranks] * BLOCKS]
    cached, early = cache_bytes // 2, 0
    for index, numel in enumerate(groups):
        early += 0 if index == APART - 1 else max(0, numel - cached)
        cached = max(0, cached - numel)
    return early


def check(nvme_path: str, share: Fraction, update: str, moments: int = 2) -> None:
    """Raises AssertionError where a step moves other bytes than the optimum while nothing stays staged, or memory is exceeded.

    `update`: "speculative" is "backward" with clipping, which the last step but one does: it discards what was updated early.
    """
    with staying(0.0):
        _check(nvme_path, share, update, moments)


def _check(nvme_path: str, share: Fraction, update: str, moments: int) -> None:
    speculative = update == "speculative"
    torch.manual_seed(0)
    model = Model()
    numel = sum(p.numel() for p in model.parameters()) // dist.get_world_size()
    cache_bytes = cache_bytes_for(share, numel, moments)
    device = {"device": "nvme", "nvme_path": nvme_path}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": OPTIMIZERS[moments],
        "gradient_clipping": 1e4 if speculative else 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": device,
            "offload_optimizer": device,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
        },
        "infinity": {
            "wrap": ["Block"],
            "host_cache_bytes": cache_bytes,
            "update": "backward" if speculative else update,
        },
    }
    engine, *_ = infinity.initialize(model=model, config=config)
    swap = engine.swap
    assert swap is not None
    end_step = swap.paging.end_step

    def end_written_step() -> None:
        """What is still being written can't be read ahead: let the step in which it is read not depend on the drive's mood."""
        swap.stager.settle_all()
        end_step()

    swap.paging.end_step = end_written_step  # type: ignore[method-assign]
    with engine:
        moved = []
        said = []
        for step in range(STEPS + 2 * speculative):
            before = swap.stats()
            x = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).float().square().mean() * (1e9 if speculative and step == STEPS else 1.0))
            engine.step()
            come_to_rest(swap)
            after = swap.stats()
            moved.append((after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes))
            said.append(swap.step_bytes())
        best = optimum(dist.get_world_size(), cache_bytes, update, moments)
        assert moved[STEPS - 1] == said[STEPS - 1] == best, (share, moved, said)
        early = updated_early(dist.get_world_size(), cache_bytes) if speculative else 0
        if speculative:  # what was discarded is read once more, partly before that step ends and partly after it
            more = [early * each for each in Scheme(moments=moments).discarded_bytes]
            over = [sum(each) - 2 * least for each, least in zip(zip(*moved[STEPS:], strict=True), best, strict=True)]
            assert over == more, (share, moved)
        assert after.cached_bytes == cache_bytes
        assert after.arena_bytes == (4 + 4 * moments) * (numel + early) - cache_bytes
        if not share:
            everything = next(each for each in STRATEGIES if each.parameters == each.optimizer == "nvme")
            states = states_of(numel, 1, everything, Scheme(moments=moments))
            assert after.arena_bytes == states.nvme_bytes * (numel + early) // numel
        assert after.pinned_peak_bytes <= after.pinned_bytes


def main() -> int:
    dist.init_process_group("gloo")
    for share in SHARES:
        for update in ("forward", "backward"):
            check(sys.argv[1], share, update)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
