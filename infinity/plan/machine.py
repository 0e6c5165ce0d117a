"""A machine as numbers: ranks, memories, links, drives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinity.errors import BudgetError


@dataclass(frozen=True)
class DriveSpeed:
    """The drives' rates for one rank (bytes per second). mixed: rates of reads and of writes at the same time; None for
    drives that alternate."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed: tuple[float, float] | None = None

    def lower_bound_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return the least time for these bytes. If reading and writing at once is faster than alternating, it does so
        while both remain, and then moves the remainder alone."""
        seconds = 0.0
        reads, writes = self.mixed or (0.0, 0.0)
        if reads / self.read_bytes_per_s + writes / self.write_bytes_per_s > 1:  # faster than alternating
            seconds = min(read_bytes / reads, written_bytes / writes)
            read_bytes -= seconds * reads
            written_bytes -= seconds * writes
        return seconds + read_bytes / self.read_bytes_per_s + written_bytes / self.write_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One or more equal nodes. Rates are in bytes per second."""

    name: str
    nodes: int = 1
    ranks_per_node: int = 1
    device_is_host: bool = False
    """True if the CPU computes; `device_bytes` and its rate, of one GPU, are then unused."""
    device_bytes: int = 0
    flops_per_s: float
    """Operations per second that one rank reaches in training (not its peak)."""
    device_bytes_per_s: float = math.inf
    link_bytes_per_s: float = math.inf
    """Between host and one GPU, each way."""
    host_bytes: int
    host_bytes_per_s: float
    """Of one node, like all of `host` and `drive`."""
    drive_bytes: int = 0
    """0 for none or unknown."""
    drive_free_bytes: int | None = None
    """Usable part of it; None for all."""
    drive: DriveSpeed | None = None
    node_link_bytes_per_s: float = math.inf
    """Out of one GPU to the others of its node."""
    network_bytes_per_s: float = math.inf
    """Out of one node to the others."""
    collective_seconds: float = 0.0
    group_seconds: float = 0.0
    """Fixed cost of a use of a group: launches, hooks, Python."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def gather_seconds(self, nbytes: float, ranks: int | None = None, *, apart: int = 1) -> float:
        """Return the seconds of an all-gather to `nbytes`, or a reduce-scatter from it, over `ranks` (None: all), the
        next of which is `apart` ranks away; all ranks take part in one. Data from a rank's own node comes over the
        node's links, other data once per node and gather over the network; the slower decides."""
        ranks = ranks or self.ranks
        gathers_of_node = self.ranks_per_node // self._in_node(ranks, apart)
        return self._collective_seconds(nbytes, gathers_of_node * nbytes, ranks, apart)

    def exchange_seconds(self, nbytes: float, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds in which each of `ranks` sends `nbytes` in equal parts to all of them."""
        return self._collective_seconds(nbytes, self.ranks_per_node * nbytes, ranks, apart)

    def _in_node(self, ranks: int, apart: int) -> int:
        return max(1, min(ranks, self.ranks_per_node // apart))

    def _collective_seconds(self, nbytes: float, node_bytes: float, ranks: int, apart: int) -> float:
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self._in_node(ranks, apart))
        in_node = nbytes * (ranks - 1) / ranks / self.node_link_bytes_per_s
        between_nodes = node_bytes * (nodes - 1) / nodes / self.network_bytes_per_s
        return self.collective_seconds + max(in_node if nodes < ranks else 0.0, between_nodes)

    def drive_of_rank(self) -> DriveSpeed:
        """Return one rank's share of the drives. Raises BudgetError if there is no drive."""
        if self.drive is None:
            raise BudgetError(f"{self.name} has no drive: plan without NVMe, or give the rates of its drives")
        share, mixed = 1 / self.ranks_per_node, self.drive.mixed
        return DriveSpeed(
            self.drive.read_bytes_per_s * share,
            self.drive.write_bytes_per_s * share,
            None if mixed is None else (mixed[0] * share, mixed[1] * share),
        )

    def memory_bytes_per_s(self, *, of_host: bool) -> float:
        of_host = of_host or self.device_is_host
        return self.host_bytes_per_s / self.ranks_per_node if of_host else self.device_bytes_per_s

    @property
    def drive_room_bytes(self) -> float:
        """Bytes that one node's drives can still hold; infinite if unknown."""
        return self.drive_free_bytes if self.drive_free_bytes is not None else self.drive_bytes or math.inf
