"""A step that failed half-way is never repeated or stored as if nothing had happened: only a load makes the values whole."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import infinity
from infinity.aio import IoEngine
from infinity.swap.stager import Stager

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def engine(nvme_path: Path) -> Iterator[infinity.Engine]:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 4096,
        },
        "infinity": {"pinned_bytes_max": "16MiB", "update": "step"},
    }
    made, *_ = infinity.initialize(model=model(), config=config)
    yield made
    made.close()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))


def step(engine: infinity.Engine) -> float:
    loss = engine(torch.ones(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def failing_at(number: int) -> Any:
    """An acquire of sub-groups of which the one with this number fails."""
    acquire, seen = Stager.acquire, iter(range(1000))

    def acquire_or_fail(self: Stager, chunk: Any) -> Any:
        if chunk.name.startswith("sub-group") and next(seen) == number:
            raise infinity.IoError("read of rank0.arena: EIO", errno.EIO, "read")
        return acquire(self, chunk)

    return acquire_or_fail


def test_a_step_that_failed_half_way_is_not_repeated(
    engine: infinity.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(engine)
    engine.save_checkpoint(tmp_path)
    expected = [step(engine) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Stager, "acquire", failing_at(2))
        with pytest.raises(infinity.IoError):
            step(engine)
    for use in (
        engine.optimizer.step,
        engine.step,
        lambda: engine(torch.ones(2, 8)),
        lambda: engine.save_checkpoint(tmp_path, tag="torn"),
        lambda: engine.save_16bit_model(tmp_path / "model"),
        lambda: torch.save(engine.optimizer.state_dict(), io.BytesIO()),
        lambda: torch.save(engine.module.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(infinity.InfinityError, match=r"torn.*EIO.*load a checkpoint"):
            use()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["global_step1", "latest"]
    engine.load_checkpoint(tmp_path)
    assert [step(engine) for _ in range(2)] == expected


@pytest.mark.parametrize("number", range(3))
def test_values_that_were_half_set_by_hand_are_torn(
    engine: infinity.Engine, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight is a copy and its remainder: one may be new, and the other not."""
    step(engine)
    engine.save_checkpoint(tmp_path)
    expected = step(engine)
    acquire, seen = Stager.acquire, iter(range(1000))

    def acquire_or_fail(self: Stager, chunk: Any) -> Any:
        if next(seen) == number:
            raise infinity.IoError("read of rank0.arena: EIO", errno.EIO, "read")
        return acquire(self, chunk)

    weight = engine.module[1][0].weight.data._local_tensor  # type: ignore[index, union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(Stager, "acquire", acquire_or_fail)
        patch.setattr("infinity.swap.values.RANGE_NUMEL", 1000)
        try:
            weight.view(-1)[1:4000].copy_(torch.full((3999,), 1 / 3))
        except infinity.IoError:
            with pytest.raises(infinity.InfinityError, match=r"torn.*setting.*EIO"):
                step(engine)
    engine.load_checkpoint(tmp_path)
    assert step(engine) == expected
    assert next(seen) > number


def test_a_write_that_failed_in_the_background_is_not_forgotten(
    engine: infinity.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(engine)
    engine.save_checkpoint(tmp_path)
    expected = step(engine)
    assert engine.swap is not None
    engine.swap.flush()
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    wait = IoEngine.wait

    def wait_and_fail_once(self: IoEngine, transfers: Any, **how: Any) -> None:
        wait(self, transfers, **how)
        if any(chunk.transfers is transfers for chunk in engine.swap.stager._writing):  # type: ignore[union-attr]
            monkeypatch.setattr(IoEngine, "wait", wait)
            raise infinity.IoError("write of rank0.arena: EIO", errno.EIO, "write")

    monkeypatch.setattr(IoEngine, "wait", wait_and_fail_once)

    def step_and_flush() -> None:
        engine.step()
        engine.swap.flush()  # type: ignore[union-attr]

    with pytest.raises(infinity.IoError, match="EIO"):
        step_and_flush()
    with pytest.raises(infinity.InfinityError, match=r"torn.*EIO.*load a checkpoint"):
        engine(torch.ones(2, 8))
    engine.load_checkpoint(tmp_path)
    assert step(engine) == expected


@pytest.mark.parametrize("when", ["start", "wait"])
def test_what_was_summed_and_not_written_is_unknown(
    engine: infinity.Engine, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a range of it can be set, whose first and last pages are read before."""
    step(engine)
    assert engine.swap is not None
    swap = engine.swap
    swap.flush()
    start, wait, lost = IoEngine.start, IoEngine.wait, []

    def start_or_fail(self: IoEngine, requests: Any, **more: Any) -> Any:
        if more.get("sums_by_caller") and requests[0].operation == "write" and not lost:
            lost.append(requests[0].offset)
            if when == "start":
                raise infinity.IoError("write of rank0.arena: EIO", errno.EIO, "write")
            transfers = start(self, requests, **more)
            lost.append(transfers)
            return transfers
        return start(self, requests, **more)

    def wait_or_fail(self: IoEngine, transfers: Any, **how: Any) -> None:
        wait(self, transfers, **how)
        if transfers in lost[1:]:
            raise infinity.IoError("write of rank0.arena: EIO", errno.EIO, "write")

    monkeypatch.setattr(IoEngine, "start", start_or_fail)
    monkeypatch.setattr(IoEngine, "wait", wait_or_fail)

    def step_and_flush() -> None:
        step(engine)
        swap.flush()

    with pytest.raises(infinity.IoError, match="EIO"):
        step_and_flush()
    (sub,) = [each for each in swap.paged.sub_groups if each.extent.offset == lost[0]]
    sums = swap._open().arena.checksums(sub.extent.offset, sub.layout.nbytes)
    assert sums == bytes(len(sums))
    weight = engine.module[1][0].weight.data._local_tensor  # type: ignore[index, union-attr]
    weight.view(-1)[1:100].copy_(torch.full((99,), 1 / 3))


def test_a_load_that_failed_half_way_leaves_nothing_to_go_on_from(
    engine: infinity.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(engine)
    engine.save_checkpoint(tmp_path)
    data = max((tmp_path / "global_step1").glob("*.distcp"), key=lambda file: file.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(infinity.CheckpointError, match="bytes instead of"):
        engine.load_checkpoint(tmp_path)
    step(engine)  # nothing was touched
    with pytest.raises(BaseException):  # noqa: B017
        engine.load_checkpoint(tmp_path, verify=False)
    with pytest.raises(infinity.InfinityError, match=r"torn.*loading a checkpoint"):
        step(engine)
    data.write_bytes(whole)
    engine.load_checkpoint(tmp_path)
    step(engine)


def test_state_dicts_make_the_values_whole_in_a_loop_of_ones_own(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = model()
    for module in sharded[1]:  # type: ignore[index]
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(sharded, infinity.PagingOptions(sub_group_size=4096))
        optimizer = infinity.PagedAdamW(sharded.parameters(), swap=swap)

        def own_step() -> float:
            loss = sharded(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        own_step()
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        weights, moments = get_state_dict(sharded, optimizer)
        weights = {name: value.full_tensor() + 0 for name, value in weights.items()}
        moments["state"] = {
            name: {key: value.full_tensor() + 0 if key != "step" else value.clone() for key, value in state.items()}
            for name, state in moments["state"].items()
        }
        expected = own_step()
        with monkeypatch.context() as patch:
            patch.setattr(Stager, "acquire", failing_at(1))
            with pytest.raises(infinity.IoError):
                own_step()
        with pytest.raises(infinity.InfinityError, match="torn"):
            own_step()
        set_state_dict(
            sharded,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=moments,
            options=StateDictOptions(full_state_dict=True),
        )
        optimizer.zero_grad()
        assert own_step() == expected


def test_a_plain_tensor_whose_write_failed_is_not_read(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.tensors.register("mine", torch.ones(4096))
        swap.flush()
        with swap.tensors.update("mine") as mine:
            mine.add_(1)

        def fail(self: IoEngine, transfers: Any, **how: Any) -> None:
            raise infinity.IoError("write of rank0.arena: EIO", errno.EIO, "write")

        with monkeypatch.context() as patch:
            patch.setattr(IoEngine, "wait", fail)
            with pytest.raises(infinity.IoError):
                swap.flush()
        with pytest.raises(infinity.InfinityError, match=r"mine.*lost.*EIO"), swap.tensors.use("mine"):
            pass
