"""A group while several micro-batches pass through it: what each of them sees of it, and where its gradients go.

Looks past FSDP2's public interface, as sharding.py does. Used by the training thread, and by autograd's threads on its behalf.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from infinity.errors import InfinityError
from infinity.fsdp2.buffers import ReusedBuffers
from infinity.fsdp2.guarded import GatheredParameter, hook_gradients
from infinity.fsdp2.private import TrainingState
from infinity.fsdp2.sharding import param_groups_of
from infinity.optim.kernel import accumulate


class RunningGroup:
    """The group of a module that more than one micro-batch is in at a time: what each of them sees of it, and its gradients.

    [Note: A leaf for each micro-batch]
    In one backward autograd sums what all uses of a leaf give, in the dtype of compute, before FSDP2 sees any of it. Gradients
    of several micro-batches are to be summed in fp32. So each micro-batch computes with leaves of its own, over the memory of
    the gathered parameters.

    Over several ranks, what comes for a leaf is given to FSDP2 as the gradient of the parameter. Where that of an earlier
    micro-batch is there still, it is reduced first: FSDP2 reduces when gradients reach a module's inputs, and those of the
    root, or of a first block over a frozen embedding, need none. Over one rank a reduction changes nothing, so gradients are
    summed here as they come, and FSDP2 gets the sum: with the last micro-batch's where inputs have gradients (`is_held`), else
    at once, as it looks for it when the backward ends.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self.is_held = False
        self._groups = param_groups_of(module)
        self._leaves: dict[tuple[Any, int], nn.Parameter] = {}
        self._buffers: ReusedBuffers | None = None
        """Memory for gradients that are summed here; None where each is reduced by itself."""
        self._sums: dict[Any, torch.Tensor] = {}
        """By parameter (FSDP2's), 1-D, fp32."""
        self._awaited: set[torch.Tensor] = set()
        """Leaves of which the gradient that comes next is a part, and the rest follows."""
        self.is_running = False
        """Whether a forward of all micro-batches, or its backward, is going on."""
        self._watched: set[Any] = set()
        """Parameters (FSDP2's) of which more is taken than what comes for leaves."""

    @property
    def is_resharded_after_forward(self) -> bool:
        return all(group._reshard_after_forward for group in self._groups)

    @property
    def is_gathered(self) -> bool:
        return all(group.is_unsharded for group in self._groups)

    @property
    def sharded(self) -> list[nn.Parameter]:
        """Its parameters, as they are when it isn't gathered."""
        return [parameter.sharded_param for group in self._groups for parameter in group.fsdp_params]

    def clear(self, *, is_running: bool, sums: ReusedBuffers | None = None) -> None:
        """What is left of gradients is void. `sums`: memory for those that are summed here, if they are."""
        self.is_running, self._buffers = is_running, sums
        self._sums.clear()
        self._awaited.clear()
        for leaf in self._leaves.values():
            leaf.grad = None

    def enter(self, micro_batch: int) -> None:
        """It is gathered: from now on its modules show the leaves of a micro-batch."""
        for parameter in self._trained():
            parameter._setattr_on_modules(self._leaf(parameter, micro_batch))

    def leave(self) -> None:
        """Its modules show the gathered parameters."""
        for parameter in self._trained():
            parameter._setattr_on_modules(parameter._unsharded_param)

    def suspend(self) -> None:
        """A micro-batch pauses within it: the next one enters as if none was there."""
        self.leave()
        self.become_idle()

    def become_idle(self) -> None:
        """A micro-batch has left it, or gone back through it, and others follow."""
        self._set_state(TrainingState.IDLE)

    def cast_output(self, output: Any) -> Any:
        """What its module returns, in the dtype of a policy of the user's."""
        return self.module._get_fsdp_state()._cast_output_dtype(output)

    @contextlib.contextmanager
    def forward_again(self) -> Iterator[None]:
        """The root's: around a forward of the groups below it, which FSDP2 takes for a part of the root's."""
        shared = self.module._get_fsdp_state()._state_ctx
        before, shared.iter_forward_root = shared.iter_forward_root, self.module._get_fsdp_state()
        yield
        shared.iter_forward_root = before

    @contextlib.contextmanager
    def part_of_backward(self) -> Iterator[None]:
        """The root's: around a backward of which another one is the rest. Before it is over, nothing ends with it."""
        shared = self.module._get_fsdp_state()._state_ctx
        shared.post_backward_final_callback_queued = True
        yield
        shared.post_backward_final_callback_queued = False

    def await_rest(self, leaves: Collection[torch.Tensor]) -> bool:
        """Those of `leaves` that are its own get a gradient in two parts, and autograd sums them. Returns False where a hook of
        the user's would see the parts."""
        ours = {leaf: parameter for (parameter, _), leaf in self._leaves.items() if leaf in leaves}
        self._awaited |= ours.keys()
        return not any(parameter.sharded_param._backward_hooks for parameter in ours.values())

    def resume(self, micro_batch: int) -> None:
        """A micro-batch that paused within it continues."""
        self._set_state(TrainingState.FORWARD)
        self.enter(micro_batch)

    def give_sums(self) -> None:
        """FSDP2 is about to reduce, and no gradient follows."""
        for parameter, total in self._sums.items():
            _set_unreduced(parameter, total)
        self._sums.clear()

    def end(self) -> None:
        """The backward is over. Sums that were to wait for a micro-batch whose gradient never came are in `.grad`."""
        for parameter, total in self._sums.items() if self.is_held else ():
            sharded = parameter.sharded_param
            grad = parameter.to_sharded_dtensor(total.view(parameter.sharded_size).to(sharded.device))
            sharded.grad = grad if sharded.grad is None else sharded.grad + grad

    def _set_state(self, state: TrainingState) -> None:
        for holder in (self.module._get_fsdp_state(), *self._groups):
            holder._training_state = state

    def _trained(self) -> list[Any]:
        return [p for group in self._groups for p in group.fsdp_params if p._unsharded_param.requires_grad]

    def _leaf(self, parameter: Any, micro_batch: int) -> nn.Parameter:
        leaf = self._leaves.get((parameter, micro_batch))
        if leaf is None:
            leaf = self._leaves[parameter, micro_batch] = GatheredParameter(parameter._unsharded_param.detach())
            leaf.gathered_name = parameter._param_fqn
            hook_gradients(parameter, leaf)
            leaf.register_post_accumulate_grad_hook(self._taking(parameter, _take))  # type: ignore[no-untyped-call]
            if parameter not in self._watched:
                self._watched.add(parameter)
                past_leaves = self._taking(parameter, _take_past_leaves)
                parameter._unsharded_param.register_post_accumulate_grad_hook(past_leaves)
        return leaf

    def _taking(self, parameter: Any, take: Callable[..., None]) -> Callable[[torch.Tensor], None]:
        """Holds neither: the garbage collector doesn't look into such hooks, and what they hold would stay for ever."""
        return functools.partial(take, weakref.ref(self), weakref.ref(parameter))

    def take(self, parameter: Any, leaf: torch.Tensor) -> None:
        """A gradient of a micro-batch has come for a parameter (FSDP2's)."""
        if leaf in self._awaited:
            self._awaited.remove(leaf)
            return
        if self._buffers is not None:
            self._add(parameter, leaf)
            return
        unsharded = parameter._unsharded_param
        if unsharded.grad is not None:
            self._reduce()
        assert leaf.grad is not None
        # After a reduction it takes no other dtype than that in which FSDP2 sums, from torch 2.15 on.
        unsharded.grad, leaf.grad = leaf.grad.to(unsharded.grad_dtype or leaf.grad.dtype), None

    def take_past_leaves(self, parameter: Any, unsharded: torch.Tensor) -> None:
        """One has come for the gathered parameter itself, as of a reentrant checkpoint within the group."""
        if not self.is_running:
            return
        if self._buffers is None:
            raise InfinityError(
                "several micro-batches pass through a group at once, and one of them uses its parameters in another way than "
                'its forward does: checkpoint with use_reentrant=False, or set infinity.schedule to "horizontal"'
            )
        if not self.is_held and parameter in self._sums and _sums_in_unsharded(parameter):
            return  # autograd has added it to the sum, which is there
        self._add(parameter, unsharded)

    def _add(self, parameter: Any, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None and self._buffers is not None
        grad, leaf.grad = leaf.grad.view(-1), None
        total = self._sums.get(parameter)
        if total is None:
            if grad.is_cpu:
                total = self._buffers.lend(grad.numel(), torch.float32).copy_(grad)
            else:
                total = grad.to(torch.float32, copy=True)
            self._sums[parameter] = total
            if not self.is_held:
                _set_unreduced(parameter, total)
        elif total.is_cpu:
            accumulate(total, grad)
        else:
            total += grad

    def _reduce(self) -> None:
        """Reduce what is there, in the middle of a backward: the group stays gathered."""
        state = self.module._get_fsdp_state()
        before = state._training_state
        for group in self._groups:
            reshards, group.reshard_after_backward = group.reshard_after_backward, False
            try:
                # ... and back, so that the end of the backward reduces what comes after this.
                with group.use_training_state(group._training_state):
                    group.post_backward()
            finally:
                group.reshard_after_backward, state._training_state = reshards, before


def _sums_in_unsharded(parameter: Any) -> bool:
    """Whether FSDP2 lets autograd sum a parameter's unreduced gradients, where the gathered parameter has its gradient: from
    torch 2.15 on. Before, FSDP2 sums them itself, in an attribute that is a property over that gradient now."""
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def _set_unreduced(parameter: Any, total: torch.Tensor) -> None:
    """Give FSDP2 a sum (1-D, fp32) as what there is of a parameter's unreduced gradient."""
    grad = total.view(parameter._unsharded_param.shape)
    if _sums_in_unsharded(parameter):
        parameter._unsharded_param.grad = grad
    else:
        parameter.unsharded_accumulated_grad = grad


def _take(group: weakref.ref[RunningGroup], parameter: weakref.ref[Any], leaf: torch.Tensor) -> None:
    alive = group()
    assert alive is not None
    alive.take(parameter(), leaf)


def _take_past_leaves(group: weakref.ref[RunningGroup], parameter: weakref.ref[Any], unsharded: torch.Tensor) -> None:
    alive = group()
    if alive is not None:
        alive.take_past_leaves(parameter(), unsharded)


def grad_tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors that require a gradient, in all that FSDP2 looks into for them."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from grad_tensors([getattr(leaf, field.name) for field in fields(leaf)])
        elif isinstance(leaf, Mapping):
            yield from grad_tensors([*leaf.values()])
        elif isinstance(leaf, (list, tuple, set)):
            yield from grad_tensors([*leaf])


def may_sum_unreduced(model: nn.Module) -> bool:
    """Whether gradients can be summed in fp32 before they are reduced, with the same numbers: over one rank, where a reduction
    rounds nothing."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    alone = all(group.mesh_info.mesh.size() == 1 for module in modules for group in param_groups_of(module))
    return alone and {module._get_fsdp_state()._mp_policy.reduce_dtype for module in modules} <= {None, torch.float32}
