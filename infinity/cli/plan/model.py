"""Floor 17. The model that is planned for: from a count, from a shape, or from the config.json of a Hugging Face model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.plan.transformer import Transformer, dense_transformer, heads_for, transformer_of

VOCABULARY_DEFAULT = 32_000
SEQ_DEFAULT = 2048

_GATED = {"silu", "swish", "swiglu", "geglu", "gelu_pytorch_tanh_gated"}
_GATED_TYPES = {"gemma", "gemma2", "gemma3_text"}
_BIASED_TYPES = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "bert", "roberta"}
_QKV_BIASED_TYPES = {"qwen2"}
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def model_from(asked: argparse.Namespace) -> Transformer:
    """The model that the arguments describe. Raises ConfigError where they describe none, or none that is planned."""
    ways = [asked.params is not None, asked.layers is not None or asked.hidden is not None, asked.hf_config is not None]
    if sum(ways) != 1:
        raise ConfigError("describe the model once: --params COUNT, or --layers N --hidden N, or --hf-config FILE")
    if asked.hf_config is not None:
        for name in ("heads", "vocab"):
            if getattr(asked, name) is not None:
                raise ConfigError(f"--{name} comes from --hf-config: leave it out")
        return read_hf_config(asked.hf_config, seq=asked.seq)
    seq = asked.seq or SEQ_DEFAULT
    vocab = asked.vocab or VOCABULARY_DEFAULT
    if asked.params is not None:
        if asked.heads is not None:
            raise ConfigError("--heads goes with --layers and --hidden, not with --params")
        try:
            return transformer_of(asked.params, seq=seq, vocab=vocab)
        except ValueError as error:
            raise ConfigError(f"--params: {error}") from None
    if asked.layers is None or asked.hidden is None:
        raise ConfigError("--layers and --hidden go together: give both")
    heads = asked.heads or heads_for(asked.hidden)
    if asked.hidden % heads:
        raise ConfigError(f"--heads {heads} does not divide --hidden {asked.hidden}")
    return dense_transformer(layers=asked.layers, hidden=asked.hidden, heads=heads, seq=seq, vocab=vocab)


def read_hf_config(path: Path, *, seq: int | None) -> Transformer:
    """The decoder that a config.json describes. Raises ConfigError with the file and what is wrong or missing in it."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}: name the config.json of a model") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object: name the config.json of a model")
    if isinstance(values.get("text_config"), dict):
        values = {**values, **values["text_config"]}
    return _Reader(path, values).transformer(seq)


class _Reader:
    """The values of one config.json under the names that different models give them."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def transformer(self, seq: int | None) -> Transformer:
        if any(self._number(key, default=0) > 1 for key in _EXPERT_KEYS):
            raise ConfigError(
                f"{self._path}: a mixture of experts is not planned for yet: give --params of its dense part"
            )
        layers = self._number("num_hidden_layers", "n_layer", "num_layers")
        hidden = self._number("hidden_size", "n_embd", "d_model")
        heads = self._number("num_attention_heads", "n_head", "num_heads")
        vocab = self._number("vocab_size")
        positions = self._number("max_position_embeddings", "n_positions", "n_ctx", default=0)
        return Transformer(
            layers,
            hidden,
            heads,
            seq or min(SEQ_DEFAULT, positions or SEQ_DEFAULT),
            vocab,
            self._block_numel(hidden, heads),
            self._root_numel(hidden, vocab, positions),
        )

    def _block_numel(self, hidden: int, heads: int) -> int:
        width = self._number("head_dim", default=hidden // heads)
        keys = self._number("num_key_value_heads", default=heads)
        inner = self._number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        gated = self._values.get("hidden_act") in _GATED or self._type in _GATED_TYPES
        attention = 2 * hidden * heads * width + 2 * hidden * keys * width
        feed_forward = (3 if gated else 2) * hidden * inner
        norms = 2 * hidden
        biases = (heads + 2 * keys) * width if self._biased or self._type in _QKV_BIASED_TYPES else 0
        if self._biased:
            biases += hidden + inner + hidden + 2 * hidden
        return attention + feed_forward + norms + biases

    def _root_numel(self, hidden: int, vocab: int, positions: int) -> int:
        tied = self._values.get("tie_word_embeddings", self._biased or self._type.startswith("gemma"))
        numel = vocab * hidden * (1 if tied else 2) + hidden
        return numel + (positions * hidden + hidden if self._biased else 0)

    @property
    def _type(self) -> str:
        return str(self._values.get("model_type", ""))

    @property
    def _biased(self) -> bool:
        """Whether it is of the older kind: biases everywhere, learned positions."""
        return self._type in _BIASED_TYPES

    def _number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{self._path}: {name}: got {value!r}, expected a count")
            if value or default is not None:
                return value
            raise ConfigError(f"{self._path}: {name}: got 0, expected at least 1")
        if default is None:
            raise ConfigError(f"{self._path}: {' or '.join(names)} is missing: is it the config.json of a transformer?")
        return default
