"""Memory of tensors whose bytes are in host memory meanwhile. Training thread only."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class SetAside:
    """From now until `put_back`, `tensors` have no memory. They, their views and all references to them stay as they are.

    Their bytes are in ordinary host memory. Nothing may read or write them meanwhile.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._held = [
            (storage, _bytes_of(storage).to("cpu", copy=True)) for storage in storages.values() if storage.nbytes()
        ]
        for storage, _ in self._held:  # only now, as host memory may not suffice for all
            storage.resize_(0)

    def put_back(self) -> None:
        """Give the tensors memory, with their bytes. Raises what the device raises if it has none."""
        while self._held:
            storage, host = self._held[-1]
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host)
            self._held.pop()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
