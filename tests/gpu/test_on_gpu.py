"""What only a GPU can show: parity, overlap, memory, and a model that fits in none of the memories it is given.

`INFINITY_REHEARSE_GPU=1` runs the same on a machine without one, on its CPU and small: what needs CUDA's own figures is left
out then, and says so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from overlap import exposed, length, on_the_gpu
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import infinity
from infinity.units import GIB, MIB

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, config_for

pytestmark = pytest.mark.gpu

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
STEPS = 6 if ON_GPU else 2
SMALL = 2_000_000 if ON_GPU else 100_000


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if ON_GPU else 1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def engine_for(
    numel: int, context: int, path: Path | None, *, checkpointing: bool = False, empty: bool = True, **more: Any
) -> infinity.Engine:
    """`path`: where everything is; None: in host memory. `empty`: the model is built without memory."""
    where = {"device": "cpu"} if path is None else {"device": "nvme", "nvme_path": str(path)}
    own = more.pop("infinity", {})
    zero = more.pop("zero", {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": where, **zero},
        "infinity": own,
        "steps_per_print": 0,
        **more,
    }
    torch.manual_seed(0)
    with infinity.init_empty() if empty else contextlib.nullcontext():
        model = GPT(config_for(numel, context, checkpoint_activations=checkpointing))
    return infinity.initialize(model=model, config=config)[0]


def step(engine: infinity.Engine, number: int, context: int) -> float:
    for micro in range(engine.gradient_accumulation_steps()):
        loss = loss_of(engine, number, micro, context)
        engine.backward(loss)
        engine.step()
    return loss.item()


def loss_of(model: nn.Module | infinity.Engine, number: int, micro: int, context: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + micro)
    batch = torch.randint(0, 256, (2, context + 1), generator=generator).to(DEVICE)
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: (p.data.full_tensor() + 0).cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2, "infinity": {"update": "forward"}},
        {"infinity": {"update": "step"}},
        {"gradient_clipping": 1e9},
        {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 20}},
        {"checkpointing": True},
        {"checkpointing": True, "infinity": {"offload_activations": {"device": "nvme", "bytes_min": 4096}}},
    ],
    ids=["backward", "forward", "step", "norm", "fp16", "checkpointing", "activations on NVMe"],
)
def test_nvme_and_host_memory_equal_fsdp2_bit_for_bit(more: dict[str, Any], nvme_path: Path) -> None:
    """The oracle is FSDP2's own offload, which steps on the CPU: CUDA's AdamW rounds some last bits otherwise. It has no loss
    scaling, so in fp16 the two are held to each other."""
    outcomes = [] if "fp16" in more else [stock_in_host_memory(more)]
    for path in (None, nvme_path):
        own = dict(more.get("infinity", {}))
        if path is None:
            own.pop("offload_activations", None)
        with engine_for(SMALL, 16, path, **{**more, "infinity": own}) as engine:
            losses = [step(engine, number, 16) for number in range(STEPS)]
            outcomes.append((losses, weights(engine.module)))
    (expected, held), *others = outcomes
    for losses, paged in others:
        assert losses == expected
        assert all(torch.equal(held[name], paged[name]) for name in held)


def stock_in_host_memory(more: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training by FSDP2 with CPUOffloadPolicy and torch's fused AdamW."""
    torch.manual_seed(0)
    model = GPT(config_for(SMALL, 16, checkpoint_activations=more.get("checkpointing", False)))
    mesh = init_device_mesh(DEVICE.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if ON_GPU else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    passes = more.get("gradient_accumulation_steps", 1)
    losses = []
    for number in range(STEPS):
        for micro in range(passes):
            loss = loss_of(model, number, micro, 16)
            (loss / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights(model)


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_clipping": 1.0},
        {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2},
        {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    ],
    ids=["clipping", "clipping and accumulation", "Muon"],
)
def test_every_timing_gives_the_same_bits(more: dict[str, Any], nvme_path: Path) -> None:
    """The norm is taken, and Muon's matrices are multiplied, on the GPU: in host memory the last bits are others."""
    outcomes = []
    for update in ("step", "forward", "backward"):
        with engine_for(SMALL, 16, nvme_path, infinity={"update": update}, **more) as engine:
            losses = [step(engine, number, 16) for number in range(STEPS)]
            outcomes.append((losses, weights(engine.module)))
    (expected, held), *others = outcomes
    for losses, paged in others:
        assert losses == expected
        assert all(torch.equal(held[name], paged[name]) for name in held)
    with engine_for(SMALL, 16, None, **more) as engine:
        in_host_memory = [step(engine, number, 16) for number in range(STEPS)]
    assert in_host_memory == pytest.approx(expected, rel=1e-2)


def test_evaluation_and_generation_in_between_change_nothing(nvme_path: Path) -> None:
    outcomes = []
    for path in (None, nvme_path):
        with engine_for(SMALL, 16, path) as engine:
            said: list[Any] = []
            for number in range(STEPS):
                engine.eval()
                text = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
                with torch.no_grad():
                    for _ in range(4):
                        text = torch.cat([text, engine(text)[:, -1:].argmax(dim=-1)], dim=1)
                engine.train()
                said += [text.tolist(), step(engine, number, 16)]
            outcomes.append((said, weights(engine.module)))
    (expected, held), (said, paged) = outcomes
    assert said == expected
    assert all(torch.equal(held[name], paged[name]) for name in held)


@pytest.mark.parametrize("clipping", [0.0, 1e9])
def test_two_ranks_that_share_the_gpu(clipping: float, nvme_path: Path, torchrun: Any) -> None:
    script = Path(__file__).resolve().parents[1] / "helpers" / "two_ranks.py"
    done = torchrun(script, str(nvme_path), str(clipping), timeout_seconds=100)
    assert done.stdout.count("the same") == 2


def test_copies_to_the_device_are_hidden_once_the_order_is_known(nvme_path: Path) -> None:
    """In an evaluation whose compute parameters stay staged: there no drive is waited for. A training step is asked the
    same on a drive that is never late: tests/device/test_training.py.

    The profiler notes what the GPU does alone: notes of what Python does take Python twice as long, and the GPU waits for it.
    """
    numel, context, rows = (1_000_000_000, 1024, 64) if ON_GPU else (100_000, 16, 2)
    with engine_for(numel, context, nvme_path) as engine, torch.no_grad():
        engine.eval()
        batch = torch.zeros(rows, context, dtype=torch.int64, device=DEVICE)
        for _ in range(3):
            engine(batch)
        if not ON_GPU:
            pytest.skip("rehearsed: computed; how copies overlap is a question to a GPU")
        assert engine.swap is not None and engine.swap.paging.parameters.ahead is not None
        late = engine.swap.paging.parameters.ahead.late
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            engine(batch)
            torch.cuda.synchronize()
        late = engine.swap.paging.parameters.ahead.late - late
    kernels, copies, _ = on_the_gpu(profiler.events() or ())
    print(
        f"late {late}, computed {length(kernels):.0f} us, copied {length(copies):.0f} us, of these exposed "
        f"{exposed(copies, kernels):.0f} us"
    )
    assert length(copies) > 0, "the profiler saw no copy"
    assert late <= 2, "groups that were not on their way when they were asked for"
    assert exposed(copies, kernels) <= 0.1 * length(copies)


def test_peak_device_memory_is_within_the_bound(nvme_path: Path) -> None:
    numel, context = (1_000_000_000, 512) if ON_GPU else (100_000, 16)
    with engine_for(numel, context, nvme_path, checkpointing=True) as engine:
        assert engine.live is not None
        live = engine.live.plan.peak_numel
        largest = max(group.numel for group in engine.live.outline.groups)
        for number in range(2):
            step(engine, number, context)
        if not ON_GPU:
            pytest.skip("rehearsed: trained; how much memory of a device it takes is a question to a GPU")
        peak = torch.cuda.max_memory_allocated()
        logits = 2 * context * 256 * (2 + 4 + 4)
    gathered = 2 * live  # bf16
    one_group = largest * (
        2 + 2 + 2 + 4 + 4
    )  # ahead; gathering; its gradient, whole, and twice in fp32 as it is reduced
    activations = 512 * MIB + logits
    print(f"peak {peak / GIB:.2f} GiB, of which gathered {gathered / GIB:.2f} GiB")
    assert peak <= gathered + 2 * one_group + activations
    assert peak < 16 * numel // 4, "a model in memory takes 16 bytes a parameter"


@contextlib.contextmanager
def device_memory_of(nbytes: int) -> Iterator[None]:
    """As if the GPU had no more."""
    if not ON_GPU:
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_model_in_host_memory_may_be_larger_than_the_gpu(nvme_path: Path) -> None:
    numel, device_bytes = (500_000_000, 3 * GIB // 2) if ON_GPU else (300_000, 0)
    assert not ON_GPU or 4 * numel > device_bytes
    with device_memory_of(device_bytes), engine_for(numel, 64, nvme_path, checkpointing=True, empty=False) as engine:
        losses = [step(engine, 0, 64) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_billions_of_parameters_within_a_budget_of_each_memory(nvme_path: Path) -> None:
    numel, device_bytes, pinned_bytes = (3_000_000_000, 12 * GIB, 4 * GIB) if ON_GPU else (300_000, 0, 32 * MIB)
    own = {"pinned_bytes_max": pinned_bytes}
    with (
        device_memory_of(device_bytes),
        engine_for(numel, 256, nvme_path, checkpointing=True, infinity=own) as engine,
    ):
        losses = [step(engine, 0, 256) for _ in range(4)]
        stats = engine.swap_stats()
    assert losses[-1] < losses[0]
    assert stats is not None and stats.pinned_peak_bytes <= stats.pinned_bytes <= pinned_bytes
