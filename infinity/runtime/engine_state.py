"""The state of an engine that checkpoints and commits hold besides masters and moments. Training thread only.

Counters, loss scale, schedule, hyper-parameters, random numbers, client state, buffers. checkpoint/training_state.py stores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from infinity.checkpoint.commits import Training, check_unpaged_state
from infinity.errors import CheckpointError
from infinity.fsdp2.names import buffer_names, parameter_names
from infinity.fsdp2.sharding import reshard
from infinity.runtime.hyperparameters import Hyperparameters, in_order_of
from infinity.runtime.loss_scale import LossScale
from infinity.runtime.observe import StepProgress
from infinity.runtime.parts import Parts


@dataclass(eq=False)
class EngineState:
    """Captures and restores the state of one engine.

    A *training state* is this rank's, without the tensors of model and optimizer. An *unpaged state* is everything outside the
    arena: a training state, and the parts of optimizer and model that are neither master nor moment.
    """

    _parts: Parts
    _loss_scale: LossScale
    _hyperparameters: Hyperparameters
    _progress: StepProgress

    def __post_init__(self) -> None:
        self._names = {parameter: names[0] for parameter, names in parameter_names(self._parts.module).items()}

    @property
    def _group_names(self) -> list[list[str]]:
        """Parameter names of each parameter group, even while others are gathered."""
        groups = self._parts.optimizer.param_groups
        return [[self._names[p] for p in group["params"] if p in self._names] for group in groups]

    def forget_steps(self, training_state: dict[str, Any]) -> None:
        """Let parameters that had not stepped when `training_state` was captured take their first step."""
        unstepped = {name for names in training_state.get("unstepped", ()) for name in names}
        names_of = parameter_names(self._parts.module)
        self._parts.updater.forget_steps([p for p, names in names_of.items() if names[0] in unstepped])

    def capture_training(self, client_state: dict[str, Any]) -> dict[str, Any]:
        """Return the training state as it is now."""
        unstepped = {self._names[p] for p in self._parts.updater.unstepped if p in self._names}
        training_state = {
            "global_steps": self._progress.global_steps,
            "skipped_steps": self._progress.skipped_steps,
            "client_state": client_state,
            "hyperparameters": self._hyperparameters.of_run,
            "group_names": self._group_names,
            "unstepped": [[name for name in names if name in unstepped] for names in self._group_names],
            "rng": torch.get_rng_state(),
            **self._capture_schedule(),
        }
        if torch.cuda.is_available():
            training_state["rng_device"] = torch.cuda.get_rng_state()
        return training_state

    def check_training(self, training_state: dict[str, Any], *, schedule: bool) -> None:
        """Raise CheckpointError if `restore_training` would."""
        training_state = in_order_of(self._group_names, training_state)
        if schedule and self._parts.lr_scheduler is not None:
            self._hyperparameters.can_load_schedule(training_state)

    def restore_training(self, training_state: dict[str, Any], *, schedule: bool = True) -> None:
        """Set a training state; that of the learning-rate schedule only if `schedule`."""
        training_state = in_order_of(self._group_names, training_state)
        scheduler = self._parts.lr_scheduler
        takes = schedule and scheduler is not None and self._hyperparameters.can_load_schedule(training_state)
        self._progress.resume(training_state["global_steps"], training_state.get("skipped_steps", 0))
        self._loss_scale.load_state_dict(training_state.get("loss_scale", {}))
        self._loss_scale.show_on(self._parts.optimizer)
        if takes:
            scheduler.load_state_dict(training_state["lr_scheduler"])
        self._hyperparameters.settle(training_state, schedule=schedule)
        if "rng" in training_state:
            torch.set_rng_state(training_state["rng"])
        if "rng_device" in training_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(training_state["rng_device"])

    def capture_unpaged(self, client_state: dict[str, Any]) -> dict[str, Any]:
        """Return the unpaged state as it is now.

        Raises CheckpointError if the model does not show all parameters that the optimizer steps.
        """
        module, optimizer = self._parts.module, self._parts.optimizer
        reshard(module)  # groups that an evaluation left gathered hide the parameters that have state
        names = parameter_names(module)
        hidden = sum(p not in names for group in optimizer.param_groups for p in group["params"])
        if hidden:
            raise CheckpointError(
                f"{hidden} parameters of the optimizer are not in the model, as after an error ended a pass while they were "
                "gathered: resume from the last commit or checkpoint, which is unchanged"
            )
        state = optimizer.state
        return {
            **self.capture_training(client_state),
            **self.capture_settings(),
            **self.capture_buffers(),
            "steps": {all_names[0]: state[p]["step"] for p, all_names in names.items() if "step" in state.get(p, {})},
        }

    def capture_settings(self) -> dict[str, Any]:
        """Return the part of an unpaged state that determines how the next step updates."""
        groups = self._parts.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return {"param_groups": settings, **self._capture_schedule()}

    def _capture_schedule(self) -> dict[str, Any]:
        scheduler = self._parts.lr_scheduler
        schedule = scheduler.state_dict() if scheduler is not None else None
        return {"lr_scheduler": schedule, "loss_scale": self._loss_scale.state_dict()}

    def capture_buffers(self) -> dict[str, Any]:
        """Return the part of an unpaged state that a forward may change."""
        buffers = buffer_names(self._parts.module, persistent=True)
        return {"buffers": {all_names[0]: buffer.detach() for buffer, all_names in buffers.items()}}

    def restore_unpaged(self, unpaged_state: dict[str, Any]) -> None:
        """Set the parts of an unpaged state that are no training state: hyper-parameters, step counts and buffers.

        Raises CheckpointError if they belong to a different training.
        """
        parts = self._parts
        shards = parts.swap.paged.shards if parts.swap is not None else ()
        check_unpaged_state(unpaged_state, self.training(), {shard.name for shard in shards if shard.stepped})
        unpaged_state = in_order_of(self._group_names, unpaged_state)
        for group, saved in zip(parts.optimizer.param_groups, unpaged_state["param_groups"], strict=True):
            group.update(saved)
        steps, names = unpaged_state["steps"], parameter_names(parts.module)
        parts.updater.restore_steps({p: steps[all_names[0]] for p, all_names in names.items() if all_names[0] in steps})
        with torch.no_grad():
            for buffer, all_names in buffer_names(parts.module, persistent=True).items():
                buffer.copy_(unpaged_state["buffers"][all_names[0]])

    def training(self) -> Training:
        """Return what a commit or an arena checkpoint must match to be resumed from."""
        shapes = {names[0]: tuple(b.shape) for b, names in buffer_names(self._parts.module, persistent=True).items()}
        return Training(self._group_names, shapes, self._parts.updater.counts_steps)
