"""DeepSpeed's `accelerator`: the device that computes, under the names of DeepSpeed's abstraction of it."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["get_accelerator"]


class Accelerator:
    """CUDA, or the CPU if there is none. Other names are looked up in `torch.cuda` or `torch.cpu`, then in `torch`."""

    def __init__(self) -> None:
        self._module: Any = torch.cuda if torch.cuda.is_available() else torch.cpu

    def __getattr__(self, name: str) -> Any:
        if name in _MEMORY and self._module is torch.cpu:  # of a device that has none of its own
            return lambda *_: 0
        return getattr(self._module if hasattr(self._module, name) else torch, name)

    def device_name(self, device_index: int | None = None) -> str:
        kind = "cpu" if self._module is torch.cpu else "cuda"
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self._module.current_device())

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        return "gloo" if self._module is torch.cpu else "nccl"

    def is_synchronized_device(self) -> bool:
        return self._module is torch.cpu

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    is_fp16_supported = is_bf16_supported

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_name()

    def empty_cache(self) -> None:
        if self._module is torch.cuda:
            torch.cuda.empty_cache()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._module is torch.cpu else tensor.pin_memory()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


_MEMORY = frozenset(
    ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats")
)


@functools.cache
def get_accelerator() -> Accelerator:
    """The one of this process."""
    return Accelerator()
