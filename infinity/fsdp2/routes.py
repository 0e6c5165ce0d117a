"""All ranks go the same way through the model's groups, or all hear in words that they don't. Training thread only.

[Note: Ways that part]
Gathering a group is a collective. Ranks may come to different groups, as where each expert is a group and tokens differ. Then
they gather pieces of different parameters into one, or the communication aborts. So before each group of a forward the ranks
tell each other, through the process group's store, which group is next. Where all ranks have only ever gone on to one and the
same group, and this rank does so again, nothing is said. So a model that goes one way through its groups pays in its first
forward alone, and one that branches pays at its branches.

A rank that leaves the only known way waits for the others a while. Those that stay on it say nothing, and wait in their gather.
Then the rank that left says so, and `explained` turns the error that the communication raises on the others into its words.
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
"""How long a rank that leaves the only known way waits for the others to do so, too. They have passed a gather of this forward
with it, and what can delay them since is a layer's work."""
LOOK_SECONDS = 1.0
"""After which who waits for the others looks whether they still work together."""
_PLACES_MAX = 100_000
"""Places in the model that are remembered; at others the ranks always tell each other."""
_END = "the end"
_made = itertools.count()
"""Models are sharded by all ranks together, so the number of one is the same on each; they share a store."""


@dataclass
class _Place:
    """Where a forward is: the way from the root to here. `following`: what all ranks went on to from here, together."""

    following: dict[str, _Place] = field(default_factory=dict)


class Routes:
    """Watches the forwards of a sharded model on this rank, one of `ranks` that gather together: see the note of this file.

    hear: called while this rank waits for others; raises what ended the work of the ranks together, where something did.
    """

    def __init__(self, model: nn.Module, ranks: Sequence[int], store: Any, hear: Callable[[], None]) -> None:
        self._ranks, self._store, self._rank, self._hear = ranks, store, dist.get_rank(), hear
        self._model, self._number = model, next(_made)
        self._seconds_max = store.timeout.total_seconds()
        self._start = _Place()
        self._places = 1
        self._here: _Place | None = None
        """None while no forward goes on."""
        self._forwards = self._depth = 0
        self._last_key: str | None = None
        """The key under which this rank said where it is, last."""
        for name, module in model.named_modules():
            if (
                name and isinstance(module, FSDPModule) and not isinstance(module, Expert)
            ):  # ranks agree on experts anyway
                cast(nn.Module, module).register_forward_pre_hook(
                    partial(self._come_to, clean_name(name)), prepend=True
                )
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    @property
    def place(self) -> str:
        """Where this rank is, or was when an exception came. Keys are of no use to ranks that are elsewhere."""
        return f"forward {self._forwards}, group {self._depth}, {self._places} places"

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Around a forward: where another rank has left the way and said so, that is the error."""
        try:
            yield
        except BaseException as error:
            self._here = None
            if isinstance(error, RuntimeError) and not isinstance(error, InfinityError) and (words := self._left()):
                raise InfinityError(words) from error
            raise

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():  # activation checkpointing runs a forward again
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
        """Raise InfinityError unless all ranks go on to `name`. `known`: the only way that was ever gone from here."""
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
            self._store.delete_key(self._last_key)  # all have read it: they have come here since
        self._last_key = keys[self._rank]

    def _come(self, keys: list[str], seconds_max: float) -> bool:
        """Whether the store has all of these within so many seconds."""
        deadline = time.monotonic() + seconds_max
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            with contextlib.suppress(RuntimeError):  # not yet
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
            f'make {around} one group with them, by "infinity": {{"wrap": ["{around}", ...]}}'
            if around
            else "wrap coarser"
        )
        return (
            f"the ranks went different ways through the model, in group {self._depth} of a forward: {where}. A group is "
            "gathered by all ranks together: call all of them on every rank in the same order, with an empty input where a "
            f"rank has none, or {wrap}"
        )

    def _around(self, names: Sequence[str]) -> str | None:
        """The class of the innermost module around all of the groups `names` that is called; None where that is the model."""
        modules = {clean_name(name): module for name, module in self._model.named_modules()}
        columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
        common = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
        for end in range(len(common), 0, -1):
            module = modules[".".join(common[:end])]
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                return type(module).__name__.removeprefix("FSDP")
        return None

    def _left(self) -> str | None:
        """What a rank that left the way said."""
        try:
            return self._store.get(self._key("left")).decode() if self._store.check([self._key("left")]) else None
        except RuntimeError:  # the store went with the rank that held it
            return None

    def _key(self, of: str) -> str:
        return f"infinity/routes/{self._number}/{self._ranks[0]}/{of}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
