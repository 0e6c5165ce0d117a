"""Encodes training state (counters, schedules, random numbers, `client_state`) as bytes, and decodes it.

torch's format, read with weights_only: numbers, strings, tensors, lists and dicts, and no code.

[Note: Many small things]
torch stores each tensor as a file of its own, and reads strings one by one, which takes seconds for tens of thousands
of parameters. So all step counts are one tensor, and all names one string (JSON). The older form is read too.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from infinity.errors import CheckpointError
from infinity.store.files import parse_json

RANDOM_STATES = frozenset({"rng", "rng_device"})
"""Keys that a new rank does not take from another rank."""
_NAMES, _VALUES = "names", "values"
_NAMES_OF_GROUPS = frozenset({"group_names", "unstepped"})
"""Keys of names of parameters, by parameter group."""


def encode(training_state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(_packed(training_state), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except MemoryError:
        raise  # says nothing about the state
    except Exception as error:
        raise CheckpointError(
            f"client_state can't be stored ({type(error).__name__}): it may hold numbers, strings, tensors, lists and dicts"
        ) from None
    return buffer.getvalue()


def decode(stored: bytes | BinaryIO) -> dict[str, Any]:
    try:
        file = io.BytesIO(stored) if isinstance(stored, bytes) else stored
        packed = torch.load(file, weights_only=True, map_location="cpu")
        if isinstance(packed, dict):
            return _unpacked(packed)
    except Exception as error:  # torch.load may raise anything for arbitrary bytes
        raise ValueError(str(error) or type(error).__name__) from None
    raise ValueError("it holds something else")


def _packed(training_state: Mapping[str, Any]) -> dict[str, Any]:
    packed = dict(training_state)
    if steps := training_state.get("steps"):
        packed["steps"] = {_NAMES: json.dumps([*steps]), _VALUES: torch.stack([*steps.values()])}
    packed |= {key: json.dumps(training_state[key]) for key in _NAMES_OF_GROUPS & training_state.keys()}
    return packed


def _unpacked(state: dict[str, Any]) -> dict[str, Any]:
    steps = state.get("steps")
    if isinstance(steps, dict) and isinstance(steps.get(_NAMES), str):
        names, values = parse_json(list[str], steps[_NAMES]), steps.get(_VALUES)
        if not isinstance(values, torch.Tensor) or values.shape != (len(names),):
            raise ValueError(f"it has no number of steps for each of {len(names)} parameters")
        state["steps"] = {name: value.clone() for name, value in zip(names, values.unbind(), strict=True)}
    for key in _NAMES_OF_GROUPS & state.keys():
        if isinstance(state[key], str):
            state[key] = parse_json(list[list[str]], state[key])
    return state
