"""Turns values into a config, or into an error with all problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from infinity.config.optimizers import OPTIMIZERS, SCHEDULERS
from infinity.config.rules import config_error, shown
from infinity.config.top_level import TopLevel

SomeConfig = TypeVar("SomeConfig", bound=TopLevel)


def validated(
    model: type[SomeConfig],
    values: dict[str, Any],
    origin: str,
    *,
    auto: Sequence[str] = (),
    written: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
) -> SomeConfig:
    """The `model` with these values. Raises ConfigError with `problems` and all that is wrong with the values."""
    lines = list(problems)
    try:
        config = model.model_validate(values, context={"auto": frozenset(auto)})
    except ValidationError as error:
        lines += _explain(error, written or {})
        raise config_error(origin, lines) from None
    if lines:
        raise config_error(origin, lines)
    return config


def _explain(error: ValidationError, written: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        kind, context = problem["type"], problem.get("ctx", {})
        if kind == "contradiction":
            lines += str(context["lines"]).split("\n")
            continue
        path = _source_path([str(part) for part in problem["loc"]])
        wanted = f"expected {context['wanted']}" if kind == "unwanted" else problem["msg"]
        lines.append(f"{written.get(path, path)}: got {shown(problem['input'])}, {wanted}")
    return lines


def _source_path(location: list[str]) -> str:
    """The dotted path in the source of a model's field: optimizer and scheduler keep all but their type in `params`."""
    if location[0] in ("optimizer", "scheduler") and len(location) > 1 and location[1] in (*OPTIMIZERS, *SCHEDULERS):
        location = [location[0], *location[2:]]
    if location[0] in ("optimizer", "scheduler") and len(location) > 1 and location[1] != "type":
        location = [location[0], "params", *location[1:]]
    return ".".join(location)
