"""Where the backward of a micro-batch is cut in two. Training thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from infinity.errors import InfinityError
from infinity.fsdp2.running_group import grad_tensors


class Cut:
    """The inputs of a group, of one micro-batch. The backward from its loss ends at them; `remaining` says where it continues.

    Gradients that wait are those which autograd would have summed up to here, in the same order, so the bits are those of one
    backward.
    """

    def __init__(self) -> None:
        self._inputs: list[torch.Tensor] = []
        self._grads: list[torch.Tensor | None] = []
        self.began_at = 0
        """The sequence number of autograd's last node before those that the backward comes to."""

    def apply(self, inputs: Any) -> Any:
        """The same inputs, from which no backward goes further. Raises ValueError where they hold a tensor with a gradient
        that can't be replaced."""
        cut: dict[int, torch.Tensor] = {}

        def replaced(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            if id(value) not in cut:
                self._inputs.append(value)
                self._grads.append(None)
                number, values = len(self._grads) - 1, value.detach().requires_grad_()
                cut[id(value)] = _End.apply(self._grads, number, values)  # type: ignore[no-untyped-call]
            return cut[id(value)]

        self.began_at = torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()  # type: ignore[union-attr]
        inputs, present = tree_map(replaced, inputs), {*map(id, grad_tensors(inputs))}
        if not present <= cut.keys():
            raise ValueError("a tensor is where torch's trees don't find it")
        return inputs

    @property
    def remaining(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The inputs for which a gradient came, and that gradient."""
        return [(tensor, grad) for tensor, grad in zip(self._inputs, self._grads, strict=True) if grad is not None]

    def is_passed(self, loss: torch.Tensor) -> bool:
        """Whether a backward from a loss would come to what was computed before the cut."""
        nodes = _nodes([loss])
        return any(not _is_leaf(node) and node._sequence_nr() < self.began_at for node in nodes)

    def leaves_on_both_sides(self, loss: torch.Tensor) -> Counter[torch.Tensor]:
        """Leaves that get a gradient of the backward from a loss, by how many the rest has for them."""
        first, later = _leaves([loss]), _leaves(self._inputs)
        return Counter({leaf: later[leaf] for leaf in first if leaf in later})


@dataclass(eq=False)
class Remaining:
    """What a backward from a loss of several micro-batches is still to do, most of which went back already.

    grads: for the inputs at which they were cut, from a loss whose gradient is `expected`.
    """

    grads: list[torch.Tensor]
    expected: float
    why_void: str | None = None
    """Why it can't be done any more."""
    check: Callable[[], str | None] = lambda: None
    """Looks for such a reason."""

    def take(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradients, once. Raises InfinityError where they are void, or `grad` isn't what was expected."""
        if self.why_void is None and grad.item() != self.expected:
            self.why_void = (
                f"it got a gradient of {grad.item():g} instead of {self.expected:g}; pass it to engine.backward as the model "
                "returned it"
            )
        if why := self.why_void or self.check():
            raise InfinityError(
                f"the loss of a batch that was split (infinity.micro_batches) can't go back: {why}; call engine.zero_grad(), "
                "then forward and backward once more"
            )
        self.why_void, grads, self.grads = "it went back already", self.grads, []
        return grads


class Joined(torch.autograd.Function):
    """A loss of several micro-batches: `apply(remaining, loss, last, *inputs)`.

    Its value is `loss`. Its backward continues in `last`, the part of the last micro-batch, and in the inputs at which the
    others were cut.
    """

    @staticmethod
    def forward(ctx: Any, remaining: Remaining, loss: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.remaining = remaining
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, None, grad, *ctx.remaining.take(grad)


class _End(torch.autograd.Function):
    """The same values; notes the gradient that comes for them."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor | None], number: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.grads, ctx.number = grads, number
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.grads[ctx.number] = grad
        return None, None, None


def _leaves(roots: list[torch.Tensor]) -> Counter[torch.Tensor]:
    ends = (end for node in _nodes(roots) for end, _ in node.next_functions)
    return Counter(end.variable for end in ends if _is_leaf(end))


def _is_leaf(node: Any) -> bool:
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _nodes(roots: list[torch.Tensor]) -> Iterator[Any]:
    """Those of autograd that a backward from `roots` comes to."""
    seen: set[Any] = set()
    ahead: list[Any] = [root.grad_fn for root in roots]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [following for following, _ in node.next_functions]
