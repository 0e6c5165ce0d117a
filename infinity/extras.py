"""Optional packages: the error if one is missing, and how to install it. Any thread."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shlex
from collections.abc import Iterator

from infinity.errors import InfinityError


class MissingPackageError(InfinityError, ImportError):
    """A requested feature needs an optional package that is not installed."""


@contextlib.contextmanager
def needs(*extras: str) -> Iterator[None]:
    """Import packages of these extras (in pyproject.toml) inside the block. Raises MissingPackageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"this needs {' and '.join(extras)} ({error}): {how_to_install(*extras)}") from error


def how_to_install(*extras: str) -> str:
    """Return the command that installs the packages of these extras; it needs no index with infinity, no clone."""
    try:
        required = importlib.metadata.requires("infinity-offload") or []
    except importlib.metadata.PackageNotFoundError:  # a clone on PYTHONPATH
        return f"pip install '.[{','.join(extras)}]' in the clone of infinity"
    pattern = re.compile(rf"(\S[^;]*?) *; *extra == .(?:{'|'.join(extras)}).")
    return shlex.join(["pip", "install", *(matched[1] for line in required if (matched := pattern.fullmatch(line)))])
