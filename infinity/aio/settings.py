"""Floor 3. How storage is driven: one value, passed whole to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.units import MIB


@dataclass(frozen=True)
class IoSettings:
    """How an engine drives storage. The engine checks the values; some depend on the machine.

    Attributes:
        backend: "auto", "io_uring", "linux_aio" or "threads".
        block_bytes: bytes per submission.
        queue_depth: submissions in flight per ring.
        rings: ring threads per drive.
        mix: how waiting reads and writes share a drive: "interleaved", or "bursts" of one, then the other.
        iopoll, sqpoll: io_uring polls for completions (the drive needs poll queues), for submissions (burns a core).
    """

    backend: str = "auto"
    block_bytes: int = MIB
    queue_depth: int = 32
    rings: int = 1
    mix: str = "interleaved"
    iopoll: bool = False
    sqpoll: bool = False

    @property
    def in_flight_bytes(self) -> int:
        """Bytes in flight at one drive."""
        return self.block_bytes * self.queue_depth * self.rings
