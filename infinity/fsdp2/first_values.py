"""Initial values for a model built without memory, made by the model's own initialisation, module by module.

[Note: A model's own initialisation]
A module may initialise more than it owns: T5, CLIP and GPT-2 draw the weights of a layer's parts in the layer, and
Mamba's mixer scales those of its projections. So modules are initialised in the order of `nn.Module.apply`, parts
first. A module without parameters of its own may set those of its parts, so it is called if they are set here at all.
Each module has its own parameters in memory; those below it are stand-ins (`_Whole`) that load on first use.
Changes are written to the shards before the next module, and earlier if one module touches many parameters.
A parameter that is never set is an error, because uninitialised memory is no initial value.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from infinity.errors import ConfigError
from infinity.fsdp2.adapters import adapter_configs, names_in_files, reset_adapters
from infinity.fsdp2.elsewhere import ElsewhereTensor
from infinity.fsdp2.materialize import full_tensor, load_full
from infinity.fsdp2.names import buffer_names, clean_name, parameter_names, parameters_by_name

InitFn = Callable[[nn.Module], Any]


class EmptyModels(DeviceContext):
    """Context of `init_empty`: creates tensors on the meta device, except those without dimensions.

    Tensors without dimensions take almost no memory, and their creation is often their only initialisation.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = super().__torch_function__(func, types, args, dict(kwargs))  # type: ignore[no-untyped-call]
        on_meta = isinstance(made, torch.Tensor) and made.is_meta and made.dim() == 0
        if not on_meta or func not in _MAKING or kwargs.get("device") is not None:
            return made
        return func(*args, **{**kwargs, "device": "cpu"})


_MAKING = {torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.full, torch.ones, torch.zeros}
"""Functions that create tensors with given values."""


def init_empty() -> EmptyModels:
    """Return a context that builds modules on the meta device, with shapes but no memory.

    Use it as `with infinity.init_empty(): model = Model()`; `infinity.initialize` then sets the values. Parameters and
    buffers without dimensions keep the values they are created with.
    """
    return EmptyModels()


def meta_parameters(model: nn.Module) -> set[str]:
    """Return all names of the parameters on the meta device."""
    return {name for name, p in parameters_by_name(model).items() if p.is_meta}


def check_initializable(model: nn.Module, init_fn: InitFn | None, stored: frozenset[str] | None) -> None:
    """Raise ConfigError, naming the modules, if modules on the meta device have no initialisation.

    `stored`: names that a file sets, including all parameters; None without a file.
    """
    ways = {way.module: way for way in _ways(model, init_fn)}
    is_stored, names_of = _is_in(stored or frozenset(), model), buffer_names(model, persistent=False)
    lost = [
        name or "the root module"
        for name, module in model.named_modules()
        if (
            (stored is None and any(p.is_meta for p in module.parameters(recurse=False)))
            or any(b.is_meta and not any(map(is_stored, names_of[b])) for _, b in _own_buffers(module))
        )
        and module not in ways
    ]
    if lost:
        raise ConfigError(
            f"modules on the meta device have no reset_parameters() method: {', '.join(lost[:5])}"
            f"{' and more' if len(lost) > 5 else ''}; pass init_fn=... (called with each module) or weights=... to "
            "initialize"
        )


def initialize_values(
    model: nn.Module,
    pending: set[str],
    device: torch.device,
    init_fn: InitFn | None,
    stored: frozenset[str] = frozenset(),
    later: Collection[str] = (),
) -> None:
    """Initialise the parameters in `pending` and meta buffers, by the model's own methods or by `init_fn`.

    Every rank draws the same numbers if its generators are in the same state, and keeps its shard. Buffers in `stored`
    only get memory, because a file sets them later, as it does the parameters in `later`. Raises ConfigError naming
    parameters and buffers that were not set.
    """
    blank = _allocate_buffers(model, device, stored)
    wholes = _Wholes(model, pending, later)
    try:
        with torch.no_grad():
            for way in _ways(model, init_fn):
                if way.module in blank or wholes.concern(way.module, below=way.reaches_below):
                    wholes.initialize(way.module, way.init)
            for module in model.modules() if init_fn is None else ():  # as their constructors would
                if wholes.concern(module, below=False) and hasattr(module, "reset_parameters"):
                    wholes.initialize(module, _reset)
    finally:
        wholes.put_back()
    lost = [name for module, names in blank.items() for key, name in names.items() if _is_unset(module._buffers[key])]
    if lost:
        raise ConfigError(
            f"buffers on the meta device were not initialised: {', '.join(lost)}; set them in the "
            "module's reset_parameters() or in init_fn=..., or build them on the CPU"
        )
    if wholes.lacking:
        lost = [names[0] for p, names in parameter_names(model).items() if p in wholes.lacking]
        raise ConfigError(
            f"parameters on the meta device were not initialised: {', '.join(lost[:5])}"
            f"{' and more' if len(lost) > 5 else ''}; set them in the module's reset_parameters() or in init_fn=..., "
            "pass weights=..., or build them on the CPU"
        )


@dataclass(frozen=True)
class _Way:
    """The initialisation of a module. `reaches_below`: True if it may also set parameters of the module's parts."""

    module: nn.Module
    init: InitFn
    reaches_below: bool


def _ways(model: nn.Module, init_fn: InitFn | None) -> Iterator[_Way]:
    """Yield the initialisation of each module that has one, parts first. A nested Hugging Face model uses its own."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, of_model: InitFn | None, configs: Mapping[str, Any]) -> Iterator[_Way]:
        if hasattr(module, "_initialize_weights"):
            of_model = getattr(module, "_init_weights", of_model)
        configs = configs or adapter_configs(module)
        for child in module.children():
            yield from visit(child, of_model, configs)
        if module in seen:
            return
        seen.add(module)
        owns_nothing = not any(p is not None for p in module._parameters.values())
        if hasattr(module, "reset_lora_parameters"):
            yield _Way(module, partial(reset_adapters, configs), reaches_below=True)
        elif init_fn is not None:
            yield _Way(module, init_fn, reaches_below=owns_nothing)
        elif of_model is not None:
            yield _Way(module, of_model, reaches_below=True)
        elif hasattr(module, "reset_parameters"):
            yield _Way(module, _reset, reaches_below=owns_nothing)

    yield from visit(model, getattr(model, "_init_weights", None), {})


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


_HELD_BYTES_MAX = 1 << 30
"""A module that touches more bytes of parameters than this has them written to their shards before it is done."""

_USES_WITHOUT_VIEWS = 2
"""Uses of a tensor's storage: by the tensor, and by the object that asks."""


class _Wholes:
    """Replaces all parameters by stand-ins until `put_back`: [Note: A model's own initialisation].

    `lacking`: parameters that are not initialised yet. `later`: names of others without values.
    """

    def __init__(self, model: nn.Module, pending: set[str], later: Collection[str]) -> None:
        names = parameter_names(model)
        self._parameters = {
            module: {k: p for k, p in module._parameters.items() if p is not None} for module in model.modules()
        }
        self._fillable = {p for p in names if pending.intersection(names[p])}
        self.lacking = set(self._fillable)
        self._later = {p for p in names if {*later}.intersection(names[p])} - self._fillable
        self._values: dict[nn.Parameter, torch.Tensor] = {}
        """Parameters in memory now."""
        stand_ins = {p: _Whole.of(p, partial(self._value, p)) for p in names}
        self._stand_ins = {
            module: {k: stand_ins[p] for k, p in parameters.items()} for module, parameters in self._parameters.items()
        }
        for module, shown in self._stand_ins.items():
            module._parameters.update(shown)  # type: ignore[arg-type]

    def concern(self, module: nn.Module, *, below: bool) -> bool:
        """Return True if `initialize` is needed for the module or, if `below`, for its parts too."""
        if not below:
            return any(p in self.lacking for p in self._parameters[module].values())
        return any(p in self._fillable for part in module.modules() for p in self._parameters[part].values())

    def initialize(self, module: nn.Module, init: InitFn) -> None:
        """Let `init` set the module's parameters, and those below it that it touches.

        A tied parameter that an earlier module initialised is not drawn again.
        """
        lacking = {k: p for k, p in self._parameters[module].items() if p in self.lacking}
        for name, p in self._parameters[module].items():
            module._parameters[name] = nn.Parameter(self._now(p), requires_grad=p.requires_grad)
        try:
            init(module)
            for name, p in lacking.items():
                made = module._parameters[name]
                assert made is not None
                self._values[p] = made.data
        finally:
            module._parameters.update(self._stand_ins[module])  # type: ignore[arg-type]
        self._write()

    def _write(self, *, in_use_stay: bool = False) -> None:
        """Write parameters to their shards, and free them. `in_use_stay`: but those that the caller still holds."""
        for p in [*self._values]:
            value = self._values.pop(p)
            viewed = torch._C._storage_Use_Count(value.untyped_storage()._cdata) > _USES_WITHOUT_VIEWS
            if p in self._fillable and not _is_unset(value):
                load_full(p, value)
                self.lacking.discard(p)
            held, in_use = weakref.ref(value), value if viewed else None
            del value
            if in_use_stay and (in_use := in_use if viewed else held()) is not None:
                self._values[p] = in_use

    def put_back(self) -> None:
        for module, parameters in self._parameters.items():
            module._parameters.update(parameters)

    def _value(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter not in self._values:
            if sum(value.nbytes for value in self._values.values()) > _HELD_BYTES_MAX:
                self._write(in_use_stay=True)
            self._values[parameter] = self._now(parameter)
        return self._values[parameter]

    def _now(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy of the whole parameter; one that counts as unset if it has no values."""
        if parameter in self.lacking or parameter in self._later:
            return _unset(parameter, torch.device("cpu"))
        return full_tensor(parameter.data, torch.float32).cpu()


class _Whole(ElsewhereTensor):
    """A stand-in for a whole sharded parameter (fp32, on the CPU) that loads its elements on first use."""

    _load: Callable[[], torch.Tensor]

    @staticmethod
    def of(parameter: torch.Tensor, load: Callable[[], torch.Tensor]) -> _Whole:
        made: _Whole = torch.Tensor._make_wrapper_subclass(
            _Whole, parameter.shape, dtype=torch.float32, device=torch.device("cpu")
        )
        made._load = load
        made._is_param = True
        return made

    def materialize(self) -> torch.Tensor:
        return self._load()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return _Whole.of(args[0], args[0]._load)
        given = (args, kwargs or {})
        loaded = torch.utils._pytree.tree_map_only(_Whole, _Whole.materialize, given)
        made = func(*loaded[0], **loaded[1])
        return args[0] if args and made is loaded[0][0] else made  # an operation in place returns its tensor


def _allocate_buffers(
    model: nn.Module, device: torch.device, stored: frozenset[str]
) -> dict[nn.Module, dict[str, str]]:
    """Allocate all meta buffers, and return the full names of those that need values, by module and own name."""
    blank: dict[nn.Module, dict[str, str]] = {}
    is_stored, names_of = _is_in(stored, model), buffer_names(model, persistent=False)
    made = {buffer: _unset(buffer, device) for buffer in names_of if buffer.is_meta}
    for prefix, module in model.named_modules():
        for name, buffer in _own_buffers(module):
            if buffer in made:
                module._buffers[name] = made[buffer]
                if not any(map(is_stored, names_of[buffer])):
                    blank.setdefault(module, {})[name] = _named(prefix, name)
    return blank


_UNSET_BYTE = 0xA5
"""Each byte of an unset tensor of whole numbers or bools, to which no bool is ever set."""


def _own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate a tensor, filled with a value that no initialisation leaves in every element."""
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if made.is_floating_point() or made.is_complex():
        return made.fill_(math.nan)
    made.view(-1).view(torch.uint8).fill_(_UNSET_BYTE)
    return made


def _is_unset(tensor: torch.Tensor | None) -> bool:
    if tensor is None or tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.flatten()[0].isnan()) and bool(tensor.isnan().all())
    return bool((tensor.contiguous().view(-1).view(torch.uint8) == _UNSET_BYTE).all())


def _is_in(stored: frozenset[str], model: nn.Module) -> Callable[[str], bool]:
    """Return a function that says if files with these names hold the buffer of a given name."""
    found_as = names_in_files(model, stored)
    return lambda name: not stored.isdisjoint(found_as((name,)))


def _named(prefix: str, name: str) -> str:
    return clean_name(f"{prefix}.{name}" if prefix else name)
