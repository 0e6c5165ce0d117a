"""How our programs start and end: signals, exit code, errors as one line. Main thread."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

from infinity.errors import ConfigError, InfinityError


class UsageError(ConfigError):
    """Options that can't be satisfied."""


@contextmanager
def usage_checked() -> Iterator[None]:
    try:
        yield
    except (InfinityError, ValueError) as error:
        raise UsageError(str(error)) from error


def run_program(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run the `func` that `parser` finds in `arguments` (None: those of the process) and return the exit code.

    0: success; 1: failure, with the reason printed; 2: wrong usage, or no command (the help is printed); 128 + N: ended by
    signal N.
    """
    if parser.get_default("func") is None and not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.func
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Output, such as a path, may hold characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run(options)
        _flush()
        return code
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except UsageError as error:
        print(f"{options.prog}: error: {error}", file=sys.stderr)
        return 2
    except (InfinityError, OSError) as error:
        try:
            _flush()
        except OSError:  # to /dev/null: the interpreter flushes it once more at exit, which must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of our output has closed it, as `| head` does
            return 128 + signal.SIGPIPE
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _end(number: int, _frame: FrameType | None) -> None:
    """Exit as Ctrl-C would, so that files on the drive are removed on the way out."""
    raise SystemExit(128 + number)


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals that would end the program until the block ends: a folder is created or removed as a whole."""
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, lambda arriving, _frame: arrived.append(arriving))) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from processes that start in the block; the caller ends them. A Ctrl-C meanwhile arrives after it."""
    resource_tracker.ensure_running()  # its start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
