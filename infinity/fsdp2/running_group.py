"""A group while several micro-batches pass through it: the parameters that each one sees, and their gradients.

Uses FSDP2's private parts, as sharding.py does. Called by the training thread and, for it, by autograd's threads.
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
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.errors import InfinityError
from infinity.fsdp2.buffers import ReusedBuffers
from infinity.fsdp2.guarded import GatheredParameter, hook_gradients
from infinity.fsdp2.private import TrainingState
from infinity.fsdp2.sharding import param_groups_of
from infinity.optim.kernel import accumulate


class RunningGroup:
    """The group of a module that several micro-batches use at a time: their parameters and gradients.

    [Note: A leaf for each micro-batch]
    In one backward autograd sums the gradients of all uses of a leaf in the compute dtype, before FSDP2 sees them.
    Gradients of several micro-batches must be summed in fp32. So each micro-batch computes with its own leaves, over
    the memory of the gathered parameters.

    On several ranks, a leaf's gradient is given to FSDP2 as the gradient of the parameter. If that of an earlier
    micro-batch is still there, it is reduced first: FSDP2 reduces when gradients reach a module's inputs, but inputs of
    the root, or of a first block over a frozen embedding, need none. On one rank a reduction changes nothing, so
    gradients are summed here as they come. FSDP2 gets the sum with the last micro-batch if inputs have gradients
    (`is_held`). Otherwise FSDP2 gets it at once, because it looks for the sum when the backward ends.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self.is_held = False
        self._groups = param_groups_of(module)
        self._leaves: dict[tuple[Any, int], nn.Parameter] = {}
        self._buffers: ReusedBuffers | None = None
        """Memory for gradients that are summed here; None if each is reduced separately."""
        self._sums: dict[Any, torch.Tensor] = {}
        """Sums of gradients (1-D, fp32), by FSDP2's parameter."""
        self._awaited: set[torch.Tensor] = set()
        """Leaves whose next gradient is only the first part."""
        self.is_running = False
        """True during a forward of all micro-batches and its backward."""
        self._watched: set[Any] = set()
        """Parameters (FSDP2's) with a hook on the gathered parameter itself."""

    @property
    def is_resharded_after_forward(self) -> bool:
        return all(group._reshard_after_forward for group in self._groups)

    @property
    def is_gathered(self) -> bool:
        return all(group.is_unsharded for group in self._groups)

    @property
    def sharded(self) -> list[nn.Parameter]:
        return [parameter.sharded_param for group in self._groups for parameter in group.fsdp_params]

    def clear(self, *, is_running: bool, sums: ReusedBuffers | None = None) -> None:
        """Discard remaining gradients. `sums`: memory for gradients that are summed here, if any."""
        self.is_running, self._buffers = is_running, sums
        self._sums.clear()
        self._awaited.clear()
        for leaf in self._leaves.values():
            leaf.grad = None

    def enter(self, micro_batch: int) -> None:
        """Make its modules show the leaves of a micro-batch; the group is gathered."""
        for parameter in self._trained():
            parameter._setattr_on_modules(self._leaf(parameter, micro_batch))

    def leave(self) -> None:
        """Make its modules show the gathered parameters."""
        for parameter in self._trained():
            parameter._setattr_on_modules(parameter._unsharded_param)

    def suspend(self) -> None:
        """Pause a micro-batch inside it, so that the next one enters an idle group."""
        self.leave()
        self.become_idle()

    def become_idle(self) -> None:
        """Mark it idle for FSDP2: a micro-batch has left it, or passed back through it, and others follow."""
        self._set_state(TrainingState.IDLE)

    def cast_output(self, output: Any) -> Any:
        """Return its module's output in the dtype of the user's policy."""
        return self.module._get_fsdp_state()._cast_output_dtype(output)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return its module's inputs, whose floats are in the compute dtype if the user's policy says so."""
        policy = self.module._get_fsdp_state()._mp_policy
        dtype = policy.param_dtype if policy.cast_forward_inputs else None
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if dtype and t.is_floating_point() else t, inputs)

    @contextlib.contextmanager
    def forward_again(self) -> Iterator[None]:
        """For the root: a context in which FSDP2 treats forwards of groups as part of the root's forward."""
        shared = self.module._get_fsdp_state()._state_ctx
        before, shared.iter_forward_root = shared.iter_forward_root, self.module._get_fsdp_state()
        yield
        shared.iter_forward_root = before

    @contextlib.contextmanager
    def part_of_backward(self) -> Iterator[None]:
        """For the root: a context for one part of a backward, at whose end FSDP2 must not finish the backward."""
        shared = self.module._get_fsdp_state()._state_ctx
        shared.post_backward_final_callback_queued = True
        yield
        shared.post_backward_final_callback_queued = False

    def await_rest(self, leaves: Collection[torch.Tensor]) -> bool:
        """Expect gradients of `leaves` in two parts, summed by autograd; return False if a user hook would see them."""
        ours = {leaf: parameter for (parameter, _), leaf in self._leaves.items() if leaf in leaves}
        self._awaited |= ours.keys()
        return not any(parameter.sharded_param._backward_hooks for parameter in ours.values())

    def resume(self, micro_batch: int) -> None:
        """Continue a micro-batch that paused inside it."""
        self._set_state(TrainingState.FORWARD)
        self.enter(micro_batch)

    def give_sums(self) -> None:
        """Give the sums to FSDP2, which is about to reduce; no gradient follows."""
        for parameter, total in self._sums.items():
            _set_unreduced(parameter, total)
        self._sums.clear()

    def end(self) -> None:
        """End the backward: put sums that waited for a gradient that never came into `.grad`."""
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
        """Return a hook with weak references: the garbage collector does not see into hooks, so others would leak."""
        return functools.partial(take, weakref.ref(self), weakref.ref(parameter))

    def take(self, parameter: Any, leaf: torch.Tensor) -> None:
        """Take the gradient of a micro-batch's leaf for a parameter (FSDP2's)."""
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
        # Since torch 2.15 the gradient after a reduction must have the dtype in which FSDP2 sums.
        unsharded.grad, leaf.grad = leaf.grad.to(unsharded.grad_dtype or leaf.grad.dtype), None

    def take_past_leaves(self, parameter: Any, unsharded: torch.Tensor) -> None:
        """Take a gradient of the gathered parameter itself, as from a reentrant checkpoint within the group."""
        if not self.is_running:
            return
        if self._buffers is None:
            raise InfinityError(
                "several micro-batches are in a group at once, and one of them uses its parameters outside its "
                "forward: "
                'checkpoint with use_reentrant=False, or set infinity.schedule to "horizontal"'
            )
        if not self.is_held and parameter in self._sums and _sums_in_unsharded(parameter):
            return  # autograd has already added it to the sum
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
        """Reduce the current gradients in the middle of a backward; the group stays gathered."""
        state = self.module._get_fsdp_state()
        before = state._training_state
        for group in self._groups:
            reshards, group.reshard_after_backward = group.reshard_after_backward, False
            try:
                # Restores the state afterwards, so that the end of the backward reduces later gradients.
                with group.use_training_state(group._training_state):
                    group.post_backward()
            finally:
                group.reshard_after_backward, state._training_state = reshards, before


def _sums_in_unsharded(parameter: Any) -> bool:
    """Return True if autograd sums unreduced gradients in the gathered parameter's `.grad`: since torch 2.15. Before,
    FSDP2 sums them in an attribute; since then the attribute is a property over that gradient."""
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def _set_unreduced(parameter: Any, total: torch.Tensor) -> None:
    """Give FSDP2 a sum (1-D, fp32) as a parameter's unreduced gradient."""
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
    """Yield the tensors that require a gradient, in all containers that FSDP2 searches."""
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
    """Return True if fp32 sums before a reduction give the same numbers: on one rank, if it rounds nothing."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    alone = all(group.mesh_info.mesh.size() == 1 for module in modules for group in param_groups_of(module))
    return alone and {module._get_fsdp_state()._mp_policy.reduce_dtype for module in modules} <= {None, torch.float32}
