"""Floor 1. Every key that exists, by its dotted path; the error for one that does not."""

from __future__ import annotations

import difflib
import functools

from infinity.config.blocks import (
    ActivationCheckpointingConfig,
    AioConfig,
    Bf16Config,
    Block,
    FlopsProfilerConfig,
    Fp16Config,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    ZeroConfig,
)
from infinity.config.infinity_block import InfinityConfig, OffloadActivationsConfig
from infinity.config.optimizers import OPTIMIZERS, SCHEDULERS
from infinity.config.rules import join
from infinity.config.top_level import TopLevel

_OTHER_NAMES = {"max_grad_norm": "gradient_clipping", "learning_rate": "lr", "max_lr": "warmup_max_lr"}
"""Names that other tools have for some keys, for the error that suggests the key."""


def explain_unknown(written: str, where: str) -> str:
    """The error line for a key that exists nowhere, or not here, with the nearest name that does."""
    path = join(where, written)
    paths = known_paths()
    if path in paths:
        return f"{path}: unknown key for this type, remove it"
    elsewhere = [other for other in paths if other.rpartition(".")[2] == _OTHER_NAMES.get(written, written)]
    if 1 <= len(elsewhere) <= 2:
        return f"{path}: unknown key here, it belongs at {' or '.join(elsewhere)}"
    here = {other.rpartition(".")[2]: other for other in paths if other.rpartition(".")[0] == where}
    anywhere = {other.rpartition(".")[2]: other for other in reversed(paths)}
    for names in (here, anywhere):
        if near := difflib.get_close_matches(written, names, n=1, cutoff=0.6):
            return f"{path}: unknown key, did you mean {names[near[0]]}?"
    return f"{path}: unknown key, remove it"


@functools.cache
def known_paths() -> tuple[str, ...]:
    """Dotted paths of every key that is accepted, those of the models first."""
    fields: list[str] = []
    others: list[str] = ["optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"]
    others += ["optimizer.params.adam_w_mode", "optimizer.legacy_fusion", "communication_data_type"]
    others += [
        f"zero_optimization.{name}" for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory")
    ]
    blocks: list[tuple[str, type[Block]]] = [("", TopLevel), *NESTED.items()]
    blocks += [("optimizer.params", model) for model in OPTIMIZERS.values()]
    blocks += [("scheduler.params", model) for model in SCHEDULERS.values()]
    for where, model in blocks:
        typed = where in ("optimizer.params", "scheduler.params")
        fields += [join(where, name) for name in model.model_fields if not (typed and name == "type")]
        others += [join(where, name) for name in (*sorted(model.ignored_keys), *model.old_names, *model.fixed_keys)]
    others += sorted(TopLevel.feature_keys)
    return tuple(dict.fromkeys((*fields, *others)))


NESTED: dict[str, type[Block]] = {
    "zero_optimization": ZeroConfig,
    "zero_optimization.offload_param": OffloadParamConfig,
    "zero_optimization.offload_optimizer": OffloadOptimizerConfig,
    "aio": AioConfig,
    "infinity": InfinityConfig,
    "infinity.offload_activations": OffloadActivationsConfig,
    "bf16": Bf16Config,
    "fp16": Fp16Config,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "flops_profiler": FlopsProfilerConfig,
}
