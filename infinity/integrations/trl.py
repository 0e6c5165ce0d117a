"""TRL's trainers on infinity's engine: the trained model, the reference model and reward models are paged.

    from infinity.integrations.trl import InfinityDPOConfig as DPOConfig
    from infinity.integrations.trl import InfinityDPOTrainer as DPOTrainer

Another trainer of TRL takes one line, `class MyTrainer(InfinityTRL, RLOOTrainer): ...`, and its config another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.extras import needs

with needs("trl"):
    import trl

from transformers.utils import cached_file

from infinity.errors import ConfigError
from infinity.fsdp2.first_values import meta_parameters
from infinity.integrations.transformers import InfinityTrainer, InfinityTrainingArguments
from infinity.runtime import Engine
from infinity.runtime.inference import InferenceEngine, init_inference

_NOT_SPLIT: dict[type, str] = {
    trl.KTOTrainer: "KTO compares the samples of a batch",
    trl.DistillationTrainer: "distillation runs the backbone and the head of the model one by one",
}


class InfinityTRLArguments(InfinityTrainingArguments):
    """InfinityTrainingArguments to name before a config of TRL in a class's bases."""

    steps_per_generation: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        parts, generation = self.infinity_micro_batches or 1, getattr(self, "steps_per_generation", None)
        if generation is not None:
            if generation % parts:
                raise ConfigError(
                    f"steps_per_generation is {generation}, but infinity.micro_batches takes {parts} at once"
                )
            self.steps_per_generation = generation // parts


class InfinityTRL(InfinityTrainer):
    """An InfinityTrainer to name before a trainer of TRL in a class's bases.

    A model on the meta device, as `model_init_kwargs={"device_map": "meta"}` makes it, is read from the files that it names,
    and so is its reference model. Raises ConfigError for `infinity.micro_batches` with a loss that can't be split.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._run_only: list[InferenceEngine] = []
        super().__init__(*arguments, **keywords)

    def close(self) -> None:
        for engine in self._run_only:
            engine.close()
        super().close()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = self._page_to_run

    def _page_to_run(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Replaces `accelerator.prepare_model`, which TRL calls for reference and reward models."""
        engine = init_inference(model, self.args.infinity_config, weights=_files_of(model), auto=self._autos(1))
        self._run_only.append(engine)
        return engine.module

    def _ensure_engine(self, max_steps: int | None = None) -> Engine:
        if self.engine is None and self._weights is None:
            self._weights = _files_of(self.model)
        return super()._ensure_engine(max_steps)

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Compute them for `precompute_ref_log_probs`; without a reference model, with the trained one before training."""
        if model is self.model:
            self._ensure_engine()
        return super().compute_ref_log_probs(model, inputs)

    def _compute_in_parts(self, *arguments: Any, **keywords: Any) -> Any:
        engine, args = self._ensure_engine(), self.args
        if not engine.splits:
            return super()._compute_in_parts(*arguments, **keywords)
        for trainer, why in _NOT_SPLIT.items():
            if isinstance(self, trainer):
                raise ConfigError(f"{why}, so a batch can't be split: leave out infinity.micro_batches")
        if not hasattr(args, "steps_per_generation"):
            return super()._compute_in_parts(*arguments, **keywords)
        in_one_call = args.steps_per_generation
        args.steps_per_generation = in_one_call * engine.config.infinity.micro_batches  # it divides the loss of a part
        try:
            return super()._compute_in_parts(*arguments, **keywords)
        finally:
            args.steps_per_generation = in_one_call

    def _divisible(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Put a chosen and its rejected sample, which TRL stores in the two halves of a batch, in one row."""
        if not isinstance(self, (trl.DPOTrainer, trl.RewardTrainer)):
            return inputs
        pairs = len(inputs["input_ids"]) // 2
        return _with_rows(inputs, 2 * pairs, lambda t: t.unflatten(0, (2, pairs)).transpose(0, 1))

    def _joined(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(self, (trl.DPOTrainer, trl.RewardTrainer)):
            return inputs
        pairs = len(inputs["input_ids"])
        return _with_rows(inputs, pairs, lambda t: t.transpose(0, 1).flatten(0, 1) if t.ndim > 1 else t)


def _with_rows(inputs: dict[str, Any], rows: int, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the inputs with their tensors of so many rows changed."""
    return {
        key: change(value) if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows else value
        for key, value in inputs.items()
    }


def _files_of(model: Any) -> Path | None:
    """Return the folder that `from_pretrained` read a model on the meta device from; None for other models."""
    name = getattr(model.config, "_name_or_path", "")
    if not name or not meta_parameters(model):
        return None
    file = cached_file(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    assert file is not None
    return Path(file).parent


# fmt: off
class InfinitySFTConfig(InfinityTRLArguments, trl.SFTConfig): ...
class InfinityDPOConfig(InfinityTRLArguments, trl.DPOConfig): ...
class InfinityGRPOConfig(InfinityTRLArguments, trl.GRPOConfig): ...
class InfinityRLOOConfig(InfinityTRLArguments, trl.RLOOConfig): ...
class InfinityKTOConfig(InfinityTRLArguments, trl.KTOConfig): ...
class InfinityRewardConfig(InfinityTRLArguments, trl.RewardConfig): ...
class InfinityDistillationConfig(InfinityTRLArguments, trl.DistillationConfig): ...
class InfinitySFTTrainer(InfinityTRL, trl.SFTTrainer): ...
class InfinityDPOTrainer(InfinityTRL, trl.DPOTrainer): ...
class InfinityGRPOTrainer(InfinityTRL, trl.GRPOTrainer): ...
class InfinityRLOOTrainer(InfinityTRL, trl.RLOOTrainer): ...
class InfinityKTOTrainer(InfinityTRL, trl.KTOTrainer): ...
class InfinityRewardTrainer(InfinityTRL, trl.RewardTrainer): ...
class InfinityDistillationTrainer(InfinityTRL, trl.DistillationTrainer): ...
