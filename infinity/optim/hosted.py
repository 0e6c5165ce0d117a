"""Steps pieces of tensors by the `step` of any elementwise torch optimizer.

[Note: What can be stepped piece by piece]
An optimizer can be stepped piece by piece if it updates each element from that element's gradient and state alone, and
if its state is fp32 numbers per element, and perhaps a step count. No list of names can decide that for a user's own
optimizer. So each optimizer is tried: a few steps on a matrix and on pieces of it must agree in every bit. Optimizers
that use whole rows, norms, shapes or random numbers fail the trial.

Results equal the optimizer's on the CPU: those of torch's plain loop, or of its fused kernel if `fused` is set.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from infinity.errors import ConfigError

_SHAPE = (16, 128)
_CUTS = (0, 320, 1024, 2048)
_STEPS = 3


@dataclass(frozen=True)
class Settings:
    """The hyper-parameters of one parameter group by name, without the parameters."""

    values: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(group: dict[str, Any]) -> Settings:
        """Return the settings of a group. Raises ConfigError for settings that pieces can't be stepped with."""
        values = []
        for name, value in group.items():
            if name == "params":
                continue
            if isinstance(value, torch.Tensor):
                raise ConfigError(f"{name} is a tensor, which is not supported for paged parameters: pass a number")
            if value and name in ("capturable", "differentiable"):
                raise ConfigError(f"{name} is not supported for paged parameters")
            values.append((name, tuple(value) if isinstance(value, list) else value))
        return Settings(tuple(values))

    @property
    def in_force(self) -> frozenset[str]:
        """Names of those that are neither 0 nor off: a change of these may change which state an optimizer keeps."""
        return frozenset(name for name, value in self.values if value)

    def __hash__(self) -> int:
        return hash(tuple(name for name, _ in self.values))  # a user's optimizer may have unhashable values


class Stepper:
    """Steps pieces of tensors as an optimizer would step the whole.

    Args:
        like: the optimizer with its parameter groups; stays unchanged, and may hold any parameters.

    moments: names of its state per element. counts_steps: True if its state has a "step".
    Raises ConfigError with the reason if the optimizer can't be stepped piece by piece: see the note of this file.
    """

    def __init__(self, like: torch.optim.Optimizer) -> None:
        self._like = bare(like, [])  # so that this object keeps no parameters alive
        self.kind = type(like).__name__
        self._begins_with_state = bool(like.state)
        self.defaults: dict[str, Any] = dict(like.defaults)
        self.moments: tuple[str, ...] = ()
        self.counts_steps = False
        self._tried: set[frozenset[str]] = set()
        for settings in dict.fromkeys(map(Settings.of, like.param_groups)):
            self._try(settings)

    def check(self, settings: Settings) -> None:
        """Raise ConfigError if settings that became others since the construction can't be stepped with the same state."""
        if settings.in_force in self._tried:
            return
        moments = self.moments
        self._try(settings)
        if self.moments != moments:
            self.moments, more = moments, self.moments[len(moments) :]
            self._tried.discard(settings.in_force)
            raise ConfigError(
                f"{self.kind} keeps {' and '.join(more)} of each element with its present settings, and the model was paged "
                "without: make the optimizer with such settings from the start (a schedule may set a momentum that was 0)"
            )

    def step(
        self,
        settings: Settings,
        *,
        masters: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: Sequence[dict[str, torch.Tensor]],
        steps: Sequence[torch.Tensor],
        first: bool,
    ) -> None:
        """Take one step in place. All lists have the same length.

        Entry i of masters, grads and each moment has the same shape (fp32). `steps` are scalars with the number of
        steps taken, and stay unchanged. `first`: no step was taken, so the moments' values are ignored.
        """
        groups = [{**dict(settings.values), "params": masters}]
        worker = self._begin(groups) if first else bare(self._like, groups)
        for master, grad, state, step in zip(masters, grads, moments, steps, strict=True):
            master.grad = grad
            if not first:
                worker.state[master] = {**state, **({"step": step.clone()} if self.counts_steps else {})}
        with torch.no_grad():
            inspect.unwrap(type(worker).step)(worker)
        for master, state in zip(masters, moments, strict=True):
            master.grad = None
            new_state = worker.state[master]
            for name, view in state.items():
                if new_state.get(name) is not None and new_state[name] is not view:
                    view.copy_(new_state[name])

    def _begin(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return an optimizer before its first step, with its initial state, which some optimizers have."""
        if not self._begins_with_state:
            return bare(self._like, groups)
        kind: Any = type(self._like)
        known = inspect.signature(kind).parameters
        made: torch.optim.Optimizer = kind(groups, **{k: v for k, v in self.defaults.items() if k in known})
        return made

    def _try(self, settings: Settings) -> None:
        try:
            reason = self._reason_against(settings)
        except MemoryError:
            raise  # not the optimizer's fault
        except Exception as error:  # a user's optimizer may raise anything
            reason = f"a step of it failed ({type(error).__name__}: {error})"
        if reason:
            raise ConfigError(
                f"optimizer {type(self._like).__name__} can't be paged, because paging updates state piece by piece: "
                f"{reason}; use another one, or set the device of offload_param and offload_optimizer to none"
            )
        self._tried.add(settings.in_force)

    def _reason_against(self, settings: Settings) -> str | None:
        """Return the reason why pieces can't be stepped with these settings, or None; record the state it keeps."""
        random = torch.Generator().manual_seed(0)
        whole = torch.nn.Parameter(torch.randn(_SHAPE, generator=random))
        groups = [{**dict(settings.values), "params": [whole]}]
        real = self._begin(groups)
        before = copy.copy(groups[0])
        flat = whole.detach().clone().view(-1)
        moments: dict[str, torch.Tensor] = {}
        for done in range(_STEPS):
            grad = torch.randn(_SHAPE, generator=random)
            whole.grad = grad.clone()
            real.step()
            if done == 0:
                if reason := self._note_state(real.state[whole]):
                    return reason
                moments = {name: torch.zeros(flat.numel()) for name in self.moments}
            self.step(
                settings,
                masters=[*_cut(flat)],
                grads=[*_cut(grad.view(-1))],
                moments=[dict(zip(moments, cut, strict=True)) for cut in zip(*map(_cut, moments.values()), strict=True)]
                or [{} for _ in _CUTS[1:]],
                steps=[torch.tensor(float(done)) for _ in _CUTS[1:]],
                first=done == 0,
            )
        if any(value != before.get(name) for name, value in real.param_groups[0].items() if name != "params"):
            return "it keeps state for a whole parameter group"
        expected = {name: value for name, value in real.state[whole].items() if name in moments and value is not None}
        same = _same(flat, whole.detach()) and all(_same(moments[name], value) for name, value in expected.items())
        return None if same else "it does not update each element independently (pieces of a matrix give other values)"

    def _note_state(self, state: dict[str, Any]) -> str | None:
        """Record the state that it keeps; return a reason if some of it can't be paged."""
        for name, value in state.items():
            if name == "step" and isinstance(value, torch.Tensor) and value.dim() == 0:
                self.counts_steps = True
            elif isinstance(value, torch.Tensor) and value.shape == _SHAPE and value.dtype is torch.float32:
                self.moments += () if name in self.moments else (name,)
            elif value is not None:
                return f"its state {name!r} is not one fp32 number per element"
        return None


def bare(like: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the same optimizer over other parameters, without state and without step hooks."""
    worker = object.__new__(type(like))
    worker.__dict__.update(like.__dict__)
    worker.__dict__.pop("step", None)  # a wrapper by a learning rate schedule
    worker.param_groups, worker.state = groups, defaultdict(dict)
    worker._optimizer_step_pre_hooks, worker._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return worker


def _cut(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start, end in pairwise(_CUTS):
        yield flat[start:end]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.int32), b.reshape(-1).view(torch.int32))
