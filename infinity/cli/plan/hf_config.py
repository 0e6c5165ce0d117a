"""Reads the shape of a Hugging Face decoder from its config.json: dense, or a mixture of experts of a known family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.plan.transformer import Experts, Transformer
from infinity.store.quantization_config import bits_of

SEQ_DEFAULT = 2048

_GATED = {"silu", "swish", "swiglu", "geglu", "gelu_pytorch_tanh_gated"}
_GATED_TYPES = {"gemma", "gemma2", "gemma3_text"}
_BIASED_TYPES = {"gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "bert", "roberta"}
_WITHOUT_POSITIONS_TYPES = {"gpt_neox", "gptj", "bloom"}
_QKV_BIASED_TYPES = {"qwen2", "qwen2_moe", "gpt_oss"}
_HEAD_NORM_TYPES = {"qwen3", "qwen3_moe", "gemma3_text"}
_FOUR_NORM_TYPES = {"gemma2", "gemma3_text"}
_LATENT_TYPES = {"deepseek_v2", "deepseek_v3"}
"""Types whose keys and values are projected from a narrow latent."""

_FOREIGN_KEYS = {
    "an encoder": ("is_encoder_decoder", "num_decoder_layers"),
    "state spaces": ("state_size", "ssm_state_size", "mamba_d_state"),
    "convolutions": ("conv_L_cache", "conv1d_width"),
    "linear attention": ("linear_num_key_heads",),
    "parameters that differ from layer to layer": ("hidden_size_per_layer_input", "per_layer_config"),
}
"""Keys of models with parts that are not counted here."""

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERT_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")

_UNTIED_TYPES = {*_EXPERT_TYPES, "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gptj", "phi", "phi3"}
"""Types with a head of its own if the file does not say; transformers 4 leaves tie_word_embeddings out for the others."""


def read_hf_config(path: Path, *, seq: int | None) -> Transformer:
    """Read the decoder in a config.json. seq: tokens of a sample; None for 2048, or the model's limit if that is
    less."""
    return _Reader(path, _read(path)).transformer(seq)


def stored_bits(path: Path) -> int:
    """Return the bits of a block's matrix in the model's files: 4 or 8 if it is quantised, else 16."""
    return bits_of(_read(path), path)


def _read(path: Path) -> dict[str, Any]:
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
    return values


@dataclass(frozen=True)
class _Part:
    """Outputs and inputs of the linear layers of a part of a block, and its parameters in norms and biases."""

    matrices: tuple[tuple[int, int], ...] = ()
    vector_numel: int = 0

    @property
    def numel(self) -> int:
        return sum(outputs * inputs for outputs, inputs in self.matrices) + self.vector_numel

    @property
    def linear_width(self) -> int:
        return sum(map(sum, self.matrices))

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.matrices + other.matrices, self.vector_numel + other.vector_numel)

    def __mul__(self, count: int) -> _Part:
        return _Part(self.matrices * count, self.vector_numel * count)


def _linear(inputs: int, outputs: int) -> _Part:
    return _Part(((outputs, inputs),))


class _Reader:
    """The values of one config.json under the names that different models give them."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values
        self._type = str(values.get("model_type", ""))
        self._biased = self._type in _BIASED_TYPES
        """True for models of the older kind: biases everywhere, learned positions."""
        for part, keys in _FOREIGN_KEYS.items():
            if foreign := next((key for key in keys if values.get(key)), None):
                raise ConfigError(
                    f"{path}: a model of model_type {self._type!r} with {part} ({foreign}) is not supported, only decoders "
                    "of attention and feed-forward: give --params"
                )
        self._layers = self._number("num_hidden_layers", "n_layer", "num_layers")
        self._hidden = self._number("hidden_size", "n_embd", "d_model")
        self._heads = self._number("num_attention_heads", "n_head", "num_heads")
        one_key = values.get("multi_query") and not values.get("new_decoder_architecture")  # Falcon's other names
        heads = 1 if one_key else self._number("num_kv_heads", default=self._heads)
        self._key_value_heads = self._number("num_key_value_heads", default=heads)

    def transformer(self, seq: int | None) -> Transformer:
        vocab = self._number("vocab_size")
        positions = self._number("max_position_embeddings", "n_positions", "n_ctx", default=0)
        attention, cache_width = self._latent_attention() if self._type in _LATENT_TYPES else self._attention()
        dense = attention + self._feed_forward(self._inner())
        sparse, experts = self._mixture(attention, dense)
        tied = self._values.get("tie_word_embeddings", self._type not in _UNTIED_TYPES)
        learned = 0 if self._type in _WITHOUT_POSITIONS_TYPES else positions + 2 * (self._type == "opt")
        learned_positions = (learned + 1) * self._hidden if self._biased else 0  # and the bias of the last norm
        return Transformer(
            self._layers,
            self._hidden,
            self._heads,
            seq or min(SEQ_DEFAULT, positions or SEQ_DEFAULT),
            vocab,
            sparse.numel,
            (vocab * (1 if tied else 2) + 1) * self._hidden + learned_positions,
            sparse.linear_width,
            cache_width,
            experts,
            sparse.vector_numel,
            sparse.matrices if experts is None else dense.matrices,
            vocab * self._hidden if tied else 0,
            self._hidden + learned_positions,
            self._key_value_heads,
        )

    def _mixture(self, attention: _Part, dense: _Part) -> tuple[_Part, Experts | None]:
        """Return a block with experts, and the experts; for a dense model its block and None."""
        count = self._number(*_EXPERT_KEYS, default=0)
        if count <= 1:
            return dense, None
        if self._type not in _EXPERT_TYPES:
            raise ConfigError(
                f"{self._path}: a mixture of experts of model_type {self._type!r} is not supported, only of "
                f"{', '.join(_EXPERT_TYPES)}: give --params of its dense part"
            )
        blocks = tuple(number for number in range(self._layers) if self._is_sparse(number))
        if not blocks:
            return dense, None
        per_token = self._number("num_experts_per_tok")
        if per_token > count:
            raise ConfigError(f"{self._path}: num_experts_per_tok: got {per_token}, but there are {count} experts")
        one_kind = self._type in ("mixtral", "gpt_oss")
        inner = self._number("intermediate_size" if one_kind else "moe_intermediate_size")
        expert = self._feed_forward(inner)
        if self._type == "gpt_oss":
            expert += _linear(1, 2 * inner + self._hidden)  # the biases, which are read with the expert
            attention += _Part(vector_numel=count)  # the router's bias
        sparse = attention + _linear(self._hidden, count) + expert * count
        if self._type in _LATENT_TYPES and (shared := self._number("n_shared_experts", default=0)):
            sparse += self._feed_forward(inner * shared)
        if self._type == "qwen2_moe" and (shared := self._number("shared_expert_intermediate_size", default=0)):
            sparse += self._feed_forward(shared) + _linear(self._hidden, 1)  # the gate before it
        return sparse, Experts(
            count, per_token, expert.numel, expert.linear_width, blocks, dense.numel, dense.linear_width
        )

    def _is_sparse(self, number: int) -> bool:
        if self._type in _LATENT_TYPES:
            every = self._number("moe_layer_freq", default=1) or 1
            return number >= self._number("first_k_dense_replace", default=0) and number % every == 0
        dense = self._values.get("mlp_only_layers") or []
        return number not in dense and (number + 1) % (self._number("decoder_sparse_step", default=1) or 1) == 0

    def _inner(self) -> int:
        return self._number("intermediate_size", "n_inner", "ffn_dim", default=4 * self._hidden)

    def _feed_forward(self, inner: int) -> _Part:
        gated = self._values.get("hidden_act") in _GATED or self._type in _GATED_TYPES
        return _linear(self._hidden, inner) * (3 if gated else 2)

    def _attention(self) -> tuple[_Part, int]:
        """Return attention with the block's norms and biases, and the width of its keys and values in the cache."""
        width = self._number("head_dim", default=0) or self._hidden // self._heads
        keys = self._key_value_heads * width
        hidden, queries = self._hidden, self._heads * width
        linear = _linear(hidden, queries) * 2 + _linear(hidden, keys) * 2
        others = (4 if self._type in _FOUR_NORM_TYPES else 2) * hidden
        if self._biased or self._type in _QKV_BIASED_TYPES:
            others += queries + 2 * keys
        if self._biased:
            others += 4 * hidden + self._inner()
        if self._type in _HEAD_NORM_TYPES:
            others += 2 * width
        if self._type == "gpt_oss":
            others += hidden + self._heads  # the bias of the output, and a sink for each head
        return linear + _Part(vector_numel=others), 2 * keys

    def _latent_attention(self) -> tuple[_Part, int]:
        """Return the same for DeepSeek: keys, values and, with `q_lora_rank`, queries pass a narrow normed latent."""
        hidden, heads, rotary = self._hidden, self._heads, self._number("qk_rope_head_dim")
        plain, values = self._number("qk_nope_head_dim"), self._number("v_head_dim")
        narrow, latent = self._number("q_lora_rank", default=0), self._number("kv_lora_rank")
        queries = _linear(narrow or hidden, heads * (plain + rotary))
        if narrow:
            queries += _linear(hidden, narrow) + _Part(vector_numel=narrow)
        keys = _linear(hidden, latent + rotary) + _linear(latent, heads * (plain + values))
        linear = queries + keys + _linear(heads * values, hidden)
        return linear + _Part(vector_numel=2 * hidden + latent), heads * (rotary + plain + values)

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
