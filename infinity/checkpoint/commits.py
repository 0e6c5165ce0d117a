"""Floor 10. Commits of a durable run: when a step's state is made to stay, and how a run goes on from it. Training thread only.

[Note: When a step is committed]
A step's updates may run after `step` returns, in the next forward, and its last writes go on beside the next pass. So `step`
only notes what lies outside of the arena (counters, schedule, loss scale, random numbers, what the user gave), as it is then,
and the commit is pending. It is made where the first write of the next step could follow: at the start of the next `backward`
where that updates, else of the next `step`. By then the writes have drained behind the passes, and what is waited for is the
drive's own cache and a small file. Both places are the same on all ranks, so all commit the same steps.

[Note: What can be gone on from]
A commit takes the place of the one before it, so it counts only when it is known that a run can go on from it. What a resume
asks of a record is asked of it before: `check_unpaged_state` when it is noted and again, with `check_arena`, when it is
made; and the file is read back. All ranks hear how that went before any removes the older one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from infinity.checkpoint.checks import check_resumable
from infinity.checkpoint.training_state import decode, encode
from infinity.errors import CheckpointError, ConfigError, InfinityError, StoreError, in_words
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.store import DurableRun
from infinity.store.commit import SUM_BYTES, Record, bits
from infinity.swap import SwapManager
from infinity.swap.paged_model import PagedModel
from infinity.swap.timeline import measured
from infinity.units import PAGE_BYTES

log = logging.getLogger("infinity")

_UNPAGED_KEYS = frozenset(
    {
        "global_steps",
        "skipped_steps",
        "loss_scale",
        "lr_scheduler",
        "client_state",
        "rng",
        "param_groups",
        "steps",
        "buffers",
    }
)


@dataclass(frozen=True)
class Training:
    """What must be alike where a training goes on: its number of parameter groups, its buffers' shapes by name, and whether its
    optimizer counts the steps of each parameter."""

    groups: int
    buffers: Mapping[str, tuple[int, ...]]
    counts_steps: bool


@dataclass(frozen=True)
class _Pending:
    """A step that is to be committed, and what lay outside of the arena at its end: as values and as bytes."""

    step: int
    training: Training
    unpaged_state: dict[str, Any]
    stored: bytes


class Commits:
    """Makes the commits of one run, whose files `open_run` opened and whose model `swap` has paged."""

    def __init__(self, run: DurableRun, swap: SwapManager) -> None:
        self._run = run
        self._swap = swap
        self._pending: _Pending | None = None
        if run.resumed is not None:
            self._note_way_back(run.resumed.commit.step)

    def check_storable(self, client_state: dict[str, Any]) -> None:
        """Raise CheckpointError on all ranks where that of one can't be stored, before the step that it belongs to is taken. A
        collective."""
        with raise_on_all_ranks():
            encode(client_state)

    def note(self, step: int, training: Training, unpaged_state: Callable[[], dict[str, Any]]) -> None:
        """The step is over: what it was is to be committed. A collective.

        Raises CheckpointError on all ranks where the unpaged state of one can't be stored, or couldn't be gone
        on from; then what was noted before is still to be committed, on all of them.
        """
        with raise_on_all_ranks():
            found = unpaged_state()
            stored = encode(found)
            _check_keys(found, step)
            check_unpaged_state(found, training, self._stepped)
        self._pending = _Pending(step, training, found, stored)

    @property
    def pending_step(self) -> int | None:
        """The step that is to be committed; None where none is."""
        return self._pending.step if self._pending is not None else None

    @property
    def _stepped(self) -> set[str]:
        """The parameters that have moments."""
        return {shard.name for shard in self._swap.paged.shards if shard.stepped}

    def try_to_make(self) -> None:
        """Commit what was noted last before its values are set anew; say where that can't be done. A collective."""
        try:
            self.make()
        except InfinityError as error:
            log.warning("the last step is not committed: %s", error)

    def make(self) -> None:
        """Commit what was noted last, if it isn't yet. A collective.

        Raises on all ranks where it fails on one; the commit before it is still there then.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with measured(self._swap.timeline, "stall", f"commit of step {pending.step}"):
            sequence = self._write_together(pending)
            self._note_way_back(pending.step)
            with raise_on_all_ranks():
                self._leave_one_record(sequence)

    def _write_together(self, pending: _Pending) -> int:
        """On return all ranks have their records, which all can go on from, so that what those before speak of may be written
        over. Returns their number.

        Where one couldn't make its own, all hear of it, and none keeps it. Where it can't be heard what the others did, because
        one of them died, they may be past this point already: then both records stay, and nothing is written any more.
        """
        record = None
        try:
            with raise_on_all_ranks():
                record = self._write(pending)
                self._check_restorable(record, pending)
            self._swap.paged.mark_committed()  # from here on, what all have a record of is written over by nobody
        except BaseException as error:
            if record is None or isinstance(error, InfinityError):
                self._leave_one_record(self._run.sequence)
            else:
                self._swap.paged.health.seal(f"the commit of step {pending.step} ({in_words(error)})")
            raise
        return record.commit.sequence

    def _check_restorable(self, record: Record, pending: _Pending) -> None:
        """Raise CheckpointError unless the record is on the drive, and a run can go on from it."""
        check_arena(record, self._swap.paged)
        check_unpaged_state(pending.unpaged_state, pending.training, self._stepped)
        self._run.read_back(record)

    def _leave_one_record(self, sequence: int) -> None:
        """Remove the record before this one, or one after it that not all ranks could make."""
        try:
            self._run.leave_one(sequence)
        except OSError as error:  # what is written next could be what a record speaks of
            why = f"removing an old record from {self._run.folders[0].path} ({error.strerror})"
            self._swap.paged.health.seal(why)
            raise StoreError(error.errno or 0, f"{why} failed: nothing is written any more, start again") from None

    def _write(self, pending: _Pending) -> Record:
        paged = self._swap.paged
        paged.check_whole()
        try:
            self._swap.flush()
        except OSError as error:  # a second flush may report success for what the first has lost
            paged.health.seal(f"the flush of step {pending.step} ({error})")
            raise
        counts, ties = packed_ties(self._swap)
        commit = self._run.next_commit(
            step=pending.step,
            slots=bits([sub.current_slot for sub in paged.sub_groups]),
            filled=bits([shard.filled for shard in paged.shards]),
            stepped=bits([shard.stepped for shard in paged.shards]),
            ties=counts,
        )
        record = Record(commit, self._swap.arena_layout, ties, pending.stored, paged.page_sums())
        try:
            self._run.write(record)
        except OSError as error:
            raise StoreError(
                error.errno or 0,
                f"the commit of step {pending.step} can't be written to {self._run.folders[0].path} ({error.strerror}): free "
                "space there, and start again with resume=True",
            ) from None
        return record

    def _note_way_back(self, step: int) -> None:
        self._swap.paged.health.way_back = (
            f"start again with resume=True to go on from step {step}, which is committed, or "
        )


def open_run(nvme_paths: Sequence[str], run_name: str | None, *, resume: bool | Literal["must"]) -> DurableRun | None:
    """The files of the durable run of that name, and in it what to go on from; None where there is no name.

    A collective. Raises CheckpointError where there is a committed step and `resume` is false, there is none that all ranks
    have, or none at all where it "must" be or where there are commits of others, and StoreError where a live process has the
    files; on all ranks when on one.
    """
    run: DurableRun | None = None
    try:
        with raise_on_all_ranks():
            if resume not in (False, True, "must"):
                raise ConfigError(f'resume is True, False or "must", got {resume!r}')
            if run_name is not None:
                run = DurableRun(nvme_paths, run_name, dist.get_rank())
            elif resume:
                raise ConfigError(
                    f'resume={resume!r} needs infinity.durability "step": without it nothing of a run stays'
                )
        if run is None:
            return None
        sequence, launch = _agree(run, resume)
        with raise_on_all_ranks():
            if sequence is None:
                run.start_anew(launch)
            else:
                run.go_on(sequence, launch)
    except BaseException:
        if run is not None:
            run.give_up()
        raise
    if dist.get_rank() == 0 and resume:
        step = run.resumed.commit.step if run.resumed is not None else None
        log.info(
            f"nothing is committed in {run.where}: starting anew" if step is None else f"resuming after step {step}"
        )
    return run


@dataclass(frozen=True)
class _Found:
    """What one rank has."""

    commits: dict[tuple[int, str], int]
    """Steps, by the identity of their commits."""
    damaged: list[str]
    others: list[str]
    began: str | None
    """`DurableRun.began_without_commit`."""
    launch: str
    where: str
    must_resume: bool


def _agree(run: DurableRun, resume: bool | Literal["must"]) -> tuple[int | None, str]:
    """(number of the newest commit that all ranks have, None where no rank has any; rank 0's name for this launch)."""
    own = _Found(
        {record.commit.identity: record.commit.step for record in run.records.values()},
        run.damaged,
        run.others,
        run.began_without_commit,
        secrets.token_hex(8),
        run.where,
        resume == "must",
    )
    everywhere: list[_Found] = [own] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    launch = everywhere[0].launch
    if not any(each.commits or each.damaged for each in everywhere):
        _check_may_start_anew(everywhere)
        return None, launch
    common = set.intersection(*({*each.commits} for each in everywhere))
    if not resume:
        found = f"step {own.commits[max(common)]} is committed" if common else "a run was"
        raise CheckpointError(
            f"{run.where}: {found} there, and nothing of it is overwritten: pass resume=True (--resume) to go on from it, or "
            "remove the folder to start anew, or choose another infinity.run_name"
        )
    if not common and resume != "must" and _never_committed(everywhere):
        return None, launch
    if not common:
        raise CheckpointError(
            f"there is no committed step that all ranks ({len(everywhere)}) have: {_in_words(everywhere)}; start with as many "
            "ranks as the run had, on its machines, or load a checkpoint into a run of another infinity.run_name"
        )
    return max(common)[0], launch


def _never_committed(everywhere: Sequence[_Found]) -> bool:
    """Whether what some ranks have is the first commit of a launch that others of it never made."""
    made = {identity for each in everywhere for identity in each.commits}
    if len(made) != 1 or any(each.damaged for each in everywhere):
        return False
    sequence, launch = made.pop()
    return sequence == 1 and all(each.commits or each.began == launch for each in everywhere)


def _check_may_start_anew(everywhere: Sequence[_Found]) -> None:
    """Raise CheckpointError where no rank has a commit, and a second history would begin beside one that is there, or was
    expected."""
    others = [f"rank {rank}: {' and '.join(each.others)}" for rank, each in enumerate(everywhere) if each.others]
    if others:
        raise CheckpointError(
            f"no rank has commits of its own, but there are some ({'; '.join(others)}): start the ranks on the machines and "
            "with the drives on which they were, all of them mounted; to start anew beside them, choose another "
            "infinity.run_name, or remove the folders"
        )
    if any(each.must_resume for each in everywhere):
        places = " and ".join(sorted({each.where for each in everywhere}))
        raise CheckpointError(
            f'resume="must", and nothing is committed in {places}: see that the drives of nvme_path are mounted there and that '
            "infinity.run_name is that of the run; resume=True starts anew where nothing is committed"
        )


def _in_words(everywhere: Sequence[_Found]) -> str:
    told = []
    for rank, each in enumerate(everywhere):
        steps = " and ".join(f"step {step}" for step in each.commits.values()) or "none"
        told.append("; ".join([f"rank {rank} has {steps}", *each.damaged, *([] if each.commits else each.others)]))
    return ", ".join(told)


def restore_arena(record: Record, swap: SwapManager) -> None:
    """The paged model's values are those of the record, which fits it. Raises CheckpointError as `check_arena`."""
    commit = record.commit
    swap.paged.restore(
        [int(slot) for slot in commit.slots],
        check_arena(record, swap.paged),
        [each == "1" for each in commit.filled],
        [each == "1" for each in commit.stepped],
        record.sums,
    )


def check_arena(record: Record, paged: PagedModel) -> list[torch.Tensor]:
    """The ties of each sub-group. Raises CheckpointError where what the record says of the arena can't be true of the model."""
    step, subs = record.commit.step, paged.sub_groups
    try:
        ties = ties_of(record, [sub.layout.numel for sub in subs])
    except ValueError as error:
        raise CheckpointError(f"the record of step {step} is damaged: {error}") from None
    nbytes = SUM_BYTES * sum(sub.layout.nbytes for sub in subs) // PAGE_BYTES
    if record.sums and len(record.sums) != nbytes:
        raise CheckpointError(
            f"the record of step {step} is damaged: {len(record.sums)} bytes of checksums where the state has {nbytes}"
        )
    return ties


def check_unpaged_state(unpaged_state: Mapping[str, Any], training: Training, stepped: Collection[str]) -> None:
    """Raise CheckpointError where the training can't go on from what lay outside of the arena, where the parameters in
    `stepped` have moments: see [Note: What can be gone on from]."""
    buffers = {name: tuple(buffer.shape) for name, buffer in unpaged_state["buffers"].items()}
    if len(unpaged_state["param_groups"]) != training.groups or buffers != training.buffers:
        raise CheckpointError(
            "what is stored is of a training with other parameter groups or buffers: go on with the model and config "
            "of that run"
        )
    check_resumable(stepped, unpaged_state["steps"], counts_steps=training.counts_steps)


def ties_of(record: Record, numels: Sequence[int]) -> list[torch.Tensor]:
    """The ties of each sub-group, which have so many elements. Raises ValueError where they can't be true."""
    numbers = torch.frombuffer(bytearray(record.ties + bytes(4)), dtype=torch.int32)[:-1]
    found = [own.clone() for own in torch.split(numbers, list(record.commit.ties))]
    for index, (own, numel) in enumerate(zip(found, numels, strict=True)):
        if own.numel() and (own.min() < 0 or own.max() >= numel or (own.diff() <= 0).any()):
            raise ValueError(f"impossible ties in sub-group {index}")
    return found


def packed_ties(swap: SwapManager) -> tuple[list[int], bytes]:
    """How many each sub-group has, and all of them as a record holds them."""
    ties = [sub.ties for sub in swap.paged.sub_groups]
    packed = torch.cat(ties).numpy().astype("<i4").tobytes() if ties else b""
    return [own.numel() for own in ties], packed


def unpaged_state_of(record: Record) -> dict[str, Any]:
    """What the record holds of what lies outside of the arena. Raises CheckpointError."""
    try:
        found = decode(record.unpaged_state)
    except ValueError as error:
        raise CheckpointError(f"the record of step {record.commit.step} is damaged ({error})") from None
    _check_keys(found, record.commit.step)
    return found


def _check_keys(unpaged_state: Mapping[str, Any], step: int) -> None:
    if lacking := ", ".join(sorted(_UNPAGED_KEYS - unpaged_state.keys())):
        raise CheckpointError(f"the record of step {step} lacks {lacking}")
