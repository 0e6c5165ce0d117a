"""A training script of the shape of TRL's sft.py: arguments and trainer are subclasses of another library.

What TRL has is above the line, what its user changes below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

from infinity.integrations.transformers import InfinityTrainer, InfinityTrainingArguments


@dataclass
class ScriptArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "A text, a sample in each line."})


@dataclass
class SFTConfig(TrainingArguments):
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "For from_pretrained."})
    max_length: int | None = field(default=16, metadata={"help": "Tokens of a sample at most."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Of AdamW."})
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    def __post_init__(self) -> None:
        self.remove_unused_columns = False
        super().__post_init__()


@dataclass
class ModelConfig:
    model_name_or_path: str | None = None


class SFTTrainer(Trainer):
    """Loads the model itself, makes its own batches, and measures what it trains."""

    def __init__(self, model: str, args: SFTConfig, train_dataset: list[str]) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, **(args.model_init_kwargs or {}))
        samples = [[*line.encode()[: args.max_length]] for line in train_dataset]
        super().__init__(model=loaded, args=args, train_dataset=samples, data_collator=self._pad)  # type: ignore[arg-type]
        self._accuracies: list[float] = []

    @staticmethod
    def _pad(samples: list[list[int]]) -> dict[str, torch.Tensor]:
        length = max(map(len, samples))
        ids = torch.tensor([sample + [0] * (length - len(sample)) for sample in samples])
        mask = torch.tensor([[1] * len(sample) + [0] * (length - len(sample)) for sample in samples])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs["use_cache"] = False
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        with torch.no_grad():
            hits = outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]
            self._accuracies.append(hits[inputs["labels"][:, 1:] != -100].float().mean().item())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._accuracies:
            logs["mean_token_accuracy"] = sum(self._accuracies) / len(self._accuracies)
            self._accuracies.clear()
        super().log(logs, start_time)


# ----------------------------------------------------------------------------------------------------------------------


class Arguments(InfinityTrainingArguments, SFTConfig):
    pass


class MyTrainer(InfinityTrainer, SFTTrainer):
    pass


def main(script_args: Any, training_args: Any, model_args: Any) -> None:
    lines = Path(script_args.dataset_name).read_text().splitlines()
    trainer = MyTrainer(model=model_args.model_name_or_path, args=training_args, train_dataset=lines)
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.save_state()
    trainer.close()


if __name__ == "__main__":
    main(*HfArgumentParser((ScriptArguments, Arguments, ModelConfig)).parse_args_into_dataclasses())  # type: ignore[arg-type]
