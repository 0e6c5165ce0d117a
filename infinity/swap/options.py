"""How a model is paged: every choice of `SwapManager.page` in one frozen object, which is passed whole.

A field has the name of its config key wherever there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

import torch

from infinity.errors import ConfigError
from infinity.optim.adam import MOMENTS as ADAM_MOMENTS
from infinity.schedule.scheme import MasterWeights, Update, UpdateTiming, is_left_to_forward, late_update
from infinity.store.layout import MOMENTS as FIELDS
from infinity.store.layout import Layout, SubGroup

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""By the config's name."""


@dataclass(frozen=True, kw_only=True)
class PagingOptions:
    """What rests where, in which pieces, and when it is updated. Raises ConfigError for a value that can't be."""

    sub_group_size: int | None = None
    """At most this many elements are stepped together. None takes as many as the pinned budget holds three of, and never more
    than the default (4 Mi elements)."""
    param_persistence_threshold: int = 100_000
    """Parameters of fewer elements keep their compute parameter in host memory."""
    model_persistence_threshold: int | None = None
    """An upper bound (elements) on all parameters that stay because they are small: the first that fit. None is no bound."""
    max_in_cpu: int = 0
    """Besides the small ones, so many elements of this rank's compute parameters stay in host memory, first groups first."""
    host_cache_bytes: int = 0
    """So many bytes of the pinned memory keep compute parameters and optimizer state from step to step, those that spare the
    most transfers: see [Note: What stays] in infinity/schedule/residency.py."""
    prefetch_bucket_size: int | None = None
    """Reads run ahead of use by at most so many elements of this rank's shards; the next group is always read. None is as far
    as the pinned budget allows."""
    update: Update = "step"
    """When a parameter is updated; the numbers are the same.

    "step": in the optimizer's `step`.
    "forward": just before the parameter is gathered next, or looked at in any other way. This reads 2 bytes less per element,
    while the model computes. `step` returns at once and takes the gradients: `.grad` is None after it.
    "backward": as soon as its gradient is reduced; but a fourth before its next forward, as `timing_of` says. This is
    for loops in which a step follows every backward, with the gradients as they are (no clipping, no accumulation) and with the
    learning rate that was set before the backward, unless it is `speculative`."""
    speculative: bool = False
    """With "backward": gradients wait all the same, and the step accepts what the backward updated, or discards it. For what is
    not known in the backward (clipping, overflows, another micro-batch). Nearly twice the space on NVMe: see [Note: Speculative
    updates] in infinity/swap/pending_updates.py."""
    master_weights: MasterWeights = "split"
    """"split": where the compute parameter is bf16, the master is that and its remainder: 12 bytes per element instead of 14.
    See [Note: Split masters] in infinity/optim/kernel.py. "full": the whole fp32 master lies beside it."""
    hold_parameters: bool = False
    """Whether all compute parameters stay in host memory, so that only optimizer state rests on NVMe."""
    hold_state: bool = False
    """Whether masters and optimizer state stay in host memory, so that only compute parameters rest on NVMe; or nothing, with
    `hold_parameters`."""
    keep_on_device: bool = False
    """Whether compute parameters stay on the device, too, where that has memory of its own: a gather copies none from host
    memory, and an update of a group is followed by a copy of its new ones."""
    gradient_dtype: torch.dtype = torch.float32
    """In which gradients wait for their update. One of 16 bits is for where it holds all of a gradient: see [Note: Gradients in
    16 bits] in infinity/swap/waiting_gradients.py. The backward takes such gradients; `.grad` refuses to be used after it."""
    gradient_bytes_max: int | None = None
    """Host memory (bytes) in which gradients wait; what doesn't fit waits on NVMe, an even share of the groups. None keeps all
    of them in memory. The backward takes the gradients of a group that waits on NVMe, and `.grad` refuses to be used after it.
    With "backward", no group is left to the forward where there is a bound, be it reached or not: without `speculative`, no
    gradient waits then."""
    activation_buffer_bytes: int = 0
    """So many bytes of the pinned memory are for saved activations on their way to NVMe and back (the config's
    `offload_activations.buffer_bytes`): see `SwapManager.activation_buffers`."""
    moments: tuple[str, ...] = ADAM_MOMENTS
    """What the optimizer keeps of each element, by the names in its `state`: Adam's two, `("momentum_buffer",)` for SGD, `()`
    for SGD without momentum."""
    moments_dtype: torch.dtype = torch.float32
    """In which it keeps them: fp32; or, for Adam's, bf16 ([Note: Rounded by chance] in csrc/optim/kernels.inc), which takes 4
    bytes less per element, or uint8, codes of 8 bits ([Note: Codes of eight bits] in csrc/optim/codes.inc), which takes 6 less.
    Both change the numbers."""
    matrices: frozenset[str] = frozenset()
    """The parameters, by name, that the optimizer updates as whole matrices. Of these it keeps `matrix_moments` instead of
    `moments`: Muon a `("momentum_buffer",)`."""
    matrix_moments: tuple[str, ...] = ()
    updates_are_collective: bool = False
    """Whether all ranks update a sub-group together, in collectives, as those of `matrices` that are sharded: `page` sees to
    it. Nobody can run such an update by himself, so nothing is left beyond the step: what the backward doesn't update, the step
    does, and "forward" can't be."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "moments", tuple(self.moments))
        object.__setattr__(self, "matrix_moments", tuple(self.matrix_moments))
        if self.speculative and self.update != "backward":
            raise ConfigError(
                f'speculative updates are made in the backward: set update="backward", not {self.update!r}'
            )
        if self.updates_are_collective and self.update == "forward":
            raise ConfigError(
                'PagingOptions.update "forward" leaves updates to whoever gathers a group or looks at it, and matrices that '
                'are sharded are updated by all ranks together: use "backward" or "step"'
            )
        if self.keep_on_device and not self.in_host_memory:
            raise ConfigError("keep_on_device is for models that host memory holds: set hold_parameters and hold_state")
        names = (*self.moments, *self.matrix_moments)
        if len(names) > len(FIELDS):
            raise ConfigError(
                f"the optimizer keeps {len(names)} numbers of each parameter ({', '.join(names)}), and "
                f"{len(FIELDS)} can be paged: use another one, or set the device of offload_param and offload_optimizer to none"
            )
        if self.moments_dtype not in MOMENT_DTYPES.values():
            dtypes = ", ".join(map(str, MOMENT_DTYPES.values()))
            raise ConfigError(f"moments_dtype is {self.moments_dtype}: it must be one of {dtypes}")
        if self.moments_dtype is not torch.float32 and names != ADAM_MOMENTS:
            raise ConfigError(
                f"moments_dtype {self.moments_dtype} is for the two moments of Adam and AdamW, and this optimizer keeps "
                f"{' and '.join(names) or 'nothing'}: use torch.float32"
            )
        _check_one_of("update", self.update, get_args(Update))
        _check_one_of("master_weights", self.master_weights, get_args(MasterWeights))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: it must be at least {least}")

    def timing_of(self, group: int) -> UpdateTiming:
        """When the group of that number is updated: see [Note: Balance of the passes] in infinity/schedule/scheme.py."""
        if self.speculative:
            return UpdateTiming.SPECULATIVE
        return UpdateTiming.FORWARD if self._balances and is_left_to_forward(group) else UpdateTiming(self.update)

    @property
    def in_host_memory(self) -> bool:
        """True if nothing is on NVMe: host memory has all parameters and optimizer state."""
        return self.hold_parameters and self.hold_state

    @property
    def _balances(self) -> bool:
        """True if the forward makes some of the updates while the backward makes the others, for the sake of the drive."""
        may_wait = self.gradient_bytes_max is None and not self.updates_are_collective
        return self.update == "backward" and may_wait and not self.in_host_memory

    @property
    def updates_wait(self) -> bool:
        """Whether a step may leave updates for later."""
        return self.update != "step" and not self.updates_are_collective

    def for_ranks(self, ranks: int) -> PagingOptions:
        """The same for a model that is sharded over so many ranks. Raises ConfigError for what can't be there."""
        return replace(self, updates_are_collective=bool(self.matrices) and ranks > 1)

    @property
    def all_gradients_wait(self) -> bool:
        """Whether the gradients of every group wait for the step."""
        return self.speculative or self.update != "backward"

    def stored_in_words(self, *, durable: bool) -> str:
        """What rests on NVMe, for an error about missing space; in a `durable` run everything has a second slot."""
        stored = "parameters" if self.hold_state else "parameters and optimizer state"
        if not self.speculative or durable:
            return stored
        return f'{stored}, with the second slot that infinity.update "{late_update(self.updates_are_collective)}" does without'

    def look_ahead_bytes(self, dtype: torch.dtype) -> int | None:
        """`prefetch_bucket_size` in bytes, where compute parameters have this dtype."""
        return None if self.prefetch_bucket_size is None else self.prefetch_bucket_size * dtype.itemsize


_LEAST: Mapping[str, int] = {
    "sub_group_size": 1,
    "param_persistence_threshold": 0,
    "model_persistence_threshold": 0,
    "max_in_cpu": 0,
    "host_cache_bytes": 0,
    "prefetch_bucket_size": 0,
    "gradient_bytes_max": 0,
    "activation_buffer_bytes": 0,
}


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(known)}")


def is_speculative(layout: Layout, sub: SubGroup, options: PagingOptions) -> bool:
    """Whether the backward updates a sub-group for the step to accept, which takes another slot."""
    left = options._balances and is_left_to_forward(sub.index)
    due = options.timing_of(sub.space) is UpdateTiming.SPECULATIVE and not left
    moves = sub.trained and sub.space != layout.resident_space and sub.nbytes > 0
    return due and moves and not (sub.held or sub.cached or sub.gradient_itemsize)


def second_slot_bytes(layout: Layout, options: PagingOptions) -> int:
    """What the second slots take on NVMe."""
    return sum(sub.nbytes for sub in layout.sub_groups if is_speculative(layout, sub, options))
