"""Gradients that wait for their update in 16 bits or on NVMe: what the update gets is what torch would have had in `.grad`."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import BLOCKS, Model, batch, sharded
from quiet import come_to_rest
from torch import nn
from torch.distributed.fsdp import FSDPModule

import infinity
from infinity import PagingOptions
from infinity.schedule.scheme import Update
from infinity.swap.gradient_lap import RefusingGradient
from infinity.swap.stager import Stager
from infinity.swap.waiting_gradients import WaitingGradients

pytestmark = pytest.mark.usefixtures("one_rank")


def made(
    nvme_path: Path | None,
    accumulation: int = 1,
    clipping: float = 0.1,
    persistence: int = 0,
    *,
    model: Callable[[], nn.Module] = Model,
    bf16: bool = True,
    **own: Any,
) -> infinity.Engine:
    place = {"device": "nvme", "nvme_path": str(nvme_path)} if nvme_path else {"device": "none"}
    config = {
        "bf16": {"enabled": bf16},
        "gradient_clipping": clipping,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": persistence,
            "sub_group_size": 2048,
        },
        "infinity": {"pinned_bytes_max": "16MiB", "wrap": ["Linear"], "update": "forward", **own},
    }
    engine, *_ = infinity.initialize(model=model(), config=config)
    return engine


def gradients(engine: infinity.Engine) -> WaitingGradients:
    assert engine.swap is not None
    return engine.swap.paging.waiting_gradients


def backward(engine: infinity.Engine, number: int = 0, **how: Any) -> float:
    loss = engine(batch(number), **how).float().square().mean()
    engine.backward(loss)
    return loss.item()


def weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: p.detach().full_tensor() + 0 for name, p in engine.module.named_parameters()}


def is_taken(grad: Any) -> bool:
    """Whether `.grad` refuses to be used."""
    return isinstance(grad._local_tensor, RefusingGradient)


def assert_same(engines: list[infinity.Engine]) -> None:
    expected, got = (weights(engine) for engine in engines)
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name


@pytest.fixture(params=["auto", 20_000, 0], ids=["in memory", "some on NVMe", "on NVMe"])
def both(request: pytest.FixtureRequest, nvme_path: Path) -> Iterator[list[infinity.Engine]]:
    """The same training in memory and on NVMe."""
    engines = [made(None), made(nvme_path, gradient_bytes_max=request.param)]
    yield engines
    for engine in engines:
        engine.close()


def test_they_wait_in_sixteen_bits_and_not_in_grad(both: list[infinity.Engine]) -> None:
    nvme = both[1]
    assert nvme.swap is not None
    backward(nvme)
    assert all(is_taken(p.grad) for group in nvme.optimizer.param_groups for p in group["params"])
    subs = nvme.swap.paged.sub_groups
    spilled = sum(sub.layout.gradient_bytes for sub in subs)
    assert gradients(nvme).held_bytes == 2 * sum(sub.layout.numel for sub in subs) - spilled
    bound = nvme.config.infinity.gradient_bytes_max
    if bound != "auto":
        assert 0 < spilled
        assert gradients(nvme).held_bytes <= bound
    else:
        assert spilled == 0
    nvme.step()
    assert gradients(nvme).held_bytes == 0  # the updates have them
    weights(nvme)
    assert not nvme.swap.paged.updates.waiting


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_what_stays_in_grad_keeps_no_more_than_itself(update: str, nvme_path: Path) -> None:
    """FSDP2 gives gradients out as views into those of the whole group, which would all live as long as the smallest."""
    with made(nvme_path, clipping=0.0, update=update, persistence=100) as engine:
        backward(engine)
        shown = [p.grad for group in engine.optimizer.param_groups for p in group["params"]]
        left = [grad for grad in shown if not is_taken(grad)]
        assert left  # biases, of resident parameters
        behind = {grad._local_tensor.untyped_storage().data_ptr(): grad._local_tensor for grad in left}
        memory = sum(each.untyped_storage().nbytes() for each in behind.values())
        assert memory == 4 * sum(grad.numel() for grad in left)
        assert engine.gradient_bytes == memory + gradients(engine).held_bytes
        engine.step()
        assert engine.gradient_bytes == 0


def test_a_model_that_is_used_twice_gets_the_sum_in_fp32(both: list[infinity.Engine]) -> None:
    for number in range(4):
        for engine in both:
            backward(engine, number, twice=True)
            engine.step()
        assert both[0].get_global_grad_norm() == both[1].get_global_grad_norm()
    assert_same(both)


def test_what_has_no_gradient_is_not_stepped(both: list[infinity.Engine]) -> None:
    for number, without in enumerate((None, 3, 1, 3, None)):
        losses = []
        for engine in both:
            losses.append(backward(engine, number, without=without))
            engine.step()
        assert losses[0] == losses[1]
        assert both[0].get_global_grad_norm() == both[1].get_global_grad_norm()
    assert_same(both)


def test_a_batch_is_taken_back_by_the_module_too(both: list[infinity.Engine]) -> None:
    for engine in both:
        backward(engine, 0)
        engine.module.zero_grad()
        backward(engine, 1)
        engine.step()
    assert both[0].get_global_grad_norm() == both[1].get_global_grad_norm()
    assert_same(both)


def test_what_the_backward_applied_is_not_taken_back(nvme_path: Path) -> None:
    with made(nvme_path, clipping=0.0, update="backward") as engine:
        backward(engine)
        with pytest.raises(infinity.InfinityError, match=r"applied in the backward already"):
            engine.module.zero_grad()


def test_gradients_that_are_kept_in_grad_may_be_clipped_by_hand(nvme_path: Path) -> None:
    engines = [made(None), made(nvme_path, keep_grad=True)]
    for number in range(3):
        for engine in engines:
            backward(engine, number)
            torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.01)
            engine.step()
        assert engines[0].get_global_grad_norm() == engines[1].get_global_grad_norm() < 0.011
    assert_same(engines)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("bound", ["auto", 20_000, 0])
@pytest.mark.parametrize("update", ["step", "forward"])
def test_micro_batches_of_which_each_leaves_something_out_are_summed(
    bound: int | str, update: str, nvme_path: Path
) -> None:
    engines = [made(None, 3), made(nvme_path, 3, gradient_bytes_max=bound, update=update)]
    for number in range(9):
        for engine in engines:
            backward(engine, number, without=(None, 2, number % BLOCKS)[number % 3], twice=number % 4 == 1)
            engine.step()
    assert engines[0].get_global_grad_norm() == engines[1].get_global_grad_norm()
    assert_same(engines)
    for engine in engines:
        engine.close()


class Halves(nn.Module):
    """A group of which a pass may use a half."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, h: torch.Tensor, both: bool) -> torch.Tensor:
        h = h + self.one(h).tanh()
        return h + self.other(h).tanh() if both else h


class OfHalves(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Halves() for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:  # type: ignore[override]
        h = self.first(x)
        for block in self.blocks:
            h = block(h, both)
        return h


@pytest.mark.parametrize("own", [{"update": "auto"}, {"gradient_bytes_max": 0}, {"gradient_bytes_max": 40_000}])
def test_micro_batches_that_use_a_part_of_a_group_are_summed_in_their_order(
    own: dict[str, Any], nvme_path: Path
) -> None:
    """In fp32, where the order of three matters."""
    changes: dict[str, Any] = {"bf16": False, "model": OfHalves, "wrap": ["Halves"]}
    engines = [made(None, 4, **changes), made(nvme_path, 4, **changes, **own)]
    for number, both in enumerate([True, False, True, False, True, True, False, False]):
        for engine in engines:
            backward(engine, number, both=both)
            engine.step()
    assert engines[0].get_global_grad_norm() == engines[1].get_global_grad_norm()
    assert_same(engines)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("bound", ["auto", 0, 4096])
@pytest.mark.parametrize("accumulation", [2, 4])
def test_a_step_before_the_last_micro_batch_has_the_norm_of_its_sum(
    bound: str | int, accumulation: int, nvme_path: Path
) -> None:
    engines = [made(None, accumulation), made(nvme_path, accumulation, gradient_bytes_max=bound)]
    for engine in engines:
        for step in range(3):
            for number in range(1 + step):  # the backward expects more micro-batches than come
                backward(engine, 10 * step + number)
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
    norms = [engine.get_global_grad_norm() for engine in engines]
    assert norms[0] == norms[1] and norms[0] > 0.1
    assert_same(engines)
    for engine in engines:
        engine.close()


def test_what_is_forgotten_is_not_in_the_next_step(both: list[infinity.Engine]) -> None:
    for engine in both:
        backward(engine, 1)
        engine.step()
        backward(engine, 2)
        engine.zero_grad()
        engine._progress.micro_steps -= 1
        backward(engine, 3)
        engine.step()
    assert gradients(both[1]).held_bytes == 0
    assert both[0].get_global_grad_norm() == both[1].get_global_grad_norm()
    assert_same(both)


def test_a_checkpoint_before_the_step_is_refused(both: list[infinity.Engine], tmp_path: Path) -> None:
    backward(both[1])
    with pytest.raises(infinity.CheckpointError, match="middle of a step"):
        both[1].save_checkpoint(tmp_path)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("update", ["step", "forward"])
@pytest.mark.parametrize("bound", [20_000, 0])
def test_the_bytes_of_a_step_are_those_foretold(bound: int, update: str, accumulation: int, nvme_path: Path) -> None:
    engine = made(nvme_path, accumulation, gradient_bytes_max=bound, update=update)
    swap = engine.swap
    assert swap is not None
    foretold = swap.step_bytes(micro_batches=accumulation)
    moved = []
    for _ in range(3):
        before = swap.stats()
        for number in range(accumulation):
            backward(engine, number)
            engine.step()
        come_to_rest(swap)
        after = swap.stats()
        moved.append((after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes))
    spilled = sum(sub.layout.gradient_bytes for sub in swap.paged.sub_groups)
    assert spilled > 0
    assert moved[-1][1] == 12 * sum(s.layout.numel for s in swap.paged.sub_groups) + accumulation * spilled
    assert moved[-1] == swap.step_bytes()
    assert moved[-1][1] == foretold[1]
    assert foretold[0] - spilled * accumulation == made_foretold(nvme_path, update, accumulation)
    engine.close()


def made_foretold(nvme_path: Path, update: str, accumulation: int) -> int:
    """Bytes read in a step whose gradients all stay in memory."""
    engine = made(nvme_path, accumulation, update=update)
    assert engine.swap is not None
    read, _ = engine.swap.step_bytes(micro_batches=accumulation)
    engine.close()
    return read


def two_steps(engine: infinity.Engine) -> None:
    for _ in range(2):
        backward(engine)
        engine.step()


def test_a_gradient_that_is_lost_stops_the_training(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(nvme_path, gradient_bytes_max=0)
    engine.save_checkpoint(tmp_path)
    expected = [backward(engine), engine.step(), backward(engine)][2]
    engine.step()
    settle = Stager.settle

    def fail(self: Stager, chunk: Any, *args: Any) -> Any:
        if chunk.name.startswith("gradient of"):
            settle(self, chunk, *args)
            chunk.on_lost("write of rank0.arena: EIO")
            raise infinity.IoError("write of rank0.arena: EIO", errno.EIO, "write")
        return settle(self, chunk, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Stager, "settle", fail)
        with pytest.raises((infinity.IoError, infinity.InfinityError), match=r"EIO|torn"):
            two_steps(engine)
    with pytest.raises(infinity.InfinityError, match=r"torn.*EIO.*load a checkpoint"):
        weights(engine)
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    engine.load_checkpoint(tmp_path)
    assert [backward(engine), engine.step(), backward(engine)][2] == expected
    engine.close()


def test_a_bound_that_is_no_number_is_refused(nvme_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gradient_bytes_max.*bytes"):
        made(nvme_path, gradient_bytes_max="much")


def test_in_the_backward_none_waits(nvme_path: Path) -> None:
    model = Model()
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(nvme_path)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(nvme_path)},
        },
        "infinity": {"pinned_bytes_max": "16MiB", "gradient_bytes_max": 0},
    }
    engine, *_ = infinity.initialize(model=model, config=config)
    assert engine.swap is not None and engine.swap.paging.options.update == "backward"
    assert all(sub.gradient_extent is None for sub in engine.swap.paged.sub_groups)
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        PagingOptions(param_persistence_threshold=0, update="backward"),
        PagingOptions(param_persistence_threshold=0, update="forward", gradient_dtype=torch.bfloat16),
        PagingOptions(param_persistence_threshold=0, update="step", gradient_bytes_max=0),
    ],
    ids=["updated in the backward", "in 16 bits", "on NVMe"],
)
def test_a_loop_of_ones_own_is_refused_what_was_taken(options: PagingOptions, nvme_path: Path) -> None:
    micro_batches = 1 if options.update == "backward" else 3

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer, refused: bool) -> Iterator[float]:
        for number in range(4):
            for micro_batch in range(micro_batches):
                loss = model(batch(10 * number + micro_batch)).float().square().mean()
                loss.backward()
                yield loss.item()
            if refused:
                for use in (nn.utils.clip_grad_norm_, _halve):
                    with pytest.raises(infinity.InfinityError, match=r"gradient_clipping.*infinity\.keep_grad"):
                        use(model.parameters(), 1e-3)
            optimizer.step()
            if refused:
                with pytest.raises(infinity.InfinityError, match=r"used up by the last step.*call zero_grad\(\)"):
                    optimizer.step()
            optimizer.zero_grad()

    memory = sharded()
    expected = [*losses(memory, torch.optim.AdamW(memory.parameters(), lr=1e-2), refused=False)]
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        swap.page(nvme, options)
        optimizer = infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2)
        assert [*losses(nvme, optimizer, refused=True)] == expected
        nvme(batch(0)).float().square().mean().backward()
        if options.update != "backward":
            nvme.zero_grad()  # of the module, which knows nothing of what was taken
            with pytest.raises(infinity.InfinityError, match=r"zero_grad\(\) of the optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            nvme(batch(1)).float().square().mean().backward()
        optimizer.step()


def test_a_forward_between_backward_and_step_is_refused_and_the_step_can_be_taken(nvme_path: Path) -> None:
    def after_two_steps(model: nn.Module, optimizer: torch.optim.Optimizer, refused: bool) -> list[torch.Tensor]:
        for number in range(2):
            model(batch(number)).float().square().mean().backward()
            if refused:
                with pytest.raises(infinity.InfinityError, match=r"call step\(\) first"):
                    model(batch(number))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().full_tensor() + 0 for p in model.parameters()]

    memory = sharded()
    expected = after_two_steps(memory, torch.optim.AdamW(memory.parameters(), lr=1e-2), refused=False)
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        swap.page(nvme, PagingOptions(param_persistence_threshold=0, update="backward"))
        got = after_two_steps(nvme, infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2), refused=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def losses_of_a_loop(model: nn.Module, optimizer: torch.optim.Optimizer, refused: bool) -> Iterator[float]:
    """Gradients are zeroed, dropped and kept in many ways, and what the optimizer holds is changed between steps."""

    def zeroed() -> None:
        optimizer.zero_grad(set_to_none=False)

    def zeroed_by_module() -> None:
        model.zero_grad(set_to_none=False)

    def set_to_none() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    def not_dropped() -> None:
        if refused:
            with pytest.raises(infinity.InfinityError, match=r"used up by the last step.*call zero_grad\(\)"):
                model(batch(7)).float().square().mean().backward()
        optimizer.zero_grad()

    def moments_set() -> None:
        optimizer.zero_grad()
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 0.5
            state["step"] = torch.tensor(7.0)

    def group_left() -> None:
        zeroed()
        group = optimizer.param_groups[0]
        left = {*model.blocks[1].parameters()}  # type: ignore[index,union-attr]
        group["params"] = [parameter for parameter in group["params"] if parameter not in left]

    passes = [(zeroed, None), (zeroed_by_module, 3), (zeroed, 3), (set_to_none, 1), (not_dropped, None)]
    for number, (drop, without) in enumerate([*passes, (moments_set, 2), (group_left, None), (zeroed, 0)]):
        loss = model(batch(number), without=without).float().square().mean()
        loss.backward()
        yield loss.item()
        optimizer.step()
        drop()
    yield model(batch(9)).float().square().mean().item()


@pytest.mark.parametrize(
    "options",
    [
        PagingOptions(param_persistence_threshold=100, update="backward"),
        PagingOptions(param_persistence_threshold=0, update="forward", gradient_dtype=torch.bfloat16),
        PagingOptions(param_persistence_threshold=0, update="step", gradient_bytes_max=0),
    ],
    ids=["updated in the backward", "in 16 bits", "on NVMe"],
)
def test_what_a_loop_of_ones_own_leaves_in_grad_counts_as_in_memory(options: PagingOptions, nvme_path: Path) -> None:
    memory = sharded()
    expected = [*losses_of_a_loop(memory, torch.optim.AdamW(memory.parameters(), lr=1e-2), refused=False)]
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        nvme = sharded()
        swap.page(nvme, options)
        optimizer = infinity.PagedAdamW(nvme.parameters(), swap=swap, lr=1e-2)
        assert [*losses_of_a_loop(nvme, optimizer, refused=True)] == expected


def _steps_set(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(10)


def _state_cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _moments_replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def _parameter_left(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def _zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("change", [_steps_set, _state_cleared, _moments_replaced, _parameter_left, _zeroed])
def test_what_is_changed_after_the_backward_has_updated_is_refused(
    change: Callable[[nn.Module, torch.optim.Optimizer], None], nvme_path: Path
) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, PagingOptions(param_persistence_threshold=0, update="backward"))
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap)
        model(batch(0)).float().square().mean().backward()
        with pytest.raises(infinity.InfinityError, match=r'applied in the backward already.*"forward"'):  # noqa: PT012
            change(model, optimizer)
            optimizer.step()


def test_a_forward_in_a_backward_that_has_updated_its_weights_is_refused(nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, PagingOptions(param_persistence_threshold=0, update="backward"))
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap)
        model(batch(0)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

        def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                output.register_hook(lambda grad: model(batch(1)).sum() * 0 + grad)

        model.blocks[0].register_forward_hook(watch)  # type: ignore[index]
        with pytest.raises(infinity.InfinityError, match=r"has already updated its weights"):
            model(batch(0)).float().square().mean().backward()


def _halve(parameters: Iterable[nn.Parameter], _: float) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
@pytest.mark.parametrize("kind", [{}, {"gradient_bytes_max": 0}, {"gradient_dtype": torch.bfloat16}], ids=str)
def test_two_optimizers_step_groups_of_their_own(kind: dict[str, Any], update: Update, nvme_path: Path) -> None:
    """One of them drops its gradients before the last step."""

    def run(model: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[torch.Tensor]:
        first, *blocks = [[*module.parameters()] for module in (model.first, *model.blocks)]  # type: ignore[union-attr,misc]
        one, other = make([*first, *blocks[0], *blocks[1]]), make([*blocks[2], *blocks[3]])
        for number in range(3):
            model(batch(number)).float().square().mean().backward()
            one.step()
            if number == 2 and update != "backward":
                other.zero_grad()
            other.step()
            one.zero_grad()
            other.zero_grad()
        return [p.detach().full_tensor() + 0 for p in model.parameters()]  # type: ignore[attr-defined]

    memory = sharded()
    expected = run(memory, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, PagingOptions(param_persistence_threshold=0, update=update, **kind))
        found = run(model, lambda parameters: infinity.PagedAdamW(parameters, swap=swap, lr=1e-2))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [{"update": "backward"}, {"gradient_dtype": torch.bfloat16}], ids=str)
def test_a_newer_optimizer_replaces_the_one_before(kind: dict[str, Any], nvme_path: Path) -> None:
    """Which may be alive still, in a cycle with its schedule."""

    def trained(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
        for lr in (1.0, 1e-3):
            optimizers.append(make(model.parameters(), lr=lr))
        for number in range(2):
            model(batch(number)).float().square().mean().backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
        return [p.detach().full_tensor() + 0 for p in model.parameters()]  # type: ignore[attr-defined]

    optimizers: list[torch.optim.Optimizer] = []
    expected = trained(sharded(), torch.optim.AdamW)
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, PagingOptions(param_persistence_threshold=0, **kind))
        found = trained(model, partial(infinity.PagedAdamW, swap=swap))
        model(batch(9)).float().square().mean().backward()
        with pytest.raises(infinity.InfinityError, match="an optimizer that was made later"):
            optimizers[-2].step()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [{}, {"gradient_dtype": torch.bfloat16}, {"update": "step"}], ids=str)
def test_gradients_stay_while_a_state_is_loaded(kind: dict[str, Any], nvme_path: Path) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for number in range(3):
            model(batch(number)).float().square().mean().backward()
            if number == 1:
                saved = copy.deepcopy(optimizer.state_dict())
            if number == 2:
                optimizer.load_state_dict(saved)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().full_tensor() + 0 for p in model.parameters()]  # type: ignore[attr-defined]

    memory, model = sharded(), sharded()
    expected = trained(memory, torch.optim.AdamW(memory.parameters(), lr=1e-2))
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(model, PagingOptions(**{"param_persistence_threshold": 100, "update": "forward"} | kind))
        found = trained(model, infinity.PagedAdamW(model.parameters(), swap=swap, lr=1e-2))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_two_optimizers_are_refused_before_one_uses_gradients_of_the_other_up(nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        model = sharded()
        swap.page(model, PagingOptions(param_persistence_threshold=0, gradient_dtype=torch.bfloat16))
        weights = [p.detach().full_tensor() + 0 for p in model.parameters()]
        named = [*model.named_parameters()]
        halves = [[p for name, p in named if name.endswith(kind)] for kind in ("weight", "bias")]
        one, other = (infinity.PagedAdamW(half, swap=swap) for half in halves)
        model(batch(0)).float().square().mean().backward()
        for optimizer in (one, other):
            optimizer.take_gradients()
        with pytest.raises(infinity.InfinityError, match=r"two optimizers step parts of one group"):
            one.step()
        assert all(
            torch.equal(a, p.detach().full_tensor() + 0) for a, p in zip(weights, model.parameters(), strict=True)
        )
