"""Monitors: every step is written once, with the numbers of the training, and what fails there costs the training nothing."""

from __future__ import annotations

import io
import logging
import math
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import launch
import pytest
import torch
from torch import nn

import infinity
from infinity.config import load_config
from infinity.runtime.monitors import check_monitors, make_monitors

pytestmark = pytest.mark.usefixtures("one_rank")

ALWAYS = {"train_loss", "lr", "grad_norm", "step_seconds"}
ON_NVME = {"read_bytes", "written_bytes", "stall_seconds"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 1, bias=False))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return loss_of(self.layers, x)


def loss_of(layers: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = layers(x).float().square().mean()
    return loss


def batch(number: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(number))


def make(folder: Path, nvme_path: Path | None = None, *, net: nn.Module | None = None, **changes: Any) -> Any:
    place = {"device": "nvme", "nvme_path": str(nvme_path)} if nvme_path is not None else {"device": "none"}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"},
        "infinity": {"pinned_bytes_max": "16MiB"},
        **changes,
    }
    engine, *_ = infinity.initialize(model=net or model(), config=settings)
    return engine


def one_step(engine: Any, number: int = 0) -> float:
    loss = loss_of(engine, batch(number))
    engine.backward(loss)
    engine.step()
    return loss.item()


def rows(folder: Path, name: str) -> list[tuple[int, float]]:
    """The rows of a file that begins as DeepSpeed's does."""
    head, *lines = (folder / "job" / f"Train_Samples_{name}.csv").read_text().splitlines()
    assert head == f"step,{name}"
    return [(int(samples), float(value)) for samples, value in (line.split(",") for line in lines)]


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_every_step_is_a_row_of_each_file_over_the_samples_so_far(where: str, nvme_path: Path, tmp_path: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}
    path = nvme_path if where == "nvme" else None
    engine = make(tmp_path, path, gradient_accumulation_steps=3, scheduler=schedule, steps_per_print=0)
    means, norms, rates, stats = [], [], [], []
    with engine:
        assert engine.monitor.enabled
        for step in range(3):
            losses = []
            for micro in range(3):
                losses.append(loss_of(engine, batch(3 * step + micro)))
                engine.backward(losses[-1])
                engine.step()
            means.append(sum(loss.item() for loss in losses) / 3)
            norms.append(engine.get_global_grad_norm())
            rates.append(engine.get_lr()[0])
            stats.append(engine.step_stats)
    names = {file.stem.removeprefix("Train_Samples_") for file in (tmp_path / "job").iterdir()}
    assert names == ALWAYS | (ON_NVME if where == "nvme" else set())
    assert [samples for samples, _ in rows(tmp_path, "lr")] == [6, 12, 18]
    assert [loss for _, loss in rows(tmp_path, "train_loss")] == pytest.approx(means, rel=1e-6)
    assert len({*means}) == 3
    assert rows(tmp_path, "grad_norm") == list(zip((6, 12, 18), norms, strict=True))
    assert rows(tmp_path, "lr") == list(zip((6, 12, 18), rates, strict=True))
    assert rows(tmp_path, "step_seconds") == [(6 * (i + 1), taken.seconds) for i, taken in enumerate(stats)]
    for name in ON_NVME if where == "nvme" else ():
        assert rows(tmp_path, name) == [(6 * (i + 1), getattr(taken, name)) for i, taken in enumerate(stats)]
    # A write counts when it has ended, on a busy drive in the step after its own: no one row need have any.
    assert where == "memory" or sum(nbytes for _, nbytes in rows(tmp_path, "written_bytes")) > 0


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_a_whole_step_is_written_as_it_returns_its_loss(schedule: str, nvme_path: Path, tmp_path: Path) -> None:
    own = {"pinned_bytes_max": "16MiB", "schedule": schedule}
    engine = make(tmp_path, nvme_path, net=WithLoss(), gradient_accumulation_steps=2, infinity=own)
    with engine:
        numbers = iter(range(6))
        losses = [engine.train_batch(map(batch, numbers)).item() for _ in range(3)]
    assert [loss for _, loss in rows(tmp_path, "train_loss")] == pytest.approx(losses, rel=1e-6)
    assert [samples for samples, _ in rows(tmp_path, "train_loss")] == [4, 8, 12]


def test_a_loss_that_the_caller_divided_counts_as_it_is(tmp_path: Path) -> None:
    with make(tmp_path, gradient_accumulation_steps=2) as engine:
        losses = []
        for micro in range(3):  # a boundary of the caller's own, as of a Trainer at the end of an epoch
            engine.set_gradient_accumulation_boundary(micro == 2)
            losses.append(loss_of(engine, batch(micro)) / 3)
            engine.backward(losses[-1], scale_wrt_gas=False)
            engine.step()
    assert rows(tmp_path, "train_loss") == [(4, pytest.approx(sum(loss.item() for loss in losses)))]


def test_the_loss_of_dropped_gradients_is_dropped(tmp_path: Path) -> None:
    with make(tmp_path, gradient_accumulation_steps=2) as engine:
        engine.backward(1000 * loss_of(engine, batch(0)))
        engine.zero_grad()
        expected = (one_step(engine, 1) + one_step(engine, 2)) / 2
    assert rows(tmp_path, "train_loss") == [(4, pytest.approx(expected))]


def test_skipped_steps_of_fp16_are_rows_with_the_scale(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    engine = make(tmp_path, fp16=fp16)
    scales, losses = [], []
    with engine:
        while engine.global_steps == engine.skipped_steps:
            losses.append(one_step(engine))
            scales.append(engine.cur_scale)
    assert len(scales) > 1
    assert [scale for _, scale in rows(tmp_path, "loss_scale")] == scales
    assert [loss for _, loss in rows(tmp_path, "train_loss")] == losses
    norms = [norm for _, norm in rows(tmp_path, "grad_norm")]
    assert [math.isfinite(norm) for norm in norms] == [False] * (len(norms) - 1) + [True]


KILLED = """
import os, signal, sys
import torch
from torch import nn
import infinity

folder, steps, kill = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "kill"
place = {"device": "nvme", "nvme_path": folder}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    "csv_monitor": {"enabled": True, "output_path": folder + "/logs", "job_name": "job"},
    "infinity": {"pinned_bytes_max": "16MiB", "durability": "step"},
}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64))
engine, *_ = infinity.initialize(model=model, config=config, resume=True)
print(engine.global_steps)
for _ in range(steps):
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
if kill:
    os.kill(os.getpid(), signal.SIGKILL)
engine.close()
"""


def test_a_run_that_was_killed_goes_on_in_the_same_files(nvme_path: Path) -> None:
    killed = launch.code(KILLED, str(nvme_path), "3", "kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = rows(nvme_path / "logs", "train_loss")
    assert [samples for samples, _ in before] == [2, 4, 6]
    resumed = launch.code(KILLED, str(nvme_path), "3", "")
    assert resumed.returncode == 0, resumed.stderr
    first = int(resumed.stdout)
    after = rows(nvme_path / "logs", "train_loss")
    assert first in (2, 3) and after[:3] == before
    assert [samples for samples, _ in after[3:]] == [2 * step for step in range(first + 1, first + 4)]
    again = [row for row in after[3:] if row[0] <= 6]
    assert again == before[first:]


def test_a_checkpoint_is_gone_on_from_in_the_same_files(tmp_path: Path) -> None:
    with make(tmp_path) as engine:
        one_step(engine)
        engine.save_checkpoint(tmp_path / "saved")
    with make(tmp_path) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        one_step(engine)
    assert [samples for samples, _ in rows(tmp_path, "lr")] == [2, 4]


@pytest.mark.parametrize(
    ("left", "rest_of_it"),
    [("step,lr\n2,0.5\n4,0.", [(2, 0.5)]), ("step,lr\n2,0.5\n", [(2, 0.5)]), ("step,l", []), ("", [])],
)
def test_what_a_crash_left_of_a_row_is_cut_off(left: str, rest_of_it: list[Any], tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_lr.csv").write_text(left)
    with make(tmp_path) as engine:
        one_step(engine)
        rate = engine.get_lr()[0]
    assert rows(tmp_path, "lr") == [*rest_of_it, (2, rate)]


def test_a_row_is_one_write_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that only a part of has room is taken back."""
    writes = []

    class File(io.FileIO):
        def write(self, line: Any) -> int:
            writes.append(line)
            return super().write(line[:3] if len(writes) == 3 else line)

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: File(path, mode.replace("b", "")))
    settings = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    monitors = make_monitors(load_config(settings))
    monitors.write_events([("Train/Samples/lr", 0.5, 2)])
    monitors.write_events([("Train/Samples/lr", 0.25, 4)])
    monkeypatch.undo()
    assert writes == [b"step,lr\n", b"2,0.5\n", b"4,0.25\n"]
    assert rows(tmp_path, "lr") == [(2, 0.5)]
    assert not monitors.is_writing


class Fake:
    """A library: what is called in it, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def summary_writer(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake, module = Fake(), ModuleType("torch.utils.tensorboard")

    def make_writer(log_dir: str) -> Fake:
        fake.calls.append(("SummaryWriter", (log_dir,), {}))
        return fake

    module.SummaryWriter = make_writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return fake


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    run = Fake()

    def init(**settings: Any) -> Fake:
        run.calls.append(("init", (), settings))
        module.run = module.run or run  # an existing run is continued
        return module.run

    module: Any = SimpleNamespace(run=None, init=init, made=run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_tensorboard_gets_every_event_and_has_it_after_every_step(
    summary_writer: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = make(tmp_path, csv_monitor={}, tensorboard={"enabled": True, "job_name": "tb"})
    with engine:
        losses = [one_step(engine, step) for step in range(2)]
    assert summary_writer.named("SummaryWriter") == [((str(tmp_path / "tb"),), {})]
    events = [args for args, _ in summary_writer.named("add_scalar")]
    assert [event for event in events if event[0] == "Train/Samples/train_loss"] == [
        ("Train/Samples/train_loss", losses[0], 2),
        ("Train/Samples/train_loss", losses[1], 4),
    ]
    assert {name for name, _, _ in events} == {f"Train/Samples/{name}" for name in ALWAYS}
    order = [name for name, _, _ in summary_writer.calls]
    assert order == ["SummaryWriter", *[*["add_scalar"] * 4, "flush"] * 2, "close"]
    assert not (tmp_path / "job").exists()


def test_the_real_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is missing: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"enabled": True, "output_path": str(tmp_path), "job_name": "tb"}
    with make(tmp_path, csv_monitor={}, tensorboard=settings) as engine:
        losses = [one_step(engine, step) for step in range(3)]
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert {*read.Tags()["scalars"]} == {f"Train/Samples/{name}" for name in ALWAYS}
    events = read.Scalars("Train/Samples/train_loss")
    assert [(event.step, event.value) for event in events] == list(zip((2, 4, 6), losses, strict=True))


def test_wandb_logs_a_step_in_one_call_and_ends_the_run(wandb: Any, tmp_path: Path) -> None:
    settings = {"enabled": True, "group": "a", "team": "", "project": "p"}
    with make(tmp_path, csv_monitor={}, wandb=settings) as engine:
        losses = [one_step(engine, step) for step in range(2)]
        engine.close()
    assert wandb.made.named("init") == [((), {"project": "p", "group": "a", "entity": None})]
    logged = wandb.made.named("log")
    assert [kwargs for _, kwargs in logged] == [{"step": 2}, {"step": 4}]
    assert [values["Train/Samples/train_loss"] for (values,), _ in logged] == losses
    assert {*logged[0][0][0]} == {f"Train/Samples/{name}" for name in ALWAYS}
    assert wandb.made.named("finish") == [((), {"exit_code": 0})]


def test_an_error_closes_the_monitors_too(wandb: Any, tmp_path: Path) -> None:
    def script() -> None:
        with make(tmp_path, wandb={"enabled": True}) as engine:
            one_step(engine)
            raise RuntimeError("of the script")

    with pytest.raises(RuntimeError, match="of the script"):
        script()
    assert wandb.made.named("finish") == [((), {"exit_code": 1})]


def test_a_run_that_the_script_began_is_left_to_it(wandb: Any, tmp_path: Path) -> None:
    wandb.run = Fake()
    with make(tmp_path, wandb={"enabled": True}) as engine:
        one_step(engine)
    assert len(wandb.run.named("log")) == 1 and wandb.run.named("finish") == []


def test_comet_gets_an_event_every_so_many_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, module = Fake(), ModuleType("comet_ml")
    module.start = lambda **settings: experiment.calls.append(("start", (), settings)) or experiment  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    settings = {
        "enabled": True,
        "samples_log_interval": 4,
        "api_key": "secret",
        "experiment_name": "e",
        "mode": "create",
    }
    with make(tmp_path, csv_monitor={}, comet=settings, dump_state=True) as engine:
        losses = [one_step(engine, step) for step in range(4)]
    ((_, begun),) = experiment.named("start")
    assert begun["api_key"] == "secret" and begun["mode"] == "create" and begun["online"] is None
    logged = [(args, kwargs) for args, kwargs in experiment.named("log_metric") if args[0].endswith("train_loss")]
    assert logged == [(("Train/Samples/train_loss", losses[step]), {"step": 2 * (step + 1)}) for step in (0, 2)]
    assert [name for name, _, _ in experiment.calls][:2] == ["start", "set_name"]
    assert len(experiment.named("end")) == 1


def test_a_key_of_an_account_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({"comet": {"api_key": "secret"}, "dump_state": True}).resolve(world_size=1)
    assert config.comet.api_key is not None and config.comet.api_key.get_secret_value() == "secret"
    assert "secret" not in config.model_dump_json() and "secret" not in repr(config)


# What fails


def test_a_monitor_that_fails_is_stopped_with_a_word_and_the_others_go_on(
    summary_writer: Fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensorboard = {"enabled": True, "output_path": str(tmp_path)}
    with make(tmp_path, csv_monitor={}, tensorboard=tensorboard) as engine:
        expected = [one_step(engine, step) for step in range(3)]
    summary_writer.calls.clear()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_lr.csv").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "infinity"), make(tmp_path, tensorboard=tensorboard) as engine:
        assert [one_step(engine, step) for step in range(3)] == expected
        assert engine.monitor.is_writing
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("csv_monitor failed and writes nothing more, while the training continues: ")
    assert "No space left on device" in line and "csv_monitor.output_path" in line
    assert len(rows(tmp_path, "train_loss")) == 1
    assert [args[2] for args, _ in summary_writer.named("add_scalar") if "train_loss" in args[0]] == [2, 4, 6]


def test_a_monitor_that_cannot_be_closed_ends_nothing(
    wandb: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def finish(**_: Any) -> None:
        raise ConnectionError("no network")

    wandb.made.finish = finish
    with caplog.at_level(logging.WARNING, "infinity"), make(tmp_path, wandb={"enabled": True}) as engine:
        one_step(engine)
    assert [record.message for record in caplog.records if "wandb" in record.message] == [
        "wandb may lack its last events: no network; look at the network and `wandb login`, or set WANDB_MODE=offline in the "
        "environment"
    ]
    assert len(rows(tmp_path, "lr")) == 1


LIBRARIES = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "comet_ml"),
}


@pytest.mark.parametrize("key", LIBRARIES)
@pytest.mark.parametrize("there", [None, ModuleType("of its name")], ids=["missing", "another"])
def test_a_missing_library_is_refused_before_anything_is_made(
    key: str, there: Any, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, package = LIBRARIES[key]
    monkeypatch.setitem(sys.modules, module, there)
    told = rf"{key}\.enabled: got true, .* package {package}.* pip install {package}, or set {key}\.enabled to false"
    with pytest.raises(infinity.ConfigError, match=told):
        make(tmp_path, nvme_path, **{key: {"enabled": True}})
    assert not [*nvme_path.iterdir(), *tmp_path.iterdir()]


def test_all_missing_libraries_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, _ in LIBRARIES.values():
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(infinity.ConfigError, match="config: 3 problems"):
        make(tmp_path, **{key: {"enabled": True} for key in LIBRARIES})
    with make(tmp_path, **{key: {"enabled": False} for key in LIBRARIES}) as engine:  # which needs none
        one_step(engine)


def test_a_folder_that_cannot_be_made_is_refused_and_nothing_is_left(
    summary_writer: Fake, nvme_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    csv_monitor = {"enabled": True, "output_path": str(tmp_path / "file")}
    with pytest.raises(
        infinity.ConfigError, match=r"csv_monitor can't start: .*Not a directory.*csv_monitor.output_path"
    ):
        make(tmp_path, nvme_path, csv_monitor=csv_monitor, tensorboard={"enabled": True})
    assert not [*nvme_path.iterdir()]
    assert len(summary_writer.named("close")) == 1


# Who asks for none, and other ranks


def test_nothing_is_loaded_or_noted_where_no_monitor_is_enabled_and_nothing_printed() -> None:
    program = """
import sys, torch, infinity
config = {"optimizer": {"type": "AdamW"}, "wandb": {"enabled": False}, "steps_per_print": 0}
engine, *_ = infinity.initialize(model=torch.nn.Linear(2, 2), config=config)
engine.backward(engine(torch.ones(1, 2)).mean())
assert not engine._progress._losses and not engine.monitor.enabled
engine.step()
engine.monitor.write_events([("a", 1.0, 1)])
engine.close()
print([name for name in ("tensorboard", "torch.utils.tensorboard", "wandb", "comet_ml") if name in sys.modules])
"""
    done = launch.code(program)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_other_ranks_write_nothing_and_need_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv_monitor = {"enabled": True, "output_path": str(tmp_path)}
    config = load_config({"csv_monitor": csv_monitor, "wandb": {"enabled": True}})
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    check_monitors(config)
    monitors = make_monitors(config)
    assert monitors.enabled and not monitors.is_writing
    monitors.write_events([("a", 1.0, 1)])
    assert not [*tmp_path.iterdir()]


def test_a_script_writes_events_of_its_own(tmp_path: Path) -> None:
    with make(tmp_path) as engine:
        one_step(engine)
        engine.monitor.write_events([("Train/Eval loss", torch.tensor(0.5), engine.global_samples)])
    engine.monitor.write_events([("Train/Eval loss", 0.25, 4)])  # too late
    assert (tmp_path / "job" / "Train_Eval_loss.csv").read_text() == "step,Eval loss\n2,0.5\n"
