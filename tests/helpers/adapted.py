"""A model with adapters on frozen weights, its weights in files, and its training.

`adapted.py FOLDER NVME [all]` for several ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import coded
import torch
import torch.distributed as dist
import torch.nn.functional as F
from published import FORMATS
from safetensors.torch import save_file
from torch import nn

import infinity

WIDTH, VOCABULARY, BLOCKS, STEPS = 72, 53, 4, 4  # rows that neither 2 nor 3 ranks share evenly


class Adapted(nn.Module):
    """A frozen linear map plus a trained one of small rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.first = Adapted(width, 2 * width)
        self.second = Adapted(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.second(F.gelu(self.first(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, VOCABULARY, bias=False).requires_grad_(False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.bfloat16
    files: int = 1
    state_on: str = "none"
    bf16: bool = True
    clipping: float = 0.0
    accumulation: int = 1
    update: str = "auto"
    cached_bytes: int = 0
    live: int | str = "auto"
    evaluate: bool = False
    width: int = WIDTH
    coded: str = ""


CASES = {
    "plain": Case(),
    "several files": Case(files=3),
    "fp32 in the files": Case(dtype=torch.float32),
    "fp16 in the files": Case(dtype=torch.float16, evaluate=True),
    "fp8 in the files": Case(dtype=torch.float8_e4m3fn),
    "computed in fp32": Case(bf16=False, files=2),
    "adapters on NVMe": Case(state_on="nvme", evaluate=True),
    "adapters on NVMe, clipped": Case(state_on="nvme", clipping=1e-3, files=2),
    "adapters on NVMe, updated in the step": Case(state_on="nvme", update="step"),
    "adapters on NVMe, cached": Case(state_on="nvme", cached_bytes=1 << 20),
    "accumulated": Case(accumulation=3, clipping=1.0),
    "few live parameters": Case(live=60_000, files=2, evaluate=True),
    "int8": Case(coded="int8", files=2, evaluate=True),
    "int8, computed in fp32": Case(coded="int8", bf16=False, state_on="nvme"),
    "fp8 with scales of blocks": Case(coded="fp8, blocks", width=160, files=2, evaluate=True),
    "int4 with zeros": Case(coded="int4, zeros", width=160),
    "gptq, computed in fp32": Case(coded="gptq", width=160, bf16=False, state_on="nvme"),
    "awq": Case(coded="awq", width=160, accumulation=2),
}
FOUR_BITS = {
    "nf4": Case(coded="nf4", files=2, evaluate=True),
    "nf4, scales in 8 bits": Case(coded="nf4 twice", width=200),
    "fp4, computed in fp32": Case(coded="fp4", bf16=False),
}
"""With bitsandbytes only."""


ON_SEVERAL_RANKS = (
    "several files",
    "adapters on NVMe, clipped",
    "int8",
    "fp8 with scales of blocks",
    "gptq, computed in fp32",
)


def save(folder: Path, case: Case) -> Path:
    """Weights of the model, the same for the same case; where they are."""
    torch.manual_seed(1)
    tensors = {name: p.detach().to(case.dtype) for name, p in Model(case.width).named_parameters()}
    if case.coded:
        tensors = coded.encode(tensors, case.coded)
    return write(folder, tensors, case)


def save_decoded(folder: Path, case: Case) -> Path:
    """The same weights, where they are coded in 16 or 32 bits."""
    torch.manual_seed(1)
    tensors = {name: p.detach().to(case.dtype) for name, p in Model(case.width).named_parameters()}
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    decoded = coded.decode(coded.encode(tensors, case.coded), case.coded, dtype)
    return write(folder, decoded, replace(case, coded=""))


def write(folder: Path, tensors: dict[str, torch.Tensor], case: Case) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if case.coded in FORMATS:
        (folder / "config.json").write_text(json.dumps({"quantization_config": FORMATS[case.coded].config}))
    if case.files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(case.files):
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % case.files == number}
        save_file(part, folder / f"part-{number}.safetensors")
        weight_map.update(dict.fromkeys(part, f"part-{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def make(case: Case, weights: Path | None, nvme_path: str | None, **own: Any) -> infinity.Engine:
    """`nvme_path`: "" says nowhere."""
    torch.manual_seed(0)
    with infinity.init_empty():
        model = Model(case.width)
    place = {"device": "none"} if nvme_path is None else {"device": "nvme", "nvme_path": nvme_path or "auto"}
    engine, *_ = infinity.initialize(
        model=model,
        weights=weights,
        config={
            "bf16": {"enabled": case.bf16},
            "gradient_clipping": case.clipping,
            "gradient_accumulation_steps": case.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "aio": {"block_size": 16384},
            "zero_optimization": {
                "stage": 3,
                "offload_param": place,
                "offload_optimizer": place if case.state_on == "nvme" else {"device": "none"},
                "stage3_param_persistence_threshold": 100,
                "stage3_max_live_parameters": case.live,
            },
            "infinity": {
                "wrap": ["Block"],
                "pinned_bytes_max": "12MiB",
                "update": case.update if nvme_path is not None else "auto",
                "host_cache_bytes": case.cached_bytes,
                **own,
            },
        },
    )
    return engine


def tokens(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randint(0, VOCABULARY, (2, 9), generator=generator)


def train(engine: infinity.Engine, case: Case) -> list[float]:
    losses = []
    for step in range(STEPS):
        for micro_batch in range(case.accumulation):
            loss = engine(tokens(100 * step + micro_batch))
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
        if case.evaluate:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(tokens(7)).item())
            engine.train()
    return losses


def values(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() + 0 for name, value in engine.module.state_dict().items()}


def check(case: Case, folder: Path, nvme_path: Path) -> Mapping[str, int]:
    """It trains as in memory, bit for bit, and reads what it says. What it moved."""
    plain = folder if not case.coded else folder / "decoded"
    if dist.get_rank() == 0:
        save(folder, case)
        if case.coded:
            save_decoded(plain, case)
    dist.barrier()
    with make(case, plain, None) as engine:
        expected = train(engine, case), values(engine)
    with make(case, folder, str(nvme_path)) as engine:
        assert engine.swap is not None
        frozen = {name for name, p in Model(case.width).named_parameters() if not p.requires_grad}
        assert engine.swap.paged.foreign_names == frozen
        before = engine.swap.stats()
        found = train(engine, case), values(engine)
        engine.swap.flush()
        after = engine.swap.stats()
    assert found[0] == expected[0], (found[0], expected[0])
    assert len(set(found[0])) > STEPS // 2
    assert found[1].keys() == expected[1].keys()
    assert [name for name in found[1] if not torch.equal(found[1][name], expected[1][name])] == []
    return {"written": after.written_bytes, "arena": after.arena_bytes, "read": after.read_bytes - before.read_bytes}


def check_inference(weights: Path) -> None:
    """It gives what it gives in memory."""
    losses = []
    for device in ("none", "nvme"):
        with infinity.init_empty():
            model = Model(WIDTH)
        config = {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, "offload_param": {"device": device}},
            "infinity": {"wrap": ["Block"]},
        }
        with infinity.init_inference(model, config, weights=weights) as engine:
            losses.append([engine(tokens(number)).item() for number in range(3)])
    assert losses[0] == losses[1]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, case in CASES.items() if sys.argv[3:] == ["all"] else [(name, CASES[name]) for name in ON_SEVERAL_RANKS]:
        check(case, Path(sys.argv[1]) / name.replace(" ", "_"), Path(sys.argv[2]))
    check_inference(save(Path(sys.argv[1]) / str(dist.get_rank()), Case(files=2)))
    dist.destroy_process_group()
