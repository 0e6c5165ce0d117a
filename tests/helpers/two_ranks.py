"""Two ranks that share one GPU, over gloo: train in host memory, then on NVMe, and compare every weight and loss."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gpt import GPT, config_for  # noqa: E402

import infinity  # noqa: E402

CONTEXT = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(where: dict[str, Any], clipping: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": where},
        "steps_per_print": 0,
    }
    torch.manual_seed(0)
    with infinity.init_empty():
        model = GPT(config_for(300_000, CONTEXT))
    losses = []
    with infinity.initialize(model=model, config=config)[0] as engine:
        for number in range(4):
            generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
            batch = torch.randint(0, 256, (2, CONTEXT + 1), generator=generator).to(DEVICE)
            loss = F.cross_entropy(engine(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        # Not whole tensors: torch's functional collectives take no memory of a GPU over gloo.
        parts = {name: (p.data.to_local() + 0).cpu() for name, p in engine.module.named_parameters()}
    return losses, parts


def main() -> None:
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    clipping = float(sys.argv[2])
    expected, held = train({"device": "cpu"}, clipping)
    losses, paged = train({"device": "nvme", "nvme_path": sys.argv[1]}, clipping)
    assert losses == expected, (losses, expected)
    different = [name for name in held if not torch.equal(held[name], paged[name])]
    assert not different, different
    print("the same", flush=True)
    dist.destroy_process_group()


main()
