"""What a stepper promises: pieces come out as the whole does, and what can't be cut into pieces is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer, RMSprop, Rprop

from infinity.errors import ConfigError
from infinity.optim.hosted import Settings, Stepper

KNOWN: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True),
    "fused SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "Adagrad": lambda p: Adagrad(p, initial_accumulator_value=0.5),
    "RMSprop": lambda p: RMSprop(p, momentum=0.5, centered=True),
    "Rprop": Rprop,
    "AMSGrad": lambda p: Adam(p, amsgrad=True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_pieces_come_out_as_the_whole(name: str) -> None:
    """Long enough for several threads, of an odd length, and cut where a vector ends."""
    random = torch.Generator().manual_seed(1)
    whole = torch.nn.Parameter(torch.randn(100_003, generator=random))
    optimizer = KNOWN[name]([whole])
    stepper = Stepper(KNOWN[name]([torch.nn.Parameter(torch.zeros(1))]))
    master = whole.detach().clone()
    moments = {each: torch.full_like(master, 7.0) for each in stepper.moments}  # not cleared before
    cuts = [0, 64, 4096 + 192, 70_016, master.numel()]
    for done in range(3):
        grad = torch.randn(master.numel(), generator=random)
        whole.grad = grad.clone()
        optimizer.step()
        for start, end in pairwise(cuts):
            stepper.step(
                Settings.of(optimizer.param_groups[0]),
                masters=[master[start:end]],
                grads=[grad[start:end]],
                moments=[{each: kept[start:end] for each, kept in moments.items()}],
                steps=[torch.tensor(float(done))],
                first=done == 0,
            )
    assert torch.equal(master, whole.detach())
    assert all(torch.equal(kept, optimizer.state[whole][each]) for each, kept in moments.items())
    assert stepper.counts_steps == ("step" in optimizer.state[whole])


def test_settings_that_need_more_state_are_refused_when_they_come() -> None:
    def settings(**own: Any) -> Settings:
        return Settings.of(SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **own).param_groups[0])

    stepper = Stepper(SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    stepper.check(settings(weight_decay=0.1))
    for _ in range(2):
        with pytest.raises(ConfigError, match="SGD keeps momentum_buffer"):
            stepper.check(settings(momentum=0.9))
    assert stepper.moments == ()


class Own(Optimizer):
    """An optimizer of a user's own, which steps by a function of a parameter, its state and its group."""

    def __init__(self, params: Any, how: Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], None]) -> None:
        self.how = how
        super().__init__(params, {"lr": 0.1, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.how(p, self.state[p], group)


def _counts_in_its_group(p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    group["seen"] += 1


def _keeps_half(p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["half"] = p.half()


def _keeps_a_list(p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["history"] = [p.clone()]


def _draws(p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    p.add_(torch.randn_like(p))


def _decays_matrices(p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    p.mul_(0.9 if p.dim() > 1 else 1.0)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (_counts_in_its_group, "keeps state for a whole parameter group"),
        (_keeps_half, "'half' is not one fp32 number"),
        (_keeps_a_list, "'history' is not one fp32 number"),
        (_draws, "does not update each element independently"),
        (_decays_matrices, "does not update each element independently"),
    ],
)
def test_what_can_not_be_cut_is_refused_with_the_reason(how: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Stepper(Own([torch.nn.Parameter(torch.zeros(4))], how))


@pytest.mark.parametrize("changed", [{"lr": torch.tensor(0.1)}, {"differentiable": True}])
def test_settings_that_pieces_do_not_take_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not supported for paged parameters"):
        Stepper(SGD([torch.nn.Parameter(torch.zeros(4))], **{"lr": 0.1, **changed}))


def test_it_keeps_no_parameters_of_the_one_it_is_like() -> None:
    like = SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    stepper = Stepper(like)
    assert like.param_groups[0]["params"]
    assert not stepper._like.param_groups and not stepper._like.state
