"""The paged group: the compute parameters that FSDP2 gathers together, and how far they are on their way to it.

[Note: Two pieces]
What FSDP2 gets of a group goes to the device in at most two pieces: the compute parameters that the group's chunk fetches (or
the host cache holds), and those that stay in host memory because they are small. Each piece is a `Delivery` of its own, because
the small ones need no lease, and change where they rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from infinity.device import CopyEvent, Device, InFlightCopy
from infinity.schedule.scheme import UpdateTiming
from infinity.swap.chunk import Chunk, ChunkState, Span
from infinity.swap.stager import Stager
from infinity.swap.sub_group import PagedSubGroup


@dataclass(eq=False)
class Delivery:
    """Compute parameters of `count` shards that go to the device in one piece, and are given out shard by shard.

    In the order of events: `start`ed, ahead of the gather or in it; they may be `let_go` of until they `arrive`; `give`n out;
    all given (`is_given`), when their memory on the device is FSDP2's; reported to be copied, one by one or all at once. The
    next gather's may be started before that.

    leased: whether they take a lease, which is in use until FSDP2 says that it copied what it was given. stays: whether they
    stay on the device for every gather until they change; else their memory there is FSDP2's. copy_event: fires when the
    device has read them from host memory, so that they may change there; it outlives the in-flight copy.
    """

    count: int = 0
    leased: bool = True
    stays: bool = False
    in_flight: InFlightCopy | None = field(default=None, repr=False)
    copy_event: CopyEvent | None = None
    given: set[int] = field(default_factory=set)
    """Numbers of the shards that FSDP2 was given and has not reported gathered."""
    _piece: torch.Tensor | None = field(default=None, repr=False)
    """The bytes of all of them (1-D), on the device, until all are given."""

    @property
    def is_given(self) -> bool:
        """Whether FSDP2 has all of the shards, and has not reported each."""
        return bool(self.given) and self._piece is None

    def start(self, in_flight: InFlightCopy) -> None:
        """They are on their way to the device."""
        self.in_flight, self.copy_event = in_flight, in_flight.copy_event

    def arrive(self) -> None:
        """They are on the device for all that its current stream does next: `give` them. After an exception they have to be
        started again."""
        assert self.in_flight is not None
        try:
            self._piece = self.in_flight.on_device()
        except BaseException:
            self.in_flight = None
            raise

    def give_more(self, shard: int) -> torch.Tensor | None:
        """As `give`, where others of this delivery were given; else None."""
        return self.give(shard) if self.given and self._piece is not None and shard not in self.given else None

    def give(self, shard: int) -> torch.Tensor:
        """The bytes (1-D), on the device, among which is what FSDP2 gets of a shard. FSDP2 does not change them."""
        piece = self._piece
        assert piece is not None
        self.given.add(shard)
        if len(self.given) == self.count:
            self._piece = None
            self.let_go()
            if not self.leased:
                self.given.clear()
        return piece

    def let_go(self) -> None:
        """Forget the copy on the device, unless it stays: the next gather starts another one."""
        if not self.stays:
            self.in_flight = None

    def end(self) -> None:
        """The gather is over: FSDP2 has copied what it was given."""
        self.given.clear()
        self._piece = None
        self.let_go()

    def forget(self) -> None:
        """As `end`; and what is on the device is stale."""
        self.end()
        self.in_flight = None

    def wait_copied(self) -> None:
        """They are about to change in host memory: wait until the device has read what it was told to."""
        if self.copy_event is not None:
            self.copy_event.wait()
            self.copy_event = None


@dataclass(frozen=True)
class ForeignReads:
    """What a group reads of files of the user, in so many bytes behind its flat space. `fills`: what of them is in host memory
    already (first byte in the lease, bytes)."""

    nbytes: int = 0
    reads: tuple[Span, ...] = ()
    fills: tuple[tuple[int, torch.Tensor], ...] = ()


@dataclass(eq=False)
class PagedGroup:
    """The shards that FSDP2 gathers together.

    `chunk` fetches the compute parameters of all that don't stay in host memory; where these are cached there is no chunk, and
    `cached` holds them (1-D, the group's flat space). `resident` are those that stay in host memory (1-D, one behind the
    other).
    """

    index: int
    name: str
    timing: UpdateTiming = UpdateTiming.STEP
    """When its members are updated."""
    module: weakref.ref[nn.Module] | None = field(default=None, repr=False)
    """The module that FSDP2 gathers it for, once the model is paged."""
    is_routed: bool = False
    """Whether it is a frozen expert, of which nobody knows when it comes: see [Note: Routed experts] in fsdp2/experts.py."""
    shards: range = range(0)
    """Numbers of its shards."""
    members: list[PagedSubGroup] = field(default_factory=list, repr=False)
    """The sub-groups of its flat space."""
    resident_sub_groups: list[PagedSubGroup] = field(default_factory=list, repr=False)
    """Those that hold shards of it which stay resident, and perhaps shards of other groups."""
    chunk: Chunk | None = None
    foreign: ForeignReads = field(default_factory=ForeignReads, repr=False)
    stays: bool = False
    """Whether its chunk stays staged from step to step, in a lease of its own."""
    may_gather_in_place: bool = False
    """Whether it may be gathered where it is staged: see [Note: Gathered where it is staged] in shard.py."""
    cached: torch.Tensor | None = field(default=None, repr=False)
    resident: torch.Tensor | None = field(default=None, repr=False)
    delivery: Delivery = field(default_factory=Delivery)
    """Of what the chunk fetches, or the cache holds."""
    resident_delivery: Delivery = field(default_factory=lambda: Delivery(leased=False))

    @cached_property
    def is_frozen(self) -> bool:
        """Whether a step changes nothing of what its chunk fetches."""
        return not any(sub.layout.trained for sub in self.members)

    @cached_property
    def unit(self) -> Chunk | PagedGroup:
        """What a look-ahead has for its compute parameters."""
        return self.chunk or self

    @cached_property
    def masters_chunk(self) -> Chunk | None:
        """What holds compute parameters that are a part of its masters, which an update in the backward takes from there."""
        return self.chunk if any(sub.gathers_from_nvme and sub.layout.split for sub in self.members) else None

    @property
    def chunk_to_update(self) -> Chunk | None:
        """What an update in the backward puts new compute parameters into: what completes its masters, or what is staged for
        good."""
        if self.chunk is not None and self.stays and self.chunk.state is ChunkState.STAGED and not self.chunk.early:
            return self.chunk
        return self.masters_chunk

    @property
    def sharded_module(self) -> FSDPModule | None:
        """The module that FSDP2 gathers it for; None before the model is paged, or once it is gone."""
        return cast("FSDPModule | None", self.module()) if self.module is not None else None

    @property
    def fetched_bytes(self) -> int:
        """What its chunk fetches or the cache holds."""
        return self.cached.nbytes if self.cached is not None else self.chunk.lease_bytes if self.chunk else 0

    @property
    def resident_bytes(self) -> int:
        """What stays in host memory."""
        return self.resident.nbytes if self.resident is not None else 0

    @property
    def compute_bytes(self) -> int:
        """What its compute parameters take on the device."""
        return self.fetched_bytes + self.resident_bytes

    @property
    def in_use(self) -> bool:
        """Whether the lease of its chunk is in use."""
        return self.chunk is not None and self.chunk.state is ChunkState.IN_USE

    def start_h2d(self, device: Device) -> None:
        """Begin to copy what its chunk holds, which is in use, or the cache, to the device."""
        source = self.cached
        if source is None:
            assert self.chunk is not None and self.chunk.lease is not None
            source = self.chunk.lease.view(torch.uint8)
        self.delivery.start(device.start_h2d(source.view(torch.uint8)))

    def start_resident_h2d(self, device: Device) -> None:
        """Begin to copy what stays in host memory to the device."""
        assert self.resident is not None
        self.resident_delivery.start(device.start_h2d(self.resident.view(torch.uint8)))

    def point(self, pending: Container[PagedSubGroup]) -> None:
        """From now on, staging the chunk fetches what is gathered of the members but for those `pending`, which their updates
        put there: all of it, unless they take the old ones from there."""
        if self.chunk is None:
            return
        reads, fills = [*self.foreign.reads], [*self.foreign.fills]
        for sub in self.members:
            location = sub.locations[sub.layout.gathered]
            start = sub.layout.gathered_start
            if location.tensor is not None:
                fills.append((start, location.tensor))
            elif sub not in pending or (self.stays and sub.layout.split):
                reads.append(Span(sub.extent.offset + location.offset, start, location.nbytes))
        self.chunk.reads, self.chunk.fills = tuple(reads), tuple(fills)

    def forget(self, stager: Stager) -> None:
        """Drop the staged compute parameters, which are about to be stale, whoever was to gather them. Cached ones are about to
        change: the device has copied them after this.

        FSDP2 may fetch a group ahead and then not use it: what it fetched is copied by then, and never reported gathered.
        """
        self.delivery.forget()
        if self.cached is not None:
            self.delivery.wait_copied()
        self.delivery.copy_event = None
        if self.chunk is None:
            return
        if self.in_use:
            stager.release(self.chunk, keep=False)
        stager.drop(self.chunk)

    def end_gather(self, stager: Stager) -> None:
        """Nobody gathers them any more; what is staged stays."""
        if self.in_use:
            assert self.chunk is not None
            stager.release(self.chunk, keep=True, copy_event=self.delivery.copy_event)
        self.delivery.end()

    def forget_resident(self) -> None:
        """What stays in host memory is about to change: what the device was given is stale, and it has copied it after this."""
        self.resident_delivery.forget()
        self.resident_delivery.wait_copied()

    def recover(self) -> None:
        """An exception ended a pass: nothing is gathered or on its way, and the device reads nothing of it."""
        self.delivery.forget()
        self.delivery.wait_copied()
        self.forget_resident()


def group_chunk(group: PagedGroup, nbytes: int) -> Chunk | None:
    """What fetches the compute parameters of a group, so many bytes; None where there are none or they are cached."""
    if nbytes == 0 or group.cached is not None:
        return None
    return Chunk(f"group {group.name}", nbytes, (), (), after=tuple(sub.chunk for sub in group.members))
