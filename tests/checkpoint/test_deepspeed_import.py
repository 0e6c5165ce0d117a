"""DeepSpeed's checkpoints as infinity's: bit for bit, and training resumes from them unchanged."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from converting import interrupted, peak_of
from deepspeed_saves import TAG, Save, change
from hostile import MakesFolder
from torch import nn

import infinity
from infinity.checkpoint import piecewise
from infinity.checkpoint.dcp_storage import Reader
from infinity.checkpoint.deepspeed_import import import_deepspeed
from infinity.checkpoint.work_folder import WorkFolder
from infinity.cli.ckpt import main

pytestmark = pytest.mark.usefixtures("one_rank")

SAVED, END = 3, 6
WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 5}


class Model(nn.Module):
    """With a tied head, a buffer, a frozen parameter, a scalar, and one that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.uneven = nn.Parameter(torch.randn(7))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(32, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h)) * self.gain + self.uneven.sum()
        return self.head(h) * self.scale


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
    ]


def rate(step: int) -> float:
    """DeepSpeed's WarmupLR in the step of this number, counted from 0."""
    return 0.0 if step == 0 else 0.01 * min(1.0, math.log(step) / math.log(5))


def loss_of(model: Any, step: int) -> torch.Tensor:
    x = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> list[float]:
    losses = []
    for step in range(first, end):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for group in optimizer.param_groups:
        group["lr"] = rate(end)  # as the schedule leaves it
    return losses


@pytest.fixture
def save() -> Save:
    """A training of three steps."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, fused=True)
    train(model, optimizer, 0, SAVED)
    return Save(model, optimizer)


def engine_of(nvme_path: Path | None) -> infinity.Engine:
    torch.manual_seed(1)
    zero: dict[str, Any] = {"stage": 3}
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    if nvme_path is not None:
        offload = {"device": "nvme", "nvme_path": str(nvme_path)}
        zero |= {"offload_param": offload, "offload_optimizer": offload}
        config["infinity"] = {"pinned_bytes_max": "16MiB"}
    model = Model()
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=groups_of(model))
    return engine


WRITERS: dict[str, tuple[Callable[..., Path], int]] = {
    "stage 3, 1 rank": (Save.write_stage3, 1),
    "stage 3, 2 ranks": (Save.write_stage3, 2),
    "stage 3, 5 ranks": (Save.write_stage3, 5),
    "stage 2, 1 rank": (Save.write_stage2, 1),
    "stage 2, 3 ranks": (Save.write_stage2, 3),
    "universal": (Save.write_universal, 2),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_training_goes_on_from_it(
    kind: str, save: Save, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piecewise, "_PIECE_NUMEL", 32 * 5)  # so that tensors are cut
    write, save.ranks = WRITERS[kind]
    save.model_state["dp_world_size"] = save.ranks
    folder = write(save, tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    master = {name: value.detach().clone() for name, value in save.model.named_parameters()}
    moments = {save.names[p]: {k: v.clone() for k, v in state.items()} for p, state in save.optimizer.state.items()}
    expected = train(save.model, save.optimizer, SAVED, END)
    for place in (None, nvme_path):
        with engine_of(place) as engine:
            path, client_state = engine.load_checkpoint(tmp_path / "out")
            assert Path(path).name == folder.name
            assert {key: client_state[key] for key in ("seen",)} == {"seen": 12}
            assert torch.equal(client_state["more"][1]["b"], torch.ones(2))
            assert (engine.global_steps, engine.skipped_steps) == (3, 1)
            assert engine.get_lr() == [rate(SAVED)] * 2
            engine.save_checkpoint(tmp_path / f"again-{place is None}")
            losses = []
            for step in range(SAVED, END):
                loss = loss_of(engine, step)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            assert losses == pytest.approx(expected, rel=1e-6)
        again = infinity.get_fp32_state_dict_from_zero_checkpoint(tmp_path / f"again-{place is None}")
        assert all(torch.equal(again[name].view(value.shape), value) for name, value in master.items())
    stored = stored_tensors(tmp_path / "out" / folder.name)
    for name, state in moments.items():
        for key, value in state.items():
            assert torch.equal(stored[f"optimizer.state.{name}.{key}"].view(value.shape), value), (name, key)


def stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    state = {key: torch.empty(entry.size) for key, entry in Reader(path).tensors().items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_what_comes_over_is_told(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless: list[Any] = []
    endless.append(endless)
    save.model_state |= {
        "endless": endless,
        "random_ltd": {"a": 1},
        "arguments": Path("x"),
        "lr_scheduler": {"last_epoch": Path("x")},
    }
    save.write_stage3(tmp_path / "theirs")
    command = ["import", str(tmp_path / "theirs"), str(tmp_path / "out")]
    assert main([*command, "--dry-run"]) == 0
    out, _ = capsys.readouterr()
    assert "ZeRO stage 3, 2 rank(s), step 3" in out and "nothing is written" in out
    assert not (tmp_path / "out").exists()
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["written"], told["ranks"], told["frozen_tensors"], told["parameter_groups"]) == (True, 2, 1, 2)
    assert told["tied"] == {"head.weight": "embedding.weight"}
    assert (told["buffers"], told["client_state"]) == (["scale"], ["more", "seen"])
    left_out = "; ".join(told["left_out"])
    assert all(
        name in left_out for name in ("random numbers", "arguments", "endless", "learning-rate", "random_ltd")
    ), left_out
    assert main(["info", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_the_loss_scale_and_schedules_of_torch_come_over(save: Save, tmp_path: Path) -> None:
    schedule = {"last_epoch": 3, "_step_count": 4, "base_lrs": [0.01, 0.01], "lr_lambdas": [None, None]}
    save.model_state["lr_scheduler"] = schedule
    save.write_stage3(tmp_path / "theirs")
    state = import_deepspeed(tmp_path / "theirs" / TAG, tmp_path / "out").training_state
    assert state["lr_scheduler"] == schedule
    assert state["loss_scale"] == {"scale": 256.0, "step": 5, "last_overflow": 1, "hysteresis": 2}


@pytest.mark.parametrize("write", [Save.write_stage3, Save.write_stage2, Save.write_universal])
def test_no_code_in_it_is_run(write: Callable[..., Path], save: Save, tmp_path: Path) -> None:
    save.model_state["evil"] = MakesFolder(tmp_path / "marker")
    for group in save.optimizer.param_groups:
        group["evil"] = save.model_state["evil"]
    write(save, tmp_path / "theirs")
    imported = import_deepspeed(tmp_path / "theirs", tmp_path / "out")
    assert "evil" in "; ".join(imported.left_out)
    assert not (tmp_path / "marker").exists()
    torch.load(next((tmp_path / "theirs").glob("*/*model_states.pt")), weights_only=False)
    assert (tmp_path / "marker").exists()  # else this proved nothing


@pytest.mark.parametrize("write", [Save.write_stage3, Save.write_stage2])
def test_groups_of_deepspeeds_own_adams(write: Callable[..., Path], save: Save, tmp_path: Path) -> None:
    """They don't say whether weight decay is decoupled, and older ones count steps in the group."""
    save.model_state["ds_config"] = {"optimizer": {"type": "Adam", "params": {"lr": 0.02, "adam_w_mode": False}}}
    for state in save.optimizer.state.values():
        del state["step"]
    for group in save.optimizer.param_groups:
        settings = {key: group[key] for key in ("params", "lr", "betas", "eps", "weight_decay")}
        group.clear()
        group.update(settings, bias_correction=True, step=7)
    path = import_deepspeed(write(save, tmp_path / "theirs"), tmp_path / "out").path
    group = {"decoupled_weight_decay": True, "initial_lr": 0.0, "lr": 0.0}
    state = {"optimizer": {"param_groups": [dict(group), dict(group)]}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert state["optimizer"]["param_groups"][1] == {
        "decoupled_weight_decay": False,
        "initial_lr": 0.02,
        "lr": pytest.approx(rate(SAVED)),
    }
    assert {value.item() for key, value in stored_tensors(path).items() if key.endswith(".step")} == {7}


def test_which_one_is_read(save: Save, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    save.write_universal(theirs)
    assert import_deepspeed(theirs, tmp_path / "out", dry=True).source.kind == "universal"
    save.write_stage2(theirs, stage=1)
    assert import_deepspeed(theirs, tmp_path / "out", dry=True).source.kind == "ZeRO stage 1"
    other = import_deepspeed(theirs, tmp_path / "out", tag=f"{TAG}_universal", dry=True)
    assert other.source.kind == "universal"
    for tag, why in {"../x": "one folder name", "": "one folder name", "none": "not a DeepSpeed checkpoint"}.items():
        with pytest.raises(infinity.CheckpointError, match=why):
            import_deepspeed(theirs, tmp_path / "out", tag=tag)
    (theirs / "latest").write_text("gone")
    with pytest.raises(infinity.CheckpointError, match=r"theirs/gone is not a DeepSpeed checkpoint"):
        import_deepspeed(theirs, tmp_path / "out")
    with pytest.raises(infinity.CheckpointError, match="is not a folder"):
        import_deepspeed(theirs / "nothing", tmp_path / "out")


def optimizer_file(folder: Path, rank: int = 0) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(folder: Path, rank: int = 0) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank's optimizer is missing": (
        lambda folder: optimizer_file(folder).unlink(),
        r"lacks bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt: copy the files of all its ranks",
    ),
    "the last rank's optimizer is missing": (
        lambda folder: optimizer_file(folder, 1).unlink(),
        "has files of 1 ranks instead of 2: copy the files of all its ranks",
    ),
    "a rank's model state is missing": (
        lambda folder: model_file(folder).unlink(),
        r"lacks zero_pp_rank_0_mp_rank_00_model_states.pt",
    ),
    "the last rank's model state is missing": (
        lambda folder: model_file(folder, 1).unlink(),
        "has files of 1 ranks instead of 2: copy the files of all its ranks",
    ),
    "no optimizer": (
        lambda folder: [optimizer_file(folder, rank).unlink() for rank in range(2)],
        r"has no \*_optim_states.pt",
    ),
    "cut off": (
        lambda folder: os.truncate(optimizer_file(folder), 5000),
        "rank_0_mp_rank_00_optim_states.pt is cut off",
    ),
    "mixed": (lambda folder: change(model_file(folder, 1), global_steps=4), "is mixed: its ranks are at steps 3, 4"),
    "mixed optimizers": (
        lambda folder: change(optimizer_file(folder, 1), optimizer_state_dict__optimizer_state_dict__state__0__step=4),
        "is mixed: its optimizers are at steps 3, 4",
    ),
    "no moments": (
        lambda folder: change(optimizer_file(folder), optimizer_state_dict__optimizer_state_dict__state={}),
        "its optimizer has no moments",
    ),
    "amsgrad": (
        lambda folder: change(
            optimizer_file(folder), optimizer_state_dict__optimizer_state_dict__param_groups__0__amsgrad=True
        ),
        "Adam with amsgrad",
    ),
    "tensor parallel": (
        lambda folder: model_file(folder).rename(folder / "zero_pp_rank_0_mp_rank_01_model_states.pt"),
        "tensor- or pipeline-parallel",
    ),
    "tensor parallel by its word": (
        lambda folder: change(model_file(folder), mp_world_size=2),
        "tensor- or pipeline-parallel",
    ),
    "pipeline": (lambda folder: (folder / "layer_03-model_00-model_states.pt").touch(), "of a pipeline-parallel run"),
    "experts": (
        lambda folder: (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(),
        "expert files",
    ),
    "swap files": (lambda folder: (folder / "offloaded_tensors").mkdir(), "swap files"),
    "another optimizer": (
        lambda folder: change(model_file(folder), ds_config={"optimizer": {"type": "Lion"}}),
        "is of the optimizer Lion, but only Adam and AdamW",
    ),
    "another optimizer's state": (
        lambda folder: change(
            optimizer_file(folder), optimizer_state_dict__optimizer_state_dict__state={0: {"step": 1, "momentum": 2}}
        ),
        r"not Adam \(its state is momentum, step\)",
    ),
    "8-bit moments": (
        lambda folder: change(
            optimizer_file(folder), optimizer_state_dict__optimizer_state_dict__state={0: {"state1": 1, "qmap1": 2}}
        ),
        r"not Adam \(its state is qmap1, state1\)",
    ),
    "another layout": (
        lambda folder: change(model_file(folder), param_shapes=None),
        "is not in the format of DeepSpeed",
    ),
    "fewer elements": (
        lambda folder: change(optimizer_file(folder, 1), optimizer_state_dict__fp32_flat_groups__0=torch.zeros(7)),
        r"rank 1 has 7 elements of sub-group 0 instead of \d+",
    ),
    "values that are missing": (
        lambda folder: change(model_file(folder), shared_params={}),
        "no values of head.weight",
    ),
    "a config that is none": (
        lambda folder: change(model_file(folder), ds_config={"optimizer": [1]}),
        "is not in the format of DeepSpeed",
    ),
    "a shape that is none": (
        lambda folder: change(model_file(folder), **{"param_shapes__0__embedding.weight": (-11, -32)}),
        "is no shape",
    ),
    "a shape of 2 000 dimensions": (
        lambda folder: change(model_file(folder), **{"param_shapes__0__embedding.weight": (1,) * 2000}),
        "more than 64 dimensions",
    ),
    "steps before the first": (
        lambda folder: [change(model_file(folder, rank), global_steps=-1) for rank in range(2)],
        "impossible number -1",
    ),
    "steps without end": (
        lambda folder: [
            change(
                optimizer_file(folder, rank),
                optimizer_state_dict__optimizer_state_dict__state__0__step=torch.tensor(math.inf),
            )
            for rank in range(2)
        ],
        "it has a number that is not finite",
    ),
    "half a step": (
        lambda folder: change(model_file(folder), skipped_steps=0.5),
        r"impossible number 0\.5",
    ),
    "a learning rate that is none": (
        lambda folder: change(
            optimizer_file(folder), optimizer_state_dict__optimizer_state_dict__param_groups__0__lr=math.nan
        ),
        "it has a number that is not finite",
    ),
    "a name twice": (
        lambda folder: change(
            model_file(folder), shared_params=dict.fromkeys(["head.weight", "scale"], "embedding.weight")
        ),
        "two values under one name",
    ),
    "a schedule of steps without end": (
        lambda folder: change(model_file(folder), lr_scheduler={"last_batch_iteration": math.inf}),
        "it has a number that is not finite",
    ),
    "an object for a tensor": (
        lambda folder: change(model_file(folder), module__scale=Path("x")),
        "expected a tensor, got a pathlib",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_an_error_in_a_line(
    kind: str, save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, why = REFUSED[kind]
    damage(save.write_stage3(tmp_path / "theirs"))
    before = sorted(tmp_path.iterdir())
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("infinity-ckpt: ") and err.count("\n") == 1
    assert re.search(why, err), err
    assert sorted(tmp_path.iterdir()) == before


def test_out_must_be_free_and_have_the_space(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save.write_stage3(tmp_path / "theirs")
    before = sorted(tmp_path.iterdir())
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "theirs")]) == 1
    assert "exists already: remove it, or name another folder" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr("infinity.checkpoint.checks.free_bytes", lambda path: 4000)
        assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 1
    assert "has 3.91 KiB free" in capsys.readouterr().err

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(piecewise, "write_durably", full)
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_imports_are_alike_and_take_the_place_of_killed_ones(save: Save, tmp_path: Path) -> None:
    """OUT may be a link to an empty folder, as to one of a drive. What another import is writing stays."""
    save.write_stage3(tmp_path / "theirs")
    (tmp_path / "drive" / "there").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "drive" / "there")
    killed, writing = (WorkFolder.make(tmp_path / "drive", "there") for _ in range(2))
    killed.release()
    for out in ("out", "other"):
        assert main(["import", str(tmp_path / "theirs"), str(tmp_path / out)]) == 0
    assert [folder.exists() for folder in (killed.path, writing.path)] == [False, True]
    writing.remove()
    first, second = (sorted((tmp_path / out / TAG).iterdir()) for out in ("out", "other"))
    for ours, theirs in zip(first, second, strict=True):
        assert ours.name == "manifest.json" or ours.read_bytes() == theirs.read_bytes(), ours.name


def test_a_file_that_shrinks_meanwhile_leaves_nothing(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save.write_stage3(tmp_path / "theirs")
    before = sorted(tmp_path.iterdir())
    write = piecewise.UnreadState.write

    def shrinking(*arguments: Any) -> None:
        os.truncate(optimizer_file(folder), 2000)
        write(*arguments)

    monkeypatch.setattr(piecewise.UnreadState, "write", shrinking)
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 1
    assert "became shorter while it was read: start again" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_infinity_says_how_to_read_it(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save.write_stage3(tmp_path / "theirs")
    for theirs in (tmp_path / "theirs", tmp_path / "theirs" / TAG):
        for command in (["info"], ["verify"], ["consolidate", str(tmp_path / "out")]):
            assert main([command[0], str(theirs), *command[1:]]) == 1
            assert "infinity-ckpt import" in capsys.readouterr().err
    with engine_of(None) as engine, pytest.raises(infinity.CheckpointError, match="infinity-ckpt import"):
        engine.load_checkpoint(tmp_path / "theirs")


def test_ctrl_c_leaves_nothing(save: Save, tmp_path: Path) -> None:
    save.write_stage3(tmp_path / "theirs")
    before = sorted(tmp_path.iterdir())
    pieces = "infinity.checkpoint.piecewise:_Planner.resolve_data"
    error = interrupted(signal.SIGINT, pieces, "import", str(tmp_path / "theirs"), str(tmp_path / "out"))
    assert "Traceback" not in error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
def test_memory_is_bounded_by_a_few_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    Save(model, optimizer, sub_group_numel=1 << 40).write_stage3(tmp_path / "theirs")
    peak_bytes, report = peak_of("import", str(tmp_path / "theirs"), str(tmp_path / "out"))
    print(f"import: {report['nbytes'] >> 20} MiB written, memory grew by {peak_bytes >> 20} MiB at most")
    assert report["nbytes"] == 144 << 20 and peak_bytes < 40 << 20
