"""Live parameters of a sharded model: carries out the plan of infinity/schedule/live.py with FSDP2's settings.

Called on the training thread by hooks of the model.

[Note: A pass that goes another way]
Groups are gathered ahead in the order of an earlier forward, at first in module order. If a forward reaches a group out
of that order, groups gathered ahead are released before it is gathered, so the bound holds on any path. The backward
after such a forward gathers nothing ahead from a list. If a second forward takes the same new path, that path becomes
the expected one. Gathers are collectives, so every rank sees the same order and decides alike.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from infinity.config import ZeroConfig
from infinity.errors import ConfigError
from infinity.fsdp2.names import clean_name
from infinity.fsdp2.sharding import in_backward, outlined_groups, owner_of
from infinity.fsdp2.vertical import micro_batches_in
from infinity.fsdp2.wrap import gather_small_as_one, largest_part, modules_to_wrap
from infinity.schedule.live import ROOT, LiveGroup, LivePlan, least_live, plan_live, stack_of
from infinity.units import format_count

log = logging.getLogger("infinity")


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """Limits on gathered parameters, in elements: the config keys `stage3_...`."""

    max_live_parameters: int | None = None
    """Maximum number of gathered elements; None for as many as the model needs."""
    max_reuse_distance: int = 0
    """A group that is used again within this many elements stays gathered."""
    prefetch_bucket_size: int | None = None
    """Number of elements gathered ahead; None for one group, FSDP2's default."""
    module_granularity_threshold: int = 0
    """Modules with at most this many elements per submodule are gathered as one."""
    second_sharding: bool = False
    """True if FSDP2 reshards over fewer ranks after forward; then no group stays gathered."""

    @staticmethod
    def of(zero: ZeroConfig, *, second_sharding: bool = False) -> LiveOptions:
        """Return the options of a config. Below stage 3 everything stays gathered, without a bound."""
        bound, reuse = zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance
        prefetch = zero.stage3_prefetch_bucket_size
        return LiveOptions(
            max_live_parameters=None if bound == "auto" or zero.stage < 3 else bound,
            max_reuse_distance=0 if reuse == "auto" or second_sharding else reuse,
            prefetch_bucket_size=None if prefetch == "auto" else prefetch,
            module_granularity_threshold=zero.stage3_module_granularity_threshold,
            second_sharding=second_sharding,
        )


@dataclass(frozen=True)
class Outline:
    """The groups of a model and their modules: the root first, then module order."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    groups: tuple[LiveGroup, ...]

    @staticmethod
    def of(model: nn.Module, wrap: Collection[nn.Module]) -> Outline:
        """Return the groups that the model will have once it is sharded."""
        wrap = set(wrap)
        by_name = {clean_name(name): module for name, module in model.named_modules() if module in wrap}
        outlined = outlined_groups(model, list(wrap))
        numels = {group.name: sum(p.shape.numel() for p in group.parameters) for group in outlined}
        root = LiveGroup(numels.pop("root", 0))
        names = ("root", *numels)
        modules = (model, *(by_name[name] for name in numels))
        places = {name: place for place, name in enumerate(names)}
        owners = {"", *numels}
        inner = [
            LiveGroup(numel, places.get(owner_of(name, owners)), _may_linger(module))
            for (name, numel), module in zip(numels.items(), modules[1:], strict=True)
        ]
        return Outline(names, modules, (root, *inner))

    @property
    def order(self) -> tuple[int, ...]:
        """Numbers of the groups below the root, in module order."""
        return tuple(range(1, len(self.groups)))

    @property
    def numel(self) -> int:
        return sum(group.numel for group in self.groups)


def choose_wrap(
    model: nn.Module, classes: Sequence[str] | None, options: LiveOptions
) -> tuple[list[nn.Module], Outline, list[str]]:
    """Choose the modules that become groups: those of `modules_to_wrap`, or finer ones if the bound requires it.

    Returns the modules, their outline and notes. Raises ConfigError if a group and what stays gathered with it exceed
    `stage3_max_live_parameters`, and the config names the classes or no finer classes fit.
    """
    wrap = modules_to_wrap(model, classes)
    if classes is None and options.module_granularity_threshold:
        wrap = gather_small_as_one(wrap, model, options.module_granularity_threshold)
    outline = Outline.of(model, wrap)
    bound = options.max_live_parameters
    if bound is None or least_live(outline.groups, outline.order)[0] <= bound:
        return wrap, outline, []
    names = _finer_classes(model, wrap, bound)
    if classes is not None or names is None:
        raise ConfigError(_too_large(outline, bound, names))
    wrap = modules_to_wrap(model, names)
    listed = ", ".join(f'"{name}"' for name in names)
    note = (
        f"stage3_max_live_parameters of {bound} elements is less than the repeated blocks need: wrapping finer, like "
        f'"infinity": {{"wrap": [{listed}]}}'
    )
    return wrap, Outline.of(model, wrap), [note]


class LiveParameters:
    """Keeps gathered parameters within a bound; made after the model is sharded and paged."""

    def __init__(self, outline: Outline, options: LiveOptions, *, micro_batches: int, ranks: int) -> None:
        """`micro_batches`: per step; those that take turns count as one. `ranks`: over which the model is sharded."""
        self.outline = outline
        self._options = options
        self._micro_batches = micro_batches
        self._holds_ahead = ranks > 1  # one rank gathers on use and ignores prefetch lists
        self._modules = [cast(FSDPModule, module) for module in outline.modules]
        self._order = outline.order
        self._expected = [ROOT, *outline.order]
        self._at_once, self._calls = 1, Counter[int]()
        """Number of micro-batches in the current forward, and number of calls of each group."""
        self._path: list[int] = []
        self._path_before: list[int] = []
        self._ahead: set[int] = set()
        self._logged_new_path = False
        self._keeps = False
        bound = options.max_live_parameters
        self._live_numel_max = outline.numel if bound is None else bound
        self._some_may_not_come = self._live_numel_max < outline.numel and not all(
            p.requires_grad for p in outline.modules[ROOT].parameters()
        )
        """True if frozen groups may get no gradient: FSDP2 would gather them for a backward that never comes."""
        self._follows_lists = True
        self.plan = self._make_plan()
        self._carry_out()
        if self._depends_on_order:
            for group, module in enumerate(outline.modules):
                module.register_forward_pre_hook(functools.partial(self._before_forward, group), prepend=True)
            outline.modules[ROOT].register_forward_hook(self._after_forward)

    @property
    def gathers(self) -> dict[str, int]:
        """Number of gathers per step, by group name."""
        names = self.outline.names
        return {name: self.plan.gathers(group, micro_batches=self._micro_batches) for group, name in enumerate(names)}

    @property
    def spare_numel(self) -> int:
        """Elements that the device may hold besides gathered ones: the bound minus the plan's peak."""
        return self._live_numel_max - (self.plan if self._holds_ahead else self._make_plan(ahead=False)).peak_numel

    @property
    def notes(self) -> list[str]:
        """One line on the groups that stay gathered; empty without any."""
        staying = [group for group in self._order if not self.plan.reshard_after_forward[group]]
        if not staying:
            return []
        numel = sum(self.outline.groups[group].numel for group in staying)
        return [
            f"{len(staying)} of {len(self._order)} groups, {format_count(numel)} elements, stay gathered from forward "
            "to backward (stage3_max_reuse_distance; 0 turns it off)"
        ]

    def begin_backward(self, *, last: bool) -> None:
        """Prepare a backward: after the `last` one of a step everything is released."""
        if last == self._keeps:
            self._keeps = not last
            self._set_after_backward()

    def _make_plan(self, *, ahead: bool = True) -> LivePlan:
        prefetch = self._options.prefetch_bucket_size
        if len(set(self._expected)) < len(self._expected):
            prefetch = None  # a list would name a group that is used only once more
        if not ahead:
            prefetch = 0
        return plan_live(
            self.outline.groups,
            self._order,
            live_numel_max=self._live_numel_max,
            reuse_numel_max=self._options.max_reuse_distance,
            prefetch_numel=prefetch,
            micro_batches=self._micro_batches,
        )

    def _carry_out(self) -> None:
        for group, module in enumerate(self._modules):
            if group != ROOT and not self._options.second_sharding:  # FSDP2 keeps the root by itself
                module.set_reshard_after_forward(self.plan.reshard_after_forward[group], recurse=False)
            module.set_modules_to_forward_prefetch(self._of(self.plan.forward_prefetch[group]))
        self._set_after_backward()
        self._set_backward_lists()

    def _set_after_backward(self) -> None:
        for module, reshard in zip(self._modules, self.plan.reshard_after_backward, strict=True):
            module.set_reshard_after_backward(reshard or not self._keeps, recurse=False)

    def _set_backward_lists(self) -> None:
        for group, module in enumerate(self._modules):
            ahead = self.plan.backward_prefetch[group]
            if not self._follows_lists:
                ahead = None if self.plan.next_fits[group] else ()
            if self._some_may_not_come:
                ahead = ()
            # An empty list lets FSDP2 choose the next group; a list of only this gathered group prefetches nothing.
            module.set_modules_to_backward_prefetch([] if ahead is None else self._of(ahead) or [module])

    def _of(self, groups: Sequence[int]) -> list[FSDPModule]:
        return [self._modules[group] for group in groups]

    @property
    def _depends_on_order(self) -> bool:
        lists = [*self.plan.forward_prefetch, *self.plan.backward_prefetch]
        return any(lists) or not all(self.plan.reshard_after_forward[1:] + self.plan.reshard_after_backward)

    def _before_forward(self, group: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if in_backward():  # activation checkpointing runs a forward again
            return
        if group == ROOT:
            self._path = [ROOT]
            self._at_once, self._calls = micro_batches_in(args), Counter()
        self._calls[group] += 1
        if group != ROOT and (self._calls[group] - 1) % self._at_once:
            return  # another micro-batch, which uses the gathered group
        if group != ROOT and self._path:  # a part of the model that is called directly has no path
            self._path.append(group)
        window = self.plan.forward_prefetch[group]
        self._release_ahead(self._ahead.difference(window, {group}))
        if self._holds_ahead:
            self._ahead = set(window)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if in_backward():
            return
        self._release_ahead(self._ahead)
        self._ahead = set()
        path, self._path = self._path, []
        if torch.is_grad_enabled():
            self._follow(path)

    def _follow(self, path: list[int]) -> None:
        """Update the expected path after a forward, which a backward follows, took `path`."""
        expected = path == self._expected
        if not expected and path == self._path_before:
            expected = self._expect(path)
        elif not expected and self._path_before and not self._logged_new_path:
            self._logged_new_path = True
            log.info("the forward took another path than planned; prefetch follows the new path once it is repeated")
        self._path_before = path
        if expected != self._follows_lists:
            self._follows_lists = expected
            self._set_backward_lists()

    def _expect(self, path: list[int]) -> bool:
        """Plan for `path` from now on if such a plan keeps within the bound; return True if it does."""
        order = tuple(dict.fromkeys(path[1:]))
        if least_live(self.outline.groups, order)[0] > self._live_numel_max:
            return False
        self._expected, self._order = path, order
        self.plan = self._make_plan()
        for module, passing in zip(self._modules, self.plan.reshard_after_forward, strict=True):
            if passing:  # the previous plan may have kept it gathered
                module.reshard()
        self._carry_out()
        return True

    def _release_ahead(self, groups: set[int]) -> None:
        for module in self._of(sorted(groups)):
            module.unshard()  # waits for a gather that has started
            module.reshard()


def _may_linger(module: nn.Module) -> bool:
    """Return True if the module's input may be indices, which have no gradient."""
    return any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) for part in module.modules())


def _finer_classes(model: nn.Module, wrap: Sequence[nn.Module], bound: int) -> list[str] | None:
    """Return class names whose modules as groups keep within the bound, by splitting the largest; None if none do."""
    names = list(dict.fromkeys(type(module).__name__ for module in wrap))
    while True:
        wrap = modules_to_wrap(model, names) if names else []
        outline = Outline.of(model, wrap)
        least, worst = least_live(outline.groups, outline.order)
        if least <= bound:
            return names
        part = _part_to_split(model, outline, worst, wrap)
        if part is None:
            return None
        names.append(type(part).__name__)


def _part_to_split(model: nn.Module, outline: Outline, worst: int, wrap: Sequence[nn.Module]) -> nn.Module | None:
    """Return the largest splittable part of the groups gathered with `worst`, largest group first."""
    lingering = (place for place, group in enumerate(outline.groups) if group.lingers)
    gathered = {ROOT, *stack_of(outline.groups, worst), *lingering}
    for group in sorted(gathered, key=lambda group: -outline.groups[group].numel):
        part = largest_part(outline.modules[group], model, set(wrap))
        if part is not None:
            return part
    return None


def _too_large(outline: Outline, bound: int, names: Sequence[str] | None) -> str:
    least, worst = least_live(outline.groups, outline.order)
    numel, root = outline.groups[worst].numel, outline.groups[ROOT].numel
    with_root = f", and the root group of {root} elements stays gathered as well" if worst != ROOT else ""
    if names is not None:
        listed = ", ".join(f'"{name}"' for name in names)
        move = f'"infinity": {{"wrap": [{listed}]}} is fine enough'
    else:
        move = "no finer wrap fits"
    return (
        f"stage3_max_live_parameters of {bound} elements is too small: group {outline.names[worst]} has {numel} "
        f"elements{with_root}; {move}, or set a bound of {least}"
    )
