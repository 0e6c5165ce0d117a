"""Gradients over one rank of a CPU: what comes of their reduction is what autograd left, where it left it. Any thread.

[Note: Gradients where they lie]
FSDP2 copies the gradients of a group into one buffer in fp32, reduces that, and gives out views of the result. Over one rank
nothing is reduced. What is written there, and read again by the update, is twice what autograd made of it in 16 bits: for 200 M
parameters 0.8 GB. So the reduction is given a buffer that has no memory, and takes note of what is copied into it. The views
of it are gradients in fp32 to whoever looks at them. Those who can read other dtypes ask for their elements.

Whatever else is done with either finds a copy in fp32, made then. So a torch that reduces in another way, and a hook of the
user that looks at a gradient or changes it, get what they would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from infinity.errors import InfinityError
from infinity.fsdp2.elsewhere import ElsewhereTensor
from infinity.fsdp2.private import COPIES_IN
from infinity.optim.kernel import accumulate

_aten = torch.ops.aten
_HELD_BY_FP32 = (torch.float32, torch.bfloat16, torch.float16)
"""What is not rounded there."""

_T = TypeVar("_T", bound=torch.Tensor)


class UncopiedBuffer(ElsewhereTensor):
    """In place of the buffer (fp32) that gradients are copied into and reduced in. lend: makes one, 1-D."""

    _noted: _Noted

    @staticmethod
    def make(numel: int, lend: Callable[[], torch.Tensor]) -> UncopiedBuffer:
        return UncopiedBuffer._over(_Noted(lend), torch.Size((numel,)))

    @staticmethod
    def _over(noted: _Noted, shape: torch.Size) -> UncopiedBuffer:
        buffer = _without_memory(UncopiedBuffer, shape)
        buffer._noted = noted
        return buffer

    def materialize(self) -> torch.Tensor:
        """The buffer itself, with what was copied into it."""
        return self._noted.copied().view(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        called = func.overloadpacket
        if called in COPIES_IN:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            if given["num_chunks"] == 1 and given["out"]._noted.note(given["tensors"]):
                return None
        if isinstance(args[0], UncopiedBuffer):
            noted = args[0]._noted
            if func is _aten.view.default:
                return UncopiedBuffer._over(noted, torch.empty(args[0].shape, device="meta").view(args[1]).shape)
            if called is _aten.copy_ and isinstance(args[1], UncopiedBuffer) and args[1]._noted is noted:
                return args[0]
            if called is _aten.as_strided:
                shape, stride, start = (*args[1:], 0)[:3]
                if (gradient := noted.give(shape, stride, start or 0)) is not None:
                    return UncopiedGradient.make(gradient)
        return _on_copies(func, args, kwargs)


class _Noted:
    """What was copied into a buffer, or the buffer, once somebody has asked for it."""

    def __init__(self, lend: Callable[[], torch.Tensor]) -> None:
        self._lend = lend
        self._gradients: dict[int, torch.Tensor] = {}
        """By number of their first element in the buffer."""
        self._given: set[int] = set()
        self._copied: torch.Tensor | None = None

    def note(self, gradients: Sequence[torch.Tensor]) -> bool:
        """They are copied into the buffer, one behind the other. False where they have to be."""
        if self._copied is not None or not all(_lies(gradient) for gradient in gradients):
            return False
        start = 0
        for gradient in gradients:
            self._gradients[start] = gradient
            start += gradient.numel()
        return len(self._gradients) == len(gradients)

    def give(self, shape: Sequence[int], stride: Sequence[int], start: int) -> torch.Tensor | None:
        """The gradient of which that is a view; None where it is another."""
        gradient = self._gradients.get(start) if self._copied is None else None
        if gradient is None or [*gradient.shape] != [*shape] or [*gradient.stride()] != [*stride]:
            return None
        self._given.add(start)
        if len(self._given) == len(self._gradients):
            self._gradients.clear()  # FSDP2 keeps the buffer until it reduces the next group
        return gradient

    def copied(self) -> torch.Tensor:
        """Raises InfinityError once all gradients were given out, which it has forgotten then."""
        if self._copied is None:
            if self._given and not self._gradients:
                raise InfinityError(
                    f"torch {torch.__version__} or a hook uses a reduction's buffer after its gradients were handed out: set "
                    'infinity.update to "forward" and infinity.keep_grad to true'
                )
            copied = self._lend()
            for start, gradient in self._gradients.items():
                copied[start : start + gradient.numel()].copy_(gradient.reshape(-1))
            self._copied = copied
            self._gradients.clear()
        return self._copied


@dataclass
class _Lying:
    """The elements (1-D) of a gradient and of all views of it. What autograd left may be somebody else's, too, as a hook's that
    kept it: a copy alone is changed."""

    elements: torch.Tensor
    is_copy: bool = False


class UncopiedGradient(ElsewhereTensor):
    """A gradient in fp32 whose elements lie where autograd left them, in its dtype, until somebody uses it as a tensor."""

    _lying: _Lying

    @staticmethod
    def make(gradient: torch.Tensor) -> UncopiedGradient:
        return UncopiedGradient._over(_Lying(gradient.view(-1)), gradient.shape)

    @staticmethod
    def _over(lying: _Lying, shape: torch.Size) -> UncopiedGradient:
        made = _without_memory(UncopiedGradient, shape)
        made._lying = lying
        return made

    @property
    def elements(self) -> torch.Tensor:
        """Its elements (1-D), in whatever dtype they are: not to be changed."""
        return self._lying.elements

    def materialize(self) -> torch.Tensor:
        """A copy in fp32, in its shape: what it is from now on."""
        if not self._lying.is_copy:
            self._lying.elements = self._lying.elements.to(torch.float32, copy=True)
            self._lying.is_copy = True
        return self._lying.elements.view(self.shape)

    def __iadd__(self, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override, misc]
        """Another backward, or another micro-batch, has reduced more of it."""
        if isinstance(other, UncopiedGradient) and other.shape == self.shape:
            accumulate(self.materialize().view(-1), other.elements)
        else:
            self.materialize().add_(other)
        return self

    def share_memory_(self) -> Any:
        return self.materialize().share_memory_()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.materialize().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UncopiedGradient({self.elements.dtype}, size={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (_aten.detach.default, _aten.alias.default):
            return UncopiedGradient._over(args[0]._lying, args[0].shape)
        return _on_copies(func, args, kwargs or {})


def elements_of(gradient: torch.Tensor) -> torch.Tensor:
    """The elements (1-D) of this rank's part of a gradient, in the dtype in which they lie: not to be changed."""
    return gradient.elements if isinstance(gradient, UncopiedGradient) else gradient.reshape(-1)


def changeable_elements_of(gradient: torch.Tensor) -> torch.Tensor:
    """The same in fp32: what is changed of them is changed of the gradient."""
    return gradient.materialize().view(-1) if isinstance(gradient, UncopiedGradient) else gradient.reshape(-1)


def _without_memory(of: type[_T], shape: torch.Size) -> _T:
    """A tensor (fp32, on the CPU) that raises RuntimeError where somebody asks for its address."""
    made: _T = torch.Tensor._make_wrapper_subclass(of, shape, dtype=torch.float32)
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def _lies(gradient: torch.Tensor) -> bool:
    """Whether it may be given out as it is."""
    plain = type(gradient) in (torch.Tensor, torch.nn.Parameter) and not gradient.is_neg()
    return (
        plain
        and gradient.is_cpu
        and gradient.dtype in _HELD_BY_FP32
        and gradient.is_contiguous()
        and gradient.numel() > 0
    )


def _on_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` makes of copies in fp32. What is changed in place stays changed."""
    copies: dict[int, Any] = {}

    def copy_of(value: Any) -> Any:
        if not isinstance(value, (UncopiedBuffer, UncopiedGradient)):
            return value
        copy = value.materialize()
        copies[id(copy)] = value
        return copy

    result = func(*tree_map(copy_of, args), **tree_map(copy_of, kwargs))
    return copies.get(id(result), result)
