"""The other ranks of a pass: an error that ends it on one ends it on all, in the same words, within seconds.

Owned by the engine; training thread only, but for the watcher.

[Note: How a pass fails on all ranks]
A pass (forward, backward, step) is full of collectives. A rank on which an error ended it doesn't come to the rest, and the
others would wait for it until the process group's timeout. So it tells its error through the group's store, which is no
collective, and:

  1. It waits a little whether all others tell of one in the same pass, after the same number of collectives, and stand where
     it stands: at the same step, with gradients and values in the same state. An error that came everywhere leaves no rank
     waiting: each raises its own, and the program may go on.
  2. Else the ranks have parted. The first to know notes its error as the cause, and ends its operations: gloo's by cutting the
     links (infinity/ranks/links.py), NCCL's by `ProcessGroup.abort`. Who waits for it gets an error then, finds the cause,
     ends its own operations, so that those who wait for it go on, too, and raises the cause's words. Where operations run on a
     GPU nothing reaches the host by itself: there the watcher, a thread, looks for the cause once a second.

Ranks that have parted may be at different places of the program, in operations that don't match: none of them may run another
pass, or commit. At one rank nothing of this happens.

[Note: Ranks in different passes]
An exception that one rank catches between two passes reaches none of the above. That rank goes on elsewhere, begins a step anew
perhaps, and its operations meet those of another pass on the others: they wait for ever, or exchange the wrong bytes. So each
rank names its pass in the store as it enters it ("a backward of step 3.1"), and looks at the names of the others, before the
first operation. A pass is right only if the ranks that gather parameters together have the same name for the pass of that
number. Of two ranks that go different ways, the one whose name comes second sees it, and begins no operation; so none meets
that of another pass, in which gloo may end the whole process. The names are looked at again when the pass ends, before its
results are used, and by the watcher while one takes long. It costs four small requests a pass and no collective.
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
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from infinity.errors import InfinityError
from infinity.ranks.all_ranks import restated
from infinity.ranks.links import PeerLink, find_links

log = logging.getLogger("infinity")

GRACE_SECONDS = 5.0
"""How long an error of one rank waits for those of the others."""
_WAIT_SECONDS = 0.02
_LOOK_SECONDS = 1.0
_NAMES_KEPT = 4
"""Of how many passes the store keeps the name; ranks are at most one apart where passes have operations."""
_NOBODY = -1
"""The rank of a cause that is not one rank's error."""
_numbers = itertools.count()
"""Of the engines of this process: alike on all ranks, which make the same ones in the same order."""


@dataclass(frozen=True)
class _Report:
    """What ended a pass on a rank, how many operations each of its groups had begun by then, and where the rank stands."""

    rank: int
    kind: str
    text: str
    operations: list[int]
    standing: list[str]

    def as_error(self) -> Exception:
        """As another rank raises it."""
        return InfinityError(self.text) if self.rank == _NOBODY else restated(self.rank, self.kind, self.text)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, stored: bytes) -> _Report:
        return cls(**json.loads(stored))


@dataclass(eq=False)
class _Pass:
    """One that is going on. `number` is 0 until its name is in the store; `entered`: when that was (monotonic seconds)."""

    name: str = ""
    number: int = 0
    entered: float = 0.0


class Peers:
    """This rank among those that train one model. Made by all ranks at once: a collective.

    Args:
        groups: the process groups whose operations passes run, that of all ranks first.
        gathering: the ranks that gather parameters together, this one among them, and so run the same passes.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], gathering: Iterable[int]) -> None:
        self._groups = groups
        self._others = [rank for rank in gathering if rank != dist.get_rank()]
        self._alone = dist.get_world_size() == 1
        self._pid = os.getpid()
        self._name = f"infinity/peers/{next(_numbers)}"
        self._passes = 0
        self._pass: Callable[[], _Pass | None] = lambda: None
        """Gives the pass that is going on, None where none is."""
        self._cause: _Report | None = None
        """What ended the work of the ranks together; None while they do."""
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
        """Raise InfinityError where the ranks have parted."""
        if self._cause is not None:
            where = "" if self._cause.rank == _NOBODY else f" on rank {self._cause.rank}"
            raise InfinityError(
                f"the ranks have parted, as a pass failed{where} ({self._cause.kind}: {self._cause.text}): end all of them and "
                "start again, from what was committed (resume=True) or from a checkpoint"
            )

    @property
    def parted(self) -> bool:
        """Whether the ranks can't do anything together any more."""
        return self._cause is not None

    def hear(self) -> None:
        """For who waits for the others otherwise than in an operation: raise what ended a pass on one of them."""
        cause = None if self._alone else self._known_cause()
        if cause is not None:
            raise cause.as_error()

    @contextlib.contextmanager
    def in_pass(self, pass_name: str, standing: Callable[[], Iterable[str]], *, last: bool = False) -> Iterator[None]:
        """Around what all ranks do together in one pass: see [Note: How a pass fails on all ranks].

        `pass_name`: "a forward". `standing`: says where this rank stands, its step first; ranks that stand elsewhere after an
        error have parted. `last`: no pass follows, so that the rank that serves the store may have left. Where the pass fails
        on another rank, raises an error of the same kind, which names the rank and quotes it; InfinityError where another rank
        is in another pass.
        """
        if not self._alone and os.getpid() != self._pid:
            raise InfinityError(
                f"{pass_name} in a process that was forked (a data loader's worker, say) from rank {dist.get_rank()}, whose "
                "connections to the other ranks it would use: compute in that rank itself (num_workers=0)"
            )
        if self._alone or self._pass() is not None:
            yield
            return
        had_parted = self.parted
        running = _Pass()  # goes with this frame, at whatever line an exception ends it
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
        if self._cause is not None:  # operations that were aborted end as if they had been done
            raise self._cause.as_error()

    def leave(self, pass_name: str, standing: Callable[[], Iterable[str]]) -> None:
        """Tell the others that this rank runs no more passes, as `pass_name` says ("a close after an error"); no collective.

        Ranks that wait for it in a pass are ended, as by one in another pass.
        """
        if self._others and not self.parted:
            self._passes += 1
            with _while_the_store_lasts():
                self._tell_name(_Pass(), f"{pass_name} of {next(iter(standing()))}")

    def close(self) -> None:
        """Idempotent; no collective."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def _fail(self, error: BaseException, standing: list[str], running: _Pass) -> None:
        """The pass has failed here. Returns where this rank's own error is to be raised; raises that of another rank."""
        report = _Report(dist.get_rank(), type(error).__name__, str(error), self._operations(), standing)
        try:
            cause = self._known_cause()
            if cause is None and running.number and (parted := self._parted_ways(running)) is not None:
                cause = self._settled_cause(parted)
            if cause is None and self._all_failed_alike(report):
                return
            cause = cause or self._settled_cause(report)
        except (RuntimeError, OSError, ValueError) as gone:  # the store has ended with the rank that served it
            log.warning("the ranks can't be told of an error, nor ask for theirs (%s)", gone)
            cause = report
        self._cause = cause
        self._end_operations()
        with _while_the_store_lasts():  # it may end with this process, so all ranks are to know the cause before
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
        """Raise InfinityError where another rank is, or was, in another pass of the same number."""
        parted = None
        if running.number:
            with _while_the_store_lasts():
                parted = self._parted_ways(running)
        if parted is not None:
            self._settled_cause(parted)
            raise InfinityError(parted.text)

    def _parted_ways(self, running: _Pass) -> _Report | None:
        """The report of ranks that are in different passes of this one's number; None where they agree, as far as they came."""
        keys = {rank: self._name_key(rank, running.number) for rank in self._others}
        there = {rank: key for rank, key in keys.items() if running.number > _NAMES_KEPT or self._store.check([key])}
        for rank, stored in zip(there, self._store.multi_get([*there.values()]) if there else (), strict=True):
            number, _, name = stored.decode().partition(" ")
            if int(number) == running.number and name != running.name:
                text = (
                    f"the ranks are in different passes: rank {dist.get_rank()} in {running.name}, rank {rank} in {name}; "
                    "perhaps one of them caught an exception that the other never had"
                )
                return _Report(_NOBODY, InfinityError.__name__, text, [], [])
        return None

    def _name_key(self, rank: int, number: int) -> str:
        return f"{self._name}/pass {number % _NAMES_KEPT}/{rank}"

    def _settled_cause(self, report: _Report) -> _Report:
        """What ended the work of the ranks together: this, or what was known before."""
        return _Report.of(self._store.compare_set(f"{self._name}/cause", "", report.to_json()))

    def _known_cause(self) -> _Report | None:
        key = f"{self._name}/cause"
        return _Report.of(self._store.get(key)) if self._store.check([key]) else None

    def _all_failed_alike(self, report: _Report) -> bool:
        """Whether an error ended this pass on all ranks after the same operations, which is waited for a little."""
        stored = self._exchange(str(self._passes), report.to_json())
        if stored is None:
            return False
        others = [_Report.of(other) for other in stored]
        return all(other.operations == report.operations and other.standing == report.standing for other in others)

    def _exchange(self, about: str, value: str) -> list[bytes] | None:
        """The values that all ranks give here, by rank; None if some don't come soon."""
        keys = [f"{self._name}/{about}/{rank}" for rank in range(dist.get_world_size())]
        self._store.set(keys[dist.get_rank()], value)
        deadline = time.monotonic() + GRACE_SECONDS
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return None
            time.sleep(_WAIT_SECONDS)
        return [self._store.get(key) for key in keys]

    def _operations(self) -> list[int]:
        return [group._get_sequence_number_for_group() for group in self._groups]  # type: ignore[attr-defined]

    def _end_operations(self) -> None:
        for link in self._links:
            link.cut()
        for group in self._groups:
            if _can_abort(group):
                with contextlib.suppress(RuntimeError):  # it has ended already
                    group.abort()

    def look(self) -> bool:
        """For the watcher: end this rank's operations if the ranks have parted. Whether there is nothing more to look for."""
        running = self._pass()
        seen = replace(running) if running is not None else _Pass()
        running = None  # it goes with the frame that runs it
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
    """The watcher, until `close`, or until the peers are gone."""
    while not closing.wait(_LOOK_SECONDS):
        watched = peers()
        if watched is None or watched.look():
            return
        del watched


def _while_the_store_lasts() -> contextlib.AbstractContextManager[None]:
    """Around what needs the store only while the ranks go on together. It ends with the rank that serves it, which may be the
    first to close: that fails no pass whose operations are done, and one whose are not fails by them."""
    return contextlib.suppress(RuntimeError, OSError)


def _can_abort(group: dist.ProcessGroup) -> bool:
    """Whether operations of the group that wait are ended by `abort`; gloo's are not."""
    return "nccl" in str(dist.get_backend_config(group))
