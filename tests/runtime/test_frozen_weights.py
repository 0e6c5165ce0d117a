"""Frozen weights stay in the user's files: the training is that in memory, nothing is written, and files that change are found
out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from adapted import CASES, Case
from quiet import come_to_rest
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
from infinity.errors import CheckpointError, ConfigError, InfinityError, IntegrityError, IoError, StoreError

PAGE = 4096


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_in_memory(name: str, nvme_path: Path) -> None:
    moved = adapted.check(CASES[name], nvme_path / "weights", nvme_path / "swap")
    if CASES[name].state_on == "none":
        assert moved["written"] == moved["arena"] == 0
    assert moved["read"] > 0
    assert not list((nvme_path / "swap").iterdir())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", adapted.FOUR_BITS)
def test_four_bits_train_as_in_memory(name: str, nvme_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: tools/test_integration.sh transformers")
    moved = adapted.check(adapted.FOUR_BITS[name], nvme_path / "weights", nvme_path / "swap")
    assert moved["written"] == moved["arena"] == 0


INT8, NF4 = "blocks.1.first.base", "blocks.1.first.base.weight"
STATE = f"{NF4}.quant_state.bitsandbytes__nf4"


def stating(tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    state = json.loads(bytes(tensors[STATE].tolist())) | changes
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any]]] = {
    "scales of other rows": ("int8", lambda t: t.update({f"{INT8}.SCB": t[f"{INT8}.SCB"][:-1].clone()})),
    "a format of its own": ("int8", lambda t: t[f"{INT8}.weight_format"].add_(1)),
    "scales of a matrix without codes": ("int8", lambda t: t.update({NF4: t[NF4].bfloat16()})),
    "blocks of nothing": ("nf4", lambda t: stating(t, blocksize=0)),
    "blocks of any size": ("nf4", lambda t: stating(t, blocksize=100)),
    "another kind": ("nf4", lambda t: stating(t, quant_type="fp4")),
    "another shape": ("nf4", lambda t: stating(t, shape=[-72, -144])),
    "another table": ("nf4", lambda t: t[f"{NF4}.quant_map"].mul_(2)),
    "no table": ("nf4", lambda t: t.pop(f"{NF4}.quant_map")),
    "half of the scales": ("nf4", lambda t: t.update({f"{NF4}.absmax": t[f"{NF4}.absmax"][::2].clone()})),
    "scales that are not numbers": ("nf4 twice", lambda t: stating(t, nested_offset=float("nan"))),
    "scales in blocks of nothing": ("nf4 twice", lambda t: stating(t, nested_blocksize=0)),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("damage", DAMAGE)
def test_codes_that_cannot_be_decoded_are_refused(damage: str, nvme_path: Path) -> None:
    coded, spoil = DAMAGE[damage]
    if coded != "int8":
        pytest.importorskip(
            "bitsandbytes", reason="bitsandbytes is not installed: tools/test_integration.sh transformers"
        )
    case = Case(coded=coded)
    tensors = load_file(adapted.save(nvme_path / "weights", case) / "model.safetensors")
    spoil(tensors)
    adapted.write(nvme_path / "weights", tensors, case)
    with pytest.raises(CheckpointError, match=f"{NF4}, which is in 4 or 8 bits, don't fit together"):
        adapted.make(case, nvme_path / "weights", str(nvme_path / "swap"))


@pytest.mark.usefixtures("one_rank")
def test_codes_without_scales_are_no_weights(nvme_path: Path) -> None:
    case = Case(coded="int8")
    tensors = load_file(adapted.save(nvme_path / "weights", case) / "model.safetensors")
    bare = {name: tensor for name, tensor in tensors.items() if "SCB" not in name and "format" not in name}
    adapted.write(nvme_path / "weights", bare, case)
    with pytest.raises(CheckpointError, match="is in I8, but the file has no information"):
        adapted.make(case, nvme_path / "weights", str(nvme_path / "swap"))


@pytest.mark.usefixtures("one_rank")
def test_codes_are_decoded_where_the_model_is_in_memory(nvme_path: Path) -> None:
    case = Case(coded="int8")
    outcomes = []
    for weights in (adapted.save(nvme_path / "a", case), adapted.save_decoded(nvme_path / "b", case)):
        with adapted.make(case, weights, None) as engine:
            outcomes.append(adapted.train(engine, case))
    assert outcomes[0] == outcomes[1]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, []), pytest.param(3, ["all"], marks=pytest.mark.long)])
def test_several_ranks_train_as_in_memory(ranks: int, cases: list[str], forked_ranks: Any, nvme_path: Path) -> None:
    forked_ranks(Path(adapted.__file__), str(nvme_path / "weights"), str(nvme_path / "swap"), *cases, ranks=ranks)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "case",
    [
        Case(width=512),
        Case(width=512, dtype=torch.float32),
        Case(width=512, state_on="nvme"),
        Case(width=512, state_on="nvme", update="step"),
        Case(width=512, state_on="nvme", clipping=1.0, update="forward"),
    ],
    ids=str,
)
def test_a_step_reads_the_frozen_weights_at_most_twice(case: Case, nvme_path: Path) -> None:
    """Its counters say what the plan says: less what stays staged, more what lies on pages that groups share."""
    weights = adapted.save(nvme_path / "weights", case)
    pinned = "12MiB" if case.state_on == "none" and case.dtype is torch.bfloat16 else "28MiB"
    with adapted.make(case, weights, str(nvme_path), pinned_bytes_max=pinned) as engine:
        assert engine.swap is not None
        adapted.train(engine, case)
        moved = []
        for number in range(4):
            engine.backward(engine(adapted.tokens(number)))
            engine.swap.paging.parameters.look_ahead()
            come_to_rest(engine.swap)
            moved.append(engine.swap.stats().read_bytes)
            engine.step()
        read, _ = engine.swap.step_bytes()
        steps = [after - before for before, after in itertools.pairwise(moved)]
        assert steps[1:] == [read, read]
        frozen = sum(p.numel() for p in engine.module.parameters() if not p.requires_grad) * case.dtype.itemsize
        trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad) * (case.state_on == "nvme")
        assert frozen // 4 < read or pinned == "28MiB"  # where less would do, the next test looks
        assert read <= 2 * frozen + 2 * PAGE * (2 * adapted.BLOCKS + 2) + 14 * trained + 16 * PAGE


@pytest.mark.usefixtures("one_rank")
def test_frozen_weights_that_fit_into_the_pool_are_read_once(nvme_path: Path) -> None:
    case = Case(evaluate=True, accumulation=2)
    weights = adapted.save(nvme_path / "weights", case)
    with adapted.make(case, weights, str(nvme_path)) as engine:
        assert engine.swap is not None
        adapted.train(engine, case)
        before = engine.swap.stats().read_bytes
        assert before > 0
        adapted.train(engine, case)
        assert engine.swap.stats().read_bytes == before


@pytest.mark.usefixtures("one_rank")
def test_no_place_has_to_be_named_where_nothing_is_written(nvme_path: Path) -> None:
    case = Case(files=2)
    weights = adapted.save(nvme_path / "weights", case)
    before = sorted(nvme_path.rglob("*"))
    with adapted.make(case, weights, None) as engine:
        expected = adapted.train(engine, case)
    with adapted.make(case, weights, "") as engine:
        assert adapted.train(engine, case) == expected
        assert engine.swap is not None
        assert engine.swap.stats().written_bytes == 0
    assert sorted(nvme_path.rglob("*")) == before
    with pytest.raises(StoreError, match=r"must rest on NVMe, and no nvme_path says where"):
        adapted.make(case, None, "")
    with pytest.raises(ConfigError, match=r"offload_optimizer\.nvme_path: missing"):
        adapted.make(dataclasses.replace(case, state_on="nvme"), weights, "")


class Holding(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens)
        return loss


@pytest.mark.usefixtures("one_rank")
def test_files_may_be_those_of_the_model_inside(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a LightningModule holds a model. What is missing or unknown is named as ever."""
    case, model = Case(files=2), adapted.Model
    weights = adapted.save(nvme_path / "weights", case)
    with adapted.make(case, weights, None) as engine:
        expected = adapted.train(engine, case), adapted.values(engine)
    monkeypatch.setattr(adapted, "Model", lambda width: Holding(Holding(model(width))))
    with adapted.make(case, weights, "") as engine:
        assert adapted.train(engine, case) == expected[0]
        values = adapted.values(engine)
        assert engine.swap is not None
        assert engine.swap.stats().written_bytes == 0
    assert [name for name in expected[1] if not torch.equal(values[f"model.model.{name}"], expected[1][name])] == []
    tensors = load_file(weights / "part-0.safetensors")
    tensors["blocks.7.norm.bias"] = tensors.pop("blocks.1.norm.bias")
    save_file(tensors, weights / "part-0.safetensors")
    index = weights / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("blocks.1.norm.bias", "blocks.7.norm.bias"))
    with pytest.raises(
        CheckpointError, match=r"missing model\.model\.blocks\.1\.norm\.bias; unknown blocks\.7\.norm\.bias$"
    ):
        adapted.make(case, weights, "")


@pytest.mark.usefixtures("one_rank")
def test_values_can_be_looked_at_and_loaded_but_not_changed(nvme_path: Path) -> None:
    case = Case()
    weights = adapted.save(nvme_path / "weights", case)
    written = (weights / "model.safetensors").read_bytes()
    with adapted.make(case, weights, str(nvme_path / "swap")) as engine:
        there = adapted.values(engine)
        engine.module.load_state_dict({name: value.clone() for name, value in engine.module.state_dict().items()})
        frozen = engine.module.blocks[1].first.base.weight
        with pytest.raises(InfinityError, match=r"blocks\.1\.first\.base\.weight is frozen and stored in"):
            frozen.data.zero_()
        assert all(torch.equal(there[name], value) for name, value in adapted.values(engine).items())
        adapted.train(engine, case)
    assert (weights / "model.safetensors").read_bytes() == written


def spoil(path: Path, how: str) -> None:
    if how == "some bits":
        data = bytearray(path.read_bytes())
        for at in range(3000, len(data), 1 << 16):  # all over it, as something of it is in memory
            data[at] ^= 1
        with path.open("r+b") as file:
            file.write(data)
            os.fsync(file.fileno())
    else:
        os.truncate(path, path.stat().st_size // 2)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("some bits", IntegrityError, r"model\.safetensors.*its first read found.*changed meanwhile"),
        ("its end", IoError, r"model\.safetensors.*the file ends before"),
    ],
)
def test_a_file_that_changes_is_found_out(how: str, error: type[Exception], words: str, nvme_path: Path) -> None:
    case = Case(width=512)
    weights = adapted.save(nvme_path / "weights", case)
    with adapted.make(case, weights, str(nvme_path / "swap"), pinned_bytes_max="12MiB") as engine:
        adapted.train(engine, case)
        spoil(weights / "model.safetensors", how)
        with pytest.raises(error, match=words):
            adapted.train(engine, case)


@pytest.mark.usefixtures("one_rank")
def test_a_file_that_changes_before_its_first_read_is_found_out(nvme_path: Path) -> None:
    """Also where its time of change was set back; to be removed does it no harm."""
    case = Case()
    weights = adapted.save(nvme_path / "weights", case)
    file = weights / "model.safetensors"
    before = file.stat()
    with adapted.make(case, weights, str(nvme_path / "swap")) as engine:
        spoil(file, "some bits")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(
            IntegrityError, match=r"model\.safetensors was changed after it was opened and before it was read"
        ):
            adapted.train(engine, case)
    adapted.save(nvme_path / "weights", case)
    with adapted.make(case, weights, str(nvme_path / "swap")) as engine:
        file.unlink()
        adapted.train(engine, case)


@pytest.mark.usefixtures("one_rank")
def test_files_that_are_not_as_they_should_be_are_refused_before_anything_is_made(nvme_path: Path) -> None:
    case = Case(files=2)
    weights = adapted.save(nvme_path / "weights", case)
    swap = nvme_path / "swap"
    whole = (weights / "part-1.safetensors").read_bytes()
    (weights / "part-1.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors is damaged"):
        adapted.make(case, weights, str(swap))
    (weights / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors is damaged .*No such file"):
        adapted.make(case, weights, str(swap))
    assert not swap.exists() or not list(swap.iterdir())


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_hold_all_weights_and_go_on(nvme_path: Path, tmp_path: Path) -> None:
    case = Case()
    weights = adapted.save(nvme_path / "weights", case)
    with adapted.make(case, weights, str(nvme_path / "swap")) as engine:
        adapted.train(engine, case)
        engine.save_checkpoint(str(tmp_path))
        expected = adapted.train(engine, case), adapted.values(engine)
    with adapted.make(case, weights, str(nvme_path / "swap")) as engine:
        engine.load_checkpoint(str(tmp_path))
        found = adapted.train(engine, case), adapted.values(engine)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.usefixtures("one_rank")
def test_an_arena_checkpoint_is_refused_unless_the_config_names_it(nvme_path: Path, tmp_path: Path) -> None:
    case = Case(state_on="nvme")
    weights = adapted.save(nvme_path / "weights", case)
    with adapted.make(case, weights, str(nvme_path / "swap")) as engine:
        adapted.train(engine, case)
        with pytest.raises(ConfigError, match=r"frozen weights stay in files of yours"):
            engine.save_checkpoint(str(tmp_path), format="arena")
    with adapted.make(case, weights, str(nvme_path / "swap"), checkpoint_format="arena") as engine:
        adapted.train(engine, case)
        engine.save_checkpoint(str(tmp_path))


@pytest.mark.usefixtures("one_rank")
def test_many_trained_parameters_rest_where_they_are_asked_to(nvme_path: Path) -> None:
    """Where only an embedding is frozen, the others are no adapters."""
    weights = adapted.save(nvme_path / "weights", Case(dtype=torch.float32))
    with infinity.init_empty():
        model = adapted.Model(adapted.WIDTH).requires_grad_(True)
        model.embedding.requires_grad_(False)
    place = {"device": "nvme", "nvme_path": str(nvme_path / "swap")}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = infinity.initialize(model=model, config=config, weights=weights, model_parameters=model.parameters())
    with engine:
        assert engine.swap is not None
        assert engine.swap.paged.foreign_names == {"embedding.weight"}
        assert engine.swap.stats().arena_bytes > 0
        adapted.train(engine, Case())


@pytest.mark.usefixtures("one_rank")
def test_a_durable_run_keeps_all_in_its_own_files(nvme_path: Path) -> None:
    case = Case(state_on="nvme")
    weights = adapted.save(nvme_path / "weights", case)
    with adapted.make(case, weights, str(nvme_path), durability="step") as engine:
        assert engine.swap is not None
        assert not engine.swap.paged.foreign_names
        adapted.train(engine, case)


@pytest.mark.usefixtures("one_rank")
def test_a_model_sharded_by_hand_reads_them_too(nvme_path: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    weights = adapted.save(nvme_path / "weights", Case())
    torch.manual_seed(0)
    model = adapted.Model(adapted.WIDTH)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with infinity.SwapManager(nvme_path / "swap", pinned_bytes_max="9MiB") as swap:
        swap.page(model, infinity.PagingOptions(hold_state=True), weights=weights)
        assert len(swap.paged.foreign_names) == sum(not p.requires_grad for p in model.parameters())
        loss = model(adapted.tokens(0))
        loss.backward()
        assert swap.stats().written_bytes == 0
        assert swap.stats().read_bytes > 0
