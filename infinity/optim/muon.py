"""Muon for matrices and AdamW for other parameters, by torch's optimizers: for one matrix, and for models in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError

MATRIX_MOMENTS = ("momentum_buffer",)
"""Moments of each element of a matrix, by torch's name."""

_NO_MATRICES = ("embed", "lm_head")
"""Parts of names of matrices that AdamW updates, as in DeepSpeed."""


@dataclass(frozen=True)
class MuonSettings:
    """The hyper-parameters of one parameter group of matrices, named as in `torch.optim.Muon`."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None

    @staticmethod
    def of(group: dict[str, Any]) -> MuonSettings:
        values = {field.name: group[field.name] for field in fields(MuonSettings)}
        values |= {"lr": float(group["lr"]), "ns_coefficients": tuple(group["ns_coefficients"])}
        return MuonSettings(**values)


def is_for_muon(name: str, shape: Sequence[int]) -> bool:
    """Return True if Muon updates a parameter: a matrix that is neither an embedding nor a language model's head."""
    return len(shape) == 2 and not any(part in name.lower() for part in _NO_MATRICES)


def with_defaults(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group of matrices, completed by torch's defaults. Raises ConfigError if torch has no Muon, or
    for values that torch rejects, some of them only in a step."""
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"optimizer Muon needs torch 2.9 or newer, and this is {torch.__version__}")
    asked = {field.name: group[field.name] for field in fields(MuonSettings) if field.name in group}
    matrix = nn.Parameter(torch.zeros(1, 1))
    matrix.grad = torch.zeros(1, 1)
    try:
        tried = torch.optim.Muon([matrix], **asked)
        tried.step()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer Muon: {error}, with {asked}") from error
    return {**tried.defaults, **group}


def muon_(settings: MuonSettings, *, master: torch.Tensor, grad: torch.Tensor, momentum_buffer: torch.Tensor) -> None:
    """Take one step of `torch.optim.Muon` (kellerjordan.github.io/posts/muon) on a whole matrix in place.

    All are fp32, of the matrix's shape, and contiguous, or DTensors sharded by rows; `grad` may be changed too.
    """
    matrix = nn.Parameter(master)
    matrix.grad = grad
    optimizer = torch.optim.Muon([matrix], **asdict(settings))
    optimizer.state[matrix] = {"momentum_buffer": momentum_buffer}
    optimizer.step()


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the parameter groups with `use_muon`, and `torch.optim.Adam` for the others.

    Adam's weight decay is decoupled unless a group says otherwise. `state` has torch's entries, and a "step" per
    parameter. Raises ConfigError if a group with `use_muon` has a parameter that is no matrix.
    """

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        adam = torch.optim.Adam([nn.Parameter(torch.zeros(1))], decoupled_weight_decay=True)
        groups = []
        for group in params:
            if group["use_muon"]:
                check_matrices(group["params"])
            groups.append({**adam.defaults, **(with_defaults(group) if group["use_muon"] else group)})
        super().__init__(groups, {})
        self._parts = {True: torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))]), False: adam}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for use_muon, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["use_muon"] is use_muon]
            part.state = self.state
            part.step()
        for parameter in (p for group in self._parts[True].param_groups for p in group["params"]):
            if parameter.grad is not None:  # Muon itself does not count steps
                state = self.state[parameter]
                state["step"] = state.get("step", torch.zeros(())) + 1
        return loss


def check_matrices(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ConfigError if Muon can't update one of the parameters."""
    for parameter in parameters:
        if parameter.ndim != 2:
            raise ConfigError(
                f"Muon updates only matrices, got a parameter of shape {tuple(parameter.shape)}: put it into a group "
                "with use_muon False"
            )
