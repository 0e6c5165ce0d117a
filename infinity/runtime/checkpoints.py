"""Checkpoints of an engine: when one may be written or read, and in which order. Training thread only."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.checkpoint import arena as checkpoint_arena
from infinity.checkpoint import dcp as checkpoint
from infinity.checkpoint.draft import find, holds_checkpoint
from infinity.checkpoint.stored_arena import is_arena_checkpoint
from infinity.errors import CheckpointError, ConfigError
from infinity.fsdp2.materialize import gathered, named_full_tensors
from infinity.fsdp2.names import buffer_names, parameter_names, parameters_by_name
from infinity.fsdp2.scalars import scalar_names
from infinity.fsdp2.sharding import reshard
from infinity.ranks.all_ranks import from_all_ranks, raise_on_all_ranks
from infinity.ranks.peers import Peers
from infinity.runtime.engine_state import EngineState
from infinity.runtime.in_memory import AnyCommits, Updater
from infinity.runtime.pass_guard import PassGuard
from infinity.runtime.resolved import Resolved, compute_device
from infinity.swap import SwapManager

log = logging.getLogger("infinity")


@dataclass(eq=False)
class Checkpoints:
    """Writes and reads those of one engine, whose methods of the same names say what they do. Collectives all."""

    _module: nn.Module
    _optimizer: torch.optim.Optimizer
    _swap: SwapManager | None
    _updater: Updater
    _commits: AnyCommits
    _state: EngineState
    _guard: PassGuard
    _peers: Peers
    _options: Resolved
    saving: checkpoint_arena.Saving | None = None
    """The checkpoint that is being written while training goes on."""

    def save(self, save_dir: str | os.PathLike[str], tag: str, client_state: dict[str, Any], form: str | None) -> None:
        """`Engine.save_checkpoint`."""
        if tag != Path(tag).name or tag.startswith(".") or tag == "latest":
            raise CheckpointError(f"a checkpoint tag is one folder name other than 'latest', got {tag!r}")
        form = form or self._options.config.infinity.checkpoint_format
        swap = self._swap
        if form not in ("dcp", "arena"):
            raise ConfigError(f'a checkpoint\'s format is "dcp" or "arena", got {form!r}')
        if form == "arena" and swap is None:
            raise ConfigError(
                'checkpoints of format "arena" copy what is offloaded, and nothing of this training is: use "dcp", or set '
                'offload_param or offload_optimizer to {"device": "nvme", ...}'
            )
        if form == "arena" and swap is not None and swap.paged.foreign_names:
            raise ConfigError(
                'checkpoints of format "arena" hold all of the model, and frozen weights rest in files of yours: set '
                'infinity.checkpoint_format to "arena" in the config, which copies them to NVMe at the start, or use "dcp"'
            )
        self._peers.check()
        self.finish()
        with raise_on_all_ranks():
            self._guard.check_between_steps()
            self._guard.check_whole()
        self._updater.init_state()
        self._commits.make()
        keep = self._options.config.infinity.checkpoint_keep
        if form == "arena" and swap is not None:
            with raise_on_all_ranks():
                unpaged_state = self._state.capture_unpaged(client_state)
            self.saving = checkpoint_arena.start(save_dir, tag, self._module, swap, unpaged_state, keep=keep)
        else:
            training_state = self._state.capture_training(client_state)
            checkpoint.save(save_dir, tag, self._module, self._optimizer, training_state, keep=keep)

    def finish(self) -> None:
        """`Engine.finish_checkpoint`."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.finish()

    def finish_if_copied(self) -> None:
        """Between two steps: give the checkpoint that is on its way its name, if all of it is there on all ranks."""
        if self.saving is not None and self.saving.finish_if_copied():
            self.saving = None

    def finish_alone(self) -> None:
        """At the end, without the other ranks, which may be elsewhere."""
        if self.saving is not None:
            self.saving.finish_alone()

    def load(
        self, load_dir: str | os.PathLike[str], tag: str | None, *, schedule: bool, verify: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """`Engine.load_checkpoint`, but for the commit of what was loaded."""
        self._peers.check()
        self.finish()
        if tag is None and not any(from_all_ranks(holds_checkpoint(load_dir))):
            if dist.get_rank() == 0:
                log.warning("%s holds no checkpoint (no file named 'latest'): nothing is loaded", load_dir)
            return None, {}
        path = find(load_dir, tag)
        self._commits.try_to_make()  # what was done stays, should loading fail
        self._updater.init_state()
        self._guard.discard_step()
        begin = partial(self._guard.health.tear, "loading a checkpoint")  # all is set by its end, or nothing is right
        module, optimizer = self._module, self._optimizer
        if is_arena_checkpoint(path):
            stored = checkpoint_arena.load(path, module, optimizer, self._swap, begin, verified=verify)
            self._state.restore_unpaged(stored)
        else:
            stored = checkpoint.load(path, module, optimizer, begin, verified=verify)
        self._state.restore_training(stored, schedule=schedule)
        self._guard.health.mend()
        return str(path), stored["client_state"]

    def save_16bit(self, save_dir: str | os.PathLike[str]) -> None:
        """`Engine.save_16bit_model`."""
        with self._guard.entered():
            with raise_on_all_ranks():
                self._guard.check_whole()
            checkpoint.save_16bit(save_dir, self._module, self._options.compute_dtype)

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """`Engine.named_weights`."""
        module, swap = self._module, self._swap
        with self._guard.entered():
            with raise_on_all_ranks():
                self._guard.check_whole()
            reshard(module)
        if swap is None or dtype is not swap.paged.compute_dtype:
            yield from named_full_tensors(module, dtype, device=compute_device())
        else:
            swap.paging.finish_updates()
            parameters, scalars = parameters_by_name(module), scalar_names(module)
            for number in range(len(swap.paged.groups)):
                with raise_on_all_ranks():
                    shards = swap.paging.read_group(number)
                for name in [*shards]:
                    whole = gathered(shards.pop(name), parameters[name].data)
                    yield name, whole.reshape(()) if name in scalars else whole
        for buffer, names in buffer_names(module, persistent=True).items():
            yield names[0], buffer.detach().to(dtype if buffer.is_floating_point() else buffer.dtype)

    def consolidated_16bit(self, *, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
        """The whole model in the dtype of compute, in host memory of rank 0; None elsewhere."""
        with self._guard.entered():
            with raise_on_all_ranks():
                self._guard.check_whole()
            reshard(self._module)
            names = {
                all_names[0]: (all_names, p.requires_grad) for p, all_names in parameter_names(self._module).items()
            }
            consolidated: dict[str, torch.Tensor] = {}
            for name, tensor in named_full_tensors(self._module, self._options.compute_dtype):
                all_names, trained = names[name]
                if dist.get_rank() == 0 and (trained or not exclude_frozen):
                    consolidated.update(dict.fromkeys(all_names, tensor))
            if dist.get_rank() != 0:
                return None
            for buffer, all_names in buffer_names(self._module, persistent=True).items():
                consolidated.update(dict.fromkeys(all_names, buffer.detach().cpu().clone()))
            return consolidated
