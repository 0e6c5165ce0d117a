"""A training that DeepSpeed starts and saves, and that either engine resumes, on any number of ranks.

    deepspeed_checkpoints.py deepspeed|infinity --folder FOLDER --stage 3 --dtype fp32 --report JSON

With "deepspeed" it trains SAVED steps, saves to FOLDER, writes what DeepSpeed itself says of its masters and moments to
`FOLDER/whole.pt`, and trains on. With "infinity" it loads FOLDER, which is an import of that, and trains on. The report holds
the losses after the save.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SAVED, END = 4, 8
FIELDS = ("exp_avg", "exp_avg_sq")


class Model(nn.Module):
    """With a tied head, a buffer, a frozen parameter, and one that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.uneven = nn.Parameter(torch.randn(7))
        self.head = nn.Linear(32, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h)) + self.uneven.sum()
        return self.head(h) * self.scale.to(h.dtype)


def config_of(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 6},
        },
        "zero_optimization": {"stage": stage, "sub_group_size": 2048, "stage3_param_persistence_threshold": 100},
    }


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
    ]


def train(engine: Any, first: int, end: int) -> list[float]:
    """The losses; all ranks have the same batch."""
    losses = []
    for step in range(first, end):
        x = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(engine(x)[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole_state(model: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    """Masters and, where DeepSpeed can tell them (in stage 3), moments. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[f"model.{name}"] = safe_get_full_fp32_param(parameter)
            for field in FIELDS if stage == 3 else ():
                state[f"optimizer.state.{name}.{field}"] = safe_get_full_optimizer_state(parameter, field)
    return {key: value.clone() for key, value in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("deepspeed", "infinity"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--nvme-path")
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    config = config_of(options.stage, options.dtype)
    torch.manual_seed(0 if options.engine == "deepspeed" else 1)
    model = Model()
    if options.engine == "deepspeed":
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups_of(model))
        train(engine, 0, SAVED)
        # ds_to_universal wants the first entry for stages 1 and 2
        client_state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "seen": 16}
        engine.save_checkpoint(str(options.folder), client_state=client_state)
        whole = whole_state(engine.module, options.stage)
        if dist.get_rank() == 0:
            torch.save(whole, options.folder / "whole.pt")
        report = {"losses": train(engine, SAVED, END)}
    else:
        import infinity

        if options.nvme_path is not None:
            offload = {"device": "nvme", "nvme_path": options.nvme_path}
            config["zero_optimization"] |= {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
            config["infinity"] = {"pinned_bytes_max": "16MiB"}
        engine, *_ = infinity.initialize(model=model, config=config, model_parameters=groups_of(model))
        with engine:
            _, client_state = engine.load_checkpoint(options.folder)
            report = {"seen": client_state["seen"], "steps": engine.global_steps}
            report["losses"] = train(engine, SAVED, END)
    if not dist.is_initialized() or dist.get_rank() == 0:
        options.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
