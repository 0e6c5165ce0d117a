"""Floor 3. How storage is driven, in one value that is handed down from whoever decides it to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.units import MIB


@dataclass(frozen=True)
class IoSettings:
    """How an engine drives storage. The engine checks the values, of which some can only be judged where it runs.

    Attributes:
        backend: "auto", "io_uring", "linux_aio" or "threads".
        block_bytes: bytes per submission.
        queue_depth: submissions in flight per ring.
        rings: ring threads per drive.
        mix: how reads and writes that wait for one drive share it: "interleaved", or "bursts" of one, then the other.
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
        """Bytes that a drive is given to work on at one time."""
        return self.block_bytes * self.queue_depth * self.rings
