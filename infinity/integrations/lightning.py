"""A Lightning strategy on infinity's engine, with the names and arguments of Lightning's DeepSpeed strategy.

The import registers names such as `Trainer(strategy="infinity_stage_3_offload_nvme")`. Lightning keeps its loops, data and
callbacks; the engine shards, pages, steps, saves and loads.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from infinity.extras import needs

with needs("lightning"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

from infinity.errors import CheckpointError, ConfigError, parsing
from infinity.fsdp2.first_values import init_empty
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.runtime import Engine
from infinity.runtime.initialize import initialize
from infinity.runtime.micro_batches import loss_in
from infinity.runtime.optimizers import rebind
from infinity.store.files import open_regular, replace_durably

log = logging.getLogger("infinity")

_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
_ENGINE = "_infinity_engine"  # attribute of a module
_TAG = "engine"  # of the engine's checkpoint in the folder
_TRAINING_STATE = "lightning.pt"  # Lightning's training state, in the folder


class InfinityStrategy(ModelParallelStrategy):
    """Trains a LightningModule with parameters and optimizer state on NVMe, in host memory, or on the device.

    Args:
        stage: 0 to 3; parameters are offloaded at 3 only.
        remote_device: "nvme" or "cpu" offloads parameters there; "meta" changes nothing.
        nvme_path: a folder on the drive, or several; "auto" if nothing has to be written, as with `weights` and adapters.
        block_size, queue_depth, single_submit, overlap_events, thread_count: of the block `aio` of the config. These and the
            other arguments of DeepSpeed's strategy mean the same; None leaves the choice to infinity.
        config: the whole config, as a dict or a path to JSON; the arguments above are then ignored.
        weights: safetensors (file or folder) that fill the model, or the model that the module holds. Frozen parameters stay
            in these files if parameters are offloaded to NVMe. Modules outside a model of PEFT keep their values.
        trust_checkpoints: also load checkpoints with more than plain values and tensors, which runs code in them.

    The Trainer's `accumulate_grad_batches`, `gradient_clip_val` and `precision` ("32", "bf16-mixed", "16-mixed"; "true" means
    "mixed") go into the config. One optimizer, Adam or AdamW, and automatic optimization.

    `engine` stays open after `fit` so that the same Trainer can test; `close()` frees memory and drive space.
    """

    def __init__(
        self,
        stage: int = 2,
        remote_device: str | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_params_device: str = "cpu",
        nvme_path: str | list[str] = "/local_nvme",
        params_buffer_count: int | None = None,
        params_buffer_size: int | None = None,
        max_in_cpu: int | None = None,
        offload_optimizer_device: str = "cpu",
        optimizer_buffer_count: int | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool | None = None,
        overlap_events: bool | None = None,
        thread_count: int | None = None,
        pin_memory: bool = True,
        sub_group_size: int | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        weights: str | Path | None = None,
        trust_checkpoints: bool = False,
        **model_parallel: Any,
    ) -> None:
        super().__init__(**model_parallel)
        self.engine: Engine | None = None
        self._trust_checkpoints = trust_checkpoints
        self._weights = weights
        self._precision_name = "32-true"
        if config is not None:
            self.config: Any = config
            return
        zero: dict[str, Any] = {"stage": stage, "sub_group_size": sub_group_size}
        if offload_optimizer:
            zero["offload_optimizer"] = {
                "device": offload_optimizer_device,
                "nvme_path": nvme_path,
                "buffer_count": optimizer_buffer_count,
                "pin_memory": pin_memory,
            }
        if remote_device in ("cpu", "nvme") and stage == 3:
            offload_parameters, offload_params_device = True, remote_device
        if offload_parameters:
            zero["offload_param"] = {
                "device": offload_params_device,
                "nvme_path": nvme_path,
                "buffer_count": params_buffer_count,
                "buffer_size": params_buffer_size,
                "max_in_cpu": max_in_cpu,
                "pin_memory": pin_memory,
            }
        aio = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "single_submit": single_submit,
            "overlap_events": overlap_events,
            "thread_count": thread_count,
        }
        self.config = {"zero_optimization": zero, "aio": aio}

    def close(self) -> None:
        """Free memory and drive space. The model can't be used any more."""
        if self.engine is not None:
            self.engine.close()

    # ---- Setting up ----

    @property
    def precision_plugin(self) -> Precision:
        """A plugin that does nothing: the engine computes in the dtype of its config."""
        return Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_name = "32-true" if plugin is None else str(plugin.precision)

    def setup_environment(self) -> None:
        """All ranks hold shards of the same parameters and see different data."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """With `empty_init`, parameters of modules built inside are on the meta device; `setup` fills them."""
        return init_empty() if empty_init else nullcontext()

    def setup(self, trainer: Trainer) -> None:
        """Shard and page the module if it has no engine yet. It keeps its engine from Trainer to Trainer."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if not hasattr(module, _ENGINE):
            setattr(module, _ENGINE, self._make_engine(module, trainer))
        sharded: _Sharded = getattr(module, _ENGINE)
        if sharded.owners != _owners(module):
            raise ConfigError(
                "the module holds other parts than when it was sharded: let configure_model return where it has made them "
                "(if self.model is not None: return), as Lightning calls it before each fit and each evaluation"
            )
        self.engine = sharded.engine
        if trainer.state.fn == TrainerFn.FITTING:
            if not sharded.trains:
                raise ConfigError(
                    "the module was sharded by an evaluation in which configure_optimizers failed: fit first, or rebuild it"
                )
            self.optimizers, self.lr_scheduler_configs = [sharded.engine.optimizer], sharded.schedules

    def model_to_device(self) -> None:
        """Does nothing: the engine has placed the model."""

    def _make_engine(self, module: LightningModule, trainer: Trainer) -> _Sharded:
        optimizers, schedules, trains = self._configured(module, trainer)
        if not module.automatic_optimization:
            raise ConfigError("infinity steps by itself: set automatic_optimization to True")
        config, auto = self._config_and_autos(trainer)
        engine, optimizer, _, _ = initialize(
            model=module,
            optimizer=optimizers[0] if optimizers else None,
            config=config,
            weights=self._weights,
            auto=auto,
        )
        if engine.gradient_accumulation_steps() != trainer.accumulate_grad_batches:
            raise ConfigError(
                f"gradient_accumulation_steps is {engine.gradient_accumulation_steps()}, but accumulate_grad_batches of the "
                f"Trainer is {trainer.accumulate_grad_batches}: leave it out of the config"
            )
        for schedule in schedules:
            rebind(schedule.scheduler, optimizer)
        for method in _METHODS:
            register_fsdp_forward_method(module, method)
        return _Sharded(engine, schedules, trains, _owners(module))

    def _configured(self, module: LightningModule, trainer: Trainer) -> tuple[list[Any], list[Any], bool]:
        """(optimizers, schedules, whether it may train). In an evaluation configure_optimizers may fail."""
        try:
            optimizers, schedules = _init_optimizers_and_lr_schedulers(module)
        except MisconfigurationException:
            if trainer.state.fn == TrainerFn.FITTING:
                raise
            return [], [], False
        # Lightning makes an optimizer without parameters if configure_optimizers returns None: the config's is used then.
        given = [one for one in optimizers if isinstance(one, torch.optim.Optimizer) and one.param_groups]
        return given, schedules, True

    def _config_and_autos(self, trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the config with "auto" where the Trainer has a value, the Trainer's values)."""
        source = self.config if isinstance(self.config, Mapping) else json.loads(Path(self.config).read_text())
        config = copy.deepcopy(dict(source))
        for key in ("gradient_clipping", "gradient_accumulation_steps"):
            config.setdefault(key, "auto")
        if "train_batch_size" not in config:
            config.setdefault("train_micro_batch_size_per_gpu", "auto")
        if not {"bf16", "fp16"} & config.keys():
            dtype = "fp16" if self._precision_name.startswith("16") else "bf16"
            config[dtype] = {"enabled": self._precision_name.startswith(("16", "bf16"))}
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise ConfigError("infinity clips by the norm of the whole gradient: leave out gradient_clip_algorithm")
        auto = {
            "gradient_clipping": trainer.gradient_clip_val or 0.0,
            "gradient_accumulation_steps": trainer.accumulate_grad_batches,
            "train_micro_batch_size_per_gpu": 1,  # any value: Lightning's loaders decide, and nothing here depends on it
        }
        return config, auto

    # ---- Training ----

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's `training_step`, within the engine's forward pass: it calls the model without the engine.

        With `infinity.micro_batches`, it is called for each part of the batch, and only the whole batch's loss is returned.
        """
        assert self.engine is not None
        if self.engine.splits:
            module, step = self.lightning_module, type(self.lightning_module).training_step  # without FSDP2's wrapper
            by_place = {str(place): argument for place, argument in enumerate(arguments)}

            def step_on_part(_: Any, **part: Any) -> torch.Tensor:
                return loss_in(step(module, *(part.pop(place) for place in by_place), **part))

            return self.engine.loss_in_parts(step_on_part, {**by_place, **keywords}, summed=False)
        with self.engine.forward_pass():
            return super().training_step(*arguments, **keywords)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Backward of a micro-batch; Lightning has divided its loss."""
        assert self.engine is not None
        loss: torch.Tensor = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.engine.set_gradient_accumulation_boundary(not self.lightning_module.trainer.fit_loop._should_accumulate())
        self.engine.backward(loss, scale_wrt_gas=False)
        result: torch.Tensor = self.precision_plugin.post_backward(loss, self.lightning_module)
        return result

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **_: Any) -> Any:
        """Forward and backward of the last micro-batch, then clip and step."""
        assert self.engine is not None
        loss = closure()
        if loss is None:
            raise ConfigError("training_step returned None: infinity can't skip the backward pass of a step")
        trainer = self.lightning_module.trainer
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        self.engine.step()
        return loss

    # ---- Checkpoints: a folder with the engine's checkpoint and Lightning's training state ----

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: `save_checkpoint` writes the parameters tensor by tensor."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty, as `lightning_module_state_dict`."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the folder `filepath`. A collective. Raises CheckpointError; an earlier checkpoint stays then."""
        assert self.engine is not None
        folder = Path(self.broadcast(filepath))
        self.engine.save_checkpoint(folder, tag=_TAG)
        self.engine.finish_checkpoint()  # ModelCheckpoint removes older ones next
        with raise_on_all_ranks():
            if self.is_global_zero:
                training_state = {
                    key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")
                }
                _save_training_state(training_state, folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, at any number of ranks. A collective. Raises CheckpointError.

        `weights_only`: the Trainer's argument, which not all versions pass. If None, `trust_checkpoints` decides.
        """
        assert self.engine is not None
        folder = Path(self.broadcast(checkpoint_path))
        with raise_on_all_ranks():
            trusted = self._trust_checkpoints if weights_only is None else not weights_only
            training_state = _load_training_state(folder, weights_only=not trusted)
        self.engine.load_checkpoint(folder, tag=_TAG)
        return {**training_state, "state_dict": {}}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names that users of DeepSpeed know, with "infinity" for "deepspeed"."""
        both = {"offload_optimizer": True, "offload_parameters": True}
        on_nvme = {"remote_device": "nvme", "offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
        for name, summary, settings in (
            ("infinity", "stage 2", {}),
            ("infinity_stage_1", "stage 1", {"stage": 1}),
            ("infinity_stage_2", "stage 2", {"stage": 2}),
            ("infinity_stage_2_offload", "stage 2, optimizer on the CPU", {"stage": 2, "offload_optimizer": True}),
            ("infinity_stage_3", "stage 3", {"stage": 3}),
            ("infinity_stage_3_offload", "stage 3, all on the CPU", {"stage": 3, **both}),
            ("infinity_stage_3_offload_nvme", "stage 3, all on NVMe", {"stage": 3, **both, **on_nvme}),
        ):
            strategy_registry.register(name, cls, description=f"infinity, {summary}", **settings)


def _save_training_state(training_state: dict[str, Any], folder: Path) -> None:
    """Write Lightning's training state, atomically. Warn if loading it would run code."""
    content = io.BytesIO()
    torch.save(training_state, content)
    content.seek(0)
    try:
        torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        log.warning(
            "%s holds more than plain values (%s), such as objects in hyperparameters or in a callback's state: "
            "loading it takes InfinityStrategy(trust_checkpoints=True), which runs code in it",
            folder / _TRAINING_STATE,
            _reason(error),
        )
    try:
        replace_durably(folder / _TRAINING_STATE, content.getvalue())
    except OSError as error:
        raise CheckpointError(
            f"writing {folder / _TRAINING_STATE} failed ({error.strerror}): free space there"
        ) from None


def _load_training_state(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    path = folder / _TRAINING_STATE
    with parsing(f"{path} is damaged", "load another checkpoint"):
        try:
            with open_regular(path) as file:
                training_state = torch.load(file, map_location="cpu", weights_only=weights_only)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is no checkpoint of InfinityStrategy: {_TRAINING_STATE} is missing in it"
            ) from None
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} is damaged, or holds more than plain values ({_reason(error)}): if you trust its author, pass "
                "trust_checkpoints=True to InfinityStrategy, which runs code in it"
            ) from None
        if not isinstance(training_state, dict):
            raise ValueError("it holds something else")
        return training_state


def _reason(error: Exception) -> str:
    """Return the cause from torch's message."""
    lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    line = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
    return line.split(". ")[0].removeprefix("WeightsUnpickler error: ").rstrip(".")


@dataclass(frozen=True)
class _Sharded:
    """A sharded module's engine and schedules."""

    engine: Engine
    schedules: list[Any]
    trains: bool  # whether it has an optimizer
    owners: frozenset[nn.Module]  # as they were then


def _owners(module: nn.Module) -> frozenset[nn.Module]:
    """Return the modules in it that have parameters of their own."""
    return frozenset(part for part in module.modules() if any(p is not None for p in part._parameters.values()))


InfinityStrategy.register_strategies(StrategyRegistry)
