"""Floor 5. Which modules become groups: the repeated blocks of a model, or the classes that the config names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from infinity.errors import ConfigError


def modules_to_wrap(model: nn.Module, classes: Sequence[str] | None) -> list[nn.Module]:
    """The modules that get a `fully_shard` call of their own, inner before outer; the root group takes the rest.

    With `classes` None: what the model names in `_no_split_modules`, else the members of every outermost ModuleList or
    Sequential that holds at least two modules of one class with parameters.

    Raises ConfigError for a class name that no module of the model has.
    """
    names = list(classes) if classes is not None else list(getattr(model, "_no_split_modules", None) or [])
    if not names:
        return _repeated(model)
    present = {type(module).__name__ for module in model.modules()}
    missing = [name for name in names if name not in present]
    if missing and classes is not None:
        raise ConfigError(
            f"infinity.wrap names {', '.join(missing)}, but the model has only {', '.join(sorted(present))}"
        )
    found = [
        m for m in model.modules() if type(m).__name__ in names and m is not model and any(True for _ in m.parameters())
    ]
    return list(reversed(found))


def _repeated(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        members = list(child.children())
        kinds = [type(member) for member in members if any(True for _ in member.parameters())]
        repeated = {kind for kind in kinds if kinds.count(kind) > 1}
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and repeated:
            found += [member for member in members if type(member) in repeated]
        else:
            found += _repeated(child)
    return found
