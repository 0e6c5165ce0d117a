"""Floor 17. How a program of ours begins and ends: its signals, its exit code, and errors as one line. Main thread."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from infinity.errors import InfinityError


def run_program(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run the `func` that `parser` finds in `arguments` (those of the process where None), and return the exit code.

    0: as asked; 1: it failed, and the reason was printed; 2 (from argparse): wrong usage; 128 + a signal's number: ended
    by it.
    """
    asked = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = asked.func
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        code = run(asked)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (InfinityError, OSError) as error:
        _let_go_of_stdout()
        if isinstance(error, BrokenPipeError):  # whoever read our output has enough, as `| head` does
            return 128 + signal.SIGPIPE
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _let_go_of_stdout() -> None:
    """Print what can still be printed. The interpreter flushes stdout once more at exit, which must not fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C would, so that what was put on the drive is removed on the way out."""
    raise SystemExit(128 + number)
