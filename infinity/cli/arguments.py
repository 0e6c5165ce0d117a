"""Floor 7. What the commands ask of their arguments, beyond what argparse knows."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(parse: Callable[[str], int], *, at_least: int) -> Callable[[str], int]:
    """A type for argparse: `parse` and a bound, refused in words."""

    def checked(text: str) -> int:
        try:
            value = parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if value < at_least:
            raise argparse.ArgumentTypeError(f"expected at least {at_least}, got {text}")
        return value

    return checked
