"""A device that isn't there: a runtime for infinity/device/streams.py on which every careless order of things goes wrong.

Its memory is ordinary memory, its current stream runs at once, and its copies run as late as the rules allow or, at random, a
little earlier, those of one stream before or after those of another. Until a copy has run, its destination is filled with NaN.
It also keeps vector clocks, of the streams and of the host, so that a missing wait is an error even where the bytes
happen to be there. Raises `Hazard` on

  * a look into a destination by a stream, or by the host, that has not waited for the copy;
  * a copy out of bytes whose making its stream has not waited for;
  * a change of a source before the copy has run, and a lease or a buffer that goes back with such a copy in flight;
  * a transfer of a drive that begins on bytes which a copy still reads or writes;
  * device memory that is freed while a stream other than its own may still use it, and was not noted.

`watching()` sees every operation of torch while it is entered; the compiled optimizer, which works on addresses, is seen
through `infinity.optim.kernel`.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from infinity.aio import IoEngine, Lease, PinnedSlab, Request
from infinity.device import HostBuffer
from infinity.optim import kernel
from infinity.swap import paged_adam
from infinity.swap.paged_tensor import PagedTensor


class Hazard(AssertionError):
    """What would have gone wrong on a device, some time."""


Clock = dict["FakeStream | None", int]
"""By stream (None: the host): how many of its operations have certainly been done."""


def merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


class FakeEvent:
    def __init__(self, runtime: FakeRuntime, stream: FakeStream) -> None:
        self.runtime, self.stream = runtime, stream
        self.clock: Clock = dict(stream.clock)
        self.passed = False

    def query(self) -> bool:
        self.runtime.stir()
        if self.passed:
            merge(self.runtime.host, self.clock)
        return self.passed

    def synchronize(self) -> None:
        self.stream.run_until(self)
        merge(self.runtime.host, self.clock)


@dataclass(eq=False)
class Copy:
    """One copy: what it reads and writes, as byte ranges, and its place in its stream."""

    into: torch.Tensor | None
    source: torch.Tensor | None
    stream: FakeStream
    number: int
    reads: tuple[int, int] = field(init=False)
    writes: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.source is not None and self.into is not None
        self.reads, self.writes = span_of(self.source), span_of(self.into)

    def run(self) -> None:
        assert self.source is not None and self.into is not None
        self.into.copy_(self.source)
        self.source = self.into = None

    @property
    def ran(self) -> bool:
        return self.into is None

    def known_by(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.number


@dataclass(eq=False)
class Read(Copy):
    """One read of a drive: a copy whose source is private."""

    fill: Callable[[torch.Tensor], None] = field(kw_only=True)

    def __post_init__(self) -> None:
        assert self.into is not None
        self.reads, self.writes = (0, 0), span_of(self.into)

    def run(self) -> None:
        assert self.into is not None
        self.fill(self.into)
        self.into = None


class FakeStream:
    """A queue that runs when it must. The current stream has none: what it is given is done."""

    def __init__(self, runtime: FakeRuntime, name: str, *, at_once: bool = False) -> None:
        self.runtime, self.name, self.at_once = runtime, name, at_once
        self.clock: Clock = {}
        self.queue: deque[Copy | FakeEvent | tuple[FakeEvent]] = deque()

    def tick(self) -> int:
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def record_event(self) -> FakeEvent:
        merge(self.clock, self.runtime.host)
        event = FakeEvent(self.runtime, self)
        if self.at_once:
            event.passed = True
        else:
            self.queue.append(event)
        self.runtime.stir()
        return event

    def wait_event(self, event: FakeEvent) -> None:
        merge(self.clock, event.clock)
        if self.at_once:
            event.stream.run_until(event)
        else:
            self.queue.append((event,))
        self.runtime.stir()

    def run_until(self, event: FakeEvent) -> None:
        while not event.passed:
            self.run_one()

    def run_one(self) -> None:
        item = self.queue.popleft()
        if isinstance(item, Copy):
            with self.runtime.unwatched():
                item.run()
        elif isinstance(item, FakeEvent):
            item.passed = True
        else:
            item[0].stream.run_until(item[0])


@dataclass(eq=False)
class Memory:
    """What was made on a stream, and who uses it. `tensor` keeps it, and is its only owner once it is freed."""

    tensor: torch.Tensor
    owner: FakeStream
    span: tuple[int, int]
    noted: set[FakeStream] = field(default_factory=set)
    used_by: set[FakeStream] = field(default_factory=set)


class FakeRuntime:
    """See `infinity.device.cuda.CudaRuntime`. `refuses`: what `pin` answers, where the machine pins nothing."""

    torch_device = torch.device("cpu")
    numa_node = None

    def __init__(self, seed: int = 0, *, refuses: str | None = None) -> None:
        self.draws = random.Random(seed)
        self.refuses = refuses
        self.host: Clock = {}
        self.compute = FakeStream(self, "compute", at_once=True)
        self.streams: list[FakeStream] = []
        self.copies: list[Copy] = []
        """Those that the host doesn't know to have run."""
        self.memory: list[Memory] = []
        self.made_at: dict[int, int] = {}
        """By address of their storage: when the current stream wrote to tensors of its own."""
        self.pinned: dict[int, int] = {}
        self.copied_bytes = {"in": 0, "out": 0}
        self.device_bytes_max = 0
        """The most that ever was alive of what `empty` made."""
        self.early = 0
        """Copies that had run before anybody waited for them."""
        self._held: set[Copy] = set()
        """Whose sources stay until they have run, because their use was noted."""
        self._watch = Watch(self)

    # What infinity/device/streams.py asks for.

    def pin(self, slab: PinnedSlab) -> str | None:
        if self.refuses is None:
            self.pinned[slab.address] = slab.nbytes
        return self.refuses

    def unpin(self, slab: PinnedSlab) -> None:
        if self.pinned.pop(slab.address, None) is not None:
            self.check_host((slab.address, slab.address + slab.nbytes), "a slab is unregistered", write=True)

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self.compute

    def empty(self, numel: int, dtype: torch.dtype, stream: FakeStream) -> torch.Tensor:
        with self.unwatched():
            made = poisoned(torch.empty(numel, dtype=dtype))
        self.sweep()
        self.memory.append(Memory(made, stream, span_of(made)))
        alive = sum(each.tensor.nbytes for each in self.memory)
        self.device_bytes_max = max(self.device_bytes_max, alive)
        return made.view_as(made)

    def start_copy(self, into: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        merge(stream.clock, self.host)
        copy = Copy(into.detach(), source.detach(), stream, stream.tick())
        inward = self._memory_of(span_of(into)) is not None
        self.copied_bytes["in" if inward else "out"] += into.nbytes
        if inward:
            self.check_host(copy.reads, "a copy to the device reads", by=stream)
        else:
            self._check_made(source, stream)
            self.check_host(copy.writes, "a copy to the host writes", write=True, by=stream)
        for other in self.copies:
            if overlap(other.writes, copy.reads) and not other.known_by(stream.clock):
                raise Hazard(
                    f"{stream.name} copies bytes that {other.stream.name} still brings, without waiting for it"
                )
        with self.unwatched():
            poisoned(into)
        host = copy.reads if inward else copy.writes
        stream.queue.append(copy)
        self.copies.append(copy)
        if not any(at <= host[0] and host[1] <= at + nbytes for at, nbytes in self.pinned.items()):
            event = stream.record_event()  # pageable memory: the call returns when all is done
            event.synchronize()
        self.stir()

    def start_read(self, into: torch.Tensor, fill: Callable[[torch.Tensor], None], stream: FakeStream) -> Read:
        """A drive fills device memory, in its place in `stream`."""
        if self._memory_of(span_of(into)) is None:
            raise Hazard("a drive reads into memory that is not the device's")
        merge(stream.clock, self.host)
        read = Read(into.detach(), None, stream, stream.tick(), fill=fill)
        stream.queue.append(read)
        self.copies.append(read)
        self.stir()
        return read

    def note_use(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        memory = self._memory_of(span_of(tensor))
        if memory is not None:
            memory.noted.add(stream)
            return
        for copy in self.copies:  # of the current stream's own: the copy holds it, as the allocator would
            if copy.stream is stream and overlap(copy.reads, span_of(tensor)):  # or has run by now, at random
                self._held.add(copy)

    # What goes wrong.

    def stir(self) -> None:
        """At random, some of what is queued runs."""
        for stream in self.draws.sample(self.streams, len(self.streams)):
            while stream.queue and self.draws.random() < 0.2:
                self.early += isinstance(stream.queue[0], Copy)
                stream.run_one()
        self.copies = [copy for copy in self.copies if not (copy.ran and copy.known_by(self.host))]
        self._held.intersection_update(self.copies)

    def sweep(self) -> None:
        """Free memory without other owners: check for pending uses, then poison it."""
        for memory in list(self.memory):
            if torch._C._storage_Use_Count(memory.tensor.untyped_storage()._cdata) > 2:
                continue
            self.memory.remove(memory)
            unnoted = memory.used_by - memory.noted - {memory.owner}
            if unnoted:
                names = ", ".join(stream.name for stream in unnoted)
                raise Hazard(f"device memory was freed while {names} may use it: its owner may write to it again")
            for copy in self.copies:  # other memory may come to lie there
                if copy.ran and overlap(copy.writes, memory.span):
                    copy.writes = (0, 0)

    def check_unheld_sources(self) -> None:
        """A source of the current stream's own, which was not noted, must outlive its copy."""
        for copy in self.copies:
            if copy.source is None or copy in self._held or self._memory_of(copy.reads) is not None:
                continue
            if self._is_host(copy.reads):
                continue
            if torch._C._storage_Use_Count(copy.source.untyped_storage()._cdata) <= 2:
                raise Hazard("memory that a copy to the host reads was freed before the copy has run")

    def check_stream(self, span: tuple[int, int], what: str, *, write: bool) -> None:
        """The current stream touches device memory."""
        for copy in self.copies:
            late = not copy.known_by(self.compute.clock) and not copy.known_by(self.host)
            if late and overlap(copy.writes, span):
                raise Hazard(f"{what} before the copy that brings it was waited for")
            gone = copy.ran and copy in self._held  # and its memory reused, as the note allows
            if late and write and not gone and overlap(copy.reads, span):
                raise Hazard(f"{what} changes what is still being copied to the host")
        memory = self._memory_of(span)
        if memory is not None:
            memory.used_by.add(self.compute)

    def check_host(
        self, span: tuple[int, int], what: str, *, write: bool = False, by: FakeStream | None = None
    ) -> None:
        """The host touches its memory, or a stream does."""
        for copy in self.copies:
            if copy.known_by(self.host) or (by is not None and copy.known_by(by.clock)):
                continue
            if overlap(copy.writes, span):
                raise Hazard(f"{what} host memory before the copy into it has ended")
            if write and overlap(copy.reads, span):
                raise Hazard(f"{what} host memory before the copy out of it has ended")

    def touch(self, tensor: torch.Tensor, what: str, *, write: bool) -> None:
        span = span_of(tensor)
        if span[0] == span[1]:
            return
        if self._is_host(span):
            self.check_host(span, what, write=write)
        else:
            self.check_stream(span, what, write=write)

    def made(self, tensor: torch.Tensor) -> None:
        self.made_at[tensor.untyped_storage().data_ptr()] = self.compute.clock.get(self.compute, 0)

    def _check_made(self, source: torch.Tensor, stream: FakeStream) -> None:
        made_at = self.made_at.get(source.untyped_storage().data_ptr(), 0)
        if self._memory_of(span_of(source)) is None and stream.clock.get(self.compute, 0) < made_at:
            raise Hazard(f"{stream.name} copies what compute makes without waiting for it")

    def _memory_of(self, span: tuple[int, int]) -> Memory | None:
        return next((memory for memory in self.memory if overlap(memory.span, span)), None)

    def _is_host(self, span: tuple[int, int]) -> bool:
        return any(at <= span[0] < at + nbytes for at, nbytes in self.pinned.items())

    # Who watches.

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at everything that touches memory, until the end of the block; then all that is queued has run."""
        originals = Lease.give_back, HostBuffer.give_back, kernel.update
        start = IoEngine.start
        IoEngine.start = self._transferring(start)  # type: ignore[method-assign]
        Lease.give_back = self._guarded(Lease.give_back, _lease_span, "a lease of")  # type: ignore[method-assign]
        HostBuffer.give_back = self._guarded(HostBuffer.give_back, _buffer_span, "a buffer of")  # type: ignore[method-assign]
        kernel.update = self._looking(kernel.update)
        assert paged_adam.kernel is kernel
        try:
            with self._watch:
                yield
        finally:
            Lease.give_back, HostBuffer.give_back, kernel.update = originals  # type: ignore[method-assign]
            IoEngine.start = start  # type: ignore[method-assign]
        for stream in self.streams:
            while stream.queue:
                stream.run_one()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        before, self._watch.blind = self._watch.blind, True
        try:
            yield
        finally:
            self._watch.blind = before

    def _guarded(self, give_back: Any, span: Any, what: str) -> Any:
        def guarded(owner: Any) -> None:
            low, high = span(owner)
            self.check_host((low, high), f"{what} goes back:", write=True)
            if isinstance(owner, Lease):
                with self.unwatched():
                    poisoned(owner.view(torch.uint8))
            give_back(owner)

        return guarded

    def _transferring(self, start: Any) -> Any:
        def transferring(engine: Any, requests: Sequence[Request], **more: Any) -> Any:
            for each in requests:
                span = span_of(each.lease.view(torch.uint8, each.lease_offset, each.length))
                self.check_host(span, f"a {each.operation} of the drive uses", write=each.operation == "read")
            return start(engine, requests, **more)

        return transferring

    def _looking(self, update: Any) -> Any:
        def looking(*args: Any, **kwargs: Any) -> Any:
            for name, value in kwargs.items():
                values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
                for each in values:
                    tensor = getattr(each, "grad", each)
                    if isinstance(tensor, torch.Tensor):
                        self.check_host(span_of(tensor), f"the update ({name}) uses", write=name != "pieces")
            return update(*args, **kwargs)

        return looking


class LateRuntime(FakeRuntime):
    """Nothing runs before it must."""

    def stir(self) -> None:
        pass


class Watch(TorchDispatchMode):
    """Every operation of torch, with the memory that it reads and writes."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self.runtime = runtime
        self.blind = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, (DTensor, PagedTensor)) for each in types):
            return NotImplemented  # which says what it does in terms of plain tensors
        if self.blind or types or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        runtime = self.runtime
        runtime.compute.tick()
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
        views = func.is_view
        written = []
        for argument, value in given:
            write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_iter(value):
                if type(tensor) in _PLAIN and tensor.device.type == "cpu" and not views:
                    runtime.touch(tensor, f"{func} touches", write=write)
                    written += [tensor] if write else []
        runtime.check_unheld_sources()
        result = func(*args, **kwargs)
        for tensor in [*written, *([] if views else tree_iter(result))]:
            if type(tensor) in _PLAIN and tensor.device.type == "cpu":
                runtime.made(tensor)
        runtime.sweep()
        return result


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last of a tensor that is dense."""
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """All bits set: NaN in every floating dtype."""
    tensor.view(-1).view(torch.uint8).fill_(255)
    return tensor


def _lease_span(lease: Lease) -> tuple[int, int]:
    return span_of(lease.view(torch.uint8))


def _buffer_span(buffer: HostBuffer) -> tuple[int, int]:
    return span_of(buffer.tensor)
