"""DeepSpeed stage 3 with parameters and optimizer on NVMe, with its own I/O or with infinity's.

Only `--io` differs between the two: infinity's handle replaces DeepSpeed's, and the losses are identical.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 1 examples/integrations/deepspeed_nvme.py --nvme-path /local_nvme
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from infinity.extras import needs


class Model(nn.Module):
    """Bytes in, logits over the next byte out; residual blocks of two layers."""

    def __init__(self, hidden_size: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, hidden_size)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden_size),
                nn.Linear(hidden_size, 4 * hidden_size),
                nn.GELU(),
                nn.Linear(4 * hidden_size, hidden_size),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden_size, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x)
        for block in self.blocks:
            h = h + block(h)
        logits: torch.Tensor = self.head(h)
        return logits


def config_for(arguments: argparse.Namespace) -> dict[str, object]:
    overlapped = {"pipeline_read": arguments.pipeline, "pipeline_write": arguments.pipeline}
    on_nvme = {"device": "nvme", "nvme_path": str(arguments.nvme_path), "pin_memory": False}
    largest = 4 * arguments.hidden_size**2
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 1, "overlap_events": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 3 * largest,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {**on_nvme, "buffer_count": 4 * arguments.layers, "buffer_size": 2 * largest},
            "offload_optimizer": {**on_nvme, **overlapped, "buffer_count": 12},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme-path", type=Path, default=Path(".nvme"))
    parser.add_argument("--io", choices=["infinity", "deepspeed"], default="infinity")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pipeline", action="store_true", help="read and write optimizer state while stepping")
    parser.add_argument("--json", type=Path, help="write losses and seconds per step there")
    arguments = parser.parse_args()
    with needs("deepspeed"):
        import deepspeed

    if arguments.io == "infinity":
        from infinity.integrations.deepspeed import install

        install()

    deepspeed.init_distributed("gloo")
    config = config_for(arguments)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Model(arguments.hidden_size, arguments.layers)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randint(0, 256, (4, 128), generator=generator)
    losses, seconds = [], []
    for step in range(arguments.steps):
        began = time.perf_counter()
        logits = engine(x[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        print(f"step {step}  loss {losses[-1]:.6f}  {seconds[-1]:.2f} s", flush=True)
    if arguments.json and torch.distributed.get_rank() == 0:
        arguments.json.write_text(json.dumps({"losses": losses, "seconds": seconds}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
