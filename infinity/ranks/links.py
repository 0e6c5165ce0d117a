"""The connections between the ranks' processes: gloo's operations use them, and end when they are cut.

[Note: What is a link]
gloo cannot cancel an operation that waits for a rank that will not come, but the operation fails when the connection to
that rank ends. gloo does not say which sockets it uses either. So all ranks once exchange both ends of all their TCP
connections. A connection whose other end belongs to another rank is a link. Connections of the store are excluded,
because ranks use the store to report why they end.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from infinity.ranks.all_ranks import from_all_ranks

End = tuple[str, int]
"""Address and port of one end of a connection."""
_MAPPED = "::ffff:"


@dataclass(frozen=True)
class PeerLink:
    """A connection of this process (by its descriptor) to another rank's process."""

    descriptor: int
    here: End
    there: End

    def cut(self) -> None:
        """Shut it down at both ends. Does nothing if it has ended, even if its descriptor was reused."""
        with _connection(self.descriptor) as connection:
            if connection is not None and _ends_of(connection) == (self.here, self.there):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def find_links(store: dist.Store) -> list[PeerLink]:
    """Return this rank's current links to all other ranks. A collective."""
    links = [link for link in _connections() if _port_of(store) not in (link.here[1], link.there[1])]
    ours = {(link.here, link.there) for link in links}
    others = set().union(*(ends for rank, ends in enumerate(from_all_ranks(ours)) if rank != dist.get_rank()))
    return [link for link in links if (link.there, link.here) in others]


def _port_of(store: dist.Store) -> int:
    """Return the port of a store that is served by TCP, else 0."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else 0


def _connections() -> Iterator[PeerLink]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with _connection(int(descriptor.name)) as connection:
            if connection is not None and (ends := _ends_of(connection)) is not None:
                yield PeerLink(int(descriptor.name), *ends)


@contextlib.contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield the socket of a descriptor, as a duplicate; None if it is no socket."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        opened = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        yield None
        return
    with opened:
        yield opened


def _ends_of(connection: socket.socket) -> tuple[End, End] | None:
    """Return both ends of a TCP connection; None for any other socket."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:  # a listening socket
        return None
    return (here[0].removeprefix(_MAPPED), here[1]), (there[0].removeprefix(_MAPPED), there[1])
