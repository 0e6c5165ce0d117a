"""A paged model and all that moves it: what `SwapManager.page` returns, and what FSDP2 and the optimizer enter
through.

One thread at a time: see [Note: Other threads].

[Note: Other threads]
A look at a weight or a state_dict moves bytes through the same pool and the same groups as the training thread, and makes FSDP2
release what is gathered, which that thread may be computing with. So another thread is let in between steps, where nothing is
gathered for a backward that may follow, one at a time, and what begins meanwhile waits. (Autograd has threads of its own, for
devices; what they do is the training thread's.)
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
from torch.distributed.tensor import DTensor

from infinity.aio import PoolPart
from infinity.errors import IN_CHILD, InfinityError
from infinity.fsdp2.experts import Expert, routed_experts
from infinity.fsdp2.guarded import carry_hooks, guard, outside_inference_mode
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


class Paging:
    """Moves the state of one model for as long as its swap manager is open.

    owner: the swap manager, which lives as long as a parameter does. arena_layout: how the state lies in the arena. alone:
    whether the model is sharded over one rank. tensors: what else has leases of the pool.
    """

    def __init__(
        self,
        owner: object,
        machinery: Machinery,
        paged: PagedModel,
        options: PagingOptions,
        arena_layout: ArenaLayout,
        tensors: TensorStore | None,
        *,
        alone: bool,
    ) -> None:
        self.owner, self.paged, self.options = owner, paged, options
        self.arena_layout = arena_layout
        self.host_gradients = machinery.host_gradients
        self.device = machinery.stager.device
        takes_all = options.update == "backward"
        self.waiting_gradients = WaitingGradients(
            paged, machinery.host_gradients, options.gradient_dtype, takes_all=takes_all
        )
        """Where its gradients wait for their update."""
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
        self.parameters = ParameterLap(paged, self.policy, ahead, self.entered, alone=alone)
        self._lock = threading.RLock()
        """Held in whatever another floor sets off here: see `entered`."""
        self._model: weakref.ref[nn.Module] | None = None
        self._thread = threading.get_ident()
        """The training thread: where the last pass began, or the last gather outside a backward."""
        self._backward_follows = False
        """Whether the last forward was one that a backward may follow."""
        self._in_use = self._broken = False
        """Whether somebody is in here now, or an exception ended what he did."""
        _pagings.add(self)

    def take_over(self, groups: Sequence[ShardedGroup], *, resumes: bool) -> dict[nn.Parameter, nn.Parameter]:
        """Move the values of a sharded model into the arena, unless a run that `resumes` has them there; the paged tensors that
        are to take the parameters' place."""
        parameters = [parameter for group in groups for parameter in group.sharded]
        replacements: dict[nn.Parameter, nn.Parameter] = {}
        for shard, source in zip(self.paged.shards, parameters, strict=True):
            local = PagedTensor.over(shard, Field.MASTER, self.parameters, self.device.torch_device)
            shard.filled |= shard.shape.numel() == 0
            values = local_of(source)
            if not shard.filled and not values.is_meta and not resumes:
                local.store(values.detach())
            tensor = DTensor.from_local(
                local,
                source.device_mesh,
                source.placements,
                run_check=False,
                shape=source.shape,
                stride=source.stride(),
            )
            paged = nn.Parameter(tensor, requires_grad=source.requires_grad)
            carry_hooks(source, paged)
            replacements[source] = paged
        return replacements

    def install(
        self, model: nn.Module, groups: Sequence[ShardedGroup], replacements: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        """From now on the model has the paged tensors, and its passes are followed."""
        install(model, dict(replacements))
        name_parameters(model)
        guard(model, self.host_gradients.reused)
        self._model = weakref.ref(model)
        guard_state_dict(model, partial(_entered, weakref.ref(self)))
        for paged, group in zip(self.paged.groups, groups, strict=True):
            paged.module = weakref.ref(cast(nn.Module, group.module))
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
        """Run the updates that an optimizer step left for later: see [Note: Updates that wait] in pending_updates.py.

        Nobody has to: they run by themselves before anybody sees what they change. But before many things are looked at, all
        at once is faster. Raises IoError when a transfer failed: where that was a read, the rest still waits.
        """
        with self.entered():
            self.paged.updates.run_all(self._sub_groups_ahead)

    def end_step(self) -> None:
        """The step is over; the next one's first groups are read as soon as they are written."""
        with self.entered():
            self.policy.end_step()
            if self.paged.stager.timeline is not None:
                self.paged.stager.timeline.steps += 1
            self.parameters.look_ahead()
            self.parameters.start_ahead(update=False)  # the step returns at once

    # Who may be in here.

    @contextlib.contextmanager
    def entered(self, *, gathers: bool = False) -> Iterator[None]:
        """Around whatever the paged tensors and the optimizer set off here, which anybody may end with an exception. `gathers`:
        the caller computes with what it gets, and is the training thread from now on.

        What it leaves is made anew by the next who enters. Raises InfinityError on another thread than the training one while a
        pass is going on: see [Note: Other threads].
        """
        with self._lock:
            if self._in_use:
                yield
                return
            self.check_thread()
            if gathers and not in_backward():
                self._thread = threading.get_ident()
            with outside_inference_mode():
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
        """Around what no other thread may look into: others wait."""
        return self._lock

    def recover(self) -> None:
        """Where no pass is going on: make anew all that one leaves which an exception ended, at whatever line.

        What was staged, gathered or on its way is dropped, what was being written is waited for, and a change of values that
        never ended tears them (infinity/swap/health.py, [Note: What an exception may end]). Gradients and their
        lap stay as they are.
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
        """Let go of all that holds memory, as the model outlives this. To be called with nobody in here: see `alone`."""
        self.waiting_gradients.forget(range(len(self.paged.shards)))
        self.paged.close()
        self.host_gradients.reused.release()
        self._machinery = self._activation_part = self._activation_stager = None

    def leave_to_parent(self) -> None:
        """In a forked child, which has no pinned memory: the values are refused in words, and so are parameters that are
        gathered where they are staged. Another thread of the parent may have held the lock."""
        self._lock = threading.RLock()
        self.paged.health.close(IN_CHILD)
        for group in self.paged.groups:
            if group.may_gather_in_place and group.sharded_module is not None:
                forget_gathered(group.sharded_module)

    def recover_if_broken(self) -> None:
        """Before the end: as `recover`, where somebody is in here or an exception ended what he did."""
        if self._in_use or self._broken:
            self.recover()

    def leave_unfinished_pass(self, *, at_root: bool = False) -> None:
        """Where no pass is going on: make anew what is left of one that an exception ended. Where that was a backward which had
        updated a part of the model, the values are torn.

        `at_root`: the root's own forward begins, perhaps out of another method of it that FSDP2 takes for its forward.
        """
        assert self._model is not None
        model = self._model()
        assert model is not None
        self.check_thread()
        began = self.policy.in_pass or self._in_use or self._broken
        root_may_run = at_root and not began
        unfinished = abandon_unfinished_pass(model, root_may_run=root_may_run)
        if unfinished and self.paged.health.state is Health.PART_STEPPED:
            self.paged.health.tear("a backward that an exception ended")
        if unfinished or began:
            self.recover()

    def check_thread(self) -> None:
        """Raise InfinityError on another thread than the training one while a pass is going on: see [Note: Other threads]."""
        if threading.get_ident() == self._thread or in_backward() or self._thread not in sys._current_frames():
            return  # or that thread has ended
        model = self._model() if self._model is not None else None
        if model is not None and not is_at_rest(model, gathered=not self._backward_follows):
            raise InfinityError(
                "another thread trains the model, whose parameters are paged, and it is in the middle of a step: look at "
                "them (state_dict, a weight, a forward) on that thread, or on this one between steps"
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
        if in_backward() and self.paged.health.state is Health.PART_STEPPED:
            paged = self.paged.groups[group]
            if any(self.paged.shards[index].gradient is GradientState.APPLIED for index in paged.shards):
                raise InfinityError(
                    f"a forward through group {paged.name} in a backward that has updated its weights already: compute it "
                    'before the backward or after step(), or set infinity.update (PagingOptions.update) to "forward"'
                )
        if torch.is_grad_enabled() and not in_backward():
            self.policy.count_forward(group)

    def _end_pass(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if in_backward() or threading.get_ident() != self._thread:
            return
        if is_in_forward(module):  # an exception ended it
            self.leave_unfinished_pass()
            return
        self._backward_follows = torch.is_grad_enabled()
        self.policy.end_pass()

    # Whatever else moves through the same machinery.

    def trace_into(self, timeline: Timeline | None) -> None:
        """Note what happens there from now on."""
        self.paged.stager.timeline = timeline
        if self._activation_stager is not None:
            self._activation_stager.timeline = timeline

    def settle(self) -> None:
        """Run the updates that wait, and wait for what is being written. Raises IoError, InfinityError after a torn step."""
        with self.entered():
            self.finish_updates()
            self.paged.stager.settle_all()
            self.paged.health.check_whole()

    def step_bytes(self, micro_batches: int, gathers: Mapping[str, int] | None) -> tuple[int, int]:
        """See `SwapManager.step_bytes`."""
        moved = self.policy.step_bytes(micro_batches, gathers)
        spilled = self.waiting_gradients.step_bytes(micro_batches)
        return moved[0] + spilled[0], moved[1] + spilled[1]

    def activation_buffers(self) -> tuple[Stager, PoolPart, Arena]:
        """What moves saved activations: a stager over the pinned memory of `PagingOptions.activation_buffer_bytes`, that
        memory, and the arena. Raises InfinityError where that is 0."""
        machinery = self._machinery
        if machinery is None or self._activation_part is None:
            raise InfinityError(
                "no pinned memory was set aside for saved activations: page with PagingOptions(activation_buffer_bytes=...)"
            )
        stager = Stager(machinery.engine, self._activation_part, machinery.arena, self.device)
        stager.timeline = self.paged.stager.timeline
        self._activation_stager = stager
        return stager, self._activation_part, machinery.arena

    def _make_ahead(self) -> DeviceAhead | None:
        """What comes next on its way to the device, where that has memory of its own."""
        if not self.device.is_discrete:
            return None
        return DeviceAhead(self.policy, bytes_max=max(group.compute_bytes for group in self.paged.groups))


_pagings: weakref.WeakSet[Paging] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for paging in list(_pagings):
        with contextlib.suppress(Exception):  # a model in the middle of a pass keeps no other one open
            paging.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _read_experts(paging: weakref.ref[Paging], groups: Sequence[int], numbers: Sequence[int]) -> None:
    """Tokens are routed to the experts of these numbers, among those of a block."""
    alive = paging()
    if alive is not None and not in_backward():
        with alive.entered():
            alive.parameters.read_experts([alive.paged.groups[groups[number]] for number in numbers])


def _forget(paging: weakref.ref[Paging], group: int) -> None:
    """A frozen group was written to where it is staged: it is read again."""
    alive = paging()
    if alive is not None:
        with alive.alone():
            alive.paged.groups[group].forget(alive.paged.stager)


def _entered(paging: weakref.ref[Paging]) -> contextlib.AbstractContextManager[None]:
    """Into what pages a model; one that has outlived it is nobody's."""
    alive = paging()
    return alive.entered() if alive is not None else contextlib.nullcontext()
