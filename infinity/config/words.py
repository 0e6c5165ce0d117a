"""Floor 1. The form of the config's errors: value, key, and one line per problem."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from infinity.errors import ConfigError


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
