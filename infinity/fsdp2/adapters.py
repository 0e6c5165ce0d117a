"""Floor 7. Models that PEFT has put adapters into: what their tensors are called in files of the model below, and which of them
those files don't hold.

PEFT itself is never imported: its modules are known by their attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from infinity.errors import ConfigError
from infinity.fsdp2.experts import with_parts
from infinity.fsdp2.names import parameter_names

_LEAVES_WEIGHTS = (True, False, "gaussian", "orthogonal")
"""Of `init_lora_weights`: what changes nothing of the model below."""
_DRAWN_EMPTY = (True, "gaussian")
"""... and what can be drawn without its values."""


def has_adapters(model: nn.Module) -> bool:
    """Whether it is a model of PEFT."""
    return hasattr(model, "peft_config")


def base_names(name: str) -> tuple[str, ...]:
    """What a tensor of a model of PEFT may be called in files of the model below, its own name among it."""
    names = [name]
    for prefix in ("base_model.model.", "base_model."):
        if name.startswith(prefix):
            names.append(name.removeprefix(prefix))
    return tuple(
        dict.fromkeys(
            [*names, *(".".join(p for p in n.split(".") if p not in ("base_layer", "original_module")) for n in names)]
        )
    )


def names_in_files(model: nn.Module) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """A function of a tensor's own names: all that it may have in files of the model.

    Of a copy that is trained as a whole (`modules_to_save`), those of its original, and of what that is tied to.
    """
    if not has_adapters(model):
        return lambda names: names
    alike = {name: names for names in parameter_names(model).values() for name in names}

    def found_as(names: tuple[str, ...]) -> tuple[str, ...]:
        originals = [other for name in names for other in alike.get(_original(name) or "", ())]
        return tuple(dict.fromkeys(base for name in (*names, *originals) for base in base_names(name)))

    return found_as


def is_copy(name: str) -> bool:
    """Whether it is of a module that is trained as a whole beside its original."""
    return "modules_to_save" in name.split(".")


@dataclass(frozen=True)
class LeftToModel:
    """First names of parameters that files of the model below don't give values to: `drawn` get first values of their own,
    `have_values` have theirs already."""

    drawn: frozenset[str] = frozenset()
    have_values: frozenset[str] = frozenset()


def left_to_model(model: nn.Module, stored: Collection[str], blank: Collection[str]) -> LeftToModel:
    """Of a model of PEFT: the adapters, and copies that have values already.

    stored: the names in the files. blank: the first names of parameters without values.
    """
    if not has_adapters(model):
        return LeftToModel()
    found_as = names_in_files(model)
    drawn, have_values = set(), set()
    adapters = _lora_parameters(model)
    for names in parameter_names(model).values():
        if names[0] in blank:
            if names[0] in adapters:
                drawn.add(names[0])
        elif is_copy(names[0]) or not any(name in stored for name in with_parts(found_as(names))):
            have_values.add(names[0])
    return LeftToModel(frozenset(drawn), frozenset(have_values))


def check_adapters(model: nn.Module) -> None:
    """Raise ConfigError where adapters have begun with a change of the model below, which its files would undo."""
    for config in getattr(model, "peft_config", {}).values():
        how = getattr(config, "init_lora_weights", True)
        if how not in _LEAVES_WEIGHTS:
            raise ConfigError(
                f"init_lora_weights={how!r} changes the weights of the model, and weights= would set them back: leave weights= "
                'out, or take True or "gaussian"'
            )


def reset_adapters(configs: Mapping[str, Any], module: Any) -> None:
    """Give a layer's LoRA adapters PEFT's own first values."""
    for adapter in [*module.lora_A, *module.lora_embedding_A]:
        how = configs[adapter].init_lora_weights
        if how not in _DRAWN_EMPTY or getattr(configs[adapter], "peft_type", "LORA") != "LORA":
            raise ConfigError(
                f'adapters on the meta device begin with init_lora_weights True or "gaussian", not {how!r} '
                f"({getattr(configs[adapter], 'peft_type', 'LORA')}): build the model in memory"
            )
        module.reset_lora_parameters(adapter, how)


def _lora_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that `reset_adapters` gives values to."""
    owned = {
        p
        for module in model.modules()
        if hasattr(module, "reset_lora_parameters")
        for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
        for p in getattr(module, part, nn.ModuleDict()).parameters()
    }
    return {name for p, names in parameter_names(model).items() if p in owned for name in names}


def _original(name: str) -> str | None:
    """Of a tensor of a copy: its original's name."""
    parts = name.split(".")
    if not is_copy(name):
        return None
    at = parts.index("modules_to_save")
    return ".".join([*parts[:at], "original_module", *parts[at + 2 :]])
