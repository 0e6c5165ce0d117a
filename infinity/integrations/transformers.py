"""transformers' Trainer on infinity's engine: the same arguments, the same JSON, no DeepSpeed.

    from infinity.integrations.transformers import InfinityTrainer as Trainer
    from infinity.integrations.transformers import InfinityTrainingArguments as TrainingArguments

The Trainer keeps its loop, data and callbacks; the engine shards, pages, steps, saves and loads.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infinity.extras import needs

with needs("transformers"):
    from transformers import Trainer, TrainingArguments

from infinity.config import Config, load_config
from infinity.errors import CheckpointError, ConfigError
from infinity.fsdp2.adapters import has_adapters
from infinity.runtime import Engine
from infinity.runtime.initialize import initialize
from infinity.runtime.lr_schedules import is_driven_by_metric
from infinity.runtime.pretrained import load_trained


class InfinityTrainingArguments(TrainingArguments):
    """TrainingArguments whose `deepspeed` (a path to JSON, JSON text, or a dict) is the config of infinity.

    Its "auto" values are filled from the other arguments, as with DeepSpeed. With `infinity.micro_batches` "auto" the Trainer
    takes all samples of a step at once, and the engine splits them into `gradient_accumulation_steps` parts, which take turns:
    `per_device_train_batch_size` becomes the product of both, `gradient_accumulation_steps` 1.
    """

    infinity_config: str | dict[str, Any] | None = None
    infinity_micro_batches: int | None = None

    def __post_init__(self) -> None:
        self.infinity_config = vars(self)["deepspeed"]
        self.deepspeed = None
        super().__post_init__()
        if self.infinity_config is not None and "infinity.micro_batches" in load_config(self.infinity_config).auto:
            self.infinity_micro_batches = parts = int(self.gradient_accumulation_steps)
            self.per_device_train_batch_size *= parts
            self.gradient_accumulation_steps: int = 1


class InfinityTrainer(Trainer):
    """A Trainer that trains models larger than memory. Its `args` are InfinityTrainingArguments with `deepspeed` set.

    `engine` is infinity's, from the first `train`, `evaluate` or `predict` on. A model on the meta device
    (`infinity.init_empty`) is filled from `weights`, safetensors (file or folder), or by its own initialisation. For a model of
    PEFT, `weights` are those of its base model; frozen weights stay in these files, and the adapters are saved.

    Raises ConfigError if config and arguments contradict each other.
    """

    engine: Engine | None = None
    _schedule_of_config: Any = None
    _learning_rate: float = 0.0
    _created_lr_scheduler: bool
    current_gradient_accumulation_steps: int
    compute_loss: Callable[..., Any]

    def __init__(self, *arguments: Any, weights: str | Path | None = None, **keywords: Any) -> None:
        self._weights = weights
        super().__init__(*arguments, **keywords)
        if getattr(self.args, "infinity_config", None) is None:
            raise ConfigError(
                "InfinityTrainer needs its config: args=InfinityTrainingArguments(deepspeed='config.json', ...)"
            )
        if self.model_init is not None:
            raise ConfigError("InfinityTrainer takes no model_init: pass model=")
        self._compute_whole, self.compute_loss = self.compute_loss, self._compute_in_parts

    def close(self) -> None:
        """Free memory and drive space. The model can't be used any more."""
        if self.engine is not None:
            self.engine.close()

    # ---- Overrides: the engine instead of DeepSpeed or FSDP ----

    def _build_accelerator_args(self, **keywords: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**keywords)
        return {**built, "mixed_precision": "no"}  # the engine computes in the dtype of its config

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Does nothing: the engine places the model, which may not fit on `device`."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        self._ensure_engine()
        return self.model

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        engine = self._ensure_engine(max_steps)
        self._set_schedule(engine, max_steps)
        if resume_from_checkpoint is not None:
            self._load(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Does nothing, as the engine does not exist yet; `_prepare_for_training` loads."""

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and self.args.save_only_model:
            load_trained(self._ensure_engine(), Path(best))
        else:
            self._load(best)

    def _load(self, folder: str | None) -> None:
        """Load a checkpoint, but leave the random numbers to the Trainer, which restores them in the middle of an epoch."""
        engine = self._ensure_engine()
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            loaded = engine.load_checkpoint(folder)[0] if folder is not None else None
        if loaded is None:
            raise CheckpointError(
                f"{folder} holds no checkpoint of this training: name one of its checkpoint-N folders, if they were saved "
                "without save_only_model"
            )

    def compute_loss_context_manager(self) -> Any:
        """Around every forward, in which the Trainer calls the model without the engine: the engine's forward pass."""
        stack = contextlib.ExitStack()
        stack.enter_context(super().compute_loss_context_manager())
        if not self._ensure_engine().splits:
            stack.enter_context(self._ensure_engine().forward_pass())
        return stack

    def _compute_in_parts(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Call `compute_loss`; if the engine splits the batch, for each part, and the outputs are the loss alone."""
        compute, engine = self._compute_whole, self._ensure_engine()
        told_items = {"num_items_in_batch": num_items_in_batch}
        if not engine.splits:
            return compute(model, inputs, return_outputs=return_outputs, **told_items)

        def of_part(forward: Callable[..., Any], **inputs: Any) -> torch.Tensor:
            part = self._joined(inputs)
            loss: torch.Tensor = compute(_Called(forward, model), part, return_outputs=False, **told_items)
            return loss

        summed = self.loss_is_scaled_for_ga  # each loss is a share of the whole step's
        if summed is None:
            told = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
            summed = told and num_items_in_batch is not None
        parts = engine.config.infinity.micro_batches
        self.current_gradient_accumulation_steps *= parts  # losses may divide by it
        try:
            loss = engine.loss_in_parts(of_part, self._divisible(inputs), summed=summed)
        finally:
            self.current_gradient_accumulation_steps //= parts
        return (loss, {"loss": loss}) if return_outputs else loss

    def _divisible(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs with one sample in each row, so that they can be split; `_joined` undoes it."""
        return inputs

    def _joined(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self._ensure_engine().get_global_grad_norm()  # already clipped, if the config says so

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        return self._clip_grad_norm(model)

    def _get_learning_rate(self) -> float:
        return self._learning_rate

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._ensure_engine().save_checkpoint(output_dir)
        self._ensure_engine().finish_checkpoint()  # the Trainer removes older ones next

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in the compute dtype, for `from_pretrained`; of PEFT the adapters, in fp32. A collective."""
        engine = self._ensure_engine()
        folder = Path(output_dir or self.args.output_dir)
        if has_adapters(engine.module):
            engine.module.save_pretrained(folder)  # type: ignore[operator]
        else:
            engine.save_16bit_model(folder)
        if self.args.should_save:
            self._save_descriptions(folder, engine._parts.resolved.compute_dtype)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_descriptions(self, folder: Path, stored: torch.dtype) -> None:
        """Save the files that `from_pretrained` needs besides the weights, which are `stored` in this dtype."""
        config = getattr(self.model, "config", None)
        if config is not None and not has_adapters(self.model):
            config.architectures = [type(self.model).__name__]
            config.dtype = stored
            config.save_pretrained(folder)
        for described in (getattr(self.model, "generation_config", None), self.processing_class):
            if described is not None:
                described.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    # ---- The engine ----

    def _ensure_engine(self, max_steps: int | None = None) -> Engine:
        """The engine, made when first needed. `max_steps`: of the whole training, where the caller knows."""
        if self.engine is None:
            config = load_config(self.args.infinity_config)
            auto = self._autos(self._planned_steps() if max_steps is None else max_steps)
            _check_agreement(config.resolve(world_size=self.args.world_size, **auto), self.args)
            self.engine, optimizer, _, _ = initialize(
                model=self.model,
                optimizer=self.create_optimizer() if config.optimizer is None else None,
                config=self.args.infinity_config,
                weights=self._weights,
                auto=auto,
            )
            self.optimizer = _SteppedByEngine(optimizer)
            self._schedule_of_config = self.engine.lr_scheduler
            self.accelerator.backward = self._backward
        if self.model not in self.accelerator._models:  # which `train` empties
            self.accelerator._models.append(self.model)  # so that it is not prepared again
        return self.engine

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Replaces `accelerator.backward`; that of the last micro-batch also steps, as with DeepSpeed."""
        engine = self._ensure_engine()
        engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        engine.backward(loss, scale_wrt_gas=False)  # the Trainer has divided it
        if self.accelerator.sync_gradients:
            self._learning_rate = engine.get_lr()[0]
            engine.step()

    def _set_schedule(self, engine: Engine, max_steps: int) -> None:
        """Set the schedule, the config's or else the Trainer's, on the engine's optimizer; the engine steps it."""
        if self._schedule_of_config is None:
            if self._created_lr_scheduler:
                self.lr_scheduler, self._created_lr_scheduler = None, False  # of an earlier call of train
            engine.lr_scheduler = self.create_scheduler(max_steps, engine.optimizer)
            if engine.lr_scheduler.optimizer is not engine.optimizer:
                raise ConfigError(
                    "the scheduler belongs to an optimizer that the engine has replaced: pass the optimizer alone"
                )
        by_metric = is_driven_by_metric(engine.lr_scheduler)  # the Trainer steps it, after an evaluation
        self.lr_scheduler = engine.lr_scheduler if by_metric else _SteppedByEngine(engine.lr_scheduler)

    def _planned_steps(self) -> int:
        """Steps of the training that may follow an evaluation."""
        if self.args.max_steps > 0 or self.train_dataset is None:
            return max(int(self.args.max_steps), 1)
        samples_per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return max(1, math.ceil(float(len(self.train_dataset) / samples_per_step * self.args.num_train_epochs)))

    def _autos(self, max_steps: int) -> dict[str, Any]:
        """Values of the arguments for keys that the config leaves "auto"."""
        args = self.args
        return {
            "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "micro_batches": args.infinity_micro_batches,
            "train_batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "gradient_clipping": args.max_grad_norm,
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            "warmup_min_lr": 0.0,
            "warmup_max_lr": args.learning_rate,
            "warmup_num_steps": args.get_warmup_steps(max_steps),
            "total_num_steps": max_steps,
            "bf16": args.bf16,
            "fp16": args.fp16,
        }


class _Called:
    """A model for the Trainer to call, with another forward."""

    def __init__(self, forward: Callable[..., Any], model: Any) -> None:
        self._forward, self._model = forward, model

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(self._model)

    def __call__(self, **inputs: Any) -> Any:
        return self._forward(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _SteppedByEngine:
    """An optimizer or schedule for the Trainer to read. `step` and `zero_grad` do nothing: the engine has done so."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def step(self, *_: Any, **__: Any) -> None:
        pass

    def zero_grad(self, *_: Any, **__: Any) -> None:
        pass


def _check_agreement(config: Config, args: TrainingArguments) -> None:
    """Raise ConfigError if the JSON and the arguments have different numbers."""
    pairs = {
        "train_micro_batch_size_per_gpu": (config.batch.micro, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (config.batch.accumulation, "gradient_accumulation_steps"),
    }
    for key, (value, argument) in pairs.items():
        if value != getattr(args, argument):
            raise ConfigError(
                f'{key} is {value}, but {argument} of the arguments is {getattr(args, argument)}: write "auto" for it'
            )
