"""Access to FSDP2 and autograd. Only sharding, guarded, running_group and buffers use the parts in private.py."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from infinity.errors import ConfigError, InfinityError
from infinity.fsdp2.experts import Expert
from infinity.fsdp2.guarded import Gathering, TakeUnreduced, set_memory
from infinity.fsdp2.names import clean_name, parameter_names
from infinity.fsdp2.placements import is_by_rows, part_of, shard_ranks
from infinity.fsdp2.private import TrainingState


def reshard(model: nn.Module) -> None:
    """Release all gathered parameters, so that the model has its sharded masters, under their names.

    Call it between passes: a pass that FSDP2 considers unfinished was ended by an exception. It is abandoned, and its
    partial sums of unsharded gradients are dropped: [Note: A pass that never ended].

    Raises InfinityError, after the release, if a gathered parameter was written to.
    """
    abandon_unfinished_pass(model)
    release(model)
    for group in _all_groups(model):
        group.check_unwritten()


def reset(model: nn.Module) -> None:
    """As `reshard`, but ignore writes to gathered parameters: after an exception, or before all values are set."""
    abandon_unfinished_pass(model)
    release(model)
    for group in _all_groups(model):
        group.forget_writes()


def release(model: nn.Module) -> None:
    """Release all gathered parameters, between passes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def abandon_unfinished_pass(model: nn.Module, *, root_may_run: bool = False) -> bool:
    """Between passes of this root: reset FSDP2's own state if an exception left it inside a pass.

    Returns True if it did. Raises InfinityError if this torch cannot reset it. `root_may_run`: True if the root's
    forward may be called by another method of the root that is registered as a forward.

    [Note: A pass that never ended]
    FSDP2 keeps its progress through a pass in its states and groups, and an exception leaves it there. A group that was
    running stays gathered, even after `reshard`. The next forward counts as part of the previous one and hooks no
    gradient of gathered parameters, and the next step silently leaves these parameters unchanged. Partial sums of
    unsharded gradients would be added to those of the next backward. `reset_iter_state` fixes most of this. Since torch
    2.15 it also drops reduced gradients of earlier backward passes, so these are kept here.
    """
    assert isinstance(model, FSDPModule)
    if not is_in_pass(model, root_may_run=root_may_run):
        return False
    if not hasattr(model, "reset_iter_state"):
        raise InfinityError(
            f"torch {torch.__version__} can't continue after an exception ended a pass: restart with torch 2.13 or "
            "later"
        )
    parameters = [parameter for group in _all_groups(model) for parameter in group.fsdp_params]
    reduced = [parameter.sharded_param.grad for parameter in parameters]
    model.reset_iter_state()
    for parameter, grad in zip(parameters, reduced, strict=True):
        parameter.to_sharded()  # its group may not know that some parameters are gathered
        parameter.sharded_param.grad = grad
        if "unsharded_accumulated_grad" in vars(parameter):  # since torch 2.15 a property over `_unsharded_param.grad`
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
    return True


def is_at_rest(model: nn.Module, *, gathered: bool) -> bool:
    """Return True if no pass of this root is running. `gathered`: True if groups may be gathered all the same."""
    return not is_in_pass(model) and (gathered or all(group.is_sharded for group in _all_groups(model)))


def before_reductions(model: nn.Module, check: Callable[[], object]) -> None:
    """Call `check` before gradients of any group are reduced, in any backward."""
    for group in _all_groups(model):
        group.before_reduction = check


def reduced_at_end(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, from which a backward ends with the reduction of all gradients of a root.

    FSDP2 sees a backward only at outputs of groups: not in objects of unknown classes, nor if only the root is trained and
    its output was used up by an earlier micro-batch.
    """
    if not loss.requires_grad:
        return loss  # autograd raises
    assert isinstance(model, FSDPModule)
    root, loss = model._get_fsdp_state(), loss.view_as(loss)
    loss.register_hook(lambda _: root._register_root_post_backward_final_callback())
    return loss


def gathered_groups(model: nn.Module) -> list[int]:
    return [number for number, group in enumerate(_all_groups(model)) if not group.is_sharded]


def is_in_pass(model: nn.Module, *, root_may_run: bool = False) -> bool:
    """Return True if a pass of this root is running or interrupted. `root_may_run`: see `abandon_unfinished_pass`."""
    assert isinstance(model, FSDPModule)
    root = model._get_fsdp_state()
    shared = root._state_ctx
    if shared.post_backward_final_callback_queued or (shared.iter_forward_root is not None and not root_may_run):
        return True
    for state in shared.all_states:
        if state is root and root_may_run and root._training_state == TrainingState.FORWARD:
            continue
        for holder in (state, *state._fsdp_param_groups):
            if holder._training_state != TrainingState.IDLE:
                return True
    return False


def _all_groups(model: nn.Module) -> list[Any]:
    """Return the groups of a root, which are `GuardedGroup`s."""
    assert isinstance(model, FSDPModule)
    return [group for state in model._get_fsdp_state()._state_ctx.all_states for group in state._fsdp_param_groups]


def held_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the sharded and gathered forms of all parameters in the groups of a root."""
    held = [parameter for group in _all_groups(model) for parameter in group.fsdp_params]
    shown = ("sharded_param", "_sharded_post_forward_param", "_unsharded_param")
    return {getattr(p, name) for p in held for name in shown if hasattr(p, name)}


def sharded_of(model: nn.Module, parameter: nn.Parameter) -> nn.Parameter | None:
    """The sharded parameter of a root that is this one, or is gathered as it; None where there is none."""
    for held in (held for group in _all_groups(model) for held in group.fsdp_params):
        if parameter is held.sharded_param or parameter is getattr(held, "_unsharded_param", None):
            sharded: nn.Parameter = held.sharded_param
            return sharded
    is_there = any(parameter is other for other in model.parameters())  # FSDP2 holds it after the first forward
    return parameter if is_there and isinstance(parameter, DTensor) else None


def guard_state_dict(model: nn.Module, entered: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Run each group's `state_dict` inside `entered()`: it releases gathered parameters that may be in use."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            replaced = module.__dict__.get("state_dict")
            guarded = functools.partial(_guarded_state_dict, weakref.ref(module), replaced, entered)
            module.__dict__["state_dict"] = guarded


def _guarded_state_dict(
    module: weakref.ref[nn.Module],
    replaced: Callable[..., Any] | None,
    entered: Callable[[], contextlib.AbstractContextManager[None]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    alive = module()
    assert alive is not None
    with entered():
        return type(alive).state_dict(alive, *args, **kwargs) if replaced is None else replaced(*args, **kwargs)


@dataclass(frozen=True)
class ParameterOutline:
    """A parameter: its own name, the shape of what is gathered, and True if it is trained. `first_row`: of that in the
    whole."""

    name: str
    shape: torch.Size
    trained: bool
    first_row: int = 0


@dataclass(frozen=True)
class GroupOutline:
    """A group. `gathers`: 2 per micro-batch, or 1 if it stays gathered until the backward. `ranks`: the number of ranks
    over which FSDP2 shards it. `rank`: this rank's number among them."""

    name: str
    parameters: tuple[ParameterOutline, ...]
    gathers: int
    is_expert: bool = False
    ranks: int = 1
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class ShardedGroup(GroupOutline):
    """The group of one `fully_shard` call. `sharded`: its DTensors, in the order of `parameters`."""

    module: FSDPModule
    sharded: tuple[Any, ...]


def is_sharded(model: nn.Module) -> bool:
    """Return True if `fully_shard` was applied to the model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_alone(tensor: torch.Tensor) -> bool:
    """Return True if this rank has all of a tensor."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1


def in_backward() -> bool:
    """Return True while autograd runs: gathers and recomputed forwards then belong to a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def padded_shape(shape: torch.Size, ranks: int) -> torch.Size:
    """Return the shape of one rank's shard, padded on dim 0 to the same size on all ranks."""
    return torch.Size((-(-shape[0] // ranks), *shape[1:])) if shape else torch.Size((1,))


def shard_shapes(parameter: DTensor) -> tuple[torch.Size, torch.Size]:
    """Return the shape of this rank's shard, without and with padding. (FSDP2 pads a shard without elements.)"""
    padded = padded_shape(part_of(parameter)[0], shard_ranks(parameter)[0])
    return parameter._local_tensor.shape if parameter.numel() else padded, padded


def outlined_groups(
    model: nn.Module,
    wrap: Sequence[nn.Module],
    ranks_of: Callable[[nn.Module], tuple[int, int]] = lambda module: (1, 0),
) -> list[GroupOutline]:
    """Return the groups that a model will have after `fully_shard` on each of `wrap` and on the root. `ranks_of`:
    returns the `ranks` and `rank` of a group."""
    chosen = {*wrap, model}
    owners = {clean_name(name): module for name, module in model.named_modules() if module in chosen}
    members: dict[str, list[ParameterOutline]] = {owner: [] for owner in owners}
    for parameter, names in parameter_names(model).items():
        shape, first = part_of(parameter, sharded=False)
        members[owner_of(names[0], owners)].append(ParameterOutline(names[0], shape, parameter.requires_grad, first))
    return [
        GroupOutline(
            owner or "root",
            tuple(group),
            2 if owner else 1,
            isinstance(owners[owner], Expert),
            *ranks_of(owners[owner]),
        )
        for owner, group in members.items()
        if group
    ]


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """Return the groups of a sharded model, in module order.

    Raises ConfigError if it is not sharded, if a group is resharded over fewer ranks after forward, or if a parameter
    cannot be paged (trained and not fp32, not sharded on dim 0, 0-d). Frozen parameters that it ignores are in no group.
    """
    modules = {clean_name(name): module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise ConfigError("the model has no FSDP2 groups: call torch.distributed.fsdp.fully_shard on it before page()")
    for module in model.modules():
        if isinstance(module, FSDPModule) and reshards_to_fewer_ranks(module):
            raise ConfigError(
                "reshard_after_forward=<number of ranks> keeps a second sharding in memory, which can't be paged: pass "
                "True or False to fully_shard"
            )
    members: dict[str, dict[ParameterOutline, Any]] = {owner: {} for owner in modules}
    for parameter, names in parameter_names(model).items():
        if "" in modules and not isinstance(parameter, DTensor) and not parameter.requires_grad:
            continue
        owner = owner_of(names[0], modules)
        sharded = _checked(names[0], parameter, modules[owner])
        shape, first = part_of(sharded)
        members[owner][ParameterOutline(names[0], shape, parameter.requires_grad, first)] = sharded
    return [
        ShardedGroup(
            owner or "root",
            tuple(group),
            _gathers(modules[owner], not owner),
            isinstance(modules[owner], Expert),
            *_ranks_of(owner, group.values()),
            module=modules[owner],
            sharded=tuple(group.values()),
        )
        for owner, group in members.items()
        if group
    ]


def _ranks_of(owner: str, sharded: Collection[DTensor]) -> tuple[int, int]:
    ranks = {*map(shard_ranks, sharded)}
    if len(ranks) > 1:
        raise ConfigError(
            f"the parameters of group {owner or 'root'} are sharded over different numbers of ranks: call fully_shard on "
            "each module with one mesh for all its parameters"
        )
    return next(iter(ranks))


def owner_of(name: str, owners: Container[str]) -> str:
    """Return the name of the nearest module above `name` that is an FSDP2 group."""
    while name:
        name = name.rpartition(".")[0]
        if name in owners:
            return name
    raise ConfigError("the root module must be an FSDP2 group too: call fully_shard(model) after its parts")


def gathered_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which all groups are gathered: `MixedPrecisionPolicy.param_dtype`, or fp32."""
    gathered = {
        clean_name(name) or "the root": _param_dtype(module) or torch.float32
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
    dtypes = Counter(gathered.values()).most_common()
    if len(dtypes) > 1:
        name = next(name for name, dtype in gathered.items() if dtype == dtypes[-1][0])
        raise ConfigError(
            f"{name} is gathered in {dtypes[-1][0]} and other groups in {dtypes[0][0]}, but a paged model has one dtype: "
            "give all groups the same MixedPrecisionPolicy, and cast in the forward of modules that compute in another "
            "dtype (x.float())"
        )
    return dtypes[0][0]


def _param_dtype(module: FSDPModule) -> torch.dtype | None:
    dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
    return dtype


def install(
    model: nn.Module,
    replacements: dict[nn.Parameter, nn.Parameter],
    has_values: Callable[[nn.Parameter], bool] = lambda parameter: True,
) -> None:
    """Replace parameters; tied ones stay tied, because the same object replaces them under each name.

    Afterwards the modules reject conversions to ordinary tensors: half(), to("meta"), ...; and to_empty(), unless no
    parameter has values.
    """
    for module in model.modules():
        replaced = {name: replacements[p] for name, p in module._parameters.items() if p in replacements}
        if replaced:  # module by module: wrappers change the names that load_state_dict of the whole expects
            module.load_state_dict(replaced, strict=False, assign=True)
    for module in model.modules():
        module.__dict__["_apply"] = functools.partial(_apply_unless_it_converts, module)
        module.__dict__["to_empty"] = functools.partial(_to_empty, module, has_values)


def is_in_forward(module: nn.Module | FSDPModule) -> bool:
    """Return True if a forward of the group's module is running or about to run."""
    assert isinstance(module, FSDPModule)
    return bool(module._get_fsdp_state()._training_state.name == "FORWARD")


def forget_gathered(module: FSDPModule) -> None:
    """Release a group, and take away its gathered parameters' memory, which belongs to another owner."""
    module.reshard()
    for group in param_groups_of(module):
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                set_memory(unsharded, torch.empty(0, dtype=unsharded.dtype, device=unsharded.device))


def has_trained(module: FSDPModule | None) -> bool:
    """Return True if a parameter of the group currently requires a gradient."""
    groups = param_groups_of(module) if module is not None else []
    return any(parameter.sharded_param.requires_grad for group in groups for parameter in group.fsdp_params)


def set_gradient_handlers(
    module: FSDPModule, take: TakeUnreduced, came_further: Callable[[float], object] | None
) -> None:
    """Set callbacks for the gradients of a group, unless its module has several groups with different meshes.

    `take` gets gradients that FSDP2 would only copy; `came_further` the growing share of elements with a gradient.
    """
    groups = param_groups_of(module)
    if len(groups) == 1:
        groups[0].take_unreduced, groups[0].came_further = take, came_further


def read_inside(module: FSDPModule, gathering: Gathering) -> None:
    """Let FSDP2 read the shards of a group only inside `gathering`."""
    for group in param_groups_of(module):
        group.gathering = gathering


def forget_when_written(module: FSDPModule, forget: Callable[[], object]) -> None:
    """Call `forget` when a write to a gathered parameter of a group is detected."""
    for group in param_groups_of(module):
        group.after_write = forget


def _apply_unless_it_converts(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Do `module._apply`, used by every conversion, only if it leaves fp32 tensors unchanged."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    probe = torch.empty(1, dtype=torch.float32, device=device)
    if fn(probe) is not probe:
        raise ConfigError(
            "the model is paged: its fp32 masters are on NVMe and can't be converted or moved in place; set the "
            "compute dtype by bf16.enabled in the config (MixedPrecisionPolicy in your own loop), and save it by "
            "Engine.save_16bit_model"
        )
    applied: nn.Module = type(module)._apply(module, fn, recurse)
    return applied


def _to_empty(
    module: nn.Module, has_values: Callable[[nn.Parameter], bool], *, device: Any, recurse: bool = True
) -> nn.Module:
    """`module.to_empty` of a model that was paged on the meta device: its parameters have their place, buffers get memory."""
    if any(map(has_values, module.parameters(recurse))):
        return _apply_unless_it_converts(module, lambda t: torch.empty_like(t, device=device), recurse)
    for part in module.modules() if recurse else (module,):
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)
    return module


def _gathers(module: FSDPModule, root: bool) -> int:
    """Return 1 if parameters stay gathered from forward to backward, as the root's do by default; else 2."""
    stays = all(group.post_forward_mesh_info is None for group in param_groups_of(module))
    state = module._get_fsdp_state()
    root_stays = root and getattr(state, "_auto_reshard_after_forward", True)  # always in older torch
    return 1 if stays or root_stays else 2


def reshards_to_fewer_ranks(module: FSDPModule) -> bool:
    """Return True if FSDP2 keeps a second sharding from forward to backward."""
    return any(group.post_forward_mesh_info not in (None, group.mesh_info) for group in param_groups_of(module))


def param_groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of a module's parameters, one for each mesh that they are sharded over."""
    return module._get_fsdp_state()._fsdp_param_groups


def _checked(name: str, parameter: nn.Parameter, owner: FSDPModule) -> DTensor:
    if not isinstance(parameter, DTensor):
        raise ConfigError(
            f"parameter {name} is trained and not sharded: take it out of ignored_params of fully_shard, or freeze it; if it "
            "was put into the model after fully_shard, put it there before"
        )
    if not is_by_rows(parameter):
        raise ConfigError(
            f"parameter {name} has placements {parameter.placements} with {parameter._local_tensor.shape[:1].numel()} "
            "rows here; only what fully_shard shards by rows (Shard(0)), alone or replicated (HSDP), of a whole "
            "parameter or of even parts (tensor or expert parallel), can be paged"
        )
    if parameter.requires_grad and not parameter.numel():
        raise ConfigError(
            f"parameter {name} has no elements, and FSDP2 can't reduce its gradient: freeze it "
            "(requires_grad_(False)), since no update changes it"
        )
    if parameter.dtype == torch.float32:
        return parameter
    if parameter.requires_grad:
        raise ConfigError(
            f"parameter {name} is trained in {parameter.dtype}, in which small updates are lost, and infinity updates fp32 "
            "masters: call model.float() before fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "
            "which computes in bf16 all the same"
        )
    if not parameter.is_floating_point() or parameter.itemsize > 4:
        raise ConfigError(
            f"parameter {name} is {parameter.dtype}, which fp32 doesn't hold: make it fp32, or a buffer "
            "(register_buffer), which is not paged"
        )
    if _param_dtype(owner) is None:
        raise ConfigError(
            f"the frozen parameter {name} is {parameter.dtype} in a group that is gathered in the dtype of each "
            "parameter: pass fully_shard an mp_policy=MixedPrecisionPolicy(param_dtype=...), or make it fp32"
        )
    return parameter
