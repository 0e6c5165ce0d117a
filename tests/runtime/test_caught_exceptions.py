"""An exception is caught and the program continues as if the failed pass had never run, or gets an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity.runtime.engine_state import EngineState
from infinity.swap.paging import Paging

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 5
PLACES = {
    "memory": {"place": "none"},
    "step": {"update": "step"},
    "forward": {"update": "forward"},
    "forward, accumulated": {"update": "forward", "accumulation": 2},
    "backward": {"update": "backward"},
    "backward, durable": {"update": "backward", "durability": "step"},
    "forward, durable": {"update": "forward", "durability": "step"},
    "host memory, forward": {"place": "cpu", "update": "forward"},
    "host memory, backward": {"place": "cpu", "update": "backward"},
}


class OutOfMemory(Exception):
    """What a caught pass ends with."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out.float().square().mean()


def make(
    folder: Path,
    *,
    place: str = "nvme",
    update: str = "auto",
    accumulation: int = 1,
    resume: bool = False,
    lr_scheduler: Any = None,
    fp16: dict[str, Any] | None = None,
    **own: Any,
) -> infinity.Engine:
    offload = {"device": "nvme", "nvme_path": str(folder)} if place == "nvme" else {"device": place}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        **({"bf16": {"enabled": True}} if fp16 is None else {"fp16": {"enabled": True, **fp16}}),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 4096,
        },
        "infinity": {"pinned_bytes_max": "16MiB", "update": update, "wrap": ["Sequential"], **own},
    }
    engine, *_ = infinity.initialize(model=Model(), config=config, resume=resume, lr_scheduler=lr_scheduler)
    return engine


def batch(number: int) -> torch.Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(number))


def step(engine: infinity.Engine) -> list[float]:
    losses = []
    for number in range(engine.gradient_accumulation_steps()):
        loss = engine(batch(10 * engine.global_steps + number))
        engine.backward(loss)
        losses.append(loss.item())
    engine.step()
    return losses


def weights(engine: infinity.Engine) -> list[torch.Tensor]:
    return [parameter.full_tensor() + 0 for parameter in engine.parameters()]  # type: ignore[attr-defined]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def failing(module: nn.Module, *, backward: bool = False) -> Iterator[None]:
    """In the block, the module's forward (or its backward) fails."""

    def fail(*args: Any) -> None:
        raise OutOfMemory

    def fail_later(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = module.register_forward_hook(fail_later if backward else fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("way", PLACES)
@pytest.mark.parametrize("at", [0, 2])
def test_a_failed_forward_is_as_if_it_had_never_been(way: str, at: int, nvme_path: Path) -> None:
    with make(nvme_path / "right", **PLACES[way]) as engine:
        expected = [step(engine) for _ in range(STEPS)]
        right = weights(engine)
    with make(nvme_path / "caught", **PLACES[way]) as engine:
        found = []
        for number in range(STEPS):
            if number in (0, 2):
                with failing(engine.module.blocks[at]), pytest.raises(OutOfMemory):  # type: ignore[index, union-attr]
                    engine(batch(99))
            found.append(step(engine))
        assert found == expected
        assert same(weights(engine), right)


@pytest.mark.parametrize("way", [way for way in PLACES if "backward" not in way])
def test_a_failed_backward_is_dropped_with_its_gradients(way: str, nvme_path: Path) -> None:
    with make(nvme_path / "right", **PLACES[way]) as engine:
        expected = [step(engine) for _ in range(STEPS)]
        right = weights(engine)
    with make(nvme_path / "caught", **PLACES[way]) as engine:
        found = []
        for number in range(STEPS):
            if number in (0, 2):
                for _ in range(engine.gradient_accumulation_steps() - 1):
                    engine.backward(engine(batch(98)))
                with failing(engine.module.blocks[1], backward=True):  # type: ignore[index, union-attr]
                    loss = engine(batch(99))
                    with pytest.raises(OutOfMemory):
                        engine.backward(loss)
                engine.set_gradient_accumulation_boundary(True)
                for use in (lambda: engine.backward(engine(batch(97))), engine.step):
                    with pytest.raises(infinity.InfinityError, match=r"part of the model.*OutOfMemory.*zero_grad"):
                        use()
                engine.zero_grad()
            found.append(step(engine))
        assert found == expected
        assert same(weights(engine), right)


def test_a_backward_that_updated_a_part_is_torn_and_resumed(nvme_path: Path) -> None:
    with make(nvme_path / "right", update="backward") as engine:
        expected = [step(engine) for _ in range(STEPS)]
    engine = make(nvme_path / "torn", update="backward", durability="step")
    found = [step(engine) for _ in range(2)]
    with failing(engine.module.blocks[1], backward=True):  # type: ignore[index, union-attr]
        loss = engine(batch(99))
        with pytest.raises(OutOfMemory):
            engine.backward(loss)
    for use in (engine.zero_grad, engine.step, engine.commit, lambda: engine(batch(0))):
        with pytest.raises(infinity.InfinityError, match=r"torn.*a backward \(OutOfMemory\).*resume=True"):
            use()
    engine.close()
    with make(nvme_path / "torn", update="backward", durability="step", resume=True) as engine:
        assert found + [step(engine) for _ in range(STEPS - 2)] == expected


@pytest.mark.parametrize("way", [way for way in PLACES if "backward" not in way])
def test_a_failed_evaluation_between_backward_and_step_changes_nothing(way: str, nvme_path: Path) -> None:
    with make(nvme_path / "right", **PLACES[way]) as engine:
        for _ in range(3):
            step(engine)
        norm, right = engine.get_global_grad_norm(), weights(engine)
    with make(nvme_path / "caught", **PLACES[way]) as engine:
        for number in range(3):
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(batch(10 * number + micro)))
            engine.eval()
            with torch.no_grad(), failing(engine.module.blocks[1]), pytest.raises(OutOfMemory):  # type: ignore[index, union-attr]
                engine.module(batch(99))
            engine.train()
            engine.step()
        assert engine.get_global_grad_norm() == norm
        assert same(weights(engine), right)


@pytest.mark.parametrize("what", ["commit", "arena", "dcp"])
def test_what_is_kept_after_a_caught_exception_can_be_gone_on_from(what: str, nvme_path: Path, tmp_path: Path) -> None:
    own = {"durability": "step"} if what == "commit" else {}
    with make(nvme_path / "run", **own) as engine:
        found = [step(engine) for _ in range(2)]
        with failing(engine.module.blocks[1]), pytest.raises(OutOfMemory):  # type: ignore[index, union-attr]
            engine(batch(99))
        if what == "commit":
            engine.commit()
        else:
            engine.save_checkpoint(tmp_path, format=what)
    with make(nvme_path / "run", resume=what == "commit", **own) as engine:
        if what != "commit":
            engine.load_checkpoint(tmp_path)
        found += [step(engine) for _ in range(2)]
    with make(nvme_path / "right") as engine:
        assert found == [step(engine) for _ in range(4)]


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_a_loop_of_ones_own_goes_on_too(update: Any, nvme_path: Path) -> None:
    """Without `reset_iter_state`, which it may not know."""

    def losses(fails: bool) -> list[float]:
        model = Model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
            swap.page(
                model, infinity.PagingOptions(sub_group_size=4096, param_persistence_threshold=100, update=update)
            )
            optimizer = infinity.PagedAdamW(model.parameters(), swap=swap, lr=0.01)
            found = []
            for number in range(STEPS):
                if fails and number in (0, 2):
                    with failing(model.blocks[1]), pytest.raises(OutOfMemory):
                        model(batch(99))
                loss = model(batch(number))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_a_loop_of_ones_own_whose_backward_updated_a_part_is_torn(nvme_path: Path) -> None:
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(
            model, infinity.PagingOptions(sub_group_size=4096, param_persistence_threshold=100, update="backward")
        )
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap, lr=0.01)
        with failing(model.blocks[1], backward=True):
            loss = model(batch(0))
            with pytest.raises(OutOfMemory):
                loss.backward()
        optimizer.zero_grad()
        for use in (optimizer.step, lambda: model(batch(1))):
            with pytest.raises(infinity.InfinityError, match=r"torn.*backward"):
                use()


@pytest.mark.parametrize("way", ["memory", "forward"])
@pytest.mark.parametrize("at", ["restore_training", "restore_unpaged"])
def test_a_load_that_an_exception_ended_is_not_gone_on_from(
    way: str, at: str, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = "dcp" if at == "restore_training" else "arena"
    if (way, form) == ("memory", "arena"):
        pytest.skip("only states on NVMe have arenas")

    def fail(*args: Any, **named: Any) -> None:
        raise OutOfMemory

    with make(nvme_path, **PLACES[way]) as engine:
        step(engine)
        engine.save_checkpoint(tmp_path, format=form)
        expected = [step(engine) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(EngineState, at, fail)
            with pytest.raises(OutOfMemory):
                engine.load_checkpoint(tmp_path)
        with pytest.raises(infinity.InfinityError, match=r"torn.*loading a checkpoint"):
            step(engine)
        engine.load_checkpoint(tmp_path)
        assert [step(engine) for _ in range(2)] == expected


@pytest.mark.parametrize("way", ["memory", "forward", "forward, accumulated"])
def test_gradients_may_be_dropped_in_any_usual_way(way: str, nvme_path: Path) -> None:
    ways: list[Callable[[infinity.Engine], object]] = [
        lambda engine: engine.zero_grad(),
        lambda engine: engine.zero_grad(set_to_none=False),
        lambda engine: engine.optimizer.zero_grad(),
        lambda engine: engine.module.zero_grad(),
    ]
    with make(nvme_path, **PLACES[way]) as engine:
        expected = [step(engine) for _ in range(len(ways))]
    with make(nvme_path, **PLACES[way]) as engine:
        found = []
        for drop in ways:
            with failing(engine.module.blocks[1], backward=True):  # type: ignore[index, union-attr]
                loss = engine(batch(99))
                with pytest.raises(OutOfMemory):
                    engine.backward(loss)
            drop(engine)
            found.append(step(engine))
        assert found == expected


def test_a_step_that_fails_before_its_changes_scales_no_gradient_twice(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(fails: bool) -> list[float]:
        offload = {"device": "nvme", "nvme_path": str(nvme_path)}
        config = {
            "fp16": {"enabled": True, "loss_scale_window": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
            "infinity": {"pinned_bytes_max": "16MiB"},
        }
        engine, *_ = infinity.initialize(model=Model(), config=config)

        def fail(self: Paging) -> None:
            raise infinity.IoError("read of rank0.arena: EIO")

        with engine:
            found = []
            for number in range(4):
                loss = engine(batch(number))
                engine.backward(loss)
                if fails and number == 1:
                    with monkeypatch.context() as patch:
                        patch.setattr(Paging, "finish_updates", fail)
                        with pytest.raises(infinity.IoError):
                            engine.step()
                engine.step()
                found.append(loss.item())
        return found

    assert losses(True) == losses(False)


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_a_gradient_changed_by_hand_takes_effect_or_is_refused(update: str, nvme_path: Path) -> None:
    changes: dict[str, Callable[[infinity.Engine], object]] = {
        "clipped": lambda engine: nn.utils.clip_grad_norm_(engine.parameters(), 1e-3),
        "scaled": lambda engine: [p.grad.mul_(0.5) for p in engine.parameters() if p.grad is not None],
        "dropped": lambda engine: setattr(next(iter(engine.module.blocks.parameters())), "grad", None),  # type: ignore[union-attr]
    }
    for name, change in changes.items():
        with make(nvme_path, update=update) as engine:
            engine.backward(engine(batch(0)))

            def change_and_step(change: Any = change, engine: infinity.Engine = engine) -> None:
                change(engine)
                engine.step()

            with pytest.raises(infinity.InfinityError, match=r"gradient_clipping.*infinity\.keep_grad"):
                change_and_step()
        losses = []
        for place in ("none", "nvme"):
            keeping = {} if place == "none" else {"keep_grad": True, "update": "step"}
            with make(nvme_path, place=place, **keeping) as engine:
                engine.backward(engine(batch(0)))
                change(engine)
                engine.step()
                losses.append(step(engine))
        assert losses[0] == losses[1], name


def test_between_a_backward_that_updates_and_its_step_nobody_looks(nvme_path: Path) -> None:
    with make(nvme_path, update="backward") as engine:
        step(engine)
        engine.backward(engine(batch(10)))
        weight = next(engine.module.blocks.parameters())  # type: ignore[union-attr]
        looks: list[Callable[[], object]] = [
            lambda: engine.module.eval()(batch(2)),
            lambda: weight.detach().zero_(),  # type: ignore[attr-defined]
            lambda: weight.full_tensor() + 0,  # type: ignore[attr-defined]
            lambda: engine(batch(2)),
        ]
        for look in looks:
            with torch.no_grad(), pytest.raises(infinity.InfinityError, match=r"call step\(\) first.*infinity\.update"):
                look()
        engine.train()
        engine.step()
        step(engine)
        found = weights(engine)
    with make(nvme_path, place="none") as engine:
        for _ in range(3):
            step(engine)
        assert same(found, weights(engine))


@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_a_call_on_another_thread_leaves_a_step_alone_and_waits_for_no_end(
    place: str, nvme_path: Path, tmp_path: Path
) -> None:
    def elsewhere(call: Callable[[], object]) -> BaseException | None:
        raised: list[BaseException | None] = [None]

        def run() -> None:
            try:
                call()
            except BaseException as error:
                raised[0] = error

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return raised[0]

    with make(nvme_path / "right", place=place) as engine:
        expected = [step(engine) for _ in range(3)]
    with make(nvme_path / "called", place=place) as engine:
        found = [step(engine)]
        calls: list[Callable[[], object]] = [
            lambda: engine.save_checkpoint(tmp_path, "refused"),
            lambda: engine.load_checkpoint(tmp_path),
            lambda: engine.save_16bit_model(tmp_path / "16"),
            lambda: engine(batch(0)),
            engine.zero_grad,
            engine.finish_checkpoint,
            engine.step,
            engine.close,
        ]

        def call_all(*_: Any) -> None:
            for call in calls:
                error = elsewhere(call)
                assert isinstance(error, infinity.InfinityError) and "'MainThread' is in the middle of a step" in str(
                    error
                )

        handle = engine.module.blocks[2].register_forward_hook(call_all)  # type: ignore[index, union-attr]
        with torch.no_grad():
            engine(batch(0))  # an evaluation
        loss = engine(batch(10))
        handle.remove()
        call_all()  # between forward and backward
        loss.register_hook(call_all)
        engine.backward(loss)
        engine.step()
        found.append([loss.item()])

        assert elsewhere(lambda: engine.save_checkpoint(tmp_path, "between")) is None
        begun, save = threading.Event(), EngineState.capture_training

        def slow(state: EngineState, client_state: dict[str, Any]) -> dict[str, Any]:
            begun.set()
            training.wait(0.2)  # meanwhile the next step would be taken
            return save(state, client_state)

        training = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineState, "capture_training", slow)
            saver = threading.Thread(target=lambda: engine.save_checkpoint(tmp_path, "meanwhile"))
            saver.start()
            begun.wait()
            found.append(step(engine))
            saver.join()
        after = weights(engine)
        engine.load_checkpoint(tmp_path, "meanwhile")
        assert engine.global_steps == 2
        assert [step(engine)] == expected[2:] and same(after, weights(engine))
        assert elsewhere(lambda: engine(batch(0))) is None  # a thread that has ended does not keep others out
    assert found == expected


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_another_thread_is_served_or_refused_in_words(update: str, nvme_path: Path) -> None:
    with make(nvme_path / "right", update=update) as engine:
        expected = [step(engine) for _ in range(4)]
    outcomes: set[str] = set()
    with make(nvme_path / "looked at", update=update) as engine:
        ended = threading.Event()

        def look() -> None:
            while not ended.is_set():
                try:
                    for tensor in engine.module.state_dict().values():
                        assert bool(torch.isfinite(tensor.full_tensor() + 0).all())
                    outcomes.add("served")
                except infinity.InfinityError as error:
                    outcomes.add(str(error)[:30])

        def begin(*args: Any) -> None:  # in the middle of a pass, another thread is surely refused
            looker = threading.Thread(target=look_once)
            looker.start()
            looker.join()

        refused: list[infinity.InfinityError] = []
        handle: Any = None

        def look_once() -> None:
            assert engine.swap is not None
            calls = [engine.module.state_dict]
            if handle is not None:
                calls += [engine.optimizer.step, engine.optimizer.zero_grad, engine.swap.flush, engine.swap.close]
            for call in calls:
                try:
                    call()
                except infinity.InfinityError as error:
                    refused.append(error)

        found = [step(engine)]
        handle = engine.module.blocks[2].register_forward_hook(begin)  # type: ignore[index, union-attr]
        found.append(step(engine))
        handle.remove()
        handle = None
        assert len(refused) == 5
        refused.clear()
        with torch.no_grad():
            engine.eval()(batch(99))
        engine.train()
        begin()  # groups that an evaluation leaves gathered do no harm
        assert not refused
        thread = threading.Thread(target=look)
        thread.start()
        found += [step(engine) for _ in range(2)]
        ended.set()
        thread.join()
    assert found == expected
    assert outcomes


@pytest.mark.parametrize("place", PLACES)
def test_a_schedule_that_raises_leaves_the_values_of_the_step(nvme_path: Path, place: str) -> None:
    trained = []
    for raising in (None, 2):

        def rate(number: int, raising: int | None = raising) -> float:
            if number == raising:
                raise OutOfMemory
            return 1.0

        schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=rate)
        with make(nvme_path / str(raising), lr_scheduler=schedule, **PLACES[place]) as engine:
            step(engine)
            with pytest.raises(OutOfMemory) if raising else nullcontext():
                step(engine)
            engine.save_checkpoint(nvme_path / "saved")
            after = weights(engine)
            step(engine)
            trained.append(after + weights(engine))
    assert same(*trained)


@pytest.mark.parametrize("place", ["memory", "forward", "backward, durable"])
def test_an_overflow_at_the_least_loss_scale_leaves_the_values(nvme_path: Path, place: str) -> None:
    with make(nvme_path, fp16={"initial_scale_power": 0, "hysteresis": 1}, **PLACES[place]) as engine:
        step(engine)
        before = weights(engine)
        engine.backward(engine(batch(1)) * 1e30)
        with pytest.raises(infinity.InfinityError, match="min_loss_scale"):
            engine.step()
        engine.zero_grad()
        assert same(before, weights(engine))
        engine.save_checkpoint(nvme_path / "saved")
