"""Floor 7. The program `infinity-bench`: finds the subcommand, runs it, returns its exit code. Runs on the main thread.

A subcommand is a module with `add_parser(subparsers)`, which adds its parser and sets the default `func`
to a function from the parsed arguments to the exit code. It imports torch, matplotlib and the like inside that function.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import infinity
from infinity.cli import step
from infinity.cli.doctor import command as doctor
from infinity.cli.plan import command as plan
from infinity.cli.sweep import command as sweep
from infinity.errors import InfinityError

_COMMANDS = (doctor, sweep, plan, step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `infinity-bench` with `arguments` (those of the process where None) and return the exit code.

    0: as asked; 1: it failed, and the reason was printed; 2 (from argparse): wrong usage; 128 + a signal's number: ended
    by it.
    """
    asked = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = asked.func
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        code = run(asked)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (InfinityError, OSError) as error:
        _let_go_of_stdout()
        if isinstance(error, BrokenPipeError):  # whoever read our output has enough, as `| head` does
            return 128 + signal.SIGPIPE
        print(f"infinity-bench: {error}", file=sys.stderr)
        return 1


def _let_go_of_stdout() -> None:
    """Print what can still be printed. The interpreter flushes stdout once more at exit, which must not fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity-bench", description="Find out what this machine and its drives can do for training from NVMe."
    )
    parser.add_argument("--version", action="version", version=f"infinity {infinity.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def _end(number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C would, so that what was put on the drive is removed on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
