"""Names of a model's tensors in weight files of a part of it: below PEFT's adapters or inside a LightningModule.

PEFT is never imported; its modules are recognised by their attributes.

[Note: Weights of a part]
A weight file does not say which part of the model it belongs to. Candidates are the model
itself, each nested module that holds all parameters, and each PEFT model, which may have other modules next to it. The
part that matches the most names is chosen; of several, the outermost. One choice holds for all tensors: "model.norm"
may name one tensor in the whole and another in the part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from infinity.errors import ConfigError
from infinity.fsdp2.experts import with_parts
from infinity.fsdp2.names import clean_name, parameter_names

_LEAVES_WEIGHTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights unchanged."""
_DRAWN_EMPTY = (True, "gaussian")
"""Values of `init_lora_weights` that can be drawn without the base weights."""


def has_adapters(model: nn.Module) -> bool:
    """Return True if the module is a PEFT model."""
    return bool(adapter_configs(model))


def adapter_configs(module: nn.Module) -> Mapping[str, Any]:
    """Return the configs of a PEFT model by adapter name; empty for any other module."""
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping) or not all(hasattr(config, "peft_type") for config in configs.values()):
        return {}
    return configs


def models_with_adapters(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost PEFT models by the prefix of their tensor names: "" for the model itself."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        prefix = _prefix(name)
        if has_adapters(module) and not any(prefix.startswith(outer) for outer in outermost):
            outermost[prefix] = module
    return outermost


def names_in_files(model: nn.Module, stored: Collection[str]) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """Return a function that maps a tensor's own names to all its possible names in files that hold the names `stored`.

    The function returns no names for a tensor outside the part that the files belong to: [Note: Weights of a part]. A
    fully trained copy (`modules_to_save`) has the names of its original, and of tensors tied to the original.
    """
    adapted = models_with_adapters(model)
    names_of = parameter_names(model)
    alike = {name: names for names in names_of.values() for name in names} if adapted else {}

    def found_as(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
        originals = [other for name in names for other in alike.get(_original(name) or "", ())] if adapted else []
        within = [name.removeprefix(prefix) for name in (*names, *originals) if name.startswith(prefix)]
        return tuple(dict.fromkeys(base for name in within for base in (_base_names(name) if adapted else (name,))))

    def fitting(prefix: str) -> int:
        return sum(any(name in stored for name in with_parts(found_as(prefix, names))) for names in names_of.values())

    prefixes = dict.fromkeys([*_holding_all(model), *adapted])
    return partial(found_as, max(prefixes, key=fitting) if len(prefixes) > 1 else "")


def is_copy(name: str) -> bool:
    """Return True if the tensor belongs to a copy of a module that PEFT trains as a whole (`modules_to_save`)."""
    return "modules_to_save" in name.split(".")


@dataclass(frozen=True)
class LeftToModel:
    """First names of parameters that files of the base model do not set: to initialise (`drawn`), or with values."""

    drawn: frozenset[str] = frozenset()
    have_values: frozenset[str] = frozenset()


def left_to_model(model: nn.Module, stored: Collection[str], blank: Collection[str]) -> LeftToModel:
    """Return the parameters of a PEFT model, or of a model around one, that files with the names `stored` do not set.

    blank: first names of parameters without values.
    """
    if not models_with_adapters(model):
        return LeftToModel()
    found_as = names_in_files(model, stored)
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
    """Raise ConfigError if an adapter was initialised by changing base weights, which loading would undo."""
    configs = [
        config for adapted in models_with_adapters(model).values() for config in adapter_configs(adapted).values()
    ]
    for config in configs:
        how = getattr(config, "init_lora_weights", True)
        if how not in _LEAVES_WEIGHTS:
            raise ConfigError(
                f"init_lora_weights={how!r} changes the base weights, and weights= would overwrite them: omit "
                'weights=, or use True or "gaussian"'
            )


def reset_adapters(configs: Mapping[str, Any], module: Any) -> None:
    """Give a layer's LoRA adapters PEFT's own initial values."""
    for adapter in [*module.lora_A, *module.lora_embedding_A]:
        how = configs[adapter].init_lora_weights
        if how not in _DRAWN_EMPTY or getattr(configs[adapter], "peft_type", "LORA") != "LORA":
            raise ConfigError(
                f'adapters on the meta device need init_lora_weights True or "gaussian", not {how!r} '
                f"({getattr(configs[adapter], 'peft_type', 'LORA')}): build the model in memory"
            )
        module.reset_lora_parameters(adapter, how)


def _base_names(name: str) -> tuple[str, ...]:
    """Return the possible names of a PEFT model's tensor in files of the base model, its own name first."""
    names = [name]
    for prefix in ("base_model.model.", "base_model."):
        if name.startswith(prefix):
            names.append(name.removeprefix(prefix))
    return tuple(
        dict.fromkeys(
            [*names, *(".".join(p for p in n.split(".") if p not in ("base_layer", "original_module")) for n in names)]
        )
    )


def _holding_all(model: nn.Module) -> list[str]:
    """Return name prefixes: "", then one for each nested module that holds all parameters, outermost first."""
    parameters = set(model.parameters())
    prefixes, module = [""], model
    while True:
        holding = [(name, child) for name, child in module.named_children() if parameters <= set(child.parameters())]
        if not holding:
            return prefixes
        name, module = holding[0]
        prefixes.append(prefixes[-1] + _prefix(name))


def _prefix(module_name: str) -> str:
    """Return the prefix of the names of a module's tensors."""
    clean = clean_name(module_name)
    return f"{clean}." if clean else ""


def _lora_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that `reset_adapters` sets."""
    owned = {
        p
        for module in model.modules()
        if hasattr(module, "reset_lora_parameters")
        for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
        for p in getattr(module, part, nn.ModuleDict()).parameters()
    }
    return {name for p, names in parameter_names(model).items() if p in owned for name in names}


def _original(name: str) -> str | None:
    """Return the original's name for a tensor of a copy; None for any other tensor."""
    parts = name.split(".")
    if not is_copy(name):
        return None
    at = parts.index("modules_to_save")
    return ".".join([*parts[:at], "original_module", *parts[at + 2 :]])
