"""Checkpoints in the format "arena": the arenas' bytes, copied while training continues. Training thread.

`DIR/TAG/` holds the manifest, and for each rank `rankN.arena` (infinity/checkpoint/snapshot.py) and `rankN.record`. Another
thread copies (infinity/store/arena_copy.py).

[Note: When an arena checkpoint is complete]
`start` returns when copying has begun. A checkpoint gets its name when all ranks have copied, which no rank knows
alone. So it is named at a point that all ranks reach: in the first `step` that finds all ranks done, or in `finish`,
which waits (the next save or load, `finish_checkpoint` and `close` call it). Until then only the hidden folder exists,
and `latest` names the previous checkpoint. The next step logs a failure, and `finish` raises it.

If the program ends before that, or while it handles an error, the other ranks or the process group may be gone. Then
each rank ends alone (`finish_alone`, also at exit). The copying thread of a rank lists the rank's files in a report
next to the checkpoint. Rank 0 waits for these reports, for a bounded time, and names the checkpoint or logs that there
is none. Only an immediate end of the process (SIGKILL, os._exit) loses the checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.checkpoint.checks import check_same_model, failing_as, refusing, verify
from infinity.checkpoint.commits import check_same_groups, record_of
from infinity.checkpoint.draft import Draft, manifest_of
from infinity.checkpoint.manifest import Manifest, stored_file
from infinity.checkpoint.snapshot import Snapshot
from infinity.checkpoint.stored_arena import RankState, StoredArena, arena_name, check_record, prove, record_name
from infinity.checkpoint.training_state import encode
from infinity.errors import CheckpointError
from infinity.fsdp2.names import buffer_names, parameter_names
from infinity.fsdp2.placements import has_whole_rows, place_in_whole
from infinity.fsdp2.sharding import reset
from infinity.ranks.all_ranks import from_all_ranks, raise_on_all_ranks
from infinity.store.arena_copy import Copying
from infinity.store.commit import Record
from infinity.store.files import StoredFile, parse_json, read_small, replace_durably, write_durably
from infinity.store.layout import Field
from infinity.swap import SwapManager
from infinity.units import MIB

log = logging.getLogger("infinity")

_PIECE_NUMEL = 1 << 20
"""Elements assembled at once if the checkpoint's layout is not the model's."""

ALONE_SECONDS_MIN = 60.0
"""Shortest time that rank 0 waits for the other ranks if it ends alone."""


class Saving:
    """A checkpoint that is being copied: see [Note: When an arena checkpoint is complete]. record: this rank's record
    file, written once the arena is copied."""

    def __init__(
        self, draft: Draft, manifest: Manifest, record: StoredFile, copying: Copying | None, keep: int
    ) -> None:
        self._draft, self._keep = draft, keep
        self._manifest = manifest
        self._record = record
        self._copying = copying
        self._rank = dist.get_rank()  # at the end the process group may be gone
        self._pid = os.getpid()
        self._failure: Exception | None = None
        self._ended = self._failure_logged = False
        atexit.register(self._at_exit)

    def finish_if_copied(self) -> bool:
        if self._failure is None and all(from_all_ranks(self._is_copied())):
            try:
                self.finish()
            except Exception as error:
                log.warning("%s", error)
                self._failure = error
        return self._ended and self._failure is None

    def finish(self) -> None:
        """Wait until all ranks have copied, and name the checkpoint. A collective. Raises CheckpointError on every rank
        if any fails."""
        if self._failure is not None:
            raise self._failure
        if self._ended:
            return
        with self._ending():
            with raise_on_all_ranks(), failing_as(self._draft.task):
                files = self._files()
            prove_this_rank = partial(prove, self._draft.folder, [self._rank])
            self._draft.complete_on_all_ranks(self._manifest, files, prove_this_rank, self._keep)

    def finish_alone(self) -> None:
        """Finish if the other ranks may be gone; logs the outcome. Not a collective. Rank 0 waits for the others as
        long as its own copying took, at least a minute."""
        if self._ended:
            return
        task = self._draft.task
        try:
            with self._ending():
                files = self._files()
                if self._rank > 0:
                    return
                files |= self._await_reports()
                self._draft.write_manifest(replace(self._manifest, files=files))
                with self._draft.proving():
                    prove(self._draft.folder, range(self._manifest.ranks))
                self._draft.complete(self._keep)
                log.info("%s is done: the training had ended without waiting for it", task)
        except Exception as error:
            reason = str(error).removeprefix(f"{task} failed ")
            log.error("%s failed, and the training has ended (%s): the previous checkpoint stays", task, reason)
            with contextlib.suppress(OSError):
                _report(self._draft, self._rank, {})

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        self._ended = True
        atexit.unregister(self._at_exit)
        try:
            yield
        except BaseException:
            if self._copying is not None:
                self._copying.cancel()
            self._draft.discard()
            raise

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # not in a forked child
            self.finish_alone()

    def _await_reports(self) -> dict[str, StoredFile]:
        copying_seconds = self._copying.seconds if self._copying is not None else 0.0
        deadline = time.monotonic() + max(ALONE_SECONDS_MIN, copying_seconds)
        all_files: dict[str, StoredFile] = {}
        for rank in range(1, self._manifest.ranks):
            report = self._draft.work_folder / f"rank{rank}.json"
            while not report.exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(f"rank {rank} has not copied its part, or is gone")
                time.sleep(0.1)
            try:
                files = parse_json(dict[str, StoredFile], read_small(report, MIB))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"the report of rank {rank} can't be read ({error})") from None
            if not files or not files.keys() <= {record_name(rank), arena_name(rank)}:
                raise CheckpointError(f"rank {rank} could not copy its part: see its log")
            all_files |= files
        return all_files

    def _is_copied(self) -> bool:
        copying = self._copying
        if copying is not None and copying.error is not None and not self._failure_logged:
            self._failure_logged = True
            log.warning("%s failed (%s): the next save, load or close raises this", self._draft.task, copying.error)
        return copying is None or (copying.ended and copying.error is None)

    def _files(self) -> dict[str, StoredFile]:
        return _files_of(self._rank, self._record, self._copying.join() if self._copying is not None else None)


def start(
    directory: str | os.PathLike[str],
    tag: str,
    model: nn.Module,
    swap: SwapManager,
    unpaged_state: dict[str, Any],
    *,
    keep: int = 0,
) -> Saving:
    """Start to write a checkpoint of the model as it is now. A collective; `keep` and errors as for `dcp.save`.
    `unpaged_state`: this rank's state outside of the arena, as a commit holds it."""
    rank, draft, layout = dist.get_rank(), Draft(directory, tag), swap.paging.arena_layout
    with raise_on_all_ranks(), failing_as(draft.task):
        blob = encode(unpaged_state)
        snapshot = Snapshot(layout)
        swap.paging.settle()
        rank_record = _record_of(swap, snapshot, draft.identity, unpaged_state["global_steps"], blob)
        with refusing(draft.task):
            check_record(rank_record, unpaged_state)
        if rank == 0:
            draft.make(snapshot.nbytes * layout.shards + len(blob) * dist.get_world_size())
    copying: Copying | None = None
    try:
        with raise_on_all_ranks(), failing_as(draft.task):
            content = rank_record.to_bytes()
            record = stored_file(content)

            def write_record(arena: StoredFile | None) -> None:
                write_durably(draft.folder / record_name(rank), content)
                _report(draft, rank, _files_of(rank, record, arena))

            if rank < layout.shards:
                copying = swap.paged.start_copying(draft.folder / arena_name(rank), write_record)
            else:  # a replica: another rank stores the same arena
                write_record(None)
        manifest = manifest_of(model, unpaged_state["global_steps"], tag, "arena")
        return Saving(draft, manifest, record, copying, keep)
    except BaseException:
        if copying is not None:
            copying.cancel()
        draft.discard()
        raise


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    swap: SwapManager | None,
    begin: Callable[[dict[str, Any]], None],
    *,
    verified: bool = True,
) -> dict[str, Any]:
    """Read the checkpoint in the folder `path` into the model and the moments, which must exist. A collective; `begin`,
    `verified` and errors as for `dcp.load`.

    If the arena has the checkpoint's layout, ranges are copied; else the state is assembled from all ranks' files.
    Returns the unpaged state that this rank stored, or rank 0's without random states if there was no such rank.
    """
    with contextlib.ExitStack() as closing:
        with raise_on_all_ranks():
            stored = closing.enter_context(StoredArena(path))
            unpaged_state = stored.unpaged_state(dist.get_rank())
            verify(path, (), everything=verified)
            reset(model)  # gathered values would be stale afterwards
            _check_fits(stored, unpaged_state, model, optimizer)
        begin(unpaged_state)
        with raise_on_all_ranks():
            same = stored.with_layout(swap.paging.arena_layout) if swap is not None else None
            if swap is not None and same is not None:
                _copy_back(same, swap)
            else:
                _assemble(stored, model, optimizer)
    return unpaged_state


def _files_of(rank: int, record: StoredFile, arena: StoredFile | None) -> dict[str, StoredFile]:
    return {record_name(rank): record} | ({arena_name(rank): arena} if arena is not None else {})


def _report(draft: Draft, rank: int, files: dict[str, StoredFile]) -> None:
    """Write a list of the rank's files next to the checkpoint; an empty one means failure."""
    listed = json.dumps({name: asdict(file) for name, file in files.items()})
    replace_durably(draft.work_folder / f"rank{rank}.json", listed.encode())


def _record_of(swap: SwapManager, snapshot: Snapshot, identity: str, step: int, unpaged_state: bytes) -> Record:
    record = record_of(swap, step, unpaged_state, 1, launch=identity, arena=identity)
    commit = replace(record.commit, slots="0" * len(snapshot.sub_groups))  # the file has one slot for each
    layout = replace(record.layout, pattern=(0,), stripe_bytes=1, arena_bytes=snapshot.nbytes)
    return replace(record, commit=commit, layout=layout)


def _check_fits(
    stored: StoredArena, unpaged_state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    theirs = {f"model.{name}": tuple(buffer.shape) for name, buffer in unpaged_state["buffers"].items()}
    for parameter in stored.layout.parameters:
        theirs[f"model.{parameter.name}"] = parameter.shape
        if parameter.trained:
            moments = stored.layout.moments_of(whole=parameter.whole)
            theirs |= {f"optimizer.state.{parameter.name}.{moment}": parameter.shape for moment in moments}
    ours = {f"model.{n[0]}": tuple(b.shape) for b, n in buffer_names(model, persistent=True).items()}
    for param, names in parameter_names(model).items():
        ours[f"model.{names[0]}"] = tuple(param.shape)
        for key in optimizer.state.get(param, {}):
            if key != "step":
                ours[f"optimizer.state.{names[0]}.{key}"] = tuple(param.shape)
    check_same_model(stored.path, ours, theirs)
    try:
        check_record(stored.rank(0).record, unpaged_state)
    except CheckpointError as error:
        raise CheckpointError(f"in {stored.path}, {error}") from None
    names_of = parameter_names(model)
    check_same_groups(
        stored.path, unpaged_state, [[names_of[p][0] for p in group["params"]] for group in optimizer.param_groups]
    )


def _copy_back(state: RankState, swap: SwapManager) -> None:
    paged = swap.paged
    for sub, there, ties in zip(paged.sub_groups, state.snapshot.sub_groups, state.ties, strict=True):
        paged.values.set_sub_group(sub, ties.clone(), partial(state.read_field, there))
    commit = state.record.commit
    for number, (shard, filled, stepped) in enumerate(zip(paged.shards, commit.filled, commit.stepped, strict=True)):
        shard.filled, shard.stepped = filled == "1", stepped == "1"
        if shard.resident is not None:
            for start, numel in _cut(shard.shape.numel()):
                shard.resident[start : start + numel].copy_(state.read(number, Field.MASTER, start, numel))
    swap.stager.settle_all()


@torch.no_grad()
def _assemble(stored: StoredArena, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    by_name = {parameter.name: parameter for parameter in stored.layout.parameters}
    for parameter, names in parameter_names(model).items():
        state = optimizer.state.get(parameter, {})
        moments = stored.layout.moments_of(whole=by_name[names[0]].whole).items()
        fields = {Field.MASTER: parameter.data} | {field: state[name] for name, field in moments if name in state}
        for field, tensor in fields.items():
            assert isinstance(tensor, DTensor)
            local, place = tensor._local_tensor, place_in_whole(tensor)
            row = tensor.shape[1:].numel()
            first = place[0].start * row
            if has_whole_rows(tensor):
                flat = local.view(-1)
                for start, numel in _cut(local.numel()):
                    flat[start : start + numel].copy_(stored.read(names[0], field, first + start, numel))
            else:
                columns = (slice(None), *place[1:])
                for rows in local.split(max(1, _PIECE_NUMEL // row)):
                    whole = stored.read(names[0], field, first, len(rows) * row).view(-1, *tensor.shape[1:])
                    rows.copy_(whole[columns])
                    first += len(rows) * row


def _cut(numel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, _PIECE_NUMEL):
        yield start, min(_PIECE_NUMEL, numel - start)
