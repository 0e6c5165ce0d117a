"""Arena checkpoints as those of torch.distributed.checkpoint, from which stock FSDP2 + AdamW resumes bit for bit."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from converting import peak_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity.checkpoint import export as exporting
from infinity.checkpoint import piecewise
from infinity.checkpoint.dcp_storage import CarefulFiles
from infinity.cli.ckpt import main

pytestmark = pytest.mark.usefixtures("one_rank")

SAVED, END = 3, 6


class Model(nn.Module):
    """With a tied head, a buffer, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h) * self.scale


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two, so that it matters which parameter is in which."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0, "lr": 0.02},
    ]


SETTINGS: dict[str, dict[str, Any]] = {"AdamW": {"lr": 0.01}, "SGD": {"lr": 0.01, "momentum": 0.9}}


def ours(path: Path, master: str = "split", optimizer: str = "AdamW", **arguments: Any) -> infinity.Engine:
    torch.manual_seed(0)
    offload = {"device": "nvme", "nvme_path": str(path)}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": optimizer, "params": SETTINGS[optimizer]},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 2048,
        },
        "infinity": {"pinned_bytes_max": "16MiB", "master_weights": master, "checkpoint_format": "arena"},
    }
    model = Model()
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=groups_of(model), **arguments)
    return engine


def stock(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Model()
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fused = {"fused": True} if name == "AdamW" else {}
    return model, getattr(torch.optim, name)(groups_of(model), **SETTINGS[name], **fused)


def loss_of(model: Any, step: int) -> torch.Tensor:
    x = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(x)[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())


def our_losses(engine: infinity.Engine, first: int, end: int) -> list[float]:
    losses = []
    for step in range(first, end):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def stock_losses(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> list[float]:
    losses = []
    for step in range(first, end):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def saved(nvme_path: Path, tmp_path: Path) -> Path:
    """A folder with an arena checkpoint."""
    with ours(nvme_path) as engine:
        our_losses(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved", tag="one", client_state={"seen": 4})
    return tmp_path / "saved"


@pytest.mark.parametrize(("optimizer", "master"), [("AdamW", "split"), ("AdamW", "full"), ("SGD", "split")])
def test_stock_training_goes_on_from_it_bit_for_bit(
    optimizer: str, master: str, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ours(nvme_path, master, optimizer) as engine:
        our_losses(engine, 0, SAVED)
        engine.save_checkpoint(tmp_path / "saved", client_state={"seen": 12})
        expected = our_losses(engine, SAVED, END)
        weights = {name: value.full_tensor() + 0 for name, value in engine.module.named_parameters()}
    monkeypatch.setattr(piecewise, "_PIECE_NUMEL", 32 * 5)  # so that tensors are cut
    out = tmp_path / "out"
    assert exporting.export(tmp_path / "saved", out) == out
    assert len(list(out.glob("*.distcp"))) > 30

    model, stepper = stock(optimizer)
    state, optimizer_state = get_state_dict(model, stepper)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=out)
    set_state_dict(model, stepper, model_state_dict=state, optim_state_dict=optimizer_state)
    assert stock_losses(model, stepper, SAVED, END) == expected
    assert all(torch.equal(value.full_tensor(), weights[name]) for name, value in model.named_parameters())

    with ours(nvme_path, master, optimizer) as engine:  # and so does infinity
        _, client_state = engine.load_checkpoint(out.parent, tag="out")
        assert (client_state, engine.global_steps) == ({"seen": 12}, SAVED)
        assert our_losses(engine, SAVED, END) == expected


def test_it_is_a_checkpoint_like_others(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    assert main(["export", str(saved), str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert f"{report['files']} files" in capsys.readouterr().out
    assert main(["info", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state_format"], told["global_steps"], told["ranks"]) == ("dcp", 1, 1)
    assert told["tied"] == {"head.weight": "embedding.weight"}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in (tmp_path / "out").iterdir())
    for command in ("consolidate", "export"):
        capsys.readouterr()
        code = main([command, str(tmp_path / "out"), str(tmp_path / command)])
        assert code == (0 if command == "consolidate" else 1)
    assert "is in PyTorch's format already" in capsys.readouterr().err


def test_what_cannot_be_is_an_error_in_a_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*arguments: str) -> str:
        assert main(["export", *arguments]) == 1
        out, err = capsys.readouterr()
        assert not out and err.startswith("infinity-ckpt: ") and err.count("\n") == 1
        return err

    before = sorted(saved.parent.iterdir())
    assert "exists already" in told(str(saved), str(saved))
    assert "exists already" in told(str(saved), str(saved / "latest"))
    assert "File exists" in told(str(saved), str(saved / "latest" / "out"))
    assert "is not a folder" in told(str(tmp_path / "nothing"), str(tmp_path / "out"))
    with monkeypatch.context() as patched:
        patched.setattr("infinity.checkpoint.checks.free_bytes", lambda path: 4000)
        assert "has 3.91 KiB free" in told(str(saved), str(tmp_path / "out"))
    for module, name in ((piecewise, "write_durably"), (CarefulFiles, "create_stream")):
        with monkeypatch.context() as patched:

            def full(*arguments: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patched.setattr(module, name, full)
            assert "No space left on device" in told(str(saved), str(tmp_path / "out"))
    arena = saved / "one" / "rank0.arena"
    content = bytearray(arena.read_bytes())
    content[len(content) // 2] ^= 1
    arena.write_bytes(content)
    assert "rank0.arena is damaged (its bytes have changed" in told(str(saved), str(tmp_path / "out"))
    assert sorted(saved.parent.iterdir()) == before


@pytest.mark.long
def test_memory_is_bounded_by_a_few_tensors(nvme_path: Path, tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": offload},
    }
    config["zero_optimization"]["offload_optimizer"] = offload
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        engine.save_checkpoint(tmp_path / "saved", format="arena")
    peak_bytes, report = peak_of("export", str(tmp_path / "saved"), str(tmp_path / "out"))
    print(f"export: {report['nbytes'] >> 20} MiB written, memory grew by {peak_bytes >> 20} MiB at most")
    assert report["nbytes"] > 144 << 20 and peak_bytes < 40 << 20
