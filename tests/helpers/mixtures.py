"""Mixtures of experts of transformers, and what is done with their experts in files. `mixtures.py FOLDER` for several ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers as hf

import infinity

LAYERS, EXPERTS, INNER = 3, 8, 512
SIZES = {
    "vocab_size": 61,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
MIXTURES = {
    "mixtral": (hf.MixtralConfig, {"intermediate_size": INNER, "num_local_experts": EXPERTS}),
    "qwen3": (
        hf.Qwen3MoeConfig,
        {"intermediate_size": 192, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "head_dim": 32},
    ),
}
EXPERT_BYTES = 2 * 3 * INNER * 128


def build(name: str) -> Any:
    kind, sizes = MIXTURES[name]
    return hf.AutoModelForCausalLM.from_config(kind(**SIZES, **sizes))


def save(name: str, folder: Path) -> Path:
    torch.manual_seed(5)
    model = build(name)
    for block in model.model.layers:
        torch.nn.init.normal_(block.mlp.gate.weight)  # so that tokens go different ways
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def config(device: str, **own: Any) -> dict[str, Any]:
    return {
        "bf16": {"enabled": True},
        "aio": {"block_size": 16384},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": {"device": device}},
        "infinity": own,
    }


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(number))


def generated(weights: Path, name: str, pinned: str = "auto") -> tuple[torch.Tensor, list[int]]:
    """By infinity: the tokens, and the bytes that each of them read."""
    with infinity.init_empty():
        model = build(name)
    read: list[int] = []
    with infinity.init_inference(model, config("nvme", pinned_bytes_max=pinned), weights=weights) as engine:
        swap = engine.swap
        assert swap is not None

        def count(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            read.append(swap.stats().read_bytes)
            return torch.zeros(len(ids), dtype=torch.bool)

        made = engine.generate(tokens(0), stopping_criteria=[count], **OPTIONS)
        assert swap.stats().written_bytes == 0
    return made, read


OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def train(weights: Path, name: str, *, in_files: bool, micro_batches: int = 1) -> list[float]:
    """LoRA over frozen experts: losses."""
    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    if in_files:
        with infinity.init_empty():
            model = peft.get_peft_model(build(name), lora)
    else:
        model = peft.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32), lora)
        model.set_experts_implementation("eager")
    device, given = ("nvme", weights) if in_files else ("none", None)
    settings = config(device) | {"gradient_accumulation_steps": micro_batches}
    engine, *_ = infinity.initialize(model=model, weights=given, config=settings)
    with engine:
        losses = []
        for step in range(4):
            batches = [tokens(100 * step + 10 * number + dist.get_rank()) for number in range(micro_batches)]
            if micro_batches > 1:
                named = ({"input_ids": batch, "labels": batch} for batch in batches)
                losses.append(engine.train_batch(named).item())
                continue
            loss = engine(input_ids=batches[0], labels=batches[0]).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if engine.swap is not None:
            assert engine.swap.stats().written_bytes == 0
            experts = [group for group in engine.swap.paged.groups if group.is_routed]
            assert len(experts) == LAYERS * EXPERTS
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for name in MIXTURES:
        weights = folder / name
        expected = hf.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval()
        expected.set_experts_implementation("eager")
        assert torch.equal(generated(weights, name)[0], expected.generate(tokens(0), **OPTIONS)), name
        for number in (1, 3):
            in_memory = train(weights, name, in_files=False, micro_batches=number)
            assert train(weights, name, in_files=True, micro_batches=number) == in_memory, (name, number)
    dist.destroy_process_group()
    print("equal", flush=True)


if __name__ == "__main__":
    main()
