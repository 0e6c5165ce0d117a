"""DeepSpeed's `accelerator`: the device that computes, under the names of DeepSpeed's abstraction of it."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

__all__ = ["get_accelerator"]


class Accelerator:
    """CUDA, or the CPU if there is none. Other names are looked up in `torch.cuda` or `torch.cpu`, then in `torch`."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._module: Any = getattr(torch, self._name)

    def __getattr__(self, name: str) -> Any:
        if self._name == "cpu" and ("memory_" in name or name == "empty_cache"):  # of a device that has none of its own
            return lambda *_: 0
        return getattr(self._module if hasattr(self._module, name) else torch, name)

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self._module.current_device())

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        return "gloo" if self._name == "cpu" else "nccl"

    def is_bf16_supported(self) -> bool:
        return True

    is_fp16_supported = is_bf16_supported

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device; on the CPU, of host memory."""
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(torch.cuda.get_device_properties(device_index).total_memory)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the one of this process."""
    return Accelerator()
