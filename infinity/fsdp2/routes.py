"""Checks that all ranks take the same route through the model's groups. Training thread only.

[Note: Ways that part]
Gathering a group is a collective. Ranks may reach different groups, for example if tokens differ and each expert is a
group. They would then gather pieces of different parameters into one, or the communication would abort. So before each
group of a forward the ranks exchange, through the process group's store, the name of the next group. If all ranks have
always gone from here to the same group, and this rank does so again, nothing is exchanged. So a model with one route
pays in its first forward only, and a model that branches pays at its branches.

A rank that leaves the only known route waits some time for the others, which send nothing and wait in their gather.
Then it reports that it left, and `explained` replaces the communication error on the others by that report.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from infinity.errors import InfinityError
from infinity.fsdp2.experts import Expert
from infinity.fsdp2.names import clean_name
from infinity.fsdp2.sharding import in_backward

LEAVING_SECONDS_MAX = 60.0
"""Maximum time that a rank which leaves the only known route waits for the others to leave it too. All of them have
passed a gather of this forward, so the others are late by a layer's work at most."""
LOOK_SECONDS = 1.0
"""Interval at which a waiting rank checks if the others still work with it."""
_PLACES_MAX = 100_000
"""Maximum number of remembered places in the model; at others the ranks always exchange the next group."""
_END = "the end"
_made = itertools.count()
"""Numbers of models, equal on all ranks, because all ranks shard the same models in order; models share a store."""


@dataclass
class _Place:
    """A place in a forward: the route from the root to here. `following`: groups that all ranks went to from here."""

    following: dict[str, _Place] = field(default_factory=dict)


class Routes:
    """Watches the forwards of a sharded model on this rank, one of `ranks` that gather together.

    hear: called while this rank waits for others; raises the error that ended the joint work of the ranks, if any.
    """

    def __init__(self, model: nn.Module, ranks: Sequence[int], store: Any, hear: Callable[[], None]) -> None:
        self._ranks, self._store, self._rank, self._hear = ranks, store, dist.get_rank(), hear
        self._model, self._number = model, next(_made)
        self._seconds_max = store.timeout.total_seconds()
        self._start = _Place()
        self._places = 1
        self._here: _Place | None = None
        """Current place; None outside a forward."""
        self._forwards = self._depth = 0
        self._last_key: str | None = None
        """The last store key that this rank wrote."""
        for name, module in model.named_modules():
            if (
                name and isinstance(module, FSDPModule) and not isinstance(module, Expert)
            ):  # ranks agree on experts by a collective
                cast(nn.Module, module).register_forward_pre_hook(
                    partial(self._come_to, clean_name(name)), prepend=True
                )
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    @property
    def place(self) -> str:
        """Current place in words, or that of an exception. Store keys do not help ranks that are elsewhere."""
        return f"forward {self._forwards}, group {self._depth}, {self._places} places"

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Around a forward: if another rank has reported that it left the route, raise that as the error."""
        try:
            yield
        except BaseException as error:
            self._here = None
            if isinstance(error, RuntimeError) and not isinstance(error, InfinityError) and (words := self._left()):
                raise InfinityError(words) from error
            raise

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():  # activation checkpointing recomputes forwards
            self._here, self._depth = self._start, 0
            self._forwards += 1

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not in_backward():
            self._go_on_to(_END)
            self._here = None

    def _come_to(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():
            self._go_on_to(name)

    def _go_on_to(self, name: str) -> None:
        here = self._here
        if here is None:
            return
        self._depth += 1
        if len(here.following) != 1 or name not in here.following:
            self._agree(name, next(iter(here.following)) if len(here.following) == 1 else None)
        following = here.following.get(name)
        if following is None:
            following = _Place()
            if self._places < _PLACES_MAX:
                here.following[name] = following
                self._places += 1
        self._here = following

    def _agree(self, name: str, known: str | None) -> None:
        """Raise InfinityError unless all ranks go to `name` next. `known`: the only group so far from here, if any."""
        keys = {rank: self._key(f"{self._forwards}.{self._depth}.{rank}") for rank in self._ranks}
        self._store.set(keys[self._rank], name)
        if not self._come(list(keys.values()), self._seconds_max if known is None else LEAVING_SECONDS_MAX):
            here = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
            words = self._words(here | {rank: known or "elsewhere" for rank in keys if rank not in here})
            self._store.set(self._key("left"), words)
            raise InfinityError(words)
        going = {rank: self._store.get(key).decode() for rank, key in keys.items()}
        if len(set(going.values())) > 1:
            raise InfinityError(self._words(going))
        if self._last_key is not None:
            self._store.delete_key(self._last_key)  # all ranks have read it, because they came here since
        self._last_key = keys[self._rank]

    def _come(self, keys: list[str], seconds_max: float) -> bool:
        """Wait for all keys in the store; return False after `seconds_max`."""
        deadline = time.monotonic() + seconds_max
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            with contextlib.suppress(RuntimeError):  # timed out
                self._store.wait(keys, timedelta(seconds=LOOK_SECONDS))
            self._hear()
        return True

    def _words(self, going: dict[int, str]) -> str:
        differing = list(dict.fromkeys(going.values()))
        where = "; ".join(
            f"{_listed([rank for rank, group in going.items() if group == name])} "
            + ("ended the forward" if name == _END else f"came to {name}")
            for name in differing
        )
        around = self._around([name for name in differing if name != _END])
        wrap = (
            f'put them into one group {around}, by "infinity": {{"wrap": ["{around}", ...]}}'
            if around
            else "use a coarser wrap"
        )
        return (
            f"the ranks took different routes through the model, at group {self._depth} of a forward: {where}. "
            "Gathering a group is a collective: call all groups on every rank in the same order, with an empty input "
            f"if a rank has none, or {wrap}"
        )

    def _around(self, names: Sequence[str]) -> str | None:
        """Return the class of the innermost callable module around all groups `names`; None for the model itself."""
        modules = {clean_name(name): module for name, module in self._model.named_modules()}
        columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
        common = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
        for end in range(len(common), 0, -1):
            module = modules[".".join(common[:end])]
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                return type(module).__name__
        return None

    def _left(self) -> str | None:
        """Return the report of a rank that left the route, or None."""
        try:
            return self._store.get(self._key("left")).decode() if self._store.check([self._key("left")]) else None
        except RuntimeError:  # the store ended with the rank that served it
            return None

    def _key(self, of: str) -> str:
        return f"infinity/routes/{self._number}/{self._ranks[0]}/{of}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
