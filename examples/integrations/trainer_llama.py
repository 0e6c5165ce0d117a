"""A tiny Llama under transformers' Trainer, all its state on NVMe: train, evaluate, save, resume, generate.

    torchrun --standalone --nproc-per-node 2 examples/integrations/trainer_llama.py --nvme-path /local_nvme

`--plain` uses transformers' own Trainer, all in memory: the losses are identical (in fp32). With `--split` all
micro-batches of a step pass through a layer together, which reads it twice per step instead of twice per micro-batch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from infinity.extras import needs


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random byte."""

    def __init__(self, count: int, seed: int) -> None:
        starts = torch.randint(0, 200, (count, 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = (starts + torch.arange(32)) % 200

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def config_for(nvme_path: Path) -> dict[str, Any]:
    """Return a DeepSpeed user's config.json."""
    on_nvme = {"device": "nvme", "nvme_path": str(nvme_path), "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": on_nvme,
            "offload_optimizer": on_nvme,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, default=Path(".nvme"))
    parser.add_argument("--output", type=Path, default=Path("trainer-output"))
    parser.add_argument("--plain", action="store_true", help="transformers' own Trainer")
    parser.add_argument("--split", action="store_true", help='"infinity": {"micro_batches": "auto"}')
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in the output folder")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--evaluate-first", action="store_true")
    parser.add_argument("--json", type=Path, help="write the losses there")
    options = parser.parse_args()
    with needs("transformers"):
        from transformers import Trainer, TrainingArguments

    from infinity.integrations.transformers import InfinityTrainer, InfinityTrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(options.output),
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": options.steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": options.accumulate,
        "max_grad_norm": options.max_grad_norm,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "bf16": options.bf16,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 6,
        "report_to": [],
        "seed": 1,
    }
    data: dict[str, Any] = {"train_dataset": Sentences(512, 1), "eval_dataset": Sentences(64, 2)}
    if options.plain:
        trainer = Trainer(model=make_model(), args=TrainingArguments(**settings), **data)
    else:
        options.nvme_path.mkdir(parents=True, exist_ok=True)
        config = config_for(options.nvme_path) | {"infinity": {"micro_batches": "auto" if options.split else 1}}
        arguments = InfinityTrainingArguments(deepspeed=config, **settings)
        trainer = InfinityTrainer(model=make_model(), args=arguments, **data)
    if options.evaluate_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))

    model = trainer.model.eval()
    on_all_ranks = {"synced_gpus": trainer.args.world_size > 1}  # ranks gather the same groups at the same time
    generated = model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False, **on_all_ranks)
    if trainer.is_world_process_zero():
        print("generated:", generated.tolist())
        history = [line for line in trainer.state.log_history if "loss" in line or "eval_loss" in line]
        if options.json:
            options.json.write_text(json.dumps({"history": history, "generated": generated.tolist()}))
    if isinstance(trainer, InfinityTrainer):
        trainer.close()


if __name__ == "__main__":
    main()
