"""Parameters without dimensions, or without elements, train as all others do, and are what they were to the model and to
files of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scalars
import torch
from safetensors.torch import load_file
from scalars import CLIPPING, SETTINGS, batches, make, model, train, values
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.cli import ckpt

SCALARS = {"blocks.0.gain", "blocks.1.gain", "blocks.0.shift", "blocks.1.shift", "logit_scale", "fixed"}

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("update", ["forward", "step"])
def test_they_train_as_under_plain_torch(update: str, nvme_path: Path) -> None:
    plain = model()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], fused=True, **SETTINGS)
    expected = []
    for x in batches(4):
        loss = plain(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), norm.item()))
    for path in (nvme_path, None):
        chosen = model()
        of_all = torch.optim.AdamW(chosen.parameters(), fused=True, **SETTINGS)  # frozen ones, too
        with make(path, own={"update": update}, model=chosen, optimizer=of_all) as engine:
            assert train(engine, 0, 4) == expected
            assert values(engine) == {name: p.flatten().tolist() for name, p in plain.named_parameters()}
            assert engine.module.logit_scale.shape == (1,), "sharded, it is a row"


@pytest.mark.parametrize("when", ["as the gradient comes", "after it"])
@pytest.mark.parametrize("on_nvme", [True, False])
def test_hooks_and_ordinary_state_dicts_are_theirs(on_nvme: bool, when: str, nvme_path: Path) -> None:
    def hooked() -> scalars.Scaled:
        made = model()
        for p in (made.logit_scale, made.blocks[0].gain):
            if when == "as the gradient comes":
                p.register_hook(lambda grad: grad / 4)
            else:
                p.register_post_accumulate_grad_hook(lambda p: p.grad.div_(4) and None)
        return made

    plain, chosen = hooked(), hooked()
    optimizer, paged = (torch.optim.SGD(made.parameters(), lr=0.1) for made in (plain, chosen))
    with torch.no_grad():
        plain.fixed.fill_(1.25)
        plain.blocks[1].shift.fill_(-0.5)
    with make(nvme_path if on_nvme else None, model=chosen, optimizer=paged) as engine:
        engine.load_state_dict({name: p for name, p in plain.state_dict().items() if p.numel()}, strict=False)
        for x in batches(2):
            plain(x).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
        train(engine, 0, 2)
        assert values(engine) == {name: p.flatten().tolist() for name, p in plain.named_parameters()}


def test_a_loop_of_ones_own_is_told_to_freeze_what_has_no_elements(nvme_path: Path) -> None:
    sharded = fully_shard(scalars.Nothing(0, 12))
    with infinity.SwapManager(nvme_path) as swap, pytest.raises(infinity.ConfigError, match="weight has no elements"):
        swap.page(sharded)


def test_two_ranks_agree_with_memory(forked_ranks: Any, nvme_path: Path) -> None:
    assert forked_ranks(Path(scalars.__file__), str(nvme_path)).stdout.count("equal") == 2


@pytest.mark.parametrize("form", ["dcp", "arena"])
def test_checkpoints_hold_them_and_files_of_weights_have_their_shape(
    form: str, nvme_path: Path, tmp_path: Path
) -> None:
    with make(nvme_path) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "all", tag="here", format=form)
        engine.finish_checkpoint()
        engine.save_16bit_model(tmp_path / "model")
        expected = values(engine), train(engine, 2, 2)
    with make(nvme_path) as engine:
        engine.load_checkpoint(tmp_path / "all")
        assert (values(engine), train(engine, 2, 2)) == expected
    assert ckpt.main(["consolidate", str(tmp_path / "all"), str(tmp_path / "taken")]) == 0
    names = model().state_dict()
    for folder in ("model", "taken"):
        stored = load_file(tmp_path / folder / "model.safetensors")
        assert {name for name, tensor in stored.items() if tensor.dim() == 0} == SCALARS - {"blocks.1.gain"}
        assert all(tensor.shape == names[name].shape for name, tensor in stored.items())
        with make(nvme_path, weights=tmp_path / folder) as engine:
            assert values(engine) == expected[0]
    state = infinity.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "all")
    model().load_state_dict(state)  # raises where a shape differs


def test_commits_hold_them(nvme_path: Path) -> None:
    durable = {"durability": "step"}
    with make(nvme_path, own=durable) as engine:
        train(engine, 0, 2)
        expected = values(engine)
    with make(nvme_path, own=durable, resume=True) as engine:
        assert values(engine) == expected
        resumed = train(engine, 2, 2)
    with make(None) as engine:
        assert train(engine, 0, 4)[2:] == resumed
