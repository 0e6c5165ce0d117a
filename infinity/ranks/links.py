"""The connections between the ranks' processes: what operations of gloo travel on, and what ends them when it ends.

[Note: What is a link]
gloo has no way to end an operation that waits for a rank which won't come, but it ends by itself, with an error, when the
connection to that rank ends. Which of a process's sockets are gloo's it doesn't say either. So all ranks tell each other, once,
both ends of every TCP connection that they have: one of which another rank has the other half is between ranks. The store's
connections are left out, as the ranks tell each other there why they end.
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
"""Address and port."""
_MAPPED = "::ffff:"


@dataclass(frozen=True)
class PeerLink:
    """A connection of this process, by its descriptor, to another rank's."""

    descriptor: int
    here: End
    there: End

    def cut(self) -> None:
        """End it, at both ends. Nothing happens where it has ended already, whatever has its number now."""
        with _connection(self.descriptor) as connection:
            if connection is not None and _ends_of(connection) == (self.here, self.there):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def find_links(store: dist.Store) -> list[PeerLink]:
    """This rank's links to all others, as far as they are connected now. A collective."""
    links = [link for link in _connections() if _port_of(store) not in (link.here[1], link.there[1])]
    ours = {(link.here, link.there) for link in links}
    others = set().union(*(ends for rank, ends in enumerate(from_all_ranks(ours)) if rank != dist.get_rank()))
    return [link for link in links if (link.there, link.here) in others]


def _port_of(store: dist.Store) -> int:
    """Where a store is served by TCP; 0 for another."""
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
    """The socket of that number, under another one; None where there is none."""
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
    """Of a TCP connection; None for any other socket."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:  # it listens
        return None
    return (here[0].removeprefix(_MAPPED), here[1]), (there[0].removeprefix(_MAPPED), there[1])
