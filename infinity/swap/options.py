"""The paging options: every choice of `SwapManager.page` in one frozen object, which is passed whole.

A field has the name of its config key if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import torch

from infinity.errors import ConfigError
from infinity.optim.adam import MOMENTS as ADAM_MOMENTS
from infinity.schedule.scheme import MasterWeights, Update, UpdateTiming, is_left_to_forward, late_update
from infinity.store.layout import MOMENTS as FIELDS
from infinity.store.layout import Layout, SubGroup

MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""By the name in the config."""


@dataclass(frozen=True, kw_only=True)
class PagingOptions:
    """Where state is stored, in which pieces, and when it is updated. Raises ConfigError for invalid values."""

    sub_group_size: int | None = None
    """Elements that are stepped together, at most. None takes as many as let the pinned budget hold three sub-groups,
    and no more than the default (4 Mi elements)."""
    param_persistence_threshold: int = 100_000
    """Parameters with fewer elements keep their compute parameter in host memory."""
    model_persistence_threshold: int | None = None
    """Elements of all parameters kept because they are small, at most: the first that fit. None: no bound."""
    max_in_cpu: int = 0
    """Elements of this rank's other compute parameters that stay in host memory, first groups first."""
    host_cache_bytes: int = 0
    """Pinned memory that keeps compute parameters and optimizer state from step to step, chosen to save the most
    transfers: see [Note: What stays] in infinity/schedule/residency.py."""
    prefetch_bucket_size: int | None = None
    """Elements of this rank's shards by which reads run ahead of use, at most; the next group is always read. None: as
    far as the pinned budget allows."""
    update: Update = "step"
    """When a parameter is updated. The results are the same.

    "step": in the optimizer's `step`. "forward": just before the parameter is gathered next, or read in any other way.
    This reads 2 bytes less per element, while the model computes. `step` returns at once and takes the gradients;
    `.grad` is then a stand-in that raises on any use. "backward": as soon as its gradient is reduced; one group in four
    before its next forward (`timing_of`). Unless `speculative` is set, a step must follow every backward, with
    unchanged gradients (no clipping, no accumulation) and the learning rate that was set before the backward."""
    speculative: bool = False
    """With "backward": gradients wait, and the step accepts or discards what the backward updated. For steps that
    depend on later events (clipping, overflows, another micro-batch). Takes nearly twice the space on NVMe: see [Note:
    Speculative updates] in infinity/swap/pending_updates.py."""
    master_weights: MasterWeights = "split"
    """"split": if the compute parameter is bf16, the master is that and its remainder: 12 bytes per element, not 14
    (see [Note: Split masters] in infinity/optim/kernel.py). "full": the fp32 master, next to the compute parameter."""
    hold_parameters: bool = False
    """True if all compute parameters stay in host memory, so that only optimizer state is on NVMe."""
    hold_state: bool = False
    """True if masters and optimizer state stay in host memory, so that only compute parameters are on NVMe, if any."""
    keep_on_device: bool = False
    """True if compute parameters also stay on a device with memory of its own: a gather copies none from host memory,
    and each update of a group is followed by a copy of its new ones."""
    keeps_gathered: bool = False
    """True if groups stay gathered from the first micro-batch of a step to the last. None then stays staged."""
    gradient_dtype: torch.dtype = torch.float32
    """The dtype of gradients that wait for their update: 16 bits if these hold gradients exactly, see [Note: Gradients
    in 16 bits] in infinity/swap/waiting_gradients.py. The backward takes such gradients; `.grad` is then a stand-in
    that raises on any use."""
    gradient_bytes_max: int | None = None
    """Host memory (bytes) for waiting gradients. The excess waits on NVMe, an even share of the groups. None: all in
    memory. The backward takes the gradients of a group that waits on NVMe; `.grad` is then a stand-in that raises on
    any use. With "backward" and any bound, reached or not, no group is left to the forward; without `speculative`, no
    gradient waits then."""
    activation_buffer_bytes: int = 0
    """Pinned memory for saved activations on their way to NVMe and back (the config's
    `offload_activations.buffer_bytes`): see `SwapManager.activation_buffers`."""
    moments: tuple[str, ...] = ADAM_MOMENTS
    """The optimizer's per-element state, by name: Adam's two, `("momentum_buffer",)` for SGD, `()` for SGD without
    momentum."""
    moments_dtype: torch.dtype = torch.float32
    """The dtype of moments: fp32; or, for Adam's, bf16 ([Note: Rounded by chance] in csrc/optim/kernels.inc), which
    takes 4 bytes less per element, or uint8, 8-bit codes ([Note: Codes of eight bits] in csrc/optim/codes.inc), which
    takes 6 less. Both change the results."""
    matrices: frozenset[str] = frozenset()
    """Names of the parameters that the optimizer updates as whole matrices. For these it keeps `matrix_moments` instead
    of `moments`: Muon a `("momentum_buffer",)`."""
    matrix_moments: tuple[str, ...] = ()
    tied: frozenset[str] = frozenset()
    """Names of the parameters whose gradients others complete before the step, so they stay in `.grad` until then; the
    compute parameters stay in host memory, as those of small parameters do."""
    updates_are_collective: bool = False
    """True if all ranks update a sub-group together, in collectives, as for sharded `matrices`; `page` sets it. A
    single rank can't run such an update, so none is deferred beyond the step: the step makes all updates that the
    backward doesn't, and "forward" is rejected."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "moments", tuple(self.moments))
        object.__setattr__(self, "matrix_moments", tuple(self.matrix_moments))
        if self.speculative and self.update != "backward":
            raise ConfigError(
                f'speculative updates are made in the backward: set update="backward", not {self.update!r}'
            )
        if self.updates_are_collective and self.update == "forward":
            raise ConfigError(
                'PagingOptions.update "forward" defers updates to the rank that next uses a group, but all ranks '
                'update sharded matrices together: use "backward" or "step"'
            )
        if self.keep_on_device and not self.in_host_memory:
            raise ConfigError("keep_on_device needs the whole model in host memory: set hold_parameters and hold_state")
        names = (*self.moments, *self.matrix_moments)
        if len(names) > len(FIELDS):
            raise ConfigError(
                f"the optimizer keeps {len(names)} numbers per parameter ({', '.join(names)}), but only {len(FIELDS)} "
                "can be paged: use another optimizer, or set the device of offload_param and offload_optimizer to none"
            )
        if self.moments_dtype not in MOMENT_DTYPES.values():
            dtypes = ", ".join(map(str, MOMENT_DTYPES.values()))
            raise ConfigError(f"moments_dtype is {self.moments_dtype}: it must be one of {dtypes}")
        if self.moments_dtype is not torch.float32 and names != ADAM_MOMENTS:
            raise ConfigError(
                f"moments_dtype {self.moments_dtype} is for the two moments of Adam and AdamW, but this optimizer "
                f"keeps {' and '.join(names) or 'nothing'}: use torch.float32"
            )
        _check_one_of("update", self.update, get_args(Update))
        _check_one_of("master_weights", self.master_weights, get_args(MasterWeights))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: it must be at least {least}")

    def timing_of(self, group: int) -> UpdateTiming:
        """Return when a group is updated: see [Note: Balance of the passes] in infinity/schedule/scheme.py."""
        if self.speculative:
            return UpdateTiming.SPECULATIVE
        return UpdateTiming.FORWARD if self._balances and is_left_to_forward(group) else UpdateTiming(self.update)

    @property
    def in_host_memory(self) -> bool:
        """True if nothing is on NVMe: host memory holds all parameters and optimizer state."""
        return self.hold_parameters and self.hold_state

    @property
    def _balances(self) -> bool:
        """True if the forward makes some of the updates and the backward the others, to keep the drive busy in both."""
        may_wait = self.gradient_bytes_max is None and not self.updates_are_collective
        return self.update == "backward" and may_wait and not self.in_host_memory

    @cached_property
    def updates_wait(self) -> bool:
        """True if a step may defer updates."""
        return self.update != "step" and not self.updates_are_collective

    def for_ranks(self, ranks: int) -> PagingOptions:
        """Return these options for a model sharded over so many ranks. Raises ConfigError if that is not possible."""
        return replace(self, updates_are_collective=bool(self.matrices) and ranks > 1)

    @property
    def all_gradients_wait(self) -> bool:
        """True if the gradients of every group wait for the step."""
        return self.speculative or self.update != "backward"

    def stored_in_words(self, *, durable: bool) -> str:
        """Name the bytes on NVMe for an error about missing space. In a `durable` run everything has a second slot."""
        stored = "parameters" if self.hold_state else "parameters and optimizer state"
        if not self.speculative or durable:
            return stored
        return f'{stored}, with second slots that infinity.update "{late_update(self.updates_are_collective)}" avoids'

    def look_ahead_bytes(self, dtype: torch.dtype) -> int | None:
        """Return `prefetch_bucket_size` in bytes, for compute parameters of this dtype."""
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
    """Return True if the backward updates a sub-group for the step to accept, which takes a second slot."""
    left = options._balances and is_left_to_forward(sub.index)
    due = options.timing_of(sub.space) is UpdateTiming.SPECULATIVE and not left
    moves = sub.trained and sub.space != layout.resident_space and sub.nbytes > 0
    return due and moves and not (sub.held or sub.cached or sub.gradient_itemsize)


def second_slot_bytes(layout: Layout, options: PagingOptions) -> int:
    """Return the bytes of the second slots on NVMe."""
    return sum(sub.nbytes for sub in layout.sub_groups if is_speculative(layout, sub, options))
