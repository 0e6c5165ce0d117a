"""The training config that `--write-config` writes for a plan."""

from __future__ import annotations

from typing import Any

from infinity.plan.planner import Plan
from infinity.plan.work import Work
from infinity.schedule.scheme import MOMENT_BYTES, MOMENT_BYTES_OF


def config_for(plan: Plan, nvme_path: str) -> dict[str, Any]:
    work, strategy = plan.work, plan.strategy
    zero: dict[str, Any] = {
        "stage": strategy.stage,
        "offload_param": {"device": strategy.parameters},
        "offload_optimizer": {"device": strategy.optimizer},
    }
    for block in (zero["offload_param"], zero["offload_optimizer"]):
        block |= {"nvme_path": nvme_path} if block["device"] == "nvme" else {}
    config: dict[str, Any] = {
        "train_batch_size": work.data_ranks * work.samples * work.micro_batches,
        "train_micro_batch_size_per_gpu": work.samples,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": 1.0 if work.clipping else 0.0,
        "bf16": {"enabled": True},
        "optimizer": _MUON if work.muon else _OPTIMIZERS[int(work.scheme.moments)],
        "zero_optimization": zero,
    }
    if work.tensor_ranks > 1:
        config["tensor_parallel"] = {"autotp_size": work.tensor_ranks}
    if work.expert_ranks > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": work.expert_ranks}
    options: dict[str, Any] = {}
    if strategy.uses_nvme:
        zero["sub_group_size"] = plan.pipeline.sub_group_numel
        options = {
            "pinned_bytes_max": plan.pipeline.pinned_bytes + plan.cache.nbytes + work.activation_buffer_bytes,
            "host_cache_bytes": plan.cache.nbytes,
        }
        if work.gradient_bytes_max is not None:
            options["gradient_bytes_max"] = work.gradient_bytes_max
    if strategy.on_host:
        if work.scheme.master_weights != "split":
            options["master_weights"] = work.scheme.master_weights
        if work.scheme.moment_bytes != MOMENT_BYTES:
            names = {nbytes: name for name, nbytes in MOMENT_BYTES_OF.items()}
            options["moments_dtype"] = names[work.scheme.moment_bytes]
        if work.scheme.update != "backward":  # else "auto" is what was planned
            options["update"] = strategy.update_of(work.scheme)
    if schedule := schedule_of(work):
        options["schedule"] = schedule
    elif work.micro_batches > 1:
        options["micro_batches_at_once"] = work.micro_batches_at_once
    if work.activations != "none":
        options["offload_activations"] = {"device": work.activations}
    if work.activations == "cpu" and work.activation_host_bytes_max is not None:
        options["offload_activations"]["host_bytes_max"] = work.activation_host_bytes_max
    if work.activations == "nvme":
        options["offload_activations"]["buffer_bytes"] = work.activation_buffer_bytes
    if work.durable:
        options["durability"] = "step"
    return config | ({"infinity": options} if options else {})


def schedule_of(work: Work) -> str | None:
    """Return infinity.schedule for the work; None if it needs none, or if only some micro-batches pass at once."""
    if work.micro_batches == 1:
        return None
    return {1: "horizontal", work.micro_batches: "vertical"}.get(work.micro_batches_at_once)


_MUON: dict[str, Any] = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-4, "weight_decay": 0.1}}
_OPTIMIZERS: dict[int, dict[str, Any]] = {
    2: {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    1: {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}},
    0: {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 1e-4}},
}
"""By moments per parameter."""
