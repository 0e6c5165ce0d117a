"""What trainers and scripts written for a DeepSpeed engine call on ours."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = torch.relu(block(h))
        return self.head(h) * self.scale

    def describe(self) -> str:
        return "a model"


def engine_of(path: Path | None, **changes: Any) -> infinity.Engine:
    place = {"device": "nvme", "nvme_path": str(path)} if path is not None else {"device": "none"}
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place, **changes.pop("zero_optimization", {})}
    engine, *_ = infinity.initialize(
        model=Model(),
        config={
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            **changes,
        },
    )
    return engine


def loss_of(engine: Any) -> torch.Tensor:
    return engine(torch.arange(6).reshape(2, 3)).float().square().mean()


@pytest.mark.parametrize("blocks_in", [(True, False), (False, True), (False, False)])
def test_an_output_of_an_unknown_class_has_the_gradients_of_a_dict(blocks_in: tuple[bool, bool]) -> None:
    """FSDP2 looks for tensors in dicts, lists and dataclasses only, and here no block may be called."""

    class Choosing(Model):
        def forward(self, x: torch.Tensor, with_blocks: bool) -> Any:  # type: ignore[override]
            h = self.embedding(x)
            for block in self.blocks if with_blocks else ():
                h = torch.relu(block(h))
            return make(loss=self.head(h).float().square().mean())

    seen = []
    for make in (dict, SimpleNamespace):
        engine, *_ = infinity.initialize(
            model=Choosing(),
            config={
                "gradient_accumulation_steps": 2,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "zero_optimization": {"stage": 3},
            },
        )
        with engine:
            for with_blocks in blocks_in * 2:
                output = engine(torch.arange(6).reshape(2, 3), with_blocks)
                engine.backward(output["loss"] if make is dict else output.loss)
                engine.step()
                seen.append(
                    (float(engine.get_global_grad_norm() or 0), engine.module.head.weight.full_tensor().clone())
                )
    for (norm, weight), (other_norm, other_weight) in zip(seen[:4], seen[4:], strict=True):
        assert norm == other_norm and torch.equal(weight, other_weight)


def test_wall_clock_breakdown_prints_each_part(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(nvme_path, wall_clock_breakdown=True, gradient_accumulation_steps=2)
    with engine:
        for _ in range(4):
            engine.backward(loss_of(engine))
            engine.step()
    number = r"\d+\.\d\d"
    micro = rf"time \(ms\) \| fwd_microstep: {number} \| bwd_microstep: {number} \| step_microstep: {number}"
    whole = rf"time \(ms\) \| fwd: ({number}) \| bwd: {number} \| step: {number}"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time (ms)")]
    assert [bool(re.fullmatch(micro, line)) for line in lines] == [True, True, False] * 2
    assert [bool(re.fullmatch(whole, line)) for line in lines] == [False, False, True] * 2
    assert all(float(found[1]) > 0 for line in lines if (found := re.fullmatch(whole, line)))


def test_a_boundary_that_the_caller_sets(nvme_path: Path) -> None:
    """As accelerate drives it: it says where a step ends, and the loss may come divided already."""
    engine, other = engine_of(nvme_path, gradient_accumulation_steps=2), engine_of(None, gradient_accumulation_steps=2)
    with engine, other:
        for boundary in (False, False, True):
            engine.set_gradient_accumulation_boundary(boundary)
            engine.backward(loss_of(engine) / 2, retain_graph=True, scale_wrt_gas=False)
            other.set_gradient_accumulation_boundary(boundary)
            other.backward(loss_of(other))
            engine.step()
            other.step()
        assert engine.global_steps == other.global_steps == 1
        assert engine.was_step_applied()
        assert engine.get_global_grad_norm() == other.get_global_grad_norm()
        assert engine.global_samples == engine.train_batch_size()


@pytest.mark.parametrize("frozen", [True, False])
def test_the_16_bit_weights_gathered_on_one_rank(nvme_path: Path, frozen: bool) -> None:
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = engine_of(nvme_path, bf16={"enabled": True}, zero_optimization=gathers)
    with engine:
        assert engine.zero_gather_16bit_weights_on_model_save()
        state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=not frozen)
    assert state is not None
    expected = Model().bfloat16().state_dict()
    if not frozen:
        del expected["blocks.0.bias"]
    assert sorted(state) == sorted(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items() if name != "scale")
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert not engine_flag_default()


def engine_flag_default() -> bool:
    engine = engine_of(None)
    with engine:
        return engine.zero_gather_16bit_weights_on_model_save()


def test_what_else_is_asked_of_an_engine(nvme_path: Path) -> None:
    engine = engine_of(nvme_path, bf16={"enabled": True}, gradient_clipping=0.5)
    with engine:
        assert engine.zero_optimization_stage() == 3
        assert (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.gradient_clipping()) == (True, False, 0.5)
        assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
        assert engine.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert not engine.was_step_applied()
        assert engine.describe() == "a model"
        with pytest.raises(
            AttributeError, match=r"engine has no attribute .nothing_of_the_kind., nor has the model Model"
        ):
            engine.nothing_of_the_kind  # noqa: B018
        assert engine.cur_scale == engine.loss_scale == 1.0


def test_arguments_of_deepspeed_s_checkpoint_calls(nvme_path: Path, tmp_path: Path) -> None:
    engine = engine_of(nvme_path)
    with engine:
        engine.backward(loss_of(engine))
        engine.step()
        engine.save_checkpoint(tmp_path, tag="one", client_state={"a": 1}, save_latest=True)
        path, state = engine.load_checkpoint(
            tmp_path, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=False
        )
        assert path == str(tmp_path / "one")
        assert state == {"a": 1}
        with pytest.raises(infinity.ConfigError, match="for weights alone"):
            engine.load_checkpoint(tmp_path, load_module_only=True)
        engine.destroy()


def test_a_schedule_that_a_trainer_sets_is_stepped_saved_and_loaded(nvme_path: Path, tmp_path: Path) -> None:
    """transformers' Trainer makes its own when the engine is there already."""

    def trained(steps: int, load: bool) -> tuple[float, int]:
        with engine_of(nvme_path, optimizer={"type": "AdamW", "params": {"lr": 0.1}}) as engine:
            engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
            if load:
                engine.load_checkpoint(tmp_path)
            for _ in range(steps):
                engine.backward(loss_of(engine))
                engine.step()
            engine.save_checkpoint(tmp_path)
            return engine.get_lr()[0], engine.lr_scheduler.last_epoch

    assert trained(2, load=False) == (0.025, 2)
    assert trained(1, load=True) == (0.0125, 3)


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_batch_sizes_that_are_set_between_steps(where: str, nvme_path: Path) -> None:
    """As a script does that begins with small batches: the numbers are those of an engine with these sizes from the start."""

    def take_step(engine: Any) -> None:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine))
            engine.step()

    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}
    engine, other = (engine_of(nvme_path if where == "nvme" else None, **settings) for _ in range(2))
    with engine, other:
        take_step(engine)
        engine.set_train_batch_size(6)
        assert engine.get_batch_info() == (6, 2, 3)
        for number in range(2):
            engine.backward(loss_of(engine))
            assert not engine.is_gradient_accumulation_boundary(), number
        with pytest.raises(infinity.InfinityError, match="a step that has begun"):
            engine.set_train_batch_size(2)
        engine.backward(loss_of(engine))
        engine.step()
        take_step(other)
        for _ in range(3):
            with other.no_sync():
                other.backward(loss_of(other) / 3)
        other.set_gradient_accumulation_boundary(True)
        other.step()
        assert engine.global_steps == other.global_steps == 2
        assert engine.get_global_grad_norm() == other.get_global_grad_norm()
        with pytest.raises(infinity.ConfigError, match=r"train_batch_size: got 7, expected"):
            engine.set_train_batch_size(7)
        engine.set_train_micro_batch_size(4)
        assert engine.get_batch_info() == (12, 4, 3)


def test_larger_steps_that_are_set_later_are_summed_in_fp32(nvme_path: Path) -> None:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "infinity": {"schedule": "vertical"},
    }
    batches = torch.randint(16, (9, 2, 3), generator=torch.Generator().manual_seed(0))
    values = []
    for path in (None, nvme_path):
        with engine_of(path, **settings) as engine:
            for micro_batches in (1, 4, 4):  # the vertical schedule reduces one sum
                engine.set_train_batch_size(2 * micro_batches)
                data = iter((ids, ids) for ids in batches[:micro_batches])
                engine.train_batch(data, loss_fn=lambda output, _: output.float().square().mean())
            values.append(dict(engine.named_weights(torch.float32)))
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


def test_batch_sizes_stay_where_the_backward_applies_gradients(nvme_path: Path) -> None:
    with engine_of(nvme_path, infinity={"update": "backward"}) as engine:
        with pytest.raises(infinity.ConfigError, match="set infinity"):
            engine.set_train_batch_size(2)
        with pytest.raises(infinity.ConfigError, match="set infinity"), engine.no_sync():
            pass


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_whole_values_are_read_and_set(where: str, nvme_path: Path) -> None:
    from infinity.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )

    with engine_of(nvme_path if where == "nvme" else None, infinity={"keep_grad": True}) as engine:
        weight, frozen = engine.module.blocks[1].weight, engine.module.blocks[0].bias
        expected = dict(Model().named_parameters())["blocks.1.weight"]
        with torch.no_grad():
            loss_of(engine)  # leaves the root gathered
        assert torch.equal(safe_get_full_fp32_param(weight), expected)
        assert torch.equal(safe_get_local_fp32_param(weight), expected)
        assert safe_get_full_fp32_param(frozen) is safe_get_full_grad(weight) is None
        engine.backward(loss_of(engine))
        safe_set_full_grad(weight, 2 * safe_get_full_grad(weight))
        engine.step()
        for key in ("exp_avg", "exp_avg_sq"):
            safe_set_full_optimizer_state(weight, torch.full((64, 64), 0.5), key)
            assert torch.equal(safe_get_full_optimizer_state(weight, key), torch.full((64, 64), 0.5))
        safe_set_full_fp32_param(weight, torch.full((64, 64), 0.25))
        assert (engine.module_state_dict()["blocks.1.weight"].full_tensor() == 0.25).all()
        with pytest.raises(infinity.InfinityError, match="nothing to set"):
            safe_set_full_grad(frozen, torch.zeros(64))
        assert "blocks.0.bias" not in engine.module_state_dict(exclude_frozen_parameters=True)
        engine.load_module_state_dict({"module": Model().state_dict()})
        assert torch.equal(safe_get_full_fp32_param(weight), expected)
        with pytest.raises(infinity.ConfigError, match="scale differ"):
            engine.load_module_state_dict({n: v for n, v in Model().state_dict().items() if n != "scale"})
        zeros = {name: torch.zeros_like(value) for name, value in Model().state_dict().items()}
        other = zeros | {"blocks.1.weight": torch.zeros(32, 128)}
        with pytest.raises(infinity.ConfigError, match=r"blocks\.1\.weight has shape \(32, 128\)"):
            engine.load_module_state_dict(other, strict=False)
        with pytest.raises(infinity.InfinityError, match=r"shape \(4096,\).*shape \(64, 64\)"):
            safe_set_full_fp32_param(weight, torch.zeros(4096))
        kept = {name: p.full_tensor() + 0 for name, p in engine.named_parameters()}
        assert all(torch.equal(p, kept[name]) for name, p in Model().named_parameters())


def test_a_gradient_that_was_taken_says_how_to_see_it(nvme_path: Path) -> None:
    from infinity.utils import safe_get_full_grad

    nothing_resident = {"stage3_param_persistence_threshold": 0}
    with engine_of(nvme_path, bf16={"enabled": True}, zero_optimization=nothing_resident) as engine:
        engine.backward(loss_of(engine))
        with pytest.raises(infinity.InfinityError, match="keep_grad"):
            safe_get_full_grad(engine.module.blocks[1].weight)


def test_what_deepspeed_s_engine_has_methods_for(nvme_path: Path) -> None:
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
    with engine_of(nvme_path, scheduler=scheduler, steps_per_print=7) as engine:
        assert engine.zero_optimization() and not engine.wall_clock_breakdown()
        assert (engine.steps_per_print(), engine.optimizer_name(), engine.scheduler_name()) == (7, "adamw", "OneCycle")
        assert (engine.get_mom(), engine.lr_scheduler.get_mom()) == ([(0.8, 0.99)], [(0.9, 0.99)])
        engine.set_lr(0.5)
        assert engine.get_lr() == [0.5]
        loader = engine.deepspeed_io([torch.ones(2)] * 3, batch_size=2, route="eval")
        assert [len(batch) for batch in loader] == [2, 1]
        engine.backward(loss_of(engine))
        engine.allreduce_gradients()
        engine.empty_partition_cache()
        engine.step()
        with pytest.raises(infinity.InfinityError, match="of your own: call"):
            engine.scale(torch.ones(()))
