"""The program `infinity-bench`. A subcommand is a module with its texts, `add_arguments`, and `run`, which imports torch."""

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

_COMMANDS = {"doctor": doctor, "sweep": sweep, "plan": plan, "step": step, "report": report}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity-bench", description="Find out what this machine and its drives can do for training from NVMe."
    )
    parser.add_argument("--version", action="version", version=f"infinity {infinity.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        about = {"help": command.SUMMARY, "description": command.DESCRIPTION, "epilog": command.EPILOG}
        added = subparsers.add_parser(name, **about, formatter_class=argparse.RawDescriptionHelpFormatter)
        added.set_defaults(func=command.run, prog=added.prog)
        command.add_arguments(added)
    return parser


if __name__ == "__main__":
    sys.exit(main())
