"""The program `infinity-bench`. A subcommand is a module with `add_parser`; it imports torch and the like when it
runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import infinity
from infinity.cli import report, step
from infinity.cli.doctor import command as doctor
from infinity.cli.plan import command as plan
from infinity.cli.program import run_program
from infinity.cli.sweep import command as sweep

_COMMANDS = (doctor, sweep, plan, step, report)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity-bench", description="Find out what this machine and its drives can do for training from NVMe."
    )
    parser.add_argument("--version", action="version", version=f"infinity {infinity.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
