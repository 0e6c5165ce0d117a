"""accelerate's `Accelerator` with infinity's engine: the same loop, the same config file, no DeepSpeed.

    from infinity.integrations.accelerate import InfinityAccelerator as Accelerator

accelerate keeps the data, the ranks, gathering, accumulation and the folder of a state; the engine shards, pages and steps.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from infinity.extras import needs

with needs("accelerate"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

from infinity.errors import ConfigError
from infinity.runtime import Engine
from infinity.runtime.initialize import initialize
from infinity.runtime.optimizers import rebind


class InfinityAccelerator(Accelerator):
    """An Accelerator whose `prepare` puts one model, with its optimizer, under infinity's engine.

    `config`: a dict or a path to JSON; None takes that of a `deepspeed_plugin`, or else the file of `accelerate launch
    --deepspeed_config_file` (ACCELERATE_DEEPSPEED_CONFIG_FILE). `weights`: safetensors, as for `infinity.initialize`.
    `engine` is the engine, from `prepare` on. Raises ConfigError without a config, and for what the engine can't do.
    """

    engine: Engine | None = None
    gradient_accumulation_steps: int

    def __init__(
        self,
        *arguments: Any,
        config: Any = None,
        weights: str | Path | None = None,
        deepspeed_plugin: Any = None,
        **keywords: Any,
    ) -> None:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # or accelerate builds DeepSpeed's engine
        plugins = getattr(deepspeed_plugin, "hf_ds_config", None)
        self._config = config or getattr(plugins, "config", None) or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        if self._config is None:
            raise ConfigError("InfinityAccelerator needs config=, or accelerate launch --deepspeed_config_file")
        self._weights = weights
        super().__init__(*arguments, **keywords)
        self.register_save_state_pre_hook(self._save)
        self.register_load_state_pre_hook(self._load)

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Return the objects in their order, with the engine for the model."""
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [one for one in objects if isinstance(one, (torch.optim.Optimizer, DummyOptim))]
        schedules = [one for one in objects if one not in [*models, *optimizers] and _is_schedule(one)]
        if len(models) + (self.engine is not None and bool(models or optimizers)) > 1 or len(optimizers) > 1:
            raise ConfigError("an InfinityAccelerator trains one model with one optimizer: make another for a second")
        if models:
            self.engine = self._make_engine(models[0], optimizers, schedules, objects)
        elif self.engine is None and (optimizers or schedules):
            raise ConfigError("pass the model to prepare() with its optimizer and schedule")
        prepared = []
        for one in objects:
            engine = self.engine
            if engine is None or one not in [*models, *optimizers, *schedules]:
                prepared.append(super().prepare(one))
            elif one in models:
                prepared.append(engine)
            elif one in optimizers:
                prepared.append(self.prepare_optimizer(_SteppedOptimizer(engine)))
            elif isinstance(one, DummyScheduler):
                prepared.append(_SteppedSchedule(engine))
            else:
                rebind(one, engine.optimizer)
                prepared.append(super().prepare(one))
        return tuple(prepared) if len(prepared) != 1 else prepared[0]

    def _make_engine(self, model: nn.Module, optimizers: list[Any], schedules: list[Any], objects: Any) -> Engine:
        steps = self.gradient_accumulation_steps
        micro = next((one.batch_size for one in objects if isinstance(one, DataLoader)), None) or 1
        micro //= self.num_processes if self.split_batches else 1
        auto = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
            "train_batch_size": micro * steps * self.num_processes,
            "gradient_clipping": 0.0,
            "bf16": self.mixed_precision == "bf16",
            "fp16": self.mixed_precision == "fp16",
        }
        given: dict[str, Any] = {"optimizer": optimizers[0] if optimizers else None}
        if optimizers and isinstance(optimizers[0], DummyOptim):
            dummy = optimizers[0]
            given = {"model_parameters": dummy.params}
            auto |= {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
            auto |= {"warmup_min_lr": 0.0, "warmup_max_lr": dummy.lr}
        for schedule in schedules:
            if isinstance(schedule, DummyScheduler):
                auto |= {"total_num_steps": schedule.total_num_steps, "warmup_num_steps": schedule.warmup_num_steps}
        engine, *_ = initialize(model=model, config=self._config, weights=self._weights, auto=auto, **given)
        asked = engine.gradient_accumulation_steps()
        if steps == 1:
            self.gradient_accumulation_steps = asked
        elif steps != asked:
            engine.close()
            raise ConfigError(
                f'gradient_accumulation_steps is {asked}, but that of the Accelerator is {steps}: write "auto" for it'
            )
        return engine

    def backward(self, loss: torch.Tensor, **keywords: Any) -> Any:
        """Run the backward pass; that of the last micro-batch also clips and steps, as with DeepSpeed."""
        if self.engine is None:
            return super().backward(loss, **keywords)
        self.engine.set_gradient_accumulation_boundary(self.sync_gradients)
        self.engine.backward(loss, **keywords)
        return self.engine.step() if self.sync_gradients else None

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Return the norm of the last step's gradient before `gradient_clipping` of the config clipped it."""
        if self.engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        clipping = self.engine.gradient_clipping()
        if max_norm != clipping or norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_ has max_norm {max_norm} and norm_type {norm_type}, but the backward pass clips the "
                f"2-norm to {clipping}: set gradient_clipping in the config to the same value"
            )
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else torch.tensor(norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise ConfigError("infinity clips by the norm of the whole gradient: set gradient_clipping in the config")

    def no_sync(self, model: Any) -> Any:
        """Do nothing for the engine: `backward` marks the last micro-batch of a step."""
        return nullcontext() if isinstance(model, Engine) else super().no_sync(model)

    def unwrap_model(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        return model.module if isinstance(model, Engine) else super().unwrap_model(model, *arguments, **keywords)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return all weights in the dtype of compute, in memory of the first rank; an empty dict on the others."""
        if isinstance(model, Engine):
            return model._zero3_consolidated_16bit_state_dict() or {}
        return super().get_state_dict(model, unwrap)

    def save_model(self, model: Any, save_directory: str | Path, *arguments: Any, **keywords: Any) -> None:
        """Write safetensors in the dtype of compute, holding one tensor at a time."""
        if isinstance(model, Engine):
            model.save_16bit_model(save_directory)
        else:
            super().save_model(model, save_directory, *arguments, **keywords)

    def _save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        """The engine's part of `save_state`."""
        if self.engine is not None:
            self.engine.save_checkpoint(output_dir, tag=_TAG)
            self.engine.finish_checkpoint()

    def _load(self, models: list[Any], input_dir: str) -> None:
        """The engine's part of `load_state`, at any number of ranks."""
        if self.engine is not None:
            self.engine.load_checkpoint(input_dir, tag=_TAG)

    def end_training(self) -> None:
        """End the trackers and close the engine, which frees memory and drive space."""
        if self.engine is not None:
            self.engine.close()
        super().end_training()


def _is_schedule(one: Any) -> bool:
    """Return True also for a schedule that is no LRScheduler, such as transformers' GreedyLR."""
    moves = isinstance(getattr(one, "optimizer", None), torch.optim.Optimizer) and hasattr(one, "step")
    return moves or isinstance(one, (LRScheduler, DummyScheduler))


class _SteppedOptimizer(AcceleratedOptimizer):
    """An optimizer to read: the engine has stepped it, and has its state in the engine's checkpoints."""

    _is_accelerate_prepared = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)

    def step(self, closure: Any = None) -> None:
        pass

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    @property
    def step_was_skipped(self) -> bool:
        return bool(getattr(self.optimizer, "overflow", False))


class _SteppedSchedule:
    """The config's schedule to read: the engine has stepped it."""

    def __init__(self, engine: Engine) -> None:
        self.get_last_lr = engine.get_lr

    def step(self, *_: Any, **__: Any) -> None:
        pass


_TAG = "engine"
