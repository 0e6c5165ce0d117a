"""Memory that an engine gives back between steps. That the bits stay is a matter of tests/parity: "asleep between steps"."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.aio import absent_bytes
from infinity.device import SetAside

pytestmark = pytest.mark.usefixtures("one_rank")

MIB = 1 << 20


def held_bytes() -> int:
    """Memory of this process that is in use, once its pinned memory has become resident in the background."""
    gc.collect()
    while absent_bytes():
        time.sleep(0.01)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.frozen(self.norm(x)) * self.scale + self.shift


def engine_of(path: Path | None, width: int = 64, **changes: Any) -> infinity.Engine:
    place = {"device": "nvme", "nvme_path": str(path)} if path is not None else {"device": "none"}
    config = {
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "steps_per_print": 0,
        **changes,
    }
    return infinity.initialize(model=Model(width), config=config)[0]


def take_step(engine: Any, width: int = 64) -> float:
    loss = engine(torch.ones(2, width)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def test_level_2_gives_pinned_memory_back_and_level_1_what_was_gathered(nvme_path: Path, backend: str) -> None:
    settings = {"pinned_bytes_max": "192MiB", "backend": backend}
    with engine_of(nvme_path, 1024, infinity=settings) as engine:
        for _ in range(3):
            take_step(engine, 1024)
        assert engine.swap is not None
        before, moved = held_bytes(), engine.swap.stats().read_bytes
        engine.sleep()
        first = held_bytes()
        engine.wake()
        engine.sleep(2)
        asleep = held_bytes()
        engine.wake()
        assert before - first > 4 * MIB  # gathered weights and gradients of four blocks of 1 Mi elements
        assert before - asleep > 180 * MIB
        take_step(engine, 1024)
        assert engine.swap.stats().read_bytes > moved  # the counters go on
        # `before` may include what earlier tests left to be freed.
        assert asleep + 160 * MIB < held_bytes() < before + 16 * MIB


def test_a_sleeping_engine_refuses_everything_but_wake_and_close(nvme_path: Path, tmp_path: Path) -> None:
    engine = engine_of(nvme_path)
    take_step(engine)
    engine.sleep(2)
    weight = engine.module.blocks[0].weight
    refused: list[Callable[[], object]] = [
        lambda: engine(torch.ones(2, 64)),
        lambda: engine.module(torch.ones(2, 64)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
        engine.zero_grad,
        engine.sleep,
        engine.offload_states,
        lambda: engine.train_batch(iter([torch.ones(2, 64)])),
        lambda: engine.eval_batch(iter([torch.ones(2, 64)])),
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.load_checkpoint(tmp_path),
        lambda: engine.save_16bit_model(tmp_path),
        lambda: [*engine.named_weights()],
        lambda: weight.data.full_tensor() + 0,
        lambda: engine.load_module_state_dict(Model().state_dict()),
        engine.empty_partition_cache,
    ]
    for call in refused:
        with pytest.raises(infinity.InfinityError, match=r"the engine sleeps.*call engine.wake\(\) first"):
            call()
    assert not [*tmp_path.iterdir()]
    assert engine.global_steps == 1
    engine.reload_states()
    engine.wake()  # awake already
    take_step(engine)
    engine.sleep(2)
    engine.close()
    assert not [*nvme_path.iterdir()]


def test_sleep_is_for_between_steps(nvme_path: Path) -> None:
    with engine_of(nvme_path) as engine:
        loss = engine(torch.ones(2, 64)).float().square().mean()
        engine.backward(loss)
        with pytest.raises(infinity.InfinityError, match=r"call sleep\(\) after step"):
            engine.sleep()
        engine.step()
        with pytest.raises(infinity.ConfigError, match=r"level 1 .* or 2"):
            engine.sleep(3)
        engine.start_trace()
        with pytest.raises(infinity.InfinityError, match="stop_trace"):
            engine.sleep(2)
        take_step(engine)
        engine.stop_trace()


def test_a_backward_after_a_sleep_finds_its_saved_activations(nvme_path: Path) -> None:
    activations = {"device": "nvme", "bytes_min": 64}
    norms = []
    for sleeps in (False, True):
        with engine_of(nvme_path, infinity={"offload_activations": activations}) as engine:
            loss = engine(torch.ones(2, 64)).float().square().mean()
            if sleeps:
                engine.sleep(2)
                engine.wake()
            engine.backward(loss)
            engine.step()
            norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


def test_a_training_in_memory_sleeps_at_level_1(nvme_path: Path) -> None:
    with engine_of(None) as engine, engine_of(None) as other:
        for number in range(3):
            assert take_step(engine) == take_step(other), number
            engine.sleep()
            with pytest.raises(infinity.InfinityError, match="the engine sleeps"):
                take_step(engine)
            engine.wake()
        with pytest.raises(infinity.ConfigError, match="nothing of this training is on NVMe"):
            engine.sleep(2)
        take_step(engine)


def test_after_a_sleep_that_fails_the_engine_is_awake(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensors: object) -> None:
        raise MemoryError("no host memory for buffers")

    with engine_of(nvme_path) as engine, engine_of(nvme_path) as other:
        assert take_step(engine) == take_step(other)
        monkeypatch.setattr("infinity.runtime.engine.SetAside", fail)
        with pytest.raises(MemoryError, match="for buffers"):
            engine.sleep(2)
        monkeypatch.undo()
        assert take_step(engine) == take_step(other)
        engine.sleep(2)
        engine.wake()
        assert take_step(engine) == take_step(other)


def test_a_durable_run_sleeps_and_is_resumed(nvme_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"durability": "step"},
    }
    losses = []
    for resume in (False, "must"):
        with infinity.initialize(model=Model(), config=config, resume=resume)[0] as engine:  # type: ignore[arg-type]
            for _ in range(2):
                losses.append(take_step(engine))
                engine.sleep(2)
                engine.wake()
            engine.sleep(2)
    with engine_of(None, bf16={"enabled": False}) as engine:
        assert losses == [take_step(engine) for _ in range(4)]


def test_tensors_that_are_set_aside_have_no_memory() -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    view, empty = tensor[7:].view(-1), torch.empty(0)
    expected = tensor.clone()
    aside = SetAside([tensor, view, empty])
    assert tensor.untyped_storage().nbytes() == 0
    aside.put_back()
    aside.put_back()
    assert torch.equal(tensor, expected) and torch.equal(view, expected[7:])


def test_tensors_of_which_one_cant_be_set_aside_all_stay() -> None:
    tensor = torch.arange(6.0)
    with pytest.raises(NotImplementedError, match="no data"):  # torch's own, of a tensor on the meta device
        SetAside([tensor, torch.empty(6, device="meta")])
    assert tensor.tolist() == [*range(6)]


@pytest.mark.parametrize("where", ["memory", "nvme", "nvme, nothing resident", "host"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_named_weights_are_whole_and_exact(where: str, dtype: torch.dtype | None, nvme_path: Path) -> None:
    threshold = {"stage3_param_persistence_threshold": 0} if "resident" in where else {}
    place = {"memory": {"device": "none"}, "host": {"device": "cpu"}}.get(
        where, {"device": "nvme", "nvme_path": str(nvme_path)}
    )
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place, **threshold}
    with engine_of(
        nvme_path, zero_optimization=zero, infinity={"update": "forward"} if where != "memory" else {}
    ) as engine:
        take_step(engine)
        weights = [*engine.named_weights(dtype)]
        expected = {n: p.data.full_tensor() + 0 for n, p in engine.module.named_parameters()}
        expected = {n: v.reshape(()) if n == "scale" else v for n, v in expected.items()} | {
            "shift": engine.module.shift
        }
        assert len(weights) == len(expected)
        for name, weight in weights:
            assert type(weight) is torch.Tensor and weight.device == engine.device
            assert torch.equal(weight, expected[name].to(dtype or torch.bfloat16)), name
        take_step(engine)
