"""transformers' models on 2 x 2 ranks: split by their own plans, or with experts that each rank has some of. A script of
four ranks: `split_models.py NVME_PATH plans|experts`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from two_dimensions import Outcome, config, differences, whole

import infinity
from infinity.cli.plan.hf_config import read_hf_config
from infinity.fsdp2.placements import part_of
from infinity.plan.work import Work

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
    "GPT-NeoX": GPTNeoXConfig(**SIZES),
}

OF_EXPERTS: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2}
MIXTURES: dict[str, PretrainedConfig] = {
    "Mixtral": MixtralConfig(**OF_EXPERTS, num_local_experts=4),
    "Qwen3": Qwen3MoeConfig(**OF_EXPERTS, num_experts=4, moe_intermediate_size=24, head_dim=8),
}


def build(of: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(of)
    return model


def batch(step: int, part: int) -> torch.Tensor:
    return torch.randint(1, 66, (2, 9), generator=torch.Generator().manual_seed(100 * step + part))


def run(
    model: nn.Module,
    folder: str,
    *,
    offloaded: bool,
    split: int = 2,
    same: int | None = None,
    experts: int = 1,
    update: str = "backward",
    checkpoint: Path | None = None,
    planned: PretrainedConfig | None = None,
    **arguments: Any,
) -> Outcome:
    settings = config(folder, update, 0.5) | {"bf16": {"enabled": False}}
    settings["tensor_parallel"] = {"autotp_size": split}
    settings["expert_parallel"] = {"enabled": True, "autoep_size": experts}
    settings["infinity"] = {"pinned_bytes_max": "8MiB", "update": update}
    if not offloaded:
        settings["zero_optimization"] = {"stage": 3}
    engine, *_ = infinity.initialize(model=model, config=settings, **arguments)
    with engine:
        if planned is not None:
            check_planned(engine.module, planned, folder, tensor_ranks=split, expert_ranks=experts)
        if engine.swap is not None and "weights" in arguments:
            names = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
            columns = [name for name in names if split > 1 and ("o_proj" in name or "down_proj" in name)]
            assert engine.swap.paged.foreign_names == {*names} - {*columns}
        losses = []
        for step in range(10):
            ids = batch(step, dist.get_rank() // (same or split))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses += [loss.item(), float(engine.get_global_grad_norm())]
        if checkpoint is not None:
            engine.save_checkpoint(checkpoint)
        return losses, {name: values.clone() for name, values in whole(engine.module).items()}


def check_planned(model: nn.Module, of: PretrainedConfig, folder: str, **split: int) -> None:
    """The planner counts the elements that all ranks have together, and those that a rank gathers."""
    file = Path(folder) / f"config of rank {dist.get_rank()}.json"
    file.write_text(of.to_json_string(use_diff=False))
    work = Work(read_hf_config(file, seq=9), ranks=4, **split)  # type: ignore[arg-type]
    file.unlink()
    parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
    held = torch.tensor(sum(p._local_tensor.numel() for p in parameters))
    dist.all_reduce(held)
    assert (held, sum(part_of(p)[0].numel() for p in parameters)) == (sum(work.stored_numels), sum(work.group_numels))


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
    for arguments in ({"offloaded": False}, {"offloaded": True}, {"offloaded": True, "split": 1, "same": 2}):
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


def own_experts(folder: str) -> None:
    """Each rank has two of four experts, or one; and what it has of them is a shard, as of everything else."""
    for name, of in MIXTURES.items():
        alone = run(build(of), folder, offloaded=False, split=1)
        for experts, updates in ((2, ("backward", "step")), (4, ("forward",))):
            expected = run(build(of), folder, offloaded=False, split=1, experts=experts)
            torch.testing.assert_close(alone[0], expected[0], rtol=1e-5, atol=1e-5)
            for update in updates:
                got = run(build(of), folder, offloaded=True, split=1, experts=experts, update=update, planned=of)
                assert not (wrong := differences(expected, got)), (name, experts, update, wrong)
        print(f"rank {dist.get_rank()}, {name}: equal", flush=True)


def move_experts(folder: str) -> None:
    """From the files of the whole model, in a checkpoint and out of it, and frozen under adapters."""
    place = Path(folder) / "mixture"
    of = MIXTURES["Mixtral"]
    if dist.get_rank() == 0:
        place.mkdir()
        save_file(build(of).state_dict(), place / "model.safetensors")
    dist.barrier()
    arguments: dict[str, Any] = {"split": 1, "weights": place}

    def empty() -> nn.Module:
        with infinity.init_empty():
            return build(of)

    expected = run(build(of), folder, offloaded=True, split=1, experts=2, checkpoint=place / "checkpoint")
    assert not (wrong := differences(expected, run(empty(), folder, offloaded=True, experts=2, **arguments))), wrong
    settings = config(folder, "backward", 0.5) | {"infinity": {"pinned_bytes_max": "8MiB"}}
    engine, *_ = infinity.initialize(model=build(of), config=settings)
    with engine:
        engine.load_checkpoint(place / "checkpoint")
        assert not (wrong := differences(([], expected[1]), ([], whole(engine.module)))), wrong
    outcomes = []
    for offloaded in (False, True):
        torch.manual_seed(1)
        adapted = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights="gaussian")
        model: Any = get_peft_model(empty(), adapted)  # type: ignore[arg-type]
        outcomes.append(run(model, folder, offloaded=offloaded, experts=2, **arguments))
    assert not (wrong := differences(*outcomes)), wrong
    print(f"rank {dist.get_rank()}, files: equal", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place)


def refuse_experts(folder: str) -> None:
    settings = config(folder, "backward", 0.5)
    zero = settings["zero_optimization"]
    for size, changed, words in (
        (2, {"tensor_parallel": {"autotp_size": 2}}, "autotp_size, which infinity can't combine"),
        (2, {"infinity": {"durability": "step"}}, "durability .step., which infinity can't combine"),
        (2, {"zero_optimization": {**zero, "mics_shard_size": 2}}, "mics_shard_size, which infinity can't combine"),
        (3, {}, "autoep_size: got 3, expected a divisor of the 4 ranks"),
    ):
        asked = settings | {"expert_parallel": {"enabled": True, "autoep_size": size}} | changed
        with pytest.raises(infinity.ConfigError, match=words):
            infinity.initialize(model=build(MIXTURES["Mixtral"]), config=asked)
    with pytest.raises(infinity.ConfigError, match=r"split its experts by expert_parallel.autoep_size"):
        infinity.initialize(model=build(MIXTURES["Mixtral"]), config=settings | {"tensor_parallel": {"autotp_size": 2}})
    asked = settings | {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    with pytest.raises(infinity.ConfigError, match="has no block whose experts are in one module"):
        infinity.initialize(model=build(MODELS["Llama"]), config=asked)
    with pytest.raises(infinity.ConfigError, match="expected a divisor of the 3 experts"):
        infinity.initialize(model=build(MixtralConfig(**OF_EXPERTS, num_local_experts=3)), config=asked)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if sys.argv[2] == "plans":
        check_adapters(sys.argv[1])
        for name, of in MODELS.items():
            expected = run(build(of), sys.argv[1], offloaded=False)
            check_alone(build(of), expected)
            planned = None if isinstance(of, GPTNeoXConfig) else of  # whose biases the planner leaves out
            got = run(build(of), sys.argv[1], offloaded=True, planned=planned)
            assert not (wrong := differences(expected, got)), (name, wrong)
            print(f"rank {dist.get_rank()}, {name}: equal", flush=True)
    else:
        refuse_experts(sys.argv[1])
        move_experts(sys.argv[1])
        own_experts(sys.argv[1])
    dist.destroy_process_group()
