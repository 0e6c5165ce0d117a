"""A training with nothing offloaded: torch's own optimizer over FSDP2's sharded parameters, on the device.

The engine uses a swap manager, its paging, a paged optimizer and the commits of a run. `InMemory` and `NoCommits` have the
same methods, for a model without them. Training thread only.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.commits import Part
from infinity.device import SetAside
from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.sharding import local_of
from infinity.optim.hosted import bare
from infinity.runtime.loss_scale import Scalar
from infinity.swap import SwapStats, TraceSummary
from infinity.swap.health import ModelHealth
from infinity.swap.timeline import Timeline


class InMemory:
    """Replaces a swap manager, its paging and a paged optimizer: everything is in memory."""

    counts_steps = True
    norms: Mapping[nn.Parameter, torch.Tensor] = {}
    timeline: Timeline | None = None

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self.health = health = ModelHealth()
        self._aside = SetAside(())
        self.unstepped: Collection[nn.Parameter] = ()
        """Within `whole_state`: the parameters that have not stepped. Their state is dropped at its end."""
        optimizer.register_load_state_dict_post_hook(lambda _: health.mend())

    # Methods of a paged optimizer.

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

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Run the block with state of all parameters, as a checkpoint has it. An optimizer may take a first step in another
        way, so that of parameters that have not stepped is dropped afterwards."""
        try:
            self._init_state()
            yield
        finally:
            for parameter in self.unstepped:
                self._optimizer.state.pop(parameter, None)
            self.unstepped = ()

    def forget_steps(self, parameters: Collection[nn.Parameter]) -> None:
        """Within `whole_state`, after a load: the next step of these parameters alone is their first."""
        self.unstepped = parameters

    def _init_state(self) -> None:
        state, made = self._optimizer.state, list[nn.Parameter]()
        self.unstepped = made
        for group in self._optimizer.param_groups:
            settings = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for parameter in (p for p in group["params"] if p.requires_grad):
                if any(value is not None for value in state.get(parameter, {}).values()):
                    continue
                stand_in = nn.Parameter(torch.zeros_like(parameter.data))
                stand_in.grad = torch.zeros_like(stand_in.data)
                worker = bare(self._optimizer, [{**settings, "params": [stand_in]}])
                with torch.no_grad():
                    inspect.unwrap(type(worker).step)(worker)
                values = state[parameter] = worker.state[stand_in]  # even if empty, or torch would step to make it
                if "step" in values:
                    values["step"] = values["step"] * 0
                made.append(parameter)

    def restore_steps(self, steps: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for parameter, step in steps.items():
            self._optimizer.state[parameter]["step"].copy_(step)

    # Methods of a swap manager and its paging.

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

    def transferred(self) -> tuple[int, int, float]:
        return 0, 0, 0.0

    def step_bytes(self, *, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        return 0, 0

    def start_trace(self) -> None:
        raise InfinityError(
            "nothing of this training is offloaded, so there is no timeline of it: use torch.profiler, or set "
            'offload_param or offload_optimizer to {"device": "nvme", ...}'
        )

    def stop_trace(self, path: str | os.PathLike[str] | None) -> TraceSummary:
        self.start_trace()
        raise AssertionError

    def close(self) -> None: ...


class NoCommits:
    """Replaces `Commits` in a run that is not durable."""

    pending_step: int | None = None

    def check_storable(self, client_state: dict[str, Any]) -> None: ...

    def note(self, *state: object) -> None: ...

    def fix(self, part: Part) -> None: ...

    def make(self) -> None: ...

    def try_to_make(self) -> None: ...
