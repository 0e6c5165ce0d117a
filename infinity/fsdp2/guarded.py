"""Subclasses of FSDP2's groups and states that fix or reject silent errors of FSDP2. Training thread only.

`guard` gives the groups and states of a sharded model these classes, as `fully_shard` changes the class of a module.
They change FSDP2 at the points below and nowhere else. Uses private parts of FSDP2, listed in private.py.

[Note: FSDP2's silent traps]
  * FSDP2 initialises its state in the first pass. If that pass fails, runs in `inference_mode`, or starts in a part of
    the model, the state is unusable. So `guard` initialises it, and every gather leaves inference mode.
  * After a forward without gradients the root stays gathered, and writes to the parameters that the model shows are
    lost. So a group is released after each forward without gradients.
  * A write to a gathered parameter (under `no_grad`, through `.data`, by `Embedding(max_norm=...)`) is lost; plain
    PyTorch keeps it. So version counters are compared, and a write raises. `.data` shares the counter: see
    `GatheredParameter`.
  * Gradient hooks (`register_hook`) of a parameter are not called, because autograd sees only the gathered one: done
    here.
  * A tensor in an attribute of an object that a module returns, such as a distribution, is not found, so its group is
    not gathered for the backward, which then reads freed memory. So it gets a hook here.
  * An input that no loss depends on gets a gradient of zeros; plain PyTorch has none. The optimizer would decay the
    weights behind it. So on one rank it gets none. (Several ranks do not know if it is missing on all of them.)
  * On one rank a reduction only copies gradients into an fp32 buffer, twice the size of 16-bit gradients. So
    `take_unreduced` is called first, and can use gradients where autograd left them.
  * A backward with create_graph=True leaves the graph of a second one, whose gradients would be wrong. So it raises.
  * An in-place operation on an output that is a view (a linear layer's, if its input has three dimensions) drops the
    hook that gathers the group for the backward. So the base of the view gets a hook.
  * A group that runs twice in one backward (reentrant checkpoints) is reduced once; later gradients stay unreduced
    until the next step. So each reduction resets its state, and the end of the backward reduces the remainder.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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
from infinity.host_memory import HEAP

TakeUnreduced = Callable[[Mapping[nn.Parameter, torch.Tensor]], Collection[nn.Parameter]]
"""Called on a single CPU rank before a reduction that would only copy gradients, with these (read-only, in the
parameters' shapes) by sharded parameter. Returns the parameters whose gradients it took; FSDP2 reduces the others."""

Gathering = Callable[..., contextlib.AbstractContextManager[None]]
"""Returns a context in which FSDP2 can read the shards of a group. `training`: True if the module of its first parameter
is in training mode. `dtype`: in which they are gathered."""


_OBJECTS_MAX = 1000
"""Maximum number of objects in an output that are searched for tensors."""


def guard(model: nn.Module, memory: ReusedMemory) -> None:
    """Initialise FSDP2's state for passes through `model`, whether or not it ran before, with the classes of this file.

    Call it on the root, after its parameters are final and have memory. A model without trained parameters keeps
    gathered between forwards what FSDP2 keeps. `memory`: for parameters that a CPU gathers.
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
    """Share the hooks that users registered on `source` with `target`, which replaces it; they stay removable."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(source, name):
            setattr(target, name, hooks)


def hook_gradients(parameter: Any, leaf: torch.Tensor) -> None:
    """Pass the gradient of `leaf` through the hooks of a parameter (FSDP2's), whenever they are registered."""
    leaf.register_hook(partial(_call_hooks, weakref.ref(parameter)))


def outside_inference_mode() -> contextlib.AbstractContextManager[object]:
    """Return a context outside inference mode, without gradients if it was on; tensors made in it can be trained on."""
    return _without_inference_mode() if torch.is_inference_mode_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def _without_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


class GatheredParameter(nn.Parameter):
    """A gathered parameter. Writes through its `.data` count as writes to it; assigning another tensor raises."""

    gathered_name: str

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if "gathered_name" in vars(self):  # missing in a copy, which is an ordinary parameter
            raise _written([self.gathered_name])
        set_memory(self, value)


def set_memory(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Do what `parameter.data = memory` does to an ordinary parameter."""
    torch.Tensor.data.__set__(parameter, memory)  # type: ignore[attr-defined]


class GuardedState(FSDPState):
    """The state of a module that `fully_shard` was applied to."""

    began_at = 0
    """Sequence number of autograd's first node in the last forward."""

    def _register_root_post_backward_final_callback(self) -> None:
        """Called when a backward reaches the module. Before the first, check for writes: nothing has changed yet."""
        if torch.is_grad_enabled():
            raise InfinityError(
                "the model has no second derivatives: FSDP2 reduces gradients and frees parameters in the first backward, so "
                "leave create_graph=True out (for a gradient penalty, take the difference of two forwards)"
            )
        if not self._state_ctx.post_backward_final_callback_queued:
            for group in self._all_groups():
                group.check_unwritten()
        super()._register_root_post_backward_final_callback()  # type: ignore[no-untyped-call]

    def _register_pre_backward_hook(self, output: Any) -> Any:
        output = super()._register_pre_backward_hook(output)
        if torch.is_grad_enabled():
            followed = {id(tensor) for tensor in collect_grad_tensors(output)}
            for tensor in _tensors_in(output):
                if id(tensor) not in followed:
                    tensor.register_hook(self._pre_backward)
                made = tensor._base.grad_fn if tensor._base is not None else None
                if made is not None and made._sequence_nr() >= self.began_at:  # not a view of an input
                    tensor._base.register_hook(self._come_to_base)  # type: ignore[union-attr]
        return output

    def _come_to_base(self, grad: torch.Tensor) -> None:
        """Autograd hook: a gradient has reached what an output was a view of."""
        if self._training_state == TrainingState.IDLE:
            self._pre_backward(grad)

    def _root_post_backward_final_callback(self) -> None:
        for group in self._all_groups():
            if group.reduce_grads and group.unreduced():
                group._training_state = TrainingState.IDLE  # FSDP2 reduces what isn't POST_BACKWARD
        super()._root_post_backward_final_callback()

    def _all_groups(self) -> list[GuardedGroup]:
        return [group for state in self._state_ctx.all_states for group in state._fsdp_param_groups]


class GuardedGroup(FSDPParamGroup):
    """The group of one `fully_shard` call."""

    def begin(self, state: FSDPState, memory: ReusedMemory, *, keeps_gathered: bool) -> None:
        """Initialise the group; FSDP2 reads its parameters again. `memory`: for parameters that a CPU gathers."""
        self._state, self._keeps_gathered = weakref.ref(cast(GuardedState, state)), keeps_gathered
        self.before_reduction: Callable[[], object] = lambda: None
        """Called before gradients are reduced; if it raises, they stay unreduced."""
        self.take_unreduced: TakeUnreduced | None = None
        self.gathering: Gathering = lambda **_: contextlib.nullcontext()
        """Context in which FSDP2 reads the group's shards; shards with memory of their own need none."""
        self.came_further: Callable[[float], object] | None = None
        """Called when a gathered parameter got its gradient, with the share of the group's elements that have one."""
        self._came_numel = 0
        """Elements of the gathered parameters that got a gradient in this backward."""
        self._followed: set[Any] = set()
        """Parameters (FSDP2's) with a hook that reports their gradient."""
        self.after_write: Callable[[], object] = lambda: None
        """Called when a write to a gathered parameter was detected."""
        self._forwards = 0
        """Depth of forwards nested in one: a method registered as a forward may call the forward."""
        self._versions: dict[Any, int] = {}
        """Version counter of each gathered parameter when it was gathered, by FSDP2's parameter."""
        self._hooked: set[Any] = set()
        """Parameters (FSDP2's) whose gradient passes through the user's hooks."""
        self._written: list[str] = []
        """Names of gathered parameters with a write that was not reported yet."""
        self._reset_sharded_params = False
        for parameter in self.fsdp_params:
            parameter.__class__ = GuardedParameter
            cast(GuardedParameter, parameter).begin(memory)

    def unreduced(self) -> dict[Any, tuple[Any, str]]:
        """Return the place (object, attribute) of each parameter's unreduced gradient or sum, by FSDP2's parameter."""
        places: dict[Any, tuple[Any, str]] = {}
        for parameter in self.fsdp_params:
            held = vars(parameter)
            if "_unsharded_param" not in held:  # never gathered
                continue
            if held.get("unsharded_accumulated_grad") is not None:  # since torch 2.15 `.grad` has the sum
                places[parameter] = parameter, "unsharded_accumulated_grad"
            elif parameter._unsharded_param.grad is not None:
                places[parameter] = parameter._unsharded_param, "grad"
        return places

    @cached_property
    def gathered_numel(self) -> int:
        """Number of elements of all its parameters, gathered."""
        return sum(parameter.sharded_param.numel() for parameter in self.fsdp_params)

    def check_unwritten(self) -> None:
        """Raise InfinityError, once per write, if a parameter was written to while it was gathered."""
        self._note_writes()
        if self._written:
            names, self._written = self._written, []
            raise _written(names)

    def forget_writes(self) -> None:
        self._written.clear()

    # Overrides of FSDP2's methods

    def unshard(self, async_op: bool = False) -> None:
        if self.device.type == "cpu":  # also if it stayed gathered from an earlier micro-batch
            HEAP.trim_if_grown()
        comes = self.unshard_in_backward or self._training_state != TrainingState.PRE_BACKWARD
        reads = comes and self.is_sharded and self._all_gather_result is None and not self._reads_on_use
        with outside_inference_mode(), self._reading(reads):
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        reads = self._all_gather_result is not None and self._reads_on_use
        with outside_inference_mode(), self._reading(reads):
            super().wait_for_unshard()

    @cached_property
    def _reads_on_use(self) -> bool:
        """True if FSDP2 reads the shards when the group is used, as it does on one rank."""
        return getattr(self.mesh_info, "shard_mesh_size", 1) == 1

    def _reading(self, reads: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context for a call of FSDP2, which `reads` the shards."""
        if not reads:
            return contextlib.nullcontext()
        training = self.fsdp_params[0]._module_info.module.training
        return self.gathering(training=training, dtype=self.mp_policy.param_dtype or torch.float32)

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._forwards = self._forwards + 1 if self._training_state == TrainingState.FORWARD else 0
        args, kwargs = super().pre_forward(module, args, kwargs)
        if (state := self._state()) is not None and not self._forwards:
            state.began_at = torch._C._autograd._get_sequence_nr()
        return args, kwargs

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
            if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):  # before torch 2.15
                parameter.accumulate_unsharded_grad_if_needed()
            grad = getattr(*place)
            if _is_plain(grad):
                places[parameter.sharded_param], offered[parameter.sharded_param] = place, grad
                setattr(*place, None)  # so that an exception leaves none of them for the next backward
        for sharded in offered.keys() - self.take_unreduced(offered):
            setattr(*places[sharded], offered[sharded])

    def _reduction_copies(self) -> bool:
        """Return True if a reduction only copies gradients and converts them to fp32."""
        alone = self.mesh_info.mesh.size() == 1 and self.device.type == "cpu" and self.reduce_grads
        exact = self._reduce_dtype in (None, torch.float32) and self.gradient_divide_factor is None
        return alone and exact and self._all_reduce_hook is None and not self.reduce_scatter_unused_params

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = super()._register_post_backward_hook(args, kwargs)
        # Several ranks keep the zeros: a gradient that is missing here may exist on another rank.
        if torch.is_grad_enabled() and self.mesh_info.mesh.size() == 1:
            node: Any = next((tensor.grad_fn for tensor in collect_grad_tensors((args, kwargs))), None)
            if node is not None:  # one node for all of them
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
            elif isinstance(gathered, DTensor):
                gathered._local_tensor._is_param = True  # `to_local` is a view of it
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


def _tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors with a gradient in an output, in the attributes of its objects, too."""
    seen: dict[int, Any] = {}
    tensors: list[torch.Tensor] = []
    waiting = [output]
    while waiting and len(seen) < _OBJECTS_MAX:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            tensors += [value] if value.requires_grad else []
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, deque)):
            waiting += value
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, FunctionType, ModuleType)):
            waiting += vars(value).values()
    return tensors


def _is_plain(grad: torch.Tensor) -> bool:
    is_one = type(grad) in (torch.Tensor, nn.Parameter) and grad.is_contiguous() and not grad.is_neg()
    return is_one and grad.dtype in (torch.float32, torch.bfloat16, torch.float16)


class GuardedParameter(FSDPParam):
    """A parameter of a `GuardedGroup`. On a CPU its gathered memory comes from `ReusedMemory`."""

    def begin(self, memory: ReusedMemory) -> None:
        """Initialise the parameter as never gathered."""
        self._memory = memory
        self._reused: list[torch.Tensor] = []
        """Those of `all_gather_outputs` that have memory there."""
        self.all_gather_outputs = []
        vars(self).pop("_unsharded_param", None)

    def init_all_gather_outputs(
        self, numels: list[int], dtypes: list[torch.dtype], ranks: int, device: torch.device
    ) -> None:
        if device.type == "cpu" and not self.all_gather_outputs:
            made = [self._memory.tensor(ranks * numel, dtype) for numel, dtype in zip(numels, dtypes, strict=True)]
            self._reused = [tensor for tensor in made if self._memory.holds(tensor)]
            self.all_gather_outputs = made
        super().init_all_gather_outputs(numels, dtypes, ranks, device)
        for tensor in self._reused:
            self._memory.fill(tensor)

    def free_unsharded_param(self) -> None:
        if not self._reused:
            super().free_unsharded_param()
            return
        for tensor in (*self.all_gather_outputs, *self._unsharded_inner_tensors):
            if self._memory.holds(tensor):
                self._memory.free(tensor)
            else:
                free_storage(tensor)


def _gradient_came(group: weakref.ref[GuardedGroup], gathered: torch.Tensor) -> None:
    """Autograd hook: a gathered parameter has its gradient."""
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
    """Make `load_state_dict(..., assign=True)` copy, because assigned parameters would not be sharded."""
    local_metadata.pop("assign_to_params_buffers", None)


def _written(names: list[str]) -> InfinityError:
    return InfinityError(
        f"{', '.join(dict.fromkeys(names))} was changed while gathered for a forward or backward, and FSDP2 would "
        "discard the change: change parameters between passes, after model.reshard() if the last pass was a forward "
        "with gradients; a forward can't change its own weights, as Embedding(max_norm=...) does"
    )
