"""Training, evaluation and generation in any order: each phase's reads are foreseen, and no order is refused."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_policy import check_policy
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity

WIDTH = 512
BLOCKS = 14  # 14 MiB of what is gathered; the pool holds 10


pytestmark = pytest.mark.usefixtures("one_rank", "checked_policy")


@pytest.fixture(scope="module")
def checked_policy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        check_policy(patch)
        yield


class Model(nn.Module):
    """Blocks, of which a pass may leave some out, or run the rest in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, path: Collection[int] = range(BLOCKS)) -> torch.Tensor:
        h = x * self.scale
        for number in path:
            h = h + self.blocks[number](h).tanh()
        return h


class Run:
    """A model in the smallest pool that holds it, and the same model in memory."""

    def __init__(self, nvme_path: Path, update: Any, cache_bytes: int = 0) -> None:
        self.models = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.swap = infinity.SwapManager(nvme_path, pinned_bytes_max=(10 << 20) + cache_bytes)
        for paged in (False, True):
            model = Model()
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            if paged:
                self.swap.page(
                    model,
                    infinity.PagingOptions(param_persistence_threshold=0, host_cache_bytes=cache_bytes, update=update),
                )
                self.optimizers.append(infinity.PagedAdamW(model.parameters(), swap=self.swap, lr=1e-3, fused=True))
            else:
                self.optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
            self.models.append(model)
        if update == "forward":
            self._write_at_once()

    def _write_at_once(self) -> None:
        """What is still being written takes room that can't be read into: let nothing depend on how long that lasts."""
        stager = self.swap.stager
        write_back = stager.write_back

        def write(chunk: Any) -> None:
            write_back(chunk)
            stager.settle(chunk)

        stager.write_back = write  # type: ignore[method-assign]

    @property
    def demand_reads(self) -> int:
        return self.swap.stats().demand_reads

    def both(self, act: Any) -> None:
        """`act` on each model gives the same tensor, bit for bit."""
        expected, got = (act(model) for model in self.models)
        assert torch.equal(expected, got)

    def backward(self, path: Collection[int] = range(BLOCKS)) -> None:
        def act(model: nn.Module) -> torch.Tensor:
            loss = model(torch.ones(2, WIDTH), path).square().mean()
            loss.backward()
            return loss.detach()

        self.both(act)

    def step(self) -> None:
        for model in self.models:
            for module in model.modules():
                if hasattr(module, "reshard"):  # what an evaluation left gathered would be stale
                    module.reshard()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.swap.stager.settle_all()  # what is still being written can't be read ahead
        self.swap.paging.parameters.look_ahead()

    def evaluate(self, path: Collection[int] = range(BLOCKS), rows: int = 2, mode: bool = False) -> None:
        def act(model: nn.Module) -> torch.Tensor:
            model.train(mode)
            with torch.no_grad():
                result: torch.Tensor = model(torch.ones(rows, WIDTH), path)
            model.train()
            return result

        self.both(act)


@pytest.fixture(params=["step", "forward"])
def run(nvme_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(nvme_path, request.param)
    yield made
    made.swap.close()


def demands(run: Run, act: Any) -> int:
    before = run.demand_reads
    act()
    return run.demand_reads - before


def train(run: Run) -> int:
    found = demands(run, run.backward)
    run.step()
    return found


@pytest.mark.parametrize("cached", [0, 4])
def test_training_is_foreseen(cached: int, nvme_path: Path) -> None:
    """The updates of groups whose copies are cached, which read state and nothing else, as well."""
    run = Run(nvme_path, "forward", cache_bytes=cached * 2 * WIDTH**2)
    assert any(group.chunk is None for group in run.swap.paged.groups) == bool(cached)
    found = [train(run) for _ in range(6)]
    assert found[0] > 0
    assert found[2:] == [0] * 4
    run.swap.close()


@pytest.mark.parametrize("mode", [False, True])
def test_generation_is_foreseen_pass_after_pass(run: Run, mode: bool) -> None:
    """Whether or not the model is in training mode: what counts is that nothing asks for gradients."""
    train(run)
    train(run)
    passes = [demands(run, lambda rows=rows: run.evaluate(rows=rows, mode=mode)) for rows in range(1, 7)]
    # There was no pass of evaluation yet; but updates that wait are read ahead in the order of training.
    assert (passes[0] == 0) == (run.swap.paging.options.update == "forward")
    assert passes[2:] == [0] * 4


@pytest.mark.parametrize("mode", [False, True])
def test_an_evaluation_does_not_disturb_the_order_of_training(run: Run, mode: bool) -> None:
    for _ in range(2):
        train(run)
    for _ in range(3):
        run.evaluate(mode=mode)
        assert train(run) <= 2  # the first groups: room was given to the evaluation
        assert train(run) == 0


def test_training_in_evaluation_mode_is_foreseen(run: Run) -> None:
    """Without dropout, say: the forward is an evaluation's, the backward training's."""
    for model in run.models:
        model.eval()
    found = [train(run) for _ in range(6)]
    assert found[0] >= BLOCKS
    assert max(found[3:]) <= 2  # where one phase takes over from the other


def test_parts_called_on_their_own_are_foreseen_too(run: Run) -> None:
    def act(model: nn.Module) -> torch.Tensor:
        model.eval()
        x = torch.ones(2, WIDTH)
        with torch.no_grad():
            for block in model.blocks:
                x = block(x)
        model.train()
        return x

    train(run)
    found = [demands(run, lambda: run.both(act)) for _ in range(5)]
    assert found[-1] <= 1


def test_another_path_is_said_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        for _ in range(3):
            train(run)
            run.evaluate()
            run.evaluate()
            run.evaluate((3, 1))  # evaluations vary, and a generation's first pass differs from the others
        assert "execution order changed" not in caplog.text
        for path in ((0, 1, 2), (3, 1, 0), (5,), (2, 2, 4), (0, 1)):
            run.backward(path)
            run.step()
        run.evaluate((1,))
        run.evaluate((1, 2))
        run.evaluate((3,))
    assert caplog.text.count("execution order changed") == 1


def test_updates_that_leave_the_backward_are_no_other_path(nvme_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1e-6,  # the first steps are updated in the backward, and discarded; later ones are not
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"wrap": ["Linear"], "pinned_bytes_max": "32MiB"},
    }
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    with caplog.at_level(logging.INFO, "infinity"), infinity.initialize(model=model, config=config)[0] as engine:
        for _ in range(8):
            engine.backward(engine(torch.ones(2, WIDTH)).float().square().mean())
            engine.step()
        assert engine.swap is not None and engine.swap.stats().mispredictions
    assert "execution order changed" not in caplog.text


paths = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=8)
acts = st.one_of(
    st.tuples(st.just("backward"), paths),
    st.tuples(st.just("evaluate"), paths),
    st.tuples(st.just("generate"), paths),
    st.tuples(st.just("step"), st.just([])),
    st.tuples(st.just("fail"), st.integers(0, 8)),
)


@given(st.lists(acts, max_size=14), st.sampled_from(["step", "forward"]))
@settings(
    max_examples=settings.default.max_examples // 10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_order_of_anything_is_refused_and_no_bit_changes(
    nvme_path: Path, order: list[tuple[str, Any]], update: str
) -> None:
    """Backward passes, evaluations in either mode and steps, along any paths, with reads that fail now and then."""
    run = Run(nvme_path, update)
    pending = False
    try:
        for what, value in order:
            if what == "backward":
                run.backward(value)
                pending = True
            elif what == "step" and pending:
                run.step()
                pending = False
            elif what == "fail":
                fail_a_read(run, value)
            elif what in ("evaluate", "generate"):
                run.evaluate(value, mode=what == "generate")
        run.evaluate()
        run.swap.stager.drop_all()
        run.swap.stager.settle_all()
        assert run.swap.stats().pinned_peak_bytes <= run.swap.stats().pinned_bytes
        assert run.swap.stager._pool.leased_bytes == 0
    finally:
        run.swap.close()


def fail_a_read(run: Run, after: int) -> None:
    """An evaluation whose reads fail from one on: it says so, and the next pass goes as if nothing had been."""
    stager, left = run.swap.stager, [after]
    finish = stager._finish_read

    def failing(chunk: Any, *waited_for: Any) -> None:
        finish(chunk, *waited_for)
        left[0] -= 1
        if left[0] < 0:
            stager._staged.discard(chunk)
            stager._give_back(chunk)
            raise infinity.IoError("read: EIO", 5)

    stager._finish_read = failing  # type: ignore[method-assign]
    paged = run.models[1]
    paged.eval()
    try:
        with torch.no_grad(), contextlib.suppress(infinity.IoError):
            paged(torch.ones(2, WIDTH))
    finally:
        stager._finish_read = finish  # type: ignore[method-assign]
        paged.train()
        for module in paged.modules():
            if hasattr(module, "reshard"):
                module.reshard()
