"""The kinds of values in the config: how they are read, which are valid, and the errors about those that are not."""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import GetCoreSchemaHandler, SecretStr
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from infinity.errors import ConfigError
from infinity.units import MIB, PAGE_BYTES, parse_bytes, parse_count


@dataclass(frozen=True)
class Rule:
    """One kind of value: how it is read, which values are valid, and its name in errors and in the reference."""

    wanted: str
    parse: Callable[[Any], Any]
    accept: Callable[[Any], bool] = lambda value: True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._validate, handler(source))

    def read(self, value: Any) -> Any:
        """`value` as the config holds it. Raises ValueError when it is not of this kind."""
        try:
            if self.accept(read := self.parse(value)):
                return read
        except (TypeError, ValueError, OverflowError):
            pass
        raise ValueError(self.wanted)

    def _validate(self, value: Any) -> Any:
        try:
            return self.read(value)
        except ValueError:
            raise PydanticCustomError("unwanted", "{wanted}", {"wanted": self.wanted}) from None


def integer(minimum: int) -> Rule:
    return Rule(f"an integer of at least {minimum}", _parse_integer, lambda number: number >= minimum)


def _parse_integer(value: Any) -> int:
    """An integer; 1e9, "1e9" and "40M" are integers too. Of those below 0 only -1, which means all or none of something."""
    if value in (-1, "-1"):
        return -1
    return parse_count(value if isinstance(value, (bool, str, float)) else operator.index(value))


def number(wanted: str, below: float = math.inf) -> Rule:
    return Rule(wanted, _parse_number, lambda number: 0.0 <= number < below)


def _parse_number(value: Any) -> float:
    return math.nan if isinstance(value, bool) else float(value)


def _parse_numbers(value: Any) -> tuple[float, ...]:
    return tuple(_parse_number(number) for number in value) if isinstance(value, (list, tuple)) else ()


def choice(literal: Any) -> Rule:
    return one_of(get_args(literal))


def one_of(names: Iterable[str]) -> Rule:
    by_lower = {name.lower(): name for name in names}
    wanted = f"one of {', '.join(by_lower.values())}"
    return Rule(wanted, lambda value: by_lower.get(value.lower()) if isinstance(value, str) else None, bool)


def or_auto(rule: Rule) -> Rule:
    return Rule(f'{rule.wanted}, or "auto"', lambda value: "auto" if value == "auto" else rule.read(value))


def _parse_class_names(value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, (list, tuple)) else ()
    return names if all(isinstance(name, str) and name for name in names) else ()


def _parse_paths(value: Any) -> str | tuple[str, ...]:
    """One path as it is; several as a tuple, which is empty where two are the same."""
    if not isinstance(value, (list, tuple)):
        path = os.fspath(value)
        return path if isinstance(path, str) else ""
    paths = tuple(_parse_paths(path) for path in value)
    if not all(isinstance(path, str) for path in paths) or len({os.path.normpath(str(p)) for p in paths}) < len(paths):
        return ()
    return str(paths[0]) if len(paths) == 1 else tuple(str(path) for path in paths)


def _parse_secret(value: Any) -> SecretStr:
    return value if isinstance(value, SecretStr) else SecretStr(os.fspath(value))


def names_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


Device = Literal["none", "cpu", "nvme"]
Backend = Literal["auto", "io_uring", "linux_aio", "threads"]
Mix = Literal["auto", "interleaved", "bursts"]
ReduceDtype = Literal["fp32", "bf16"]
MasterWeights = Literal["split", "full"]
MomentsDtype = Literal["fp32", "bf16", "8bit"]
Durability = Literal["none", "step"]
Whose = Literal["run", "config"]
CheckpointFormat = Literal["dcp", "arena"]
Update = Literal["auto", "step", "forward", "backward"]
Schedule = Literal["auto", "vertical", "horizontal"]
ExperimentMode = Literal["get", "create", "get_or_create"]
WarmupType = Literal["log", "linear"]
AdjustLrFn = Literal["original", "match_rms_adamw"]

FLAG = Rule(
    "true or false",
    lambda value: {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value,
    lambda flag: isinstance(flag, bool),
)
RATES = Rule(
    "a number of at least 0, or a list of one per group",
    lambda value: _parse_numbers(value) if isinstance(value, (list, tuple)) else _parse_number(value),
    lambda rates: rates != () and all(0.0 <= r < math.inf for r in (rates if isinstance(rates, tuple) else (rates,))),
)
BLOCK_BYTES = Rule(
    f'a positive multiple of {PAGE_BYTES} bytes such as {MIB} or "1MiB"',
    parse_bytes,
    lambda nbytes: nbytes > 0 and nbytes % PAGE_BYTES == 0,
)
CACHE_BYTES = Rule('a number of bytes such as 0 or "16GiB"', parse_bytes, lambda nbytes: nbytes >= 0)
BUDGET_BYTES = Rule(f'at least {PAGE_BYTES} bytes such as "512MiB"', parse_bytes, lambda nbytes: nbytes >= PAGE_BYTES)
STAGE = Rule("one of 0, 1, 2, 3", _parse_integer, lambda stage: stage in (0, 1, 2, 3))
SIZE_OR_ALL = Rule("-1, or an integer of at least 1", _parse_integer, lambda size: size == -1 or size >= 1)
INTERVAL = Rule(
    "an integer of at least 0",
    lambda value: 0 if value == math.inf else _parse_integer(value),  # some launchers write Infinity for "never"
    lambda interval: interval >= 0,
)
BETAS = Rule(
    "two numbers in [0, 1)", _parse_numbers, lambda betas: len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)
)
RUN_NAME = Rule(
    "a folder name of at most 64 letters, digits and ._- that begins with a letter or digit",
    lambda name: name if isinstance(name, str) else "",
    lambda name: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is not None,
)
CLASS_NAMES = Rule("a list of module class names", _parse_class_names, bool)

Flag = Annotated[bool, FLAG]
Count = Annotated[int, integer(0)]
Positive = Annotated[int, integer(1)]
Amount = Annotated[float, number("a number of at least 0")]
Share = Annotated[float, Rule("a number from 0 to 1", _parse_number, lambda number: 0.0 <= number <= 1.0)]
Beta = Annotated[float, number("a number in [0, 1)", below=1.0)]
Rates = Annotated[float | tuple[float, ...], RATES]
Text = Annotated[str, Rule("a non-empty text", os.fspath, lambda text: isinstance(text, str) and bool(text))]
AnyText = Annotated[str, Rule("a text", os.fspath, lambda text: isinstance(text, str))]
Secret = Annotated[SecretStr, Rule("a non-empty text", _parse_secret, lambda secret: bool(secret.get_secret_value()))]
Paths = Annotated[
    str | tuple[str, ...],
    Rule("a path, or a list of different paths", _parse_paths, lambda p: bool(p) and (isinstance(p, str) or all(p))),
]
AutoCount = Annotated[int | Literal["auto"], or_auto(integer(0))]
AutoPositive = Annotated[int | Literal["auto"], or_auto(integer(1))]


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
