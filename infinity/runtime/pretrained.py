"""`save_pretrained` for Hugging Face and PEFT models whose parameters are sharded or paged, and its counterpart.

Hugging Face's function needs a whole state dict with memory, which paged tensors lack. So the values are first written in the
compute dtype to safetensors in a temporary folder inside the target, group by group, and mapped into memory. (Adapters, which
are small, are copied to host memory in fp32.) Then rank 0 runs Hugging Face's function on these tensors, one file at a time.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from infinity.checkpoint.model_files import SAFETENSORS_BYTES_MAX
from infinity.checkpoint.work_folder import WorkFolder
from infinity.errors import CheckpointError, InfinityError
from infinity.fsdp2.adapters import models_with_adapters
from infinity.fsdp2.materialize import SINGLE, full_tensor, load_full, load_weights, open_tensors
from infinity.fsdp2.names import buffer_names, parameter_names
from infinity.fsdp2.sharding import reshard
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.runtime.engine import Engine


def save_as_pretrained(engine: Engine) -> None:
    """Make `save_pretrained` of the engine's module, and of PEFT models in it, save the trained values. A collective then.

    Its arguments are unchanged, but files have at most 2 GiB by default (`max_shard_size`). `state_dict=` is written as given.
    """
    of_peft = [model for model in models_with_adapters(engine.module).values() if _is_of_peft(model)]
    for module in dict.fromkeys([engine.module, *of_peft]):
        if callable(getattr(module, "save_pretrained", None)):
            saving = partial(_save, weakref.ref(engine), weakref.ref(module))
            module.save_pretrained = saving  # type: ignore[assignment]


def load_trained(engine: Engine, folder: Path) -> None:
    """Set what is trained from the files of a model, or of PEFT's adapters, that the engine saved in `folder`; optimizer
    state stays. A collective. Raises CheckpointError, before anything is set, for missing tensors."""
    module: Any = engine.module
    with engine._guard.reading(), raise_on_all_ranks(), torch.no_grad(), ExitStack() as stack:
        reshard(module)
        names_of = parameter_names(module)
        if not _is_of_peft(module):
            load_weights(module, folder, but={names[0] for p, names in names_of.items() if not p.requires_grad})
            return
        from peft import get_peft_model_state_dict

        state: dict[str, torch.Tensor] = {name: p for p, names in names_of.items() for name in names}
        state |= {name: b for b, names in buffer_names(module, persistent=True).items() for name in names}
        stored: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
        for adapter in module.peft_config:
            place = folder if adapter == "default" else folder / adapter
            tensors = open_tensors(place / "adapter_model.safetensors", stack)
            for name, tensor in get_peft_model_state_dict(module, state, adapter).items():
                if name in tensors and tensor.requires_grad:
                    stored[tensor] = partial(tensors[name].get_tensor, name)
        if missing := sorted(names[0] for p, names in names_of.items() if p.requires_grad and p not in stored):
            raise CheckpointError(f"{folder} has no values for {', '.join(missing[:5])}: PEFT has not saved them")
        for parameter, value in stored.items():
            load_full(parameter, value())


def _save(
    engine_reference: weakref.ref[Engine],
    module_reference: weakref.ref[nn.Module],
    save_directory: Any,
    *positional: Any,
    **arguments: Any,
) -> None:
    engine, module = engine_reference(), module_reference()
    if engine is None or engine._closed or module is None:
        raise InfinityError("the engine is closed, and the values of its model are gone: save before close()")
    save: Any = type(module).save_pretrained  # type: ignore[attr-defined]
    names = list(inspect.signature(save).parameters)[2:]  # less self and the folder
    arguments |= dict(zip(names, positional, strict=False))
    if arguments.get("state_dict") is not None:
        save(module, save_directory, **arguments)
        return
    if "state_dict" not in names:
        save = partial(_save_state_dict, save)
    if "max_shard_size" in names:
        arguments.setdefault("max_shard_size", SAFETENSORS_BYTES_MAX)
    folder, writes = Path(save_directory), dist.get_rank() == 0
    if _is_of_peft(module):
        state = _adapters(engine, module, arguments)
        with raise_on_all_ranks():
            if writes:
                save(module, save_directory, **{**arguments, "state_dict": state})
        return
    work: WorkFolder | None = None
    with raise_on_all_ranks():
        if writes:
            try:
                work = WorkFolder.make(folder, SINGLE)
            except OSError as error:
                raise CheckpointError(f"{folder} can't be written to ({error.strerror}): name another folder") from None
    staged = work.new if work is not None else folder
    try:
        engine.save_16bit_model(staged)
        with raise_on_all_ranks():
            if writes:
                save(module, save_directory, **{**arguments, "state_dict": _mapped(module, staged)})
                _describe(module, folder, engine)
    finally:
        if work is not None:
            work.remove()


def _save_state_dict(save: Any, module: nn.Module, folder: Any, *, state_dict: Any, **arguments: Any) -> None:
    """Save by a function without a `state_dict` argument, as that of diffusers, which calls the module's."""
    before = {name: value for name, value in vars(module).items() if name == "state_dict"}
    vars(module)["state_dict"] = lambda *args, **kwargs: state_dict
    try:
        save(module, folder, **arguments)
    finally:
        del vars(module)["state_dict"]
        vars(module).update(before)


def _mapped(module: nn.Module, staged: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, under all of their names in the model."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(staged.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for names in parameter_names(module).values():
        tensors |= dict.fromkeys(names, tensors[names[0]])
    return tensors


def _describe(module: Any, folder: Path, engine: Engine) -> None:
    """Write the stored dtype to the config, for which Hugging Face takes that of the masters."""
    if not hasattr(getattr(module, "config", None), "save_pretrained"):
        return  # no model of transformers
    dtype_16 = torch.float16 if engine.fp16_enabled() else torch.bfloat16
    module.config.dtype = dtype_16 if engine.fp16_enabled() or engine.bfloat16_enabled() else torch.float32
    module.config.save_pretrained(folder)


def _is_of_peft(module: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


def _adapters(engine: Engine, module: nn.Module, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state dict in which the tensors that PEFT saves are whole, and all others are on the meta device."""
    with engine._guard.reading():
        reshard(engine.module)
    parameters = {name: p for p, names in parameter_names(module).items() for name in names}
    state: dict[str, torch.Tensor] = {name: torch.empty(p.shape, device="meta") for name, p in parameters.items()}
    state |= {name: b for b, names in buffer_names(module, persistent=True).items() for name in names}
    wanted = _taken(module, state, arguments) | {name for name, p in parameters.items() if p.requires_grad}
    return state | {
        name: full_tensor(parameters[name].data, torch.float32).cpu() for name in parameters if name in wanted
    }


def _taken(module: Any, state: dict[str, torch.Tensor], arguments: dict[str, Any]) -> set[str]:
    """Return the names that PEFT takes from `state`."""
    from peft import get_peft_model_state_dict

    options = {key: arguments[key] for key in ("save_embedding_layers",) if key in arguments}
    adapters: Iterable[str] = arguments.get("selected_adapters") or module.peft_config
    taken = {
        id(tensor)
        for adapter in adapters
        for tensor in get_peft_model_state_dict(module, state_dict=state, adapter_name=adapter, **options).values()
    }
    return {name for name, tensor in state.items() if id(tensor) in taken}
