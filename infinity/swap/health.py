"""The health of a model's values: whether they are those of one step, and may be used, stored and written.

Each model has one such object, which is checked before its values are used. Used by one thread at a time.

[Note: What an exception may end]
An exception can interrupt a pass at any line; an asynchronous one (KeyboardInterrupt) also at any line of this library.
So all code that changes values is in a *change*, a section that begins in one place and ends in another. The values are
old before it, new after it, and torn if an exception interrupts it. Changes are few, short, and named. Gradients can't
be computed again: they are kept, and those that were being taken are known (`GradientState.TAKING`). All other data of
a pass (staged, gathered, in flight) can be rebuilt from the drive. The next call does so: see `Paging.recover`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator

from infinity.errors import InfinityError, in_words

_CLOSED = "the swap manager of this model is closed, and its parameters are gone with it: save them before close()"


class Health(enum.Enum):
    """The state of a model's values, and the allowed uses."""

    WHOLE = "whole"
    """Values of one step. They may be used, stored and changed."""
    PART_STEPPED = "part-stepped"
    """The backward has updated some groups, and the others are of the step before. The backward may continue, and the
    step makes the values whole; all other uses and changes are forbidden."""
    TORN = "torn"
    """Part old and part new, or a write of them was lost. They may be set again, by loading, but not used or stored."""
    SEALED = "sealed"
    """It is unknown which slot of a sub-group a record names. Nothing may be used or written any more."""
    ASLEEP = "asleep"
    """Values of one step. The memory that moves them is given back; they may be used only after `wake`."""
    CLOSED = "closed"
    """The swap manager is closed, or is another process's. The values are gone, and their memory is released."""


class ModelHealth:
    """The health of one model; the only place that changes it. on_ill: called when the values are no longer whole."""

    def __init__(self, on_ill: Callable[[], None] = lambda: None) -> None:
        self.state = Health.WHOLE
        self.way_back = ""
        """A remedy for torn values besides loading, in words."""
        self._on_ill = on_ill
        self._why = ""
        self._change: str | None = None

    def tear(self, why: str) -> None:
        """Mark the values as torn: they are no longer those of one step."""
        if self.state in (Health.WHOLE, Health.PART_STEPPED):
            self._why, self.state = why, Health.TORN
        if self.state is not Health.CLOSED:
            self._on_ill()

    def seal(self, why: str) -> None:
        """Forbid all writes from now on."""
        if self.state not in (Health.SEALED, Health.CLOSED):
            self._why, self.state = why, Health.SEALED
            self._on_ill()

    def close(self, why: str = _CLOSED) -> None:
        """Mark the values as gone."""
        self._why, self.state = why, Health.CLOSED

    def sleep(self) -> None:
        """Mark the values as asleep: nothing moves them until `wake`."""
        self.check_whole()
        self.state = Health.ASLEEP

    def wake(self) -> None:
        """Mark sleeping values as whole."""
        if self.state is Health.ASLEEP:
            self.state = Health.WHOLE

    def check_awake(self) -> None:
        """Raise InfinityError if the values are asleep."""
        if self.state is Health.ASLEEP:
            raise self._refusal()

    def mend(self) -> None:
        """Mark torn values as whole, after all of them were set."""
        if self.state is Health.TORN:
            self.state, self._why = Health.WHOLE, ""

    def note_part_stepped(self) -> None:
        """Record that the backward updates a group."""
        if self.state is Health.WHOLE:
            self.state = Health.PART_STEPPED

    def note_all_stepped(self) -> None:
        """Record the end of a step that the backward began."""
        if self.state is Health.PART_STEPPED:
            self.state = Health.WHOLE

    @contextlib.contextmanager
    def change(self, action: str) -> Iterator[None]:
        """Guard a section that changes values: an exception in it tears them. A nested section is part of the outer."""
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
        self._change = None  # not in a `finally`: if tearing was interrupted, `settle` tears

    def settle(self) -> None:
        """Tear the values if a change never ended, because an exception interrupted it. No change may be running."""
        if self._change is not None:
            self.tear(f"{self._change} (interrupted)")
            self._change = None

    def check_whole(self) -> None:
        """Raise InfinityError, with the reason and the remedy, if the values are not those of one step."""
        if self.state is not Health.WHOLE:
            raise self._refusal()

    def check_not_part_stepped(self) -> None:
        """Raise InfinityError between the first update of a backward and the end of its step."""
        if self.state is Health.PART_STEPPED:
            raise self._refusal()

    def check_not_torn(self) -> None:
        """Raise InfinityError if the values are torn (they may be set, but not used), sealed, or gone."""
        if self.state not in (Health.WHOLE, Health.PART_STEPPED):
            raise self._refusal()

    def check_not_sealed(self) -> None:
        """Raise InfinityError if nothing may be written any more, or the values are gone."""
        if self.state in (Health.SEALED, Health.ASLEEP, Health.CLOSED):
            raise self._refusal()

    def check_not_closed(self) -> None:
        """Raise InfinityError if the values are gone or asleep."""
        if self.state in (Health.ASLEEP, Health.CLOSED):
            raise self._refusal()

    def _refusal(self) -> InfinityError:
        if self.state is Health.PART_STEPPED:
            return InfinityError(
                "the backward has updated a part of the model already, and step() has not been called: the parameters "
                "can't be used, read or set until then; call step() first, or set infinity.update "
                '(PagingOptions.update) to "forward"'
            )
        if self.state is Health.TORN:
            return InfinityError(
                "the parameters and their optimizer state are torn, part of them old and part new, since this failed: "
                f"{self._why}; {self.way_back}load a checkpoint (or a state dict of the model, then one of the optimizer) "
                "to continue"
            )
        if self.state is Health.SEALED:
            return InfinityError(
                f"nothing is written any more since this failed: {self._why}; start again with resume=True to continue "
                "from the last committed step"
            )
        if self.state is Health.ASLEEP:
            return InfinityError("the engine sleeps, and its memory is given back: call engine.wake() first")
        return InfinityError(self._why)
