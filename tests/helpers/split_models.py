"""transformers' models, split by their own plans over two of 2 x 2 ranks. A script of four ranks:
`split_models.py NVME_PATH`."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config
from two_dimensions import Outcome, config, differences, whole

import infinity

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 66,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "attn_implementation": "eager",
}
MODELS: dict[str, PretrainedConfig] = {
    "Llama": LlamaConfig(**SIZES),
    "Llama with tied words": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "Qwen3 with a norm of each head": Qwen3Config(**SIZES, head_dim=8),
}


def build(of: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(of)
    return model


def batch(step: int, part: int) -> torch.Tensor:
    return torch.randint(1, 66, (2, 9), generator=torch.Generator().manual_seed(100 * step + part))


def run(model: nn.Module, folder: str, *, offloaded: bool, split: int = 2, **arguments: Any) -> Outcome:
    settings = config(folder, "backward", 0.5)
    settings |= {"bf16": {"enabled": False}, "tensor_parallel": {"autotp_size": split}}
    settings["infinity"] = {"pinned_bytes_max": "8MiB"}
    if not offloaded:
        settings["zero_optimization"] = {"stage": 3}
    engine, *_ = infinity.initialize(model=model, config=settings, **arguments)
    with engine:
        if engine.swap is not None and "weights" in arguments:
            names = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
            columns = [name for name in names if split > 1 and ("o_proj" in name or "down_proj" in name)]
            assert engine.swap.paged.foreign_names == {*names} - {*columns}
        losses = []
        for step in range(10):
            ids = batch(step, dist.get_rank() // 2)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses += [loss.item(), float(engine.get_global_grad_norm())]
        return losses, {name: values.clone() for name, values in whole(engine.module).items()}


def check_alone(model: nn.Module, got: Outcome) -> None:
    """The same step of one rank, without any split."""
    parts = []
    for part in range(2):
        ids = batch(0, part)
        loss = model(input_ids=ids, labels=ids).loss
        (loss / 2).backward()
        parts.append(loss.item())
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert abs(parts[dist.get_rank() // 2] - got[0][0]) < 1e-5, (parts, got[0][0])
    assert abs(norm.item() / got[0][1] - 1) < 1e-4, (norm, got[0][1])


def with_adapters() -> nn.Module:
    """Llama with LoRA at split inputs, split outputs and words; its own weights are frozen, and in files."""
    with infinity.init_empty():
        model = build(MODELS["Llama"])
    adapted = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj", "lm_head"], init_lora_weights="gaussian")
    return get_peft_model(model, adapted)  # type: ignore[arg-type,return-value]


def check_inference(base: str, folder: str) -> None:
    """Words are those of the whole model. What is split by columns is on NVMe."""
    place = {"device": "nvme", "nvme_path": folder}
    settings = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3, "offload_param": place}}
    with infinity.init_empty():
        model = build(MODELS["Llama"])
    with infinity.init_inference(model, settings, weights=base) as engine:
        made = engine.generate(batch(0, 0), max_new_tokens=4, do_sample=False)
    assert made.equal(build(MODELS["Llama"]).generate(batch(0, 0), max_new_tokens=4, do_sample=False))  # type: ignore[operator]


def check_adapters(folder: str) -> None:
    """In files stays what is split by rows. Each batch counts twice without a split, as on 2 x 2 ranks."""
    base = f"{folder}/base"
    if dist.get_rank() == 0:
        build(MODELS["Llama"]).save_pretrained(base)  # type: ignore[operator]
    dist.barrier()
    outcomes = []
    for arguments in ({"offloaded": False}, {"offloaded": True}, {"offloaded": True, "split": 1}):
        torch.manual_seed(1)
        outcomes.append(run(with_adapters(), folder, weights=base, **arguments))
    assert not (wrong := differences(*outcomes[:2])), wrong
    torch.testing.assert_close(outcomes[2][0], outcomes[0][0], rtol=1e-3, atol=0)
    assert outcomes[0][0][0] != outcomes[0][0][-2]
    check_inference(base, folder)
    print(f"rank {dist.get_rank()}, adapters: equal", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(base)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_adapters(sys.argv[1])
    for name, of in MODELS.items():
        expected = run(build(of), sys.argv[1], offloaded=False)
        check_alone(build(of), expected)
        assert not (wrong := differences(expected, run(build(of), sys.argv[1], offloaded=True))), (name, wrong)
        print(f"rank {dist.get_rank()}, {name}: equal", flush=True)
    dist.destroy_process_group()
