"""An exception in a backward of a loop without the engine, on a CPU or on a device that copies while it computes.

The loop catches it and continues in the given way: it drops the gradients and repeats the step, or takes the step if nothing
else is left to do.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import batch, sharded
from fake import FakeRuntime
from interrupts import FSDP2, OURS, Lines
from staying import share_of, staying
from torch.autograd import Variable

import infinity
from infinity.device import StreamDevice
from infinity.swap import manager

STEPS = 3
INTERRUPTED_STEP = 1
KINDS: list[dict[str, Any]] = [
    {"update": "step"},
    {"update": "forward", "gradient_dtype": torch.bfloat16},
    {"update": "forward", "gradient_bytes_max": 0},
    {"update": "backward"},
    {"update": "backward", "param_persistence_threshold": 1000},
    {"update": "backward", "speculative": True},
]


class Tail(Lines):
    """Counts the lines behind FSDP2's own end of a backward, where updates are made whose gradients were on their way. At 0 it
    raises as another's callback there does."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__(OURS)
        self._first_at = at

    def begin(self) -> None:
        self.seen, self._at = 0, self._first_at
        if self._at == 0:
            raise KeyboardInterrupt


def train(folder: Path, kind: dict[str, Any], lines: Lines, *, discrete: bool) -> list[torch.Tensor] | None:
    """The weights after all steps, of one of which the backward is interrupted; None where the loop was refused in words."""
    options = infinity.PagingOptions(**{"param_persistence_threshold": 0, "sub_group_size": 2048} | kind)
    with pytest.MonkeyPatch.context() as patch:
        if discrete:
            patch.setattr(manager, "device_for", lambda torch_device: StreamDevice(FakeRuntime()))
        with infinity.SwapManager(folder, pinned_bytes_max="16MiB") as swap:
            model = sharded()
            with staying(share_of(kind)):
                swap.page(model, options)
            optimizer = infinity.PagedAdamW(model.parameters(), swap=swap, lr=1e-2)

            def backward(number: int, around: Lines | None = None) -> None:
                optimizer.expect(1.0)
                outputs = model(batch(number))
                loss = outputs.float().square().mean()
                if around is None:
                    loss.backward()
                    return
                if isinstance(around, Tail):  # behind the hook in which FSDP2 has queued its own
                    begin = around.begin
                    outputs.register_hook(lambda grad: Variable._execution_engine.queue_callback(begin))
                with around.traced():
                    loss.backward()

            try:
                for number in range(STEPS):
                    try:
                        backward(number, lines if number == INTERRUPTED_STEP else None)
                    except KeyboardInterrupt:
                        try:
                            optimizer.zero_grad()
                            backward(number)
                        except infinity.InfinityError as error:
                            if "call step() first" not in str(error):
                                raise
                    optimizer.step()
                    optimizer.zero_grad()
            except infinity.InfinityError as error:
                if "torn" not in str(error):
                    raise
                return None
            return [p.detach().full_tensor() + 0 for p in model.parameters()]


@cache
def expected() -> list[torch.Tensor]:
    """Of the same held in memory."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        model(batch(number)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().full_tensor() + 0 for p in model.parameters()]


def check(weights: list[torch.Tensor] | None) -> str:
    """The outcome in a word. Raises AssertionError where a weight is another than in memory."""
    if weights is None:
        return "refused"
    for number, (got, right) in enumerate(zip(weights, expected(), strict=True)):
        assert torch.equal(got, right), f"weight {number}"
    return "went on"


_counts: dict[tuple[int, bool, str], int] = {}


def trial(seed: int, folder: Path) -> str:
    """One training that is interrupted once, at any line of a backward; the outcome in a word."""
    draw = random.Random(seed)
    number, discrete = draw.randrange(len(KINDS)), draw.random() < 0.5
    package = FSDP2 if draw.random() < 0.25 else OURS
    if (number, discrete, package) not in _counts:
        counter = Lines(package)
        assert check(train(folder, KINDS[number], counter, discrete=discrete)) == "went on"
        _counts[number, discrete, package] = counter.seen
    lines = Lines(package, draw.randrange(1, 1 + _counts[number, discrete, package]))
    try:
        return check(train(folder, KINDS[number], lines, discrete=discrete))
    except BaseException as error:
        error.add_note(f"{KINDS[number]}, {discrete=}, interrupted at {lines.where}")
        raise
