"""A training with nothing offloaded: torch's own optimizer over FSDP2's sharded parameters, on the device.

The engine asks a swap manager, a paged optimizer and the commits of a durable run. Where there are none, what is here answers
to the same names. Training thread only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from infinity.checkpoint.commits import Commits, Part
from infinity.device import SetAside
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.sharding import local_of
from infinity.runtime.loss_scale import Scalar
from infinity.swap import PagedOptimizer, SwapManager, SwapStats, TraceSummary
from infinity.swap.health import ModelHealth
from infinity.swap.paging import Paging
from infinity.swap.shard import PagedShard
from infinity.swap.timeline import Timeline


class InMemory:
    """In place of a paged optimizer and of all that it stands on: parameters, gradients and optimizer state are in memory."""

    counts_steps = True
    norms: Mapping[nn.Parameter, torch.Tensor] = {}
    shards: Sequence[PagedShard] = ()
    held_bytes = 0
    timeline: Timeline | None = None

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self.health = health = ModelHealth()
        self._aside = SetAside(())
        optimizer.register_load_state_dict_post_hook(lambda _: health.mend())

    # As of a paged optimizer.

    def check_untouched(self) -> None: ...

    def expect(self, grad_scale: float | None) -> None: ...

    def take_gradients(self) -> Mapping[nn.Parameter, torch.Tensor]:
        return self.norms

    def prepare(self, grad_scale: Scalar) -> None: ...

    def step(self, *, grad_scale: Scalar) -> None:
        if isinstance(grad_scale, torch.Tensor) or grad_scale != 1.0:
            grads = [local_of(p.grad) for p in self._module.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, grad_scale)
        self._optimizer.step()

    def skip(self) -> None: ...

    def discard(self) -> None: ...

    def init_state(self) -> None:
        """State for every parameter, as a first step would make it, without a step: a checkpoint holds all of it."""
        optimizer = self._optimizer
        if isinstance(optimizer, torch.optim.Adam):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and not optimizer.state[parameter]:
                        optimizer.state[parameter].update(_first_adam_state(parameter, group))
        elif isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # There, even if empty: else torch would take a step to make it.
                    state = optimizer.state[parameter]
                    if parameter.requires_grad and group["momentum"] and state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter.data)
        elif not optimizer.state:
            get_optimizer_state_dict(self._module, optimizer)  # torch makes it by a step that changes nothing

    def restore_steps(self, steps: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for parameter, step in steps.items():
            self._optimizer.state[parameter]["step"].copy_(step)

    # As of a swap manager, its paging, and that one's paged model and gradients.

    @property
    def paging(self) -> InMemory:
        return self

    @property
    def paged(self) -> InMemory:
        return self

    @property
    def waiting_gradients(self) -> InMemory:
        return self

    def alone(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def recover(self) -> None: ...

    def sleep(self, *, pinned: bool) -> None:
        if pinned:
            raise ConfigError(
                "sleep(2) gives host memory back, and nothing of this training is on NVMe: use sleep(1), or set offload_param "
                'or offload_optimizer to {"device": "nvme", ...}'
            )
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        tensors = [*self._module.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
        local = [local_of(tensor.data) for tensor in tensors]
        self._aside = SetAside(tensor for tensor in local if tensor.device.type != "cpu")

    def wake(self) -> None:
        self._aside.put_back()

    def stats(self) -> SwapStats | None:
        return None

    def step_bytes(self, *, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        return 0, 0

    def start_trace(self) -> None:
        raise _nothing_to_trace()

    def stop_trace(self, path: str | os.PathLike[str] | None) -> TraceSummary:
        raise _nothing_to_trace()

    def close(self) -> None: ...


class NoCommits:
    """In place of `Commits`, where nothing of a run stays."""

    pending_step: int | None = None

    def check_storable(self, client_state: dict[str, Any]) -> None: ...

    def note(self, *state: object) -> None: ...

    def fix(self, part: Part) -> None: ...

    def make(self) -> None: ...

    def try_to_make(self) -> None: ...


Updater = PagedOptimizer | InMemory
"""What steps the model."""
Storage = SwapManager | InMemory
"""What holds the model."""
AnyPaging = Paging | InMemory
AnyCommits = Commits | NoCommits


def _first_adam_state(parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    step_device = parameter.device if group["fused"] else "cpu"
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=step_device),
        "exp_avg": torch.zeros_like(parameter.data),
        "exp_avg_sq": torch.zeros_like(parameter.data),
    }
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = torch.zeros_like(parameter.data)
    return state


def _nothing_to_trace() -> InfinityError:
    return InfinityError(
        "nothing of this training is offloaded, so there is no timeline of it: use torch.profiler, or set "
        'offload_param or offload_optimizer to {"device": "nvme", ...}'
    )
