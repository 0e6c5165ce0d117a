"""First values of models built without memory: by the model's own initialisation, whatever part of it that touches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.fsdp2 import first_values

pytestmark = pytest.mark.usefixtures("one_rank")


def engine_for(path: Path | None, model: nn.Module, **arguments: Any) -> infinity.Engine:
    place = {"device": "nvme", "nvme_path": str(path)} if path else {"device": "none"}
    config = {
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=model, config=config, **arguments)
    return engine


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.empty(8))
        self.gain = nn.Parameter(torch.tensor(3.0))


class Model(nn.Module):
    """Initialises itself as Hugging Face's models do: a module with parts continues the random numbers of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.head = nn.Linear(8, 8)
        self.head.weight = self.parts[0].inner.weight  # type: ignore[union-attr, assignment]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.normal_()
            nn.init.zeros_(module.bias)
        elif isinstance(module, Part):
            module.inner.weight /= 4
            module.inner.bias.data[2:4].add_(1.0)
            module.table.data = torch.arange(8.0)
        elif isinstance(module, Model):
            for name, parameter in module.named_parameters():
                if name.endswith("1.table"):
                    nn.init.constant_(parameter, 7.0)


def in_memory() -> Model:
    model = Model()
    model.head.weight = nn.Parameter(torch.empty(8, 8))  # it draws, and is tied then
    torch.manual_seed(0)
    model.apply(model._init_weights)
    model.head.weight = model.parts[0].inner.weight  # type: ignore[union-attr, assignment]
    return model


@pytest.mark.parametrize("on_nvme", [True, False])
def test_what_the_whole_does_to_its_parts_counts(on_nvme: bool, nvme_path: Path) -> None:
    with infinity.init_empty():
        model = Model()
    assert model.head.weight.is_meta and not model.parts[0].gain.is_meta  # type: ignore[union-attr]
    expected = {name: p.detach() for name, p in in_memory().named_parameters()}
    with engine_for(nvme_path if on_nvme else None, model) as engine:
        for name, p in engine.named_parameters():
            assert torch.equal(p.full_tensor().flatten(), expected[name].flatten()), name
            assert "_Whole" not in type(p).__name__


def test_a_parameter_that_nothing_gives_a_value_is_named(nvme_path: Path) -> None:
    class Forgotten(Model):
        def _init_weights(self, module: nn.Module) -> None:
            if not isinstance(module, Part):
                super()._init_weights(module)

    with infinity.init_empty():
        model = Forgotten()
    with pytest.raises(infinity.ConfigError, match=r"not initialised: parts\.0\.table"):
        engine_for(nvme_path, model)
    assert not list(nvme_path.iterdir())


def test_what_the_model_leaves_its_parts_give_themselves(nvme_path: Path) -> None:
    """As their constructors would have."""

    class NormsAlone(nn.Sequential):
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.LayerNorm):
                nn.init.constant_(module.weight, 2.0)

    with infinity.init_empty():
        model = NormsAlone(nn.Linear(8, 8), nn.LayerNorm(8))
    with engine_for(nvme_path, model) as engine:
        found = {name: p.full_tensor() + 0 for name, p in engine.named_parameters()}
    assert found["1.weight"].eq(2).all() and found["1.bias"].eq(0).all()
    assert 0 < found["0.weight"].abs().max() <= 8**-0.5


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int64], ids=str)
def test_a_buffer_without_fractions_that_nothing_sets_is_named_and_zeros_are_values(
    dtype: torch.dtype, nvme_path: Path
) -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("mask", torch.ones(8, 8).tril().to(dtype))
            self.register_buffer("nothing", torch.zeros(8, dtype=dtype))

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "nothing"):
                self.nothing.zero_()

    with infinity.init_empty():
        model = nn.Sequential(Masked())
    with pytest.raises(infinity.ConfigError, match=r"not initialised: 0\.mask;"):
        engine_for(nvme_path, model)


class Mixer(nn.Module):
    """Owns no parameter, and sets those of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.key.weight, gain=0.5)
        rows, doubled = self.out.weight[2:], self.key.bias.normal_()
        self.out.bias.copy_(self.key.bias)
        self.out.weight.copy_(self.key.weight)
        doubled.mul_(2)
        rows[1:].add_(1)


def set_all(module: nn.Module) -> None:
    """An `init_fn` that sets parts where it meets their owner."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize("held_max", [0, 1 << 30])
@pytest.mark.parametrize("init_fn", [None, set_all])
@pytest.mark.parametrize("on_nvme", [True, False])
def test_what_owns_nothing_sets_its_parts_as_in_its_constructor(
    on_nvme: bool, init_fn: Any, held_max: int, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_values, "_HELD_BYTES_MAX", held_max)
    with infinity.init_empty():
        model = nn.Sequential(Mixer(), nn.Linear(8, 8), Mixer())
    torch.manual_seed(0)
    expected = nn.Sequential(Mixer(), nn.Linear(8, 8), Mixer()).state_dict()
    with engine_for(nvme_path if on_nvme else None, model, init_fn=init_fn) as engine:
        for name, p in engine.named_parameters():
            assert torch.equal(p.full_tensor(), expected[name]), name


@pytest.mark.parametrize("on_nvme", [True, False])
def test_a_module_reads_its_own_values_and_shares_its_buffers(on_nvme: bool, nvme_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, weight: nn.Parameter, table: torch.Tensor) -> None:
            super().__init__()
            self.weight = weight
            self.norms = nn.Parameter(torch.empty(8))
            self.register_buffer("table", table)

        def reset_parameters(self) -> None:
            self.table.fill_(2.0)
            self.norms.data.copy_(self.weight.norm(dim=1))

    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(8, 8), requires_grad=False) for _ in range(2)]
    norms = [weight.norm(dim=1) for weight in weights]
    with infinity.init_empty():
        table = torch.empty(4)
        model = nn.Sequential(*(Scaled(weight, table) for weight in weights))
    with engine_for(nvme_path if on_nvme else None, model) as engine:
        for part, expected in zip(engine.module, norms, strict=True):
            assert torch.equal(part.norms.full_tensor(), expected)
            assert part.table is engine.module[0].table
        assert engine.module[0].table.eq(2).all()
