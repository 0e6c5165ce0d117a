"""What `initialize` refuses, in which words, and that nothing is left behind; what it accepts besides the plain case."""

from __future__ import annotations

import errno
import gc
import json
import logging
import mmap
import re
import shutil
import subprocess
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quiet import come_to_rest
from staying import SHARES, staying
from torch import nn

import infinity
from infinity.store import run_folder
from infinity.swap.stager import Chunk, Stager


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left, "a process group was left behind"


def model(layers: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))


def bare() -> nn.Sequential:
    """12 MiB of state on NVMe."""
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))


def config(path: Path | str, **changes: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": str(path)},
        "offload_optimizer": {"device": "nvme", "nvme_path": str(path)},
        "stage3_param_persistence_threshold": 0,
    }
    zero.update(changes.pop("zero_optimization", {}))
    own = {"pinned_bytes_max": "16MiB", **changes.pop("infinity", {})}
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "infinity": own,
        **changes,
    }


def one_step(engine: infinity.Engine) -> float:
    loss = engine(torch.ones(2, 8)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def refused(error: type[Exception], pattern: str, settings: Any, **arguments: Any) -> None:
    with pytest.raises(error, match=pattern):
        infinity.initialize(model=arguments.pop("model", None) or model(), config=settings, **arguments)


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_without_an_optimizer_a_model_is_run_and_not_trained(
    device: str, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(nvme_path)
    del settings["optimizer"], settings["gradient_clipping"]
    settings["zero_optimization"]["offload_param"] = settings["zero_optimization"]["offload_optimizer"] = {
        "device": device, "nvme_path": str(nvme_path),
    }  # fmt: skip
    with caplog.at_level("INFO", "infinity"):
        engine, optimizer, *_ = infinity.initialize(model=model(), config=settings)
    assert optimizer is None
    assert "gradient_clipping is 1, as the config doesn't set it" in caplog.text
    with engine:
        output = engine(torch.ones(2, 8))
        for train in (
            lambda: engine.backward(output.float().mean()),
            lambda: engine.train_batch(iter([(torch.ones(2, 8), None)]), loss_fn=lambda out, _: out.float().mean()),
            engine.step,
        ):
            with pytest.raises(
                infinity.ConfigError, match="there is no optimizer to train with: name one in the config"
            ):
                train()
        assert torch.equal(engine(torch.ones(2, 8)), output)


def test_a_path_that_cannot_be_made(nvme_path: Path) -> None:
    (nvme_path / "file").touch()
    refused(
        infinity.StoreError,
        r"file is a file, not a folder: choose another nvme_path",
        config(nvme_path / "file" / "below"),
    )


def test_a_path_that_is_not_writable() -> None:
    refused(infinity.StoreError, r"/proc is not writable|can't be made", config("/proc"))


def test_not_enough_space_is_told_in_gib_before_training(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: 100_000)
    refused(
        infinity.StoreError,
        r"parameters and optimizer state: .* KiB are needed on .* where 97.66 KiB are free",
        config(nvme_path),
    )
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize(
    ("free_mib", "own", "update", "told"),
    [
        (40, {}, "backward", "speculative updates in the backward use 9.00 MiB more NVMe space"),
        (36, {"durability": "step"}, "backward", None),
        (29, {}, "forward", '"auto" is "forward" here: .* 30.00 MiB are needed on .*, where 29.00 MiB are free'),
        (40, {"host_cache_bytes": "2MiB"}, "forward", None),
        (40, {"gradient_bytes_max": 0}, "forward", None),
        (40, {"keep_grad": True}, "forward", None),
        (24, {"update": "backward"}, "backward", "speculative updates in the backward use 9.00 MiB more NVMe space"),
    ],
    ids=str,
)
def test_auto_updates_ahead_of_a_step_that_clips_where_it_can_and_there_is_space(
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free_mib: int,
    own: dict[str, Any],
    update: str,
    told: str | None,
) -> None:
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: free_mib << 20)
    settings = config(nvme_path, infinity=own, gradient_clipping=1.0)
    with caplog.at_level("INFO", logger="infinity"):
        engine, *_ = infinity.initialize(model=bare(), config=settings)
    with engine:
        assert engine.swap is not None
        options = engine.swap.paging.options
        assert (options.update, options.speculative) == (update, update == "backward")
        engine.backward(engine(torch.ones(2, 512)).float().square().mean())
        engine.step()
    lines = [line for line in caplog.text.splitlines() if "speculative updates" in line or '"auto" is' in line]
    assert [bool(re.search(told or "", line)) for line in lines] == [True] * (told is not None)


@pytest.mark.parametrize(
    ("memory_mib", "own", "clipping", "bound_mib"),
    [
        (1 << 10, {}, 1.0, None),
        (34, {}, 1.0, 1),
        (30, {}, 1.0, 0),
        (34, {}, 0.0, None),
        (30, {}, 0.0, 0),
        (34, {"keep_grad": True}, 1.0, None),
        (34, {"gradient_bytes_max": "2MiB"}, 1.0, 2),
    ],
    ids=str,
)
def test_gradients_beyond_half_of_the_memory_wait_on_the_drive(
    nvme_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    memory_mib: int,
    own: dict[str, Any],
    clipping: float,
    bound_mib: int | None,
) -> None:
    monkeypatch.setattr("infinity.swap.plan.available_bytes", lambda: memory_mib << 20)
    settings = config(nvme_path, infinity=own, gradient_clipping=clipping)
    with caplog.at_level("INFO", logger="infinity"), infinity.initialize(model=bare(), config=settings)[0] as engine:
        assert engine.swap is not None
        options = engine.swap.paging.options
        assert options.gradient_bytes_max == (None if bound_mib is None else bound_mib << 20)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 512)).float().square().mean())
            engine.step()
        spilled = sum(sub.gradient_bytes for sub in engine.swap.paged.layout.sub_groups)
    assert (spilled > 0) is (bound_mib in (0, 1) and clipping > 0)
    assert ("wait on NVMe (infinity.gradient_bytes_max)" in caplog.text) is (bound_mib in (0, 1))


def test_space_for_updates_ahead_that_were_asked_for_is_named(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: 20 << 20)
    settings = config(nvme_path, infinity={"update": "backward"}, gradient_clipping=1.0)
    said = 'second slots that infinity.update "forward" avoids: 21.00 MiB are needed on .*, where 20.00 MiB are'
    refused(infinity.StoreError, said, settings, model=bare())


def test_space_that_vanishes_while_it_is_reserved(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(self: Any, nbytes: int) -> None:
        raise infinity.IoError("reserve: ENOSPC", errno.ENOSPC)

    monkeypatch.setattr("infinity.store.arena.Arena._reserve", no_space)
    refused(infinity.StoreError, r"could not be reserved on .*free space or choose another", config(nvme_path))
    assert not list(nvme_path.iterdir())


def test_a_pool_too_small_for_one_group_names_the_number_that_does(nvme_path: Path) -> None:
    wide = model(2, 2048)  # 4 Mi elements: 8 MiB of bf16 in each group
    settings = config(nvme_path, infinity={"pinned_bytes_max": "16MiB"})
    with pytest.raises(infinity.BudgetError, match=r"too small for group 1\.0.* (\d+) bytes") as caught:
        infinity.initialize(model=wide, config=settings)
    needed = int(str(caught.value).split(" at least ")[1].split(" bytes")[0])
    settings["infinity"]["pinned_bytes_max"] = needed
    engine, *_ = infinity.initialize(model=model(2, 2048), config=settings)
    with engine:
        one_step(engine)
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize("held", ["offload_param", "offload_optimizer", None])
def test_a_sub_group_size_beyond_the_pool_is_cut_down_to_it(nvme_path: Path, held: str | None) -> None:
    zero: dict[str, Any] = {"sub_group_size": 2_000_000_000, **({held: {"device": "none"}} if held else {})}
    settings = config(nvme_path, infinity={"pinned_bytes_max": "32MiB"}, zero_optimization=zero)
    engine, *_ = infinity.initialize(model=model(2, 1024), config=settings)
    with engine:
        one_step(engine)
        assert engine.swap is not None
        largest = max(sub.chunk.lease_bytes for sub in engine.swap.paged.sub_groups)
        assert 3 * largest <= 32 << 20
        if held == "offload_optimizer":  # masters and moments are held: the pool needs to hold copies alone
            assert max(sub.layout.numel for sub in engine.swap.paged.sub_groups) > 1_000_000


def test_a_pool_too_small_leaves_the_model_as_it_was(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = model(2, 2048).bfloat16()
    small = config(nvme_path, infinity={"pinned_bytes_max": "16MiB"})
    refused(infinity.BudgetError, "raise it to at least", small, model=wide)
    assert all(p.dtype is torch.bfloat16 for p in wide.parameters())
    wide(torch.ones(1, 8, dtype=torch.bfloat16))
    enough = config(nvme_path, infinity={"pinned_bytes_max": "64MiB"})
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "free_bytes", lambda path: 100_000)
        refused(infinity.StoreError, "are needed on", enough, model=wide)
    engine, *_ = infinity.initialize(model=wide, config=enough)
    with engine:
        one_step(engine)


def test_a_model_that_is_sharded_already(nvme_path: Path) -> None:
    once = model()
    engine, *_ = infinity.initialize(model=once, config=config(nvme_path))
    with engine:
        refused(infinity.ConfigError, r"sharded already.*newly built", config(nvme_path), model=once)
        one_step(engine)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(8)), r"0\.weight has no shape .*run the model once"),
        (lambda: nn.Linear(8, 8, dtype=torch.complex64), r"weight is trained in torch\.complex64.*view_as_real"),
    ],
)
def test_parameters_that_no_master_can_hold_are_named_before_anything_is_changed(
    make: Any, pattern: str, nvme_path: Path
) -> None:
    built = make()
    kinds = {name: type(p) for name, p in built.named_parameters()}
    refused(infinity.ConfigError, pattern, config(nvme_path), model=built)
    assert kinds == {name: type(p) for name, p in built.named_parameters()}


def test_a_frozen_parameter_of_whole_numbers_is_told_to_be_a_buffer(nvme_path: Path) -> None:
    built = model()
    built.places = nn.Parameter(torch.arange(4), requires_grad=False)
    refused(infinity.ConfigError, r"places is torch\.int64.*register_buffer", config(nvme_path), model=built)


def test_what_the_machine_refused_since_the_start_is_told_once(
    nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="infinity"):
        engine, *_ = infinity.initialize(model=model(), config=config(nvme_path))
        with engine:
            engine.swap._machinery._notes.append("only half of it is in huge pages")
            assert "huge pages" not in caplog.text
            for _ in range(3):
                one_step(engine)
    assert caplog.text.count("only half of it is in huge pages") == 1


def test_a_pool_larger_than_the_machine(nvme_path: Path) -> None:
    refused(
        infinity.BudgetError, r"more than the .* of memory", config(nvme_path, infinity={"pinned_bytes_max": 1 << 50})
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nvme_needs_stage_3(nvme_path: Path, stage: int) -> None:
    refused(infinity.ConfigError, r"stage", config(nvme_path, zero_optimization={"stage": stage}))


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"fp16": {"enabled": True}}, "fp16.*bf16"),
        ({"zero_optimisation": {}}, "zero_optimization"),
        ({"infinity": {"wrap": ["Blok"]}}, "Blok.*Linear"),
        ({"infinity": {"backend": "libaio"}}, "libaio"),
        (
            {
                "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
                "gradient_clipping": 0.0,
                "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/elsewhere"}},
            },
            "differ",
        ),
        ({"optimizer": {"type": "Lion"}}, "Lion"),
    ],
)
def test_configs_that_are_refused(nvme_path: Path, changes: dict[str, Any], pattern: str) -> None:
    refused(infinity.ConfigError, pattern, config(nvme_path, **changes))
    assert not list(nvme_path.iterdir())


def test_missing_arguments(nvme_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match="model="):
        infinity.initialize(config=config(nvme_path))
    with pytest.raises(infinity.ConfigError, match="config="):
        infinity.initialize(model=model())
    with pytest.raises(infinity.ConfigError, match="no such file"):
        infinity.initialize(model=model(), config=config(nvme_path), weights="/nowhere/model.safetensors")


@pytest.fixture
def without_o_direct(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that refuses O_DIRECT."""
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "ramfs", "none", str(tmp_path)], capture_output=True
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("can't mount a ramfs here: no file system without O_DIRECT")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)  # the kernel closes a ring's files a little later


def test_a_file_system_without_o_direct_is_told_in_one_line(
    without_o_direct: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        engine, *_ = infinity.initialize(model=model(), config=config(without_o_direct))
    with engine:
        before = one_step(engine)
        assert one_step(engine) < before
    assert sum("O_DIRECT" in record.message for record in caplog.records) == 1
    assert not list(without_o_direct.iterdir())


def test_keys_without_meaning_are_named_once(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        engine, *_ = infinity.initialize(
            model=model(), config=config(nvme_path, zero_optimization={"overlap_comm": True}, comms_logger={})
        )
        with engine:
            one_step(engine)
    lines = [record.message for record in caplog.records if "overlap_comm" in record.message]
    assert len(lines) == 1
    assert "comms_logger" in lines[0]


def test_a_config_file_and_training_data(nvme_path: Path) -> None:
    file = nvme_path / "config.json"
    settings = config(nvme_path, train_batch_size=6, gradient_accumulation_steps=2, dataloader_drop_last=True)
    file.write_text(json.dumps(settings))
    engine, optimizer, loader, schedule = infinity.initialize(
        model=model(),
        config=str(file),
        training_data=[torch.ones(8)] * 7,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    )
    with engine:
        assert [tuple(x.shape) for x in loader] == [(3, 8), (3, 8)]
        assert isinstance(optimizer, infinity.PagedAdam)
        rates = []
        for x in loader:
            engine.backward(engine(x).float().square().mean())
            assert engine.is_gradient_accumulation_boundary() == (engine.micro_steps == 2)
            engine.step()
            rates.append(schedule.get_last_lr()[0])
        assert engine.global_steps == 1
        assert rates[0] > rates[1]


def test_data_come_in_the_order_that_deepspeed_draws_to_the_last_sample() -> None:
    samples = [torch.full((8,), float(number)) for number in range(7)]
    engine, _, loader, _ = infinity.initialize(
        model=model(), config={"train_micro_batch_size_per_gpu": 3}, training_data=samples
    )
    with engine:
        drawn = [int(row[0]) for batch in loader for row in batch]
    assert drawn == torch.randperm(7, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture
def own_logger() -> Iterator[None]:
    yield
    log = logging.getLogger("infinity")
    log.handlers.clear()
    log.setLevel(logging.NOTSET)


@pytest.mark.usefixtures("own_logger")
def test_a_script_that_sets_up_no_logging_sees_what_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "optimizer": {"type": "AdamW"},
        "steps_per_print": 1,
        "dump_state": True,
        "comms_logger": {"enabled": True},
    }
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for _ in range(2):
        engine, *_ = infinity.initialize(model=model(), config=settings)
        with engine:
            loss = one_step(engine)
        told = capsys.readouterr().err
        assert told.count(f"infinity: step 1, loss {loss:.4f}, lr") == 1
        assert told.count("without meaning here: comms_logger") == 1
        assert '"steps_per_print": 1' in told
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    engine, *_ = infinity.initialize(model=model(), config=settings)
    with engine:
        one_step(engine)
    assert "infinity" not in capsys.readouterr().err


def test_parameter_groups_and_a_torch_optimizer(nvme_path: Path) -> None:
    plain = model()
    decayed, others = list(plain.parameters())[:2], list(plain.parameters())[2:]
    given = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.25}], lr=0.5)
    engine, optimizer, *_ = infinity.initialize(model=plain, config=config(nvme_path), optimizer=given)
    with engine:
        assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.5), (0.25, 0.01)]
        one_step(engine)
    refused(infinity.ConfigError, "LBFGS", config(nvme_path), **_with_lbfgs())


def _with_lbfgs() -> dict[str, Any]:
    plain = model()
    return {"model": plain, "optimizer": torch.optim.LBFGS(plain.parameters())}


def test_step_without_backward_is_refused(nvme_path: Path) -> None:
    engine, *_ = infinity.initialize(model=model(), config=config(nvme_path))
    with engine:
        engine.set_gradient_accumulation_boundary(True)
        with pytest.raises(infinity.InfinityError, match="without gradients"):
            engine.step()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("device", ["none", "nvme"])
def test_gradients_of_another_backward_are_refused(device: str, accumulation: int, nvme_path: Path) -> None:
    zero = config(nvme_path)["zero_optimization"] if device == "nvme" else {"stage": 3}
    changes = {"zero_optimization": zero, "gradient_accumulation_steps": accumulation}
    engine, *_ = infinity.initialize(model=model(), config=config(nvme_path) | changes)
    with engine:
        for _ in range(2):  # before the first step, and after one
            with pytest.raises(infinity.InfinityError, match=r"call engine\.backward\(loss\)"):
                engine(torch.ones(2, 8)).mean().backward()
            for _ in range(accumulation):
                engine.backward(engine(torch.ones(2, 8)).mean())
                engine.step()
        assert engine.global_steps == 2


def test_a_plateau_schedule_is_stepped_by_its_metric(nvme_path: Path) -> None:
    engine, _, _, schedule = infinity.initialize(
        model=model(),
        config=config(nvme_path),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    )
    with engine:
        first = engine.get_lr()[0]
        for metric in (1.0, 2.0):
            one_step(engine)
            schedule.step(metric)
        assert engine.get_lr()[0] == first / 2
        engine.save_checkpoint(nvme_path / "saved")
        schedule.step(3.0)
        engine.load_checkpoint(nvme_path / "saved")
        assert engine.get_lr()[0] == first / 2
        assert schedule.best == 1.0


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m[1][0].double(),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m[0].to("meta"),
    ],
)
def test_a_paged_model_is_not_converted(nvme_path: Path, convert: Any) -> None:
    engine, *_ = infinity.initialize(model=model(), config=config(nvme_path))
    with engine:
        before = one_step(engine)
        with pytest.raises(infinity.ConfigError, match=r"paged.*bf16.enabled"):
            convert(engine.module)
        engine.module.to("cpu").float().train()  # changes nothing, so it may
        assert one_step(engine) < before


@pytest.mark.parametrize("device", ["nvme", "none"])
def test_a_parameter_that_is_unfrozen_later_is_refused(nvme_path: Path, device: str) -> None:
    frozen = model()
    frozen[1][1].weight.requires_grad_(False)
    zero = {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}} if device == "none" else {}
    engine, *_ = infinity.initialize(model=frozen, config=config(nvme_path, zero_optimization=zero))
    with engine:
        before = one_step(engine)
        engine.module[1][1].weight.requires_grad_(True)
        with pytest.raises(infinity.ConfigError, match=r"1\.1\.weight was frozen .* unfreeze it before initialize"):
            one_step(engine)
        engine.module[1][1].weight.requires_grad_(False)
        engine.zero_grad()
        assert one_step(engine) < before


def test_gradients_of_parameters_left_out_do_not_pile_up(nvme_path: Path) -> None:
    some = model()
    engine, *_ = infinity.initialize(model=some, config=config(nvme_path), model_parameters=list(some[0].parameters()))
    with engine:
        for _ in range(2):
            one_step(engine)
            assert all(p.grad is None for p in engine.parameters())
        engine.save_checkpoint(nvme_path / "saved")


def test_what_a_module_offers_the_engine_does_too(nvme_path: Path) -> None:
    engine, *_ = infinity.initialize(model=model(), config=config(nvme_path, infinity={"update": "forward"}))
    with engine:
        assert engine.training and not engine.eval().training and engine.train().training
        assert [name for name, _ in engine.named_parameters()] == list(engine.state_dict())
        engine.backward(engine(torch.ones(2, 8)).float().square().mean())
        assert engine.optimizer.norms  # the gradients were taken
        engine.zero_grad()
        assert not engine.optimizer.norms
        assert all(p.grad is None for p in engine.parameters())


def test_two_runs_share_a_path(nvme_path: Path) -> None:
    first, *_ = infinity.initialize(model=model(), config=config(nvme_path))
    second = infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB")
    second.tensors.register("mine", torch.arange(1000.0))
    with first:
        before = one_step(first)
        assert one_step(first) < before
        with second.tensors.use("mine") as mine:
            assert torch.equal(mine, torch.arange(1000.0))
    assert len(list(nvme_path.iterdir())) == 1
    second.close()
    assert not list(nvme_path.iterdir())


@pytest.mark.parametrize("held", ["offload_param", "offload_optimizer", None])
def test_close_gives_the_memory_back_while_the_model_lives_on(nvme_path: Path, held: str | None) -> None:
    zero: dict[str, Any] = {held: {"device": "none"}} if held else {}
    settings = config(nvme_path, infinity={"pinned_bytes_max": "256MiB"}, zero_optimization=zero)
    kept = model(4, 1024)
    engine, optimizer, *_ = infinity.initialize(model=kept, config=settings)
    one_step(engine)
    engine(torch.ones(2, 8))  # leaves groups staged, and the root gathered
    assert engine.swap is not None
    pool = weakref.ref(engine.swap.stager._pool)
    slab = weakref.ref(engine.swap.stager._pool.slab)
    until = time.monotonic() + 60
    while not engine.swap.stager._pool.slab.present and time.monotonic() < until:
        time.sleep(0.01)
    before = _resident_bytes()
    gc.disable()  # what only a collection would free is not given back
    try:
        engine.close()
        assert pool() is None
        assert slab() is None
    finally:
        gc.enable()
    assert before - _resident_bytes() > 200 << 20
    for use in (
        lambda: kept(torch.ones(2, 8)),
        lambda: list(kept.parameters())[-1].full_tensor() + 0,
        optimizer.step,
        lambda: engine.save_checkpoint(nvme_path / "late"),
    ):
        with pytest.raises(infinity.InfinityError, match=r"closed"):
            use()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("masters", ["split", "full"])
@pytest.mark.parametrize("share", SHARES)
def test_bytes_moved_are_the_sum_of_the_design(share: float, masters: str, nvme_path: Path) -> None:
    """14 bytes read and 12 written per parameter and step, as the engine counts them and as the kernel does. 10 are read where
    compute parameters stay. Full masters are two more of each, but for the group that is left to the forward: its update has
    read them for its gather."""
    with staying(share):
        own = {"pinned_bytes_max": "32MiB", "master_weights": masters}
        engine, *_ = infinity.initialize(model=model(4, 512), config=config(nvme_path, infinity=own))
    assert engine.swap is not None
    staying_bytes = [
        group.chunk.lease_bytes if group.chunk is not None and group.stays else 0 for group in engine.swap.paged.groups
    ]
    assert (sum(staying_bytes) > 0) == (share > 0) and all(staying_bytes) == (share == 1)
    numel = sum(sub.layout.numel for sub in engine.swap.paged.sub_groups)  # with what fills pages
    waiting_bytes = engine.swap.paged.groups[3].compute_bytes
    with engine:
        read_at_most, written_at_most = engine.swap.step_bytes()
        for _ in range(2):
            one_step(engine)
        come_to_rest(engine.swap)
        before, kernel_before = engine.swap.stats(), _kernel_bytes()
        steps = 4
        for _ in range(steps):
            one_step(engine)
        come_to_rest(engine.swap)
        after, kernel_after = engine.swap.stats(), _kernel_bytes()
        read, written = engine.swap.step_bytes()
    assert after.written_bytes - before.written_bytes == pytest.approx(steps * written, rel=0.03)
    assert after.read_bytes - before.read_bytes == pytest.approx(steps * read, rel=0.03)
    copies = 2 * numel  # the pool holds every group from forward to backward: one reading less
    more, made, left = (0, 0, 0) if masters == "split" else (copies, waiting_bytes, staying_bytes[3])
    spared = sum(staying_bytes) - left
    assert read == pytest.approx(14 * numel + more - made - copies - spared, rel=0.01)
    assert read_at_most == pytest.approx(14 * numel + more - made - 2 * spared - left, rel=0.01)
    assert written == written_at_most == pytest.approx(12 * numel + more, rel=0.01)
    if kernel_before is not None and kernel_after is not None and engine.swap is not None:
        assert kernel_after[0] - kernel_before[0] == pytest.approx(after.read_bytes - before.read_bytes, rel=0.05)
        assert kernel_after[1] - kernel_before[1] == pytest.approx(after.written_bytes - before.written_bytes, rel=0.05)


@pytest.mark.parametrize("prefetch", ["auto", 0, 300_000])
def test_after_the_first_step_nothing_is_read_on_demand(
    nvme_path: Path, prefetch: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_back = Stager.write_back

    def write_at_once(stager: Stager, chunk: Chunk) -> None:
        """What is still being written can't be read, nor read into: let that not depend on the machine's mood."""
        write_back(stager, chunk)
        stager.settle(chunk)

    monkeypatch.setattr(Stager, "write_back", write_at_once)
    settings = config(nvme_path, zero_optimization={"stage3_prefetch_bucket_size": prefetch})
    engine, *_ = infinity.initialize(model=model(6, 512), config=settings)
    assert engine.swap is not None
    with engine:
        for step in range(5):
            before = engine.swap.stats().demand_reads
            engine.backward(engine(torch.ones(2, 8)).float().square().mean())
            assert step == 0 or engine.swap.stats().demand_reads == before
            engine.step()  # here the pool is the bound: a full one makes reads wait for writes
        assert engine.swap.stats().mispredictions == 0


def _kernel_bytes() -> tuple[int, int] | None:
    """(read, written) bytes of this process as the kernel counts them, where it does."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(fields["read_bytes"]), int(fields["write_bytes"])
