"""Commits of a durable run: when a step is committed, and how a run resumes from one. Training thread only.

[Note: When a step is committed]
A step's updates may run after `step` returns, in the next forward, and its last writes continue during the next pass.
So `step` only captures the unpaged state (counters, schedule, loss scale, random numbers, `client_state`), and the
commit is pending. It is made just before the first write of the next step could follow: at the start of the next
`backward` if that updates, else of the next `step`. By then the writes have drained behind the passes, and the commit
waits only for the drive's cache and a small file. Both places are the same on all ranks, so all commit the same steps.

[Note: What is changed after a step]
A learning rate that a ReduceLROnPlateau or a loop sets after `step`, and a buffer that is set then, belong to that
step: a resumed run does not set them again. So these parts of the unpaged state are `late`. They are captured again
when the next step begins (`fix`: buffers at its first forward with gradients, which changes them itself, settings at
its first backward), or when the commit is made before that. If a save or `commit()` has committed the step already, it
is committed again then, unless no rank finds a change.

[Note: What a run can resume from]
A commit replaces the previous one, so it counts only if a run can resume from it. All that a resume checks is checked
before: `check_unpaged_state` when the state is captured and again, with `check_arena`, when the commit is made. The
arena and the note next to it must still have their names, and the record is read back. No rank removes the older commit
before all ranks know the outcome.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from infinity.checkpoint.checks import check_resumable
from infinity.checkpoint.training_state import decode, encode
from infinity.config.rules import names_of
from infinity.errors import CheckpointError, ConfigError, InfinityError, StoreError, in_words
from infinity.ranks.all_ranks import from_all_ranks, raise_on_all_ranks
from infinity.store.commit import SUM_BYTES, Commit, Record, bits
from infinity.store.durable import DurableRun
from infinity.swap import SwapManager
from infinity.swap.paged_model import PagedModel
from infinity.swap.timeline import measured
from infinity.units import PAGE_BYTES

log = logging.getLogger("infinity")

_UNPAGED_KEYS = names_of("""
    global_steps skipped_steps loss_scale lr_scheduler client_state rng param_groups group_names steps buffers
""")


@dataclass(frozen=True)
class Training:
    """What a commit must match in a training. groups: parameter names of each parameter group. buffers: shapes by
    name."""

    groups: list[list[str]]
    buffers: Mapping[str, tuple[int, ...]]
    counts_steps: bool


Part = Literal["settings", "buffers"]
"""Part of the unpaged state that may still change after a step: [Note: What is changed after a step]."""


@dataclass
class _Noted:
    """A step to commit, with the unpaged state at its end: as values, and as bytes (`stored`). late: captures the parts
    that may still change. marks: these as bytes, since a buffer's version misses writes through `.data`. renewed:
    something has changed since the step was committed."""

    step: int
    training: Training
    unpaged_state: dict[str, Any]
    stored: bytes
    late: dict[Part, Callable[[], dict[str, Any]]]
    marks: dict[Part, bytes]
    renewed: bool = False

    def renew(self) -> None:
        """Capture changes of the late parts; an added group or buffer belongs to the next step."""
        for part, capture in self.late.items():
            values = capture()
            if (mark := encode(values)) != self.marks[part] and _fits(self.unpaged_state | values, self.training):
                self.unpaged_state = decode(self.stored) | values
                self.stored, self.marks[part], self.renewed = encode(self.unpaged_state), mark, True


class Commits:
    """Makes the commits of one run, whose files `open_run` opened and whose model `swap` has paged."""

    def __init__(self, run: DurableRun, swap: SwapManager) -> None:
        self._run = run
        self._swap = swap
        self._pending: _Noted | None = None
        self._latest: _Noted | None = None
        """The last step, committed or not, until its settings are fixed and it is committed."""
        if run.resumed is not None:
            self._set_recovery_advice(run.resumed.commit.step)

    def check_storable(self, client_state: dict[str, Any]) -> None:
        """Raise CheckpointError on every rank if any rank's `client_state` can't be stored. A collective, before the
        step."""
        with raise_on_all_ranks():
            encode(client_state)

    def note(
        self,
        step: int,
        training: Callable[[], Training],
        unpaged_state: Callable[[], dict[str, Any]],
        late: Mapping[Part, Callable[[], dict[str, Any]]],
    ) -> None:
        """Capture, at the end of a step, the state to commit; `late` captures its late parts again. A collective.

        Raises CheckpointError on every rank if any rank's unpaged state can't be stored or resumed from; an earlier
        pending step then stays pending on all ranks.
        """
        with raise_on_all_ranks():
            values = unpaged_state()
            stored = encode(values)
            _check_keys(values, step)
            fits = training()
            check_unpaged_state(values, fits, self._stepped)
            marks = {part: encode(capture()) for part, capture in late.items()}
        self._pending = self._latest = _Noted(step, fits, values, stored, dict(late), marks)

    def fix(self, part: Part) -> None:
        """Begin the next step, to which changes of `part` belong from now on. [Note: What is changed after a step] A
        collective for the settings."""
        if self._latest is None or part not in self._latest.late:
            return
        if part == "settings" and self._pending is None:
            self.make()
            self._latest = None
        else:
            self._latest.renew()
            del self._latest.late[part]

    @property
    def pending_step(self) -> int | None:
        return self._pending.step if self._pending is not None else None

    @property
    def _stepped(self) -> set[str]:
        return {shard.name for shard in self._swap.paged.shards if shard.stepped}

    def try_to_make(self) -> None:
        """Commit the pending step before its values are replaced; a failure is logged. A collective."""
        try:
            self.make()
        except InfinityError as error:
            log.warning("the last step is not committed: %s", error)
        self._latest = None

    def make(self) -> None:
        """Commit the pending step, if any, or one that was changed since it was committed. A collective. If a rank
        fails, all raise, and the previous commit stays."""
        (pending, latest), (self._pending, self._latest) = (self._pending, self._latest), (None, None)
        if pending is None and latest is not None:
            with raise_on_all_ranks():
                latest.renew()
            if any(from_all_ranks(latest.renewed)):
                pending = latest
        if pending is not None:
            with measured(self._swap.timeline, "stall", f"commit of step {pending.step}"):
                sequence = self._write_on_all_ranks(pending)
                self._set_recovery_advice(pending.step)
                with raise_on_all_ranks():
                    self._leave_one_record(sequence)
            pending.renewed = False
        if latest is not None and "settings" in latest.late:
            self._latest = latest

    def _write_on_all_ranks(self, pending: _Noted) -> int:
        """Write the records of all ranks; then the previous commit's slots may be overwritten. Returns the new number.

        If one rank fails, all learn of it, and no rank keeps its record. If a rank can't learn what the others did,
        because one died, they may be past this point already: it keeps both records, and writes nothing more.
        """
        record, begun = None, False
        try:
            with raise_on_all_ranks():
                self._run.check_in_place()
                begun = True
                record = self._write(pending)
                check_arena(record, self._swap.paged)
                check_unpaged_state(pending.unpaged_state, pending.training, self._stepped)
                self._run.read_back(record)
            self._swap.paged.mark_committed()  # from here on the slots of the new records are not overwritten
        except BaseException as error:
            if begun and (record is None or isinstance(error, InfinityError)):
                self._leave_one_record(self._run.sequence)
            elif begun:
                self._swap.paged.health.seal(f"the commit of step {pending.step} ({in_words(error)})")
            raise
        return record.commit.sequence

    def _leave_one_record(self, sequence: int) -> None:
        """Remove the previous record, or a newer one that some rank could not write."""
        try:
            self._run.leave_one(sequence)
        except OSError as error:  # the next write could hit a slot that a record names
            why = f"removing an old record from {self._run.folders[0].path} ({error.strerror})"
            self._swap.paged.health.seal(why)
            raise StoreError(error.errno or 0, f"{why} failed: nothing is written any more, start again") from None

    def _write(self, pending: _Noted) -> Record:
        paged = self._swap.paged
        paged.health.check_whole()
        pending.renew()
        try:
            self._swap.flush()
        except OSError as error:  # a second flush may report success for bytes that the first has lost
            paged.health.seal(f"the flush of step {pending.step} ({error})")
            raise
        run = self._run
        record = record_of(
            self._swap, pending.step, pending.stored, run.sequence + 1, launch=run.launch, arena=run.arena
        )
        record = replace(record, sums=paged.page_sums())
        try:
            run.write(record)
        except OSError as error:
            raise StoreError(
                error.errno or 0,
                f"the commit of step {pending.step} can't be written to {run.folders[0].path} ({error.strerror}): free "
                "space there, and start again with resume=True",
            ) from None
        return record

    def _set_recovery_advice(self, step: int) -> None:
        self._swap.paged.health.way_back = f"start again with resume=True to resume from the committed step {step}, or "


def open_run(nvme_paths: Sequence[str], run_name: str | None, *, resume: bool | Literal["must"]) -> DurableRun | None:
    """Open the files of the durable run `run_name`, and choose the commit to resume from. Returns None without a name.

    A collective. Raises on every rank if any rank raises: CheckpointError if a step is committed and `resume` is false;
    if no commit is on all ranks; if none exists and `resume` is "must" or commits of other ranks exist. StoreError if a
    live process uses the files.
    """
    run: DurableRun | None = None
    try:
        with raise_on_all_ranks():
            if resume not in (False, True, "must"):
                raise ConfigError(f'resume must be True, False or "must", got {resume!r}')
            if run_name is not None:
                run = DurableRun(nvme_paths, run_name, dist.get_rank())
            elif resume:
                raise ConfigError(
                    f'resume={resume!r} needs infinity.durability "step": without it a run leaves no files'
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
            f"nothing is committed in {run.where}: a new run begins" if step is None else f"resuming after step {step}"
        )
    return run


@dataclass(frozen=True)
class _Commits:
    commits: dict[tuple[int, str], int]
    """Steps, by the identities of their commits."""
    made_by: set[int]
    """Numbers of ranks of the runs that made them."""
    damaged: list[str]
    others: list[str]
    began: str | None
    launch: str
    where: str
    must_resume: bool


def _agree(run: DurableRun, resume: bool | Literal["must"]) -> tuple[int | None, str]:
    """Return (number of the newest commit that all ranks have, None if no rank has any; identity of this launch)."""
    here = _Commits(
        {record.commit.identity: record.commit.step for record in run.records.values()},
        {record.layout.ranks for record in run.records.values()},
        run.damaged,
        run.others,
        run.began_without_commit,
        secrets.token_hex(8),
        run.where,
        resume == "must",
    )
    everywhere = from_all_ranks(here)
    launch = everywhere[0].launch
    if not any(of_rank.commits or of_rank.damaged for of_rank in everywhere):
        _check_may_start_anew(everywhere)
        return None, launch
    common = set.intersection(*({*of_rank.commits} for of_rank in everywhere))
    if not resume:
        state = f"step {here.commits[max(common)]} is committed" if common else "a run was"
        raise CheckpointError(
            f"{run.where}: {state} there, and nothing of it is overwritten: pass resume=True (--resume) to resume it, "
            "remove the folder to start a new run, or choose another infinity.run_name"
        )
    made_by = set.union(*(of_rank.made_by for of_rank in everywhere))
    if made_by - {len(everywhere)}:  # some of these ranks may have a newer commit that not all ranks of the run have
        raise CheckpointError(
            f"the run in {run.where} was made by {max(made_by)} rank(s), and there are {len(everywhere)} now: start with as "
            "many; a checkpoint can be loaded by any number"
        )
    if not common and resume != "must" and _never_committed(everywhere):
        return None, launch
    if not common:
        raise CheckpointError(
            f"there is no committed step that all ranks ({len(everywhere)}) have: {_in_words(everywhere)}; start with as many "
            "ranks as the run had, on its machines, or load a checkpoint into a run of another infinity.run_name"
        )
    return max(common)[0], launch


def _never_committed(everywhere: Sequence[_Commits]) -> bool:
    """Return True if some ranks have the first commit of a launch in which the others made none."""
    made = {identity for of_rank in everywhere for identity in of_rank.commits}
    if len(made) != 1 or any(of_rank.damaged for of_rank in everywhere):
        return False
    sequence, launch = made.pop()
    return sequence == 1 and all(of_rank.commits or of_rank.began == launch for of_rank in everywhere)


def _check_may_start_anew(everywhere: Sequence[_Commits]) -> None:
    """Raise CheckpointError if no rank has a commit of its own, but other ranks' exist, or one is required."""
    others = [f"rank {n}: {' and '.join(of_rank.others)}" for n, of_rank in enumerate(everywhere) if of_rank.others]
    if others:
        raise CheckpointError(
            f"no rank has commits of its own, but there are some ({'; '.join(others)}): start the ranks on the machines and "
            "with the drives of that run, all of them mounted; to start a new run, choose another infinity.run_name, "
            "or remove the folders"
        )
    if any(of_rank.must_resume for of_rank in everywhere):
        places = " and ".join(sorted({of_rank.where for of_rank in everywhere}))
        raise CheckpointError(
            f'resume="must", and nothing is committed in {places}: check that the drives of nvme_path are mounted and '
            "that infinity.run_name is that of the run; resume=True starts a new run if nothing is committed"
        )


def _in_words(everywhere: Sequence[_Commits]) -> str:
    parts = []
    for rank, of_rank in enumerate(everywhere):
        steps = " and ".join(f"step {step}" for step in of_rank.commits.values()) or "none"
        others = [] if of_rank.commits else of_rank.others
        parts.append("; ".join([f"rank {rank} has {steps}", *of_rank.damaged, *others]))
    return ", ".join(parts)


def restore_arena(record: Record, swap: SwapManager) -> None:
    commit = record.commit
    swap.paged.restore(
        [int(slot) for slot in commit.slots],
        check_arena(record, swap.paged),
        [bit == "1" for bit in commit.filled],
        [bit == "1" for bit in commit.stepped],
        record.sums,
    )


def check_arena(record: Record, paged: PagedModel) -> list[torch.Tensor]:
    step, subs = record.commit.step, paged.sub_groups
    try:
        ties = ties_of(record, [sub.layout.numel for sub in subs])
    except ValueError as error:
        raise CheckpointError(f"the record of step {step} is damaged: {error}") from None
    nbytes = SUM_BYTES * sum(sub.layout.nbytes for sub in subs) // PAGE_BYTES
    if record.sums and len(record.sums) != nbytes:
        raise CheckpointError(
            f"the record of step {step} is damaged: {len(record.sums)} bytes of checksums instead of {nbytes}"
        )
    return ties


def check_unpaged_state(unpaged_state: Mapping[str, Any], training: Training, stepped: Collection[str]) -> None:
    """Raise CheckpointError unless the training can resume from this unpaged state; `stepped`: the parameters with
    moments."""
    if not _fits(unpaged_state, training):
        raise CheckpointError(
            "the stored state belongs to a training with other parameter groups or buffers: resume with its model "
            "and config"
        )
    check_resumable(stepped, unpaged_state["steps"], counts_steps=training.counts_steps)


def _fits(unpaged_state: Mapping[str, Any], training: Training) -> bool:
    buffers = {name: tuple(buffer.shape) for name, buffer in unpaged_state["buffers"].items()}
    same_groups = len(unpaged_state["param_groups"]) == len(training.groups)
    return same_groups and order_of_groups(unpaged_state, training.groups) is not None and buffers == training.buffers


def order_of_groups(training_state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> list[int] | None:
    """Return the place of each of these parameter groups (parameter names) among the stored ones; None if some group
    has other parameters there. An older state doesn't name them; their order then stays."""
    stored = [{*names} for names in training_state.get("group_names", groups)]
    left = list(range(len(stored)))
    order: list[int] = []
    for names in groups:
        place = next((place for place in left if stored[place] == {*names}), None)
        if place is None:
            return None
        left.remove(place)
        order.append(place)
    return None if left else order


def check_same_groups(path: Path, training_state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> list[int]:
    """Return the order of these parameter groups in a checkpoint. Raises CheckpointError if it has others."""
    saved, order = len(training_state["param_groups"]), order_of_groups(training_state, groups)
    if saved != len(groups) or order is None:
        raise CheckpointError(
            f"{path} was saved with {saved} parameter groups, and the optimizer has {len(groups)}, or other parameters in one "
            "of them: create the same groups, in any order"
        )
    return order


def ties_of(record: Record, numels: Sequence[int]) -> list[torch.Tensor]:
    """Return the ties of each sub-group. Raises ValueError for impossible ties."""
    numbers = torch.frombuffer(bytearray(record.ties + bytes(4)), dtype=torch.int32)[:-1]
    all_ties = [part.clone() for part in torch.split(numbers, list(record.commit.ties))]
    for index, (ties, numel) in enumerate(zip(all_ties, numels, strict=True)):
        if ties.numel() and (ties.min() < 0 or ties.max() >= numel or (ties.diff() <= 0).any()):
            raise ValueError(f"impossible ties in sub-group {index}")
    return all_ties


def record_of(swap: SwapManager, step: int, unpaged_state: bytes, sequence: int, *, launch: str, arena: str) -> Record:
    shards, sub_groups = swap.paged.shards, swap.paged.sub_groups
    ties = [sub.ties for sub in sub_groups]
    commit = Commit(
        sequence=sequence,
        launch=launch,
        arena=arena,
        step=step,
        slots=bits([sub.current_slot for sub in sub_groups]),
        filled=bits([shard.filled for shard in shards]),
        stepped=bits([shard.stepped for shard in shards]),
        ties=tuple(part.numel() for part in ties),
    )
    packed_ties = torch.cat(ties).numpy().astype("<i4").tobytes() if ties else b""
    return Record(commit, swap.paging.arena_layout, packed_ties, unpaged_state)


def unpaged_state_of(record: Record) -> dict[str, Any]:
    try:
        unpaged_state = decode(record.unpaged_state)
    except ValueError as error:
        raise CheckpointError(f"the record of step {record.commit.step} is damaged ({error})") from None
    _check_keys(unpaged_state, record.commit.step)
    return unpaged_state


def _check_keys(unpaged_state: Mapping[str, Any], step: int) -> None:
    if lacking := ", ".join(sorted(_UNPAGED_KEYS - unpaged_state.keys())):
        raise CheckpointError(f"the record of step {step} lacks {lacking}")
