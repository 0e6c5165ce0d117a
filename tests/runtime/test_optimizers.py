"""Optimizers and schedules of every origin: the config's, a made one, or a function. The same training by torch alone is the
oracle, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def config(path: Path | None = None, device: str = "none", **changes: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(path)} if path is not None else {"device": device}
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero, "infinity": {"pinned_bytes_max": "16MiB"}, **changes}


STEPS = 5


def train(engine: infinity.Engine, steps: range = range(STEPS)) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses += [loss.item(), *engine.get_lr()]
    return losses


def outcome(settings: dict[str, Any], **arguments: Any) -> tuple[list[float], list[torch.Tensor]]:
    arguments.setdefault("model", model())
    engine, *_ = infinity.initialize(config=settings, **arguments)
    with engine:
        return train(engine), [p.data.full_tensor().clone() + 0 for p in engine.parameters()]


def plain(
    make: Callable[[Any], Optimizer], schedule: Callable[[Optimizer], Any] | None = None
) -> tuple[list[float], list[torch.Tensor]]:
    trained = model()
    optimizer = make(trained.parameters())
    moves = schedule(optimizer) if schedule else None
    losses = []
    for step in range(STEPS):
        loss = trained(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if moves is not None:
            moves.step()
        losses += [loss.item(), *(group["lr"] for group in optimizer.param_groups)]
    return losses, [p.data for p in trained.parameters()]


def same(expected: tuple[list[float], list[torch.Tensor]], got: tuple[list[float], list[torch.Tensor]]) -> bool:
    assert expected[0][0] != expected[0][-2]
    return expected[0] == got[0] and all(a.equal(b) for a, b in zip(expected[1], got[1], strict=True))


class SignDescent(Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


MADE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: RMSprop(p, lr=1e-2),
    "AdamW": lambda p: AdamW(p, lr=1e-2, amsgrad=True),
    "of one's own": lambda p: SignDescent(p, lr=1e-2),
}


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize(
    ("written", "make"),
    [
        (("SGD", {"lr": 0.1}), lambda p: SGD(p, lr=0.1)),
        (
            ("sgd", {"lr": "0.1", "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
            lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        ),
        (("Adam", {"lr": 1e-2, "weight_decay": 0.1}), lambda p: AdamW(p, lr=1e-2, weight_decay=0.1, fused=True)),
        (
            ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}),
            lambda p: Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
        ),
        (
            ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": "false"}),
            lambda p: Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
        ),
        (("AdamW", {"lr": 1e-2, "adam_w_mode": False}), lambda p: AdamW(p, lr=1e-2, fused=True)),
    ],
)
def test_the_config_s_optimizer_equals_torch_s(written: Any, make: Any, device: str) -> None:
    kind, params = written
    got = outcome(config(device=device, optimizer={"type": kind, "params": params}))
    assert same(plain(make), got)


@pytest.mark.parametrize("name", MADE)
def test_a_made_optimizer_is_kept_in_memory(name: str) -> None:
    trained = model()
    optimizer = MADE[name](trained.parameters())
    engine, returned, *_ = infinity.initialize(model=trained, config=config(device="cpu"), optimizer=optimizer)
    assert returned is optimizer
    with engine:
        got = train(engine), [p.data.full_tensor().clone() + 0 for p in engine.parameters()]
    assert same(plain(MADE[name]), got)


@pytest.mark.parametrize("name", MADE)
def test_a_function_makes_the_optimizer(name: str) -> None:
    assert same(plain(MADE[name]), outcome(config(), optimizer=MADE[name]))


def test_a_function_makes_an_optimizer_that_is_paged(nvme_path: Path) -> None:
    def make(params: Any) -> Optimizer:
        groups = list(params)
        assert len(groups) == 1
        return AdamW([{**groups[0], "weight_decay": 0.3}], lr=1e-2, fused=True)

    got = outcome(config(nvme_path), optimizer=make)
    assert same(plain(lambda p: AdamW(p, lr=1e-2, weight_decay=0.3, fused=True)), got)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "of one's own"])
def test_what_can_not_be_paged_is_refused_before_the_model_is_changed(name: str, nvme_path: Path) -> None:
    trained = model()
    optimizer = MADE[name](trained.parameters())
    with pytest.raises(infinity.ConfigError, match=rf"{type(optimizer).__name__} can't be paged: .* Adam and AdamW"):
        infinity.initialize(model=trained, config=config(nvme_path), optimizer=optimizer)
    trained(batch(0)).sum().backward()
    with pytest.raises(infinity.ConfigError, match="can't be paged"):
        infinity.initialize(model=model(), config=config(nvme_path), optimizer=MADE[name])
    with pytest.raises(infinity.ConfigError, match=r'optimizer.type: got "SGD" together with NVMe'):
        infinity.initialize(model=model(), config=config(nvme_path, optimizer={"type": "SGD"}))
    assert not list(nvme_path.iterdir())


def test_nesterov_needs_momentum() -> None:
    settings = config(optimizer={"type": "SGD", "params": {"nesterov": True}})
    with pytest.raises(infinity.ConfigError, match=r"optimizer.params.nesterov: got true, which needs momentum"):
        infinity.initialize(model=model(), config=settings)


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_a_made_schedule_follows_its_optimizer(where: str, nvme_path: Path) -> None:
    trained = model()
    optimizer = AdamW(trained.parameters(), lr=1e-2, fused=True)
    schedule = StepLR(optimizer, 2, gamma=0.5)
    settings = config(nvme_path if where == "nvme" else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer.step.*")
        engine, _, _, returned = infinity.initialize(
            model=trained, config=settings, optimizer=optimizer, lr_scheduler=schedule
        )
        assert returned is schedule
        with engine:
            got = train(engine), [p.data.full_tensor().clone() + 0 for p in engine.parameters()]
    expected = plain(lambda p: AdamW(p, lr=1e-2, fused=True), lambda o: StepLR(o, 2, gamma=0.5))
    assert same(expected, got)


def test_a_schedule_of_another_optimizer_is_refused() -> None:
    trained = model()
    other = StepLR(AdamW(trained.parameters()), 1)
    with pytest.raises(infinity.ConfigError, match="belongs to another optimizer"):
        infinity.initialize(model=trained, config=config(), lr_scheduler=other)


@pytest.mark.parametrize("name", ["SGD without momentum", *MADE])
def test_a_checkpoint_of_any_optimizer_goes_on(name: str, tmp_path: Path) -> None:
    make = MADE.get(name, lambda p: SGD(p, lr=0.1))
    engine, *_ = infinity.initialize(model=model(), config=config(), optimizer=make)
    with engine:
        train(engine, range(3))
        engine.save_checkpoint(tmp_path)
        expected = train(engine, range(3, 6))
    engine, *_ = infinity.initialize(model=model(), config=config(), optimizer=make)
    with engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, range(3, 6)) == expected
