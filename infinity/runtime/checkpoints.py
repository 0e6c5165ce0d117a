"""Checkpoints of an engine: when they may be written or read, and in which order. Training thread only."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infinity.checkpoint import arena, dcp
from infinity.checkpoint.draft import find, holds_checkpoint
from infinity.checkpoint.stored_arena import is_arena_checkpoint
from infinity.errors import CheckpointError, ConfigError
from infinity.fsdp2.materialize import gathered, named_full_tensors
from infinity.fsdp2.names import buffer_names, parameter_names, parameters_by_name
from infinity.fsdp2.placements import ranks_alike
from infinity.fsdp2.scalars import scalar_names
from infinity.fsdp2.sharding import reshard
from infinity.ranks.all_ranks import from_all_ranks, raise_on_all_ranks
from infinity.runtime.engine_state import EngineState
from infinity.runtime.parts import Parts
from infinity.runtime.pass_guard import PassGuard
from infinity.runtime.resolved import compute_device

log = logging.getLogger("infinity")


@dataclass(eq=False)
class Checkpoints:
    """Writes and reads the checkpoints of one engine, whose methods of these names have the documentation. All are
    collectives, except `finish_alone`."""

    _parts: Parts
    _state: EngineState
    _guard: PassGuard
    saving: arena.Saving | None = None
    """The checkpoint that is being written during training."""

    def save(self, save_dir: str | os.PathLike[str], tag: str, client_state: dict[str, Any], form: str | None) -> None:
        if tag != Path(tag).name.strip() or tag.startswith(".") or tag == "latest":
            raise CheckpointError(
                f"a checkpoint tag is one folder name other than 'latest', without spaces around it, got {tag!r}"
            )
        parts, infinity = self._parts, self._parts.resolved.config.infinity
        form, keep = form or infinity.checkpoint_format, infinity.checkpoint_keep
        if form not in ("dcp", "arena"):
            raise ConfigError(f'a checkpoint\'s format is "dcp" or "arena", got {form!r}')
        swap = parts.swap if form == "arena" else None
        if form == "arena" and swap is None:
            raise ConfigError(
                'checkpoints of format "arena" copy what is offloaded, and nothing of this training is: use "dcp", or set '
                'offload_param or offload_optimizer to {"device": "nvme", ...}'
            )
        resolved = parts.resolved
        if swap is not None and max(resolved.stages, resolved.tensor_ranks, resolved.expert_ranks) > 1:
            raise ConfigError(
                'checkpoints of format "arena" hold a model of whole parameters, and this one is split: use "dcp"'
            )
        if swap is not None and swap.paged.foreign_names:
            raise ConfigError(
                'checkpoints of format "arena" hold all of the model, and frozen weights stay in files of yours: set '
                'infinity.checkpoint_format to "arena" in the config, which copies them to NVMe at the start, or use "dcp"'
            )
        parts.peers.check()
        self.finish()
        with raise_on_all_ranks():
            self._guard.check_between_steps()
        with parts.updater.whole_state():
            parts.commits.make()
            if swap is not None:
                with raise_on_all_ranks():
                    unpaged_state = self._state.capture_unpaged(client_state)
                self.saving = arena.start(save_dir, tag, parts.module, swap, unpaged_state, keep=keep)
            else:
                state = self._state.capture_training(client_state)
                dcp.save(save_dir, tag, parts.module, parts.optimizer, state, keep=keep, pipe=parts.grid.pipe)

    def finish(self) -> None:
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.finish()

    def finish_if_copied(self) -> None:
        """Between steps: complete the checkpoint that is being written, if its copy has ended on all ranks."""
        if self.saving is not None and self.saving.finish_if_copied():
            self.saving = None

    def finish_alone(self) -> None:
        """At the end: complete it without the other ranks, which may have left."""
        if self.saving is not None:
            self.saving.finish_alone()

    def load(
        self, load_dir: str | os.PathLike[str], tag: str | None, *, schedule: bool, verify: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """`Engine.load_checkpoint`, but commit nothing."""
        parts = self._parts
        parts.peers.check()
        self.finish()
        if tag is None and not any(from_all_ranks(holds_checkpoint(load_dir))):
            if dist.get_rank() == 0:
                log.warning("%s holds no checkpoint (no file named 'latest'): nothing is loaded", load_dir)
            return None, {}
        path = find(load_dir, tag)
        if parts.grid.pipe is not None and is_arena_checkpoint(path):
            raise ConfigError(f'{path} has the format "arena", for a whole model: save with "dcp" to load it in stages')
        parts.commits.try_to_make()  # keeps the last step if loading fails

        def begin(training_state: dict[str, Any]) -> None:
            with raise_on_all_ranks():
                self._state.check_training(training_state, schedule=schedule)
            parts.health.tear("loading a checkpoint")  # until all values are set

        with parts.updater.whole_state():
            self._guard.discard_step()
            if is_arena_checkpoint(path):
                stored = arena.load(path, parts.module, parts.optimizer, parts.swap, begin, verified=verify)
                self._state.restore_unpaged(stored)
            else:
                stored = dcp.load(path, parts.module, parts.optimizer, begin, verified=verify, pipe=parts.grid.pipe)
            self._state.restore_training(stored, schedule=schedule)
            parts.health.mend()
            self._state.forget_steps(stored)
        return str(path), stored["client_state"]

    # The weights alone.

    def save_16bit(self, save_dir: str | os.PathLike[str]) -> None:
        with self._guard.reading():
            dcp.save_16bit(save_dir, self._parts.module, self._parts.resolved.compute_dtype, self._parts.grid.pipe)

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        module, swap = self._parts.module, self._parts.swap
        with self._guard.reading():
            reshard(module)
        if swap is None or dtype is not swap.paged.compute_dtype:
            yield from named_full_tensors(module, dtype, device=compute_device())
        else:
            swap.paging.finish_updates()
            parameters, scalars = parameters_by_name(module), scalar_names(module)
            for number in range(len(swap.paged.groups)):
                with raise_on_all_ranks(ranks_alike(self._parts.grid.data)):
                    shards = swap.paging.read_group(number)
                for name in [*shards]:
                    whole = gathered(shards.pop(name), parameters[name].data)
                    yield name, whole.reshape(()) if name in scalars else whole
        for buffer, names in buffer_names(module, persistent=True).items():
            yield names[0], buffer.detach().to(dtype if buffer.is_floating_point() else buffer.dtype)

    def consolidated_16bit(self, *, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
        """Return the whole model in the compute dtype, in host memory of rank 0; None on other ranks."""
        if self._parts.grid.pipe is not None:
            raise ConfigError(
                "the model is in stages, of which rank 0 has the first: use save_16bit_model, which writes all"
            )
        module, is_first = self._parts.module, dist.get_rank() == 0
        with self._guard.reading():
            reshard(module)
            names = {all_names[0]: (all_names, p.requires_grad) for p, all_names in parameter_names(module).items()}
            consolidated: dict[str, torch.Tensor] = {}
            for name, tensor in named_full_tensors(module, self._parts.resolved.compute_dtype):
                all_names, trained = names[name]
                if is_first and (trained or not exclude_frozen):
                    consolidated.update(dict.fromkeys(all_names, tensor))
            for buffer, all_names in buffer_names(module, persistent=True).items() if is_first else ():
                consolidated.update(dict.fromkeys(all_names, buffer.detach().cpu().clone()))
            return consolidated if is_first else None
