"""The training of train_lm.py by plain PyTorch held in memory, timed now and then beside it: what who has the memory waits."""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, GPTConfig
from rich.console import Console
from torch import nn

import infinity
from infinity.cli.plain_torch import PlainStep, PlainTorch, plain_process
from infinity.plan.transformer import dense_transformer

TIMES = 5
"""Steps of plain PyTorch in a training that is long enough."""


def make_training(
    shape: GPTConfig, samples: int, device: torch.device
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The model on `device`, and its loss on a new batch; called in the other process."""
    with device:
        model = GPT(shape)

    def loss_of(trained: nn.Module) -> torch.Tensor:
        pieces = torch.randint(VOCABULARY, (samples, shape.context + 1), device=device)
        return F.cross_entropy(trained(pieces[:, :-1]).float().flatten(0, 1), pieces[:, 1:].flatten())

    return model, loss_of


class Comparison:
    """Plain PyTorch in a process of its own. It steps while the training pauses, so that both have the same machine."""

    def __init__(self, engine: infinity.Engine, shape: GPTConfig, args: argparse.Namespace, console: Console) -> None:
        report = functools.partial(console.print, style="yellow", highlight=False, soft_wrap=True)
        optimizer = engine.config.optimizer
        comparable = engine.world_size == 1 and engine.config.bf16.enabled and getattr(optimizer, "type", "") == "AdamW"
        asked = not (args.in_memory or args.no_compare)
        if asked and not comparable:
            report("plain PyTorch in memory is left out: it is one rank's, in bf16 with AdamW")
        self._goes_on = asked and comparable
        self._every = max(2, (args.steps - engine.global_steps) // TIMES)
        self._steps: list[PlainStep] = []
        self._plain: PlainTorch | None = None
        self._stack = contextlib.ExitStack()
        samples = engine.train_micro_batch_size_per_gpu()
        sizes = {"layers": shape.layers, "hidden": shape.hidden_size, "heads": shape.heads, "seq": shape.context}
        self._report = report
        self._process = functools.partial(
            plain_process,
            functools.partial(make_training, shape, samples),
            shape=dense_transformer(**sizes, vocab=VOCABULARY),
            samples=samples,
            clipping=engine.gradient_clipping(),
            micro_batches=engine.gradient_accumulation_steps(),
        )

    def step_after(self, number: int) -> bool:
        """Whether it stepped after the training's step of this `number`, counted from 1: it does after every few."""
        if not self._goes_on or number % self._every:
            return False
        if self._plain is None:  # only now, when the training holds all the memory that it takes
            self._plain = PlainTorch(self._stack.enter_context(self._process()), self._report)
        self._plain.step()  # during the training's last writes: not counted
        step = self._plain.step()
        if step is None:
            self._goes_on = False
            self._steps.clear()
        else:
            self._steps.append(step)
        return True

    def summary(self) -> dict[str, float | None]:
        """Medians of its steps; None where it was left out."""
        figures: dict[str, Callable[[PlainStep], float]] = {
            "seconds": lambda step: step.seconds,
            "cpu_seconds_per_step": lambda step: step.usage.cpu_seconds,
            "minor_faults_per_step": lambda step: step.usage.minor_faults,
        }
        medians = {
            f"torch_in_memory_{name}": statistics.median(map(figure, self._steps)) if self._steps else None
            for name, figure in figures.items()
        }
        return {**medians, "torch_in_memory_peak_rss_bytes": self._steps[-1].peak_rss_bytes if self._steps else None}

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
