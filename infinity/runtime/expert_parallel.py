"""Expert parallelism: each rank of an expert dimension has some experts of each block whole, and tokens travel to them.

[Note: Owned experts]
transformers keeps the experts of a block in one module, in tensors with one row per expert. These are split by rows over
the expert dimension before `fully_shard`, which shards each rank's experts over the ranks that own the same ones:
[Note: Parts and shards] in infinity/fsdp2/placements.py. The module's forward then sends each token to the owners of
its experts, runs the module's own forward over what has arrived, and sends the results back.

FSDP2 averages a gradient over the owners of an expert, each of which has the sum over the tokens of all ranks of its
expert dimension. So gradients are divided by the number of these inside of the experts, as an average over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infinity.errors import ConfigError


def stacked_experts(model: nn.Module) -> list[Any]:
    """Return the modules that have all experts of a block, one per row of each parameter."""
    return [module for module in model.modules() if _is_stacked(module)]


def check_experts(model: nn.Module, ranks: int) -> None:
    """Raise ConfigError if `own_experts` can't split a model over so many ranks."""
    experts = stacked_experts(model)
    for name, module in model.named_modules() if not experts else ():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
            raise ConfigError(
                f"expert_parallel.autoep_size: {name} has a module per expert, which the model calls one by one, so that ranks "
                "would take turns: leave expert_parallel out, or send the tokens yourself, in an FSDP2 loop"
            )
    if not experts:
        raise ConfigError(
            f"expert_parallel.autoep_size: {type(model).__name__} has no block whose experts are in one module with a row per "
            "expert in each tensor, as in transformers' mixtures: leave expert_parallel out"
        )
    for module in experts:
        if module.num_experts % ranks:
            raise ConfigError(
                f"expert_parallel.autoep_size: got {ranks}, expected a divisor of the {module.num_experts} experts of a block"
            )


def own_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Split all experts over `mesh`, and return their modules: [Note: Owned experts]. A collective."""
    modules = stacked_experts(model)
    for module in modules:
        for name, p in [*module.named_parameters(recurse=False)]:
            part = distribute_tensor(p.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(part, requires_grad=p.requires_grad))
        module.num_experts //= mesh.size()
        names = [name for name, _ in module.named_parameters(recurse=False)]
        module.__class__ = type(type(module).__name__, (type(module),), {name: _shown(name, mesh) for name in names})
        module.forward = partial(_forward, module, module.forward, mesh)
    return modules


def _is_stacked(module: Any) -> bool:
    parameters = [*module.parameters()]
    if not parameters or not hasattr(module, "_apply_gate") or len(parameters) != len(module._parameters):
        return False
    return all(p.dim() > 1 and p.shape[0] == getattr(module, "num_experts", None) for p in parameters)


def _shown(name: str, mesh: DeviceMesh) -> property:
    """Return the attribute of a parameter that shows this rank's experts while they are gathered."""

    def view(module: nn.Module) -> Any:
        p: Any = module._parameters[name]
        return p.to_local() if isinstance(p, DTensor) and p.device_mesh == mesh else p

    return property(view)


def _forward(
    module: Any,
    run: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
    hidden: torch.Tensor,
    routes: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, as `module.forward` of all experts.

    Args:
        run: the forward for the experts of this rank.
        hidden: (tokens, width). routes: (tokens, k), numbers of experts; their count means none. weights: (tokens, k).
    """
    group, ranks, held = mesh.get_group(), mesh.size(), module.num_experts
    with torch.no_grad():
        flat = routes.flatten()
        place = torch.argsort(flat, stable=True)[: int((flat < held * ranks).sum())]
        token, expert = place // routes.shape[1], flat[place]
        sent = torch.bincount(expert // held, minlength=ranks)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=group)
        goes, comes = sent.tolist(), came.tolist()
        there = _exchanged(expert % held, comes, goes, group)
    given: torch.Tensor = _Exchange.apply(hidden[token], comes, goes, group, ranks)  # type: ignore[no-untyped-call]
    if not sum(comes):  # gradients of zeros, as the other owners wait for gradients
        given, there = F.pad(given, (0, 0, 0, 1)), F.pad(there, (0, 1))
    made = run(given, there[:, None], given.new_ones(len(given), 1))[: sum(comes)]
    back = _Exchange.apply(made, goes, comes, group, 1 / ranks)  # type: ignore[no-untyped-call]
    weighted = back * weights.flatten()[place, None]
    return torch.zeros_like(hidden).index_add_(0, token, weighted.to(hidden.dtype))


class _Exchange(torch.autograd.Function):
    """Rows that go to other ranks, so many to each, for those that come from them, and their gradients the other way.

    factor: by which gradients are multiplied.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, comes: list[int], goes: list[int], group: dist.ProcessGroup, factor: float
    ) -> torch.Tensor:
        ctx.way_back, ctx.factor = (goes, comes, group), factor
        return _exchanged(rows, comes, goes, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _exchanged(grad * ctx.factor, *ctx.way_back), None, None, None, None


def _exchanged(rows: torch.Tensor, comes: list[int], goes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    came = rows.new_empty(sum(comes), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), comes, goes, group=group)
    return came
