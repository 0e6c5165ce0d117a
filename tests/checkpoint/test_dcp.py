"""Checkpoints: a resume has the saved state, from any engine; a wrong one is rejected with an error."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import pickle
import stat
import subprocess
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import MakesFolder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import infinity
from infinity.checkpoint import checks, model_files, work_folder
from infinity.checkpoint import dcp as checkpoint
from infinity.checkpoint import draft as checkpoint_draft
from infinity.checkpoint.draft import Draft, find
from infinity.checkpoint.manifest import Manifest
from infinity.checkpoint.model_files import ModelFiles
from infinity.checkpoint.work_folder import WorkFolder
from infinity.fsdp2 import first_values, materialize
from infinity.store.files import StoredFile, write_durably
from infinity.swap import PagedTensor


class Model(nn.Module):
    """Two blocks and a tied head, so that a name can be missing from a file."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h) * self.scale


pytestmark = pytest.mark.usefixtures("one_rank")


def config(path: Path | None, device: str = "none") -> dict[str, Any]:
    """`device`: where all is, if there is no path."""
    offload = {"device": "nvme", "nvme_path": str(path)} if path else {"device": device}
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 2048,
        },
        "infinity": {"pinned_bytes_max": "16MiB"},
    }


def engine_for(
    path: Path | None, *, model: nn.Module | None = None, seed: int = 0, device: str = "none", **arguments: Any
) -> infinity.Engine:
    torch.manual_seed(seed)
    engine, *_ = infinity.initialize(model=model or Model(), config=config(path, device), **arguments)
    return engine


def steps(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        x = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(engine(x)[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("saver", ["nvme", "none", "cpu"])
@pytest.mark.parametrize("loader", ["nvme", "none", "cpu"])
def test_resuming_gives_the_losses_of_going_on(saver: str, loader: str, nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path if saver == "nvme" else None, device=saver) as engine:
        steps(engine, 0, 4)
        engine.save_checkpoint(tmp_path, client_state={"seen": 16, "note": "half way"})
        expected = steps(engine, 4, 4)
    with engine_for(nvme_path if loader == "nvme" else None, seed=7, device=loader) as engine:
        path, state = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step4")
        assert state == {"seen": 16, "note": "half way"}
        assert engine.global_steps == 4
        assert steps(engine, 4, 4) == expected
    assert not list(nvme_path.iterdir())


def test_loading_after_an_evaluation_uses_the_loaded_weights(nvme_path: Path, tmp_path: Path) -> None:
    x = torch.arange(10).view(1, 10)
    with engine_for(nvme_path) as engine:
        steps(engine, 0, 2)
        engine.save_checkpoint(tmp_path, tag="two")
        engine.eval()
        with torch.no_grad():
            expected = engine(x).clone()
        engine.train()
        steps(engine, 2, 3)
        engine.eval()
        with torch.no_grad():
            assert not torch.equal(engine(x), expected)  # leaves the root group gathered
        engine.load_checkpoint(tmp_path, tag="two")
        with torch.no_grad():
            assert torch.equal(engine(x), expected)


def test_stock_fsdp2_and_adamw_resume_ours_and_we_theirs(nvme_path: Path, tmp_path: Path) -> None:
    def stock() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Model()
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def stock_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            x = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(x)[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def paged(path: Path) -> tuple[nn.Module, torch.optim.Optimizer, infinity.SwapManager]:
        model, _ = stock()
        swap = infinity.SwapManager(path, pinned_bytes_max="16MiB")
        swap.page(model, infinity.PagingOptions(param_persistence_threshold=100))
        return model, infinity.PagedAdamW(model.parameters(), swap=swap, lr=0.01, fused=True), swap

    model, optimizer, swap = paged(nvme_path)
    stock_steps(model, optimizer, 0, 3)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "ours")
    expected = stock_steps(model, optimizer, 3, 3)
    swap.close()

    model, optimizer = stock()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "ours")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert stock_steps(model, optimizer, 3, 3) == expected
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "theirs")
    expected = stock_steps(model, optimizer, 6, 3)

    model, optimizer, swap = paged(nvme_path)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "theirs")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert stock_steps(model, optimizer, 6, 3) == expected
    swap.close()


def test_the_optimizers_own_state_dict_goes_round(nvme_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        steps(engine, 0, 3)
        for module in engine.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        model = {
            k: v.full_tensor() + 0 if hasattr(v, "full_tensor") else v for k, v in engine.module.state_dict().items()
        }
        state = engine.optimizer.state_dict()
        for moments in state["state"].values():
            moments.update({k: moments[k].detach().clone() for k in ("step", "exp_avg", "exp_avg_sq")})
        expected = steps(engine, 3, 2)
    with engine_for(None, seed=5) as other:
        assert model.keys() == other.module.state_dict().keys()
    with engine_for(nvme_path, seed=5) as engine:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(engine.module, model, options=StateDictOptions(full_state_dict=True))
        engine.optimizer.load_state_dict(state)
        for group in engine.optimizer.param_groups:
            group["lr"] = state["param_groups"][0]["lr"]
        engine.lr_scheduler.last_epoch = 3
        assert steps(engine, 3, 1) == expected[:1]


@pytest.mark.parametrize("change", [{"width": 48}, {"layers": 3}, {"layers": 1}])
def test_a_checkpoint_of_another_model_is_refused(change: dict[str, int], nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        steps(engine, 0, 1)
        engine.save_checkpoint(tmp_path)
    with engine_for(nvme_path, model=Model(**change)) as engine:
        with pytest.raises(infinity.CheckpointError, match=r"checkpoint of another model: \d+ tensors .*model\."):
            engine.load_checkpoint(tmp_path)
        steps(engine, 0, 1)


def test_no_checkpoint_there(nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        assert engine.load_checkpoint(tmp_path) == (None, {})  # as DeepSpeed, with a warning
        with pytest.raises(infinity.CheckpointError, match="got no folder to save to"):
            engine.save_checkpoint(None)  # type: ignore[arg-type]
        with pytest.raises(infinity.CheckpointError, match="is not a checkpoint"):
            engine.load_checkpoint(tmp_path, tag="missing")
        for tag in ("../elsewhere", " one", "one\n"):  # `latest` is read without the space around a name
            with pytest.raises(infinity.CheckpointError, match="tag is one folder name"):
                engine.save_checkpoint(tmp_path, tag=tag)
        assert not list(tmp_path.iterdir())


def test_saving_and_loading_hold_a_few_tensors_at_a_time(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0
    materialize = PagedTensor.materialize

    def watch(paged: PagedTensor) -> torch.Tensor:
        nonlocal most_alive
        gc.collect()
        tensor = materialize(paged)
        read.append(weakref.ref(tensor))
        most_alive = max(most_alive, sum(each() is not None for each in read))
        return tensor

    with engine_for(nvme_path) as engine:
        steps(engine, 0, 1)
        monkeypatch.setattr(PagedTensor, "materialize", watch)
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
    assert len(read) >= 15  # 5 parameters, each with its two moments
    assert most_alive <= 3


def test_a_client_state_that_cannot_be_stored_leaves_the_last_checkpoint(nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        engine.save_checkpoint(tmp_path, tag="good")
        with pytest.raises(infinity.CheckpointError, match="client_state can't be stored"):
            engine.save_checkpoint(tmp_path, tag="bad", client_state={"function": print})
        assert (tmp_path / "latest").read_text() == "good"
        assert sorted(f.name for f in tmp_path.iterdir()) == ["good", "latest"]


@pytest.mark.parametrize("lacking", ["its step", "its state", "a parameter"])
def test_a_state_that_is_not_complete_is_refused_before_anything_is_written(
    lacking: str, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_of = checkpoint._state_of

    def without(*arguments: Any) -> dict[str, Any]:
        state = state_of(*arguments)
        if lacking == "its step":
            del state["optimizer"]["state"]["blocks.1.bias"]["step"]
        elif lacking == "its state":
            del state["optimizer"]["state"]["blocks.1.bias"]
        else:
            del state["model"]["blocks.1.bias"]
        return state

    with engine_for(nvme_path) as engine:
        monkeypatch.setattr(checkpoint, "_state_of", without)
        with pytest.raises(infinity.CheckpointError, match=r"one is refused \(.*: the previous checkpoint stays"):
            engine.save_checkpoint(tmp_path, tag="one")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["dcp", "arena"])
def test_what_is_saved_after_a_pass_that_failed_can_be_gone_on_from(form: str, nvme_path: Path, tmp_path: Path) -> None:
    """Or it is refused, and the one before is there to go on from."""
    settings = config(nvme_path)
    settings["infinity"] |= {"checkpoint_format": form, "checkpoint_keep": 1}

    def engine() -> infinity.Engine:
        torch.manual_seed(0)
        return infinity.initialize(model=Model(), config=settings)[0]

    with engine() as reference:
        expected = steps(reference, 0, 4)
    with engine() as failing:
        steps(failing, 0, 2)
        failing.save_checkpoint(tmp_path, tag="good")
        failing.finish_checkpoint()

        def fail(*arguments: Any) -> None:
            raise ZeroDivisionError

        hook = failing.module.blocks[1].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            steps(failing, 2, 1)
        hook.remove()
        with contextlib.suppress(infinity.CheckpointError):
            failing.save_checkpoint(tmp_path, tag="next")
            failing.finish_checkpoint()
    with engine() as loader:
        loader.load_checkpoint(tmp_path)
        assert loader.global_steps == 2
        assert steps(loader, 2, 2) == expected[2:]


def test_a_failed_write_leaves_the_last_checkpoint(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_for(nvme_path) as engine:
        engine.save_checkpoint(tmp_path, tag="good")

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint.dcp, "save", full)
        with pytest.raises(infinity.CheckpointError, match="No space left on device"):
            engine.save_checkpoint(tmp_path, tag="next")
        assert (tmp_path / "latest").read_text() == "good"
        assert sorted(f.name for f in tmp_path.iterdir()) == ["good", "latest"]


def test_no_room_for_a_checkpoint_is_told_before_it_is_written(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_for(nvme_path) as engine:
        engine.save_checkpoint(tmp_path, tag="good")
        monkeypatch.setattr(checks, "free_bytes", lambda path: 4000)
        with pytest.raises(infinity.CheckpointError, match=r"takes .* KiB, and .* has 3.91 KiB free: free .* more"):
            engine.save_checkpoint(tmp_path, tag="next")
        with pytest.raises(infinity.CheckpointError, match=r"the model takes .* KiB, and .* more or save elsewhere"):
            engine.save_16bit_model(tmp_path / "model")
        monkeypatch.setattr(checks, "free_bytes", lambda path: 3 * sum(p.numel() * 4 for p in engine.parameters()))
        with pytest.raises(infinity.CheckpointError, match="more or save elsewhere"):
            engine.save_checkpoint(tmp_path, tag="next")  # a buffer and the step counts need room too
    assert sorted(f.name for f in tmp_path.iterdir()) == ["good", "latest", "model"]


class Killed(BaseException):
    """Ends what would be ended by a signal: nothing is cleared up on the way, as nothing below the tests catches it."""


def kill_at(module: Any, name: str, monkeypatch: pytest.MonkeyPatch, ready: Draft) -> None:
    """Complete a checkpoint as a process does that is killed where it comes to this function."""

    def killed(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(module, name, killed)
        with pytest.raises(Killed):
            ready.complete(0)
    die(ready)


def die(draft: Draft) -> None:
    """Release the lock, as the death of the process that made the draft does."""
    assert draft._work is not None
    draft._work.release()


def some_files(draft: Draft) -> Draft:
    """What a save of no model writes, with a file for each rank of two."""
    draft.make(0)
    files = {}
    for name in (".metadata", "rank0.pt", "rank1.pt"):
        write_durably(draft.folder / name, name.encode())
        files[name] = StoredFile(len(name), hashlib.sha256(name.encode()).hexdigest())
    made = Manifest(saved="2026-11-22", global_steps=3, ranks=2, files=files, tag=draft.tag)
    draft.write_manifest(made)
    return draft


def saved(root: Path, tag: str, *, keep: int = 0) -> None:
    some_files(Draft(root, tag)).complete(keep)


def contents(root: Path) -> dict[str, bytes | None]:
    return {str(each.relative_to(root)): each.read_bytes() if each.is_file() else None for each in root.rglob("*")}


def test_a_save_touches_nothing_that_is_not_its_own(tmp_path: Path) -> None:
    """Whatever other people's files are called, even as older versions and killed saves called theirs."""
    for name in (".venv.old", ".notes.old", ".data.partial", ".latest.partial", ".one.partial", "dataset"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    theirs = tmp_path / f"{work_folder.PREFIX}0123456789abcdef"  # not written by us, whatever it is called
    theirs.mkdir()
    (theirs / "about.json").write_text(json.dumps({"target": "one", "host": "here", "pid": 1}))
    (tmp_path / ".notes.partial").write_text("a file")
    before = contents(tmp_path)
    saved(tmp_path, "one")
    (tmp_path / "one").rename(tmp_path / "best")  # by hand: it is the user's to remove
    subprocess.run(["cp", "-r", tmp_path / "best", tmp_path / "copy"], check=True)
    before |= {k: v for k, v in contents(tmp_path).items() if k.startswith(("best", "copy"))}
    for tag in ("two", "three", "two", "four"):
        saved(tmp_path, tag, keep=1)
    find(tmp_path, None)
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert {each.name for each in tmp_path.iterdir() if each.name not in before} == {"four", "latest"}


def test_what_others_put_into_a_checkpoint_stays_when_it_goes_or_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, "one")
    saved(tmp_path, "two")
    for tag in ("one", "two"):
        (tmp_path / tag / "notes.txt").write_text(tag)
    saved(tmp_path, "two", keep=1)
    assert contents(tmp_path / "one") == {"notes.txt": b"one"}
    assert contents(tmp_path / "two").keys() == {".metadata", "rank0.pt", "rank1.pt", "manifest.json", "notes.txt"}
    assert (tmp_path / "two" / "notes.txt").read_text() == "two"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "one", "two"]


@pytest.mark.parametrize("name", ["one", "latest"])
@pytest.mark.parametrize("kind", ["folder", "file", "link", "stock checkpoint"])
def test_a_name_that_something_else_bears_is_told_before_anything_is_written(
    name: str, kind: str, tmp_path: Path
) -> None:
    place = tmp_path / "root" / name
    place.parent.mkdir()
    if kind == "file":
        place.write_text("older")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        (place / (".metadata" if kind == "stock checkpoint" else "data")).touch()
    before = contents(tmp_path)
    if (name, kind) == ("latest", "file"):
        saved(tmp_path / "root", "one")
        return
    with pytest.raises(infinity.CheckpointError, match=f"{name} (exists already|is not a file).*move it away"):
        saved(tmp_path / "root", "one")
    assert contents(tmp_path) == before


def test_two_jobs_save_to_one_folder(tmp_path: Path) -> None:
    """Whatever one does, what the other is writing stays; who completes last has the name."""
    theirs = some_files(Draft(tmp_path, "one"))
    saved(tmp_path, "one", keep=1)
    find(tmp_path, None)
    assert theirs.folder.is_dir()
    other = some_files(Draft(tmp_path, "one"))
    theirs.complete(1)
    other.discard()
    assert contents(tmp_path).keys() == {"latest", "one", *(f"one/{name}" for name in contents(tmp_path / "one"))}


@pytest.mark.parametrize(
    ("place", "instant"),
    [
        (checkpoint_draft, "_check_name"),
        (checkpoint_draft, "_rename_latest"),
        (WorkFolder, "remove"),
        (work_folder, "remove_named"),
    ],
)
def test_a_save_that_is_killed_at_its_end_leaves_a_whole_checkpoint(
    place: Any, instant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the older of that name is set aside, when the new one has it, and while the older is removed."""
    saved(tmp_path, "best")
    before = contents(tmp_path / "best")
    ready = some_files(Draft(tmp_path, "best"))
    kill_at(place, instant, monkeypatch, ready)
    assert find(tmp_path, "best") == tmp_path / "best"
    assert contents(tmp_path / "best") == before
    saved(tmp_path, "other")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best", "latest", "other"]
    assert contents(tmp_path / "best") == before


def test_what_a_killed_save_set_aside_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "best")
    before = contents(tmp_path / "best")
    ready = some_files(Draft(tmp_path, "best"))
    kill_at(work_folder, "sync", monkeypatch, ready)
    assert not (tmp_path / "best").exists()
    assert find(tmp_path, None) == tmp_path / "best"
    assert contents(tmp_path / "best") == before


def test_what_another_machine_left_stays_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all file systems show a lock to other machines."""
    monkeypatch.setattr(work_folder.socket, "gethostname", lambda: "elsewhere")
    left = some_files(Draft(tmp_path, "one"))
    die(left)
    monkeypatch.undo()
    saved(tmp_path, "two")
    assert left.folder.is_dir()
    now = time.time()
    monkeypatch.setattr(work_folder.time, "time", lambda: now + 25 * 3600)
    saved(tmp_path, "two")
    assert not left.work_folder.exists()


def test_ranks_that_see_different_folders_make_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, "one")
    draft = Draft(tmp_path, "two")
    draft.make(0)
    files = {name: StoredFile(3, "0" * 64) for name in ("rank0.pt", "rank1.pt")}
    write_durably(draft.folder / "rank0.pt", b"abc")
    with pytest.raises(
        infinity.CheckpointError, match=r"rank1\.pt is missing\): save to a folder that all ranks share"
    ):
        draft.write_manifest(Manifest(saved="", global_steps=0, ranks=2, files=files))
    draft.discard()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "one"]


def test_a_checkpoint_is_on_the_drive_before_it_has_its_name(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.suffix != ".distcp":
            synced.append(f"{path.relative_to(tmp_path)} among {sorted(f.name for f in tmp_path.iterdir())}")
        fsync(descriptor)

    with engine_for(nvme_path) as engine:
        monkeypatch.setattr(os, "fsync", watch)
        engine.save_checkpoint(tmp_path, tag="one")
    (work,) = {line.split("/")[0] for line in synced if line.startswith(".infinity")}
    assert synced == [
        f"{work}/new/.metadata.tmp among ['{work}']",
        f"{work}/new/rank0.pt among ['{work}']",
        f"{work}/new/manifest.json among ['{work}']",
        f"{work}/new among ['{work}']",
        f"{work}/latest among ['{work}']",
        f". among ['{work}', 'one']",
        f". among ['{work}', 'latest', 'one']",
    ]


def test_a_checkpoint_is_for_nobody_else(nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        engine.save_checkpoint(tmp_path, tag="one")
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "one").iterdir()} == {0o600}


def test_the_oldest_checkpoints_beyond_what_is_kept_go(nvme_path: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    settings = config(nvme_path)
    settings["infinity"]["checkpoint_keep"] = 2
    engine, *_ = infinity.initialize(model=Model(), config=settings)
    with engine:
        for tag in ("b", "a", "c", "a"):
            engine.save_checkpoint(tmp_path, tag=tag)
        assert sorted(f.name for f in tmp_path.iterdir()) == ["a", "c", "latest", "mine"]
        engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, tag="c")


@pytest.mark.parametrize("name", [".metadata", "rank0.pt", "__0_3.distcp"])
def test_one_wrong_bit_is_found_before_anything_is_loaded(name: str, nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        engine.save_checkpoint(tmp_path, tag="one")
        expected = steps(engine, 0, 1)
        engine.load_checkpoint(tmp_path)
        content = bytearray((tmp_path / "one" / name).read_bytes())
        content[len(content) // 2] ^= 4
        (tmp_path / "one" / name).write_bytes(content)
        with pytest.raises(infinity.CheckpointError, match=rf"{name} is damaged \(its bytes have changed"):
            engine.load_checkpoint(tmp_path)
        assert steps(engine, 0, 1) == expected


def test_a_link_or_a_pipe_in_a_checkpoint_is_not_followed(nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        engine.save_checkpoint(tmp_path, tag="one")
        file = tmp_path / "one" / "__0_3.distcp"
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(infinity.CheckpointError, match="symbolic link"):
            engine.load_checkpoint(tmp_path)
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(infinity.CheckpointError, match="not a regular file"):
            engine.load_checkpoint(tmp_path)


def test_no_code_of_a_checkpoint_is_run(nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        engine.save_checkpoint(tmp_path, tag="one")
        (tmp_path / "one" / "manifest.json").unlink()  # as in a checkpoint of another program
        for file in (".metadata", "rank0.pt"):
            whole = (tmp_path / "one" / file).read_bytes()
            (tmp_path / "one" / file).write_bytes(pickle.dumps(MakesFolder(tmp_path / "ran")))
            with pytest.raises(infinity.CheckpointError, match="damaged"):
                engine.load_checkpoint(tmp_path)
            (tmp_path / "one" / file).write_bytes(whole)
        for file in (tmp_path / "one").glob("*.distcp"):
            file.write_bytes(pickle.dumps(MakesFolder(tmp_path / "ran")))
        with pytest.raises(infinity.CheckpointError):
            engine.load_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", [".metadata", "rank0.pt", "latest", "__0_0.distcp", "largest"])
@pytest.mark.parametrize("damage", ["cut", "gone", "noise"])
def test_a_damaged_checkpoint_is_told_in_words(file: str, damage: str, nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        engine.save_checkpoint(tmp_path, tag="older")
        engine.save_checkpoint(tmp_path, tag="newer")
        spoiled = tmp_path / file if file == "latest" else tmp_path / "newer" / file
        if file == "largest":
            spoiled = max((tmp_path / "newer").glob("*.distcp"), key=lambda data: data.stat().st_size)
        if damage == "gone":
            spoiled.unlink()
        elif damage == "cut":
            spoiled.write_bytes(spoiled.read_bytes()[: spoiled.stat().st_size // 3])
        else:
            spoiled.write_bytes(b"\x93no/ise" * (spoiled.stat().st_size // 7 + 1))
        with pytest.raises(
            infinity.CheckpointError, match=r"(newer|latest).*older|name a tag|torch.distributed"
        ) as caught:
            engine.load_checkpoint(tmp_path)
        assert caught.value.__cause__ is None
        engine.load_checkpoint(tmp_path, tag="older")
        steps(engine, 0, 1)


def test_a_checkpoint_in_the_middle_of_a_step_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    with engine_for(nvme_path) as engine:
        steps(engine, 0, 1)
        engine.backward(engine(torch.arange(5).view(1, 5)).float().mean())
        with pytest.raises(infinity.CheckpointError, match=r"middle of a step .* save after the step\(\)"):
            engine.save_checkpoint(tmp_path)
        engine.step()
        engine.save_checkpoint(tmp_path)


def test_a_step_begins_with_a_load_whatever_the_accumulation_was(nvme_path: Path, tmp_path: Path) -> None:
    def engine(accumulation: int) -> infinity.Engine:
        settings = {**config(nvme_path), "gradient_accumulation_steps": accumulation}
        made, *_ = infinity.initialize(model=Model(), config=settings)
        return made

    with engine(2) as saver:
        steps(saver, 0, 4)
        saver.save_checkpoint(tmp_path)
    with engine(3) as loader:
        loader.load_checkpoint(tmp_path)
        assert loader.global_steps == 2
        steps(loader, 0, 2)
        assert loader.global_steps == 2
        steps(loader, 2, 1)
        assert loader.global_steps == 3


def test_an_empty_parameter_group_is_saved_and_loaded(nvme_path: Path, tmp_path: Path) -> None:
    def engine() -> infinity.Engine:
        torch.manual_seed(0)
        model = Model()
        groups = [{"params": [], "lr": 0.5}, {"params": list(model.parameters()), "lr": 0.25}]
        return engine_for(nvme_path, model=model, model_parameters=groups, lr_scheduler=lambda optimizer: None)

    with engine() as saver:
        steps(saver, 0, 1)
        for group in saver.optimizer.param_groups:
            group["lr"] /= 2
        saver.save_checkpoint(tmp_path)
        expected = steps(saver, 1, 2)
    with engine() as loader:
        loader.load_checkpoint(tmp_path)
        assert loader.get_lr() == [0.25, 0.125]
        assert steps(loader, 1, 2) == expected


def test_a_16_bit_model_that_cannot_be_written_leaves_nothing(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = ModelFiles._end_file
    written: list[Path] = []

    def full(files: ModelFiles) -> None:
        ended(files)
        written.extend(files._work.new.glob("*.safetensors"))
        if written:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_files, "SAFETENSORS_BYTES_MAX", 3000)
    monkeypatch.setattr(ModelFiles, "_end_file", full)
    with engine_for(nvme_path) as engine:
        with pytest.raises(infinity.CheckpointError, match=r"No space left on device.*free space there"):
            engine.save_16bit_model(tmp_path)
        assert written
        assert not list(tmp_path.iterdir())


def test_a_16_bit_model_is_the_masters_rounded(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "SAFETENSORS_BYTES_MAX", 3000)  # several files and an index
    with engine_for(nvme_path) as engine:
        steps(engine, 0, 2)
        engine.save_16bit_model(tmp_path)
        masters = {name: p.full_tensor() + 0 for name, p in engine.module.named_parameters()}
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert (tmp_path / "model.safetensors.index.json").is_file()
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(stored) == {*masters, "scale"}
    for name, master in masters.items():
        assert torch.equal(stored[name], master.to(torch.bfloat16))
    with engine_for(nvme_path, weights=tmp_path, seed=9) as engine:  # and back again
        for name, p in engine.module.named_parameters():
            assert torch.equal(p.full_tensor() + 0, stored[name].float())


def write_model(root: Path, value: float) -> None:
    tensors = {f"w{number}": (torch.float32, (4,)) for number in range(3)}
    files = ModelFiles(root, tensors, bytes_max=model_files.SAFETENSORS_BYTES_MAX)
    try:
        for name in tensors:
            files.add(name, [torch.full((4,), value)])
        files.finish()
        files.close()
    finally:
        files._work.release()  # as the death of a process does


def read_model(root: Path, entry: str) -> set[float]:
    """By a reader that looks for `entry` first, as others look for the other."""
    names = ["model.safetensors", "model.safetensors.index.json"]
    (there, *_) = [name for name in sorted(names, key=lambda name: name != entry) if (root / name).exists()]
    files = {there}
    if there.endswith(".json"):
        files = set(json.loads((root / there).read_text())["weight_map"].values())
    tensors = {k: v for file in files for k, v in load_file(root / file).items()}
    assert tensors.keys() == {"w0", "w1", "w2"}
    return {float(v) for tensor in tensors.values() for v in tensor}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_a_16_bit_model_takes_the_place_of_the_older_one_only(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before whatever change of a name, a whole model is there; what others wrote stays."""
    others = {
        "model_ema.safetensors": b"theirs",
        "model-00001-of-00009.safetensors": b"theirs",
        "modelling.safetensors": b"",
    }
    for attempt in range(30):
        root = tmp_path / str(attempt)
        root.mkdir()
        for name, content in others.items():
            (root / name).write_bytes(content)
        monkeypatch.setattr(model_files, "SAFETENSORS_BYTES_MAX", 100 if before == 1 else 16)
        write_model(root, 1.0)
        assert read_model(root, "model.safetensors") == {1.0}
        monkeypatch.setattr(model_files, "SAFETENSORS_BYTES_MAX", 100 if after == 1 else 16)
        ended = write_killed(root, attempt, monkeypatch)
        for entry in ("model.safetensors", "model.safetensors.index.json"):
            assert read_model(root, entry) <= {1.0, 2.0}
            assert len(read_model(root, entry)) == 1
            assert read_model(root, entry) == {2.0} or not ended
        assert {name: (root / name).read_bytes() for name in others} == others
        if ended:
            break
        write_model(root, 2.0)
        assert read_model(root, "model.safetensors") == read_model(root, "model.safetensors.index.json") == {2.0}
    assert ended
    assert attempt >= after
    ours = {"model.safetensors"} if after == 1 else {"model.safetensors.index.json"}
    training_state = {each.name for each in root.iterdir()} - others.keys() - ours
    assert len(training_state) == (0 if after == 1 else 3)


def write_killed(root: Path, changes: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Write a model as a process does that is killed after so many changes of names in `root`; whether it ended before."""
    left = [changes]

    def counted(change: Any) -> Any:
        def call(path: Path, *arguments: Any, **keywords: Any) -> Any:
            if path.parent == root or any(isinstance(each, Path) and each.parent == root for each in arguments):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return change(path, *arguments, **keywords)

        return call

    with monkeypatch.context() as patched:
        for name in ("rename", "unlink"):
            patched.setattr(Path, name, counted(getattr(Path, name)))
        try:
            write_model(root, 2.0)
        except Killed:
            return False
    return True


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_of_others_is_moved_aside(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_files, "SAFETENSORS_BYTES_MAX", 100 if count == 1 else 16)
    save_file({"theirs": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"theirs": "model-00001-of-00003.safetensors"}}'
    )
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"theirs")
    before = sorted(contents(tmp_path).values(), key=repr)
    write_model(tmp_path, 2.0)
    assert caplog.text.count("was not written by save_16bit_model") == 2
    for entry in ("model.safetensors", "model.safetensors.index.json"):
        assert read_model(tmp_path, entry) == {2.0}
    assert set(before) <= set(contents(tmp_path).values())


def test_weights_fill_a_model_built_without_memory(nvme_path: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = Model()
    tensors = {name: t.clone() for name, t in source.state_dict().items() if name != "head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    with infinity.init_empty():
        empty = Model()
    empty.scale = torch.tensor(2.0)
    with engine_for(nvme_path, model=empty, weights=tmp_path / "model.safetensors") as engine:
        losses = steps(engine, 0, 3)
    with engine_for(None, model=source) as engine:
        assert steps(engine, 0, 3) == losses


@pytest.mark.parametrize(
    ("spoil", "pattern"),
    [
        (lambda t: t.pop("blocks.0.weight"), r"missing blocks\.0\.weight"),
        (lambda t: t.update(more=torch.ones(1)), "unknown more"),
        (lambda t: t.update({"blocks.0.bias": torch.ones(3)}), r"blocks\.0\.bias has shape \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(spoil: Any, pattern: str, nvme_path: Path, tmp_path: Path) -> None:
    tensors = {name: t.clone() for name, t in Model().state_dict().items() if name != "head.weight"}
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(infinity.CheckpointError, match=pattern):
        engine_for(nvme_path, weights=tmp_path)
    assert not list(nvme_path.iterdir())


def test_a_buffer_without_memory_gets_the_value_in_the_file(nvme_path: Path, tmp_path: Path) -> None:
    save_file({name: t.clone() for name, t in Model().state_dict().items() if name != "head.weight"}, tmp_path / "m")
    with infinity.init_empty():
        empty = Model()  # its buffer too, and nothing here computes it
    with engine_for(nvme_path, model=empty, weights=tmp_path / "m") as engine:
        assert engine.module.scale.item() == 2.0
        steps(engine, 0, 1)


def test_a_file_without_a_buffer_that_belongs_in_it_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    tensors = {name: t.clone() for name, t in Model().state_dict().items() if name not in ("head.weight", "scale")}
    save_file(tensors, tmp_path / "m")
    with pytest.raises(infinity.CheckpointError, match="missing scale"):
        engine_for(nvme_path, weights=tmp_path / "m")
    model = Model()
    del model.scale
    model.register_buffer("scale", torch.tensor(3.0), persistent=False)
    with engine_for(nvme_path, model=model, weights=tmp_path / "m") as engine:
        assert engine.module.scale.item() == 3.0


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_damaged_weights_name_their_file(file: str, nvme_path: Path, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"\x40\0\0\0\0\0\0\0{")
    with pytest.raises(infinity.CheckpointError, match=rf"{file} is damaged.*again"):
        engine_for(nvme_path, weights=tmp_path)
    (tmp_path / file).unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(infinity.CheckpointError, match=r"gone.safetensors is damaged.*again"):
        engine_for(nvme_path, weights=tmp_path)


@pytest.mark.parametrize("frozen", [False, True])
def test_each_tensor_comes_from_the_file_that_the_index_names(
    frozen: bool, nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files may hold more, such as older values; and a single file counts before an index, as for from_pretrained."""
    index = tmp_path / "model.safetensors.index.json"
    stale, bias = {"weight": torch.full((4, 4), 2.0)}, {"bias": torch.zeros(4)}
    save_file({"weight": torch.full((4, 4), 1.0)}, tmp_path / "a")
    save_file({**stale, **bias, "not of the model": torch.ones(1)}, tmp_path / "b")

    def read() -> float:
        model = nn.Linear(4, 4)
        model.weight.requires_grad_(not frozen)
        with engine_for(nvme_path, model=model, weights=tmp_path) as engine:
            return float(engine.module.state_dict()["weight"].full_tensor()[0, 0])

    index.write_text(json.dumps({"weight_map": {"weight": "a", "bias": "b"}}))
    assert read() == 1.0
    index.write_text(json.dumps({"weight_map": {"weight": "a", "bias": "a"}}))
    with pytest.raises(infinity.CheckpointError, match=r"a lacks bias, which model.* lists: fetch both again"):
        read()
    save_file({**stale, **bias}, tmp_path / "model.safetensors")
    assert read() == 2.0 and caplog.text.count("using the former") == 1


@pytest.mark.inputs
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_of_a_model_are_read_or_refused_in_words(data: st.DataObject, tmp_path: Path) -> None:
    """Of the header of a file, or of the index; values may be any."""
    tensors = {name: t.clone() for name, t in Model().state_dict().items() if name != "head.weight"}
    save_file(tensors, tmp_path / "part")
    weights = {"weight_map": dict.fromkeys(tensors, "part")}
    (tmp_path / "index.json").write_text(json.dumps(weights))
    victim = tmp_path / data.draw(st.sampled_from(["part", "index.json"]))
    content = bytearray(victim.read_bytes())
    changeable = len(content) if victim.name == "index.json" else 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, changeable - 1))] = data.draw(st.integers(0, 255))
    victim.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    with contextlib.suppress(infinity.CheckpointError):
        materialize.load_weights(Model(), tmp_path / "index.json")


def test_names_are_those_of_the_model_without_wrappers(nvme_path: Path, tmp_path: Path) -> None:
    """torch's activation checkpointing puts a module around each block; files fit with it and without."""

    def wrapped() -> Model:
        torch.manual_seed(0)
        model = Model()
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
        return model

    with engine_for(nvme_path, model=wrapped()) as engine:
        losses = steps(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "all")
        engine.save_16bit_model(tmp_path / "model")
        losses += steps(engine, 2, 2)
    with engine_for(nvme_path) as engine:
        assert steps(engine, 0, 2) == losses[:2]
        engine.load_checkpoint(tmp_path / "all")
        assert steps(engine, 2, 2) == losses[2:]
    for model in (wrapped(), Model()):
        with engine_for(nvme_path, model=model, seed=3, weights=tmp_path / "model") as engine:
            first = next(iter(engine.module.parameters())).full_tensor() + 0
            assert torch.equal(first, load_file(tmp_path / "model" / "model.safetensors")["embedding.weight"].float())
    with infinity.init_empty():
        empty = wrapped()
    with engine_for(nvme_path, model=empty, weights=tmp_path / "model") as engine:
        steps(engine, 0, 1)


def test_models_built_without_memory_are_initialised_alike_everywhere(nvme_path: Path) -> None:
    def built() -> nn.Module:
        with infinity.init_empty():
            model = Model()
        model.scale = torch.tensor(2.0)
        return model

    with engine_for(None, model=built(), seed=4) as engine:
        expected = steps(engine, 0, 3)
    with engine_for(nvme_path, model=built(), seed=4) as engine:
        assert steps(engine, 0, 3) == expected


def test_an_init_fn_and_a_module_without_reset_parameters(nvme_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    with infinity.init_empty():
        model = nn.Sequential(nn.Linear(16, 16), Scale())
    with pytest.raises(infinity.ConfigError, match=r"no reset_parameters\(\) method: 1; pass init_fn"):
        engine_for(nvme_path, model=model)

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    with engine_for(nvme_path, model=model, init_fn=init) as engine:
        assert all(bool((p.full_tensor() + 0 == 0.5).all()) for p in engine.module.parameters())


def test_a_forward_before_values_were_given_is_refused(nvme_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="8MiB") as swap:
        swap.page(model)
        with pytest.raises(infinity.InfinityError, match="is uninitialised"):
            model(torch.ones(1, 4))
        first_values.initialize_values(model, {"weight", "bias"}, torch.device("cpu"), None)
        assert model(torch.ones(1, 4)).isfinite().all()


def test_a_meta_buffer_that_nothing_fills_is_refused(nvme_path: Path) -> None:
    with infinity.init_empty():
        model = Model()
        model.scale = torch.tensor([2.0])  # computed in a constructor, and there is no reset_parameters

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    with pytest.raises(infinity.ConfigError, match="buffers on the meta device were not initialised: scale"):
        engine_for(nvme_path, model=model, init_fn=fill)
    assert not list(nvme_path.iterdir())
