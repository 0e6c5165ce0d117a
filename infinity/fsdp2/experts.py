"""Mixtures of experts: frozen experts as modules of their own, so that only those are gathered that tokens go to.

transformers itself is never imported: its modules are known by their attributes.

[Note: Routed experts]
Hugging Face's mixtures hold the experts of a block as two tensors, one row to an expert. Gathered with their block, all of them
would be read for each token, though a router sends it to a few. So frozen ones are split: each expert is a module, and a group.
A block comes to its experts when its router has chosen. Then it says to which ones tokens go, all of these are read at once,
and each is gathered when it is computed with. Nobody knows earlier, so experts are in no trace, and nothing reads them ahead of
their router. Used ones stay staged in what is left of the pool, and the one that wasn't used for longest leaves first.

Several ranks gather together, so each computes with every expert that a token of any of them goes to, some without tokens.

The numbers are those of the mixture as transformers computes it expert by expert (`experts_implementation` "eager"): the same
operations on the same tensors in the same order. That is why gate and up stay one matrix, although files hold them as two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from infinity.errors import ConfigError

_FUSED = {"gate_up_proj", "down_proj"}
_EXPERT = re.compile(r"(^|\.)experts\.\d+$")
_SUMS_IN_FP32 = {"Inkling2Experts"}
"""Classes that add up what the experts give in another dtype."""
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""What a tensor of one expert is made of, one behind the other, in files of Qwen's kind and of Mixtral's."""


class Expert(nn.Module):
    """A gated feed-forward: `gate_up_proj` (2 · inner, hidden), `down_proj` (hidden, inner)."""

    def __init__(self, gate_up_proj: torch.Tensor, down_proj: torch.Tensor, gate: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up_proj, requires_grad=False)
        self.down_proj = nn.Parameter(down_proj, requires_grad=False)
        self._gate = gate

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        return F.linear(self._gate(F.linear(hidden, self.gate_up_proj)), self.down_proj)


class RoutedExperts(nn.ModuleList):
    """The experts of a block, called as Hugging Face's are. See [Note: Routed experts]."""

    def __init__(self, fused: Any) -> None:
        gate = fused._apply_gate
        tensors = zip(fused.gate_up_proj, fused.down_proj, strict=True)
        super().__init__(Expert(*of_expert, gate) for of_expert in tensors)
        fused._parameters.clear()  # whose gate the experts keep
        self.ranks: dist.ProcessGroup | None = None
        """Those that gather together; None for one."""
        self.coming: Callable[[Sequence[int]], None] = lambda numbers: None
        """Told the experts that are computed with next, in their order."""

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what each token's experts give.

        Args:
            hidden: (tokens, hidden).
            routes: (tokens, k), the numbers of each token's experts.
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
        chosen[routes.flatten()] = 1  # the number behind the last says: none
        if self.ranks is not None:
            dist.all_reduce(chosen, dist.ReduceOp.MAX, self.ranks)
        numbers: list[int] = chosen[:-1].nonzero().flatten().tolist()
        self.coming(numbers)
        return numbers


def split_experts(model: nn.Module, stored: Collection[str]) -> int:
    """Put routed experts in the place of frozen ones that are one tensor for all; how many blocks had such.

    stored: the names in the model's files, which must hold experts by themselves. Nothing is done to a model of which more than
    adapters is trained, as its own tensors are saved under their names. Raises ConfigError where adapters were put into
    experts, which need the one tensor.
    """
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    of_model = [name for name in trained if "lora_" not in name and "modules_to_save" not in name]
    apart = any(_EXPERT.search(name.removesuffix(".weight").rpartition(".")[0]) for name in stored)
    if of_model or not apart:
        return 0
    fused = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _is_splittable(child)
    ]
    if any(name == "base_layer" for _, name, _ in fused):
        raise ConfigError(
            "the experts of this mixture have adapters, which need them in one tensor: with weights= each expert is read by "
            "itself. Leave them out of target_modules and target_parameters"
        )
    split: dict[nn.Module, RoutedExperts] = {}
    for parent, name, child in fused:
        if child not in split:
            split[child] = RoutedExperts(child)
            split[child].train(child.training)
        setattr(parent, name, split[child])
    return len(split)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The experts that `split_experts` made, each to be a group."""
    return [expert for experts in routed_experts(model) for expert in experts]


def routed_experts(model: nn.Module) -> Iterator[RoutedExperts]:
    """Those of all blocks."""
    return (module for module in model.modules() if isinstance(module, RoutedExperts))


def parts_in_files(name: str) -> list[tuple[str, ...]]:
    """What a tensor of a mixture may be called in files, or the tensors that it is there, one behind the other."""
    of_mixtral = name.replace(".mlp.", ".block_sparse_moe.")
    module, _, tensor = name.rpartition(".")
    if tensor not in _PARTS or not _EXPERT.search(module):
        return [(of_mixtral,)] if of_mixtral != name else []
    qwen, mixtral = _PARTS[tensor]
    return [
        tuple(f"{module}.{part}.weight" for part in qwen),
        tuple(f"{of_mixtral.rpartition('.')[0]}.{part}.weight" for part in mixtral),
    ]


def with_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Names in files, and those of the tensors that they may be made of there."""
    names = tuple(names)
    return tuple(dict.fromkeys((*names, *(part for name in names for parts in parts_in_files(name) for part in parts))))


def _is_splittable(module: Any) -> bool:
    parameters = dict(module.named_parameters())
    return (
        parameters.keys() == _FUSED
        and type(module).__name__ not in _SUMS_IN_FP32
        and not any(p.requires_grad or p.dim() != 3 for p in parameters.values())
        and hasattr(module, "_apply_gate")
        and getattr(module, "has_gate", False)
        and getattr(module, "is_concatenated", True)
        and not any(getattr(module, odd, False) for odd in ("has_bias", "is_transposed", "has_post_expert_norm"))
    )
