"""Chooses the modules that become groups: the repeated blocks of a model, or the classes that the config names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import nn

from infinity.errors import ConfigError


def modules_to_wrap(model: nn.Module, classes: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules that get their own `fully_shard` call, inner before outer; all others are in the root group.

    If `classes` is None: the classes in the model's `_no_split_modules`, or else the members of every outermost
    ModuleList or Sequential that holds at least two modules of one class with parameters. A module that shares a
    parameter with another module stays in the group around both.

    Raises ConfigError for a class name that no module of the model has.
    """
    names = list(classes) if classes is not None else list(getattr(model, "_no_split_modules", None) or [])
    if not names:
        return _keeping_tied(_repeated(model), model)
    present = {type(module).__name__ for module in model.modules()}
    missing = [name for name in names if name not in present]
    if missing and classes is not None:
        raise ConfigError(
            f"infinity.wrap names {', '.join(missing)}, but the model has only {', '.join(sorted(present))}"
        )
    named = [
        m for m in model.modules() if type(m).__name__ in names and m is not model and any(True for _ in m.parameters())
    ]
    return _keeping_tied(reversed(named), model)


def gather_small_as_one(wrap: Sequence[nn.Module], model: nn.Module, numel_per_module: int) -> list[nn.Module]:
    """Return `wrap`, with each outermost module that has few elements per submodule as one group.

    numel_per_module: upper bound; a submodule counts with all below it, and the module itself counts too. A module that
    is never called, such as a ModuleList, can't be a group. If the whole model is so small, it is the root group.
    """
    groups = list(wrap)

    def visit(module: nn.Module) -> None:
        parts = list(module.modules())
        small = sum(p.numel() for p in module.parameters()) <= numel_per_module * len(parts)
        if small and not isinstance(module, _CONTAINERS):
            below = [group for group in groups if group in parts]
            if below and module is not model and module not in groups:
                groups.insert(groups.index(below[0]), module)
            groups[:] = [group for group in groups if group not in below or group is module]
            return
        for child in module.children():
            visit(child)

    visit(model)
    return _keeping_tied(groups, model)


def largest_part(module: nn.Module, model: nn.Module, wrap: Collection[nn.Module]) -> nn.Module | None:
    """Return the largest module inside the group of `module` that could be its own group, or None.

    Modules of torch.nn stay whole, because they use the parameters of their parts without calling them.
    """
    parts = _keeping_tied((part for part in _parts(module) if part not in wrap), model)
    return max(parts, key=lambda part: _numel_outside_groups(part, wrap), default=None)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, (*_CONTAINERS, nn.Sequential)):
        return
    for child in module.children():
        if isinstance(child, _CONTAINERS):  # never called, so its hooks would not gather it
            yield from _parts(child)
        elif any(True for _ in child.parameters()):
            yield child


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _numel_outside_groups(module: nn.Module, wrap: Collection[nn.Module]) -> int:
    """Return the number of elements under `module` that are in no group below it."""
    direct = sum(p.numel() for p in module.parameters(recurse=False))
    return direct + sum(_numel_outside_groups(child, wrap) for child in module.children() if child not in wrap)


def _keeping_tied(modules: Iterable[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the modules that share no parameter with a module outside them."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(module)
    tied = {parameter: sharing for parameter, sharing in owners.items() if len(sharing) > 1}
    return [
        module
        for module in modules
        if not tied or all(tied.get(p, set()) <= set(module.modules()) for p in module.parameters())
    ]


def _repeated(module: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for child in module.children():
        members = list(child.children())
        kinds = [type(member) for member in members if any(True for _ in member.parameters())]
        repeated = {kind for kind in kinds if kinds.count(kind) > 1}
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and repeated:
            blocks += [member for member in members if type(member) in repeated]
        else:
            blocks += _repeated(child)
    return blocks
