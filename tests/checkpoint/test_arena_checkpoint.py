"""Checkpoints of arenas: the state at the instant of the save, while training continues during the copy."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import durable_training
import launch
import pytest
import torch
import torch.distributed as dist
from arena_checkpoints import INSTANTS, moments_of
from durable_training import CASES, Case, Outcome, differences, evaluate, step, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import infinity
from infinity.checkpoint import arena as checkpoint_arena
from infinity.checkpoint import checks, stored_arena
from infinity.checkpoint.draft import Draft
from infinity.checkpoint.manifest import load_manifest
from infinity.checkpoint.snapshot import Snapshot
from infinity.checkpoint.work_folder import PREFIX
from infinity.cli import ckpt
from infinity.optim.coded_moments import decode, encode
from infinity.runtime.engine_state import EngineState
from infinity.store import arena_copy as copying
from infinity.store.commit import parse_record
from infinity.store.files import StoredFile

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "arena_checkpoints.py"
SAVED, END = 2, 4
ELSEWHERE = {
    "host cache": Case(),
    "state in host memory": Case(threshold=0, sub_group_size=8192),
    "fp32": Case(),
    "8-bit moments, host cache": Case(moments="8bit", threshold=0, sub_group_size=4096),
    "8-bit moments, state in host memory": Case(moments="8bit", threshold=0, sub_group_size=8192),
}
OFTEN = ("step, masters in full", "forward", "backward", *(name for name in ELSEWHERE if "host" in name))
"""Those of the ordinary suite."""


pytestmark = pytest.mark.usefixtures("one_rank")


WORK = "in the making"


def names(root: Path) -> list[str]:
    return sorted(WORK if each.name.startswith(PREFIX) else each.name for each in root.iterdir())


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


def make(path: Path | list[str], case: Case, name: str = "", **own: Any) -> infinity.Engine:
    own = {"durability": "none", "checkpoint_format": "arena", **own}
    if name.endswith("host cache"):
        own |= {"pinned_bytes_max": "12MiB", "host_cache_bytes": 300_000 if case.moments == "fp32" else 600_000}
    config = durable_training.config(path, case, **own)
    if name.endswith("state in host memory"):
        config["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    if name == "fp32":
        config["bf16"]["enabled"] = False
    if name == "in memory":
        config["zero_optimization"] |= {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}
        config["infinity"]["checkpoint_format"] = "dcp"
    if name == "in host memory":
        config["zero_optimization"] |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    torch.manual_seed(0)
    with torch.device("meta" if case.meta else "cpu"):
        model = durable_training.Model(case)
    return infinity.initialize(model=model, config=config)[0]


def train(engine: infinity.Engine, stop: int) -> list[list[float]]:
    losses = []
    while engine.global_steps < stop:
        losses.append(step(engine))
    return losses


class Slow:
    """Holds every copying up before its first piece, until `go`; or lets one piece go at each wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may = threading.Event()
        fetch = copying.Copying._copy_source
        wait_for = copying.Copying.wait_for
        self.waited: list[int] = []

        def hold_up(own: copying.Copying, *arguments: Any) -> None:
            self._may.wait(60)
            fetch(own, *arguments)

        def note(own: copying.Copying, section: int) -> None:
            self.waited.append(section)
            self.go()
            wait_for(own, section)

        monkeypatch.setattr(copying.Copying, "_copy_source", hold_up)
        monkeypatch.setattr(copying.Copying, "wait_for", note)

    def go(self) -> None:
        self._may.set()


@pytest.mark.parametrize(
    "name",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.long)
        for name in [*CASES, *ELSEWHERE]
        if name != "fp16 that skips steps"
    ],
)
def test_what_was_saved_in_the_middle_of_training_is_what_goes_on(
    name: str, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is updated where and when, and while the copying stands still until the training waits for it."""
    case = CASES.get(name) or ELSEWHERE[name]
    slow = Slow(monkeypatch)
    with make(nvme_path, case, name) as engine:
        train(engine, SAVED)
        evaluate(engine)
        engine.save_checkpoint(tmp_path, client_state={"seen": 7})
        expected: Outcome = (train(engine, END), weights(engine))
        assert slow.waited, "nothing was changed while it was copied"
    assert (tmp_path / "latest").read_text() == f"global_step{SAVED}"
    with make(nvme_path, case, name) as engine:
        evaluate(engine)
        path, state = engine.load_checkpoint(tmp_path)
        assert (path, state, engine.global_steps) == (str(tmp_path / f"global_step{SAVED}"), {"seen": 7}, SAVED)
        assert not differences(expected, (train(engine, END), weights(engine)))


@pytest.mark.parametrize("name", ["frozen parameters", "SGD", "Muon", pytest.param("forward", marks=pytest.mark.long)])
def test_it_is_put_together_where_the_state_lies_otherwise(name: str, nvme_path: Path, tmp_path: Path) -> None:
    case = CASES[name]
    with make(nvme_path, case) as engine:
        train(engine, SAVED)
        engine.save_checkpoint(tmp_path)
        expected: Outcome = (train(engine, END), weights(engine))
    other = replace(case, sub_group_size=2048, threshold=5000, master="full" if case.master == "split" else "split")
    for changed, where in ((other, ""), (case, "in memory")):
        with make(nvme_path, changed, where) as engine:
            engine.load_checkpoint(tmp_path)
            assert not differences(expected, (train(engine, END), weights(engine)))


@pytest.mark.parametrize(
    ("saver", "loader"), [("in host memory", "in host memory"), ("in host memory", ""), ("", "in host memory")]
)
def test_frozen_parameters_in_host_memory_are_saved_and_loaded(
    saver: str, loader: str, nvme_path: Path, tmp_path: Path
) -> None:
    case = CASES["frozen parameters"]
    with make(nvme_path, case, saver) as engine:
        train(engine, SAVED)
        engine.save_checkpoint(tmp_path)
        expected: Outcome = (train(engine, END), weights(engine))
    with make(nvme_path, case, loader) as engine:
        engine.load_checkpoint(tmp_path)
        assert not differences(expected, (train(engine, END), weights(engine)))


@pytest.mark.parametrize("format", ["arena", "dcp"])
@pytest.mark.parametrize("dtype", ["bf16", "8bit"])
def test_moments_are_converted_where_they_are_kept_in_another_dtype(
    dtype: str, format: str, nvme_path: Path, tmp_path: Path
) -> None:
    small = CASES["bf16 moments" if dtype == "bf16" else "8-bit moments"]
    large = replace(small, moments="fp32", sub_group_size=2048)
    with make(nvme_path, small) as engine:
        train(engine, SAVED)
        engine.save_checkpoint(tmp_path / "small", format=format)
        kept = moments_of(engine)
        expected: Outcome = (train(engine, END), weights(engine))
    assert any(moment.any() for moment in kept.values())
    assert all(torch.equal(narrowed(name, moment, dtype), moment) for name, moment in kept.items())
    with make(nvme_path, large) as engine:
        engine.load_checkpoint(tmp_path / "small")
        found = moments_of(engine)
        assert found.keys() == kept.keys() and all(torch.equal(found[name], kept[name]) for name in kept)
        engine.save_checkpoint(tmp_path / "back", format=format)
        engine.finish_checkpoint()
        train(engine, END)
        engine.save_checkpoint(tmp_path / "large", format=format)
        kept = moments_of(engine)
    for case in (small, replace(small, sub_group_size=2048, master="full")):
        with make(nvme_path, case) as engine:
            engine.load_checkpoint(tmp_path / "back")
            assert not differences(expected, (train(engine, END), weights(engine)))
            engine.load_checkpoint(tmp_path / "large")
            found = moments_of(engine)
            assert all(torch.equal(found[name], narrowed(name, kept[name], dtype)) for name in kept)


def narrowed(name: str, moment: torch.Tensor, dtype: str) -> torch.Tensor:
    """What is kept of a moment that was in fp32."""
    if dtype == "bf16":
        return moment.bfloat16().float()
    signed = not name.endswith("_sq")
    return decode(*encode(moment.flatten(), signed=signed), signed=signed).view_as(moment)


def test_a_durable_run_goes_on_from_it(nvme_path: Path, tmp_path: Path) -> None:
    case = CASES["forward"]
    with make(nvme_path, case, durability="step") as engine:
        train(engine, SAVED)
        engine.save_checkpoint(tmp_path)
        expected: Outcome = (train(engine, END), weights(engine))
    other: dict[str, Any] = {"durability": "step", "run_name": "other"}
    with make(nvme_path, case, **other) as engine:
        train(engine, 1)
        engine.load_checkpoint(tmp_path)
        assert not differences(expected, (train(engine, END), weights(engine)))


def test_stripes_over_two_drives_become_one_file(nvme_path: Path, tmp_path: Path) -> None:
    paths = [str(nvme_path / "a"), str(nvme_path / "b")]
    case = CASES["forward"]
    with make(paths, case) as engine:
        train(engine, SAVED)
        engine.save_checkpoint(tmp_path)
        expected: Outcome = (train(engine, END), weights(engine))
    with make(nvme_path, case) as engine:
        engine.load_checkpoint(tmp_path)
        assert not differences(expected, (train(engine, END), weights(engine)))


def test_it_gets_its_name_in_a_later_step_or_when_somebody_waits(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    with make(nvme_path, Case()) as engine:
        engine.save_checkpoint(tmp_path, tag="one")
        assert names(tmp_path) == [WORK]
        slow.go()
        engine._checkpoints.saving._copying._thread.join()  # type: ignore[union-attr]
        assert names(tmp_path) == [WORK]
        step(engine)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "one"]
        engine.save_checkpoint(tmp_path, tag="two")
        engine.finish_checkpoint()
        assert (tmp_path / "latest").read_text() == "two"
        engine.finish_checkpoint()  # nothing is on its way
        engine.save_checkpoint(tmp_path, tag="three")
        engine.load_checkpoint(tmp_path)
        assert (tmp_path / "latest").read_text() == "three"
        engine.save_checkpoint(tmp_path, tag="four")
        engine.save_checkpoint(tmp_path, tag="five", format="dcp")
        assert (tmp_path / "five" / ".metadata").exists()
        engine.save_checkpoint(tmp_path, tag="six")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["five", "four", "latest", "one", "six", "three", "two"]


def test_the_oldest_beyond_what_is_kept_go(nvme_path: Path, tmp_path: Path) -> None:
    with make(nvme_path, Case(), checkpoint_keep=2) as engine:
        for tag in ("one", "two", "three"):
            engine.save_checkpoint(tmp_path, tag=tag)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "three", "two"]


def test_a_failed_copy_is_told_and_leaves_the_last_checkpoint(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make(nvme_path, Case()) as engine:
        engine.save_checkpoint(tmp_path, tag="good")
        engine.finish_checkpoint()

        def full(*arguments: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(copying, "_put", full)
            engine.save_checkpoint(tmp_path, tag="next")
            with caplog.at_level(logging.WARNING, "infinity"):
                train(engine, 3)  # every gate is open
            assert [r.message.count("No space left") for r in caplog.records] == [1]
            with pytest.raises(infinity.CheckpointError, match=r"next failed \(.*No space left.*free space there"):
                engine.finish_checkpoint()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["good", "latest"]
        engine.finish_checkpoint()
        engine.save_checkpoint(tmp_path, tag="next")
        monkeypatch.setattr(checks, "free_bytes", lambda path: 4000)
        with pytest.raises(infinity.CheckpointError, match=r"a checkpoint takes .* and .* has 3.91 KiB free"):
            engine.save_checkpoint(tmp_path, tag="more")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["good", "latest", "next"]


def test_what_changed_on_the_drive_does_not_come_into_a_checkpoint(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = copying.ArenaReader.read_into

    def flipped(own: copying.ArenaReader, buffer: memoryview, offset: int) -> None:
        read(own, buffer, offset)
        buffer[4097] ^= 4

    with make(nvme_path, Case()) as engine:
        train(engine, 1)
        monkeypatch.setattr(copying.ArenaReader, "read_into", flipped)
        engine.save_checkpoint(tmp_path, tag="bad")
        with pytest.raises(
            infinity.CheckpointError,
            match=r"sub-group 0, generation \d+ of .* the page at offset 4096 of .*rank0\.arena doesn't hold what was",
        ):
            engine.finish_checkpoint()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["end", "error"])
def test_a_program_that_ends_without_closing_leaves_what_it_saved(how: str, nvme_path: Path, tmp_path: Path) -> None:
    done = launch.program(SCRIPT, "left", str(nvme_path), str(tmp_path), how)
    assert (done.returncode != 0) == (how == "error"), done.stderr
    assert names(tmp_path) == ["good", "latest", "next"], done.stderr
    assert ckpt.main(["verify", str(tmp_path)]) == 0
    with make(nvme_path, Case()) as engine:
        _, state = engine.load_checkpoint(tmp_path)
        assert (engine.global_steps, state) == (2, {"rank": 0})


@pytest.mark.parametrize("how", ["end", "one is gone"])
def test_ranks_that_end_without_closing_leave_what_they_saved_or_say_so(
    how: str, forked_ranks: Callable[..., Any], nvme_path: Path, tmp_path: Path
) -> None:
    done = forked_ranks(SCRIPT, "left", str(nvme_path), str(tmp_path), how, environment={"ALONE_SECONDS": "0"})
    if how == "end":
        assert names(tmp_path) == ["good", "latest", "next"], done.stdout
    else:
        assert "next failed, and the training has ended (rank 1 has not copied its part, or is gone)" in done.stdout
        assert names(tmp_path) == ["good", "latest"]
    assert (tmp_path / "latest").read_text() == ("next" if how == "end" else "good")
    assert ckpt.main(["verify", str(tmp_path)]) == 0


def test_an_error_in_the_training_does_not_give_it_up(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    expected = []

    def fail() -> None:
        with make(nvme_path, Case()) as engine:
            engine.save_checkpoint(tmp_path, tag="one")
            expected.append(weights(engine))
            slow.go()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == ["latest", "one"]
    with make(nvme_path, Case()) as engine:
        train(engine, 1)
        engine.load_checkpoint(tmp_path)
        assert not differences(([], expected[0]), ([], weights(engine)))


def test_an_interrupt_while_it_is_finished_gives_it_up(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)

    def interrupted(own: Any) -> None:
        slow.go()
        raise KeyboardInterrupt

    engine = make(nvme_path, Case())
    engine.save_checkpoint(tmp_path, tag="one")
    monkeypatch.setattr(copying.Copying, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "instant", ["piece", *(pytest.param(each, marks=pytest.mark.long) for each in INSTANTS if each != "piece")]
)
def test_a_save_that_is_killed_leaves_the_last_checkpoint(instant: str, nvme_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "killed", str(nvme_path), str(tmp_path), instant]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert names(tmp_path) == sorted([WORK, "good", "latest"] + ["next"] * (instant == "latest"))
    assert ckpt.main(["verify", str(tmp_path)]) == 0
    with make(nvme_path, Case()) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 1
        engine.save_checkpoint(tmp_path, tag="next")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["good", "latest", "next"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint, and the masters in it."""
    root = tmp_path_factory.mktemp("saved")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with make(root / "nvme", CASES["frozen parameters"]) as engine:
        train(engine, 2)
        engine.save_checkpoint(root / "checkpoints", tag="one")
        saved = root / "checkpoints", weights(engine)
    dist.destroy_process_group()
    return saved


@pytest.fixture
def copy(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of it to damage."""
    place = tmp_path / "checkpoints"
    subprocess.run(["cp", "-r", str(saved[0]), str(place)], check=True)
    return place


def test_the_commands_know_it(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, masters = saved
    assert ckpt.main(["info", str(root), "--json", "--tensors"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state_format"], told["global_steps"], told["ranks"], told["files"]) == ("arena", 2, 1, 2)
    shapes = {each["name"]: (each["shape"], each["dtype"], each["buffer"]) for each in told["tensors"]}
    assert shapes["blocks.0.odd.weight"] == ([7, 64], "float32", False)
    assert shapes["norm.running_mean"] == ([64], "float32", True)
    assert ckpt.main(["verify", str(root)]) == 0
    assert ckpt.main(["consolidate", str(root), str(tmp_path / "model")]) == 0
    model = load_file(tmp_path / "model" / "model.safetensors")
    assert model.keys() == masters.keys()
    assert all(torch.equal(model[name], masters[name]) for name in masters)
    state = infinity.get_fp32_state_dict_from_zero_checkpoint(root)
    assert all(torch.equal(state[name], masters[name]) for name in masters)


def test_they_are_read_in_the_memory_that_they_take(saved: tuple[Path, Any]) -> None:
    """Where no more can be promised, as under a limit of address space."""
    limited = """
import resource, sys
from pathlib import Path
from infinity.cli import ckpt
from infinity.checkpoint import consolidate
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30),) * 2)
sys.exit(ckpt.main(["info", sys.argv[1]]))
"""
    done = launch.code(limited, str(saved[0]))
    assert done.returncode == 0, done.stderr


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["rank0.arena", "rank0.record"])
def test_one_wrong_bit_is_found_before_anything_is_loaded(
    name: str, copy: Path, nvme_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(copy / "one" / name, 5000)
    assert ckpt.main(["verify", str(copy)]) == 1
    assert f"{name} is damaged" in capsys.readouterr().err
    assert ckpt.main(["consolidate", str(copy), str(tmp_path / "model")]) == 1
    assert f"{name} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    with make(nvme_path, CASES["frozen parameters"]) as engine:
        train(engine, 1)
        before = weights(engine)
        with pytest.raises(infinity.CheckpointError, match=f"{name} is damaged .*SHA-256"):
            engine.load_checkpoint(copy)
        assert not differences(([], before), ([], weights(engine)))


def test_a_checkpoint_without_its_manifest_or_a_file_is_refused(copy: Path, nvme_path: Path) -> None:
    with make(nvme_path, CASES["frozen parameters"]) as engine:
        (copy / "one" / "rank0.arena").unlink()
        with pytest.raises(infinity.CheckpointError, match=r"missing|No such file"):
            engine.load_checkpoint(copy)
        (copy / "one" / "manifest.json").unlink()
        with pytest.raises(infinity.CheckpointError, match=r"no manifest\.json"):
            engine.load_checkpoint(copy)


def test_a_checkpoint_of_another_model_is_refused(saved: tuple[Path, Any], nvme_path: Path) -> None:
    with (
        make(nvme_path, Case()) as engine,
        pytest.raises(
            infinity.CheckpointError, match=r"of another model: 2 tensors missing in it \(optimizer\.state\.blocks\.1"
        ),
    ):
        engine.load_checkpoint(saved[0])


def test_arenas_need_nvme(nvme_path: Path, tmp_path: Path) -> None:
    with make(nvme_path, Case(), "in memory") as engine:
        with pytest.raises(infinity.ConfigError, match='nothing of this training is: use "dcp"'):
            engine.save_checkpoint(tmp_path, format="arena")
        with pytest.raises(infinity.ConfigError, match="got 'zip'"):
            engine.save_checkpoint(tmp_path, format="zip")
    with pytest.raises(infinity.ConfigError, match=r"checkpoint_format.*nothing is offloaded"):
        infinity.initialize(
            model=torch.nn.Linear(2, 2), config={"infinity": {"checkpoint_format": "arena"}, "train_batch_size": 1}
        )


def test_clones_take_the_place_of_copies_where_blocks_can_be_shared(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that can't is stood in for by one whose clone of a range is a copy of it at once."""

    def clone(source: Any, each: copying.Source, file: Any, begin: int) -> bool:
        piece = mmap.mmap(-1, each.nbytes)  # aligned
        os.preadv(source.fileno(), [piece], each.offset)
        return os.pwritev(file.fileno(), [piece], begin) == each.nbytes

    monkeypatch.setattr(copying, "_clone_range", clone)
    for name in ("forward", "host cache"):
        case = CASES.get(name) or ELSEWHERE[name]
        with make(nvme_path, case, name) as engine:
            train(engine, SAVED)
            engine.save_checkpoint(tmp_path, tag=name.replace(" ", "-"))
            saving = engine._checkpoints.saving
            assert saving is not None and saving._copying is not None and saving._copying.cloned
            expected: Outcome = (train(engine, END), weights(engine))
        assert ckpt.main(["verify", str(tmp_path)]) == 0
        with make(nvme_path, case, name) as engine:
            engine.load_checkpoint(tmp_path)
            assert not differences(expected, (train(engine, END), weights(engine)))


@pytest.mark.inputs
@settings(
    max_examples=settings.default.max_examples * 3 // 5, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_forged_record_is_read_or_refused_in_words(
    saved: tuple[Path, Any], data: st.DataObject, tmp_path: Path
) -> None:
    """An attacker who writes a record can write its hash and the manifest, too."""
    record = parse_record((saved[0] / "one" / "rank0.record").read_bytes())
    place = record.layout
    kind = data.draw(st.sampled_from(["parameters", "sub_groups", "shards", "dtype", "ties"]))
    if kind == "ties":
        record = replace(record, ties=data.draw(st.randoms(use_true_random=False)).randbytes(len(record.ties)))
    elif kind == "shards":
        place = replace(place, shards=data.draw(st.integers(1, 5)), ranks=data.draw(st.integers(1, 5)))
    elif kind == "dtype":
        place = replace(place, compute_dtype=data.draw(st.sampled_from(["float16", "float32", "int8", "../x"])))
    else:
        entries = list(getattr(place, kind))
        number = data.draw(st.integers(0, len(entries) - 1))
        changes = (
            ["numel", "group", "resident", "trained"]
            if kind == "parameters"
            else ["space", "start", "numel", "split", "compute_itemsize"]
        )
        key = data.draw(st.sampled_from(changes))
        value = data.draw(st.booleans() if isinstance(getattr(entries[number], key), bool) else st.integers(0, 2**62))
        entries[number] = replace(entries[number], **{key: value})
        place = replace(place, **{kind: tuple(entries)})
    content = replace(record, layout=place).to_bytes()
    with TemporaryDirectory(dir=tmp_path) as scratch:
        forged = Path(scratch) / "one"
        subprocess.run(["cp", "-r", str(saved[0] / "one"), str(forged)], check=True)
        manifest = load_manifest(forged)
        assert manifest is not None
        (forged / "rank0.record").write_bytes(content)
        files = manifest.files | {"rank0.record": StoredFile(len(content), hashlib.sha256(content).hexdigest())}
        (forged / "manifest.json").write_bytes(replace(manifest, files=files).to_json())
        try:
            infinity.get_fp32_state_dict_from_zero_checkpoint(forged)
        except infinity.CheckpointError:
            pass
        else:
            assert Snapshot(parse_record(content).layout).nbytes == manifest.files["rank0.arena"].nbytes


@pytest.mark.slow
def test_any_number_of_ranks_goes_on_from_what_two_saved(
    forked_ranks: Callable[..., Any], nvme_path: Path, tmp_path: Path
) -> None:
    done = forked_ranks(SCRIPT, "save", str(nvme_path), str(tmp_path), ranks=2)
    assert done.stdout.count("equal") == 2, done.stdout
    for ranks in (1, 3):
        done = forked_ranks(SCRIPT, "load", str(nvme_path), str(tmp_path), ranks=ranks)
        assert done.stdout.count("equal") == ranks, done.stdout


def without_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = EngineState.capture_unpaged

    def without_one(state: EngineState, client_state: dict[str, Any]) -> dict[str, Any]:
        found = capture(state, client_state)
        found["steps"].pop(next(iter(found["steps"])))
        return found

    monkeypatch.setattr(EngineState, "capture_unpaged", without_one)


def test_moments_without_a_number_of_steps_are_refused_before_anything_is_written(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(nvme_path, CASES["forward"]) as engine:
        train(engine, 1)
        without_a_number_of_steps(monkeypatch)
        with pytest.raises(infinity.CheckpointError, match=r"one is refused \(.* has moments but no number of steps"):
            engine.save_checkpoint(tmp_path, tag="one")
    assert not list(tmp_path.iterdir())


def test_moments_without_a_number_of_steps_are_refused_before_anything_is_loaded(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(nvme_path, CASES["forward"]) as engine, monkeypatch.context() as patched:
        train(engine, 1)
        without_a_number_of_steps(patched)
        for module in (checkpoint_arena, stored_arena):  # as an earlier version
            patched.setattr(module, "check_record", lambda *arguments: None)
        engine.save_checkpoint(tmp_path)
        engine.finish_checkpoint()
    with make(nvme_path, CASES["forward"]) as engine:
        train(engine, 2)
        before = weights(engine)
        with pytest.raises(infinity.CheckpointError, match="has moments but no number of steps"):
            engine.load_checkpoint(tmp_path)
        assert not differences(([], before), ([], weights(engine)))


@pytest.mark.parametrize("form", ["dcp", "arena"])
def test_an_older_checkpoint_goes_only_after_the_new_one_was_read_back(
    form: str, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is harmed before it gets its name: the last one that is kept stays, and is loaded."""
    harms: dict[str, Callable[[Path], Any]] = {
        "rank0.pt": lambda file: flip(file, 300),
        ".metadata": lambda file: flip(file, 300),
        "__0_0.distcp is missing": lambda file: file.unlink(),
    }
    if form == "arena":
        harms = {
            "rank0.arena is 4096 bytes": lambda file: os.truncate(file, 4096),
            "rank0.record is missing": lambda file: file.unlink(),
            "rank0.record": lambda file: flip(file, 300),
        }
    write_manifest = Draft.write_manifest
    with make(nvme_path, Case(), checkpoint_format=form, checkpoint_keep=1) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag="good")
        engine.finish_checkpoint()
        train(engine, 2)
        for told, harm in harms.items():

            def harmed(own: Draft, manifest: Any, told: str = told, harm: Callable[[Path], Any] = harm) -> None:
                harm(own.folder / told.split()[0])
                write_manifest(own, manifest)

            monkeypatch.setattr(Draft, "write_manifest", harmed)
            with pytest.raises(infinity.CheckpointError, match=rf"next failed \(.*{told}"):  # noqa: PT012 - of either format
                engine.save_checkpoint(tmp_path, tag="next")
                engine.finish_checkpoint()
            assert names(tmp_path) == ["good", "latest"]
        monkeypatch.undo()
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 1
        engine.save_checkpoint(tmp_path, tag="next")
    assert names(tmp_path) == ["latest", "next"]
