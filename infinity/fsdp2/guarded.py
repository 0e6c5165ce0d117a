"""What FSDP2 leaves to its user to know, made right or refused: its groups and states, in classes of our own. Training thread.

`guard` gives the groups and states of a sharded model these classes, as `fully_shard` gives a module another class. They change
what FSDP2 does at the points below, and nothing else. Looks past FSDP2's public interface, at what private.py names.

[Note: FSDP2's silent traps]
  * FSDP2 sets its state up in the first pass. One that fails half-way, runs under `inference_mode`, or goes through a part of
    the model first leaves it unusable. So `guard` sets it up, and every gather leaves inference mode.
  * A root without gradients stays gathered after its forward, and the model shows the gathered parameters: what is written to
    them is lost. So a group is released after each forward without gradients.
  * A gathered parameter that is written to (under `no_grad`, through `.data`, by `Embedding(max_norm=...)`) forgets it, where
    plain PyTorch keeps it. So the version counter of each is compared, and the write is refused. `.data` of a gathered
    parameter shares that counter: see `GatheredParameter`.
  * Gradient hooks (`register_hook`) of a parameter are not called, as autograd sees the gathered one alone. So this one calls
    them. (FSDP2 calls those of `register_post_accumulate_grad_hook`.)
  * An input that no loss depends on gets a gradient of zeros, where plain PyTorch has none, and the optimizer decays what made
    it. So on one rank it gets none. (On several, that a gradient is missing on all of them is not known.)
  * Over one rank nothing is reduced, but gradients are copied into a buffer in fp32: twice what autograd made of them in 16
    bits. So `take_unreduced` is asked first, which can use gradients where autograd left them.
  * A group that runs again in one backward, as reentrant checkpoints do, is reduced once. What comes later stays unreduced
    until the next step. So its state is reset with each reduction, and the end of the backward reduces what is left.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from infinity.device import ReusedMemory
from infinity.errors import InfinityError
from infinity.fsdp2.private import (
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    TrainingState,
    collect_grad_tensors,
    free_storage,
)

TakeUnreduced = Callable[[Mapping[nn.Parameter, torch.Tensor]], Collection[nn.Parameter]]
"""Called with a single CPU rank before gradients are reduced, with what would only be copied: the sharded parameters, and their
gradients (in their shapes, as autograd left them, not to be changed). Returns those whose gradients it has taken; FSDP2 reduces
the others."""


def guard(model: nn.Module, memory: ReusedMemory) -> None:
    """Set FSDP2's state up for passes through `model`, whether it ran before or not, with the classes of this file.

    To be called on the root, once its parameters are those that are trained, and have memory. A model without trained
    parameters keeps gathered what FSDP2 keeps, from one forward to the next. `memory`: for what a CPU gathers.
    """
    assert isinstance(model, FSDPModule)
    states = list(dict.fromkeys(m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)))
    keeps_gathered = not any(parameter.requires_grad for parameter in model.parameters())
    with outside_inference_mode():
        for state in states:
            state.__class__ = GuardedState
            state._is_root = None
            state._state_ctx.all_states.clear()
            for group in state._fsdp_param_groups:
                group._to_sharded()
                group.__class__ = GuardedGroup
                cast(GuardedGroup, group).begin(state, memory, keeps_gathered=keeps_gathered)
        model._get_fsdp_state()._lazy_init()
    for module in model.modules():
        module._register_load_state_dict_pre_hook(_copy_when_loading)


def carry_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """`target` takes the place of `source` as a parameter: it has the hooks that users registered, removable as before."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(source, name):
            setattr(target, name, hooks)


def hook_gradients(parameter: Any, leaf: torch.Tensor) -> None:
    """Have the gradient of `leaf` pass through the hooks of a parameter (FSDP2's), which may be registered at any time."""
    leaf.register_hook(partial(_call_hooks, weakref.ref(parameter)))


def outside_inference_mode() -> contextlib.AbstractContextManager[object]:
    """What is made in here may be used in training, too; without gradients where inference mode was on."""
    return _without_inference_mode() if torch.is_inference_mode_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def _without_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


class GatheredParameter(nn.Parameter):
    """A gathered parameter. What is written through its `.data` counts as a write to it; another tensor is refused."""

    gathered_name: str

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if "gathered_name" in vars(self):  # a copy of it is an ordinary parameter
            raise _written([self.gathered_name])
        set_memory(self, value)


def set_memory(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """What `parameter.data = memory` does to an ordinary parameter."""
    torch.Tensor.data.__set__(parameter, memory)  # type: ignore[attr-defined]


class GuardedState(FSDPState):
    """The state of a module that `fully_shard` was applied to."""

    def _register_root_post_backward_final_callback(self) -> None:
        """A backward comes to the module, perhaps as the first: then nothing has changed yet."""
        if not self._state_ctx.post_backward_final_callback_queued:
            for group in self._all_groups():
                group.check_unwritten()
        super()._register_root_post_backward_final_callback()  # type: ignore[no-untyped-call]

    def _root_post_backward_final_callback(self) -> None:
        for group in self._all_groups():
            if group.reduce_grads and group.unreduced():
                group._training_state = TrainingState.IDLE  # FSDP2 reduces what isn't POST_BACKWARD
        super()._root_post_backward_final_callback()

    def _all_groups(self) -> list[GuardedGroup]:
        return [group for state in self._state_ctx.all_states for group in state._fsdp_param_groups]


class GuardedGroup(FSDPParamGroup):
    """The parameters of one `fully_shard` call."""

    def begin(self, state: FSDPState, memory: ReusedMemory, *, keeps_gathered: bool) -> None:
        """Nothing of the group was ever gathered; FSDP2 looks at its parameters again. `memory`: for what a CPU gathers."""
        self._state, self._keeps_gathered = weakref.ref(state), keeps_gathered
        self.before_reduction: Callable[[], object] = lambda: None
        """Called before gradients are reduced; an exception of it leaves them unreduced."""
        self.take_unreduced: TakeUnreduced | None = None
        self.came_further: Callable[[float], object] | None = None
        """Called when a gradient came of a gathered parameter: which share of the group's elements has one now."""
        self._came_numel = 0
        """Elements of the gathered parameters of which gradients came in this backward."""
        self._followed: set[Any] = set()
        """Parameters (FSDP2's) that tell when their gradient came."""
        self.after_write: Callable[[], object] = lambda: None
        """Called when a gathered parameter was found to be written to."""
        self._forwards = 0
        """Of the group, within another one of it: a method that was registered as a forward may call the forward."""
        self._versions: dict[Any, int] = {}
        """Of the gathered parameters (by FSDP2's), when they were gathered."""
        self._hooked: set[Any] = set()
        """Parameters (FSDP2's) whose gradient passes through the user's hooks."""
        self._written: list[str] = []
        """Names of the gathered parameters that were written to since."""
        self._reset_sharded_params = False
        for parameter in self.fsdp_params:
            parameter.__class__ = GuardedParameter
            cast(GuardedParameter, parameter).begin(memory)

    def unreduced(self) -> dict[Any, tuple[Any, str]]:
        """The unreduced gradients, by parameter (FSDP2's): the object and attribute that hold one, or the sum of several."""
        places: dict[Any, tuple[Any, str]] = {}
        for parameter in self.fsdp_params:
            held = vars(parameter)
            if "_unsharded_param" not in held:  # it was never gathered
                continue
            if held.get("unsharded_accumulated_grad") is not None:  # from torch 2.15 on `.grad` has the sum
                places[parameter] = parameter, "unsharded_accumulated_grad"
            elif parameter._unsharded_param.grad is not None:
                places[parameter] = parameter._unsharded_param, "grad"
        return places

    @cached_property
    def gathered_numel(self) -> int:
        """Elements of all its parameters, gathered."""
        return sum(parameter.sharded_param.numel() for parameter in self.fsdp_params)

    def check_unwritten(self) -> None:
        """Raise InfinityError where a parameter was written to while it was gathered, once for each such write."""
        self._note_writes()
        if self._written:
            names, self._written = self._written, []
            raise _written(names)

    def forget_writes(self) -> None:
        """What was written to gathered parameters is void."""
        self._written.clear()

    # FSDP2's own methods.

    def unshard(self, async_op: bool = False) -> None:
        with outside_inference_mode():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        with outside_inference_mode():
            super().wait_for_unshard()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._forwards = self._forwards + 1 if self._training_state == TrainingState.FORWARD else 0
        return super().pre_forward(module, args, kwargs)

    def post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        output = super().post_forward(module, input, output)
        if self._forwards:
            self._forwards -= 1
        elif not (torch.is_grad_enabled() or self._keeps_gathered):
            self._to_sharded()
        self.check_unwritten()
        return output

    def post_backward(self, *unused: Any) -> None:
        self._came_numel = 0
        if unreduced := self.unreduced():
            self.before_reduction()
            self._offer_unreduced(unreduced)
        super().post_backward(*unused)
        state = self._state()
        if state is not None and state._training_state == TrainingState.PRE_BACKWARD:
            state._training_state = TrainingState.IDLE
        self.check_unwritten()

    def _offer_unreduced(self, unreduced: Mapping[Any, tuple[Any, str]]) -> None:
        if self.take_unreduced is None or not self._reduction_copies():
            return
        offered: dict[nn.Parameter, torch.Tensor] = {}
        places: dict[nn.Parameter, tuple[Any, str]] = {}
        for parameter, place in unreduced.items():
            if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):  # not from torch 2.15 on
                parameter.accumulate_unsharded_grad_if_needed()
            grad = getattr(*place)
            if _is_plain(grad):
                places[parameter.sharded_param], offered[parameter.sharded_param] = place, grad
                setattr(*place, None)  # an exception is to leave none of them for the next backward
        for sharded in offered.keys() - self.take_unreduced(offered):
            setattr(*places[sharded], offered[sharded])

    def _reduction_copies(self) -> bool:
        """Whether a reduction does no more than to copy gradients and convert them to fp32."""
        alone = self.mesh_info.mesh.size() == 1 and self.device.type == "cpu" and self.reduce_grads
        exact = self._reduce_dtype in (None, torch.float32) and self.gradient_divide_factor is None
        return alone and exact and self._all_reduce_hook is None and not self.reduce_scatter_unused_params

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = super()._register_post_backward_hook(args, kwargs)
        # Over several ranks zeros stay: a gradient of which other ranks have a part is no gradient on none of them.
        if torch.is_grad_enabled() and self.mesh_info.mesh.size() == 1:
            node: Any = next((tensor.grad_fn for tensor in collect_grad_tensors((args, kwargs))), None)
            if node is not None:  # one for all of them
                node.set_materialize_grads(False)
        return args, kwargs

    def _to_unsharded(self) -> None:
        if self.is_unsharded:
            return
        for parameter in self.fsdp_params:
            gathered = parameter._unsharded_param
            if type(gathered) is nn.Parameter:
                gathered.__class__ = GatheredParameter
                cast(GatheredParameter, gathered).gathered_name = parameter._param_fqn or "a parameter"
            if self.came_further is not None and parameter not in self._followed and gathered.requires_grad:
                self._followed.add(parameter)
                gathered.register_post_accumulate_grad_hook(partial(_gradient_came, weakref.ref(self)))
            if parameter.sharded_param._backward_hooks and parameter not in self._hooked and gathered.requires_grad:
                self._hooked.add(parameter)
                hook_gradients(parameter, gathered)
            self._versions[parameter] = gathered._version
        super()._to_unsharded()  # type: ignore[no-untyped-call]

    def _to_sharded(self) -> None:
        self._note_writes()
        super()._to_sharded()  # type: ignore[no-untyped-call]

    def _note_writes(self) -> None:
        if self.is_sharded:
            return
        for parameter, version in self._versions.items():
            now = parameter._unsharded_param._version
            if now != version:
                self._versions[parameter] = now
                self._written.append(parameter._param_fqn)
                self.after_write()


def _is_plain(grad: torch.Tensor) -> bool:
    is_one = type(grad) in (torch.Tensor, nn.Parameter) and grad.is_contiguous() and not grad.is_neg()
    return is_one and grad.dtype in (torch.float32, torch.bfloat16, torch.float16)


class GuardedParameter(FSDPParam):
    """A parameter of a `GuardedGroup`. On a CPU its gathered memory comes from `ReusedMemory`."""

    def begin(self, memory: ReusedMemory) -> None:
        """Nothing of it was ever gathered."""
        self._memory = memory
        self.all_gather_outputs = []
        vars(self).pop("_unsharded_param", None)

    def init_all_gather_outputs(
        self, numels: list[int], dtypes: list[torch.dtype], ranks: int, device: torch.device
    ) -> None:
        if device.type == "cpu" and not self.all_gather_outputs:
            self.all_gather_outputs = [
                self._memory.tensor(ranks * numel, dtype) for numel, dtype in zip(numels, dtypes, strict=True)
            ]
        super().init_all_gather_outputs(numels, dtypes, ranks, device)
        for tensor in self.all_gather_outputs:
            self._memory.fill(tensor)

    def free_unsharded_param(self) -> None:
        for tensor in (*self.all_gather_outputs, *self._unsharded_inner_tensors):
            if not self._memory.free(tensor):
                free_storage(tensor)


def _gradient_came(group: weakref.ref[GuardedGroup], gathered: torch.Tensor) -> None:
    """Autograd has computed the gradient of a gathered parameter."""
    alive = group()
    if alive is not None and alive.came_further is not None:
        alive._came_numel += gathered.numel()
        alive.came_further(min(1.0, alive._came_numel / alive.gathered_numel))


def _call_hooks(parameter: weakref.ref[Any], grad: torch.Tensor) -> torch.Tensor:
    alive = parameter()
    hooks = alive.sharded_param._backward_hooks if alive is not None else None
    for hook in [*(hooks or {}).values()]:
        made = hook(grad)
        grad = grad if made is None else made.to(grad.dtype)
    return grad


def _copy_when_loading(state_dict: Any, prefix: str, local_metadata: dict[str, Any], *others: Any) -> None:
    """`load_state_dict(..., assign=True)` sets the values of the parameters that are there: others would be neither sharded nor
    trained."""
    local_metadata.pop("assign_to_params_buffers", None)


def _written(names: list[str]) -> InfinityError:
    return InfinityError(
        f"{', '.join(dict.fromkeys(names))} was changed while it was gathered for a forward or backward, and FSDP2 forgets the "
        "change when it releases the parameter: change parameters between passes, after model.reshard() if a forward with "
        "gradients came last; a forward can't change its own weights, as Embedding(max_norm=...) does"
    )
