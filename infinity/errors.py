"""All errors that infinity raises on purpose: each says what failed, on what, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_LINE_MAX = 400

IN_CHILD = (
    "this process was forked (as a data loader's worker is) from the process whose pinned memory holds the model, and "
    "can't use that memory: run the model in the parent process (num_workers=0), or pass plain copies to the child"
)
"""Message for a forked child that would use pinned memory, or bytes read through it."""


def in_words(error: BaseException) -> str:
    """Return the error's message, or its class name if it has none, as KeyboardInterrupt."""
    return str(error) or type(error).__name__


class InfinityError(Exception):
    """Base class of all errors that infinity raises on purpose."""


class ConfigError(InfinityError, ValueError):
    """The training config has an unknown key, a value out of range, or an impossible combination."""


class BudgetError(InfinityError, MemoryError):
    """A memory budget is too small for all that must be in it at once; the message names a sufficient number."""


class StoreError(InfinityError, OSError):
    """A place for stored bytes cannot be used: missing, not writable, or too small."""

    def __str__(self) -> str:
        return str(self.strerror)


class CheckpointError(InfinityError, RuntimeError):
    """A checkpoint cannot be written, or does not belong to this model."""


class IoError(InfinityError, OSError):
    """A transfer failed.

    Attributes: those of OSError; `operation` ("read" or "write"), `path`, `offset`, `length` (bytes) and `backend`.
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
        """Prefix the message with `name`, the caller's name of the bytes."""
        self.strerror = f"{name}: {self.strerror}"
        self.args = (self.errno, self.strerror)


class IntegrityError(IoError):
    """A read found other bytes than were written; `errno` is EBADMSG. The bytes are not used.

    Attributes: those of IoError; `page_offset`, the offset in the file (bytes) of the first wrong 4 KiB page. For bytes
    of an arena also: `extent_offset` and `extent_bytes`, the page's extent; `generation`, the number of writes of this
    process to it, 0 if it holds a commit of an earlier process. Unknown values are -1.
    """

    page_offset = -1
    extent_offset = -1
    extent_bytes = -1
    generation = -1

    def in_extent(self, name: str, offset: int, nbytes: int, generation: int) -> None:
        """As `concerning`, for bytes in an extent of an arena (bytes) in this generation."""
        self.extent_offset, self.extent_bytes, self.generation = offset, nbytes, generation
        self.concerning(
            f"{name}, generation {generation} of the extent of {nbytes} bytes at offset {offset} of the arena"
        )


def printable(text: str) -> str:
    """Return untrusted text as one line that is safe to show on a terminal."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_LINE_MAX])
    return line if len(text) <= _LINE_MAX else f"{line}..."


@contextlib.contextmanager
def parsing(problem: str, advice: str) -> Iterator[None]:
    """Raise any error of the block as a CheckpointError of one line; for parsing untrusted files.

    InfinityErrors stay as they are.

    problem: the file and its problem, such as "FILE is damaged". advice: what to do.
    """
    try:
        yield
    except InfinityError:
        raise
    except Exception as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else in_words(error)
        raise CheckpointError(f"{problem} ({printable(why)}): {advice}") from None
