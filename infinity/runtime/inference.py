"""Runs models whose weights stay in the user's files, and stream through the pinned pool.

[Note: A round of generation]
Each forward goes through all groups in the same order, token after token. The staging policy knows the next round's order, so
the first layers of the next token are read while the last ones of this token compute. As many layers as the pool has room for
stay staged, spread evenly, and each round reads the others (`choose_evenly` in infinity/schedule/residency.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn

from infinity.config import load_config
from infinity.errors import ConfigError, InfinityError
from infinity.extras import needs
from infinity.fsdp2.first_values import init_empty
from infinity.ranks.all_ranks import raise_on_all_ranks
from infinity.ranks.process_group import ensure_process_group
from infinity.runtime.console import show_log
from infinity.runtime.meshes import check_splits, given_grid
from infinity.runtime.prepare import check_alike, check_supported, drawing_alike, give_values, shard_and_page
from infinity.runtime.resolved import compute_device, resolve
from infinity.runtime.stages import stages_of
from infinity.swap import SwapManager

log = logging.getLogger("infinity")

_CONFIG: Mapping[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
}


class InferenceEngine:
    """Runs a model whose weights may be larger than memory. Made by `init_inference`; a context manager.

    `module` is the model, in evaluation mode and without gradients. `swap` is the swap manager; None without NVMe.
    """

    def __init__(self, module: nn.Module, swap: SwapManager | None, on_close: Callable[[], None]) -> None:
        self.module, self.swap = module, swap
        self._on_close = on_close
        self._closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        self._check_open()
        with torch.inference_mode(False), torch.no_grad():
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate`, as Hugging Face's models have it. Every rank calls it, for as many rounds."""
        self._check_open()
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise ConfigError(f"{type(self.module).__name__} has no generate(): call the engine for a forward")
        if dist.get_world_size() > 1:
            kwargs.setdefault("synced_gpus", True)
        with torch.no_grad():
            return generate(*args, **kwargs)

    def close(self) -> None:
        """Free memory and files; the model can't be used any more. Idempotent."""
        if self._closed:
            return
        if self.swap is not None:
            self.swap.paging.check_thread()
        self._closed = True
        try:
            if self.swap is not None:
                self.swap.close()
        finally:
            self._on_close()

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InfinityError("the engine is closed, and the values of its model are gone")


def init_inference(
    model: nn.Module,
    config: Any = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    auto: Mapping[str, Any] | None = None,
) -> InferenceEngine:
    """Prepare a model for inference, with its weights streamed from their files.

    Args:
        model: best built on the meta device (`infinity.init_empty`). None of it is trained afterwards.
        config: as for `initialize`. None computes in bf16 and streams from the files of `weights`. If
            `infinity.pinned_bytes_max` is "auto", the pool takes up to half of the available memory, because a round does not
            read the part of the model that stays there.
        weights: safetensors (as for `initialize`), in which the parameters stay.
        auto: values for "auto" in the config, as for `initialize`.

    A collective. Raises ConfigError, StoreError, BudgetError, IoError or CheckpointError before anything runs.
    """
    with ExitStack() as undo:
        close_group = ensure_process_group()
        undo.callback(close_group)
        show_log()
        model.requires_grad_(False).eval()
        with raise_on_all_ranks():
            settled = load_config(config if config is not None else dict(_CONFIG)).resolve(
                world_size=dist.get_world_size(), **(auto or {})
            )
            check_supported(model, None, weights)
            given_grid(model, None)
            if stages_of(model) > 1:
                raise ConfigError("init_inference runs a whole model: build the PipelineModule with num_stages=1")
            check_splits(model, settled, None)
            resolved = resolve(
                settled,
                ranks=dist.get_world_size(),
                numel=sum(p.numel() for p in model.parameters()),
                moments=(),
                trains=False,
                device_type=compute_device().type,
            )
        check_alike(model, weights)
        _, swap, _, _ = shard_and_page(model, resolved, None, weights, undo)
        with drawing_alike(), raise_on_all_ranks():
            give_values(model, resolved, swap, weights, None, None)
        undo.pop_all()
    return InferenceEngine(model, swap, close_group)


@overload
def generate(folder: str | os.PathLike[str], prompts: str, **options: Any) -> str: ...
@overload
def generate(folder: str | os.PathLike[str], prompts: Sequence[str], **options: Any) -> list[str]: ...
def generate(
    folder: str | os.PathLike[str],
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    pinned_bytes_max: int | str = "auto",
    on_token: Callable[[int], None] | None = None,
    **options: Any,
) -> str | list[str]:
    """Continue one text, or several at once, by a model of Hugging Face that need not fit into memory.

    Args:
        folder: with config.json, safetensors and the tokenizer's files, as downloaded. It is only read.
        prompts: one text, or several: each round reads the weights once for all of them.
        max_new_tokens: maximum number of tokens to add to each.
        pinned_bytes_max: pinned host memory (bytes, or "2GiB"); "auto" takes up to half of the available memory.
        on_token: called after each round with the number of rounds so far.
        options: of the model's own `generate`, such as `do_sample=True`.

    Returns the new text, for several prompts a list. Raises as `init_inference`; ImportError without transformers.
    """
    with needs("transformers"):
        from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    many = [prompts] if isinstance(prompts, str) else list(prompts)
    tokens = tokenizer(many, return_tensors="pt", padding=True)
    config = {**_CONFIG, "infinity": {"pinned_bytes_max": pinned_bytes_max}}
    with init_inference(empty_model(folder), config, weights=folder) as engine:
        options.setdefault("pad_token_id", tokenizer.pad_token_id)
        made = engine.generate(
            **tokens.to(compute_device()),
            max_new_tokens=max_new_tokens,
            stopping_criteria=[counting(on_token)] if on_token is not None else None,
            **options,
        )
    texts = tokenizer.batch_decode(made[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts[0] if isinstance(prompts, str) else list(texts)


def empty_model(folder: str | os.PathLike[str]) -> nn.Module:
    """Return the causal language model that the folder's config.json describes, without memory for its weights."""
    with needs("transformers"):
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with init_empty():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    made: nn.Module = model
    return made


def counting(on_token: Callable[[int], None]) -> Callable[..., torch.Tensor]:
    """Return a stopping criterion for Hugging Face's `generate` that never stops, and reports the number of rounds."""
    rounds = 0

    def criterion(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        nonlocal rounds
        rounds += 1
        on_token(rounds)
        return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

    return criterion
