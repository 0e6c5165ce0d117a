"""What `.grad` shows of a gradient that is not in it: its shape, and an error for each use that needs its elements.

A gradient that waits for its update elsewhere, or was applied already, is not in `.grad`, nor is one that a step has used.
None there would let `clip_grad_norm_`, a second step, or a sum with the next gradient pass without effect, and the numbers
would be others than in memory without a word.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import InfinityError
from infinity.fsdp2.elsewhere import ElsewhereTensor
from infinity.fsdp2.sharding import in_backward

_VIEWS = {torch.ops.aten.view, torch.ops.aten.detach, torch.ops.aten.alias}
_ZEROING = {torch.ops.aten.zero_, torch.ops.aten._foreach_zero_}


class Taken(enum.Enum):
    """What became of a gradient that `.grad` doesn't hold."""

    FOR_STEP = "for the step"
    """The step that is due will use it, or the backward has applied it. Another one may come, and is added."""
    BY_STEP = "by the step"
    """A step has used it, and zero_grad() was not called. In memory it would be there still."""
    ZEROED = "zeroed"
    """zero_grad(set_to_none=False) came since then: it is 0, without memory."""


class RefusingGradient(ElsewhereTensor):
    """Stands for a gradient (fp32, of the shard's shape) that was taken; holds no elements, and refuses any look at them unless
    they are 0."""

    _gradient: StandIn

    def materialize(self) -> torch.Tensor:
        if self._gradient.taken is not Taken.ZEROED:
            raise self._gradient.refusal()
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def __iadd__(self, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override, misc]
        """FSDP2 adds what another backward reduced: that is all that `.grad` holds, until it is taken too."""
        if self._gradient.taken is Taken.ZEROED:
            return other + 0.0  # -0.0 becomes 0.0, as in a sum with zeros
        if not in_backward() or self._gradient.taken is Taken.BY_STEP:
            raise self._gradient.refusal()
        return other

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RefusingGradient({self._gradient.name}, size={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RefusingGradient)]
        base = stand_ins[0]
        if func.overloadpacket in _VIEWS:
            return _made(base.shape, base.stride(), base.device, base._gradient)
        if func.overloadpacket in _ZEROING and all(one._gradient.taken is not Taken.FOR_STEP for one in stand_ins):
            for one in stand_ins:
                one._gradient.taken = Taken.ZEROED
            return args[0] if func.overloadpacket is torch.ops.aten.zero_ else None
        zeros = {id(one): one.materialize() for one in stand_ins}
        result = func(*tree_map(lambda leaf: zeros.get(id(leaf), leaf), args), **(kwargs or {}))
        if any(zero.any() for zero in zeros.values()):
            raise refusal(base._gradient.name)
        return next((one for one in stand_ins if zeros[id(one)] is result), result)


class StandIn:
    """What `.grad` of one paged parameter shows of its gradient while that is elsewhere, and what became of it: `taken`."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        data = parameter.data
        assert isinstance(data, DTensor)
        local = data._local_tensor
        self.name, self.taken = name, Taken.FOR_STEP
        # Not the parameter, which holds this by its `.grad`: Python's collector doesn't see that.
        self._local = _made(local.shape, local.stride(), local.device, self)
        stand_in = DTensor.from_local(
            self._local,
            data.device_mesh,
            data.placements,
            run_check=False,
            shape=data.shape,
            stride=data.stride(),
        )
        self.grad: DTensor = stand_in.detach()  # type: ignore[assignment]
        """What `.grad` is while it shows this, or what FSDP2 has added to it since."""

    def is_used_up(self, parameter: nn.Parameter) -> bool:
        """Whether torch would use in a step what the last step has used already."""
        return self.taken is Taken.BY_STEP and self.is_shown_alone(parameter)

    def is_shown_alone(self, parameter: nn.Parameter) -> bool:
        """Whether `.grad` shows it, and FSDP2 has added nothing."""
        return parameter.grad is self.grad and self.grad._local_tensor is self._local

    def show(self, parameter: nn.Parameter, taken: Taken) -> None:
        """From now on `.grad` refuses to be used."""
        self.taken = taken
        self.grad._local_tensor = self._local
        parameter.grad = self.grad

    def refusal(self) -> InfinityError:
        """For a look at elements."""
        return used_up(self.name) if self.taken is Taken.BY_STEP else refusal(self.name)


def refusal(name: str) -> InfinityError:
    """What whoever looks at a taken gradient, or changes it, is told."""
    return InfinityError(
        f"the gradient{f' of {name}' if name else ''} is used or changed, and the backward has taken it out of .grad already: "
        "for clipping set gradient_clipping in the config; for anything else of your own set infinity.keep_grad to true "
        '(PagingOptions: update "forward" or "step", gradients in fp32, no gradient_bytes_max), and they stay in .grad until '
        "the step; to drop gradients call zero_grad() of the optimizer"
    )


def used_up(name: str) -> InfinityError:
    """A gradient would be used once more, or added to."""
    return InfinityError(
        f"the gradient of {name} was used up by the last step, and zero_grad() was not called since: torch would add to it, or "
        "step with it once more; call zero_grad() of the optimizer after each step, or, to keep gradients after a step, page "
        'with PagingOptions(update="step") and gradients in fp32, without gradient_bytes_max'
    )


def _made(shape: torch.Size, stride: tuple[int, ...], device: torch.device, gradient: StandIn) -> RefusingGradient:
    base = torch.empty_strided(shape, stride, dtype=torch.float32, device=device)
    base.untyped_storage().resize_(0)
    made: RefusingGradient = torch.Tensor._make_subclass(RefusingGradient, base)
    made._gradient = gradient
    return made
