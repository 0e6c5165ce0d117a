"""A training script of the shape of transformers' run_clm.py, with the two classes of infinity imported in the place of theirs.

torchrun --nproc-per-node 2 clm_script.py --model_name_or_path FOLDER --train_file TEXT --deepspeed ds.json --do_train ...
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM, HfArgumentParser, default_data_collator, set_seed

from infinity.integrations.transformers import InfinityTrainer as Trainer
from infinity.integrations.transformers import InfinityTrainingArguments as TrainingArguments


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "The folder of the weights."})


@dataclass
class DataTrainingArguments:
    train_file: str | None = field(default=None, metadata={"help": "A text."})
    block_size: int | None = field(default=32, metadata={"help": "Tokens in a sample."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))  # type: ignore[arg-type]
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokens, size = [*Path(data_args.train_file).read_bytes()], data_args.block_size
    blocks = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
    samples = [{"input_ids": block, "labels": block} for block in blocks]
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=samples if training_args.do_train else None,
        eval_dataset=samples[:8] if training_args.do_eval else None,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.close()


if __name__ == "__main__":
    main()
