"""The health of a model's values: whether they are those of one step, and may be used, stored and written.

One object per model, asked before its values are used. Used by one thread at a time.

[Note: What an exception may end]
An exception can end a pass at any line, an asynchronous one (KeyboardInterrupt) at any line of ours too. So whatever changes
the values is a *change*, a section of its own that is begun in one place and over in another: values are old before it and
new after it, and torn where anything ends it in between. Changes are few, short, and named. Gradients
can't be made anew: they stay, and of those that were being taken it is known (`GradientState.TAKING`). All else that a pass
keeps (what is staged, gathered, on its way) can be made anew from what rests on the drive, and is, by whoever finds a pass
that never ended: see `Paging.recover`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator

from infinity.errors import InfinityError, in_words

_CLOSED = "the swap manager of this model is closed, and its parameters are gone with it: save them before close()"


class Health(enum.Enum):
    """What the values of a model are, and what may be done with them."""

    WHOLE = "whole"
    """Those of one step. They may be used, stored and changed."""
    PART_STEPPED = "part-stepped"
    """Those of one step in some groups, which the backward has updated, and of the step before it in the rest. The backward may
    go on, and the step makes them whole; nobody else may use or set them."""
    TORN = "torn"
    """Part old and part new, or a write of them was lost. They may be set anew, by loading; not used or stored."""
    SEALED = "sealed"
    """It is not known which slot of a sub-group a record names. Nothing may be used or written any more."""
    CLOSED = "closed"
    """The swap manager is closed, or another process's: the values are gone, and what moved them holds no memory any more."""


class ModelHealth:
    """The one door of a model's health. on_ill: called when the values are not whole any more."""

    def __init__(self, on_ill: Callable[[], None] = lambda: None) -> None:
        self.state = Health.WHOLE
        self.way_back = ""
        """In words, what else than loading makes torn values whole again."""
        self._on_ill = on_ill
        self._why = ""
        self._change: str | None = None

    def tear(self, why: str) -> None:
        """From now on the values are not those of one step."""
        if self.state in (Health.WHOLE, Health.PART_STEPPED):
            self._why, self.state = why, Health.TORN
        if self.state is not Health.CLOSED:
            self._on_ill()

    def seal(self, why: str) -> None:
        """From now on nothing is written, whatever comes."""
        if self.state not in (Health.SEALED, Health.CLOSED):
            self._why, self.state = why, Health.SEALED
            self._on_ill()

    def close(self, why: str = _CLOSED) -> None:
        """From now on there are no values."""
        self._why, self.state = why, Health.CLOSED

    def mend(self) -> None:
        """All values were set anew."""
        if self.state is Health.TORN:
            self.state, self._why = Health.WHOLE, ""

    def note_part_stepped(self) -> None:
        """The backward updates a group."""
        if self.state is Health.WHOLE:
            self.state = Health.PART_STEPPED

    def note_all_stepped(self) -> None:
        """The step of which the backward updated a part is over."""
        if self.state is Health.PART_STEPPED:
            self.state = Health.WHOLE

    @contextlib.contextmanager
    def change(self, action: str) -> Iterator[None]:
        """A section that changes values: torn where an exception ends it. Inside another one, a part of that."""
        if self._change is not None:
            yield
            return
        self._change = action
        try:
            yield
        except BaseException as error:
            self.tear(f"{action} ({in_words(error)})")
            self._change = None
            raise
        self._change = None  # no `finally`: where tearing was interrupted, `settle` tears

    def settle(self) -> None:
        """No change is under way: one that never ended was ended by an exception."""
        if self._change is not None:
            self.tear(f"{self._change} (interrupted)")
            self._change = None

    def check_whole(self) -> None:
        """Raise InfinityError when the values are not those of one step, naming why, and the next move."""
        if self.state is not Health.WHOLE:
            raise self._refusal()

    def check_not_part_stepped(self) -> None:
        """Raise InfinityError between the first update of a backward and the end of its step."""
        if self.state is Health.PART_STEPPED:
            raise self._refusal()

    def check_not_torn(self) -> None:
        """Raise InfinityError when the values are torn (they may still be set, not used), sealed, or gone."""
        if self.state not in (Health.WHOLE, Health.PART_STEPPED):
            raise self._refusal()

    def check_not_sealed(self) -> None:
        """Raise InfinityError when nothing may be written any more, or the values are gone."""
        if self.state in (Health.SEALED, Health.CLOSED):
            raise self._refusal()

    def check_not_closed(self) -> None:
        """Raise InfinityError when there are no values any more."""
        if self.state is Health.CLOSED:
            raise self._refusal()

    def _refusal(self) -> InfinityError:
        if self.state is Health.PART_STEPPED:
            return InfinityError(
                "the backward has updated a part of the model already, and step() has not been called: until then its "
                "parameters can't be used, looked at or set; call step() first, or set infinity.update "
                '(PagingOptions.update) to "forward"'
            )
        if self.state is Health.TORN:
            return InfinityError(
                f"the parameters and their optimizer state are torn, part of them old and part new, since this failed: "
                f"{self._why}; {self.way_back}load a checkpoint (or a state dict of the model, then one of the optimizer) "
                "before going on"
            )
        if self.state is Health.SEALED:
            return InfinityError(
                f"nothing is written any more since this failed: {self._why}; start again with resume=True to go on from "
                "the last committed step"
            )
        return InfinityError(self._why)
