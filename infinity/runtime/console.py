"""Where the words of the logger named infinity go as long as the script has not set up logging itself."""

from __future__ import annotations

import logging

import torch.distributed as dist

log = logging.getLogger("infinity")


class _UntilConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr while the root logger has no handler; one that is set up later says everything by itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers and bool(super().filter(record))


def show_words() -> None:
    """Progress and notes of rank 0, and warnings of all, on stderr: scripts for DeepSpeed expect to see such lines.

    Nothing changes where the logger has a level or handlers of its own, or the root logger has some.
    """
    if log.level != logging.NOTSET or log.hasHandlers():
        return
    handler = _UntilConfigured()
    handler.setFormatter(logging.Formatter("infinity: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
