"""Floor 4. Adam and AdamW over paged parameters: what a step does to each sub-group; when, the swap manager decides.

The numbers are those of `torch.optim.Adam` and `torch.optim.AdamW` with the same arguments, bit for bit: infinity/optim calls
the same kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.aio import Lease
from infinity.errors import ConfigError
from infinity.optim import AdamSettings, adam_
from infinity.store import Field
from infinity.swap.manager import SwapManager
from infinity.swap.paged_model import PagedShard, PagedSubGroup
from infinity.swap.paged_tensor import PagedTensor

_MOMENTS = {"exp_avg": Field.EXP_AVG, "exp_avg_sq": Field.EXP_AVG_SQ}


class PagedAdam(torch.optim.Adam):
    """`torch.optim.Adam` for the parameters of a model that `swap.page` was called on.

    Args:
        params: parameters or parameter groups, as for torch; all of them paged by `swap`.
        swap: the manager that paged the model.
        lr, betas, eps, weight_decay, maximize, fused, decoupled_weight_decay: as for torch.

    When a parameter is updated follows from `swap.page(update=...)`. `state_dict`, `load_state_dict`, param_groups and lr
    schedulers work as with torch: the moments in `state` are paged
    tensors. Raises ConfigError for parameters that `swap` did not page, or that were frozen when it did.
    """

    def __init__(
        self,
        params: Any,
        *,
        swap: SwapManager,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._swap = swap
        for group in self.param_groups:
            _settings(group)
            for parameter in group["params"]:
                _trained_shard(parameter)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float = 1.0
    ) -> float | None:
        """Update every parameter that has a gradient (fp32, of the shard's shape), multiplied by `grad_scale` first.

        Returns when all are updated, or will be before anybody sees them (`swap.page(update=...)`); the last writes go on in
        the background.
        Raises IoError when a transfer failed; what is stored is torn then, and no step, read or gather is possible before
        state is loaded.
        """
        self._swap.paged.check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._swap.finish_updates()
        stepping = self._stepping(grad_scale)
        updates = {}
        for sub in self._swap.paged.sub_groups:
            own = {piece.shard: stepping[piece.shard] for piece in sub.layout.pieces if piece.shard in stepping}
            if own:
                updates[sub] = partial(self._update, sub, own)
        self._swap.paged.defer(updates)
        for each in stepping.values():
            self.state[each.parameter]["step"] += 1
            each.shard.stepped = True
        if self._swap.defers_updates:
            for each in stepping.values():
                each.parameter.grad = None  # whoever changed it would change the update
        else:
            self._finish_updates()
        self._swap.end_step()
        return loss

    def _finish_updates(self) -> None:
        try:
            self._swap.finish_updates()
        except BaseException as error:  # whoever repeats the step would repeat a part of it
            self._swap.paged.tear(f"an optimizer step ({error or type(error).__name__})")
            raise

    def init_state(self) -> None:
        """Make the state of all parameters now (zeros, step 0) instead of at their first step: for loading into it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._init_state_of(parameter)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around setting all parameters and their state in place: they are torn until the end of the block, and whole after."""
        paged = self._swap.paged
        paged.tear("loading a checkpoint")
        yield
        paged.mend()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for torch; the moments are moved into the arena. After a torn step: load the model's state dict first."""
        super().load_state_dict(state_dict)
        for parameter, loaded in cast("list[tuple[nn.Parameter, dict[str, Any]]]", list(self.state.items())):
            moments = {name: loaded[name] for name in _MOMENTS}
            del self.state[parameter]
            self._init_state_of(parameter, zero=False)
            for name, moment in moments.items():
                local = moment._local_tensor if isinstance(moment, DTensor) else moment
                self.state[parameter][name]._local_tensor.copy_(local)
            self.state[parameter]["step"] = torch.as_tensor(loaded["step"], dtype=torch.float32).cpu().clone()
        self._swap.paged.mend()

    def _stepping(self, grad_scale: float) -> dict[int, _Stepping]:
        """By number of their shard: the parameters that have a gradient, with state made where it is their first step."""
        found: dict[int, _Stepping] = {}
        for group in self.param_groups:
            settings = _settings(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self._init_state_of(parameter)
                grad = parameter.grad
                local = grad._local_tensor if isinstance(grad, DTensor) else grad
                shard = _trained_shard(parameter)
                step = self.state[parameter]["step"].clone()
                found[shard.index] = _Stepping(shard, parameter, settings, step, local.reshape(-1), grad_scale)
        return found

    @torch.no_grad()
    def _update(self, sub: PagedSubGroup, stepping: dict[int, _Stepping], lease: Lease | None) -> None:
        """Step the pieces of one sub-group in place and refresh its copies."""
        master = sub.master(lease)
        exp_avg, exp_avg_sq = sub.view(Field.EXP_AVG, lease), sub.view(Field.EXP_AVG_SQ, lease)
        batches: dict[AdamSettings, _Batch] = {}
        touched = []
        for piece in sub.layout.pieces:
            each = stepping.get(piece.shard)
            numel = min(piece.numel, each.grad.numel() - piece.start) if each else 0  # padding is never stepped
            if each is None or numel <= 0:
                continue
            place = slice(piece.offset, piece.offset + numel)
            batch = batches.setdefault(each.settings, _Batch())
            batch.masters.append(master[place])
            batch.exp_avgs.append(exp_avg[place])
            batch.exp_avg_sqs.append(exp_avg_sq[place])
            batch.grads.append(each.scaled(piece.start, numel))
            batch.steps.append(each.step.clone())  # a shard in two pieces makes one step
            touched.append((each.shard, piece.start, place))
        for settings, batch in batches.items():
            adam_(
                settings,
                masters=batch.masters,
                grads=batch.grads,
                exp_avgs=batch.exp_avgs,
                exp_avg_sqs=batch.exp_avg_sqs,
                steps=batch.steps,
            )
        sub.set_master(master, lease)
        for shard, start, place in touched:
            if shard.resident is not None:
                shard.resident[start : start + place.stop - place.start].copy_(master[place])

    def _init_state_of(self, parameter: nn.Parameter, *, zero: bool = True) -> None:
        """Make the state of a parameter that has none: step 0 and moments of zero (or left as they are in the arena)."""
        state = self.state[parameter]
        if state:
            return
        shard = _trained_shard(parameter)
        data = parameter.data
        assert isinstance(data, DTensor)
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name, which in _MOMENTS.items():
            local = PagedTensor.over(shard, which, self._swap, data.device)
            state[name] = DTensor.from_local(
                local, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
            )
            if zero and shard.stepped:
                local.zero_()


class PagedAdamW(PagedAdam):
    """`torch.optim.AdamW` for the parameters of a model that `swap.page` was called on; see `PagedAdam`."""

    def __init__(self, params: Any, *, swap: SwapManager, weight_decay: float = 1e-2, **settings: Any) -> None:
        super().__init__(params, swap=swap, weight_decay=weight_decay, decoupled_weight_decay=True, **settings)


@dataclass(frozen=True)
class _Stepping:
    """One parameter that is stepped: its shard, the settings of its group, its steps so far, and its gradient (1-D)."""

    shard: PagedShard
    parameter: nn.Parameter
    settings: AdamSettings
    step: torch.Tensor
    grad: torch.Tensor
    grad_scale: float

    def scaled(self, start: int, numel: int) -> torch.Tensor:
        """Elements of the gradient as they are stepped with (fp32, on the CPU)."""
        piece = self.grad[start : start + numel].to("cpu", torch.float32)
        return piece if self.grad_scale == 1.0 else piece * self.grad_scale


class _Batch:
    """The pieces of one sub-group that have the same settings."""

    def __init__(self) -> None:
        self.masters: list[torch.Tensor] = []
        self.grads: list[torch.Tensor] = []
        self.exp_avgs: list[torch.Tensor] = []
        self.exp_avg_sqs: list[torch.Tensor] = []
        self.steps: list[torch.Tensor] = []


def _settings(group: dict[str, Any]) -> AdamSettings:
    if group.get("amsgrad") or group.get("capturable") or group.get("differentiable"):
        raise ConfigError("amsgrad, capturable and differentiable are not available for paged parameters")
    if isinstance(group["lr"], torch.Tensor) and not group["fused"]:
        raise ConfigError("a learning rate that is a tensor needs fused=True for paged parameters: pass a float")
    return AdamSettings(
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        maximize=group["maximize"],
        fused=group["fused"],
    )


def _trained_shard(parameter: nn.Parameter) -> PagedShard:
    data = parameter.data
    local = data._local_tensor if isinstance(data, DTensor) else data
    if not isinstance(local, PagedTensor):
        raise ConfigError("a parameter given to the optimizer is not paged: call swap.page(model) first, then make it")
    if parameter.requires_grad and not local._shard.trained:
        raise ConfigError(f"{local._shard.name} was frozen when the model was paged: unfreeze it before page()")
    return local._shard
