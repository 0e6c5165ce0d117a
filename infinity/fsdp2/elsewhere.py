"""Base class of tensors whose elements are not in their own storage.

Most of torch goes through the dispatcher, which each subclass handles. The functions here would read the empty storage.
"""

from __future__ import annotations

import abc
from typing import Any

import torch


class ElsewhereTensor(torch.Tensor):
    """A tensor whose elements are elsewhere; functions that would read its storage get the result of `materialize`."""

    @abc.abstractmethod
    def materialize(self) -> torch.Tensor:
        """Return the elements as an ordinary tensor of the same shape. Raises InfinityError if they may not be read."""

    def numpy(self, *, force: bool = False) -> Any:
        return self.materialize().numpy(force=force)

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize().__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.materialize().__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.materialize()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
