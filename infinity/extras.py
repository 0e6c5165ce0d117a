"""Packages that only some of infinity needs: what is said when one is missing, and how to install it. Any thread."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shlex
from collections.abc import Iterator

from infinity.errors import InfinityError


class MissingPackageError(InfinityError, ImportError):
    """A package that infinity doesn't depend on, but what was asked of it does, isn't installed."""


@contextlib.contextmanager
def needs(*extras: str) -> Iterator[None]:
    """Around the import of the packages of these extras (of pyproject.toml). Raises MissingPackageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"this needs {' and '.join(extras)} ({error}): {how_to_install(*extras)}") from error


def how_to_install(*extras: str) -> str:
    """The command that installs what these extras stand for. It needs no index that has infinity, and no clone."""
    try:
        required = importlib.metadata.requires("infinity-offload") or []
    except importlib.metadata.PackageNotFoundError:  # a clone on PYTHONPATH
        return f"pip install '.[{','.join(extras)}]' in the clone of infinity"
    pattern = re.compile(rf"(\S[^;]*?) *; *extra == .(?:{'|'.join(extras)}).")
    return shlex.join(["pip", "install", *(matched[1] for line in required if (matched := pattern.fullmatch(line)))])
