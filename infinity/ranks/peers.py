"""The other ranks of a pass: an error that ends a pass on one rank ends it on all within seconds.

Owned by the engine. Training thread only, except the watcher.

[Note: How a pass fails on all ranks]
A pass (forward, backward, step) is full of collectives. If a rank fails, the others would wait for it until the process
group's timeout. So it reports its error through the group's store, which needs no collective, and:

  1. It waits briefly for all others to report an error in the same pass, after the same number of collectives, at the
     same step and with gradients and values alike. If all do, no rank is waiting: each raises its own error, and the
     program may go on.
  2. Otherwise the ranks have parted. The first to find out records its error as the cause and ends its operations:
     gloo's by cutting the links (infinity/ranks/links.py), NCCL's by `ProcessGroup.abort`. A rank that waits for it
     gets an error, finds the cause, ends its own operations so that others continue too, and raises the cause's
     message. GPU operations report no error to the host, so there the watcher, a thread, looks for the cause once a
     second.

Parted ranks may be in operations that do not match: none may run another pass, or commit. One rank alone does none of
this.

[Note: Ranks in different passes]
If one rank catches an exception between two passes, no error is reported. That rank continues elsewhere, perhaps by
repeating a step, and its operations would meet those of another pass: ranks would wait for ever, or exchange wrong
bytes. So each rank writes the name of its pass to the store on entry ("a backward of step 3.1"), and reads the names of
the others, before the first operation. A pass is right only if all ranks that gather parameters together have the same
name for its number. Of two ranks that differ, the second to write its name sees it and begins no operation. So no
operation meets one of another pass, which in gloo may end the process. The names are compared again at the end of the
pass, before its results are used, and by the watcher during a long pass. This costs four small requests per pass and no
collective.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.distributed as dist

from infinity.errors import InfinityError
from infinity.ranks.all_ranks import restated
from infinity.ranks.links import PeerLink, find_links

log = logging.getLogger("infinity")

GRACE_SECONDS = 5.0
"""Time that an error of one rank waits for errors of the others."""
_WAIT_SECONDS = 0.02
_LOOK_SECONDS = 1.0
_NAMES_KEPT = 4
"""Passes whose name the store keeps; ranks are at most one apart if passes have operations."""
_NOBODY = -1
"""Rank of a cause that is not one rank's error."""
_numbers = itertools.count()
"""Numbers of this process's engines; equal on all ranks, which make the same engines in the same order."""


class _Report(NamedTuple):
    """An error that ended a pass on a rank, the number of operations begun per process group, and the rank's state."""

    rank: int
    kind: str
    text: str
    operations: list[int]
    standing: list[str]

    def as_error(self) -> Exception:
        return InfinityError(self.text) if self.rank == _NOBODY else restated(self.rank, self.kind, self.text)


@dataclass(eq=False)
class _Pass:
    """A running pass. `number` is 0 until its name is in the store; `entered` is that time (monotonic seconds)."""

    name: str = ""
    number: int = 0
    entered: float = 0.0


class Peers:
    """This rank among the ranks that train one model. Construction is a collective. groups: the process groups whose
    operations passes run; the group of all ranks first. gathering: the ranks that gather parameters together.
    are_stages: True if others have other parameters, so that they begin other operations within their groups."""

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], gathering: Iterable[int], *, are_stages: bool = False
    ) -> None:
        self._are_stages = are_stages
        self._groups = groups
        self._others = [rank for rank in gathering if rank != dist.get_rank()]
        self._alone = dist.get_world_size() == 1
        self._pid = os.getpid()
        self._name = f"infinity/peers/{next(_numbers)}"
        self._passes = 0
        self._pass: Callable[[], _Pass | None] = lambda: None
        """Returns the running pass, or None."""
        self._cause: _Report | None = None
        """Reason why the ranks have parted; None if they have not."""
        self._links: list[PeerLink] = []
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        if self._alone:
            return
        self._can_abort = any(_can_abort(group) for group in groups)
        self._store = groups[0].get_group_store()
        self._links = find_links(self._store)
        self._watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closing), name="infinity-peers", daemon=True
        )
        self._watcher.start()

    def check(self) -> None:
        if self._cause is not None:
            where = "" if self._cause.rank == _NOBODY else f" on rank {self._cause.rank}"
            raise InfinityError(
                f"the ranks have parted, because a pass failed{where} ({self._cause.kind}: {self._cause.text}): end "
                "all ranks and restart, from the last commit (resume=True) or from a checkpoint"
            )

    @property
    def parted(self) -> bool:
        return self._cause is not None

    def hear(self) -> None:
        """Raise the error that ended a pass on another rank, if any; for waits outside an operation."""
        cause = None if self._alone else self._known_cause()
        if cause is not None:
            raise cause.as_error()

    @contextlib.contextmanager
    def in_pass(self, pass_name: str, standing: Callable[[], Iterable[str]], *, last: bool = False) -> Iterator[None]:
        """Run what all ranks do together in one pass: see [Note: How a pass fails on all ranks].

        standing: returns this rank's state, its step first; ranks with another state after an error have parted. last:
        no pass follows, so the store may be gone. If the pass fails on another rank, raises an error of the same kind
        that names the rank and quotes it; InfinityError if that rank is in another pass.
        """
        if not self._alone and os.getpid() != self._pid:
            raise InfinityError(
                f"{pass_name} runs in a process forked from rank {dist.get_rank()} (such as a data loader's worker) "
                "and would use that rank's connections: compute in the rank itself (num_workers=0)"
            )
        if self._alone or self._closing.is_set() or self._pass() is not None:
            yield
            return
        had_parted = self.parted
        running = _Pass()  # dropped with this frame, wherever an exception ends it
        try:
            self._pass = weakref.ref(running)
            self.check()
            self._passes += 1
            with _while_the_store_lasts() if last else contextlib.nullcontext():
                self._tell_name(running, f"{pass_name} of {next(iter(standing()))}")
            self._check_names(running)
            yield
            self._check_names(running)
        except BaseException as error:
            if not had_parted:
                self._fail(error, [*standing()], running)
            raise
        finally:
            self._pass = lambda: None
        if self._cause is not None:  # aborted operations end as if they had succeeded
            raise self._cause.as_error()

    def leave(self, pass_name: str, standing: Callable[[], Iterable[str]]) -> None:
        """Report that this rank runs no more passes, as `pass_name` ("a close after an error"): ranks that wait for it
        fail. No collective."""
        if self._others and not self.parted:
            self._passes += 1
            with _while_the_store_lasts():
                self._tell_name(_Pass(), f"{pass_name} of {next(iter(standing()))}")

    def close(self) -> None:
        """Stop the watcher; the group may be gone afterwards. Idempotent; no collective."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def _fail(self, error: BaseException, standing: list[str], running: _Pass) -> None:
        """Return if this rank is to raise its own error, else raise that of another rank."""
        operations = [group._get_sequence_number_for_group() for group in self._groups]  # type: ignore[attr-defined]
        report = _Report(dist.get_rank(), type(error).__name__, str(error), operations, standing)
        try:
            cause = self._known_cause()
            if cause is None and running.number and (parted := self._parted_ways(running)) is not None:
                cause = self._settled_cause(parted)
            if cause is None and self._all_failed_alike(report):
                return
            cause = cause or self._settled_cause(report)
        except (RuntimeError, OSError, ValueError) as gone:  # the store ended with the rank that served it
            log.warning("this rank can't exchange errors with the others, because the store is gone (%s)", gone)
            cause = report
        self._cause = cause
        self._end_operations()
        with _while_the_store_lasts():  # the store may end with this process, so all ranks must read the cause first
            self._exchange("heard", "")
        consequence = isinstance(error, RuntimeError) and not isinstance(error, InfinityError)
        if cause.rank != report.rank and consequence:
            raise cause.as_error() from error

    def _tell_name(self, running: _Pass, name: str) -> None:
        running.name, running.entered = name, time.monotonic()
        if self._others:
            self._store.set(self._name_key(dist.get_rank(), self._passes), f"{self._passes} {name}")
            running.number = self._passes

    def _check_names(self, running: _Pass) -> None:
        """Raise InfinityError if another rank is, or was, in another pass of the same number."""
        parted = None
        if running.number:
            with _while_the_store_lasts():
                parted = self._parted_ways(running)
        if parted is not None:
            self._settled_cause(parted)
            raise InfinityError(parted.text)

    def _parted_ways(self, running: _Pass) -> _Report | None:
        """Return a report if a rank's pass of this number has another name; None if all names written so far agree."""
        keys = {rank: self._name_key(rank, running.number) for rank in self._others}
        there = {rank: key for rank, key in keys.items() if running.number > _NAMES_KEPT or self._store.check([key])}
        for rank, stored in zip(there, self._store.multi_get([*there.values()]) if there else (), strict=True):
            number, _, name = stored.decode().partition(" ")
            if int(number) == running.number and name != running.name:
                text = (
                    f"the ranks are in different passes: rank {dist.get_rank()} in {running.name}, rank {rank} in "
                    f"{name}; one of them may have caught an exception that the other never had"
                )
                return _Report(_NOBODY, InfinityError.__name__, text, [], [])
        return None

    def _name_key(self, rank: int, number: int) -> str:
        return f"{self._name}/pass {number % _NAMES_KEPT}/{rank}"

    def _settled_cause(self, report: _Report) -> _Report:
        return _Report(*json.loads(self._store.compare_set(f"{self._name}/cause", "", json.dumps(report))))

    def _known_cause(self) -> _Report | None:
        key = f"{self._name}/cause"
        return _Report(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _all_failed_alike(self, report: _Report) -> bool:
        """Wait briefly, and return True if an error ended this pass on all ranks after the same operations."""
        stored = self._exchange(str(self._passes), json.dumps(report))
        if stored is None:
            return False
        others = [_Report(*json.loads(other)) for other in stored]

        def operations(of: _Report, other: _Report) -> list[int]:
            apart = self._are_stages and other.rank not in (dist.get_rank(), *self._others)
            return of.operations[:1] if apart else of.operations

        return all(
            operations(other, other) == operations(report, other) and other.standing == report.standing
            for other in others
        )

    def _exchange(self, about: str, value: str) -> list[bytes] | None:
        """Return the values that all ranks give for `about`, by rank; None if some do not come in time."""
        keys = [f"{self._name}/{about}/{rank}" for rank in range(dist.get_world_size())]
        self._store.set(keys[dist.get_rank()], value)
        deadline = time.monotonic() + GRACE_SECONDS
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return None
            time.sleep(_WAIT_SECONDS)
        return [self._store.get(key) for key in keys]

    def _end_operations(self) -> None:
        for link in self._links:
            link.cut()
        for group in self._groups:
            if _can_abort(group):
                with contextlib.suppress(RuntimeError):  # already ended
                    group.abort()

    def look(self) -> bool:
        """For the watcher: end this rank's operations if the ranks have parted. Returns True when done."""
        running = self._pass()
        seen = replace(running) if running is not None else _Pass()
        running = None  # a reference would keep it alive beyond its frame
        try:
            cause = self._known_cause()
            if cause is None and seen.number:
                late = time.monotonic() - seen.entered > GRACE_SECONDS
                parted = self._parted_ways(seen) if late else None
                cause = self._settled_cause(parted) if parted is not None else None
        except (RuntimeError, OSError):
            return True
        if cause is None or not (self._can_abort or cause.rank == _NOBODY):
            return False
        self._cause = self._cause or cause
        self._end_operations()
        return True


def _watch(peers: weakref.ref[Peers], closing: threading.Event) -> None:
    while not closing.wait(_LOOK_SECONDS):
        watched = peers()
        if watched is None or watched.look():
            return
        del watched


def _while_the_store_lasts() -> contextlib.AbstractContextManager[None]:
    """Ignore errors of the store, which ends with the rank that serves it and may close first. That fails no pass whose
    operations are done; a pass with unfinished operations fails by them."""
    return contextlib.suppress(RuntimeError, OSError)


def _can_abort(group: dist.ProcessGroup) -> bool:
    """Return True if `abort` ends waiting operations of the group; gloo's does not."""
    return "nccl" in str(dist.get_backend_config(group))
