"""Shows the log of the logger named infinity until the script sets up logging itself."""

from __future__ import annotations

import logging

import torch.distributed as dist

log = logging.getLogger("infinity")


class _UntilConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr while the root logger has no handler; a later one writes everything itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers and bool(super().filter(record))


def show_log() -> None:
    """Show progress and notes of rank 0, and warnings of all ranks, on stderr, as scripts for DeepSpeed expect. Does nothing
    if the logger has a level, or if it or the root logger has handlers."""
    if log.level != logging.NOTSET or log.hasHandlers():
        return
    handler = _UntilConfigured()
    handler.setFormatter(logging.Formatter("infinity: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
