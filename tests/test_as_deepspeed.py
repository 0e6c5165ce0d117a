"""`import infinity as deepspeed`: what common scripts do with it, in their own words."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity as deepspeed
from infinity.ops.adam import DeepSpeedCPUAdam, FusedAdam
from infinity.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from infinity.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.blocks = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.register_buffer("table", torch.arange(64.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = deepspeed.checkpointing.checkpoint(self.first, x)
        return self.blocks(h) + self.table


def config(path: Path | None, **changes: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(path)} if path is not None else {"device": "none"}
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **changes,
    }


def whole(engine: deepspeed.Engine) -> list[torch.Tensor]:
    return [p.data.full_tensor().clone() + 0 for p in engine.parameters()]


def train(engine: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        loss = (engine(x) - engine.module.table).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_script_with_arguments(nvme_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(nvme_path, optimizer={"type": "AdamW"})))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    assert args.deepspeed
    deepspeed.init_distributed(dist_backend="gloo")
    assert dist.get_world_size() == 1
    model = Model()
    data = [torch.ones(8)] * 4
    model_engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        training_data=data,
        mpu=None,
        dist_init_required=False,
        collate_fn=None,
    )
    with model_engine:
        assert isinstance(model_engine, deepspeed.DeepSpeedEngine)
        assert schedule is None
        for batch in loader:
            loss = model_engine(batch.to(model_engine.device)).square().mean()
            model_engine.backward(loss)
            model_engine.step()
        assert model_engine.global_steps == 2
        assert isinstance(optimizer, deepspeed.PagedAdam)
    assert dist.is_initialized()  # the script's, not the engine's


@pytest.mark.parametrize("where", ["memory", "nvme"])
@pytest.mark.parametrize(
    ("make", "decoupled"),
    [
        (lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1), True),
        (lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1, adamw_mode=False), False),
        (lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1), True),
        (lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=False), False),
    ],
)
def test_deepspeed_s_adams_are_torch_s(make: Any, decoupled: bool, where: str, nvme_path: Path) -> None:
    outcomes = []
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    for given, place in ((make, where), (lambda p: kind(p, lr=1e-2, weight_decay=0.1, fused=True), "memory")):
        torch.manual_seed(0)
        model = Model()
        settings = config(nvme_path if place == "nvme" else None)
        engine, *_ = deepspeed.initialize(model=model, optimizer=given(model.parameters()), config=settings)
        with engine:
            outcomes.append((train(engine), whole(engine)))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(a, b) for a, b in zip(outcomes[0][1], outcomes[1][1], strict=True))
    with pytest.raises(deepspeed.ConfigError, match="bias_correction"):
        deepspeed.ops.adam.FusedAdam([nn.Parameter(torch.ones(1))], bias_correction=False)


def test_zero_init_builds_without_memory_and_initialize_gives_the_values(nvme_path: Path) -> None:
    settings = config(nvme_path)
    torch.manual_seed(0)
    expected = [p.detach().clone() for p in Model().parameters()]
    with deepspeed.zero.Init(config_dict_or_path=settings, remote_device="nvme"):
        model = Model()
        tied = nn.Linear(64, 8, bias=False)
        tied.weight = model.first.weight
    assert all(p.is_meta for p in model.parameters())
    assert tied.weight is model.first.weight
    assert torch.equal(model.table, torch.arange(64.0))
    assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(deepspeed.ConfigError, match="no values before initialize"):
        deepspeed.zero.GatheredParameters(model.first.weight).__enter__()
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    with engine:
        assert all(torch.equal(a, b) for a, b in zip(expected, whole(engine), strict=True))
        train(engine)
    with deepspeed.zero.Init(enabled=False):
        assert not Model().first.weight.is_meta


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_gathered_parameters_are_read_and_set_through_their_modules(where: str, nvme_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, config=config(nvme_path if where == "nvme" else None))
    gathered = deepspeed.zero.GatheredParameters
    with engine:
        with gathered(model.parameters()) as full:
            assert [type(p) for p in full] == [nn.Parameter] * 6
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.first.weight.data.fill_(7.0)  # lost: modifier_rank is not given
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], before[name]) for name in before)
        with gathered(model.first.weight, modifier_rank=0):
            if dist.get_rank() == 0:
                nn.init.constant_(model.first.weight, 0.25)
        with gathered(model.first.weight), torch.no_grad():
            assert torch.equal(model.first.weight, torch.full((64, 8), 0.25))
        assert torch.equal(whole(engine)[0], torch.full((64, 8), 0.25))
        with gathered(model.parameters(), enabled=False) as same:
            assert same[0] is next(iter(model.parameters()))
        deepspeed.zero.register_external_parameter(model, model.first.weight)
        losses = train(engine)
    with torch.no_grad():
        nn.init.constant_((other := fresh(before)).first.weight, 0.25)
    engine, *_ = deepspeed.initialize(model=other, config=config(None))
    with engine:
        assert train(engine) == losses


def fresh(values: dict[str, torch.Tensor]) -> Model:
    model = Model()
    model.load_state_dict(values)
    return model


def test_a_gathered_change_that_fails_is_forgotten() -> None:
    engine, *_ = deepspeed.initialize(model=Model(), config=config(None))
    with engine:
        before = whole(engine)
        with pytest.raises(KeyError):
            fail_inside(engine.module)
        assert all(torch.equal(a, b) for a, b in zip(before, whole(engine), strict=True))
        train(engine, 1)


def fail_inside(model: Any) -> None:
    with deepspeed.zero.GatheredParameters(model.first.weight, modifier_rank=0):
        model.first.weight.data.zero_()
        raise KeyError


def test_a_pipeline_module_is_a_sequential_model(nvme_path: Path) -> None:
    from infinity.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from infinity.runtime.pipe.module import PipelineModule as SamePipelineModule

    assert PipelineModule is SamePipelineModule is deepspeed.PipelineModule is deepspeed.pipe.PipelineModule

    def unembed(embedding: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, embedding.weight)

    def started(interval: int, schedule: str) -> deepspeed.Engine:
        net = PipelineModule(
            [
                TiedLayerSpec("embedding", nn.Embedding, 17, 64),
                lambda hidden: 2 * hidden,
                *(LayerSpec(nn.TransformerEncoderLayer, 64, 2, 128, batch_first=True) for _ in range(3)),
                nn.LayerNorm(64),
                TiedLayerSpec("embedding", nn.Embedding, 17, 64, forward_fn=unembed),
            ],
            num_stages=1,
            loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()),
            activation_checkpoint_interval=interval,
            seed_layers=True,
        )
        assert len({p.data_ptr() for p in net.parameters()}) == 1 + 3 * 12 + 2
        settings = config(
            nvme_path, gradient_accumulation_steps=4, infinity={"schedule": schedule}, bf16={"enabled": True}
        )
        return deepspeed.initialize(model=net, config=settings)[0]

    outcomes = []
    for interval, schedule in ((0, "horizontal"), (0, "vertical"), (1, "vertical")):
        with started(interval, schedule) as engine:
            generator = torch.Generator().manual_seed(0)
            tokens = [torch.randint(17, (2, 6), generator=generator) for _ in range(12)]
            data_iter = iter([(x, x.roll(1)) for x in tokens])
            losses = [engine.train_batch(data_iter=data_iter).item() for _ in range(3)]
            outcomes.append((losses, whole(engine)))
            losses.append(engine.eval_batch(data_iter=iter([(x, x) for x in tokens])).item())
    for losses, weights in outcomes[1:]:
        assert losses == outcomes[0][0]
        assert all(torch.equal(a, b) for a, b in zip(weights, outcomes[0][1], strict=True))
    with pytest.raises(deepspeed.ConfigError, match="layer 0 of a PipelineModule is a int"):
        PipelineModule([3])
    with pytest.raises(deepspeed.ConfigError, match="LayerSpec takes a class of modules"):
        LayerSpec(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_checkpointing_recomputes() -> None:
    deepspeed.checkpointing.configure(mpu_=None, partition_activations=True)
    assert deepspeed.checkpointing.is_configured()
    calls = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x * 2).sin()

    x = torch.ones(3, requires_grad=True)
    deepspeed.checkpointing.checkpoint(layer, x).sum().backward()
    assert len(calls) == 2
    assert x.grad is not None
    deepspeed.checkpointing.reset()


def test_estimators_under_the_paths_that_scripts_import(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_live(Model(), num_gpus_per_node=2, num_nodes=1)
    estimate_zero2_model_states_mem_needs_all_cold(1e9)
    out = capsys.readouterr().out
    assert "Stage 3" in out
    assert "Stage 2" in out


def test_names_beside_the_engine() -> None:
    from infinity import comm
    from infinity.accelerator import get_accelerator
    from infinity.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
    from infinity.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
    from infinity.utils import RepeatingLoader, logger, set_z3_leaf_modules
    from infinity.utils.tensor_fragment import safe_get_full_grad

    assert deepspeed.utils.zero_to_fp32 and deepspeed.utils.safe_get_full_grad is safe_get_full_grad
    accelerator = get_accelerator()
    assert torch.empty(1, device=accelerator.current_device_name()).device.type == accelerator.device_name()
    assert torch.empty(1, device=accelerator.device(0)).device.type == accelerator.device_name()
    assert accelerator.memory_allocated() >= 0 and accelerator.device_count() >= 1
    assert accelerator.total_memory() > 1 << 28 and deepspeed.get_accelerator() is accelerator
    comm.init_distributed()
    assert comm.get_world_size() == dist.get_world_size() == 1
    assert comm.all_reduce is dist.all_reduce and comm.get_local_rank() == 0
    batches = RepeatingLoader([1, 2])
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert logger.name == "infinity"
    model = Model()
    assert set_z3_leaf_modules(model, [nn.Sequential]) == [model.blocks]
    groups = {"params": [*model.parameters()]}
    assert split_params_into_different_moe_groups_for_optimizer(groups) == [groups]
    assert not any(map(is_moe_param, model.parameters()))
    assert OffloadDeviceEnum.nvme == "nvme" and OffloadStateTypeEnum.optim_states in [*OffloadStateTypeEnum]


def test_seeds_memory_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from infinity.runtime.utils import see_memory_usage, set_random_seed
    from infinity.utils.logging import logger

    drawn = []
    for _ in range(2):
        set_random_seed(3)
        drawn.append((random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    logger.addHandler(caplog.handler)
    with caplog.at_level("INFO"):
        see_memory_usage("left out")
        see_memory_usage("here", force=True)
    logger.removeHandler(caplog.handler)
    [line] = {record.getMessage() for record in caplog.records}
    assert re.fullmatch(r"\[Rank 0\] here: GPU [\d.]+ GiB, at most [\d.]+ GiB; host [\d.]+ GiB available", line)


def test_the_builder_of_the_io_handle_compiles_nothing(tmp_path: Path) -> None:
    from infinity.ops.op_builder import AsyncIOBuilder

    assert AsyncIOBuilder().is_compatible()
    handle = AsyncIOBuilder().load().aio_handle()
    given, read = torch.arange(5000.0), torch.empty(5000)
    assert handle.sync_pwrite(given, tmp_path / "file") == handle.sync_pread(read, tmp_path / "file") == 1
    assert given.equal(read)


def test_modules_are_moved_inside_zero_init() -> None:
    with deepspeed.zero.Init():
        model = Model().cpu().bfloat16()
        assert model.table.dtype == torch.bfloat16
        assert {(p.is_meta, p.dtype) for p in model.parameters()} == {(True, torch.bfloat16)}
    with pytest.raises(NotImplementedError, match="meta tensor"):  # torch's own, outside of Init
        model.cpu()


def test_an_engine_is_made_inside_zero_init(nvme_path: Path) -> None:
    with deepspeed.zero.Init():
        engine, *_ = deepspeed.initialize(model=Model(), config=config(nvme_path))
        with engine:
            assert train(engine, 2)[0] > 0
            assert nn.Linear(2, 2).weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta
