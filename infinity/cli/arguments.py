"""Arguments that several subcommands share: bounds, and files to write."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.extras import how_to_install
from infinity.units import MIB, parse_bytes

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def checked_value(parse: Callable[[str], int], *, at_least: int) -> Callable[[str], int]:
    """Return an argparse type that calls `parse` and rejects values below `at_least`."""

    def checked(text: str) -> int:
        try:
            value = parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if value < at_least:
            raise argparse.ArgumentTypeError(f"expected at least {at_least}, got {text}")
        return value

    return checked


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected a whole number such as 8, got {text!r}") from None


count = checked_value(whole_number, at_least=1)


def _parse_size(text: str) -> int:
    """Parse a size in bytes. Raises ValueError for a small number whose unit was probably forgotten."""
    nbytes = parse_bytes(text)
    if 0 < nbytes < MIB and not text.strip()[-1].isalpha():
        raise ValueError(f"expected a size with its unit, got {text}: did you mean {text.strip()}GiB?")
    return nbytes


size = checked_value(_parse_size, at_least=1)

size_or_none = checked_value(_parse_size, at_least=0)
"""As `size`; 0 means none."""


def named_path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty (an unset variable?): name one")
    return Path(text)


def check_plot(file: Path | None) -> None:
    """Raise ConfigError unless the file of --plot can be drawn and written."""
    if file is not None:
        if file.suffix not in PLOT_SUFFIXES:
            raise ConfigError(f"--plot {file}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(f"--plot needs matplotlib: {how_to_install('plot')}, or leave --plot out")
    check_file(file)


def check_files(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        check_file(getattr(options, name), f"--{name.replace('_', '-')}: ")


def check_file(file: str | Path | None, prefix: str = "") -> None:
    """Raise ConfigError unless `file` can be written; None and "-" pass. A missing file is created for the test, and
    removed."""
    if file is None or file == "-":
        return
    path = Path(file)
    existed = path.exists()
    try:
        if not existed or path.is_file():  # opening and closing a pipe would end its reader's input
            path.open("ab").close()
        elif path.is_dir() or not os.access(path, os.W_OK):
            raise IsADirectoryError(errno.EISDIR, "not a writable file")
    except OSError as error:
        raise ConfigError(
            f"{prefix}{path} can't be written ({error.strerror}): name a file in a folder that exists and is writable"
        ) from None
    if not existed:
        path.unlink()


def add_path(parser: argparse._ActionsContainer, help: str) -> None:
    parser.add_argument("path", nargs="?", type=named_path, metavar="PATH", help=help)


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", metavar="FILE", help='write the results as JSON; "-" is standard output')


def values_of(of: object, names: str) -> dict[str, Any]:
    """Return the attributes of these names, for JSON."""
    return {name: getattr(of, name) for name in names.split()}


def write_json(result: dict[str, Any], file: str | Path) -> None:
    text = json.dumps(result, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text)
