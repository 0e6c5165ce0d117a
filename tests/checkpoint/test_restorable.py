"""What a commit is held to before it takes the place of the one before it: that a run can go on from it, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import durable_training as training
import pytest
import torch
from durable_training import Case, Crash, make, step, weights

import infinity
from infinity.checkpoint import commits, training_state
from infinity.runtime.engine_state import EngineState
from infinity.store import files

pytestmark = pytest.mark.usefixtures("one_rank")

Spoil = Callable[[dict[str, Any]], None]


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """What lies outside of the arena lacks something from now on."""
    capture = EngineState.capture_unpaged

    def found(state: EngineState, client_state: dict[str, Any]) -> dict[str, Any]:
        all_of_it = capture(state, client_state)
        spoil(all_of_it)
        return all_of_it

    monkeypatch.setattr(EngineState, "capture_unpaged", found)


def drop_a_step(unpaged_state: dict[str, Any]) -> None:
    del unpaged_state["steps"]["blocks.1.up.weight"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_a_step, "blocks.1.up.weight has moments but no number of steps"),
        (lambda unpaged_state: unpaged_state["buffers"].popitem(), "other parameter groups or buffers"),
        (lambda unpaged_state: unpaged_state["param_groups"].clear(), "other parameter groups or buffers"),
        (lambda unpaged_state: unpaged_state.pop("rng"), "lacks rng"),
    ],
    ids=["step", "buffer", "group", "rng"],
)
def test_what_could_not_be_gone_on_from_is_refused_and_leaves_the_commit_before(
    spoil: Spoil, words: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine)]
        engine.commit()
        before = engine.client_state
        with monkeypatch.context() as patch:
            spoilt(patch, spoil)
            with pytest.raises(infinity.CheckpointError, match=words):
                engine.commit({"never": "kept"})
            assert engine.client_state == before
            with pytest.raises(infinity.CheckpointError, match=words):
                step(engine)
        raise Crash
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 1
        assert [*losses, step(engine)] == training_in_memory(nvme_path, 2)


def training_in_memory(nvme_path: Path, steps: int) -> list[list[float]]:
    with make(nvme_path / "whole", Case(), durability="none") as engine:
        return [step(engine) for _ in range(steps)]


def test_a_record_that_the_drive_lost_something_of_is_refused_and_leaves_the_one_before(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_durably = files.write_durably

    def flip_a_bit(path: Path, content: bytes) -> None:
        write_durably(path, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])

    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine)]
        engine.commit()
        losses.append(step(engine))
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_durably", flip_a_bit)
            with pytest.raises(infinity.CheckpointError, match=r"can't be read back .*SHA-256"):
                engine.commit()
        raise Crash
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 1
        assert step(engine) == losses[1]


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_a_commit_after_a_pass_that_an_error_ended_can_be_gone_on_from_or_is_refused(
    update: str, nvme_path: Path
) -> None:
    case = Case(update=update, threshold=0)
    with contextlib.suppress(Crash), make(nvme_path, case) as engine:
        step(engine)
        engine.commit()

        def fail(*_: Any) -> None:
            raise Crash

        drawn = torch.get_rng_state()
        hook = engine.module.blocks[1].register_forward_hook(fail)
        with pytest.raises(Crash):
            step(engine)
        hook.remove()
        torch.set_rng_state(drawn)
        with contextlib.suppress(infinity.InfinityError):
            engine.commit()
        raise Crash
    with make(nvme_path, case, resume=True) as engine:
        assert engine.global_steps == 1
        resumed = step(engine), weights(engine)
    with make(nvme_path / "whole", case, durability="none") as engine:
        step(engine)
        expected = step(engine), weights(engine)
    assert resumed[0] == expected[0]
    assert all(torch.equal(expected[1][name], resumed[1][name]) for name in expected[1])


def test_a_client_state_that_one_rank_cannot_store_fails_on_all_and_the_run_goes_on(
    forked_ranks: Any, nvme_path: Path
) -> None:
    script = Path(training.__file__).with_name("failing_ranks.py")
    output = forked_ranks(script, "client_state", str(nvme_path)).stdout
    assert output.count("the same words, and went on") == 2, output


def test_many_small_things_are_stored_as_few_and_come_back_as_they_were() -> None:
    """A file of the archive for each of tens of thousands of parameters took seconds in every commit."""
    names = [f"layers.{number}.weight" for number in range(500)]
    steps = {name: torch.tensor(float(number)) for number, name in enumerate(names)}
    buffers = {"norm.mean": torch.ones(3)}
    unpaged_state = {"global_steps": 3, "steps": steps, "group_names": [names[:7], names[7:]], "buffers": buffers}
    stored = training_state.encode(unpaged_state)
    assert stored.count(b"/data/") <= 2 * 2  # in the archive's directory once more
    found = training_state.decode(stored)
    assert found.keys() == unpaged_state.keys()
    assert found["group_names"] == unpaged_state["group_names"]
    assert [*found["steps"]] == names
    assert all(found["steps"][name].equal(steps[name]) for name in names)
    assert len({each.untyped_storage().data_ptr() for each in found["steps"].values()}) == len(names)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"steps": {"names": '["a", "b"]', "values": torch.zeros(3)}},
        {"steps": {"names": '{"a": 1}', "values": torch.zeros(1)}},
        {"steps": {"names": "[", "values": torch.zeros(1)}},
        {"steps": {"names": "[1]", "values": torch.zeros(1)}},
        {"group_names": '"a"'},
        {"group_names": "[[1]]"},
    ],
)
def test_forged_names_are_refused_in_words(spoilt: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(training_state, "_packed", dict)
        patch.setattr(training_state, "_unpacked", dict)
        forged = training_state.encode(spoilt)
    with pytest.raises(ValueError, match=r"."):
        training_state.decode(forged)


OF_RUN, OTHER = "00000000000000aa", "00000000000000bb"
FIRST, SECOND = {(1, OF_RUN): 1}, {(2, OF_RUN): 2}


@pytest.mark.parametrize(
    ("ours", "theirs", "began", "damaged", "resume", "restarted"),
    [
        (FIRST, {}, OF_RUN, [], True, True),
        (FIRST, {}, OF_RUN, [], "must", False),
        (FIRST, {}, OF_RUN, ["a record is damaged"], True, False),
        (FIRST, {}, OTHER, [], True, False),
        (FIRST, {}, None, [], True, False),
        (FIRST, {(1, OTHER): 1}, None, [], True, False),
        (SECOND, {}, OF_RUN, [], True, False),
    ],
)
def test_a_first_commit_that_was_never_made_by_all_is_none(
    ours: Any,
    theirs: Any,
    began: str | None,
    damaged: list[str],
    resume: Any,
    restarted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = SimpleNamespace(records={}, damaged=[], others=[], began_without_commit=None, where="here")
    mine = commits._Commits(ours, {2} if ours else set(), [], [], None, OF_RUN, "here", resume == "must")
    other = commits._Commits(theirs, {2} if theirs else set(), damaged, [], began, OF_RUN, "there", resume == "must")
    monkeypatch.setattr(commits, "from_all_ranks", lambda _: [mine, other])
    if restarted:
        assert commits._agree(run, resume) == (None, OF_RUN)  # type: ignore[arg-type]
    else:
        with pytest.raises(infinity.CheckpointError, match="no committed step that all ranks"):
            commits._agree(run, resume)  # type: ignore[arg-type]
