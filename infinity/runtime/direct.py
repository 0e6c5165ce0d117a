"""Floor 5. Transfers between drives and the GPU without host memory between them (`aio.use_gds`): why there are none.

What would do them, NVIDIA's GPUDirect Storage through kvikio, is looked for; a backend for it is not written, as there was no
machine to test it on. So this says what is missing first, and everything goes through the pinned pool.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia-fs/version")


def why_not_direct() -> str:
    """The first thing that keeps transfers from going to the GPU directly, in words."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    if not _DRIVER.exists():
        return f"the kernel module nvidia-fs is not loaded ({_DRIVER} is missing): kvikio would use host memory, too"
    return "kvikio and nvidia-fs are here, but infinity has no backend that goes through them yet"
