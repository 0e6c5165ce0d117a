"""Floor 11. The command-line arguments that scripts written for DeepSpeed take."""

from __future__ import annotations

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` (accepted) and `--deepspeed_config FILE`, which `initialize(args=...)` reads. Returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "the training config, in DeepSpeed's JSON")
    group.add_argument("--deepspeed", action="store_true", help="accepted: the training runs through infinity")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the training config (JSON)")
    return parser
