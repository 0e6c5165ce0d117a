"""Models that are split over one dimension of a mesh of 2 x 2 ranks and sharded by FSDP2 over the other, paged or in
memory. A script of four ranks: `two_dimensions.py NVME_PATH NAME ...`, with names of CASES.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import infinity

STEPS = 10
WIDTH, HEADS, INNER, WORDS = 32, 4, 50, 66
"""INNER and WORDS have an odd number of rows on each rank of the tensor dimension."""
Outcome = tuple[list[float], dict[str, torch.Tensor]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], -1, WIDTH // HEADS)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x[:, :-1])).float().flatten(0, 1), ids[:, 1:].flatten())


COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def tensor_parallel(mesh: DeviceMesh, model: nn.Module | None = None) -> nn.Module:
    """Norms stay whole on each rank, and are on another mesh than the matrices after `fully_shard`."""
    torch.manual_seed(0)
    model = model or Llama()
    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        "layers.*.mlp.down_proj": RowwiseParallel(),
        **{f"layers.*.self_attn.{name}": ColwiseParallel() for name in COLUMNS[:3]},
        **{f"layers.*.mlp.{name}": ColwiseParallel() for name in COLUMNS[3:]},
    }
    return parallelize_module(model, mesh["tensor"], plan)


class Layer(nn.Module):
    """GPT-2's: norms with means, and biases everywhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.head_width = nn.LayerNorm(width), nn.LayerNorm(width), width // HEADS
        self.query, self.key, self.value, self.attended = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, INNER), nn.Linear(INNER, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, shape = self.ln_1(x), (*x.shape[:2], -1, self.head_width)
        q, k, v = (part(normed).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.attended(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """Learned places, and a head that is the embedding."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(9, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x[:, :-1])).float().flatten(0, 1), ids[:, 1:].flatten())


def gpt(width: int = WIDTH) -> GPT:
    torch.manual_seed(0)
    return GPT(width)


def split_gpt(mesh: DeviceMesh, width: int = WIDTH) -> nn.Module:
    """Biases of what is split by columns are whole on each rank, like norms and places, but DTensors of its mesh."""
    model = gpt(width)
    columns, rows = ("query", "key", "value", "up"), ("attended", "down")
    plan: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"layers.*.{name}": ColwiseParallel() for name in columns},
        **{f"layers.*.{name}": RowwiseParallel() for name in rows},
    }
    parallelize_module(model, mesh["tensor"], plan)
    model.lm_head.weight = model.wte.weight
    return model


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh["data"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["data"], mp_policy=policy)


def batch(step: int, part: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(100 * step + part))


def clip(parameters: Iterable[nn.Parameter], most: float) -> None:
    """torch's own clipping takes parameters of one mesh only: the norm over each mesh, then over these."""
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter.grad)  # type: ignore[attr-defined]
    norms: Any = [torch.nn.utils.get_total_norm(grads) for grads in by_mesh.values()]
    norm = torch.linalg.vector_norm(torch.stack([norm.full_tensor() for norm in norms]))
    for grad in (grad for grads in by_mesh.values() for grad in grads):
        grad._local_tensor.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))


def train(model: nn.Module, optimizer: Any, part: int, *, clipping: float = 0.0) -> Outcome:
    losses = []
    for step in range(STEPS):
        loss = model(batch(step, part))
        loss.backward()
        if clipping:
            clip(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, whole(model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.data for name, p in model.named_parameters()}


def differences(expected: Outcome, got: Outcome) -> list[str]:
    found = [f"loss {i}: {a!r}, {b!r}" for i, (a, b) in enumerate(zip(expected[0], got[0], strict=True)) if a != b]
    assert expected[1].keys() == got[1].keys()
    return found + [name for name, values in expected[1].items() if not values.equal(got[1][name])]


def in_memory(build: Callable[[DeviceMesh], nn.Module], mesh: DeviceMesh, *, clipping: float) -> Outcome:
    model = shard(build(mesh), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return train(model, optimizer, mesh["data"].get_local_rank(), clipping=clipping)


def paged(folder: str, mesh: DeviceMesh, update: str, *, clipping: float) -> Outcome:
    """The same with all state on NVMe, of which each rank has a fourth of the matrices and half of the norms."""
    model = shard(tensor_parallel(mesh), mesh)
    numels = {p: p._local_tensor.numel() for p in model.parameters()}  # type: ignore[attr-defined]
    with infinity.SwapManager(folder, pinned_bytes_max="8MiB") as swap:
        options: Mapping[str, Any] = {"gradient_dtype": torch.float32, "param_persistence_threshold": 0}
        swap.page(model, infinity.PagingOptions(update=update, **options))  # type: ignore[arg-type]
        optimizer = infinity.PagedAdamW(model.parameters(), lr=1e-2, swap=swap, fused=True)
        made = train(model, optimizer, mesh["data"].get_local_rank(), clipping=clipping)
        stored = sum(swap.paged.layout.shards[k].numel for k in range(len(numels)))
        assert sum(numels.values()) <= stored <= 1.05 * sum(numels.values())
        return made


def page_all(folder: str, mesh: DeviceMesh) -> None:
    for clipping, updates in ((0.0, ("backward",)), (0.5, ("step", "forward"))):
        expected = in_memory(tensor_parallel, mesh, clipping=clipping)
        for update in updates:
            check(expected, paged(folder, mesh, update, clipping=clipping), update)


def check(expected: Outcome, got: Outcome, what: str) -> None:
    wrong = differences(expected, got)
    assert not wrong, f"{what}: {wrong}"


def config(folder: str, update: str, clipping: float, **optimizer: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True},
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": place,
            "offload_optimizer": place,
        },
        "infinity": {"pinned_bytes_max": "8MiB", "update": update, "wrap": ["Block"]},
    }


def make(model: nn.Module, settings: dict[str, Any], **arguments: Any) -> infinity.Engine:
    return infinity.initialize(model=model, config=settings, **arguments)[0]


def steps(engine: infinity.Engine, first: int, end: int) -> Outcome:
    losses = []
    for step in range(first, end):
        loss = engine(batch(step, dist.get_rank() // 2))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, {name: values.clone() for name, values in whole(engine.module).items()}


def run_engine(folder: str, mesh: DeviceMesh) -> None:
    for clipping, update in ((0.0, "forward"), (0.5, "backward")):
        expected = in_memory(tensor_parallel, mesh, clipping=clipping)
        with make(tensor_parallel(mesh), config(folder, update, clipping), mesh=mesh) as engine:
            check(expected, steps(engine, 0, STEPS), update)


def run_gpt(folder: str, mesh: DeviceMesh) -> None:
    """Also the bytes of each rank: 10 read and 12 written for each element of its shard, which is a fourth of the matrices."""
    for clipping, updates in ((0.0, ("backward",)), (0.5, ("step", "forward", "backward"))):
        expected = in_memory(split_gpt, mesh, clipping=clipping)
        for update in updates:
            settings = config(folder, update, clipping)
            settings["infinity"]["wrap"] = ["Layer"]
            with make(split_gpt(mesh), settings, mesh=mesh) as engine:
                check(expected, steps(engine, 0, STEPS), f"{update}, clipped at {clipping}")
    settings = config(folder, "forward", 0.5)
    settings["infinity"] = {"pinned_bytes_max": "24MiB", "update": "forward"}
    with make(split_gpt(mesh, 512), settings, mesh=mesh) as engine:
        swap, shard = engine.swap, engine.shard_numel
        assert swap is not None
        counts = []
        for step in range(3):
            engine.backward(engine(batch(step, dist.get_rank() // 2)))
            engine.step()
            swap.stager.settle_all()  # a write counts once it has ended
            counts.append(swap.transferred()[:2])
        moved = (*((last - before) / shard for before, last in zip(*counts[1:], strict=True)), shard / engine.numel)
        assert moved == pytest.approx((10, 12, 1 / 4), rel=0.02), moved


def matrices_and_micro_batches(folder: str, mesh: DeviceMesh) -> None:
    """Muon, whose matrix products go over both dimensions, in memory and on NVMe; and both orders of micro-batches."""
    settings = config(folder, "backward", 0.5, type="Muon", params={"lr": 0.01})
    outcomes = []
    for zero in (settings["zero_optimization"], {"stage": 3}):
        with make(tensor_parallel(mesh), {**settings, "zero_optimization": zero}, mesh=mesh) as engine:
            outcomes.append(steps(engine, 0, 4))
    check(*outcomes, "Muon")
    losses = []
    for schedule in ("vertical", "horizontal"):
        settings = config(folder, "backward", 0.5) | {"gradient_accumulation_steps": 2}
        settings["infinity"]["schedule"] = schedule
        with make(tensor_parallel(mesh), settings, mesh=mesh) as engine:
            batches = (batch(step, dist.get_rank() // 2) for step in range(10))
            losses.append([engine.train_batch(batches).item() for _ in range(3)])
    assert losses[0] == losses[1], losses


def checkpoints(folder: str, mesh: DeviceMesh) -> None:
    """A run continues from its checkpoint; others have its values: unsplit, split over all ranks, in files of bf16."""
    settings = config(folder, "backward", 0.5)
    place = Path(folder) / "checkpoints"
    with make(tensor_parallel(mesh), settings, mesh=mesh) as engine:
        _, values = steps(engine, 0, 3)
        engine.save_checkpoint(place)
        engine.save_16bit_model(place / "export")
        streamed = {name: weight.clone() for name, weight in engine.named_weights(torch.bfloat16)}
        check(([], {name: value.bfloat16() for name, value in values.items()}), ([], streamed), "streamed")
        with infinity.zero.GatheredParameters([*engine.module.parameters()], modifier_rank=0) as gathered:
            check(([], values), ([], dict(zip(values, gathered, strict=True))), "gathered")
        expected = steps(engine, 3, 6)
        with pytest.raises(infinity.ConfigError, match="whole parameters"):
            engine.save_checkpoint(place, format="arena")
    with make(tensor_parallel(mesh), settings, mesh=mesh) as engine:
        engine.load_checkpoint(place)
        check(expected, steps(engine, 3, 6), "the run that went on")
    if dist.get_rank() == 0:
        exported = load_file(place / "export" / "model.safetensors")
        assert all(exported.pop(name).equal(value.bfloat16()) for name, value in values.items()) and not exported
    unsplit = place / "unsplit"
    with make(Llama(), settings) as engine:
        engine.load_checkpoint(place)
        check(([], values), ([], whole(engine.module)), "unsplit")
        engine.save_checkpoint(unsplit, tag="dcp")
        engine.save_checkpoint(unsplit, tag="arena", format="arena")
    over_all = init_device_mesh("cpu", (1, 4), mesh_dim_names=("data", "tensor"))
    for on, paths in ((over_all, [place]), (mesh, [unsplit])):
        with make(tensor_parallel(on), settings, mesh=on) as engine:
            for tag in ("dcp", "arena") if paths == [unsplit] else (None,):
                for p in engine.module.parameters():
                    p.data.zero_()
                engine.load_checkpoint(paths[0], tag=tag)
                check(([], values), ([], whole(engine.module)), f"{on}, {tag}")
    if dist.get_rank() == 0:
        shutil.rmtree(place)


def first_values(folder: str, mesh: DeviceMesh) -> None:
    """Each rank takes its rows and columns of a file, or of what the model draws."""
    path = Path(folder) / "model.safetensors"
    model = Llama()
    if dist.get_rank() == 0:
        save_file(model.state_dict(), path)
    dist.barrier()
    settings = config(folder, "backward", 0.5)
    outcomes: list[Outcome] = [([], load_file(path))]
    for on, arguments in ((mesh, {"weights": path}), (None, {}), (mesh, {})):
        torch.manual_seed(1)
        with infinity.init_empty():
            model = Llama()
        split = model if on is None else tensor_parallel(on, model)
        torch.manual_seed(1)
        arguments = arguments or {"init_fn": lambda m: getattr(m, "reset_parameters", int)()}
        with make(split, settings, mesh=on, **arguments) as engine:
            outcomes.append(([], {name: values.clone() for name, values in whole(engine.module).items()}))
    check(*outcomes[:2], "a file")
    check(*outcomes[2:], "drawn values")
    dist.barrier()
    if dist.get_rank() == 0:
        path.unlink()


def resume(folder: str, mesh: DeviceMesh) -> None:
    settings = config(folder, "backward", 0.5)
    settings["infinity"] |= {"durability": "step", "run_name": "split"}
    expected = in_memory(tensor_parallel, mesh, clipping=0.5)
    with make(tensor_parallel(mesh), settings, mesh=mesh) as engine:
        steps(engine, 0, 3)
    over_all = init_device_mesh("cpu", (1, 4), mesh_dim_names=("data", "tensor"))
    with pytest.raises(infinity.CheckpointError, match="belongs to a different training"):
        make(tensor_parallel(over_all), settings, mesh=over_all, resume="must")
    with make(tensor_parallel(mesh), settings, mesh=mesh, resume="must") as engine:
        losses, values = steps(engine, 3, STEPS)
    check((expected[0][3:], expected[1]), (losses, values), "the resumed run")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder) / "infinity-durable-split")


def refuse(folder: str, mesh: DeviceMesh) -> None:
    settings = config(folder, "backward", 0.5)
    by_config = {**settings, "tensor_parallel": {"autotp_size": 2}}
    arena = {**settings, "infinity": {"checkpoint_format": "arena"}}
    micro = {**settings, "zero_optimization": {**settings["zero_optimization"], "mics_shard_size": 1}}
    other_way = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    for words, split, changed, on in (
        ("pass mesh= to initialize", True, settings, None),
        ("Llama has no tp_plan", False, by_config, None),
        ("autotp_size: got 3, expected a divisor", False, {**settings, "tensor_parallel": {"autotp_size": 3}}, None),
        ("autotp_size: leave it out with mesh=", True, by_config, mesh),
        ("whole parameters", True, arena, mesh),
        ("mics_shard_size: got 1, and mesh= shards over 2", True, micro, mesh),
        ("has not all 4 ranks", True, settings, mesh["data"]),
        ("expected one or two dimensions for fully_shard", True, settings, other_way),
    ):
        with pytest.raises(infinity.ConfigError, match=words):
            make(tensor_parallel(mesh) if split else Llama(), changed, mesh=on)
    mixture = Llama()
    mixture.layers[1].experts = nn.ModuleList(FeedForward() for _ in range(4))  # type: ignore[union-attr]
    with pytest.raises(infinity.ConfigError, match=r"layers.1.experts has a module per expert"):
        make(mixture, settings | {"expert_parallel": {"enabled": True, "autoep_size": 2}})
    with make(tensor_parallel(mesh), settings, mesh=mesh) as engine:
        with pytest.raises(infinity.InfinityError, match="ranks 0 to 1 split the model and need the same batches"):
            engine(batch(0, dist.get_rank()))
        steps(engine, 0, 1)


class Stage(nn.Module):
    """One of two blocks of a model, with what comes before or after them."""

    def __init__(self, whole: Llama, number: int) -> None:
        super().__init__()
        self.number, self.layers = number, nn.ModuleList([whole.layers[number]])
        if number == 0:
            self.embed_tokens = whole.embed_tokens
        else:
            self.norm, self.lm_head = whole.norm, whole.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.number == 0:
            return self.layers[0](self.embed_tokens(x))
        return self.lm_head(self.norm(self.layers[0](x)))


def run_stage(stage: nn.Module, optimizer: Any, schedule: Any, mesh: DeviceMesh) -> Outcome:
    """Each batch in four micro-batches, by a schedule of torch.distributed.pipelining."""
    pipe, part = mesh["pipe"], mesh["data"].get_local_rank()
    place = PipelineStage(stage, pipe.get_local_rank(), 2, torch.device("cpu"), group=pipe.get_group())
    runs = schedule(
        place, n_microbatches=4, loss_fn=lambda made, ids: F.cross_entropy(made.flatten(0, 1), ids.flatten())
    )
    losses: list[float] = []
    for step in range(STEPS):
        ids = torch.cat([batch(step + STEPS * number, part) for number in range(4)])
        of_step: list[torch.Tensor] = []
        if pipe.get_local_rank() == 0:
            runs.step(ids)
        else:
            runs.step(target=ids, losses=of_step)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in of_step]
    return losses, whole(stage)


def pipelines(folder: str, mesh: DeviceMesh) -> None:
    """Stages are models of their own, each paged by itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return shard(Stage(Llama(), mesh["pipe"].get_local_rank()), mesh)

    for schedule, updates in ((ScheduleGPipe, ("step",)), (Schedule1F1B, ("forward", "backward"))):
        stage = build()
        expected = run_stage(stage, torch.optim.AdamW(stage.parameters(), lr=1e-2, fused=True), schedule, mesh)
        for update in updates:
            stage = build()
            options = infinity.PagingOptions(update=update, param_persistence_threshold=0)  # type: ignore[arg-type]
            with infinity.SwapManager(folder, pinned_bytes_max="8MiB") as swap:
                swap.page(stage, options)
                optimizer = infinity.PagedAdamW(stage.parameters(), lr=1e-2, swap=swap, fused=True)
                check(expected, run_stage(stage, optimizer, schedule, mesh), update)


class Experts(nn.Module):
    """A mixture with a module per expert: each rank of the mesh's last dimension has two of four, and tokens go to them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, here = mesh["experts"].get_group(), mesh["experts"].get_local_rank()
        self.router, everywhere = nn.Linear(WIDTH, 4, bias=False), [FeedForward() for _ in range(4)]
        self.experts = nn.ModuleDict({str(number): everywhere[number] for number in (2 * here, 2 * here + 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=4)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self.group)
        goes, comes = sent.view(2, 2).sum(1).tolist(), came.view(2, 2).sum(1).tolist()
        there = all_to_all_single_autograd(tokens[order], comes, goes, self.group)
        parts: Any = there.split(came.tolist())
        made: Any = [None] * 4
        for number, expert in enumerate(self.experts.values()):
            arrived = torch.cat([*parts[number::2], tokens.new_zeros(1, WIDTH)])  # each owner gets a gradient
            made[number::2] = expert(arrived)[:-1].split([len(part) for part in parts[number::2]])
        back = all_to_all_single_autograd(torch.cat(made), goes, comes, self.group)
        return torch.zeros_like(tokens).index_copy(0, order, back * weight[order, None]).view(x.shape)


def modules_per_expert(folder: str, mesh: DeviceMesh) -> None:
    """In a loop of one's own, in which torch shards each expert over its owners, and everything else over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("owners", "experts"))
    data = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Llama()
        for layer in model.layers:
            layer.mlp = Experts(mesh)
            for expert in layer.mlp.experts.values():
                fully_shard(expert, mesh=mesh["owners"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
                expert.set_gradient_divide_factor(4.0)  # all ranks, whose tokens it gets
                expert.set_force_sum_reduction_for_comms(True)  # gloo sums only
        return shard(model, data)

    model = build()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), dist.get_rank())
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, [name for name, _ in model.named_parameters()])
    assert len({name for names in everywhere for name in names}) == len(everywhere[0]) + 2 * 2 * 3
    for update in ("step", "forward", "backward"):
        model = build()
        options = infinity.PagingOptions(update=update, param_persistence_threshold=0)  # type: ignore[arg-type]
        with infinity.SwapManager(folder, pinned_bytes_max="8MiB") as swap:
            swap.page(model, options)
            optimizer = infinity.PagedAdamW(model.parameters(), lr=1e-2, swap=swap, fused=True)
            check(expected, train(model, optimizer, dist.get_rank()), update)


CASES: dict[str, Callable[[str, DeviceMesh], None]] = {
    "pages": page_all,
    "engine": run_engine,
    "GPT": run_gpt,
    "matrices and micro-batches": matrices_and_micro_batches,
    "checkpoints": checkpoints,
    "first values": first_values,
    "resume": resume,
    "refusals": refuse,
    "pipelines": pipelines,
    "modules per expert": modules_per_expert,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    two_by_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for case in sys.argv[2:]:
        CASES[case](sys.argv[1], two_by_two)
        print(f"rank {dist.get_rank()}, {case}: equal", flush=True)
    dist.destroy_process_group()
