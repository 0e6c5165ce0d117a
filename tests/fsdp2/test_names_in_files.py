"""What tensors are called in files: those of the model, of the one inside it, or of the one that has got adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from infinity.fsdp2.adapters import has_adapters, models_with_adapters, names_in_files
from infinity.fsdp2.names import parameter_names


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.model = nn.ModuleDict({"norm": nn.LayerNorm(2)})


class Holding(nn.Module):
    """A named module, and its siblings."""

    def __init__(self, model: nn.Module, **others: Any) -> None:
        super().__init__()
        self.model = model
        for name, other in others.items():
            setattr(self, name, other)


class OfPeft(nn.Module):
    """As PEFT puts a model into its own: the modules, and what they are known by."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = Holding(base)
        self.peft_config = {"default": SimpleNamespace(peft_type="LORA", init_lora_weights=True)}


def stored_under(model: nn.Module, stored: set[str]) -> dict[str, str | None]:
    """The name in the files of each parameter, by its first own name."""
    found_as = names_in_files(model, stored)
    return {
        names[0]: next((name for name in found_as(names) if name in stored), None)
        for names in parameter_names(model).values()
    }


INNER = {name for name, _ in Inner().named_parameters()}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_names_are_those_of_the_model_or_of_the_one_in_it(depth: int) -> None:
    """Also where a name within is another tensor's outside."""
    model: nn.Module = Inner()
    for _ in range(depth):
        model = Holding(model)
    prefix = "model." * depth
    assert stored_under(model, INNER) == {prefix + name: name for name in INNER}
    whole = {prefix + name for name in INNER}
    assert stored_under(model, whole) == {name: name for name in whole}


def test_a_second_name_of_what_is_inside_changes_nothing() -> None:
    inner = Inner()
    assert set(stored_under(Holding(inner, norm=inner.norm), INNER).values()) == INNER


def test_beside_other_parameters_names_are_those_of_the_whole() -> None:
    assert set(stored_under(Holding(Inner(), head=nn.Linear(2, 2)), INNER - {"model.norm.bias"}).values()) == {
        None,
        "model.norm.weight",  # of model.norm, as it says
    }


def test_a_model_with_adapters_may_have_others_beside_it() -> None:
    model = Holding(OfPeft(Inner()), norm=nn.LayerNorm(2))
    assert not has_adapters(model)
    assert list(models_with_adapters(model)) == ["model."]
    assert stored_under(model, INNER) == {
        **{f"model.base_model.model.{name}": name for name in INNER},
        "norm.weight": None,
        "norm.bias": None,
    }


@pytest.mark.parametrize("kept", [{"r": 8}, SimpleNamespace(peft_type="LORA"), None])
def test_a_setting_that_the_user_keeps_makes_no_model_with_adapters(kept: Any) -> None:
    model = Holding(Inner(), peft_config=kept)
    assert models_with_adapters(model) == {}
    assert set(stored_under(model, INNER).values()) == INNER
