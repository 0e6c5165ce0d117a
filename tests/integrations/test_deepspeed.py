"""DeepSpeed with infinity's I/O: what is replaced and put back, its tools, and its training with either handle."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch
import pytest
import torch
from packaging.version import Version

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: tools/test_integration.sh deepspeed")

from infinity.config import Config
from infinity.config.__main__ import meanings_of
from infinity.config.optimizers import OPTIMIZERS, SCHEDULERS
from infinity.config.whole import NESTED
from infinity.deepspeed.aio_handle import AioHandle
from infinity.integrations import deepspeed as ours

launch.import_also("deepspeed", "few_kernels")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "integrations" / "deepspeed_nvme.py"
SMALL = ["--hidden-size", "128", "--layers", "2", "--steps", "4"]
NO_DEFAULT = object()
COMPILING_SECONDS = 2400
"""DeepSpeed compiles four extensions before its first step: two minutes, or half an hour on a machine with other work."""


def defaults_of_deepspeed() -> dict[str, dict[str, Any]]:
    """Each block's keys and their defaults, from DeepSpeed's own classes. At the top level also the keys that it asks for."""
    from deepspeed.monitor import config as monitors
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    def of_model(model: Any) -> dict[str, Any]:
        made = model()
        return {field.alias or name: getattr(made, name) for name, field in model.model_fields.items()}

    def of_call(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.items()
        return {name: p.default for name, p in parameters if p.default is not p.empty}

    class Asked(dict[str, Any]):
        """A config that notes what it is asked for."""

        def __contains__(self, key: object) -> bool:
            top.setdefault(str(key), NO_DEFAULT)
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            top.setdefault(key, NO_DEFAULT)
            return super().get(key, default)

        def keys(self) -> Any:
            return self

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    top: dict[str, Any] = {}
    made = vars(DeepSpeedConfig(Asked(train_batch_size=1)))
    top |= {name: made.get(name, default) for name, default in top.items()}
    zero = of_model(DeepSpeedZeroConfig)
    assert zero.pop("offload_param") is zero.pop("offload_optimizer") is None
    adam = [
        {key: value for key, value in of_call(kind).items() if "w_mode" not in key}
        for kind in (FusedAdam, DeepSpeedCPUAdam)
    ]
    return {
        "": top,
        "zero_optimization": {key: value for key, value in zero.items() if not key.startswith("cpu_offload")},
        "zero_optimization.offload_param": of_model(DeepSpeedZeroOffloadParamConfig),
        "zero_optimization.offload_optimizer": of_model(DeepSpeedZeroOffloadOptimizerConfig),
        "aio": AIO_DEFAULT_DICT,
        "fp16": of_model(DeepSpeedFP16Config),
        "bf16": of_model(DeepSpeedBF16Config),
        "activation_checkpointing": vars(DeepSpeedActivationCheckpointingConfig({})),
        "flops_profiler": vars(DeepSpeedFlopsProfilerConfig({})),
        "tensorboard": of_model(monitors.TensorBoardConfig),
        "csv_monitor": of_model(monitors.CSVConfig),
        "wandb": of_model(monitors.WandbConfig),
        "comet": of_model(monitors.CometConfig),
        "AdamW": adam[0] | adam[1],
        "Adam": adam[1] | adam[0],
        "SGD": of_call(torch.optim.SGD),
        **{name: of_call(getattr(lr_schedules, name)) for name in SCHEDULERS},
    }


@pytest.mark.skipif(Version(importlib.metadata.version("deepspeed")) < Version("0.19.8"), reason="an older DeepSpeed")
def test_a_key_that_is_not_written_means_what_it_means_there() -> None:
    """Every key of DeepSpeed's is known here, and has its default, unless the reference says what is otherwise."""
    blocks: dict[str, Any] = {"": Config, **NESTED, **OPTIMIZERS, **SCHEDULERS}
    derived = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    elsewhere = {"communication_data_type", "adam_w_mode", "adamw_mode"}  # read.py reads them
    for path, theirs in defaults_of_deepspeed().items():
        block = blocks[path]
        known = {*block.model_fields, *block.ignored_keys, *block.old_names, *block.fixed_keys, *elsewhere}
        known |= Config.feature_keys if path == "" else set()
        assert theirs.keys() <= known, (path, theirs.keys() - known)
        compared, meanings = 0, meanings_of(block)
        for name in block.model_fields.keys() & theirs.keys() - derived:
            field, their = block.model_fields[name], theirs[name]
            if their is NO_DEFAULT or meanings[name][1]:
                continue
            our = field.get_default(call_default_factory=True)
            assert our == (tuple(their) if isinstance(their, list) else their), (path, name, our, their)
            compared += 1
        assert compared, path


@pytest.fixture
def installed() -> Iterator[None]:
    ours.install()
    yield
    ours.uninstall()


def builder() -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder


def test_install_answers_for_the_builder_and_uninstall_puts_it_back() -> None:
    before = {name: getattr(builder(), name) for name in ("load", "is_compatible")}
    ours.install()
    ours.install()
    try:
        assert builder()().is_compatible()
        module = builder()().load()
        assert issubclass(module.aio_handle, AioHandle)
    finally:
        ours.uninstall()
    assert {name: getattr(builder(), name) for name in ("load", "is_compatible")} == before
    ours.uninstall()


@pytest.mark.usefixtures("installed")
def test_deepspeed_counts_the_op_as_compatible() -> None:
    import deepspeed

    assert deepspeed.ops.__compatible_ops__[builder().NAME]


@pytest.mark.usefixtures("installed")
def test_what_deepspeed_has_pinned_is_pinned() -> None:
    """Its swappers assert this of their buffers."""
    handle = builder()().load().aio_handle()
    assert handle.is_pinned(handle.new_cpu_locked_tensor(1000, torch.empty(0)))
    assert not handle.is_pinned(torch.empty(1000))


@pytest.mark.usefixtures("installed")
def test_its_checkpoint_writer_writes_through_us_and_leaves_nothing_open(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.io import FastFileWriter, FastFileWriterConfig, fast_file_writer

    # The writer asks for a function that it doesn't use here, of an op that DeepSpeed has for GPUs only.
    utilities = SimpleNamespace(load=lambda: SimpleNamespace(cast_to_byte_tensor=None))
    monkeypatch.setattr(fast_file_writer, "UtilsBuilder", lambda: utilities)
    saved = {"a": torch.randn(5000), "b": torch.arange(7)}
    for number in range(5):
        handle = builder()().load().aio_handle(4096, 8, False, False, 1)
        pinned = handle.new_cpu_locked_tensor(8 * 4096, torch.empty(0, dtype=torch.uint8))
        config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=pinned, double_buffer=bool(number % 2))
        path = nvme_path / f"{number}.pt"
        writer = FastFileWriter(file_path=str(path), config=config)
        torch.save(saved, writer, _use_new_zipfile_serialization=number < 3)
        writer.close()
        loaded = torch.load(path)
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        path.unlink()
    open_files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [name for name in open_files if name.startswith(str(nvme_path))]


@pytest.mark.parametrize("operation", [["--read"], []])
def test_ds_io_runs_on_us(nvme_path: Path, operation: list[str]) -> None:
    shown = command("ds_io", *operation, "--folder", str(nvme_path), "--io_size", "4M", "--loops", "2")
    assert re.search(r"E2E (Read|Write) Speed = [0-9.]+ GB/sec", shown)


def test_ds_nvme_tune_runs_on_us(nvme_path: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"block_size": ["1M"], "queue_depth": [4, 8], "io_parallel": [1]}))
    shown = command(
        "ds_nvme_tune", "--nvme_dir", str(nvme_path), "--sweep_config", str(sweep), "--io_size", "4M",
        "--log_dir", str(tmp_path / "logs"), cwd=tmp_path,
    )  # fmt: skip
    assert "queue_depth" in shown
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("*.txt")]
    assert len(logs) == 4
    assert all("GB/sec" in text for text in logs)


def command(*arguments: str, cwd: Path | None = None) -> str:
    done = launch.program("infinity.integrations.deepspeed", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(launcher: Any, nvme_path: Path, tmp_path: Path, *arguments: str, ranks: int = 1) -> list[float]:
    figures = tmp_path / "figures.json"
    places = ("--nvme-path", str(nvme_path), "--json", str(figures))
    launcher(EXAMPLE, *SMALL, *places, *arguments, ranks=ranks, timeout_seconds=COMPILING_SECONDS)
    found: list[float] = json.loads(figures.read_text())["losses"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(3 * COMPILING_SECONDS)
@pytest.mark.long  # DeepSpeed compiles its own handle first, and its Adam
def test_training_gives_the_numbers_of_its_own_handle(forked_ranks: Any, nvme_path: Path, tmp_path: Path) -> None:
    if not builder()().is_compatible():
        pytest.skip("DeepSpeed's own handle can't be built here: libaio-dev is missing")
    own = losses(forked_ranks, nvme_path, tmp_path, "--io", "deepspeed")
    assert own[-1] < own[0]
    assert losses(forked_ranks, nvme_path, tmp_path) == own
    assert losses(forked_ranks, nvme_path, tmp_path, "--pipeline") == own


@pytest.mark.slow
@pytest.mark.timeout(2 * COMPILING_SECONDS)
@pytest.mark.long  # DeepSpeed compiles its Adam first
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_learns_the_same_pipelined(ranks: int, forked_ranks: Any, nvme_path: Path, tmp_path: Path) -> None:
    synchronous = losses(forked_ranks, nvme_path, tmp_path, ranks=ranks)
    pipelined = losses(forked_ranks, nvme_path, tmp_path, "--pipeline", ranks=ranks)
    assert pipelined == synchronous
    assert synchronous[-1] < synchronous[0]
