"""The oracle: the same training held in memory. Losses, gradient norms and final weights agree bit for bit."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import caching
import pytest
import torch
import training
from reference_policy import check_policy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import infinity
import infinity.aio

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("name", training.CASES)
def test_nvme_equals_memory(name: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_policy(monkeypatch)
    case = training.CASES[name]
    assert not training.differences(
        training.in_memory(training.with_engine, case), training.with_engine(case, str(nvme_path))
    )
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize("name", ["plain", "accumulation and clipping", "sub-groups that cut parameters"])
def test_nvme_equals_memory_with_each_backend(name: str, nvme_path: Path, backend: str) -> None:
    case = training.CASES[name]
    ours = dataclasses.replace(case, backend=backend)
    assert not training.differences(
        training.in_memory(training.with_engine, case), training.with_engine(ours, str(nvme_path))
    )


class Either(nn.Module):
    """One of two parts is used, so that the other has no gradient in that step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.first(x) + (self.other(x) if which else self.one(x))


@pytest.mark.parametrize("update", ["step", "forward"])
@pytest.mark.parametrize("master", ["split", "full"])
def test_a_parameter_that_misses_steps_keeps_its_value(master: str, update: str, nvme_path: Path) -> None:
    def losses(place: dict[str, str]) -> list[float]:
        torch.manual_seed(0)
        engine, *_ = infinity.initialize(
            model=Either(),
            config={
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "gradient_clipping": 0.0,
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": place,
                    "offload_optimizer": place,
                    "stage3_param_persistence_threshold": 0,
                },
                "infinity": {"pinned_bytes_max": "16MiB", "master_weights": master, "update": update},
            },
        )
        found = []
        with engine:
            for which in (0, 0, 0, 1, 0, 1):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(which))
                loss = engine(x, which).float().square().mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        return found

    assert losses({"device": "nvme", "nvme_path": str(nvme_path)}) == losses({"device": "none"})


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["plain", "accumulation and clipping", "frozen parameters", "fp32"])
def test_own_loop_equals_stock_fsdp2_and_adamw(name: str, fused: bool, nvme_path: Path) -> None:
    case = dataclasses.replace(training.CASES[name], fused=fused)
    assert not training.differences(
        training.in_memory(training.with_own_loop, case), training.with_own_loop(case, str(nvme_path))
    )


@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_own_loop_equals_stock_fsdp2_and_another_optimizer_of_torch(name: str, nvme_path: Path) -> None:
    case = training.CASES[name]
    assert not training.differences(
        training.in_memory(training.with_own_loop, case), training.with_own_loop(case, str(nvme_path))
    )


def test_a_model_paged_for_another_optimizer_is_refused_with_the_moments(nvme_path: Path) -> None:
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(model, infinity.PagingOptions(moments=["momentum_buffer"]))
        with pytest.raises(
            infinity.ConfigError, match=r"PagedAdamW keeps exp_avg and exp_avg_sq .* paged for momentum_b"
        ):
            infinity.PagedAdamW(model.parameters(), swap=swap)
        infinity.PagedSGD([{"params": model.parameters()}], swap=swap, lr=0.1)
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = nn.Linear(64, 64)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        swap.page(model, infinity.PagingOptions(moments=[]))
        groups = [{"params": [model.weight]}, {"params": [model.bias], "momentum": 0.9}]
        with pytest.raises(infinity.ConfigError, match=r"PagingOptions\(moments=\('momentum_buffer',\)\)"):
            infinity.PagedSGD(groups, swap=swap)


def test_a_wrong_bit_would_be_seen(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: one master bit, in one step, is enough."""
    case = training.CASES["plain"]
    expected = training.in_memory(training.with_engine, case)
    update = infinity.PagedAdam._update
    spoiled = []

    def spoil(self, sub, stepping, kept, lease):  # type: ignore[no-untyped-def]
        update(self, sub, stepping, kept, lease)
        if not spoiled:
            spoiled.append(True)
            bits = lease.view(torch.int32, sub.layout.numel * sub.layout.compute_itemsize, 1)
            bits ^= 1 << 8
            sub.chunk.sums = None  # which the update has made before this: the next read would find it

    monkeypatch.setattr(infinity.PagedAdam, "_update", spoil)
    assert training.differences(expected, training.with_engine(case, str(nvme_path)))


@pytest.mark.parametrize("update", ["forward", "backward", "speculative"])
@pytest.mark.parametrize("share", caching.SHARES, ids=str)
def test_a_step_moves_the_fewest_bytes_that_its_cache_allows(share: Fraction, update: str, nvme_path: Path) -> None:
    caching.check(str(nvme_path), share, update)


@pytest.mark.parametrize(
    ("share", "update"), [(Fraction(0), "forward"), (Fraction(3, 4), "backward"), (Fraction(0), "speculative")]
)
@pytest.mark.parametrize("moments", [0, 1])
def test_so_does_a_step_of_sgd(moments: int, share: Fraction, update: str, nvme_path: Path) -> None:
    caching.check(str(nvme_path), share, update, moments)


@pytest.mark.slow
def test_steps_of_two_ranks_move_the_fewest_bytes_that_their_caches_allow(forked_ranks: Any, nvme_path: Path) -> None:
    forked_ranks(Path(caching.__file__), str(nvme_path), ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, []),
        *[
            pytest.param(ranks, [cases], marks=pytest.mark.long)
            for ranks, cases in [(2, "all"), (3, "all"), (1, "vertical"), (2, "vertical")]
        ],
    ],
)
def test_several_ranks_equal_memory(ranks: int, cases: list[str], forked_ranks: Any, nvme_path: Path) -> None:
    available = [name for name, works, _ in infinity.aio.probe() if works]
    script = Path(training.__file__)
    forked_ranks(script, str(nvme_path), ",".join(available), *cases, ranks=ranks, timeout_seconds=500)
    assert not list(nvme_path.iterdir())


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_at_one_and_three(forked_ranks: Any, nvme_path: Path, tmp_path: Path) -> None:
    script = Path(training.__file__).with_name("reshard.py")
    digests = set()
    for verb, ranks in (("save", 2), ("load", 1), ("load", 3)):
        done = forked_ranks(script, verb, str(nvme_path), str(tmp_path), ranks=ranks)
        digests |= {line for line in done.stdout.splitlines() if line.startswith("digest")}
    assert len(digests) == 1
