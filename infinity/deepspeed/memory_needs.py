"""DeepSpeed's estimates of the memory of a model's states: parameters, gradients and optimizer state, as infinity holds them.

Pure arithmetic that prints a table. `infinity-bench plan` counts activations, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from infinity.fsdp2.wrap import modules_to_wrap
from infinity.plan.estimate import GATHERED_GROUPS, Memory, states_of
from infinity.plan.strategy import STRATEGIES, Strategy
from infinity.plan.work import DEFAULT_SCHEME
from infinity.schedule.pinned import SUB_GROUP_NUMEL_DEFAULT, comfortable_bytes, gather_bytes
from infinity.schedule.scheme import COMPUTE_BYTES
from infinity.units import GIB, format_count

__all__ = [
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

ADDITIONAL_BUFFER_FACTOR = 1.5
"""Factor on host memory, as in DeepSpeed: for buffers in flight, and for the allocator."""


class Needs(NamedTuple):
    """Bytes that one strategy needs: of one GPU, and of the host memory and the drives of one node."""

    strategy: Strategy
    device_bytes: int
    host_bytes: int
    nvme_bytes: int


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = ADDITIONAL_BUFFER_FACTOR,
) -> None:
    """Print the needs of stage 2 for `model`, which may be on the meta device; see the `_all_cold` form."""
    machines = num_gpus_per_node, num_nodes, additional_buffer_factor
    estimate_zero2_model_states_mem_needs_all_cold(count(model)[0], *machines)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int | float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = ADDITIONAL_BUFFER_FACTOR,
) -> None:
    """Print the needs of stage 2 for each placement; arguments as for stage 3."""
    _print_needs(2, int(total_params), int(total_params), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = ADDITIONAL_BUFFER_FACTOR,
) -> None:
    """Print the needs of stage 3 for `model`, which may be on the meta device; see the `_all_cold` form."""
    sizes = count(model)
    estimate_zero3_model_states_mem_needs_all_cold(*sizes, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int | float,
    largest_layer_params: int | float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = ADDITIONAL_BUFFER_FACTOR,
) -> None:
    """Print the needs of stage 3 for each placement, NVMe included.

    Args:
        total_params, largest_layer_params: of the model, and of its largest group: a block, as models are wrapped.
        num_gpus_per_node, num_nodes: the ranks that the states are sharded over.
        additional_buffer_factor: factor on host memory.

    Raises ValueError for counts below 1.
    """
    sizes = int(total_params), int(largest_layer_params)
    _print_needs(3, *sizes, num_gpus_per_node, num_nodes, additional_buffer_factor)


def needs_of(
    stage: int, total_params: int, largest: int, gpus_per_node: int, nodes: int, additional_buffer_factor: float
) -> list[Needs]:
    """Return the needs of each strategy of `stage`, the fastest first. Raises ValueError for counts below 1."""
    if min(total_params, largest, gpus_per_node, nodes) < 1:
        raise ValueError("parameters, GPUs and nodes must each be at least 1")
    ranks = gpus_per_node * nodes
    needs = []
    for strategy in STRATEGIES:
        if strategy.stage != stage:
            continue
        states: Memory = states_of(total_params, ranks, strategy)
        gathered = GATHERED_GROUPS * COMPUTE_BYTES * largest if stage == 3 else 0
        host = gpus_per_node * (
            additional_buffer_factor * states.host_bytes + _pool_bytes(strategy, total_params, largest, ranks)
        )
        needs.append(Needs(strategy, states.device_bytes + gathered, int(host), gpus_per_node * states.nvme_bytes))
    return needs


def count(model: nn.Module) -> tuple[int, int]:
    """Return the parameters of `model`, shared ones once, and of its largest group as `infinity.initialize` wraps it."""
    groups = [set(module.parameters()) for module in modules_to_wrap(model, None)]
    parameters = set(model.parameters())
    root = parameters.difference(*groups)
    return _numel(parameters), max(_numel(group) for group in [root, *groups])


def _numel(parameters: set[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _pool_bytes(strategy: Strategy, total_params: int, largest: int, ranks: int) -> int:
    """Return the size of the pinned pool of one rank."""
    if not strategy.uses_nvme:
        return 0
    shard = -(-(total_params if strategy.keeps_compute else largest) // ranks)
    group = COMPUTE_BYTES * shard if strategy.parameters == "nvme" else 0
    sub_group = sum(strategy.stored_bytes(DEFAULT_SCHEME)) * min(shard, SUB_GROUP_NUMEL_DEFAULT)
    return comfortable_bytes(gather_bytes(group), math.ceil(sub_group))


def _print_needs(
    stage: int, total_params: int, largest: int, gpus_per_node: int, nodes: int, additional_buffer_factor: float
) -> None:
    needs = needs_of(stage, total_params, largest, gpus_per_node, nodes, additional_buffer_factor)
    group = f", {format_count(largest)} in the largest group" if stage == 3 else ""
    machines = f"{nodes} node{'s' * (nodes > 1)} with {gpus_per_node} GPU{'s' * (gpus_per_node > 1)} each"
    print(
        f"Stage {stage}, {format_count(total_params)} parameters{group}, {machines}: "
        "parameters, gradients and optimizer state need"
    )
    print(f"{'host, a node':>14} | {'a GPU':>12} | {'NVMe, a node':>14} | placement")
    for strategy, *memory in needs:
        device, host, nvme = (f"{nbytes / GIB:.2f} GiB" for nbytes in memory)
        placement = f"offload_param={strategy.parameters}, offload_optimizer={strategy.optimizer}"
        print(f"{host:>14} | {device:>12} | {nvme:>14} | {placement}")
