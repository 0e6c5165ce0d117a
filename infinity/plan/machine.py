"""A machine as numbers: ranks, memories, links, drives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.plan.lower_bound import DriveSpeed


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One or more equal nodes. Rates are in bytes per second.

    Attributes:
        name: for people.
        nodes: how many.
        ranks_per_node: GPUs of each; on a machine that computes on its CPU, processes.
        device_is_host: computing on the CPU.
        device_bytes: memory of one GPU; without meaning where `device_is_host`.
        flops_per_s: that one rank reaches while training (not its peak).
        device_bytes_per_s: memory bandwidth of one GPU.
        link_bytes_per_s: between host and one GPU, each way.
        host_bytes, host_bytes_per_s: memory of one node and its bandwidth.
        drive_bytes: capacity of one node's drives together, 0 for none or unknown.
        drive_free_bytes: the part of it that can be used; None for all.
        drive: the rates of one node's drives together.
        node_link_bytes_per_s: between GPUs of one node, one GPU's way out.
        network_bytes_per_s: one node's way out to the others.
        collective_seconds: of a collective, however small.
        group_seconds: of a use of a group, however small: launches, hooks, Python.
    """

    name: str
    nodes: int = 1
    ranks_per_node: int = 1
    device_is_host: bool = False
    device_bytes: int = 0
    flops_per_s: float
    device_bytes_per_s: float = math.inf
    link_bytes_per_s: float = math.inf
    host_bytes: int
    host_bytes_per_s: float
    drive_bytes: int = 0
    drive_free_bytes: int | None = None
    drive: DriveSpeed | None = None
    node_link_bytes_per_s: float = math.inf
    network_bytes_per_s: float = math.inf
    collective_seconds: float = 0.0
    group_seconds: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def gather_seconds(self, nbytes: float) -> float:
        """An all-gather to `nbytes`, or a reduce-scatter from it, over all ranks.

        Of what a rank must get, the part from its own node comes over the node's links, and that from other nodes once per
        node over the network; the slower of the two decides.
        """
        if self.ranks == 1:
            return 0.0
        in_node = nbytes * (self.ranks - 1) / self.ranks / self.node_link_bytes_per_s
        between_nodes = nbytes * (self.nodes - 1) / self.nodes / self.network_bytes_per_s
        return self.collective_seconds + max(in_node if self.ranks_per_node > 1 else 0.0, between_nodes)

    def drive_of_rank(self) -> DriveSpeed:
        """One rank's share. Raises BudgetError where there is no drive."""
        if self.drive is None:
            raise BudgetError(f"{self.name} has no drive: plan without NVMe, or say what its drives give")
        share, mixed = 1 / self.ranks_per_node, self.drive.mixed
        return DriveSpeed(
            self.drive.read_bytes_per_s * share,
            self.drive.write_bytes_per_s * share,
            None if mixed is None else (mixed[0] * share, mixed[1] * share),
        )

    def memory_bytes_per_s(self, *, of_host: bool) -> float:
        """The bandwidth that one rank has of the host's memory, or of the memory that it computes in."""
        of_host = of_host or self.device_is_host
        return self.host_bytes_per_s / self.ranks_per_node if of_host else self.device_bytes_per_s

    @property
    def drive_room_bytes(self) -> float:
        """What one node's drives can still hold; infinite where unknown."""
        return self.drive_free_bytes if self.drive_free_bytes is not None else self.drive_bytes or math.inf
