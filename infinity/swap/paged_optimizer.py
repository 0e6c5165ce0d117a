"""Floor 4. Adam and AdamW over paged parameters: sub-groups flow through the pinned pool, three or more deep.

Sub-group k+1 is being read while k is updated and k-1 is being written; the pool is the only bound. Those that stay in host
memory are updated where they lie. The numbers are those of
`torch.optim.Adam` and `torch.optim.AdamW` with the same arguments, bit for bit: infinity/optim calls the same kernels.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.aio import Lease
from infinity.errors import ConfigError
from infinity.optim import AdamSettings, adam_
from infinity.store import Field
from infinity.swap.chunk import ChunkState
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

    `state_dict`, `load_state_dict`, param_groups and lr schedulers work as with torch: the moments in `state` are paged
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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient (fp32, of the shard's shape).

        Returns when all are updated; the last writes go on in the background. Raises IoError when a transfer failed; what
        is stored is torn then, and no step, read or gather is possible before state is loaded.
        """
        self._swap.paged.check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepping = self._stepping()
        todo = [
            sub
            for sub in self._swap.paged.sub_groups
            if any(piece.shard in stepping for piece in sub.layout.pieces) and sub.layout.trained
        ]
        self._swap.begin_step()
        try:
            self._run(todo, stepping)
        except BaseException as error:
            self._swap.paged.tear(f"an optimizer step ({error or type(error).__name__})")
            raise
        for each in stepping.values():
            self.state[each.parameter]["step"] += 1
        self._swap.end_step()
        return loss

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

    def _stepping(self) -> dict[int, _Stepping]:
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
                found[shard.index] = _Stepping(shard, parameter, settings, local.reshape(-1))
        return found

    def _run(self, todo: list[PagedSubGroup], stepping: dict[int, _Stepping]) -> None:
        """Send the sub-groups through the pool."""
        stager = self._swap.stager
        ahead = self._swap.sub_groups_ahead
        moving = deque(sub.chunk for sub in todo if sub.moves)
        for sub in _in_turn([sub for sub in todo if sub.moves], [sub for sub in todo if not sub.moves]):
            stager.wanted = list(itertools.islice(moving, 1 + ahead))
            for chunk in stager.wanted:
                if chunk.state is ChunkState.RESTING and not stager.prefetch(chunk):
                    break
            if not sub.moves:
                self._update(sub, None, stepping)
                continue
            moving.popleft()
            lease = stager.acquire(sub.chunk)
            try:
                self._update(sub, lease, stepping)
            except BaseException:
                stager.release(sub.chunk, keep=False)
                raise
            stager.write_back(sub.chunk)

    def _update(self, sub: PagedSubGroup, lease: Lease | None, stepping: dict[int, _Stepping]) -> None:
        """Step the pieces of one sub-group in place and refresh its copy."""
        master, exp_avg, exp_avg_sq = (
            sub.view(each, lease) for each in (Field.MASTER, Field.EXP_AVG, Field.EXP_AVG_SQ)
        )
        copy = sub.view(Field.COPY, lease) if Field.COPY in sub.layout.fields else master
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
            batch.grads.append(each.grad[piece.start : piece.start + numel].to("cpu", torch.float32))
            batch.steps.append(self.state[each.parameter]["step"].clone())  # a shard in two pieces makes one step
            each.shard.stepped = True
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
        if copy is not master:
            copy.copy_(master)
        for shard, start, place in touched:
            if shard.resident is not None:
                shard.resident[start : start + place.stop - place.start].copy_(copy[place])

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


def _in_turn(moving: list[PagedSubGroup], staying: list[PagedSubGroup]) -> list[PagedSubGroup]:
    """All of them, those that stay in memory evenly between the others: the drive reads and writes while they are updated."""
    placed = [((2 * k + 1) * len(staying), sub) for k, sub in enumerate(moving)]
    placed += [((2 * k + 1) * len(moving), sub) for k, sub in enumerate(staying)]
    return [sub for _, sub in sorted(placed, key=lambda each: each[0])]


class _Stepping:
    """One parameter that is stepped now: its shard, the settings of its group, its gradient (1-D)."""

    def __init__(self, shard: PagedShard, parameter: nn.Parameter, settings: AdamSettings, grad: torch.Tensor) -> None:
        self.shard = shard
        self.parameter = parameter
        self.settings = settings
        self.grad = grad


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
