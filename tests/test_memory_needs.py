"""What the estimators promise: DeepSpeed's arguments, a line per placement, and sums that one can follow."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import infinity
from infinity.deepspeed.memory_needs import count, needs_of
from infinity.schedule import pinned

B = 10**9


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 50) for _ in range(4))
        self.head = nn.Linear(10, 100, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("stage", "form", "first"),
    [
        (2, "live", ["model"]),
        (2, "cold", ["total_params"]),
        (3, "live", ["model"]),
        (3, "cold", ["total_params", "largest_layer_params"]),
    ],
)
def test_the_arguments_are_those_of_deepspeed(stage: int, form: str, first: list[str]) -> None:
    function = getattr(infinity, f"estimate_zero{stage}_model_states_mem_needs_all_{form}")
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*first, "num_gpus_per_node", "num_nodes", "additional_buffer_factor"]
    assert [each.default for each in list(parameters.values())[len(first) :]] == [1, 1, 1.5]


def test_shared_parameters_count_once_and_a_meta_model_will_do() -> None:
    with torch.device("meta"):
        model = Model()
    assert count(model) == (1000 + 4 * 550, 1000)
    assert count(Model()) == count(model)


def test_stage_two_keeps_all_parameters_gathered() -> None:
    alone, offloaded = needs_of(2, 8 * B, 8 * B, 4, 2, 1.5)
    assert (alone.device_bytes, alone.host_bytes, alone.nvme_bytes) == (16 * B + 16 * B, 0, 0)
    shards = 2 * 8 * B // 8
    assert (offloaded.device_bytes, offloaded.host_bytes) == (16 * B + shards, int(1.5 * 4 * 16 * B))


def test_stage_three_holds_two_groups_and_shards_the_rest() -> None:
    needs = {(each.strategy.parameters, each.strategy.optimizer): each for each in needs_of(3, 8 * B, B, 4, 2, 1.0)}
    assert needs["none", "none"].device_bytes == 16 * B + 4 * B
    assert needs["none", "cpu"].device_bytes == 2 * B + 4 * B
    for placement in (("cpu", "cpu"), ("nvme", "nvme")):
        assert needs[placement].device_bytes == 4 * B
    optimizer_only = needs["none", "nvme"]
    assert optimizer_only.device_bytes == 4 * B + 4 * B  # gradients are there until the step
    assert optimizer_only.host_bytes == 4 * (6 * B + pinned.comfortable_bytes(0, 12 * pinned.SUB_GROUP_NUMEL_DEFAULT))
    assert needs["cpu", "cpu"].host_bytes == 4 * 16 * B
    nvme = needs["nvme", "nvme"]
    assert nvme.nvme_bytes == 4 * 12 * B
    pool = nvme.host_bytes - 4 * 4 * B
    assert 4 * 5 * 2 * B // 8 <= pool <= 4 * 8 * 2 * B // 8


def test_a_line_per_placement_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    infinity.estimate_zero3_model_states_mem_needs_all_live(Model(), num_gpus_per_node=2, num_nodes=3)
    infinity.estimate_zero2_model_states_mem_needs_all_cold(total_params=3e9, num_gpus_per_node=8)
    out = capsys.readouterr().out
    assert "3.2k parameters" in out
    assert "3 nodes with 2 GPUs each" in out
    assert "offload_param=nvme, offload_optimizer=nvme" in out
    assert "Stage 2, 3.0B parameters, 1 node with 8 GPUs each" in out
    assert out.count("offload_param=") == 5 + 2


@pytest.mark.parametrize("numbers", [(0, 1, 1, 1), (1, 1, 0, 1), (1, 1, 1, -1)])
def test_counts_below_one_are_refused(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        needs_of(3, *numbers, 1.5)
