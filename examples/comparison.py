"""Times the training of train_lm.py in plain PyTorch, in memory, at intervals during the run, for comparison."""

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
"""Timed steps of plain PyTorch, if the training is long enough."""


def make_training(
    shape: GPTConfig, samples: int, device: torch.device
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Create the model on `device`, and a function that computes its loss on a new batch. Runs in the other process."""
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
            report("plain PyTorch in memory is left out: it needs one rank, bf16 and AdamW")
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
        """Step after every few steps of the training; `number` counts these from 1. Returns True if it stepped."""
        if not self._goes_on or number % self._every:
            return False
        if self._plain is None:  # only now that the training holds all of its memory
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
        """Return medians of its steps; None if it was left out."""
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
