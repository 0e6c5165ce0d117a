"""Who looks for the elements of a tensor past the dispatcher finds them, or an error: never what lies at an empty address."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from infinity.errors import InfinityError
from infinity.fsdp2.elsewhere import ElsewhereTensor
from infinity.fsdp2.first_values import _Whole
from infinity.swap.gradient_lap import Taken, _made, refusal

VALUES = [1.0, 2.0, 3.0]


KINDS: dict[str, Callable[[], ElsewhereTensor]] = {
    "first value": lambda: _Whole.of(torch.empty(3), lambda: torch.tensor(VALUES)),
}
LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy().tolist(),
    "asarray": lambda tensor: np.asarray(tensor).tolist(),
    "DLPack": lambda tensor: np.from_dlpack(tensor).tolist(),
    "deepcopy": lambda tensor: copy.deepcopy(tensor).tolist(),
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)).tolist(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_found(kind: str, look: str) -> None:
    assert LOOKS[look](KINDS[kind]()) == VALUES


@pytest.mark.parametrize("look", LOOKS)
def test_those_of_a_taken_gradient_are_refused(look: str) -> None:
    stand_in: Any = SimpleNamespace(taken=Taken.FOR_STEP, refusal=lambda: refusal("weight"))
    with pytest.raises(InfinityError, match=r"gradient of weight was already consumed"):
        LOOKS[look](_made(torch.Size((3,)), (1,), torch.device("cpu"), stand_in))
