"""A PipelineModule of two stages on 2 x 2 ranks, paged or in memory. A script of four ranks:
`pipeline_stages.py NVME_PATH NAME ...`, with names of CASES.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from two_dimensions import STEPS, WIDTH, WORDS, Block, Outcome, batch, check, config, make, whole

import infinity
from infinity.pipe import LayerSpec, PipelineModule, TiedLayerSpec

MICRO_BATCHES = 4
LAYERS = (
    LayerSpec(nn.Embedding, WORDS, WIDTH),
    lambda hidden: 2 * hidden,
    *(LayerSpec(Block) for _ in range(4)),
    LayerSpec(nn.RMSNorm, WIDTH),
    LayerSpec(nn.Linear, WIDTH, WORDS, bias=False),
)


class Words(nn.Embedding):
    """Embeds words and their places; the last layer uses the words alone."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.places


TIED = (
    TiedLayerSpec("words", Words),
    *LAYERS[2:7],
    TiedLayerSpec("words", Words, forward_fn=lambda words, hidden: F.linear(hidden, words.weight)),
)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def build(stages: int = 2, layers: Any = LAYERS, **arguments: Any) -> PipelineModule:
    return PipelineModule(layers, num_stages=stages, loss_fn=loss_of, seed_layers=True, **arguments)


def batches(step: int, ranks: int = 2) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of this rank from a step on, the same on all stages; `ranks` share a stage."""
    for number in itertools.count(step * MICRO_BATCHES):
        ids = batch(number, dist.get_rank() % ranks)
        yield ids[:, :-1], ids[:, 1:]


def settings(folder: str, update: str = "backward", clipping: float = 0.5, **changed: Any) -> dict[str, Any]:
    return config(folder, update, clipping) | {"gradient_accumulation_steps": MICRO_BATCHES} | changed


class Plain(nn.Module):
    """What torch's stage sees, so that it does not keep the whole stage gathered until the step."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.stage(x)
        return made


def in_memory(*, clipping: float, layers: Any = LAYERS) -> Outcome:
    """torch's FSDP2 and pipelining, without infinity but for the model's layers. Copies of a tied layer begin alike and get the
    sum of their gradients; the norm counts the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    pipe, model = mesh["pipe"].get_group(), build(layers=layers)
    for parameter in model.tied_modules.parameters():
        dist.broadcast(parameter.data, group=pipe, group_src=0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*(layer for layer in model.layers if isinstance(layer, Block)), model):
        fully_shard(module, mesh=mesh["data"], mp_policy=policy)
    copies = [*model.tied_modules.parameters()]
    counted = [p for p in model.parameters() if model.stage == 0 or not any(p is copy for copy in copies)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    stage = PipelineStage(Plain(model), dist.get_rank(pipe), 2, torch.device("cpu"), group=pipe)
    runs = Schedule1F1B(
        stage, MICRO_BATCHES, lambda made, labels: loss_of(made, labels) / MICRO_BATCHES, scale_grads=False
    )
    data, losses = batches(0), []
    for _ in range(STEPS):
        inputs, labels = zip(*itertools.islice(data, MICRO_BATCHES), strict=True)
        of_step: list[torch.Tensor] = []
        runs.step(*([torch.cat(inputs)] if model.stage == 0 else []), target=torch.cat(labels), losses=of_step)
        for copy in copies:
            copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
            dist.all_reduce(copy.grad._local_tensor, group=pipe)  # type: ignore[attr-defined]
        if clipping:
            norm = torch.nn.utils.get_total_norm([p.grad for p in counted]).full_tensor()  # type: ignore
            of_stages = [torch.empty_like(norm) for _ in range(2)]
            dist.all_gather(of_stages, norm, group=pipe)
            factor = torch.clamp(clipping / (torch.linalg.vector_norm(torch.stack(of_stages)) + 1e-6), max=1.0)
            for parameter in model.parameters():
                parameter.grad._local_tensor.mul_(factor)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack([MICRO_BATCHES * loss.detach() for loss in of_step] or [torch.zeros(())]).mean()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses, whole(model)


def train(engine: infinity.Engine, first: int, end: int) -> Outcome:
    data = batches(first, engine.world_size // engine.module.num_stages)
    return [engine.train_batch(data).item() for _ in range(first, end)], values(engine)


def values(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in whole(engine.module).items()}


def of_all(here: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, here)
    return {name: value for of_rank in everywhere for name, value in of_rank.items()}


def training(folder: str) -> None:
    for clipping, update in ((0.0, "backward"), (0.5, "forward")):
        expected = in_memory(clipping=clipping)
        with make(build(), settings(folder, update, clipping)) as engine:
            check(expected, train(engine, 0, STEPS), update)


def timings(folder: str) -> None:
    """Also with nothing offloaded, in host memory, with activations recomputed, and with Muon."""
    expected = in_memory(clipping=0.5)
    nowhere, host = {"stage": 3}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    for what, changed in (
        ("backward", {}),
        ("step", {}),
        ("none", {"zero_optimization": nowhere}),
        ("cpu", {"zero_optimization": host}),
    ):
        update = what if not changed else "auto"
        with make(build(), settings(folder, update, **changed)) as engine:
            check(expected, train(engine, 0, STEPS), what)
            assert engine.numel == sum(value.numel() for value in of_all(expected[1]).values())
    with make(build(activation_checkpoint_interval=1), settings(folder)) as engine:
        check(expected, train(engine, 0, STEPS), "recomputed")
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
    outcomes = []
    for zero in ({}, {"zero_optimization": nowhere}):
        with make(build(), settings(folder, **muon, **zero)) as engine:
            outcomes.append(train(engine, 0, 4))
    check(*outcomes, "Muon")


def checkpoints(folder: str) -> None:
    """A run of two stages continues from its checkpoint after others loaded and saved it: of one stage, and of four."""
    place, saved = Path(folder) / "checkpoints", settings(folder)
    with make(build(), saved) as engine:
        train(engine, 0, 2)
        expected_values = of_all(values(engine))
        engine.save_checkpoint(place / "2", client_state={"tokens": 7})
        engine.save_16bit_model(place / "export")
        expected = train(engine, 2, 4)
        streamed = {name: weight.clone() for name, weight in engine.named_weights(torch.bfloat16)}
        check(([], {name: value.bfloat16() for name, value in expected[1].items()}), ([], streamed), "streamed")
        last = [*engine.module.parameters()][-1:]
        with infinity.zero.GatheredParameters(last, modifier_rank=2 * engine.module.stage) as whole_ones:
            whole_ones[0].data.fill_(dist.get_rank())
        assert values(engine)[[*expected[1]][-1]].eq(2 * engine.module.stage).all()
        with pytest.raises(infinity.ConfigError, match="and this one is split"):
            engine.save_checkpoint(place, format="arena")
    if dist.get_rank() == 0:
        exported = load_file(place / "export" / "model.safetensors")
        assert all(exported.pop(name).equal(value.bfloat16()) for name, value in expected_values.items())
        assert not exported
    for number, (stages, before) in enumerate(((1, "2"), (4, "by 1"))):
        with make(build(stages), saved) as engine:
            engine.load_checkpoint(place / before)
            check(([], expected_values), ([], of_all(values(engine))), f"{stages} stages")
            engine.save_checkpoint(place / f"by {stages}")
            if number == 0:
                engine.save_checkpoint(place / "arena", format="arena")
    with make(build(), saved) as engine:
        with pytest.raises(infinity.ConfigError, match="for a whole model"):
            engine.load_checkpoint(place / "arena")
        assert engine.load_checkpoint(place / "by 4")[1] == {}
        check(expected, train(engine, 2, 4), "the run that went through others")
        assert engine.load_checkpoint(place / "2")[1] == {"tokens": 7}
        check(expected, train(engine, 2, 4), "the run that went on")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place)


def tied(folder: str) -> None:
    """Embedding and head are one matrix, of which both ends of the pipeline have a copy."""
    expected, nowhere = in_memory(clipping=0.5, layers=TIED), {"zero_optimization": {"stage": 3}}
    place = Path(folder) / "checkpoints"
    for update, changed in (("backward", {}), ("forward", {}), ("auto", nowhere)):
        with make(build(layers=TIED), settings(folder, update, **changed)) as engine:
            check(expected, train(engine, 0, STEPS), update)
            found = of_all(values(engine))
            assert engine.numel == sum(value.numel() for value in found.values())
            check(([], {name: found[name] for name in values(engine)}), ([], values(engine)), "the copies")
            if update == "forward":
                engine.save_checkpoint(place)
                engine.save_16bit_model(place)
                after = train(engine, STEPS, STEPS + 1)
    with make(build(layers=TIED), settings(folder)) as engine:
        engine.load_checkpoint(place)
        check(after, train(engine, STEPS, STEPS + 1), "the run that went on")
    outcomes = []
    for stages in (1, 2):
        with make(build(stages, TIED), settings(folder)) as engine:
            loss = engine.train_batch(batches(0, 2)).item()
            outcomes.append((loss, float(engine.get_global_grad_norm())))
            engine.load_checkpoint(place)
            check(([], {name: found[name] for name in values(engine)}), ([], values(engine)), f"{stages} stages")
    torch.testing.assert_close(*map(torch.tensor, outcomes), rtol=1e-2, atol=0)
    dist.barrier()
    if dist.get_rank() == 0:
        exported = load_file(place / "model.safetensors")
        assert all(exported.pop(name).equal(value.bfloat16()) for name, value in found.items()) and not exported
        shutil.rmtree(place)


def refuse(folder: str) -> None:
    good = settings(folder)
    zero = good["zero_optimization"]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    file = Path(folder) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file({"layers.0.weight": torch.zeros(WORDS, WIDTH)}, file)
    dist.barrier()
    for words, changed, arguments in (
        ("mesh=, which infinity can't combine", {}, {"mesh": mesh}),
        ("weights=, which infinity can't combine", {}, {"weights": file}),
        ("autotp_size, which infinity can't combine", {"tensor_parallel": {"autotp_size": 2}}, {}),
        ("autoep_size, which infinity can't combine", {"expert_parallel": {"enabled": True, "autoep_size": 2}}, {}),
        ("mics_shard_size, which infinity", {"zero_optimization": {**zero, "mics_shard_size": 2}}, {}),
        ("durability .step., which infinity", {"infinity": {"durability": "step"}}, {}),
        ("format .arena., which infinity", {"infinity": {"checkpoint_format": "arena"}}, {}),
        ("schedule .vertical., which infinity", {"infinity": {"schedule": "vertical"}}, {}),
        ("micro_batches, which", {"infinity": {"micro_batches": 2}, "gradient_accumulation_steps": 1}, {}),
        ("flops_profiler, which", {"flops_profiler": {"enabled": True}}, {}),
        ("steps: got 1, expected at least 2", {"gradient_accumulation_steps": 1}, {}),
        ("names Blok, but the model has only", {"infinity": {"wrap": ["Blok"]}}, {}),
    ):
        with pytest.raises(infinity.ConfigError, match=words):
            make(build(), {**good, **changed}, **arguments)
    with pytest.raises(infinity.ConfigError, match="must be the model itself"):
        make(nn.Sequential(build()), good)
    with pytest.raises(infinity.ConfigError, match="init_inference runs a whole model"):
        infinity.init_inference(build())
    shared = nn.Linear(WIDTH, WIDTH)
    for words, layers, arguments in (
        ("got 3, expected a divisor of the 4 ranks", LAYERS, {"num_stages": 3}),
        ("got 4, expected at most the 3 layers", LAYERS[:3], {"num_stages": 4}),
        ("a parameter of layer 5 is used in stages 0 and 1", (shared, *LAYERS[2:6], shared), {"num_stages": 2}),
        ("partition_method of a PipelineModule: got .best.", LAYERS, {"num_stages": 2, "partition_method": "best"}),
    ):
        with pytest.raises(infinity.ConfigError, match=words):
            PipelineModule(layers, **arguments)
    words_first = PipelineModule(LAYERS[:3], num_stages=2, loss_fn=loss_of, partition_method="type:embedding|block")
    with pytest.raises(infinity.ConfigError, match="different numbers of parameter groups"):
        make(words_first, {**good, "optimizer": {"type": "Muon", "params": {"lr": 1e-2}}})
    with make(build(), good) as engine:
        for by_hand in (lambda: engine(batch(0, 0)), lambda: engine.backward(torch.zeros(())), engine.step):
            with pytest.raises(infinity.InfinityError, match="stage of a PipelineModule"):
                by_hand()
        with pytest.raises(infinity.ConfigError, match="steps: got 1, expected at least 2"):
            engine.set_train_batch_size(4)
        with pytest.raises(infinity.ConfigError, match="save_16bit_model, which writes all"):
            engine._zero3_consolidated_16bit_state_dict()
        different = [(ids[: 1 + number], labels) for number, (ids, labels) in zip(range(4), batches(0), strict=False)]
        with pytest.raises(infinity.ConfigError, match="have different shapes"):
            engine.train_batch(iter(different))
        with pytest.raises(infinity.ConfigError, match="have got different batches"):
            engine.train_batch(batches(dist.get_rank()))
        with pytest.raises(StopIteration):
            engine.train_batch(iter([]))
        train(engine, 0, 1)
    dist.barrier()
    if dist.get_rank() == 0:
        file.unlink()


def shapes(folder: str) -> None:
    """Other lengths and numbers of micro-batches from step to step; the loader of initialize; fp16; a schedule; first values
    that are drawn in `initialize`."""
    changed = {"fp16": {"enabled": True, "initial_scale_power": 26}, "bf16": {"enabled": False}}
    changed |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}}}
    outcomes = []
    for zero in ({}, {"zero_optimization": {"stage": 3}}):
        engine = make(build(partition_method="type:block"), settings(folder, **changed, **zero))
        assert list(engine.module.layers._modules) == (["0", "1", "2"], ["3", "4", "5", "6"])[engine.module.stage]
        figures = []
        with engine:
            for length in (8, 5, 8):
                data = ((inputs[:, :length], labels[:, :length]) for inputs, labels in batches(length))
                figures += [engine.eval_batch(data).item()]
                figures += [engine.train_batch(data).item() for _ in range(5)]
                figures += [
                    engine.get_lr()[0],
                    engine.cur_scale,
                    engine.skipped_steps,
                    repr(engine.get_global_grad_norm()),
                ]
                engine.set_train_batch_size(engine.train_batch_size() + 4)
            outcomes.append((figures, values(engine)))
    check(outcomes[0], outcomes[1], "shapes")
    assert 0 < outcomes[0][0][-2] < 12, outcomes[0][0]
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, outcomes[0][0])
    assert all(figures == everywhere[0] for figures in everywhere)
    data = torch.utils.data.TensorDataset(*(torch.stack([batch(n, 0)[0] for n in range(16)]) for _ in range(2)))
    with make(build(), settings(folder, train_micro_batch_size_per_gpu=1), training_data=data) as engine:
        assert len(engine.training_dataloader) == 8
        engine.train_batch()
    with infinity.init_empty():
        model = PipelineModule(LAYERS[2:6], num_stages=2, loss_fn=loss_of)
    with make(model, settings(folder), init_fn=lambda m: getattr(m, "reset_parameters", int)()) as engine:
        drawn = [value for name, value in of_all(values(engine)).items() if name.endswith("q_proj.weight")]
    assert len(drawn) == 4 and not any(a.equal(b) for a, b in itertools.combinations(drawn, 2))


def errors(folder: str) -> None:
    """An error on one rank of a stage ends the step on all, within seconds."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 3:
                raise ValueError("no more layers")
            return x

    model = PipelineModule((*LAYERS, LayerSpec(Fails)), num_stages=2, loss_fn=loss_of)
    with make(model, settings(folder)) as engine:
        began = time.monotonic()
        with pytest.raises(ValueError if dist.get_rank() == 3 else infinity.InfinityError, match="no more layers"):
            engine.train_batch(batches(0))
        assert time.monotonic() - began < 60


CASES: dict[str, Callable[[str], None]] = {
    "training": training,
    "timings": timings,
    "checkpoints": checkpoints,
    "refusals": refuse,
    "shapes": shapes,
    "tied": tied,
    "errors": errors,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        CASES[case](sys.argv[1])
        print(f"rank {dist.get_rank()}, {case}: equal", flush=True)
    dist.destroy_process_group()
