"""Splits the backward of a micro-batch into two parts. Training thread only."""

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
    """A cut at the inputs of a group for one micro-batch: the backward from its loss ends there; `remaining` continues.

    The gradients kept at the cut are the sums of one backward there, in the same order, so the bits are the same.
    """

    def __init__(self) -> None:
        self._inputs: list[torch.Tensor] = []
        self._grads: list[torch.Tensor | None] = []
        self.began_at = 0
        """Sequence number of autograd's last node before the cut."""

    def apply(self, inputs: Any) -> Any:
        """Return the same inputs, where the backward stops. Raises ValueError if a tensor in them can't be replaced."""
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
            raise ValueError("a tensor is in a container that torch.utils._pytree does not know")
        return inputs

    @property
    def remaining(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the inputs that received a gradient, with the gradient."""
        return [(tensor, grad) for tensor, grad in zip(self._inputs, self._grads, strict=True) if grad is not None]

    def is_passed(self, loss: torch.Tensor) -> bool:
        """Return True if a backward from `loss` would reach nodes computed before the cut."""
        nodes = _nodes([loss])
        return any(not _is_leaf(node) and node._sequence_nr() < self.began_at for node in nodes)

    def leaves_on_both_sides(self, loss: torch.Tensor) -> Counter[torch.Tensor]:
        """Return the leaves that get a gradient from both parts, with the number of their uses in the second part."""
        first, later = _leaves([loss]), _leaves(self._inputs)
        return Counter({leaf: later[leaf] for leaf in first if leaf in later})


@dataclass(eq=False)
class Remaining:
    """The remaining backward of a loss of several micro-batches, most of which have already run their backward.

    grads: gradients for the inputs at the cuts, computed for a loss gradient of `expected`.
    """

    grads: list[torch.Tensor]
    expected: float
    why_void: str | None = None
    """Reason why the backward can no longer run; None if it can."""
    check: Callable[[], str | None] = lambda: None
    """Callback that returns another such reason, or None."""

    def take(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients, once. Raises InfinityError if they are void, or if `grad` differs from `expected`."""
        if self.why_void is None and grad.item() != self.expected:
            self.why_void = (
                f"its gradient is {grad.item():g} instead of {self.expected:g}; pass the loss to engine.backward as "
                "the model returned it"
            )
        if why := self.why_void or self.check():
            raise InfinityError(
                f"cannot run the backward of a batch that was split (infinity.micro_batches): {why}; call "
                "engine.zero_grad(), then repeat forward and backward"
            )
        self.why_void, grads, self.grads = "the backward already ran", self.grads, []
        return grads


class Joined(torch.autograd.Function):
    """A loss of several micro-batches: `apply(remaining, loss, last, *inputs)`.

    Its value is `loss`. Its backward continues in `last`, the last micro-batch's loss, and at the cuts of the others.
    """

    @staticmethod
    def forward(ctx: Any, remaining: Remaining, loss: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.remaining = remaining
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, None, grad, *ctx.remaining.take(grad)


class _End(torch.autograd.Function):
    """Identity that records the gradient it receives."""

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
    """Yield the autograd nodes that a backward from `roots` reaches."""
    seen: set[Any] = set()
    ahead: list[Any] = [root.grad_fn for root in roots]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [following for following, _ in node.next_functions]
