"""Reads an arena checkpoint: any elements of any parameter, from the ranks' files. Any thread, one at a time.

These files are not trusted: each is compared with its hash in the manifest before it is parsed, then checked field by
field (infinity/store/commit.py, snapshot.py).
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.checks import check_resumable, damaged, verify_file
from infinity.checkpoint.commits import ties_of, unpaged_state_of
from infinity.checkpoint.manifest import FILE_NAME, FIRST_RECORD, load_manifest, others
from infinity.checkpoint.snapshot import Snapshot, rows_of
from infinity.checkpoint.training_state import RANDOM_STATES
from infinity.errors import CheckpointError
from infinity.optim.coded_moments import blocks_of, decode
from infinity.optim.kernel import join
from infinity.store.commit import RECORD_BYTES_MAX, ArenaLayout, Record, differences, parse_record
from infinity.store.files import StoredFile, open_regular, read_small
from infinity.store.layout import BLOCK_NUMEL, Field, SubGroup


def is_arena_checkpoint(path: Path) -> bool:
    return (path / FIRST_RECORD).is_file()


def arena_name(rank: int) -> str:
    return f"rank{rank}.arena"


def record_name(rank: int) -> str:
    return f"rank{rank}.record"


class RankState:
    """The arena of one rank with its record; `stored` is the arena's entry in the manifest."""

    def __init__(self, path: Path, rank: int, record: Record, stored: StoredFile | None) -> None:
        self.record, self.layout = record, record.layout
        self._arena_path = path / arena_name(rank)
        try:
            if self.layout.rank != rank:
                raise ValueError(f"it is rank {self.layout.rank}'s")
            self.snapshot = Snapshot(self.layout)
            self.ties = ties_of(record, [sub.numel for sub in self.snapshot.sub_groups])
            if stored is None or stored.nbytes != self.snapshot.nbytes:
                raise ValueError("its arena file has another length")
        except ValueError as error:
            raise damaged(path / record_name(rank), error) from None
        try:
            self._file = open_regular(self._arena_path)
        except OSError as error:
            raise damaged(self._arena_path, error) from None

    def read_field(self, sub: SubGroup, field: Field, into: torch.Tensor, start: int = 0) -> None:
        """Fill `into` (1-D, contiguous) with a field of a sub-group, from element `start` on."""
        offset = self.snapshot.field_offset(sub, field) + start * into.itemsize
        buffer = into.view(torch.uint8).numpy().data
        try:
            self._file.seek(offset)
            if self._file.readinto(buffer) < buffer.nbytes:
                raise OSError(errno.EIO, "it ends too early")
        except OSError as error:
            raise damaged(self._arena_path, error) from None

    def read(self, parameter: int, field: Field, start: int, numel: int) -> torch.Tensor:
        """Read elements of the master or a moment (1-D, fp32) of this rank's shard of parameter number `parameter`."""
        values = torch.empty(numel, dtype=torch.float32)
        done = 0
        for sub, first, count in self.snapshot.pieces(parameter, start, numel):
            out = values[done : done + count]
            if field is Field.MASTER and sub.split:
                self._join(sub, first, out)
            elif sub.coded and field is not Field.MASTER:
                self._decode(sub, field, first, out)
            elif sub.itemsize(field) == out.itemsize:
                self.read_field(sub, field, out, first)
            else:
                small = torch.empty(count, dtype=torch.bfloat16)
                self.read_field(sub, field, small, first)
                out.copy_(small)
            done += count
        assert done == numel, "a shard that its sub-groups don't make up"
        return values

    def _decode(self, sub: SubGroup, moment: Field, start: int, out: torch.Tensor) -> None:
        first = start // BLOCK_NUMEL * BLOCK_NUMEL
        codes = torch.empty(start + out.numel() - first, dtype=torch.uint8)
        scales = torch.empty(blocks_of(codes.numel()))
        self.read_field(sub, moment, codes, first)
        self.read_field(sub, Field.SCALES, scales, sub.first_scale(moment) + first // BLOCK_NUMEL)
        out.copy_(decode(codes, scales, signed=moment is Field.MOMENT_1)[start - first :])

    def _join(self, sub: SubGroup, first: int, out: torch.Tensor) -> None:
        compute = torch.empty(out.numel(), dtype=torch.bfloat16)  # others are not split
        remainder = torch.empty(out.numel(), dtype=torch.int16)
        self.read_field(sub, Field.COMPUTE, compute, first)
        self.read_field(sub, Field.REMAINDER, remainder, first)
        all_ties = self.ties[sub.index]
        ties = all_ties[(all_ties >= first) & (all_ties < first + out.numel())] - first
        join(compute, remainder, ties, out=out)

    def close(self) -> None:
        self._file.close()


class StoredArena:
    """An arena checkpoint, open within a `with` block. Records are verified and parsed when they are needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = load_manifest(path)
        if manifest is None:
            raise CheckpointError(
                f"{path} has no {FILE_NAME}, without which arenas can't be verified: {others(path.parent, but=path.name)}"
            )
        self.manifest = manifest
        self._ranks: dict[int, RankState] = {}
        self.verify = functools.cache(functools.partial(verify_file, path, manifest))
        """Compares the file of this name with the manifest, once. Raises CheckpointError."""
        self.layout = self.rank(0).layout
        """Layout of rank 0. Ranks from `layout.shards` on are replicas and have stored no arena."""
        self._numbers = {parameter.name: number for number, parameter in enumerate(self.layout.parameters)}

    def rank(self, rank: int) -> RankState:
        if rank not in self._ranks:
            record = self._read_record(rank)
            if not self._belongs(record):
                raise damaged(self.path / record_name(rank), "it belongs to another checkpoint")
            self._ranks[rank] = RankState(self.path, rank, record, self.manifest.files.get(arena_name(rank)))
        return self._ranks[rank]

    def unpaged_state(self, rank: int) -> dict[str, Any]:
        """Return the unpaged state that a rank stored, or rank 0's without random states if there was no such rank."""
        if rank >= self.manifest.ranks:
            return {key: value for key, value in self.unpaged_state(0).items() if key not in RANDOM_STATES}
        unpaged_state = unpaged_state_of(self._read_record(rank))
        groups, steps, buffers = unpaged_state["param_groups"], unpaged_state["steps"], unpaged_state["buffers"]
        if not (
            isinstance(groups, list)
            and all(isinstance(group, dict) for group in groups)
            and _are_tensors(steps)
            and _are_tensors(buffers)
        ):
            raise damaged(self.path / record_name(rank), "its unpaged state is something else")
        return unpaged_state

    def with_layout(self, here: ArenaLayout) -> RankState | None:
        state = self.rank(here.rank % self.layout.shards)
        return None if any(differences(state.layout, replace(here, rank=state.layout.rank))) else state

    def read(self, name: str, field: Field, start: int, numel: int) -> torch.Tensor:
        """Read elements [start, start + numel) of the master or a moment (1-D, fp32) of the whole parameter `name`."""
        number = self._numbers[name]
        parts = [state.read(number, field, first, count) for state, first, count in self._rows(number, start, numel)]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def read_verified(self, name: str, field: Field, start: int, numel: int) -> torch.Tensor:
        for state, _, _ in self._rows(self._numbers[name], start, numel):
            self.verify(arena_name(state.layout.rank))
        return self.read(name, field, start, numel)

    def _rows(self, number: int, start: int, numel: int) -> Iterator[tuple[RankState, int, int]]:
        """Yield (rank's files, first element in its shard, count) of the pieces of elements [start, start + numel)."""
        shape, shards = self.layout.parameters[number].shape, self.layout.shards
        for rank in range(shards):
            first, end = rows_of(shape, rank, shards)
            low, high = max(start, first), min(start + numel, end)
            if low < high:
                yield self.rank(rank), low - first, high - low

    def _read_record(self, rank: int) -> Record:
        path = self.path / record_name(rank)
        self.verify(path.name)
        try:
            return parse_record(read_small(path, RECORD_BYTES_MAX))
        except (OSError, ValueError) as error:
            raise damaged(path, error) from None

    def _belongs(self, record: Record) -> bool:
        first = self._ranks[0].record if self._ranks else record
        same_save = record.commit.identity == first.commit.identity
        same_ranks = (record.layout.ranks, record.layout.shards) == (self.manifest.ranks, first.layout.shards)
        theirs, ours = ([(p.name, p.shape, p.trained) for p in of.layout.parameters] for of in (first, record))
        return same_save and same_ranks and ours == theirs

    def __enter__(self) -> StoredArena:
        return self

    def __exit__(self, *exception: object) -> None:
        for state in self._ranks.values():
            state.close()


def check_record(record: Record, unpaged_state: dict[str, Any]) -> None:
    has_moments = zip(record.layout.parameters, record.commit.stepped, strict=True)
    moments = {parameter.name for parameter, bit in has_moments if bit == "1"}
    steps, groups = unpaged_state["steps"], unpaged_state["group_names"]
    stepped = {name for group in groups for name in group}
    check_resumable(moments, steps, counts_steps=bool(steps), stepped=stepped)


def prove(path: Path, ranks: Iterable[int]) -> None:
    """Read back the parts of an arena checkpoint that these ranks parse to load. Raises CheckpointError."""
    with StoredArena(path) as stored:
        for rank in ranks:
            check_record(stored.rank(rank % stored.layout.shards).record, stored.unpaged_state(rank))


def _are_tensors(named: object) -> bool:
    if not isinstance(named, dict):
        return False
    return all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in named.items())
