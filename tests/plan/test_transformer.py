"""What the formulas promise: the published figures of ZeRO-Infinity, and a shape for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.transformer import Transformer, dense_transformer, transformer_of

TERA = 10**12


def test_the_trillion_parameter_model_of_the_paper() -> None:
    model = dense_transformer(layers=128, hidden=25_600, heads=256, seq=1024, vocab=50_000)
    assert model.numel == pytest.approx(1.0 * TERA, rel=0.02)
    assert model.checkpoint_bytes(32) == pytest.approx(0.2 * TERA, rel=0.1)
    assert model.flops(1, checkpointing=True) == 8 * 1024 * model.numel
    assert model.flops(1, checkpointing=False) == 6 * 1024 * model.numel


@given(numel=st.integers(1_000_000, 10 * TERA), vocab=st.sampled_from([256, 32_000, 256_000]))
def test_a_count_becomes_a_transformer_of_just_that_count(numel: int, vocab: int) -> None:
    model = transformer_of(numel, seq=1024, vocab=vocab)
    assert model.numel == numel
    assert model.layers >= 1
    assert model.hidden % 64 == 0
    assert model.vocab * model.hidden <= 0.11 * numel
    assert model.block_numel == pytest.approx(12 * model.hidden**2, rel=0.5)


@pytest.mark.parametrize(("numel", "layers", "hidden"), [(7 * 10**9, 32, 4096), (10**12, 128, 25_600)])
def test_the_shape_is_about_that_of_models_of_its_size(numel: int, layers: int, hidden: int) -> None:
    model = transformer_of(numel, seq=2048, vocab=32_000)
    assert model.layers == pytest.approx(layers, rel=0.3)
    assert model.hidden == pytest.approx(hidden, rel=0.15)


def test_too_few_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="too few for a transformer"):
        transformer_of(100, seq=128, vocab=256)


def test_activations_grow_as_in_the_paper() -> None:
    model = Transformer(layers=4, hidden=64, heads=2, seq=10, vocab=100, block_numel=0, root_numel=0)
    assert model.activation_bytes(3) == 3 * 10 * (16 * 64 + 2 * 2 * 10)
    assert model.checkpoint_bytes(3) == 2 * 3 * 10 * 64 * 4
    assert model.logits_bytes(3) == 8 * 3 * 10 * 100
