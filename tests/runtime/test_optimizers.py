"""Optimizers and schedules of every origin: the config's, a made one, or a function. The same training by torch alone is the
oracle, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import (
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, LRScheduler, SequentialLR, StepLR

import infinity
from infinity.config import load_config
from infinity.fsdp2.sharding import GroupOutline, ParameterOutline
from infinity.optim.hosted import Stepper
from infinity.optim.muon import MuonAdamW
from infinity.runtime.resolved import resolve
from infinity.swap import HostedOptimizer
from infinity.swap.plan import ModelOutline, plan_model

pytestmark = pytest.mark.usefixtures("one_rank")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def config(path: Path | None = None, device: str = "none", **changes: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(path)} if path is not None else {"device": device}
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place, "stage3_param_persistence_threshold": 0}
    return {
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "infinity": {"pinned_bytes_max": "16MiB"},
        **changes,
    }


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
    return loop(trained, optimizer, schedule(optimizer) if schedule else None), [p.data for p in trained.parameters()]


def loop(trained: nn.Module, optimizer: Optimizer, moves: Any = None) -> list[float]:
    """As a program without an engine trains; losses and learning rates. `moves`: a schedule."""
    losses = []
    for step in range(STEPS):
        loss = trained(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if moves is not None:
            moves.step()
        losses += [loss.item(), *(group["lr"] for group in optimizer.param_groups)]
    return losses


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


class TrustRatio(SignDescent):
    """An optimizer of a user's own that looks at whole parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * p.norm() / p.grad.norm(), alpha=group["lr"])


HOSTED: dict[str, Callable[[Any], Optimizer]] = {
    "SGD with groups": lambda p: _in_groups(p, lambda g: SGD(g, lr=0.1, momentum=0.9, dampening=0.2, maximize=True)),
    "fused SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop, centered": lambda p: RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Rprop": lambda p: Rprop(p, lr=1e-2),
    "RAdam": lambda p: RAdam(p, lr=1e-2, weight_decay=0.1),
    "Adamax": lambda p: Adamax(p, lr=1e-2),
    "Adadelta": lambda p: Adadelta(p, lr=0.5),
}
CAN_NOT: dict[str, Callable[[Any], Optimizer]] = {
    "LBFGS": LBFGS,
    "Adafactor": Adafactor,
    "of one's own": lambda p: TrustRatio(p, lr=1e-2),
    "Muon": lambda p: Muon([each for each in _members(p) if each.ndim == 2]),
}
REFUSED = [
    ("LBFGS", r"a step of it failed \(TypeError"),
    ("Adafactor", "'row_var' is not one fp32 number per element"),
    ("of one's own", "does not update each element independently"),
    ("Muon", r'set "optimizer": \{"type": "Muon"\} in the config'),
]


def _members(parameters: Any) -> list[Any]:
    given = [*parameters]
    if isinstance(given[0], dict):
        (given,) = (group["params"] for group in given)
    return given


def _in_groups(parameters: Any, make: Callable[[Any], Optimizer]) -> Optimizer:
    given = _members(parameters)
    return make([{"params": given[:1], "lr": 0.02, "momentum": 0.5}, {"params": given[1:]}])


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
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
        (("AdamW", {"lr": 1e-2, "torch_adam": True}), lambda p: AdamW(p, lr=1e-2, fused=True)),
    ],
)
def test_the_config_s_optimizer_equals_torch_s(written: Any, make: Any, device: str, nvme_path: Path) -> None:
    kind, params = written
    got = outcome(
        config(nvme_path if device == "nvme" else None, device=device, optimizer={"type": kind, "params": params})
    )
    assert same(plain(make), got)


@pytest.mark.parametrize("name", MADE)
def test_a_made_optimizer_is_kept_in_memory(name: str) -> None:
    trained = model()
    optimizer = MADE[name](trained.parameters())
    engine, returned, *_ = infinity.initialize(model=trained, config=config(), optimizer=optimizer)
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


@pytest.mark.parametrize("name", [*MADE, *HOSTED])
def test_a_made_optimizer_is_paged(name: str, nvme_path: Path) -> None:
    make = {**MADE, **HOSTED}[name]
    trained = model()
    got = outcome(config(nvme_path), model=trained, optimizer=make(trained.parameters()))
    assert same(plain(make), got)
    assert same(plain(make), outcome(config(nvme_path), optimizer=make))
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize("kind", [AdamW, RMSprop])
def test_hooks_around_its_steps_are_called(kind: Any, nvme_path: Path) -> None:
    called: list[str] = []

    def make(params: Any) -> Optimizer:
        made: Optimizer = kind(params, lr=1e-2)
        made.register_step_pre_hook(lambda optimizer, *_: called.append(type(optimizer).__name__))
        made.register_step_pre_hook(lambda *_: called.append("removed")).remove()
        made.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=1e-2 / len(called)))
        return made

    expected = plain(make)
    steps = len(called)
    called.clear()
    trained = model()
    assert same(expected, outcome(config(nvme_path), model=trained, optimizer=make(trained.parameters())))
    assert len(called) == steps and "removed" not in called


@pytest.mark.parametrize(("name", "why"), REFUSED)
def test_what_can_not_be_paged_is_refused_before_the_model_is_changed(name: str, why: str, nvme_path: Path) -> None:
    trained = model()
    optimizer = CAN_NOT[name](trained.parameters())
    with pytest.raises(infinity.ConfigError, match=rf"{type(optimizer).__name__} can't be paged, .*{why}"):
        infinity.initialize(model=trained, config=config(nvme_path), optimizer=optimizer)
    trained(batch(0)).sum().backward()
    with pytest.raises(infinity.ConfigError, match="can't be paged"):
        infinity.initialize(model=model(), config=config(nvme_path), optimizer=CAN_NOT[name])
    assert not list(nvme_path.iterdir())


def test_one_that_has_stepped_is_refused(nvme_path: Path) -> None:
    trained = model()
    optimizer = Adagrad(trained.parameters())
    trained(batch(0)).sum().backward()
    optimizer.step()
    with pytest.raises(infinity.ConfigError, match="has not stepped yet"):
        infinity.initialize(model=trained, config=config(nvme_path), optimizer=optimizer)


def test_nesterov_needs_momentum() -> None:
    settings = config(optimizer={"type": "SGD", "params": {"nesterov": True}})
    with pytest.raises(infinity.ConfigError, match=r"optimizer.params.nesterov: got true, which needs momentum"):
        infinity.initialize(model=model(), config=settings)


SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "StepLR": lambda o: StepLR(o, 2, gamma=0.5),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), StepLR(o, 1)], milestones=[3]),
    "ChainedScheduler": lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=3), StepLR(o, 2)]),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_a_made_schedule_follows_its_optimizer(where: str, kind: str, nvme_path: Path) -> None:
    trained = model()
    optimizer = AdamW(trained.parameters(), lr=1e-2, fused=True)
    schedule = SCHEDULES[kind](optimizer)
    settings = config(nvme_path if where == "nvme" else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer.step.*")
        engine, _, _, returned = infinity.initialize(
            model=trained, config=settings, optimizer=optimizer, lr_scheduler=schedule
        )
        assert returned is schedule
        with engine:
            got = train(engine), [p.data.full_tensor().clone() + 0 for p in engine.parameters()]
    expected = plain(lambda p: AdamW(p, lr=1e-2, fused=True), SCHEDULES[kind])
    assert same(expected, got)


def test_a_schedule_may_not_bring_momentum_to_an_optimizer_that_keeps_none(nvme_path: Path) -> None:
    """OneCycleLR sets it where it was 0; plain SGD's steps would be taken without a word."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9)
    with infinity.initialize(model=model(), config=config(nvme_path, **sgd), lr_scheduler=schedule)[0] as engine:
        before = {name: weight.clone() for name, weight in engine.named_weights(torch.float32)}
        with pytest.raises(infinity.ConfigError, match="momentum_buffer"):
            train(engine)
        assert all(torch.equal(before[name], weight) for name, weight in engine.named_weights(torch.float32))


def test_a_schedule_of_another_optimizer_is_refused() -> None:
    trained = model()
    other = StepLR(AdamW(trained.parameters()), 1)
    with pytest.raises(infinity.ConfigError, match="belongs to another optimizer"):
        infinity.initialize(model=trained, config=config(), lr_scheduler=other)


@pytest.mark.parametrize(
    ("name", "form", "saved"),
    [
        *((name, "memory", 3) for name in ("SGD without momentum", *MADE)),
        ("SGD", "memory", 0),
        ("SGD", "dcp", 0),
        ("SGD", "arena", 3),
        ("SGD without momentum", "dcp", 3),
        ("Rprop", "dcp", 0),
        ("Rprop", "arena", 3),
        ("RMSprop", "arena", 3),
        ("AdamW", "dcp", 3),
    ],
)
def test_a_checkpoint_of_any_optimizer_goes_on(
    name: str, form: str, saved: int, nvme_path: Path, tmp_path: Path
) -> None:
    make = {**MADE, **HOSTED}.get(name, lambda p: SGD(p, lr=0.1))
    places = [config()] if form == "memory" else [config(nvme_path), config()]
    places = places[:1] if name == "Rprop" else places  # which DTensor doesn't know
    engine, *_ = infinity.initialize(model=model(), config=places[0], optimizer=make)
    with engine:
        train(engine, range(saved))
        engine.save_checkpoint(tmp_path, format=None if form == "memory" else form)
        expected = train(engine, range(saved, saved + 3))
    for place in places:
        engine, *_ = infinity.initialize(model=model(), config=place, optimizer=make)
        with engine:
            engine.load_checkpoint(tmp_path)
            assert train(engine, range(saved, saved + 3)) == expected


class Averaging(Optimizer):
    """An optimizer of a user's own that counts steps in its group, and whose first step is special."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", p.grad.clone())
                    p.sub_(mean.lerp_(p.grad, 1 / group["steps"]), alpha=group["lr"])


UNSTEPPED: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1)},
    "RMSprop": {"optimizer": lambda p: RMSprop(p, lr=1e-2, momentum=0.5, weight_decay=0.1)},
    "NAdam": {"optimizer": lambda p: NAdam(p, lr=1e-2, weight_decay=0.1)},
    "RAdam": {"optimizer": HOSTED["RAdam"]},
    "Adamax": {"optimizer": lambda p: Adamax(p, lr=1e-2, weight_decay=0.1)},
    "Adagrad": {"optimizer": HOSTED["Adagrad"]},
    "AdamW": {"optimizer": MADE["AdamW"]},
    "Muon": {"config": {"optimizer": {"type": "Muon", "params": {"lr": 2e-2, "weight_decay": 0.1}}}},
    "of one's own": {"optimizer": Averaging},
}


def unstepped(name: str, path: Path | None = None) -> infinity.Engine:
    trained = model()
    trained.append(nn.Linear(64, 64))  # not used in the first two steps
    told = {"optimizer": None, "config": {}, **UNSTEPPED[name]}
    return infinity.initialize(
        model=trained,
        config=config(path, **told["config"]),
        optimizer=told["optimizer"],
        model_parameters=trained.parameters(),
    )[0]


def first_two(engine: infinity.Engine) -> list[float]:
    unused, engine.module[2] = engine.module[2], nn.Identity()
    losses = train(engine, range(2))
    engine.module[2] = unused
    return losses


def others(engine: infinity.Engine) -> list[float]:
    return train(engine, range(2, STEPS))


@pytest.mark.parametrize("name", UNSTEPPED)
def test_a_save_or_a_refused_load_before_the_first_step_changes_nothing(name: str, tmp_path: Path) -> None:
    with unstepped(name) as engine:
        expected = first_two(engine), others(engine)
    with unstepped(name) as engine:
        engine.save_checkpoint(tmp_path, tag="none")
        assert not any(engine.optimizer.state.values()) or name == "Adagrad"
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged" / ".metadata").write_bytes(b"")
        with pytest.raises(infinity.CheckpointError, match="damaged"):
            engine.load_checkpoint(tmp_path, tag="damaged")
        assert first_two(engine) == expected[0]
        engine.save_checkpoint(tmp_path, tag="some")
        assert others(engine) == expected[1]
        engine.load_checkpoint(tmp_path, tag="none")
        assert (first_two(engine), others(engine)) == expected
    with unstepped(name) as engine:
        engine.load_checkpoint(tmp_path, tag="none")
        assert (first_two(engine), others(engine)) == expected
        engine.load_checkpoint(tmp_path, tag="some")
        assert others(engine) == expected[1]


@pytest.mark.parametrize("name", ["SGD", "Adamax", "Muon"])
@pytest.mark.parametrize(("saver", "form"), [("none", "dcp"), ("nvme", "dcp"), ("nvme", "arena")])
def test_a_parameter_that_has_not_stepped_has_its_first_step_after_a_load(
    saver: str, form: str, name: str, nvme_path: Path, tmp_path: Path
) -> None:
    with unstepped(name, nvme_path if saver == "nvme" else None) as engine:
        engine.save_checkpoint(tmp_path, tag="none", format=form)
        losses = first_two(engine)
        engine.save_checkpoint(tmp_path, tag="some", format=form)
        expected = losses, others(engine)
    for path in (None, nvme_path):
        with unstepped(name, path) as engine:
            engine.load_checkpoint(tmp_path, tag="none")
            assert (first_two(engine), others(engine)) == expected
            engine.load_checkpoint(tmp_path, tag="some")
            assert others(engine) == expected[1]


class MuonAndAdamW(Optimizer):
    """torch's own two, side by side."""

    def __init__(self, params: Any, *, muon_lr: float, adam_lr: float, **of_muon: Any) -> None:
        matrices, others = [], []
        for parameter in params:
            (matrices if parameter.ndim == 2 else others).append(parameter)
        self.both = [
            Muon(matrices, lr=muon_lr, **of_muon),
            AdamW(others, lr=adam_lr, betas=(0.8, 0.9), weight_decay=0.1, fused=True),
        ]
        super().__init__([*matrices, *others], {})
        self.param_groups = [group for each in self.both for group in each.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.both:
            each.step()


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize(
    "of_muon", [{}, {"momentum": 0.9, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}]
)
def test_muon_equals_torch_s_beside_adamw(of_muon: dict[str, Any], device: str, nvme_path: Path) -> None:
    params = {"lr": 3e-3, "muon_lr": 2e-2, "weight_decay": 0.1, "betas": [0.8, 0.9], **of_muon}
    chosen = {"optimizer": {"type": "Muon", "params": params}}
    expected = plain(lambda p: MuonAndAdamW(p, muon_lr=2e-2, adam_lr=3e-3, **of_muon))
    path = nvme_path if device == "nvme" else None
    assert same(expected, outcome(config(path, device, **chosen)))


def test_a_group_says_what_muon_updates(nvme_path: Path) -> None:
    """One matrix less; the state of each parameter is that of its optimizer."""
    trained = model()
    first, *others = trained.parameters()
    groups = [{"params": [first], "use_muon": False, "lr": 1e-3}, {"params": others}]
    chosen = {"type": "Muon", "params": {"lr": 1e-2}}
    engine, optimizer, *_ = infinity.initialize(
        model=trained, model_parameters=groups, config=config(nvme_path, optimizer=chosen)
    )
    with engine:
        train(engine)
        kinds = [(group["use_muon"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
        assert kinds == [(False, 1e-3, 1), (True, 1e-2, 2), (False, 1e-2, 3)]
        for group in optimizer.param_groups:
            names = {"step", "momentum_buffer"} if group["use_muon"] else {"step", "exp_avg", "exp_avg_sq"}
            assert all(optimizer.state[parameter].keys() == names for parameter in group["params"])
        numel = sum(p.numel() for p in optimizer.param_groups[1]["params"])
        assert sum(sub.nbytes for sub in engine.swap.paged.layout.sub_groups if sub.whole) == 8 * numel  # fp32 masters


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"ns_steps": 100}, "less than 100"), ({"lr": -1.0}, ">= 0"), ({"adjust_lr_fn": "no"}, "no is not")],
)
@pytest.mark.parametrize("make", [MuonAdamW, infinity.PagedMuon])
def test_muon_refuses_at_once_what_torch_refuses_in_a_step(make: Any, wrong: dict[str, Any], why: str) -> None:
    more: Any = {"swap": None} if make is infinity.PagedMuon else {}
    with pytest.raises(infinity.ConfigError, match=f"optimizer Muon: .*{why}"):
        make([{"params": [nn.Parameter(torch.zeros(2, 2))], "use_muon": True, **wrong}], **more)


def test_muon_takes_matrices_only(nvme_path: Path) -> None:
    trained = model()
    groups = [{"params": [p for p in trained.parameters() if p.ndim == 1], "use_muon": True}]
    with pytest.raises(infinity.ConfigError, match=r"Muon updates only matrices, got a parameter of shape \(64,\)"):
        infinity.initialize(
            model=trained, model_parameters=groups, config=config(nvme_path, optimizer={"type": "Muon", "params": {}})
        )
    assert not list(nvme_path.iterdir())


def test_names_that_no_matrix_has_are_refused() -> None:
    parameters = tuple(
        ParameterOutline(name, torch.Size(shape), trained=True) for name, shape in {"w": (64, 64), "b": (64,)}.items()
    )
    outline = ModelOutline([GroupOutline("root", parameters, gathers=1)], torch.float32)
    options = infinity.PagingOptions(matrices=frozenset({"w", "v", "b"}), matrix_moments=("momentum_buffer",))
    with pytest.raises(infinity.ConfigError, match="matrices: b, v is no matrix of the model"):
        plan_model(outline, options, None, 1 << 40)


@pytest.mark.parametrize(("asked", "update"), [("auto", "backward"), ("step", "step"), ("forward", None)])
def test_no_update_of_sharded_matrices_waits_for_whoever_looks_first(
    asked: str, update: str | None, nvme_path: Path
) -> None:
    """It is a collective: one rank that looked at a weight alone would wait for the others for ever."""
    settings = config(nvme_path, optimizer={"type": "Muon", "params": {}})
    settings["infinity"] = {**settings.get("infinity", {}), "update": asked}
    chosen = load_config(settings).resolve(world_size=2)
    make = partial(
        resolve, chosen, ranks=2, numel=100, moments=("exp_avg",), matrices=frozenset({"w"}), device_type="cpu"
    )
    if update is None:
        with pytest.raises(infinity.ConfigError, match=r'infinity\.update "forward" .* use "backward" or "step"'):
            make()
        with pytest.raises(infinity.ConfigError, match=r'PagingOptions\.update "forward" .* "backward" or "step"'):
            infinity.PagingOptions(update="forward", matrices=frozenset({"w"})).for_ranks(2)
        return
    options = make().paging
    assert options is not None and options.update == update
    assert not options.for_ranks(2).updates_wait
    assert options.for_ranks(1).updates_wait is (update != "step")
    assert all(
        options.for_ranks(2).timing_of(group).update == update for group in range(8)
    )  # none is left to the forward


def test_muon_in_a_loop_of_one_s_own(nvme_path: Path) -> None:
    expected = plain(lambda p: MuonAndAdamW(p, muon_lr=2e-2, adam_lr=3e-3))
    trained = model()
    for module in (*trained[1], trained):
        fully_shard(module)
    matrices = frozenset(name for name, p in trained.named_parameters() if p.ndim == 2)
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(trained, infinity.PagingOptions(matrices=matrices, matrix_moments=("momentum_buffer",)))
        groups = [
            {"params": [p for n, p in trained.named_parameters() if n in matrices], "use_muon": True, "lr": 2e-2},
            {
                "params": [p for n, p in trained.named_parameters() if n not in matrices],
                "lr": 3e-3,
                "betas": (0.8, 0.9),
            },
        ]
        with pytest.raises(infinity.ConfigError, match="is in a group without use_muon, and was named in"):
            infinity.PagedMuon([{"params": [*trained.parameters()]}], swap=swap)
        optimizer = infinity.PagedMuon(groups, swap=swap, fused=True, weight_decay=0.1)
        assert loop(trained, optimizer) == expected[0]
        assert all(p.data.full_tensor().equal(q) for p, q in zip(trained.parameters(), expected[1], strict=True))


@pytest.mark.parametrize("saved_in", ["none", "nvme"])
def test_a_checkpoint_of_muon_goes_on_in_memory_and_on_nvme(saved_in: str, nvme_path: Path) -> None:
    def made(device: str) -> infinity.Engine:
        path = nvme_path / "swap" if device == "nvme" else None
        chosen = {"type": "Muon", "params": {"lr": 2e-2, "adam_lr": 3e-3}}
        return infinity.initialize(model=model(), config=config(path, device, optimizer=chosen))[0]

    with made(saved_in) as engine:
        train(engine, range(2))
        engine.save_checkpoint(nvme_path / "saved")
        expected = train(engine, range(2, STEPS))
    for device in ("none", "nvme"):
        with made(device) as engine:
            engine.load_checkpoint(nvme_path / "saved")
            assert train(engine, range(2, STEPS)) == expected


@pytest.mark.parametrize(
    ("kind", "where", "value", "why"),
    [
        ("SGD", "nvme", "bf16", r"moments_dtype bf16 is only for Adam and AdamW: leave it out for SGD"),
        (
            "Muon",
            "nvme",
            "bf16",
            r"for the two moments of Adam and AdamW, .* keeps exp_avg and .* momentum",
        ),
        ("SGD", "nvme", "8bit", r"moments_dtype 8bit is only for Adam and AdamW: leave it out for SGD"),
        ("AdamW", "none", "bf16", r"set offload_optimizer to nvme or cpu, or leave"),
        ("AdamW", "nvme", "fp16", r"infinity\.moments_dtype: got .fp16., expected one of fp32, bf16, 8bit"),
        ("RAdam", "nvme", "bf16", r"only for Adam and AdamW: leave it out for RAdam"),
    ],
)
def test_small_moments_are_adam_s_on_nvme(kind: str, where: str, value: str, why: str, nvme_path: Path) -> None:
    place = {"device": where, "nvme_path": str(nvme_path)}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"moments_dtype": value},
    }
    made = model()
    given = RAdam(made.parameters()) if kind == "RAdam" else None
    if given is None:
        config["optimizer"] = {"type": kind, "params": {}}
    with pytest.raises(infinity.ConfigError, match=why):
        infinity.initialize(model=made, optimizer=given, config=config)
    assert not [*nvme_path.iterdir()]


def test_an_optimizer_of_a_loop_of_one_s_own_says_that_it_has_no_small_moments(nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        made = model()
        fully_shard(made)
        swap.page(made, infinity.PagingOptions(moments_dtype=torch.bfloat16))
        with pytest.raises(infinity.ConfigError, match=r"keeps its numbers in fp32.*paged for torch\.bfloat16"):
            HostedOptimizer(made.parameters(), swap=swap, like=Stepper(RAdam([torch.zeros(2)])))
        infinity.PagedAdamW(made.parameters(), swap=swap)
