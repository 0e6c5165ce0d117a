"""Saves a checkpoint at one number of ranks, or resumes it at another; prints the weights' digest. For several ranks."""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from training import Case, Model, full_weights

import infinity


def main() -> int:
    verb, nvme_path, folder = sys.argv[1:]
    device = {"device": "nvme", "nvme_path": nvme_path}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": device,
            "offload_optimizer": device,
            "stage3_param_persistence_threshold": 500,
            "sub_group_size": 8192,
        },
        "infinity": {"pinned_bytes_max": "16MiB", "host_cache_bytes": 100_000 * (int(os.environ["WORLD_SIZE"]) - 1)},
    }
    torch.manual_seed(0 if verb == "save" else 1)
    engine, optimizer, _, _ = infinity.initialize(model=Model(Case()), config=config)
    if verb == "save":
        for step in range(3):
            x = torch.randint(0, 53, (4, 12), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        assert engine.global_steps == 3
    digest = hashlib.sha256()
    for name, weight in sorted(full_weights(engine.module).items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    for name, parameter in sorted(engine.module.named_parameters()):
        state = optimizer.state[parameter]
        if state:
            for key in ("exp_avg", "exp_avg_sq"):
                digest.update(name.encode() + (state[key].full_tensor() + 0).numpy().tobytes())
            digest.update(str(state["step"].item()).encode())
    if dist.get_rank() == 0:
        print("digest", digest.hexdigest(), flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
