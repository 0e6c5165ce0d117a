"""What one forward computes and where its seconds go, module by module: the report of `flops_profiler`, on rank 0.
Training thread only."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from infinity.config import Batch
from infinity.config.blocks import FlopsProfilerConfig
from infinity.runtime.observe import now

log = logging.getLogger("infinity")


@dataclass(eq=False)
class _Part:
    """A module, and what its forwards took, with all that is inside it. flops: two per multiply and add."""

    name: str
    kind: str
    depth: int
    numel: int
    flops: int = 0
    seconds: float = 0.0
    began: list[tuple[int, float]] = field(default_factory=list)  # of the running forwards


class FlopsProfile:
    """See `flops_profiler` in docs/config.md. `measure` goes around forward, backward and step."""

    def __init__(self, module: nn.Module, settings: FlopsProfilerConfig, shard_numel: int) -> None:
        self._module, self._settings, self._shard_numel = module, settings, shard_numel
        self._seconds: dict[str, float] = {}
        self._began, self._micro_batches = 0.0, 1
        self._whole = _Part("", _kind(module), 0, sum(p.numel() for p in module.parameters()))
        self._parts = [self._whole]

    @contextlib.contextmanager
    def measure(self, part: str, steps: int, micro_batches: int = 1) -> Iterator[None]:
        """In the step to profile, count what happens in the block for `part`: "fwd" and "bwd" of the first micro-batch,
        or of as many as pass at once; "step" of the last."""
        wanted = part == "step" or (part not in self._seconds and torch.is_grad_enabled())
        if not self.is_due(steps) or not wanted:
            yield
            return
        began = now()
        if part == "fwd":
            self._began, self._micro_batches = began, micro_batches
        with self._counting() if part == "fwd" else contextlib.nullcontext():
            yield
        self._seconds[part] = now() - began

    def is_due(self, steps: int) -> bool:
        return steps == self._settings.profile_step

    def report(self, batch: Batch) -> bool:
        """Write the report if the step that just ended, of this batch, was measured, and return True then."""
        if not self._seconds.keys() >= {"fwd", "bwd", "step"}:
            return False
        details = self._details() if self._settings.detailed else ()
        text = "\n".join((*self._summary(batch, now() - self._began), *self._by_depth(), *details)) + "\n"
        if self._settings.output_file is not None:
            try:
                Path(self._settings.output_file).write_text(text)
                return True
            except OSError as error:
                log.warning(
                    "flops_profiler.output_file %s can't be written (%s): the report is on standard output",
                    self._settings.output_file,
                    error.strerror,
                )
        print(text, end="", flush=True)
        return True

    def warn_unused(self, steps: int) -> None:
        log.warning(
            "flops_profiler wrote no report: profile_step is %d, and the training ended at step %d without a whole one there; "
            "choose a step that is trained",
            self._settings.profile_step,
            steps,
        )

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the block as a forward, with hooks at both ends of every module's forward."""
        with FlopCounterMode(display=False) as counter, contextlib.ExitStack() as undo:

            def begin(part: _Part) -> None:
                part.began.append((counter.get_total_flops(), now()))

            def end(part: _Part) -> None:
                flops, began = part.began.pop()
                part.flops += counter.get_total_flops() - flops
                part.seconds += now() - began

            for name, module in [*self._module.named_modules()][1:]:
                part = _Part(name, _kind(module), name.count(".") + 1, sum(p.numel() for p in module.parameters()))
                self._parts.append(part)
                before = module.register_forward_pre_hook(lambda _, __, part=part: begin(part), prepend=True)
                after = module.register_forward_hook(lambda _, __, ___, part=part: end(part))
                undo.callback(before.remove)
                undo.callback(after.remove)
            began = now()
            yield
            self._whole.flops, self._whole.seconds = counter.get_total_flops(), now() - began

    def _summary(self, batch: Batch, whole_seconds: float) -> Iterator[str]:
        flops, forward, backward = self._whole.flops, self._seconds["fwd"], self._seconds["bwd"]
        back = 2 + self._settings.recompute_fwd_factor
        figures = {
            "world size": dist.get_world_size(),
            "batch size per GPU": batch.micro,
            "gradient accumulation steps": batch.accumulation,
            "params of model": _amount(self._whole.numel),
            "params per GPU, sharded": _amount(self._shard_numel),
            "fwd MACs per GPU": _amount(flops / 2, "MACs"),
            "fwd flops per GPU": _amount(flops),
            "fwd latency": _time(forward),
            "bwd latency": _time(backward),
            "fwd FLOPS per GPU = fwd flops / fwd latency": _rate(flops, forward),
            f"bwd FLOPS per GPU = {back:g} * fwd flops / bwd latency": _rate(back * flops, backward),
            f"fwd+bwd FLOPS per GPU = {1 + back:g} * fwd flops / (fwd+bwd latency)": _rate(
                (1 + back) * flops, forward + backward
            ),
            "step latency": _time(self._seconds["step"]),
            "iter latency, all micro-batches and the step": _time(whole_seconds),
            "samples/second": f"{batch.train / whole_seconds:.2f}",
        }
        yield _title("Flops Profiler")
        counted = f"{self._micro_batches} micro-batches" if self._micro_batches > 1 else "first micro-batch"
        yield f"Profile summary at step {self._settings.profile_step}, of its {counted} on rank 0."
        yield "Latencies include the counting; gathering and paging are part of the forward in which they happen."
        yield ""
        yield from (f"{name + ':':<72}{value}" for name, value in figures.items())

    def _by_depth(self) -> Iterator[str]:
        deepest = max(part.depth for part in self._parts)
        depth = self._settings.module_depth
        yield ""
        yield _title("Aggregated Profile per GPU")
        yield "Top modules in terms of params, MACs and fwd latency at different depths:"
        for level in range(1 + (deepest if depth == -1 else min(depth, deepest))):
            kinds: dict[str, list[float]] = {}
            for part in self._parts:
                if part.depth == level:
                    sums = kinds.setdefault(part.kind, [0, 0, 0])
                    kinds[part.kind] = [sums[0] + part.numel, sums[1] + part.flops / 2, sums[2] + part.seconds]
            yield f"depth {level}:"
            for index, (name, shown) in enumerate((("params", _amount), ("MACs", _macs), ("fwd latency", _time))):
                largest = sorted(kinds.items(), key=lambda kind: kind[1][index], reverse=True)
                top = {kind: shown(sums[index]) for kind, sums in largest[: self._settings.top_modules]}
                yield f"    {name:<12}- {top}"

    def _details(self) -> Iterator[str]:
        yield ""
        yield _title("Detailed Profile per GPU")
        yield "Each module with its params, MACs and fwd latency, their shares of the whole, and its fwd FLOPS:"
        for part in self._parts:
            figures = (
                f"{_amount(part.numel)} = {_share(part.numel, self._whole.numel)} params",
                f"{_macs(part.flops / 2)} = {_share(part.flops, self._whole.flops)} MACs",
                f"{_time(part.seconds)} = {_share(part.seconds, self._whole.seconds)} latency",
                _rate(part.flops, part.seconds),
            )
            indent = "  " * part.depth
            yield f"{indent}({part.name.rpartition('.')[2] or 'model'}): {part.kind}: {', '.join(figures)}"


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _title(text: str) -> str:
    return f" {text} ".center(80, "-")


def _amount(number: float, unit: str = "") -> str:
    """Format a number such as "336.23 M"."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.2f} {prefix}{unit}"
    return f"{number:g} {unit}".rstrip()


def _macs(number: float) -> str:
    return _amount(number, "MACs")


def _rate(flops: float, seconds: float) -> str:
    return _amount(flops / seconds if seconds > 0 else 0.0, "FLOPS")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "0%"
