"""The worker of bench/adam.py for DeepSpeedCPUAdam. Runs under a Python that has deepspeed.

Reads a JSON object per line from standard input, {"way", "numel", "sub_group_numel"}, updates all sub-groups once, and
answers with one: {"seconds"}. OMP_NUM_THREADS sets the number of threads.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=2 python bench/adam_deepspeed.py
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from typing import Any

import torch

LR, BETAS, EPS, WEIGHT_DECAY, GRAD_SCALE = 1e-5, (0.9, 0.999), 1e-8, 0.01, 0.5


def field(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory filled with small numbers, in huge pages if the kernel gives them."""
    memory = mmap.mmap(-1, numel * dtype.itemsize)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=dtype)
    return tensor.uniform_(-1e-2, 1e-2) if dtype.is_floating_point else tensor


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps DeepSpeed's output out of the answers
    from deepspeed.ops.op_builder import CPUAdamBuilder

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    module = CPUAdamBuilder().load()
    module.create_adam(0, LR, *BETAS, EPS, WEIGHT_DECAY, True, False)
    fields: list[torch.Tensor] = []

    def run(order: dict[str, Any]) -> float:
        numel = order["numel"]
        if not fields or fields[0].numel() != numel:
            fields.clear()
            fields.extend(field(numel, torch.float32) for _ in range(4))
            fields.append(field(numel, torch.bfloat16))
            fields[3].abs_()
        began = time.perf_counter()
        for start in range(0, numel, order["sub_group_numel"]):
            master, grad, exp_avg, exp_avg_sq, copy = (
                state[start : start + order["sub_group_numel"]] for state in fields
            )
            if order["way"] == "all":
                grad.mul_(1.0)  # takes as long as any other scale, and keeps the gradients
            module.adam_update(0, 10, LR, *BETAS, EPS, WEIGHT_DECAY, True, master, grad, exp_avg, exp_avg_sq)
            if order["way"] == "all":
                copy.copy_(master)
        return time.perf_counter() - began

    for line in sys.stdin:
        answers.write(json.dumps({"seconds": run(json.loads(line))}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
