"""What schemes promise: the sums of the design per element, and an update in the backward only where it is exact."""

from __future__ import annotations

import pytest

from infinity.errors import ConfigError
from infinity.plan.estimate import Part, step_bytes
from infinity.schedule.scheme import Scheme, choose_update

NUMEL = 1000


@pytest.mark.parametrize(
    ("master_weights", "update", "read", "written"),
    [
        ("split", "step", 16, 12),
        ("split", "forward", 14, 12),
        ("split", "backward", 14, 12),
        ("full", "step", 16, 14),
        ("full", "forward", 14, 14),
        ("full", "backward", 16, 14),
    ],
)
def test_bytes_of_an_element(master_weights: str, update: str, read: int, written: int) -> None:
    scheme = Scheme(master_weights, update)
    assert step_bytes(Part(NUMEL), scheme) == (NUMEL * read, NUMEL * written)


@pytest.mark.parametrize("update", ["step", "forward"])
def test_of_four_micro_batches_three_read_the_copies_twice(update: str) -> None:
    one, four = (step_bytes(Part(NUMEL, 2 * count), Scheme("split", update)) for count in (1, 4))
    assert four == (one[0] + 3 * 4 * NUMEL, one[1])


@pytest.mark.parametrize(("update", "read"), [("step", 14), ("forward", 12), ("backward", 14)])
def test_a_group_that_stays_gathered_until_its_backward_reads_less(update: str, read: int) -> None:
    """Updated in the backward, it has given its copy back long before, and the master is not whole without it."""
    assert step_bytes(Part(NUMEL, 1), Scheme("split", update))[0] == read * NUMEL


@pytest.mark.parametrize(
    ("told", "update", "speculative"),
    [
        ({}, "backward", False),
        ({"clipping": True}, "backward", True),
        ({"accumulation": 2}, "backward", True),
        ({"loss_scaling": True}, "backward", True),
        ({"keep_grad": True}, "forward", False),
        ({"keep_grad": True, "clipping": True}, "forward", False),
    ],
)
def test_auto_is_the_backward_unless_gradients_are_to_be_seen(
    told: dict[str, int], update: str, speculative: bool
) -> None:
    """Speculative where the factor of a gradient is not known there, so that it is exact."""
    settings = {"clipping": False, "accumulation": 1, "loss_scaling": False, **told}
    assert choose_update("auto", **settings) == (update, speculative)
    assert choose_update("step", **settings) == ("step", False)
    assert choose_update("forward", **settings) == ("forward", False)
    if "keep_grad" in told:
        with pytest.raises(ConfigError, match='"backward" does not go with'):
            choose_update("backward", **settings)
    else:
        assert choose_update("backward", **settings) == ("backward", speculative)


def test_an_update_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'never'"):
        choose_update("never", clipping=False, accumulation=1, loss_scaling=False)
