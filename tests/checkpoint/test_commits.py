"""What durable steps promise: an interrupted training resumes from its last committed step, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import durable_training as training
import pytest
import torch
from durable_training import Case, Crash, make, step, weights

import infinity
from infinity.checkpoint import commits
from infinity.checkpoint.training_state import encode
from infinity.plan.estimate import record_bytes
from infinity.store import run_folder
from infinity.store.commit import parse_record
from infinity.store.durable import DurableRun
from infinity.swap.stager import Stager

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("name", training.CASES)
def test_broken_off_and_gone_on_with_equals_never_broken_off(name: str, nvme_path: Path) -> None:
    case = training.CASES[name]
    assert not training.differences(training.whole(nvme_path, case), training.broken(nvme_path, case))


@pytest.mark.slow
def test_the_same_on_two_ranks(forked_ranks, nvme_path: Path) -> None:  # type: ignore[no-untyped-def]
    output = forked_ranks(Path(training.__file__), str(nvme_path)).stdout
    assert output.count("equal") == 2 * len(training.ON_SEVERAL_RANKS)


def expected(path: Path, steps: int, case: Case = Case()) -> list[list[float]]:  # noqa: B008
    with make(path, case, durability="none") as engine:
        return [step(engine) for _ in range(steps)]


@pytest.mark.parametrize("through", ["itself", ".data"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_what_is_changed_after_a_step_is_resumed_with(
    update: str, through: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_and_change(engine: infinity.Engine, *, until: str = "") -> list[float]:
        losses = step(engine, until=until)
        if not until:
            if engine.global_steps % 2 and engine.config.infinity.durability == "step":
                engine.commit()  # before the change
            engine.optimizer.param_groups[0]["weight_decay"] *= 0.5
            mean = engine.module.norm.running_mean
            (mean if through == "itself" else mean.data).add_(1)  # type: ignore[union-attr]
        return losses

    monkeypatch.setattr(training, "step", step_and_change)
    case = Case(update=update)
    assert not training.differences(training.whole(nvme_path, case), training.broken(nvme_path, case))


def test_an_end_without_an_error_commits_the_last_step(nvme_path: Path) -> None:
    with make(nvme_path, Case()) as engine:
        step(engine)
        step(engine)
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 2


def test_a_committed_run_is_not_overwritten_by_one_that_starts_anew(nvme_path: Path) -> None:
    with make(nvme_path, Case()) as engine:
        losses = [step(engine)]
    before = {each.name: each.read_bytes() for each in (nvme_path / "infinity-durable-run").iterdir()}
    with pytest.raises(infinity.CheckpointError, match=r"step 1 is committed there.*resume=True.*remove the folder"):
        make(nvme_path, Case())
    assert {each.name: each.read_bytes() for each in (nvme_path / "infinity-durable-run").iterdir()} == before
    with make(nvme_path, Case(), run_name="another") as engine:
        assert [step(engine)] == losses


def test_resuming_where_nothing_is_committed_starts_anew_and_says_so(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "infinity")
    with contextlib.suppress(Crash), make(nvme_path, Case(), resume=True) as engine:
        step(engine)  # the first step is committed when the second begins
        raise Crash
    assert "nothing is committed" in caplog.text
    with make(nvme_path, Case()) as engine:
        assert [step(engine)] == expected(nvme_path / "whole", 1)


def resumed_step(nvme_path: Path) -> None:
    with make(nvme_path, Case(), resume=True) as engine:
        step(engine)
        weights(engine)


@pytest.mark.parametrize("page", [0, 3, 17, -1])
def test_a_bit_that_flips_between_two_launches_is_found(page: int, nvme_path: Path) -> None:
    """In the slots that are committed; the others are written before they are read."""
    with make(nvme_path, Case()) as engine:
        step(engine)
        assert engine.swap is not None
        extents = [sub.extent for sub in engine.swap.paged.sub_groups if sub.layout.nbytes]
        pages = [at for extent in extents for at in range(extent.offset, extent.offset + extent.nbytes, 4096)]
    arena = nvme_path / "infinity-durable-run" / "rank0.arena"
    content = bytearray(arena.read_bytes())
    content[pages[page] + 77] ^= 4
    arena.write_bytes(content)
    with pytest.raises(infinity.IntegrityError, match=r"generation 0 of .*rank0\.arena.*CRC-32C") as caught:
        resumed_step(nvme_path)
    assert caught.value.extent_offset in {extent.offset for extent in extents}


def test_the_space_that_is_checked_for_is_the_space_that_is_taken(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(nvme_path, Case()) as engine:
        step(engine)
        assert engine.swap is not None
        state_bytes = sum(sub.layout.nbytes for sub in engine.swap.paged.sub_groups)
    folder = nvme_path / "infinity-durable-run"
    assert (folder / "rank0.arena").stat().st_size == 2 * state_bytes
    record = parse_record((folder / "rank0.commit-1").read_bytes())
    assert 2 * len(record.sums) == record_bytes(state_bytes)
    needed_bytes = 2 * state_bytes + record_bytes(state_bytes)
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: needed_bytes)
    make(nvme_path / "enough", Case()).close()
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: needed_bytes - 1)
    with pytest.raises(infinity.StoreError, match="free 1 B more"):
        make(nvme_path / "less", Case())
    assert not list((nvme_path / "less").iterdir())  # a rejected start leaves no files


def test_a_start_that_fails_leaves_what_an_earlier_one_committed(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(nvme_path, Case()) as engine:
        step(engine)
    folder = nvme_path / "infinity-durable-run"
    before = {each.name: each.stat().st_size for each in folder.iterdir()}
    with pytest.raises(infinity.CheckpointError, match="resume"):
        make(nvme_path, Case())
    with monkeypatch.context() as patch:
        patch.setattr(infinity.SwapManager, "check_fits", _refuse)
        with pytest.raises(infinity.CheckpointError, match="refused"):
            make(nvme_path, Case(), resume=True)
    assert {each.name: each.stat().st_size for each in folder.iterdir()} == before
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 1


def _refuse(*_: object, **__: object) -> None:
    raise infinity.CheckpointError("refused")


def test_resuming_needs_durability(nvme_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match=r"needs infinity\.durability"):
        make(nvme_path, Case(), resume=True, durability="none")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sub_group_size": 2048}, "set zero_optimization.sub_group_size"),
        ({"master": "full"}, "infinity.master_weights"),
        ({"threshold": 10**6}, "stage3_param_persistence_threshold"),
        ({"frozen": True}, "blocks.1.up.weight was trained, and is frozen now"),
        ({"optimizer": "SGD"}, "its optimizer kept exp_avg and exp_avg_sq, and keeps momentum_buffer now"),
    ],
)
def test_another_config_or_model_is_refused_in_words(change: dict[str, Any], words: str, nvme_path: Path) -> None:
    with make(nvme_path, Case()) as engine:
        losses = [step(engine)]
    with pytest.raises(infinity.CheckpointError, match=words):
        make(nvme_path, dataclasses.replace(Case(), **change), resume=True)
    with make(nvme_path, Case(), resume=True) as engine:  # nothing was touched
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 2)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("infinity", "host_cache_bytes"), "1MiB", "host_cache_bytes"),
        (("zero_optimization", "offload_optimizer", "device"), "none", "offload_optimizer.device to nvme"),
        (("zero_optimization", "offload_optimizer", "ratio"), 0.5, "ratio 0.5"),
        (("infinity", "run_name"), "../elsewhere", "folder name"),
    ],
)
def test_what_has_no_place_on_the_drive_is_refused(
    where: tuple[str, ...], value: object, words: str, nvme_path: Path
) -> None:
    source = training.config(nvme_path, Case())
    block: Any = source
    for name in where[:-1]:
        block[name] = dict(block[name])
        block = block[name]
    block[where[-1]] = value
    with pytest.raises(infinity.ConfigError, match=words):
        infinity.initialize(model=training.Model(Case()), config=source)


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_weights_set_by_hand_leave_what_is_committed(update: str, nvme_path: Path) -> None:
    case = Case(update=update)

    def spoil(engine: infinity.Engine) -> None:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()

    with contextlib.suppress(Crash), make(nvme_path, case) as engine:
        losses = [step(engine), step(engine)]
        training.evaluate(engine)
        engine.commit()
        before = weights(engine)
        spoil(engine)
        raise Crash
    with make(nvme_path, case, resume=True) as engine:
        assert engine.global_steps == 2
        after = weights(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 3, case)
        spoil(engine)
        engine.commit({"mine": torch.ones(2)})
    with make(nvme_path, case, resume=True) as engine:
        assert not any(
            value.any() for name, value in weights(engine).items() if "norm.r" not in name and "num" not in name
        )
        assert engine.client_state["mine"].equal(torch.ones(2))


def test_a_loaded_checkpoint_is_committed(nvme_path: Path, tmp_path: Path) -> None:
    with make(nvme_path, Case()) as engine:
        losses = [step(engine), step(engine)]
        engine.save_checkpoint(tmp_path, client_state={"saved": True})
        step(engine)
        engine.load_checkpoint(tmp_path)
        kept = weights(engine)
    with make(nvme_path, Case(), resume=True) as engine:
        assert (engine.global_steps, engine.client_state) == (2, {"saved": True})
        found = weights(engine)
        assert all(torch.equal(kept[name], found[name]) for name in kept)
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 3)


def test_a_load_that_is_broken_off_leaves_what_was_committed(nvme_path: Path, tmp_path: Path) -> None:
    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine)]
        engine.save_checkpoint(tmp_path)
        losses += [step(engine), step(engine)]
        engine.commit()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(infinity.Engine, "commit", lambda *args: (_ for _ in ()).throw(Crash))
            engine.load_checkpoint(tmp_path)
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 3
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 4)


def test_a_load_that_finds_nothing_keeps_the_last_step(nvme_path: Path, tmp_path: Path) -> None:
    with make(nvme_path, Case()) as engine:
        losses = [step(engine) for _ in range(2)]
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 2
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 3)


def test_a_record_that_nobody_would_read_is_not_written(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        step(engine)
        engine.commit()
        step(engine)
        with monkeypatch.context() as patch:
            patch.setattr("infinity.store.durable.RECORD_BYTES_MAX", 4096)
            with pytest.raises(infinity.StoreError, match=r"the commit of step 2 can't be written.*more than 4"):
                engine.commit()
        raise Crash
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 1


def test_all_that_one_rank_may_fail_at_in_a_commit_is_told_to_the_others(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def told(does: Any) -> Any:
        def doing(*arguments: Any, **named: Any) -> Any:
            assert inside, f"{does.__name__} on one rank alone"
            found.add(does.__name__)
            return does(*arguments, **named)

        return doing

    found: set[str] = set()
    monkeypatch.setattr("infinity.checkpoint.commits.raise_on_all_ranks", noted)
    with make(nvme_path, Case()) as engine:
        monkeypatch.setattr("infinity.checkpoint.commits.encode", told(commits.encode))
        for name in ("write", "leave_one"):
            monkeypatch.setattr(DurableRun, name, told(getattr(DurableRun, name)))
        step(engine)
        engine.commit()
    assert found == {"encode", "write", "leave_one"}


def test_what_all_have_committed_is_not_written_over_where_another_rank_fails_after_it(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record before it is gone here, so what the new one speaks of has to stay, whatever becomes of the others."""
    removed, leave_one = [], DurableRun.leave_one

    def leaving(run: DurableRun, sequence: int) -> None:
        leave_one(run, sequence)
        removed.append(sequence)

    @contextlib.contextmanager
    def another_fails() -> Iterator[None]:
        yield
        if removed:
            removed.clear()
            raise infinity.StoreError(0, "rank 1: removing an old record failed")

    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine), step(engine)]
        with monkeypatch.context() as patch:
            patch.setattr(DurableRun, "leave_one", leaving)
            patch.setattr("infinity.checkpoint.commits.raise_on_all_ranks", another_fails)
            with pytest.raises(infinity.StoreError, match="rank 1"):
                engine.commit()
        with torch.no_grad():  # continues all the same
            for parameter in engine.module.parameters():
                parameter.zero_()
        raise Crash
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 2
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 3)


def test_a_torn_step_says_from_where_one_can_go_on(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(update="step")
    failing = []

    def fail(self: Stager, chunk: Any) -> None:
        if failing:
            raise infinity.IoError("no write today", errno.EIO)
        original(self, chunk)

    original = Stager.write_back
    monkeypatch.setattr(Stager, "write_back", fail)
    engine = make(nvme_path, case)
    losses = [step(engine), step(engine)]
    engine.commit()
    failing.append(True)
    with pytest.raises(infinity.IoError, match="no write today"):
        step(engine)
    with pytest.raises(infinity.InfinityError, match=r"torn.*resume=True .* step 2"):
        step(engine)
    failing.clear()
    engine.close()
    with make(nvme_path, case, resume=True) as engine:
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 3, case)


@pytest.mark.parametrize("fails", ["write_durably", "sync", "leave_one"])
def test_a_commit_that_fails_leaves_the_one_before(
    fails: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine), step(engine)]
        engine.commit()
        losses.append(step(engine))
        with monkeypatch.context() as patch:
            if fails == "leave_one":
                patch.setattr(DurableRun, fails, full)
            else:
                patch.setattr(f"infinity.store.files.{fails}", full)
            with pytest.raises(infinity.StoreError, match="No space left"):
                engine.commit()
        raise Crash
    with make(nvme_path, Case(), resume=True) as engine:
        first = engine.global_steps
        assert first in ((2, 3) if fails != "write_durably" else (2,))
        assert [*losses[:first], step(engine)] == expected(nvme_path / "whole", first + 1)


def test_a_commit_of_which_the_other_ranks_do_not_answer_stops_all_writing(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have made theirs, and removed the one before: whichever it is, one that all have must stay."""

    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        yield
        raise RuntimeError("Connection closed by peer")

    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine)]
        engine.commit()
        losses.append(step(engine))
        with monkeypatch.context() as patch:
            patch.setattr("infinity.checkpoint.commits.raise_on_all_ranks", broken)
            patch.setattr(commits.Commits, "check_storable", lambda *_: None)
            with pytest.raises(RuntimeError, match="closed by peer"):
                step(engine)
        with pytest.raises(infinity.InfinityError, match=r"nothing is written any more.*closed by peer"):
            step(engine)
        with pytest.raises(infinity.InfinityError, match="nothing is written any more"), torch.no_grad():
            next(engine.module.parameters()).zero_()
        raise Crash
    assert len(list((nvme_path / "infinity-durable-run").glob("rank0.commit-*"))) == 2
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 2
        assert [*losses[:2], step(engine)] == expected(nvme_path / "whole", 3)


@pytest.mark.parametrize("harm", ["arena removed", "note replaced", "folder renamed"])
def test_a_run_whose_files_were_taken_away_is_refused_at_once_and_can_be_saved(
    harm: str, nvme_path: Path, tmp_path: Path
) -> None:
    folder = nvme_path / "infinity-durable-run"
    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine), step(engine)]
        if harm == "arena removed":
            (folder / "rank0.arena").unlink()
        elif harm == "note replaced":
            (folder / "rank0.json").write_text("{}")
        else:
            folder.rename(nvme_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(infinity.CheckpointError, match=r"removed or replaced.*save_checkpoint"):
                engine.commit()
        engine.save_checkpoint(tmp_path)
        raise Crash
    with make(nvme_path, Case(), run_name="another") as engine:
        engine.load_checkpoint(tmp_path)
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 3)


def test_a_training_goes_on_after_a_commit_that_failed(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is whole, only not committed; and what is committed stays."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine)]
        engine.commit()
        losses.append(step(engine))
        with monkeypatch.context() as patch:
            patch.setattr("infinity.store.files.write_durably", full)
            with pytest.raises(infinity.StoreError, match="free space there"):
                engine.commit()
        losses += [step(engine), step(engine)]
        raise Crash
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 3
        assert [*losses[:3], step(engine)] == expected(nvme_path / "whole", 4)


def killed_in_a_commit(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Leave the records of steps 2 and 3, as a kill in the commit of step 3 does. Return the losses before step 3."""

    def killed(self: DurableRun, sequence: int) -> None:
        raise Crash

    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        losses = [step(engine), step(engine)]
        engine.commit()
        step(engine)
        monkeypatch.setattr(DurableRun, "leave_one", killed)
        engine.commit()
    monkeypatch.undo()
    return losses


def test_the_newest_record_may_be_damaged_while_the_older_is_there(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = killed_in_a_commit(nvme_path, monkeypatch)
    folder = nvme_path / "infinity-durable-run"
    records = sorted(folder.glob("rank0.commit-*"), key=lambda each: each.stat().st_mtime_ns)
    assert len(records) == 2
    records[1].write_bytes(records[1].read_bytes()[:-1])
    with pytest.raises(infinity.CheckpointError, match="step 2 is committed"):
        make(nvme_path, Case())
    with make(nvme_path, Case(), resume=True) as engine:
        assert engine.global_steps == 2
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 3)


def test_a_resume_with_fewer_ranks_leaves_the_record_that_all_ranks_have(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill in a commit of two ranks: the first has the commits of steps 2 and 3, the other only that of 2."""

    losses = killed_in_a_commit(nvme_path, monkeypatch)
    folder = nvme_path / "infinity-durable-run"
    written = {each: each.read_bytes() for each in folder.glob("rank0.commit-*")}
    for each, content in written.items():
        record = parse_record(content)
        each.write_bytes(dataclasses.replace(record, layout=dataclasses.replace(record.layout, ranks=2)).to_bytes())
    before = files(folder)
    for resume in (True, "must"):
        with pytest.raises(infinity.CheckpointError, match=r"made by 2 rank.*there are 1 now"):
            make(nvme_path, Case(), resume=resume)
        assert files(folder) == before and len(written) == 2
    for each, content in written.items():
        each.write_bytes(content) if parse_record(content).commit.step == 2 else each.unlink()
    with make(nvme_path, Case(), resume=True) as engine:
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 3)


def test_a_run_whose_only_record_is_damaged_is_refused(nvme_path: Path) -> None:
    with make(nvme_path, Case()) as engine:
        step(engine)
    (record,) = (nvme_path / "infinity-durable-run").glob("rank0.commit-*")
    record.write_bytes(b"")
    with pytest.raises(infinity.CheckpointError, match=r"no committed step.*rank0.commit-1 is damaged"):
        make(nvme_path, Case(), resume=True)
    with pytest.raises(infinity.CheckpointError, match="nothing of it is overwritten"):
        make(nvme_path, Case())


def test_two_drives_keep_their_pattern(nvme_path: Path) -> None:
    paths = [str(nvme_path / "a"), str(nvme_path / "b")]
    with make(paths, Case()) as engine:
        losses = [step(engine)]
    for others in (paths[::-1], paths[1:]):
        with pytest.raises(infinity.CheckpointError, match="drive 2 of the 2 of a run"):
            make(others, Case(), resume=True)
    with make(paths, Case(), resume=True) as engine:
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 2)


def test_what_cannot_be_stored_is_told_at_the_step(nvme_path: Path) -> None:
    with contextlib.suppress(Crash), make(nvme_path, Case()) as engine:
        engine.backward(engine(training.batch(0, 0)).square().mean())
        engine.client_state = {"a function": step}
        with pytest.raises(infinity.CheckpointError, match="client_state can't be stored"):
            engine.step()
        raise Crash


def test_a_lack_of_memory_is_not_taken_for_state_that_cannot_be_stored() -> None:
    with mock.patch("torch.save", side_effect=MemoryError), pytest.raises(MemoryError):
        encode({"step": 1})


def test_a_commit_in_the_middle_of_a_step_is_refused(nvme_path: Path) -> None:
    with make(nvme_path, Case(accumulation=2)) as engine:
        engine.backward(engine(training.batch(0, 0)).square().mean())
        with pytest.raises(infinity.CheckpointError, match="in the middle of a step"):
            engine.commit()
    with make(nvme_path, Case(), durability="none") as engine, pytest.raises(infinity.ConfigError, match="durability"):
        engine.commit()


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What the files of a run hold, the locks aside."""
    return {
        each.name: (each.stat().st_size, each.read_bytes() if each.suffix != ".arena" else b"")
        for each in folder.iterdir()
        if each.suffix != ".lock"
    }


@pytest.mark.parametrize("resume", [True, False, "must"])
def test_a_folder_with_the_commits_of_other_ranks_is_not_started_anew_in(resume: Any, nvme_path: Path) -> None:
    """As after nodes have changed places."""
    with make(nvme_path, Case()) as engine:
        losses = [step(engine)]
    folder = nvme_path / "infinity-durable-run"
    for each in list(folder.iterdir()):
        each.rename(folder / each.name.replace("rank0", "rank7"))
    before = files(folder)
    with pytest.raises(
        infinity.CheckpointError, match=r"infinity-durable-run holds commits of rank 7\).*another infinity"
    ):
        make(nvme_path, Case(), resume=resume)
    assert files(folder) == before
    for each in list(folder.iterdir()):
        each.rename(folder / each.name.replace("rank7", "rank0"))
    with make(nvme_path, Case(), resume=True) as engine:
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 2)


def test_a_run_whose_first_drive_is_not_mounted_is_not_started_anew(nvme_path: Path) -> None:
    drives = [nvme_path / "0", nvme_path / "1"]
    with make([str(each) for each in drives], Case()) as engine:
        losses = [step(engine)]
    drives[0].rename(nvme_path / "elsewhere")
    before = files(drives[1] / "infinity-durable-run")
    with pytest.raises(
        infinity.CheckpointError, match=r"1/infinity-durable-run holds a share of the commits of rank 0"
    ):
        make([str(each) for each in drives], Case(), resume=True)
    assert files(drives[1] / "infinity-durable-run") == before
    drives[0].rmdir()
    (nvme_path / "elsewhere").rename(drives[0])
    with make([str(each) for each in drives], Case(), resume="must") as engine:
        assert [*losses, step(engine)] == expected(nvme_path / "whole", 2)


def test_a_start_on_several_drives_that_committed_nothing_is_started_anew(nvme_path: Path) -> None:
    drives = [str(nvme_path / "0"), str(nvme_path / "1")]
    with contextlib.suppress(Crash), make(drives, Case()):
        raise Crash
    with make(drives, Case(), resume=True) as engine:
        assert [step(engine)] == expected(nvme_path / "whole", 1)


def test_a_resume_that_must_be_one_is_refused_where_nothing_is_committed(nvme_path: Path) -> None:
    with pytest.raises(
        infinity.CheckpointError, match=r'resume="must".*nothing is committed in .*infinity-durable-run'
    ):
        make(nvme_path, Case(), resume="must")
    assert not list(nvme_path.iterdir())
    with pytest.raises(infinity.ConfigError, match=r'resume must be True, False or "must"'):
        make(nvme_path, Case(), resume="perhaps")
