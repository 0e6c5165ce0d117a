"""Floor 5. Small things beside a model's tensors (counters, schedules, random numbers, the user's own), as bytes and back.

torch's format, read with weights_only: numbers, strings, tensors, lists and dicts, and no code.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import torch

from infinity.errors import CheckpointError

RANDOM_STATES = frozenset({"rng", "rng_device"})
"""What a rank that there was not before doesn't take over from another."""


def encode(rest: dict[str, Any]) -> bytes:
    """The bytes of plain values and tensors. Raises CheckpointError where something else is among them."""
    buffer = io.BytesIO()
    try:
        torch.save(rest, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"client_state can't be stored ({type(error).__name__}): it may hold numbers, strings, tensors, lists and dicts"
        ) from None
    return buffer.getvalue()


def decode(stored: bytes | BinaryIO) -> dict[str, Any]:
    """What `encode` was given, on the CPU. Raises ValueError for anything else."""
    try:
        file = io.BytesIO(stored) if isinstance(stored, bytes) else stored
        found = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever torch.load makes of arbitrary bytes
        raise ValueError(str(error) or type(error).__name__) from None
    if not isinstance(found, dict):
        raise ValueError("it holds something else")
    return found
