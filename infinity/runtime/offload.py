"""Floor 11. What a step does otherwise where state rests on NVMe: one protocol, `Offload`, and its implementations.

`InMemory` is torch's own optimizer over sharded parameters. `Paged` is a paged optimizer over what a swap manager holds;
`Durable` is that with steps that are committed. The engine holds one of them and does not ask which. Training thread only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from infinity.checkpoint.commits import Commits, Training
from infinity.errors import InfinityError
from infinity.fsdp2.sharding import local_of
from infinity.runtime.gradient_norm import Scalar
from infinity.swap import PagedOptimizer, SwapManager, SwapStats, TraceSummary
from infinity.swap.health import ModelHealth
from infinity.swap.timeline import Timeline


class Offload(Protocol):
    """Where parameters, gradients and optimizer state are between their uses, and how a step comes to them."""

    @property
    def swap(self) -> SwapManager | None:
        """What holds the model; None where it is in memory."""

    @property
    def health(self) -> ModelHealth:
        """Whether the values are those of one step, and may be used."""

    @property
    def on_host(self) -> bool:
        """Whether the optimizer runs on the host, which then has to know what gradients are multiplied by."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether the backward applies gradients as they come."""

    @property
    def counts_steps(self) -> bool:
        """Whether the optimizer's state holds the number of steps of each parameter."""

    # A step.

    @property
    def has_taken(self) -> bool:
        """Whether gradients were taken out of `.grad` since the last step."""

    @property
    def waiting_gradient_bytes(self) -> int:
        """Memory (bytes) that holds gradients which were taken."""

    def check_untouched(self) -> None:
        """Raise InfinityError where somebody set `.grad` of what was taken."""

    def take_gradients(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """Norms (0-D) of all gradients that are not in `.grad`, those of unfinished groups included."""

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """Around a step, into which no other thread may look."""

    def prepare(self, factor: Scalar) -> None:
        """All of a step that may fail and leave everything as it was."""

    def apply(self, factor: Scalar) -> None:
        """Step the optimizer with the gradients multiplied by `factor`, inside a change of the model's health."""

    def skip(self) -> None:
        """A step that changes nothing, because gradients overflowed."""

    # What an exception or a load leaves.

    def recover(self) -> None:
        """Make anew what a pass keeps that an exception ended."""

    def discard(self) -> None:
        """Forget the gradients, because all values are set anew."""

    def check_whole(self) -> None:
        """Raise InfinityError where the values are not those of one step, or gone."""

    # The optimizer's state.

    @property
    def names_with_moments(self) -> set[str]:
        """Parameters whose moments rest on NVMe."""

    def make_optimizer_state(self) -> None:
        """State for every parameter, as a first step would make it, without a step: a checkpoint holds all of it."""

    def restore_steps(self, steps: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """These parameters were stepped so often (0-D each); their moments are there."""

    # What it took.

    @property
    def timeline(self) -> Timeline | None:
        """Where a trace is noted; None while none runs."""

    def stats(self) -> SwapStats | None:
        """Counters since the start; None where nothing rests on NVMe."""

    def step_bytes(self, *, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        """Bytes (read, written) of NVMe that a step moves: see `SwapManager.step_bytes`."""

    def start_trace(self) -> None:
        """See `Engine.start_trace`. Raises InfinityError where nothing rests on NVMe."""

    def stop_trace(self, path: str | os.PathLike[str] | None) -> TraceSummary:
        """See `Engine.stop_trace`. Raises InfinityError where nothing rests on NVMe."""

    # Commits. Collectives, which do nothing where nothing of the run stays.

    @property
    def is_durable(self) -> bool:
        """Whether steps are committed."""

    @property
    def pending_commit(self) -> int | None:
        """The step that is to be committed; None where none is."""

    def check_storable(self, client_state: dict[str, Any]) -> None:
        """Raise CheckpointError on all ranks where that of one can't be committed."""

    def note_commit(
        self, step: int, training: Callable[[], Training], unpaged_state: Callable[[], dict[str, Any]]
    ) -> None:
        """The step is over, and to be committed: see `Commits.note`."""

    def commit(self) -> None:
        """Commit what was noted last, if it isn't yet: see `Commits.make`."""

    def try_to_commit(self) -> None:
        """The same before its values are set anew; where it can't be done, the log says so."""

    def close(self) -> None:
        """Give memory and drive space back."""


class _NotDurable:
    """Of an `Offload` without commits: nothing of the run stays."""

    is_durable = False
    pending_commit: int | None = None

    def check_storable(self, client_state: dict[str, Any]) -> None:
        pass

    def note_commit(
        self, step: int, training: Callable[[], Training], unpaged_state: Callable[[], dict[str, Any]]
    ) -> None:
        pass

    def commit(self) -> None:
        pass

    def try_to_commit(self) -> None:
        pass


class InMemory(_NotDurable):
    """Parameters, gradients and optimizer state in memory: torch's own optimizer, over what FSDP2 sharded."""

    swap: SwapManager | None = None
    on_host = False
    updates_in_backward = False
    counts_steps = True
    has_taken = False
    waiting_gradient_bytes = 0
    timeline: Timeline | None = None

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self.health = health = ModelHealth()
        optimizer.register_load_state_dict_post_hook(lambda _: health.mend())

    def check_untouched(self) -> None:
        pass

    def take_gradients(self) -> Mapping[nn.Parameter, torch.Tensor]:
        return {}

    def alone(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def prepare(self, factor: Scalar) -> None:
        pass

    def apply(self, factor: Scalar) -> None:
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            grads = [local_of(p.grad) for p in self._module.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, factor)
        self._optimizer.step()

    def skip(self) -> None:
        pass

    def recover(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def check_whole(self) -> None:
        self.health.check_whole()

    @property
    def names_with_moments(self) -> set[str]:
        return set()

    def make_optimizer_state(self) -> None:
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

    def stats(self) -> SwapStats | None:
        return None

    def step_bytes(self, *, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        return 0, 0

    def start_trace(self) -> None:
        raise _nothing_to_trace()

    def stop_trace(self, path: str | os.PathLike[str] | None) -> TraceSummary:
        raise _nothing_to_trace()

    def close(self) -> None:
        pass


class Paged(_NotDurable):
    """What a swap manager holds, and a paged optimizer over it."""

    on_host = True

    def __init__(self, swap: SwapManager, optimizer: PagedOptimizer) -> None:
        self.swap: SwapManager = swap
        self._optimizer = optimizer
        self.health = swap.paged.health
        self.updates_in_backward = swap.paging.options.update == "backward"
        self.counts_steps = optimizer.counts_steps

    @property
    def has_taken(self) -> bool:
        return bool(self._optimizer.norms)

    @property
    def waiting_gradient_bytes(self) -> int:
        return self.swap.paging.waiting_gradients.held_bytes

    def check_untouched(self) -> None:
        self._optimizer.lap.check_untouched()

    def take_gradients(self) -> Mapping[nn.Parameter, torch.Tensor]:
        return self._optimizer.take_gradients()

    def alone(self) -> contextlib.AbstractContextManager[object]:
        return self.swap.paging.alone()

    def prepare(self, factor: Scalar) -> None:
        assert isinstance(factor, float)
        self._optimizer.prepare(factor)

    def apply(self, factor: Scalar) -> None:
        assert isinstance(factor, float)
        self._optimizer.step(grad_scale=factor)

    def skip(self) -> None:
        self._optimizer.skip()

    def recover(self) -> None:
        self.swap.paging.recover()

    def discard(self) -> None:
        self._optimizer.discard()

    def check_whole(self) -> None:
        self.swap.paged.health.check_whole()

    @property
    def names_with_moments(self) -> set[str]:
        return {shard.name for shard in self.swap.paged.shards if shard.stepped}

    def make_optimizer_state(self) -> None:
        self._optimizer.init_state()

    def restore_steps(self, steps: Mapping[nn.Parameter, torch.Tensor]) -> None:
        self._optimizer.restore_steps(steps)

    @property
    def timeline(self) -> Timeline | None:
        return self.swap.timeline

    def stats(self) -> SwapStats | None:
        return self.swap.stats()

    def step_bytes(self, *, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        return self.swap.step_bytes(micro_batches=micro_batches, gathers=gathers)

    def start_trace(self) -> None:
        self.swap.start_trace()

    def stop_trace(self, path: str | os.PathLike[str] | None) -> TraceSummary:
        return self.swap.stop_trace(path)

    def close(self) -> None:
        self.swap.close()


class Durable(Paged):
    """Paged, with steps that are committed, so that a killed run goes on."""

    is_durable = True

    def __init__(self, swap: SwapManager, optimizer: PagedOptimizer, commits: Commits) -> None:
        super().__init__(swap, optimizer)
        self._commits = commits

    @property
    def pending_commit(self) -> int | None:  # type: ignore[override]
        return self._commits.pending_step

    def check_storable(self, client_state: dict[str, Any]) -> None:
        self._commits.check_storable(client_state)

    def note_commit(
        self, step: int, training: Callable[[], Training], unpaged_state: Callable[[], dict[str, Any]]
    ) -> None:
        self._commits.note(step, training(), unpaged_state)

    def commit(self) -> None:
        self._commits.make()

    def try_to_commit(self) -> None:
        self._commits.try_to_make()


def make_offload(
    module: nn.Module, optimizer: torch.optim.Optimizer, swap: SwapManager | None, commits: Commits | None
) -> Offload:
    """The one for this optimizer over `module`, which `swap` has paged (None: it is in memory)."""
    if swap is None:
        return InMemory(module, optimizer)
    assert isinstance(optimizer, PagedOptimizer)
    return Paged(swap, optimizer) if commits is None else Durable(swap, optimizer, commits)


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
        "nothing of this training rests on NVMe, so there is no timeline of it: use torch.profiler, or set "
        'offload_param or offload_optimizer to {"device": "nvme", ...}'
    )
