"""A paged model with everything that moves its bytes: the object that `SwapManager.page` returns.

FSDP2, paged tensors and the optimizer enter through it, one thread at a time.

[Note: Other threads]
Reading a weight or a state_dict uses the same pool and groups as the training thread. It also makes FSDP2 release the
gathered groups, which the training thread may be computing with. So another thread may enter only between steps, while
no group is gathered for a backward that may follow. Threads enter one at a time; the others wait. Autograd's own device
threads count as the training thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.aio import PoolPart
from infinity.errors import IN_CHILD, InfinityError
from infinity.fsdp2.experts import Expert, routed_experts
from infinity.fsdp2.guarded import carry_hooks, guard, outside_inference_mode
from infinity.fsdp2.placements import as_sharded
from infinity.fsdp2.sharded_tensor import name_parameters
from infinity.fsdp2.sharding import (
    ShardedGroup,
    abandon_unfinished_pass,
    forget_gathered,
    forget_when_written,
    guard_state_dict,
    in_backward,
    install,
    is_at_rest,
    is_in_forward,
    local_of,
    read_inside,
)
from infinity.fsdp2.vertical import gradients_in
from infinity.schedule.pinned import sub_groups_ahead
from infinity.store.arena import Arena
from infinity.store.commit import ArenaLayout
from infinity.store.layout import Field
from infinity.swap.health import Health
from infinity.swap.machinery import Machinery
from infinity.swap.options import PagingOptions
from infinity.swap.paged_model import PagedModel
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.parameter_lap import DeviceAhead, ParameterLap
from infinity.swap.policy import StagingPolicy
from infinity.swap.shard import GradientState
from infinity.swap.stager import Stager
from infinity.swap.tensor_store import TensorStore
from infinity.swap.timeline import Timeline
from infinity.swap.waiting_gradients import WaitingGradients

_GROUPS_AHEAD = 8
"""That `Paging.read_group` reads ahead, as far as the pool has room."""


class Paging:
    """Moves the state of one model for as long as its swap manager is open.

    owner: the swap manager, which lives as long as any parameter. arena_layout: the layout of the state in the arena.
    tensors: plain tensors, which hold leases of the same pool.
    """

    def __init__(
        self,
        owner: object,
        machinery: Machinery,
        paged: PagedModel,
        options: PagingOptions,
        arena_layout: ArenaLayout,
        tensors: TensorStore | None,
    ) -> None:
        self.owner, self.paged, self.options = owner, paged, options
        self.arena_layout = arena_layout
        self.host_gradients = machinery.host_gradients
        self.device = machinery.stager.device
        takes_all = options.update == "backward"
        self.waiting_gradients = WaitingGradients(
            paged, machinery.host_gradients, options.gradient_dtype, takes_all=takes_all
        )
        self.gradient_hooks: dict[int, RemovableHandle] = {}
        """By shard number: the hook through which FSDP2 reports its gradient to the newest optimizer over it."""
        self._tensors = tensors
        self._machinery: Machinery | None = machinery
        room_bytes = machinery.pool.nbytes - paged.layout.cached_bytes - options.activation_buffer_bytes
        self._activation_part: PoolPart | None = None
        if options.activation_buffer_bytes:
            self._activation_part = PoolPart(
                machinery.stager.make_room(options.activation_buffer_bytes, "saved activations")
            )
        self._activation_stager: Stager | None = None
        spilling = max(
            (sub.gradient_bytes for sub in paged.layout.sub_groups), default=0
        )  # a lease in the middle of a backward
        look_ahead_bytes = options.look_ahead_bytes(paged.compute_dtype)
        self.policy = StagingPolicy(paged, options, room_bytes - spilling, look_ahead_bytes)
        self._sub_groups_ahead = sub_groups_ahead(
            room_bytes - self.policy.units.staying_bytes, paged.layout.sub_group_bytes_max
        )
        ahead = self._make_ahead()
        self.parameters = ParameterLap(paged, self.policy, ahead, self.entered)
        self._lock = threading.RLock()
        """Held during every call from FSDP2, paged tensors and the optimizer: see `entered`."""
        self._model: weakref.ref[nn.Module] | None = None
        self._thread = threading.get_ident()
        """The training thread: the thread of the last pass, or of the last gather outside a backward."""
        self._backward_follows = False
        """True if a backward may follow the last forward."""
        self._in_use = self._broken = False
        """`_in_use`: true while a call is running. `_broken`: true after an exception interrupted one."""
        _pagings.add(self)

    def take_over(self, groups: Sequence[ShardedGroup], *, resumes: bool) -> dict[nn.Parameter, nn.Parameter]:
        """Move the values of a sharded model into the arena, and return the paged tensor that replaces each parameter.
        `resumes`: the arena already holds the values of an earlier run, and nothing is moved."""
        parameters = [parameter for group in groups for parameter in group.sharded]
        replacements: dict[nn.Parameter, nn.Parameter] = {}
        for shard, source in zip(self.paged.shards, parameters, strict=True):
            local = PagedTensor.over(shard, Field.MASTER, self.entered, self.device.torch_device)
            shard.filled |= shard.shape.numel() == 0
            values = local_of(source)
            if not shard.filled and not values.is_meta and not resumes:
                local.store(values.detach())
            paged = nn.Parameter(as_sharded(local, source), requires_grad=source.requires_grad)
            carry_hooks(source, paged)
            replacements[source] = paged
        return replacements

    def install(
        self, model: nn.Module, groups: Sequence[ShardedGroup], replacements: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        """Replace the model's parameters by the paged tensors, and register the hooks that follow its passes."""
        install(model, dict(replacements), _has_values)
        name_parameters(model)
        guard(model, self.host_gradients.reused)
        self._model = weakref.ref(model)
        guard_state_dict(model, partial(_entered, weakref.ref(self)))
        for paged, group in zip(self.paged.groups, groups, strict=True):
            paged.module = weakref.ref(cast(nn.Module, group.module))
            read_inside(group.module, partial(self.parameters.gathering, paged))
            paged.is_routed = isinstance(group.module, Expert) and paged.is_frozen
            if paged.may_gather_in_place and paged.is_frozen:
                forget_when_written(group.module, partial(_forget, weakref.ref(self), paged.index))
        index_of = {cast(nn.Module, group.module): index for index, group in enumerate(groups)}
        for experts in routed_experts(model):
            experts.coming = partial(_read_experts, weakref.ref(self), [index_of[expert] for expert in experts])
        if self.options.update == "backward":
            for number, group in enumerate(groups):
                cast(nn.Module, group.module).register_forward_pre_hook(partial(self._count_forward, number))
        model.register_forward_pre_hook(self._begin_pass, prepend=True)  # before FSDP2 gathers
        model.register_forward_hook(self._end_pass, always_call=True)

    # Between steps.

    def finish_updates(self) -> None:
        """Run the updates that an optimizer step deferred: see [Note: Updates that wait] in pending_updates.py.

        This is optional, because each update runs by itself before its values are used, but faster before many of them
        are read. Raises IoError if a transfer failed; after a failed read, the remaining updates wait.
        """
        with self.entered():
            self.paged.updates.run_all(self._sub_groups_ahead)

    def end_step(self) -> None:
        """End an optimizer step. The next step's first groups are read as soon as their writes have ended."""
        with self.entered():
            self.policy.end_step()
            if self.paged.stager.timeline is not None:
                self.paged.stager.timeline.steps += 1
            self.parameters.look_ahead()
            self.parameters.start_ahead(update=False)  # the step returns at once

    # Access control.

    @contextlib.contextmanager
    def entered(self, *, gathers: bool = False) -> Iterator[None]:
        """Guard every entry from paged tensors and the optimizer; any of them may raise.

        The first entry after an exception calls `recover`. `gathers`: the caller computes with the result, so its
        thread becomes the training thread (outside a backward). Raises InfinityError if another thread enters while the
        training thread is in a pass: see [Note: Other threads].
        """
        if torch.is_inference_mode_enabled():
            with outside_inference_mode(), self.entered(gathers=gathers):
                yield
            return
        with self._lock:
            if self._in_use:
                yield
                return
            if threading.get_ident() != self._thread:
                self.check_thread()
                if gathers and not in_backward():
                    self._thread = threading.get_ident()
            if self._broken:
                self.recover()
            self._in_use = True
            try:
                yield
            except BaseException:
                self._broken = True
                self._in_use = False
                raise
            self._in_use = False

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """Return the lock that makes all other threads wait."""
        return self._lock

    def recover(self) -> None:
        """Rebuild the state that a pass left when an exception interrupted it at any line. No pass may be running.

        Drops all staged, gathered and in-flight data, and waits for writes. Tears the values if a change of them never
        ended ([Note: What an exception may end] in health.py). Gradients and their states in the lap are kept.
        """
        with self._lock:
            if self.paged.health.state is not Health.CLOSED:
                leases = [*self.paged.leases, *(self._tensors.leases if self._tensors is not None else ())]
                if self._activation_part is not None:
                    leases.append(self._activation_part.lease)
                self.paged.stager.recover(leases)
                self.paged.recover()
                self.policy.recover()
                self.parameters.recover()
            self._in_use = self._broken = False

    def close(self) -> None:
        """Release everything that holds memory, because the model outlives this object. The caller holds `alone`."""
        self.waiting_gradients.forget(range(len(self.paged.shards)))
        self.paged.close()
        self.host_gradients.reused.release()
        self._machinery = self._activation_part = self._activation_stager = None

    def leave_to_parent(self) -> None:
        """Disable this object in a forked child, which has no pinned memory: any use of values raises, and parameters
        that are gathered in place lose their memory. Replaces the lock, which another thread of the parent may hold."""
        self._lock = threading.RLock()
        self.paged.health.close(IN_CHILD)
        for group in self.paged.groups:
            if group.may_gather_in_place and group.sharded_module is not None:
                forget_gathered(group.sharded_module)

    def recover_if_broken(self) -> None:
        """Call `recover` before closing, if a call is running or an exception interrupted one."""
        if self._in_use or self._broken:
            self.recover()

    def leave_unfinished_pass(self, *, at_root: bool = False) -> None:
        """Clean up after a pass that an exception interrupted. No pass may be running.

        Tears the values if that pass was a backward which had updated some of the groups. `at_root`: the root's own
        forward is about to begin, perhaps inside another method that FSDP2 treats as its forward.
        """
        assert self._model is not None
        model = self._model()
        assert model is not None
        self.check_thread()
        began = self.policy.in_pass or self._in_use or self._broken
        root_may_run = at_root and not began
        unfinished = abandon_unfinished_pass(model, root_may_run=root_may_run)
        if unfinished and self.paged.health.state is Health.PART_STEPPED:
            self.paged.health.tear("a backward that an exception interrupted")
        if unfinished or began:
            self.recover()

    def check_thread(self) -> None:
        """Raise InfinityError on any other thread while the training thread is in a pass: see [Note: Other threads]."""
        if threading.get_ident() == self._thread or in_backward() or self._thread not in sys._current_frames():
            return  # or that thread has ended
        model = self._model() if self._model is not None else None
        if model is not None and not is_at_rest(model, gathered=not self._backward_follows):
            raise InfinityError(
                "the model is being trained on another thread: access its parameters (state_dict, a weight, a forward) "
                "from that thread or between steps"
            )

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if in_backward():
            return
        with self._lock:
            self.check_thread()
            self._thread = threading.get_ident()
            self.leave_unfinished_pass(at_root=True)
            self.paged.health.check_whole()  # before FSDP2 begins a pass that is then refused at its first gather
            trains = module.training and torch.is_grad_enabled()
            self.policy.begin_pass(trains, *gradients_in(args))

    def _count_forward(self, group: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():
            if torch.is_grad_enabled():
                self.policy.count_forward(group)
        elif self.paged.health.state is Health.PART_STEPPED:
            paged = self.paged.groups[group]
            if any(self.paged.shards[index].gradient is GradientState.APPLIED for index in paged.shards):
                raise InfinityError(
                    f"forward through group {paged.name} in a backward that has already updated its weights: run it "
                    'before the backward or after step(), or set infinity.update (PagingOptions.update) to "forward"'
                )

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if in_backward() or threading.get_ident() != self._thread:
            return
        if is_in_forward(module):  # an exception ended it
            self.leave_unfinished_pass()
            return
        self._backward_follows = torch.is_grad_enabled()
        self.policy.end_pass()

    # Shared machinery.

    def trace_into(self, timeline: Timeline | None) -> None:
        """Record events in `timeline` from now on; None stops recording."""
        self.paged.stager.timeline = timeline
        if self._activation_stager is not None:
            self._activation_stager.timeline = timeline

    def settle(self) -> None:
        """Run the deferred updates, then wait for all writes. Raises IoError, and InfinityError after a torn step."""
        with self.entered():
            self.finish_updates()
            self.paged.stager.settle_all()
            self.paged.health.check_whole()

    def give_back_memory(self) -> None:
        """As `settle`, between steps; after it nothing is staged, gathered or on its way, and nothing but the pinned pool has
        memory for that."""
        self.settle()
        self.recover()
        self.host_gradients.reused.release()

    def read_group(self, number: int) -> dict[str, torch.Tensor]:
        """The compute parameters of a group's shards on the device, by name, in memory of their own. Next groups are read
        meanwhile. Raises IoError, InfinityError."""
        paged = self.paged
        group, stager = paged.groups[number], paged.stager
        with self.entered():
            paged.health.check_whole()
            lease = stager.acquire(group.chunk) if group.chunk is not None else None
            try:
                following = paged.groups[number + 1 : number + 1 + _GROUPS_AHEAD]
                stager.want([after.chunk for after in following if after.chunk is not None])
                if group.chunk is not None:
                    stager.io.verify(group.chunk)
                source = lease.view(torch.uint8) if lease is not None else group.cached
                shards = {}
                for shard in paged.shards[group.shards.start : group.shards.stop]:
                    elements = shard.resident
                    if elements is None:
                        assert source is not None
                        elements = shard.elements(source.view(torch.uint8))
                    elements = elements[: shard.shape.numel()].view(shard.shape)
                    shards[shard.name] = elements.to(self.device.torch_device, paged.compute_dtype, copy=True)
                return shards
            finally:
                if group.chunk is not None:
                    stager.release(group.chunk, keep=group.stays)

    def step_bytes(self, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        """See `SwapManager.step_bytes`."""
        moved = self.policy.step_bytes(micro_batches, gathers)
        spilled = self.waiting_gradients.step_bytes(micro_batches)
        return moved[0] + spilled[0], moved[1] + spilled[1]

    def activation_buffers(self) -> tuple[Stager, PoolPart, Arena]:
        """Return the parts that move saved activations: a stager, its pinned memory, and the arena. The memory has
        `PagingOptions.activation_buffer_bytes`. Raises InfinityError if that is 0."""
        machinery = self._machinery
        if machinery is None or self._activation_part is None:
            raise InfinityError(
                "no pinned memory for saved activations: page with PagingOptions(activation_buffer_bytes=...)"
            )
        stager = Stager(machinery.engine, self._activation_part, machinery.arena, self.device)
        stager.timeline = self.paged.stager.timeline
        self._activation_stager = stager
        return stager, self._activation_part, machinery.arena

    def _make_ahead(self) -> DeviceAhead | None:
        """Return the planner of early copies to the device, if the device has memory of its own."""
        if not self.device.is_discrete:
            return None
        return DeviceAhead(self.policy, bytes_max=max(group.compute_bytes for group in self.paged.groups))


_pagings: weakref.WeakSet[Paging] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for paging in list(_pagings):
        with contextlib.suppress(Exception):  # a model in the middle of a pass keeps no other one open
            paging.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _has_values(parameter: nn.Parameter) -> bool:
    local = local_of(parameter)
    return local._shard.filled if isinstance(local, PagedTensor) else not local.is_meta


def _read_experts(paging: weakref.ref[Paging], groups: Sequence[int], numbers: Sequence[int]) -> None:
    """Start to read the experts that a router has chosen: `numbers` among those of one block, in the order of use."""
    alive = paging()
    if alive is not None and not in_backward():
        with alive.entered():
            alive.parameters.read_experts([alive.paged.groups[groups[number]] for number in numbers])


def _forget(paging: weakref.ref[Paging], group: int) -> None:
    """Drop the staged bytes of a frozen group that was written to in place, so that it is read again."""
    alive = paging()
    if alive is not None:
        with alive.alone():
            alive.paged.groups[group].forget(alive.paged.stager)


def _entered(paging: weakref.ref[Paging]) -> contextlib.AbstractContextManager[None]:
    """Enter the paging of a model; do nothing if the model has outlived it."""
    alive = paging()
    return alive.entered() if alive is not None else contextlib.nullcontext()
