"""Buffers of collectives are lent once at a time, come back by themselves, and are made in the first steps only."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import steady_buffers
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from infinity.fsdp2.buffers import ReusedBuffers, _Gather, _Reduction, reuse_buffers
from infinity.fsdp2.sharding import sharded_groups

IDLE_BYTES_MAX = 4000


@given(st.lists(st.one_of(st.integers(1, 900), st.sampled_from(["drop first", "drop last", "keep a view"]))))
def test_nobody_s_memory_is_lent_again(events: list[int | str]) -> None:
    buffers = ReusedBuffers(IDLE_BYTES_MAX)
    held: list[tuple[torch.Tensor, float]] = []
    for number, event in enumerate(events):
        if isinstance(event, int):
            lent = buffers.lend(event, torch.float32)
            assert lent.shape == (event,)
            held.append((lent.fill_(number), float(number)))
            del lent
        elif held and event == "keep a view":
            tensor, value = held.pop()
            held.append((tensor[:1], value))
            del tensor
        elif held:
            held.pop(0 if event == "drop first" else -1)
        assert all(bool((tensor == value).all()) for tensor, value in held)
        assert buffers.idle_bytes <= IDLE_BYTES_MAX


def test_a_block_comes_back_with_its_last_view() -> None:
    buffers = ReusedBuffers(IDLE_BYTES_MAX)
    lent = buffers.lend(100, torch.float32)
    view = lent[50:].view(torch.bfloat16)
    del lent
    assert buffers.idle_bytes == 0
    del view
    assert buffers.idle_bytes == 400
    assert buffers.lend(150, torch.bfloat16).shape == (150,)
    assert buffers.made == 1


def test_blocks_that_fit_nothing_any_more_leave() -> None:
    buffers = ReusedBuffers(IDLE_BYTES_MAX)
    small = [buffers.lend(250, torch.float32) for _ in range(4)]
    del small
    assert buffers.idle_bytes == IDLE_BYTES_MAX
    for _ in range(4):
        buffers.lend(800, torch.float32)
    assert buffers.made == 8
    buffers.lend(800, torch.float32)
    assert buffers.made == 8


@pytest.mark.usefixtures("one_rank")
def test_one_rank_reduces_in_place_and_makes_no_buffer_in_a_steady_step(nvme_path: Path) -> None:
    _, made = steady_buffers.train(nvme_path)
    assert made[-4:] == made[-4:-3] * 4


def test_two_ranks_make_no_buffer_in_a_steady_step(forked_ranks: Any, nvme_path: Path) -> None:
    assert forked_ranks(Path(steady_buffers.__file__), str(nvme_path)).stdout.count("steady") == 2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [_Gather, _Reduction])
@pytest.mark.parametrize("fails", [False, True])
def test_the_backend_s_threads_keep_no_block(kind: Any, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = ReusedBuffers(IDLE_BYTES_MAX)
    comm = _Gather(buffers) if kind is _Gather else _Reduction(buffers, alone=False)
    kept: list[torch.Tensor] = []

    def collective(self: Any, output_tensor: Any, input_tensor: Any, *_: Any, **__: Any) -> None:
        kept.extend([output_tensor, input_tensor])  # as gloo's thread does, for a while
        output_tensor.copy_(input_tensor + 1)
        if fails:
            raise RuntimeError("a rank is gone")

    monkeypatch.setattr(kind.__base__, "__call__", collective)
    output, given = (comm.allocate((10,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    operation = {} if kind is _Gather else {"op": None}
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        comm(output[2:8], given.fill_(3)[4:], None, **operation)
    assert output[2:8].tolist() == [4.0] * 6
    del output, given
    gc.collect()  # the exception's frames
    assert buffers.idle_bytes == (0 if fails else 80), "gloo may still write to the blocks of a collective that failed"
    assert len(kept) == 2


@pytest.mark.usefixtures("one_rank")
def test_over_one_rank_a_reduction_is_no_copy_and_gradients_are_torch_s() -> None:
    torch.manual_seed(0)
    plain, model = nn.Linear(16, 16), nn.Linear(16, 16)
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    buffers = reuse_buffers(sharded_groups(model), alone=True)
    x = torch.randn(3, 16)
    for _ in range(2):  # the second is added to the first
        plain(x).square().sum().backward()
        model(x).square().sum().backward()
    assert model.weight.grad is not None and plain.weight.grad is not None
    assert torch.equal(model.weight.grad._local_tensor, plain.weight.grad)
    assert buffers.made <= 2, "one for both ends of each reduction"


@pytest.mark.usefixtures("one_rank")
def test_what_the_user_made_of_a_collective_stays() -> None:
    class Theirs(DefaultReduceScatter):
        pass

    model = fully_shard(nn.Linear(8, 8))
    theirs = Theirs()
    model.set_custom_reduce_scatter(theirs)
    reuse_buffers(sharded_groups(model), alone=True)
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    assert group._reduce_scatter_comm is theirs
