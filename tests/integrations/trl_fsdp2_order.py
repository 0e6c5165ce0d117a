"""examples/integrations/trl_llama.py in memory, with sums over two ranks in the order of FSDP2 instead of DDP.

DDP adds up the gradients of micro-batches and reduces the sum; FSDP2 reduces the gradient of each micro-batch and adds up the
results. DDP takes the norm of each whole gradient; FSDP2 takes the norm of each rank's rows, and the root of the sum of their
squares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "integrations"))

import trl_llama


def reduce_each_micro_batch(
    _: Accelerator, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> nn.Module:
    """Replaces `Accelerator.prepare_model`, which wraps the model in DDP."""

    def reduced(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient

    for parameter in model.parameters():
        if parameter.requires_grad and not evaluation_mode:
            parameter.register_hook(reduced)
    return model


def norm_of_shards(gradient: torch.Tensor) -> torch.Tensor:
    shards = gradient.chunk(dist.get_world_size())
    return torch.stack([torch.linalg.vector_norm(shard) for shard in shards]).square().sum().sqrt()


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, *_: Any, **__: Any) -> torch.Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_` does, and return the norm."""
    clipped = [parameter for parameter in parameters if parameter.grad is not None]
    norms = [norm_of_shards(parameter.grad) for parameter in clipped if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    return norm


if __name__ == "__main__":
    Accelerator.prepare_model = reduce_each_micro_batch  # type: ignore[method-assign]
    nn.utils.clip_grad_norm_ = clip_grad_norm_
    trl_llama.main()
