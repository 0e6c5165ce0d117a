"""A tiny Llama under one of TRL's trainers, all its state on NVMe.

    torchrun --standalone --nproc-per-node 2 examples/integrations/trl_llama.py dpo --nvme-path /local_nvme

The kinds are sft, dpo, grpo, rloo, kto, reward, distillation, and orpo and cpo from `trl.experimental`. `--plain` uses TRL's
own trainer, all in memory: the losses are identical (in fp32). With `--from-files`, the model and its reference model or
teacher are never in memory as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from trainer_llama import config_for

from infinity.extras import needs

CLASSES = {
    "sft": "SFT",
    "dpo": "DPO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "kto": "KTO",
    "reward": "Reward",
    "distillation": "Distillation",
    "orpo": "ORPO",
    "cpo": "CPO",
}


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def save_model(folder: Path, kind: str, seed: int = 0) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        num_labels=1,
    )
    model = (LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM)(config)
    model.save_pretrained(folder)


def make_data(kind: str, count: int) -> Any:
    from datasets import Dataset

    def texts(length: int, seed: int) -> list[str]:
        return [
            " ".join(f"w{(7 * i * i + 3 * j * (i + seed)) % 60}" for j in range(length + i % 3)) for i in range(count)
        ]

    columns: dict[str, Any] = {"prompt": texts(4, 1)}
    if kind == "sft":
        columns = {"text": texts(10, 1)}
    elif kind in ("dpo", "orpo", "cpo", "reward"):
        columns |= {"chosen": texts(5, 2), "rejected": texts(6, 3)}
    elif kind == "kto":
        columns |= {"completion": texts(5, 2), "label": [number % 2 == 0 for number in range(count)]}
    return Dataset.from_dict(columns)


def classes_of(kind: str, plain: bool) -> tuple[Any, Any]:
    """Return the classes of config and trainer."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import trl

    name = CLASSES[kind]
    experimental = kind in ("orpo", "cpo")
    module = import_module(f"trl.experimental.{kind}") if experimental else trl
    theirs = getattr(module, f"{name}Config"), getattr(module, f"{name}Trainer")
    if plain:
        return theirs
    from infinity.integrations import trl as ours

    if not experimental:
        return getattr(ours, f"Infinity{name}Config"), getattr(ours, f"Infinity{name}Trainer")
    made = type(f"{name}Config", (ours.InfinityTRLArguments, theirs[0]), {})
    globals()[made.__name__] = made  # where pickle looks for it
    return made, type(f"{name}Trainer", (ours.InfinityTRL, theirs[1]), {})


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len({*text.split()}) + text.count("3") for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=CLASSES)
    parser.add_argument("--nvme-path", type=Path, default=Path(".nvme"))
    parser.add_argument("--output", type=Path, default=Path("trl-output"))
    parser.add_argument("--plain", action="store_true", help="TRL's own trainer")
    parser.add_argument("--from-files", action="store_true", help="leave the weights in their files")
    parser.add_argument("--split", action="store_true", help='"infinity": {"micro_batches": "auto"}')
    parser.add_argument("--precompute", action="store_true", help="precompute_ref_log_probs")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the log there")
    options = parser.parse_args()
    with needs("trl"):
        arguments, kind = classes_of(options.kind, options.plain)
    folder, teacher = options.output / "model", options.output / "teacher"
    if not folder.exists():
        save_model(folder, options.kind)
        save_model(teacher, options.kind, seed=1)
    settings: dict[str, Any] = {
        "output_dir": str(options.output),
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": options.accumulate,
        "max_grad_norm": options.max_grad_norm,
        "learning_rate": 3e-3,
        "bf16": False,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "seed": 1,
    }
    given: dict[str, Any] = {}
    if options.kind in ("grpo", "rloo"):
        settings |= {"beta": 0.1, "num_generations": 2, "max_completion_length": 6}
        given = {"reward_funcs": reward}
    elif options.kind == "distillation":
        settings |= {"max_completion_length": 6}
        given = {"teacher_model": str(teacher)}
    if options.precompute:
        settings["precompute_ref_log_probs"] = True
    if options.from_files:
        settings["model_init_kwargs"] = {"device_map": "meta"}
        if options.kind == "distillation":
            settings["teacher_model_init_kwargs"] = {"device_map": "meta"}
    if options.lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if not options.plain:
        options.nvme_path.mkdir(parents=True, exist_ok=True)
        settings["deepspeed"] = config_for(options.nvme_path) | {
            "infinity": {"micro_batches": "auto" if options.split else 1}
        }
    trainer = kind(
        model=str(folder),
        args=arguments(**settings),
        train_dataset=make_data(options.kind, 16),
        eval_dataset=make_data(options.kind, 8),
        processing_class=make_tokenizer(),
        **given,
    )
    trainer.train()
    trainer.save_model(str(options.output / "final"))
    if trainer.is_world_process_zero():
        times = ("time", "per_second", "flos")
        log = [
            {key: value for key, value in line.items() if not any(word in key for word in times)}
            for line in trainer.state.log_history
        ]
        print("losses:", [round(line["loss"], 4) for line in log if "loss" in line])
        if options.json:
            options.json.write_text(json.dumps(log))
    if not options.plain:
        trainer.close()


if __name__ == "__main__":
    main()
