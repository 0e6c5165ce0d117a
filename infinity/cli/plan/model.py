"""The model that is planned for: from a count, from a shape, or from the config.json of a Hugging Face model."""

from __future__ import annotations

import argparse

from infinity.cli.plan.hf_config import SEQ_DEFAULT, read_hf_config, stored_bits
from infinity.errors import ConfigError
from infinity.plan.transformer import Transformer, dense_transformer, heads_for, transformer_of

VOCABULARY_DEFAULT = 32_000


def base_bits(asked: argparse.Namespace) -> int:
    """Of the matrices of frozen blocks in their files: as asked for, or as config.json says."""
    bits: int | None = asked.base_bits
    return bits or (stored_bits(asked.hf_config) if asked.hf_config is not None else 16)


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
