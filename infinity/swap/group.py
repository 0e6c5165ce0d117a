"""The paged group: the compute parameters that FSDP2 gathers together, and their progress towards the gather.

[Note: Two pieces]
A group's compute parameters go to the device in at most two pieces: those that its chunk fetches (or the host cache
holds), and those that stay in host memory because they are small. Each piece is a `Delivery` of its own, because the
small ones need no lease and are changed in place.
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
from infinity.swap.stager import Chunk, ChunkState, Span, Stager
from infinity.swap.sub_group import PagedSubGroup


@dataclass(eq=False)
class Delivery:
    """Compute parameters of a group that go to the device in one piece.

    The events in order: `start`, ahead of the gather or in it; `on_device`, for each shard that FSDP2 asks for; `end`,
    once FSDP2 has copied them all.

    stays: True if they stay on the device until they change. copy_event: fires when the device has read them, after
    which they may change in host memory; it outlives the in-flight copy.
    """

    stays: bool = False
    in_flight: InFlightCopy | None = field(default=None, repr=False)
    copy_event: CopyEvent | None = None

    def start(self, in_flight: InFlightCopy) -> None:
        """Record a copy to the device that has started."""
        self.in_flight, self.copy_event = in_flight, in_flight.copy_event

    def on_device(self) -> torch.Tensor:
        """Return the bytes on the device (1-D, read-only), for work that the current stream starts from now on."""
        assert self.in_flight is not None
        return self.in_flight.on_device()

    def end(self) -> None:
        """Drop the copy on the device unless it stays; the next gather starts another one."""
        if not self.stays:
            self.in_flight = None

    def forget(self) -> None:
        """Drop the device's bytes, which are stale."""
        self.in_flight = None

    def wait_copied(self) -> None:
        """Wait until the device has read the bytes, before they change in host memory."""
        if self.copy_event is not None:
            self.copy_event.wait()
            self.copy_event = None


@dataclass(frozen=True)
class ForeignReads:
    """The reads of a group in foreign files, `nbytes` behind its flat space in the lease. `fills`: the parts that are
    in host memory already (first byte in the lease, bytes)."""

    nbytes: int = 0
    reads: tuple[Span, ...] = ()
    fills: tuple[tuple[int, torch.Tensor], ...] = ()


@dataclass(eq=False)
class PagedGroup:
    """The shards that FSDP2 gathers together.

    `chunk` fetches all compute parameters that don't stay in host memory. If these are cached, there is no chunk, and
    `cached` holds them (1-D, the group's flat space). `resident` holds those in host memory (1-D, one after another).
    """

    index: int
    name: str
    timing: UpdateTiming = UpdateTiming.STEP
    """The time at which its members are updated."""
    module: weakref.ref[nn.Module] | None = field(default=None, repr=False)
    """The module of its FSDP2 group, once the model is paged."""
    is_routed: bool = False
    """True for frozen experts, whose next use cannot be predicted: see [Note: Routed experts] in fsdp2/experts.py."""
    shards: range = range(0)
    """The numbers of its shards."""
    members: list[PagedSubGroup] = field(default_factory=list, repr=False)
    """The sub-groups of its flat space."""
    resident_sub_groups: list[PagedSubGroup] = field(default_factory=list, repr=False)
    """The sub-groups that hold its resident shards, possibly with shards of other groups."""
    chunk: Chunk | None = None
    foreign: ForeignReads = field(default_factory=ForeignReads, repr=False)
    stays: bool = False
    """True if its chunk stays staged from step to step, in a lease of its own."""
    may_gather_in_place: bool = False
    """True if it may be gathered in its lease: see [Note: Gathered where it is staged] in shard.py."""
    cached: torch.Tensor | None = field(default=None, repr=False)
    resident: torch.Tensor | None = field(default=None, repr=False)
    delivery: Delivery = field(default_factory=Delivery)
    """The delivery of the chunk's or the cache's compute parameters."""
    resident_delivery: Delivery = field(default_factory=Delivery)

    @cached_property
    def is_frozen(self) -> bool:
        """True if a step changes nothing that its chunk fetches."""
        return not any(sub.layout.trained for sub in self.members)

    @cached_property
    def unit(self) -> Chunk | PagedGroup:
        """The look-ahead's unit for its compute parameters."""
        return self.chunk or self

    @cached_property
    def masters_chunk(self) -> Chunk | None:
        """The chunk, if it holds compute parameters that complete masters; updates in the backward read them there."""
        return self.chunk if any(sub.gathers_from_nvme and sub.layout.split for sub in self.members) else None

    @property
    def chunk_to_update(self) -> Chunk | None:
        """The chunk that an update in the backward puts new compute parameters into: `masters_chunk` or one that
        stays."""
        if self.chunk is not None and self.stays and self.chunk.state is ChunkState.STAGED and not self.chunk.early:
            return self.chunk
        return self.masters_chunk

    @property
    def sharded_module(self) -> FSDPModule | None:
        """The module of its FSDP2 group; None before the model is paged, or once the module is gone."""
        return cast("FSDPModule | None", self.module()) if self.module is not None else None

    @property
    def fetched_bytes(self) -> int:
        """Bytes that its chunk fetches or the cache holds."""
        return self.cached.nbytes if self.cached is not None else self.chunk.lease_bytes if self.chunk else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay in host memory."""
        return self.resident.nbytes if self.resident is not None else 0

    @property
    def compute_bytes(self) -> int:
        """Bytes of its compute parameters on the device."""
        return self.fetched_bytes + self.resident_bytes

    @property
    def in_use(self) -> bool:
        """True if the lease of its chunk is in use."""
        return self.chunk is not None and self.chunk.state is ChunkState.IN_USE

    def start_h2d(self, device: Device) -> int:
        """Start to copy the compute parameters to the device, unless they are there or on their way. The chunk is in use
        if they are not. Returns the number of copies."""
        started = 0
        if self.fetched_bytes and self.delivery.in_flight is None:
            source = self.cached
            if source is None:
                assert self.chunk is not None and self.chunk.lease is not None
                source = self.chunk.lease.view(torch.uint8)
            self.delivery.start(device.start_h2d(source.view(torch.uint8)))
            started += 1
        if self.resident is not None and self.resident_delivery.in_flight is None:
            self.resident_delivery.start(device.start_h2d(self.resident.view(torch.uint8)))
            started += 1
        return started

    def point(self, pending: Container[PagedSubGroup]) -> None:
        """Set what staging the chunk reads: the gathered field of all members except `pending`, whose updates put it
        into the lease. A pending member that takes its old compute parameters from the lease is read too."""
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
        """Drop the staged compute parameters, which are about to be stale, even if an exception interrupted a gather.

        Cached ones are about to change in place, so this waits until the device has copied them.
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

    def return_lease(self, stager: Stager) -> None:
        """End the use of its lease, if it is in use; what is staged stays staged."""
        if self.in_use:
            assert self.chunk is not None
            stager.release(self.chunk, keep=True, copy_event=self.delivery.copy_event)

    def end_use(self, stager: Stager) -> None:
        """Return its lease, and drop the copy on the device unless it stays."""
        self.return_lease(stager)
        self.delivery.end()

    def forget_resident(self) -> None:
        """Drop the device's copy of the resident compute parameters, which are about to change, once it is complete."""
        self.resident_delivery.forget()
        self.resident_delivery.wait_copied()

    def recover(self) -> None:
        """Recover from an exception: nothing is gathered or in flight, and the device reads nothing of the group."""
        self.delivery.forget()
        self.delivery.wait_copied()
        self.forget_resident()


def group_chunk(group: PagedGroup, nbytes: int) -> Chunk | None:
    """Return the chunk of `nbytes` that fetches a group's compute parameters; None if all are cached or resident."""
    if nbytes == 0 or group.cached is not None:
        return None
    return Chunk(f"group {group.name}", nbytes, (), (), after=tuple(sub.chunk for sub in group.members))
