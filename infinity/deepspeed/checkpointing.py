"""DeepSpeed's activation checkpointing: torch's non-reentrant checkpoint, which works with FSDP2."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

_configured = False


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`. The backward computes its activations again."""
    return _checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **settings: Any) -> None:
    """Accepted; settings such as `partition_activations` have no effect."""
    global _configured
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Accepted; there is nothing to release."""
