"""Mixtures of experts: frozen experts become separate modules, so that only those with tokens are gathered.

transformers is never imported; its modules are recognised by their attributes.

[Note: Routed experts]
Hugging Face stores the experts of a block as two tensors with one row per expert. Gathered with their block, all
experts would be read, although a router sends each token to a few. So frozen experts are split: each is a module and a
group. After the router has chosen, the block announces the experts that have tokens. All of these are read at once, and
each is gathered when it runs. Experts can't be predicted, so they are in no trace and are not prefetched before their
router. Used experts stay staged in the free part of the pool; the least recently used is evicted first.

Ranks gather together, so each rank runs every expert that has a token on any of them, some with no tokens.

Results equal those of transformers' expert-by-expert implementation (`experts_implementation` "eager"): the same
operations on the same tensors in the same order. That is why gate and up stay one matrix, although files store two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from infinity.errors import ConfigError

_FUSED = {"gate_up_proj", "down_proj"}
_BIASES = {"gate_up_proj_bias", "down_proj_bias"}
_EXPERT = re.compile(r"(^|\.)experts\.\d+$")
_STACK = re.compile(r"(^|\.)experts\.gate_up_proj$")
_SUMS_IN_FP32 = {"Inkling2Experts"}
"""Classes that accumulate expert outputs in another dtype."""
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Per tensor of an expert: the tensors that files concatenate to it, with Qwen's names and with Mixtral's."""


class Expert(nn.Module):
    """A gated feed-forward with weights `gate_up_proj` (2 · inner, hidden) and `down_proj` (hidden, inner).

    gpt-oss has the transposed weights, and biases.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def __init__(self, tensors: Mapping[str, torch.Tensor], gate: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._gate = gate
        self._biased = tensors.keys() > _FUSED

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map (tokens, hidden) to (tokens, hidden)."""
        if self._biased:
            return (
                self._gate(hidden @ self.gate_up_proj + self.gate_up_proj_bias) @ self.down_proj + self.down_proj_bias
            )
        return F.linear(self._gate(F.linear(hidden, self.gate_up_proj)), self.down_proj)


class RoutedExperts(nn.ModuleList):
    """The experts of a block, with the call signature of Hugging Face's: [Note: Routed experts]."""

    def __init__(self, fused: Any) -> None:
        stacks = dict(fused.named_parameters())
        super().__init__(
            Expert({name: stack[number] for name, stack in stacks.items()}, fused._apply_gate)
            for number in range(len(fused.down_proj))
        )
        fused._parameters.clear()  # the experts keep a bound method of it
        self.ranks: dist.ProcessGroup | None = None
        """The ranks that gather together; None for one rank."""
        self.coming: Callable[[Sequence[int]], None] = lambda numbers: None
        """Called with the numbers of the experts that run next, in order."""

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            hidden: (tokens, hidden).
            routes: (tokens, k), the expert numbers of each token.
            weights: (tokens, k).
        """
        made = torch.zeros_like(hidden)
        for number in self._chosen(routes):
            token, place = torch.where(routes == number)
            order = torch.argsort(place, stable=True)
            token, place = token[order], place[order]
            given = self[number](hidden[token]) * weights[token, place, None]
            made.index_add_(0, token, given.to(made.dtype))
        return made

    @torch.no_grad()
    def _chosen(self, routes: torch.Tensor) -> list[int]:
        chosen = torch.zeros(len(self) + 1, dtype=torch.int32, device=routes.device)
        chosen[routes.flatten()] = 1  # the number after the last expert means none
        if self.ranks is not None:
            dist.all_reduce(chosen, dist.ReduceOp.MAX, self.ranks)
        numbers: list[int] = chosen[:-1].nonzero().flatten().tolist()
        self.coming(numbers)
        return numbers


def split_experts(model: nn.Module, stored: Collection[str]) -> int:
    """Replace frozen experts that share one tensor by `RoutedExperts`, and return the number of blocks changed.

    stored: names in the model's files, which store experts separately, or all of a block in one tensor. A model that
    trains more than adapters is left as it is, because its tensors are saved under their names. Experts with adapters
    stay in one tensor if the files have that tensor; if the files store experts separately, ConfigError is raised.
    """
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    of_model = [name for name in trained if "lora_" not in name and "modules_to_save" not in name]
    apart = any(_EXPERT.search(name.removesuffix(".weight").rpartition(".")[0]) for name in stored)
    if of_model or not (apart or any(map(_STACK.search, stored))):
        return 0
    fused = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _is_splittable(child)
    ]
    if any(name == "base_layer" for _, name, _ in fused):
        if not apart:
            return 0
        raise ConfigError(
            "the experts of this mixture have adapters, which need all experts in one tensor, but weights= reads each "
            "expert separately: leave the experts out of target_modules and target_parameters"
        )
    split: dict[nn.Module, RoutedExperts] = {}
    for parent, name, child in fused:
        if child not in split:
            split[child] = RoutedExperts(child)
            split[child].train(child.training)
        setattr(parent, name, split[child])
    return len(split)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the experts that `split_experts` made; each becomes a group."""
    return [expert for experts in routed_experts(model) for expert in experts]


def routed_experts(model: nn.Module) -> Iterator[RoutedExperts]:
    return (module for module in model.modules() if isinstance(module, RoutedExperts))


def parts_in_files(name: str) -> list[tuple[str, ...]]:
    """Return the alternative names of a mixture's tensor in files; several names in one are concatenated."""
    of_mixtral = name.replace(".mlp.", ".block_sparse_moe.")
    module, _, tensor = name.rpartition(".")
    if tensor not in _PARTS or not _EXPERT.search(module):
        return [(of_mixtral,)] if of_mixtral != name else []
    qwen, mixtral = _PARTS[tensor]
    return [
        tuple(f"{module}.{part}.weight" for part in qwen),
        tuple(f"{of_mixtral.rpartition('.')[0]}.{part}.weight" for part in mixtral),
    ]


def place_in_stack(name: str) -> tuple[str, int] | None:
    """Return the name of the tensor of all experts that may contain this tensor of one expert, and the row in it."""
    module, _, tensor = name.rpartition(".")
    if tensor not in _FUSED | _BIASES or not _EXPERT.search(module):
        return None
    experts, _, number = module.rpartition(".")
    return f"{experts}.{tensor}", int(number)


def with_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, and the names of tensors in files that they may be concatenated from or be rows of."""
    names = tuple(names)
    parts = [part for name in names for parts in parts_in_files(name) for part in parts]
    stacks = [place[0] for name in names if (place := place_in_stack(name)) is not None]
    return tuple(dict.fromkeys((*names, *parts, *stacks)))


def _is_splittable(module: Any) -> bool:
    parameters = dict(module.named_parameters())
    form = tuple(bool(getattr(module, name, False)) for name in ("has_bias", "is_transposed"))
    plain = form == (False, False) and getattr(module, "is_concatenated", True)
    of_gpt_oss = form == (True, True) and not getattr(module, "is_concatenated", True)
    return (
        (plain or of_gpt_oss)
        and parameters.keys() == (_FUSED if plain else _FUSED | _BIASES)
        and type(module).__name__ not in _SUMS_IN_FP32
        and not any(p.requires_grad or p.dim() != (2 if name in _BIASES else 3) for name, p in parameters.items())
        and hasattr(module, "_apply_gate")
        and getattr(module, "has_gate", False)
        and not getattr(module, "has_post_expert_norm", False)
    )
