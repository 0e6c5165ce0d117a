"""Plain PyTorch in memory: training with enough memory, and the reference time for a measured step.

`PlainTraining` is the training: a bf16 model, fp32 masters, torch's optimizer (Adam fused), no FSDP2. `plain_process`
runs it in its own process, so that the two share no heap, threads, page faults or memory limit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from infinity.cli.program import without_interrupts
from infinity.host_memory import available_bytes
from infinity.kernel_files import text_of
from infinity.optim.muon import MuonAdamW, is_for_muon
from infinity.plan.transformer import Transformer as Shape
from infinity.runtime.resolved import compute_device
from infinity.units import GIB, format_bytes

STATE_BYTES = 18
"""Bytes per parameter: the bf16 model, and in fp32 the master, its gradient and two moments."""

PROCESS_BYTES = GIB // 2
"""Bytes of Python, torch, and the bf16 gradients that are being converted to fp32."""

Named = list[tuple[str, torch.Tensor]]


def _muon(masters: Named) -> torch.optim.Optimizer:
    matrices = [master for name, master in masters if is_for_muon(name, master.shape)]
    others = [master for name, master in masters if not is_for_muon(name, master.shape)]
    return MuonAdamW([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False, "fused": True}])


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "AdamW": lambda masters: torch.optim.AdamW(masters, fused=True),
    "Adam": lambda masters: torch.optim.Adam(masters, fused=True),
    "SGD": lambda masters: torch.optim.SGD(masters, lr=1e-3, momentum=0.9),
    "Muon": _muon,
}

Make = Callable[[torch.device], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]
"""Creates, on a device, an fp32 model and a function that computes its loss on a new batch. It is pickled."""


class Usage(NamedTuple):
    """Resources that all threads of this process have used so far."""

    cpu_seconds: float
    minor_faults: int

    @classmethod
    def now(cls) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_utime + used.ru_stime, used.ru_minflt)

    def since(self, before: Usage) -> Usage:
        return Usage(self.cpu_seconds - before.cpu_seconds, self.minor_faults - before.minor_faults)


class PlainTraining:
    """Training of `model`, which is converted from fp32 to bf16, or to fp16 with torch's loss scaling.

    Each gradient is converted to its master's as soon as it exists, and its memory is reused for the next one. Compared
    with converting all after the backward, this takes a quarter of the page faults on a CPU and 2 bytes less per
    parameter. Every parameter must have a gradient in every backward.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        clipping: float,
        optimizer: str = "AdamW",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        names = [name for name, _ in model.named_parameters()]
        self.model = model
        self._clipping = clipping
        self._params: list[torch.Tensor] = list(model.parameters())
        self._masters = [param.detach() for param in self._params]  # keep the fp32 memory through the conversion
        assert all(master.dtype == torch.float32 for master in self._masters)
        model.to(dtype)
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = torch.zeros_like(master)
            param.register_post_accumulate_grad_hook(self._taking(master.grad))
        self._optimizer = OPTIMIZERS[optimizer](list(zip(names, self._masters, strict=True)))
        self._accumulates = False
        device = next(model.parameters()).device.type
        self._scaler = torch.amp.GradScaler(device, init_scale=2.0**16, enabled=dtype is torch.float16)

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self._params)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of a micro-batch; its gradients are added to those of the step's earlier ones."""
        torch.autograd.backward(self._scaler.scale(loss))
        self._accumulates = True

    def step(self) -> None:
        if self._clipping > 0:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._masters, self._clipping)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._masters)
        self._accumulates = False

    def _taking(self, into: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def take(param: torch.Tensor) -> None:
            assert param.grad is not None
            if self._accumulates:
                into.add_(param.grad.float())  # far faster than torch's sum of two dtypes
            else:
                into.copy_(param.grad)
            param.grad = None

        return take


@dataclass(frozen=True)
class PlainStep:
    """Cost of one step. peak_rss_bytes: the largest resident size of its process so far."""

    seconds: float
    usage: Usage
    peak_rss_bytes: int


class PlainTorch:
    """Client of the plain PyTorch process at the other end of `orders`. A step is None if that process can't take it,
    or has ended; `report` then got the reason."""

    def __init__(self, orders: Connection, report: Callable[[str], None]) -> None:
        self._orders = orders
        self._report = report

    def step(self) -> PlainStep | None:
        if self._orders.closed:
            return None
        try:
            self._orders.send(None)
            answer = self._orders.recv()
        except (EOFError, OSError):
            answer = "its process has ended; the kernel ends it first if memory runs out"
        if isinstance(answer, PlainStep):
            return answer
        self._orders.close()
        self._report(f"plain PyTorch in memory is left out: {answer}")
        return None


def why_not(shape: Shape, samples: int) -> str | None:
    """Return why available memory can't hold plain PyTorch's training; None if it can."""
    needed = STATE_BYTES * shape.numel + shape.activation_bytes(samples, shape.layers) + shape.logits_bytes(samples)
    device = compute_device()
    if device.type == "cuda":
        available: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        needed, available = needed + PROCESS_BYTES, available_bytes()
    if available is None or needed <= available:
        return None
    return f"it takes {format_bytes(needed)} for this model, and {format_bytes(available)} are available"


@contextlib.contextmanager
def plain_process(
    make: Make, *, shape: Shape, samples: int, clipping: float, micro_batches: int = 1, optimizer: str = "AdamW"
) -> Iterator[Connection]:
    """Start a process that takes steps of plain PyTorch; yields the connection for `PlainTorch`. The first step creates
    the model, if available memory can then hold it; `shape` and `samples` say how much that is."""
    spawn = multiprocessing.get_context("spawn")  # OpenMP's threads don't survive a fork
    ours, orders = spawn.Pipe()
    arguments = (orders, make, shape, samples, clipping, micro_batches, optimizer, torch.get_num_threads())
    process = spawn.Process(target=_serve, args=arguments, daemon=True)
    with without_interrupts():
        process.start()
    orders.close()
    try:
        yield ours
    finally:
        ours.close()
        process.kill()
        process.join()


def end_first_without_memory() -> None:
    """Make the kernel kill this process first if memory runs out: it is a comparison, not the training."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _serve(
    orders: Connection,
    make: Make,
    shape: Shape,
    samples: int,
    clipping: float,
    micro_batches: int,
    optimizer: str,
    threads: int,
) -> None:
    end_first_without_memory()
    torch.set_num_threads(threads)
    training: PlainTraining | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            orders.recv()
            try:
                if training is None:
                    if (reason := why_not(shape, samples)) is not None:
                        raise MemoryError(reason)
                    model, loss_of = make(compute_device())
                    training = PlainTraining(model, clipping=clipping, optimizer=optimizer)
                orders.send(_timed_step(training, loss_of, micro_batches))
            except (RuntimeError, MemoryError) as error:  # the allocator's out-of-memory errors
                orders.send(str(error).splitlines()[0] if str(error) else repr(error))


def _timed_step(training: PlainTraining, loss_of: Callable[[nn.Module], torch.Tensor], micro_batches: int) -> PlainStep:
    before, began = Usage.now(), time.perf_counter()
    for _ in range(micro_batches):
        training.backward(loss_of(training.model))
    training.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    used = Usage.now().since(before)
    return PlainStep(seconds, used, peak_rss_bytes())


def peak_rss_bytes() -> int:
    """Return the largest resident size of this process. getrusage would return its parent's, if larger."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", text_of(Path("/proc/self/status")) or "")
    return 1024 * int(peak[1]) if peak else 0
