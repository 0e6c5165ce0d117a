"""Floor 14. Activation checkpointing under DeepSpeed's names, by torch's non-reentrant checkpoint, which FSDP2 works with."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

_configured = False


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are computed again in backward instead of kept."""
    return _checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **settings: Any) -> None:
    """Accepted: `partition_activations` and the like mean nothing here."""
    global _configured
    _configured = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured


def reset() -> None:
    """Accepted: there is nothing to give back."""
