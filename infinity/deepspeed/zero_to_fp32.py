"""DeepSpeed's `zero_to_fp32`: convert a checkpoint to fp32 weights, as functions and as a command.

python -m infinity.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--max_shard_size 5GB] [--tag TAG]
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TypeVar

from torch import nn

from infinity.checkpoint.consolidate import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from infinity.errors import CheckpointError
from infinity.fsdp2.sharding import is_sharded

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

_Model = TypeVar("_Model", bound=nn.Module)


def load_state_dict_from_zero_checkpoint(
    model: _Model, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> _Model:
    """Move `model` to the CPU, load the checkpoint's fp32 values into it, and return it.

    Parameters that the checkpoint lacks keep their values. Raises CheckpointError if the checkpoint cannot be read, and for the
    sharded model of an engine.
    """
    if is_sharded(model):
        raise CheckpointError(
            "the model is sharded, as an engine holds it: pass a newly built one, or use engine.load_checkpoint"
        )
    model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32", description="Write the model in a checkpoint as safetensors with fp32 parameters."
    )
    parser.add_argument("checkpoint_dir", help="folder of the checkpoints, or one of them")
    parser.add_argument("output_dir", help="folder for model.safetensors, or its parts with their index")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes per file (5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="accepted: nothing else is written")
    parser.add_argument("-t", "--tag", help="which checkpoint of the folder; the latest where absent")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted, without effect")
    options = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir, options.output_dir, max_shard_size=options.max_shard_size, tag=options.tag
        )
    except (CheckpointError, ValueError) as error:
        print(f"zero_to_fp32: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
