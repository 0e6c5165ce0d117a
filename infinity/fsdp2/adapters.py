"""What the tensors of a model are called in files of a part of it, and which of them those files don't hold: files of
the model that PEFT has put adapters into, or of the one that a LightningModule holds.

PEFT itself is never imported: its modules are known by their attributes.

[Note: Weights of a part]
A file knows nothing of what its model was put into. The parts that it may be of are the model itself, the modules in it that
hold all of its parameters, one in the other, and the models of PEFT, which may have other modules beside them. It is of the
part in which the most names fit, the outermost where several do alike. One choice holds for all tensors: "model.norm" may be
one tensor's name in the whole and another one's in the part.
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
"""Of `init_lora_weights`: what changes nothing of the model below."""
_DRAWN_EMPTY = (True, "gaussian")
"""... and what can be drawn without its values."""


def has_adapters(model: nn.Module) -> bool:
    """Whether it is a model of PEFT."""
    return bool(adapter_configs(model))


def adapter_configs(module: nn.Module) -> Mapping[str, Any]:
    """The configs of a model of PEFT, by the name of the adapter; none of another module, whatever it keeps under that name."""
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping) or not all(hasattr(config, "peft_type") for config in configs.values()):
        return {}
    return configs


def models_with_adapters(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost models of PEFT, by what the names of their tensors begin with: "" where it is the model itself."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        prefix = _prefix(name)
        if has_adapters(module) and not any(prefix.startswith(outer) for outer in outermost):
            outermost[prefix] = module
    return outermost


def names_in_files(model: nn.Module, stored: Collection[str]) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """A function of a tensor's own names: all that it may have in files that hold the names `stored`. None of a tensor that is
    not in the part whose files they are: [Note: Weights of a part].

    Of a copy that is trained as a whole (`modules_to_save`), those of its original, and of what that is tied to.
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
    """Whether it is of a module that is trained as a whole beside its original."""
    return "modules_to_save" in name.split(".")


@dataclass(frozen=True)
class LeftToModel:
    """First names of parameters that files of the model below don't give values to: `drawn` get first values of their own,
    `have_values` have theirs already."""

    drawn: frozenset[str] = frozenset()
    have_values: frozenset[str] = frozenset()


def left_to_model(model: nn.Module, stored: Collection[str], blank: Collection[str]) -> LeftToModel:
    """Of a model of PEFT, or one that holds such a model: the adapters, and what has values already of copies and of what is
    beside the model of PEFT.

    stored: the names in the files. blank: the first names of parameters without values.
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
    """Raise ConfigError where adapters have begun with a change of the model below, which its files would undo."""
    configs = [
        config for adapted in models_with_adapters(model).values() for config in adapter_configs(adapted).values()
    ]
    for config in configs:
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


def _base_names(name: str) -> tuple[str, ...]:
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


def _holding_all(model: nn.Module) -> list[str]:
    """What names of parameters begin with: "", and then longer by the name of each module that holds all there are."""
    parameters = set(model.parameters())
    prefixes, module = [""], model
    while True:
        holding = [(name, child) for name, child in module.named_children() if parameters <= set(child.parameters())]
        if not holding:
            return prefixes
        name, module = holding[0]
        prefixes.append(prefixes[-1] + _prefix(name))


def _prefix(module_name: str) -> str:
    """What the names of the tensors of a module begin with."""
    clean = clean_name(module_name)
    return f"{clean}." if clean else ""


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
