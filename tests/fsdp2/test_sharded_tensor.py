"""Sharded parameters in a program's own code: what reads and sets them works over one rank, the rest names them and a way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")


class Model(nn.Sequential):
    """Blocks that are groups, and an output that the root gathers. Its own methods are as those of PEFT and diffusers."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self[1](self[0](x))
        return result

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        save_file(self.state_dict(), Path(folder) / "weights.safetensors")


def model() -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))), nn.Linear(8, 8))


def make(path: Path | None, *, update: str = "step", chosen: Any = None, **options: Any) -> infinity.Engine:
    place = {"device": "nvme", "nvme_path": str(path)}
    zero = {"offload_param": place, "offload_optimizer": place, "stage3_param_persistence_threshold": 0} if path else {}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, **zero},
        "infinity": {"update": update} if path else {},
    }
    return infinity.initialize(model=chosen or model(), config=config, **options)[0]


def step(engine: infinity.Engine, number: int = 0) -> float:
    loss = engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(number))).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def values(module: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in module.parameters()]  # type: ignore[attr-defined]


@pytest.fixture(params=["none", "nvme"])
def path(request: pytest.FixtureRequest, nvme_path: Path) -> Path | None:
    return nvme_path if request.param == "nvme" else None


def test_parameters_are_averaged_and_set_by_ordinary_tensors(path: Path | None, tmp_path: Path) -> None:
    averaged, teacher = AveragedModel(model(), multi_avg_fn=get_ema_multi_avg_fn(0.5)), model()
    with make(path) as engine:
        with torch.no_grad():
            assert torch.equal(engine.module.generate(torch.ones(2, 8)), model()(torch.ones(2, 8)))
        step(engine)
        averaged.update_parameters(engine.module)
        first = values(engine.module)
        step(engine)
        averaged.update_parameters(engine.module)
        second = values(engine.module)
        assert all(
            map(torch.equal, averaged.parameters(), [a.lerp(b, 0.5) for a, b in zip(first, second, strict=True)])
        )
        for p, q in zip(teacher.parameters(), engine.module.parameters(), strict=True):
            p.data.copy_(q.data).lerp_(q.detach(), 0.1).add_(q.data, alpha=0.0)
            assert torch.equal(0.5 * q.data + 0.5 * p.data, p.data)
        assert all(map(torch.equal, teacher.parameters(), second))
        with torch.no_grad():
            for q, old in zip(engine.module.parameters(), first, strict=True):
                q.copy_(old)
                q[2] = 0
                q.data[3:5].fill_(1)
                q[-1] = torch.ones(old[-1].shape)
                old[2], old[3:5], old[-1] = 0, 1, 1
        assert all(map(torch.equal, values(engine.module), first))
        engine.module.load_state_dict(teacher.state_dict())
        assert all(map(torch.equal, values(engine.module), second))
        engine.module.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "weights.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in teacher.state_dict().items())
        step(engine)


def test_what_can_not_be_done_names_the_parameter(path: Path | None) -> None:
    def refused(text: str) -> Any:
        return pytest.raises(infinity.InfinityError, match=text)

    with make(path) as engine:
        module = engine.module
        x = torch.ones(2, 8)
        with refused("sharded parameter 1.bias"):
            module[1](x)
        with refused("sharded parameter 0.0.0.weight"):
            engine.backward(engine(x).sum() + module[0][0][0].weight.square().sum())
        engine.zero_grad()
        with refused(r"AveragedModel\(copy.deepcopy\(model\)\)"):
            copy.deepcopy(module)
        before = values(module)
        for p, q in zip(model().parameters(), module.parameters(), strict=True):
            p.data, q.data = q.data, p.data
        with refused("0.0.0.weight is sharded.* can't be assigned to its .data"):
            engine(x)
        assert all(map(torch.equal, values(module), before))
        step(engine)
        x = torch.ones(2, 8, requires_grad=True)
        with refused("no second derivatives"):
            torch.autograd.grad(engine(x).square().sum(), x, create_graph=True)
        torch.autograd.grad(engine(x).square().sum(), x)
        engine.zero_grad()
        module[1] = nn.Linear(8, 12)
        with refused("1.weight was put into the model after initialize"):
            engine.backward(engine(x).sum())


def test_parameter_groups(path: Path | None) -> None:
    """Named parameters are parameters. One that leaves between backward and step isn't stepped, or that is refused."""
    plain, chosen = model(), model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    expected = []
    for number in range(3):
        loss = plain(torch.randn(2, 8, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        if number == 1:
            optimizer.param_groups[0]["params"].pop()
        optimizer.step()
        plain.zero_grad()
        expected.append(loss.item())

    def losses(update: str) -> list[float]:
        chosen = model()
        with make(path, update=update, chosen=chosen, model_parameters=chosen.named_parameters()) as engine:
            found = [step(engine)]
            loss = engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(1))).square().mean()
            engine.backward(loss)
            engine.optimizer.param_groups[0]["params"].pop()
            engine.step()
            return [*found, loss.item(), step(engine, 2)]

    assert losses("forward") == expected
    if path is not None:
        with pytest.raises(infinity.InfinityError, match="optimizer state or parameters"):
            losses("backward")
    chosen[1].weight = nn.Parameter(torch.randn(8, 8).t())
    with pytest.raises(infinity.ConfigError, match=r"1.weight has strides \(1, 8\)"):
        make(path, chosen=chosen)
    with pytest.raises(infinity.ConfigError, match="0 makes sparse gradients"):
        make(path, chosen=nn.Sequential(nn.Embedding(8, 8, sparse=True)))
