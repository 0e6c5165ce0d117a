"""Floor 8. What `.grad` shows of a gradient that was taken in the backward: its shape, and an error for whoever would use it.

A gradient that waits for its update elsewhere, or was applied already, is not in `.grad`. None there would let
`clip_grad_norm_`, or any other change, pass without effect, and the numbers would be others than in memory without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.errors import InfinityError
from infinity.fsdp2.elsewhere import ElsewhereTensor
from infinity.fsdp2.sharding import in_backward

_VIEWS = {torch.ops.aten.view, torch.ops.aten.detach, torch.ops.aten.alias}


class RefusingGradient(ElsewhereTensor):
    """Stands for a gradient (fp32, of the shard's shape) that was taken; holds no elements, and refuses any look at them."""

    _name: str

    def materialize(self) -> torch.Tensor:
        raise refusal(self._name)

    def __iadd__(self, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override, misc]
        """FSDP2 adds what another backward reduced: that is all that `.grad` holds, until it is taken too."""
        if not in_backward():
            raise refusal(self._name)
        return other

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RefusingGradient({self._name}, size={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        base = next((arg for arg in args if isinstance(arg, RefusingGradient)), None)
        if base is not None and func.overloadpacket in _VIEWS:
            return _made(base.shape, base.stride(), base.device, base._name)
        raise refusal(base._name if base is not None else "")


class StandIn:
    """What `.grad` of one paged parameter shows of its gradient while that is elsewhere."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        data = parameter.data
        assert isinstance(data, DTensor)
        local = data._local_tensor
        self._parameter, self._local = parameter, _made(local.shape, local.stride(), local.device, name)
        stand_in = DTensor.from_local(
            self._local,
            data.device_mesh,
            data.placements,
            run_check=False,
            shape=data.shape,
            stride=data.stride(),
        )
        self._shown: DTensor = stand_in.detach()  # type: ignore[assignment]

    @property
    def is_shown(self) -> bool:
        """Whether `.grad` shows it, or what FSDP2 has added to it since."""
        return self._parameter.grad is self._shown

    def show(self) -> None:
        """From now on `.grad` refuses to be used."""
        self._shown._local_tensor = self._local
        self._parameter.grad = self._shown

    def hide(self) -> None:
        """`.grad` is None, unless somebody has set it."""
        if self.is_shown:
            self._parameter.grad = None


def refusal(name: str) -> InfinityError:
    """What whoever looks at a taken gradient, or changes it, is told."""
    return InfinityError(
        f"the gradient{f' of {name}' if name else ''} is used or changed, and the backward has taken it out of .grad already: "
        "for clipping set gradient_clipping in the config; for anything else of your own set infinity.keep_grad to true "
        '(PagingOptions: update "forward" or "step", gradients in fp32, no gradient_bytes_max), and they stay in .grad until '
        "the step; to drop gradients call zero_grad() of the optimizer"
    )


def _made(shape: torch.Size, stride: tuple[int, ...], device: torch.device, name: str) -> RefusingGradient:
    base = torch.empty_strided(shape, stride, dtype=torch.float32, device=device)
    base.untyped_storage().resize_(0)
    made: RefusingGradient = torch.Tensor._make_subclass(RefusingGradient, base)
    made._name = name
    return made
