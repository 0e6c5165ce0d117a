"""Which modules become groups."""

from __future__ import annotations

import pytest
from torch import nn

from infinity.errors import ConfigError
from infinity.fsdp2.live import LiveOptions, choose_wrap
from infinity.fsdp2.wrap import gather_small_as_one, largest_part, modules_to_wrap


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 100, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_the_repeated_blocks_are_groups() -> None:
    model = Model(tied=False)
    assert modules_to_wrap(model, None) == list(model.blocks)


def test_the_named_classes_are_groups_inner_before_outer() -> None:
    model = Model(tied=False)
    first, second = model.blocks
    assert modules_to_wrap(model, ["Block", "Sequential"]) == [second.mlp, second, first.mlp, first]


@pytest.mark.parametrize("tied", [False, True])
def test_what_shares_a_parameter_with_the_outside_is_no_group(tied: bool) -> None:
    model = Model(tied=tied)
    linear = [model.blocks[1].mlp[2], model.blocks[1].mlp[0], model.blocks[0].mlp[2], model.blocks[0].mlp[0]]
    found = modules_to_wrap(model, ["Linear", "Embedding"])
    assert found == (linear if tied else [model.head, *linear, model.embedding])


def test_a_module_with_two_names_is_one_group() -> None:
    model = nn.Module()
    block = Block()
    model.first = nn.Sequential(block)
    model.second = nn.Sequential(block)
    assert modules_to_wrap(model, ["Block"]) == [block]


def test_the_largest_part_that_could_be_a_group() -> None:
    model = Model(tied=False)
    blocks = list(model.blocks)
    assert largest_part(blocks[0], model, set(blocks)) is blocks[0].mlp
    assert largest_part(blocks[0].mlp, model, set(blocks)) in (blocks[0].mlp[0], blocks[0].mlp[2])
    assert largest_part(blocks[0], model, {*blocks, blocks[0].mlp}) is blocks[0].attention
    assert largest_part(blocks[0].attention, model, set(blocks)) is None  # uses the parameters of its parts itself
    assert largest_part(model, model, set(blocks)) in (model.embedding, model.head)
    assert largest_part(Model(tied=True), model, set()) is not None


def test_nothing_is_split_off_that_is_tied_to_the_rest() -> None:
    model = Model(tied=True)
    assert largest_part(model, model, set(model.blocks)) is None


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"names Blok, but the model has only .*Block"):
        modules_to_wrap(Model(tied=False), ["Blok"])


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


class Towers(nn.Module):
    """Two towers, of 1 640 and of 33 024 elements per submodule or about."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = Tower(40), Tower(180)
        self.bare = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])


def test_modules_with_small_parts_are_gathered_as_one() -> None:
    model = Towers()
    small, large, bare = model.small.layers, model.large.layers, model.bare
    wrap = modules_to_wrap(model, None)
    assert wrap == [*small, *large, *bare]
    assert gather_small_as_one(wrap, model, 5) == wrap
    assert gather_small_as_one(wrap, model, 1000) == [model.small, *large, *bare]  # 820 for each of 4
    assert gather_small_as_one(wrap, model, 10_000) == []  # the model itself: 6 866 for each of 11
    assert gather_small_as_one([model.small, *small], model, 1000) == [model.small]


def test_the_granularity_threshold_is_for_groups_that_nobody_named() -> None:
    model = Towers()
    options = LiveOptions(module_granularity_threshold=1000)
    wrap, outline, _ = choose_wrap(model, None, options)
    assert model.small in wrap
    assert outline.numel == sum(p.numel() for p in model.parameters())
    wrap, _, _ = choose_wrap(model, ["Linear"], options)
    assert model.small not in wrap
