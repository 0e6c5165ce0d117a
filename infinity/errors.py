"""Every error infinity raises on purpose: each says what failed, where, and the next move."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_LINE_MAX = 400

IN_CHILD = (
    "this process was forked (a data loader's worker, say) from the one whose pinned memory holds the model, and has none of "
    "that memory: compute with the model in the parent (num_workers=0), or give the child plain copies of what it needs"
)
"""Where a forked child would use pinned memory, or what is read through it."""


def in_words(error: BaseException) -> str:
    """What it says, or what it is where it says nothing, as KeyboardInterrupt does."""
    return str(error) or type(error).__name__


class InfinityError(Exception):
    """Base of all errors raised on purpose by infinity."""


class ConfigError(InfinityError, ValueError):
    """The training config holds an unknown key, a value out of range, or a combination that can't work."""


class BudgetError(InfinityError, MemoryError):
    """A memory budget can't hold what must be in it at once; the message names the number that would do."""


class StoreError(InfinityError, OSError):
    """The place where bytes rest can't be used: missing, not writable, too small."""

    def __str__(self) -> str:
        return str(self.strerror)


class CheckpointError(InfinityError, RuntimeError):
    """A checkpoint can't be written, or doesn't belong to this model."""


class IoError(InfinityError, OSError):
    """One transfer failed.

    Attributes: `errno` and `strerror` as in OSError; `operation` ("read" or "write"), `path`, `offset` and `length`
    (bytes) of the transfer, and `backend` that ran it.
    """

    def __init__(
        self,
        message: str,
        errno: int = 0,
        operation: str = "",
        path: str = "",
        offset: int = 0,
        length: int = 0,
        backend: str = "",
    ) -> None:
        super().__init__(errno, message)
        self.operation = operation
        self.path = path
        self.offset = offset
        self.length = length
        self.backend = backend

    def __str__(self) -> str:
        return str(self.strerror)

    def concerning(self, name: str) -> None:
        """From now on the message begins with the `name` of what was moved, in the words of a floor above."""
        self.strerror = f"{name}: {self.strerror}"
        self.args = (self.errno, self.strerror)


class IntegrityError(IoError):
    """A read found something else on the drive than was written there; `errno` is EBADMSG. Nobody uses the bytes.

    Attributes: those of IoError, and `page_offset`, where in the file the first wrong page of 4 KiB begins (bytes). Of what is
    read out of an arena, too: `extent_offset` and `extent_bytes`, the extent that the page lies in, and `generation`, how often
    this process had written to it, 0 where it must hold what an earlier process has committed. -1: not known.
    """

    page_offset = -1
    extent_offset = -1
    extent_bytes = -1
    generation = -1

    def in_extent(self, name: str, offset: int, nbytes: int, generation: int) -> None:
        """As `concerning`, of what lies in an extent of an arena (bytes) in this generation."""
        self.extent_offset, self.extent_bytes, self.generation = offset, nbytes, generation
        self.concerning(
            f"{name}, generation {generation} of the extent of {nbytes} bytes at offset {offset} of the arena"
        )


def printable(text: str) -> str:
    """What others wrote, as one line that a terminal only shows."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_LINE_MAX])
    return line if len(text) <= _LINE_MAX else f"{line}..."


@contextlib.contextmanager
def parsing(problem: str, advice: str) -> Iterator[None]:
    """Around looking into what others wrote, which may raise anything: it becomes a CheckpointError of one line.

    Our own errors stay as they are.

    problem: the file and what is the matter with it, such as "FILE is damaged". advice: what to do.
    """
    try:
        yield
    except InfinityError:
        raise
    except Exception as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else in_words(error)
        raise CheckpointError(f"{problem} ({printable(why)}): {advice}") from None
