"""Makes the optimizer over a sharded or paged model, and the schedule of its learning rate.

Both may come from the config or from the caller, as an object or as a function that makes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

from infinity.config import Config
from infinity.config.optimizers import AdamConfig, MuonConfig, SGDConfig
from infinity.errors import ConfigError
from infinity.fsdp2.names import parameter_names, parameters_by_name
from infinity.optim.hosted import Stepper
from infinity.optim.muon import MuonAdamW, check_matrices, is_for_muon
from infinity.runtime.lr_schedules import make_lr_scheduler
from infinity.swap import HostedOptimizer, PagedAdam, PagedMuon, SwapManager
from infinity.swap.hosted_optimizer import stand_in

Groups = list[tuple[dict[str, Any], list[str]]]
"""Parameter groups as (settings, names)."""


def trained_names(model: nn.Module, model_parameters: Iterable[Any] | None, optimizer: Any) -> Groups:
    """Return the groups of trained parameters by name, because sharding replaces the parameter objects."""
    names, given = parameter_names(model), isinstance(optimizer, torch.optim.Optimizer)
    source: list[Any]
    if given:
        source = optimizer.param_groups
    elif model_parameters is not None:
        source = list(model_parameters)
    else:
        source = [parameter for parameter in names if parameter.requires_grad]
    if not source:
        raise ConfigError("there is nothing to train: no parameter requires a gradient")
    grouped = source if isinstance(source[0], dict) else [{"params": source}]
    groups = []
    for group in grouped:
        members = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
        members = [member[1] if isinstance(member, tuple) else member for member in members]  # of named_parameters()
        members = [member for member in members if given or member not in names or member.requires_grad]
        if any(member not in names for member in members):
            raise ConfigError("model_parameters or the optimizer hold a parameter that the model doesn't have")
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append((settings, [names[member][0] for member in members]))
    return groups


def make_early(
    model: nn.Module,
    given: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    model_parameters: Iterable[Any] | None,
) -> torch.optim.Optimizer | None:
    """Return the caller's optimizer over the unsharded model, because paging must know its state before sharding."""
    if given is None or isinstance(given, torch.optim.Optimizer):
        return given
    named: dict[str, nn.Parameter] = parameters_by_name(model)
    groups = trained_names(model, model_parameters, None)
    return given([{**settings, "params": [named[name] for name in names]} for settings, names in groups])


def split_for_muon(groups: Groups, model: nn.Module, chosen: MuonConfig, *, fused: bool | None) -> Groups:
    """Split groups into those for Muon and for AdamW, by their `use_muon` if given."""
    parameters = parameters_by_name(model)
    common = {"weight_decay": chosen.weight_decay}
    matrices = chosen.model_dump(include={"momentum", "nesterov", "ns_steps", "adjust_lr_fn"}) | common
    matrices |= {"use_muon": True, "lr": chosen.lr if chosen.muon_lr is None else chosen.muon_lr}
    others = chosen.model_dump(include={"betas", "eps"}) | common
    others |= {"use_muon": False, "lr": chosen.lr if chosen.adam_lr is None else chosen.adam_lr, "fused": fused}
    split: Groups = []
    for settings, names in groups:
        wanted = settings.get("use_muon")
        by_muon = [n for n in names if (is_for_muon(n, parameters[n].shape) if wanted is None else wanted)]
        check_matrices(parameters[name] for name in by_muon)
        by_adam = [name for name in names if name not in by_muon]
        given = {name: value for name, value in settings.items() if name != "use_muon"}
        split += [({**kind, **given}, part) for kind, part in ((matrices, by_muon), (others, by_adam)) if part]
    return split


def stepper_for(config: Config, given: torch.optim.Optimizer | None, groups: Groups) -> Stepper | None:
    """Return the stepper for pieces of a paged model; None for Adam and AdamW, which have a kernel.

    Raises ConfigError for an optimizer that has stepped, and for one that can't be paged.
    """
    if given is None:
        if not isinstance(config.optimizer, SGDConfig):
            return None
        stands_in = [stand_in(settings) for settings, _ in groups]
        return Stepper(torch.optim.SGD(stands_in, **config.optimizer.model_dump(exclude={"type"})))
    if any(float(state.get("step", 1)) for state in given.state.values()):
        raise ConfigError(_HAS_STEPPED)
    if isinstance(given, getattr(torch.optim, "Muon", ())):
        raise ConfigError(
            "optimizer Muon can't be paged, as it takes no embeddings, norms and biases: set "
            '"optimizer": {"type": "Muon"} in the config, which has AdamW for them'
        )
    adam = isinstance(given, torch.optim.Adam) and not any(group["amsgrad"] for group in given.param_groups)
    if adam and inspect.unwrap(type(given).step) is inspect.unwrap(torch.optim.Adam.step):
        return None
    return Stepper(given)


def make_optimizer(
    model: nn.Module,
    config: Config,
    given: Any,
    groups: Groups,
    swap: SwapManager | None,
    stepper: Stepper | None,
) -> torch.optim.Optimizer:
    """Return the caller's optimizer or the config's, over the sharded parameters; paged with `swap`. Raises ConfigError for one
    that has stepped."""
    parameters = parameters_by_name(model)
    regrouped = [{**settings, "params": [parameters[name] for name in names]} for settings, names in groups]
    if stepper is not None:
        assert swap is not None
        return _with_step_hooks(HostedOptimizer(regrouped, swap=swap, like=stepper), given)
    if given is None and isinstance(config.optimizer, MuonConfig):
        return MuonAdamW(regrouped) if swap is None else PagedMuon(regrouped, swap=swap)
    if swap is not None:
        settings = given.defaults if given is not None else _adam(config)
        chosen = {key: settings[key] for key in _PAGED_SETTINGS if key in settings}
        return _with_step_hooks(PagedAdam(regrouped, swap=swap, **chosen), given)
    if isinstance(given, torch.optim.Optimizer):
        if given.state:
            raise ConfigError(_HAS_STEPPED)
        for group, holding in zip(given.param_groups, regrouped, strict=True):
            group["params"] = holding["params"]
        return given
    if given is not None:
        made: torch.optim.Optimizer = given(regrouped)
        return made
    if isinstance(config.optimizer, SGDConfig):
        return torch.optim.SGD(regrouped, **config.optimizer.model_dump(exclude={"type"}))
    return torch.optim.Adam(regrouped, **_adam(config))


def _with_step_hooks(made: torch.optim.Optimizer, given: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """Let an optimizer call the hooks of the one that it replaces; their handles still remove them."""
    if given is not None:
        made._optimizer_step_pre_hooks = given._optimizer_step_pre_hooks
        made._optimizer_step_post_hooks = given._optimizer_step_post_hooks
    return made


def _adam(config: Config) -> dict[str, Any]:
    """Return arguments of torch.optim.Adam; defaults for a model that is only run."""
    chosen = config.optimizer if isinstance(config.optimizer, AdamConfig) else AdamConfig()
    settings = chosen.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    return settings | {"fused": config.infinity.fused, "decoupled_weight_decay": chosen.type == "AdamW"}


_HAS_STEPPED = "pass an optimizer that has not stepped yet, or a function: its state can't follow parameters"


def make_schedule(config: Config, given: Any, optimizer: torch.optim.Optimizer, before: Any) -> Any:
    """Return the caller's schedule or the config's. One made for the optimizer `before` is changed to move `optimizer`."""
    if given is None:
        return make_lr_scheduler(config.scheduler, optimizer) if config.scheduler is not None else None
    if callable(given) and not hasattr(given, "step"):
        return given(optimizer)
    moved = getattr(given, "optimizer", None)
    if moved is optimizer:
        return given
    if moved is None or moved is not before:
        raise ConfigError(
            "the lr_scheduler belongs to another optimizer than the one passed: pass a function of the optimizer instead, "
            "lr_scheduler=lambda optimizer: ..."
        )
    rebind(given, optimizer)
    return given


def rebind(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a schedule, and those inside it, move `optimizer` instead of the one they were made for."""
    for part in getattr(schedule, "_schedulers", ()):
        rebind(part, optimizer)
    ConstantLR(optimizer, factor=1.0, total_iters=0)  # marks the optimizer as having a schedule; changes no rate
    schedule.optimizer = optimizer


_PAGED_SETTINGS = ("lr", "betas", "eps", "weight_decay", "maximize", "fused", "decoupled_weight_decay")
