"""Every key that exists, by its dotted path; the error for one that does not."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator

from infinity.config.blocks import Block
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


def _find_nested(model: type[Block], where: str) -> Iterator[tuple[str, type[Block]]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Block):
            path = join(where, name)
            yield path, field.annotation
            yield from _find_nested(field.annotation, path)


NESTED: dict[str, type[Block]] = dict(_find_nested(TopLevel, ""))
"""The blocks in which keys lie, by their dotted paths; all but optimizer and scheduler, whose keys depend on the type."""
