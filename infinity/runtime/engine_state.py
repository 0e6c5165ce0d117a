"""What a checkpoint or a commit keeps besides masters and moments, taken from an engine and set again.

Counters, loss scale, schedule, hyper-parameters, random numbers, the user's own, buffers. Training thread only.
checkpoint/training_state.py says how they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.commits import Training, check_unpaged_state
from infinity.errors import CheckpointError
from infinity.fsdp2.names import buffer_names, parameter_names
from infinity.fsdp2.sharding import reshard
from infinity.runtime.hyperparameters import Hyperparameters, in_order_of
from infinity.runtime.in_memory import AnyPaging, Updater
from infinity.runtime.loss_scale import LossScale
from infinity.runtime.observe import StepProgress


@dataclass(eq=False)
class EngineState:
    """Captures and restores the state of one engine.

    A *training state* is this rank's, without the tensors of model and optimizer. An *unpaged state* is all that is not in the
    arena: a training state, and what of optimizer and model is neither master nor moment.
    """

    _module: nn.Module
    _optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    """The schedule that `step` steps, or None; a trainer may set its own after the engine was made."""
    _loss_scale: LossScale
    _hyperparameters: Hyperparameters
    _paging: AnyPaging
    _updater: Updater
    _progress: StepProgress

    def __post_init__(self) -> None:
        self._names = {parameter: names[0] for parameter, names in parameter_names(self._module).items()}

    @property
    def _group_names(self) -> list[list[str]]:
        """The names of each parameter group's parameters, whatever is gathered."""
        groups = self._optimizer.param_groups
        return [[self._names[p] for p in group["params"] if p in self._names] for group in groups]

    def capture_training(self, client_state: dict[str, Any]) -> dict[str, Any]:
        """The training state, as it is now."""
        training_state = {
            "global_steps": self._progress.global_steps,
            "skipped_steps": self._progress.skipped_steps,
            "client_state": client_state,
            "hyperparameters": self._hyperparameters.told,
            "group_names": self._group_names,
            "rng": torch.get_rng_state(),
            **self._capture_schedule(),
        }
        if torch.cuda.is_available():
            training_state["rng_device"] = torch.cuda.get_rng_state()
        return training_state

    def restore_training(self, training_state: dict[str, Any], *, schedule: bool = True) -> None:
        """Set a training state, that of the learning-rate schedule only where `schedule` says so."""
        training_state = in_order_of(self._group_names, training_state)
        self._progress.go_on_from(training_state["global_steps"], training_state.get("skipped_steps", 0))
        self._loss_scale.load_state_dict(training_state.get("loss_scale", {}))
        self._loss_scale.show_on(self._optimizer)
        if schedule and self.lr_scheduler is not None and training_state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(training_state["lr_scheduler"])
        self._hyperparameters.settle(training_state, schedule=schedule)
        if "rng" in training_state:
            torch.set_rng_state(training_state["rng"])
        if "rng_device" in training_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(training_state["rng_device"])

    def capture_unpaged(self, client_state: dict[str, Any]) -> dict[str, Any]:
        """The unpaged state, as it is now.

        Raises CheckpointError where parameters that the optimizer steps aren't seen in the model.
        """
        reshard(self._module)  # what an evaluation left gathered hides the parameters that have state
        state, groups, names = self._optimizer.state, self._optimizer.param_groups, parameter_names(self._module)
        hidden = sum(p not in names for group in groups for p in group["params"])
        if hidden:
            raise CheckpointError(
                f"{hidden} parameters of the optimizer are not seen in the model, as where an error ended a pass while they "
                "were gathered: what was committed or saved before stays; go on from that"
            )
        return {
            **self.capture_training(client_state),
            **self.capture_settings(),
            **self.capture_buffers(),
            "steps": {all_names[0]: state[p]["step"] for p, all_names in names.items() if "step" in state.get(p, {})},
        }

    def capture_settings(self) -> dict[str, Any]:
        """The part of an unpaged state that says how the next step updates."""
        groups = self._optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return {"param_groups": settings, **self._capture_schedule()}

    def _capture_schedule(self) -> dict[str, Any]:
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {"lr_scheduler": schedule, "loss_scale": self._loss_scale.state_dict()}

    def capture_buffers(self) -> dict[str, Any]:
        """The part of an unpaged state that the model's forward may change."""
        buffers = buffer_names(self._module, persistent=True)
        return {"buffers": {all_names[0]: buffer.detach() for buffer, all_names in buffers.items()}}

    def restore_unpaged(self, unpaged_state: dict[str, Any]) -> None:
        """Set what of an unpaged state is not training state: hyper-parameters, numbers of steps and buffers.

        Raises CheckpointError where they are of another training.
        """
        with_moments = {shard.name for shard in self._paging.paged.shards if shard.stepped}
        check_unpaged_state(unpaged_state, self.training(), with_moments)
        unpaged_state = in_order_of(self._group_names, unpaged_state)
        for group, saved in zip(self._optimizer.param_groups, unpaged_state["param_groups"], strict=True):
            group.update(saved)
        steps = unpaged_state["steps"]
        names = parameter_names(self._module)
        self._updater.restore_steps({p: steps[all_names[0]] for p, all_names in names.items() if all_names[0] in steps})
        with torch.no_grad():
            for buffer, all_names in buffer_names(self._module, persistent=True).items():
                buffer.copy_(unpaged_state["buffers"][all_names[0]])

    def training(self) -> Training:
        """What a commit or an arena checkpoint must fit to be gone on from."""
        shapes = {names[0]: tuple(b.shape) for b, names in buffer_names(self._module, persistent=True).items()}
        return Training(self._group_names, shapes, self._updater.counts_steps)
