"""The kinds of values in the config: how they are read, which are valid, and the errors about those that are not."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AllowInfNan,
    Field,
    GetCoreSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    Strict,
    StrictBool,
    StrictStr,
    StringConstraints,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from infinity.errors import ConfigError
from infinity.units import MIB, PAGE_BYTES, parse_bytes, parse_count


@dataclass(frozen=True)
class Rule:
    """The last annotation of a kind of value: its name in errors and in the reference, and how to read what users
    write.

    pydantic validates what `read` returns. If either refuses the value, the error names what is `wanted`; where that is
    empty, the names of a Literal.
    """

    wanted: str = ""
    read: Callable[[Any], Any] = lambda value: value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        wanted = self.wanted_of(source)

        def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
            try:
                return inner(self.read(value))
            except (TypeError, ValueError, OverflowError):  # a ValidationError is a ValueError
                raise PydanticCustomError("unwanted", "{wanted}", {"wanted": wanted}) from None

        return core_schema.no_info_wrap_validator_function(validate, handler(source))

    def wanted_of(self, annotation: Any) -> str:
        return self.wanted or f"one of {', '.join(get_args(annotation))}"


ONE_OF = Rule(read=str.lower)
"""For a Literal of lower-case names, which may be written in any case."""


def _read_flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value


def _read_integer(value: Any) -> int:
    """An integer; 1e9, "1e9" and "40M" are integers too. Of those below 0 only -1, which means all or none of something."""
    if value in (-1, "-1"):
        return -1
    return parse_count(value if isinstance(value, (bool, str, float)) else operator.index(value))


def _read_number(value: Any) -> float:
    return math.nan if isinstance(value, bool) else float(value)


def _read_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_paths(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return os.fspath(value)
    paths = tuple(os.fspath(path) for path in value)
    if len({os.path.normpath(path) for path in paths}) < len(paths):
        raise ValueError("two paths are the same")
    return paths[0] if len(paths) == 1 else paths


def names_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


Flag = Annotated[StrictBool, Rule("true or false", _read_flag)]

Count = Annotated[NonNegativeInt, Rule("an integer of at least 0", _read_integer)]
Positive = Annotated[PositiveInt, Rule("an integer of at least 1", _read_integer)]
AutoCount = Annotated[Count | Literal["auto"], Rule('an integer of at least 0, or "auto"')]
AutoPositive = Annotated[Positive | Literal["auto"], Rule('an integer of at least 1, or "auto"')]
SizeOrAll = Annotated[Literal[-1] | PositiveInt, Rule("-1, or an integer of at least 1", _read_integer)]
Depth = Annotated[int, Field(ge=-1), Rule("an integer of at least -1", _read_integer)]
Interval = Annotated[  # some launchers write Infinity for "never"
    Count, Rule("an integer of at least 0", lambda value: 0 if value == math.inf else value)
]
Stage = Annotated[Literal[0, 1, 2, 3], Rule("one of 0, 1, 2, 3", _read_integer)]

Bytes = Annotated[NonNegativeInt, Rule('a number of bytes such as 0 or "16GiB"', parse_bytes)]
AutoBytes = Annotated[Bytes | Literal["auto"], Rule('a number of bytes such as 0 or "16GiB", or "auto"')]
BudgetBytes = Annotated[int, Field(ge=PAGE_BYTES), Rule(f'at least {PAGE_BYTES} bytes such as "512MiB"', parse_bytes)]
AutoBudgetBytes = Annotated[
    BudgetBytes | Literal["auto"], Rule(f'at least {PAGE_BYTES} bytes such as "512MiB", or "auto"')
]
BlockBytes = Annotated[
    int,
    Field(gt=0, multiple_of=PAGE_BYTES),
    Rule(f'a positive multiple of {PAGE_BYTES} bytes such as {MIB} or "1MiB"', parse_bytes),
]

Amount = Annotated[NonNegativeFloat, AllowInfNan(False), Rule("a number of at least 0", _read_number)]
Share = Annotated[float, Field(ge=0, le=1), Rule("a number from 0 to 1", _read_number)]
Beta = Annotated[float, Field(ge=0, lt=1), Rule("a number in [0, 1)", _read_number)]
Betas = Annotated[tuple[Beta, Beta], Strict(), Rule("two numbers in [0, 1)", _read_list)]
Rates = Annotated[
    Amount | Annotated[tuple[Amount, ...], Field(strict=True, min_length=1)],
    Rule("a number of at least 0, or a list of one per group", _read_list),
]

AnyText = Annotated[StrictStr, Rule("a text", os.fspath)]
Text = Annotated[StrictStr, StringConstraints(min_length=1), Rule("a non-empty text", os.fspath)]
Secret = Annotated[SecretStr, Field(min_length=1), Rule("a non-empty text")]
Paths = Annotated[
    Text | Annotated[tuple[Text, ...], Field(min_length=1)],
    Rule("a path, or a list of different paths", _read_paths),
]
RunName = Annotated[
    StrictStr,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
    Rule("a folder name of at most 64 letters, digits and ._- that begins with a letter or digit"),
]
ClassNames = Annotated[
    Annotated[tuple[Text, ...], Field(strict=True, min_length=1)] | Literal["auto"],
    Rule('a list of module class names, or "auto"', _read_list),
]

Device = Annotated[Literal["none", "cpu", "nvme"], ONE_OF]
Backend = Annotated[Literal["auto", "io_uring", "linux_aio", "threads"], ONE_OF]
Mix = Annotated[Literal["auto", "interleaved", "bursts"], ONE_OF]
ReduceDtype = Annotated[Literal["fp32", "bf16"], ONE_OF]
MasterWeights = Annotated[Literal["split", "full"], ONE_OF]
MomentsDtype = Annotated[Literal["fp32", "bf16", "8bit"], ONE_OF]
Durability = Annotated[Literal["none", "step"], ONE_OF]
Whose = Annotated[Literal["run", "config"], ONE_OF]
CheckpointFormat = Annotated[Literal["dcp", "arena"], ONE_OF]
Update = Annotated[Literal["auto", "step", "forward", "backward"], ONE_OF]
Schedule = Annotated[Literal["auto", "vertical", "horizontal"], ONE_OF]
ExperimentMode = Annotated[Literal["get", "create", "get_or_create"], ONE_OF]
WarmupType = Annotated[Literal["log", "linear"], ONE_OF]
AdjustLrFn = Annotated[Literal["original", "match_rms_adamw"], ONE_OF]


def config_error(origin: str, lines: Sequence[str]) -> ConfigError:
    counted = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError("\n".join((f"{origin}: {counted}", *(f"  {line}" for line in lines))))


def shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
