"""What FSDP2 does in silence is as in plain PyTorch, or refused in words: in memory, on NVMe, and in a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import PagingOptions
from infinity.errors import InfinityError
from infinity.fsdp2.guarded import GuardedGroup
from infinity.fsdp2.sharding import local_of

pytestmark = pytest.mark.usefixtures("one_rank")

PLACES = ["memory", "NVMe", "NVMe, clipped"]
"""Where the engine keeps the model, and when it is updated: in the backward to stay, speculatively, or in the step."""
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Model(nn.Module):
    """Blocks that are groups of their own; each is called so often, in reentrant checkpoints if asked for."""

    def __init__(self, *, calls: int = 1, reentrant: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(8, 12)
        self._calls, self._reentrant = calls, reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.rows(ids)
        for _ in range(self._calls):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True) if self._reentrant else block(x)  # type: ignore[assignment]
        return nn.functional.cross_entropy(self.out(x), ids)


def seeded(make: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(7)
    return make()


def batch(number: int) -> torch.Tensor:
    return torch.randint(12, (6,), generator=torch.Generator().manual_seed(number))


def engine_of(place: str, nvme_path: Path, model: nn.Module, **changes: Any) -> infinity.Engine:
    nvme = {"device": "nvme", "nvme_path": str(nvme_path)}
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if place != "memory":
        zero |= {"offload_param": nvme, "offload_optimizer": nvme}
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
        "gradient_clipping": 1e6 if place == "NVMe, clipped" else 0.0,
        "zero_optimization": zero,
        "infinity": {"wrap": ["Block"], "update": "step" if place == "NVMe, step" else "auto"},
        "steps_per_print": 0,
    }
    return infinity.initialize(model=model, config=config | changes)[0]


Loss = Callable[[Callable[..., torch.Tensor], int], torch.Tensor]


def once(model: Callable[..., torch.Tensor], number: int) -> torch.Tensor:
    return model(batch(number))


def trained_plain(model: nn.Module, loss_of: Loss = once, before: Callable[[nn.Module], object] = id) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    losses = []
    for number in range(STEPS):
        before(model)
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(engine: infinity.Engine, loss_of: Loss = once, before: Callable[[Any], object] = id) -> list[float]:
    losses = []
    for number in range(STEPS):
        before(engine.module)
        loss = loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def sharded(policy: MixedPrecisionPolicy) -> Any:
    model = seeded()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def trained_alone(model: nn.Module, swap: infinity.SwapManager) -> list[float]:
    optimizer = infinity.PagedAdamW(model.parameters(), swap=swap, lr=0.01, weight_decay=0.0)
    losses = []
    for number in range(STEPS):
        loss = model(batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Groups that run again in one backward.


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_reentrant_checkpoints_of_a_group_that_is_used_again(place: str, calls: int, nvme_path: Path) -> None:
    def pair(model: Callable[..., torch.Tensor], number: int) -> torch.Tensor:
        return model(batch(number)) + model(batch(number + 10))

    make = partial(Model, calls=calls, reentrant=True)
    expected = trained_plain(seeded(make), pair)
    with engine_of(place, nvme_path, seeded(make)) as engine:
        assert trained(engine, pair) == expected


class Returning(Model):
    """The blocks and the whole return what FSDP2 does not look into, or a view, which is changed in place."""

    def __init__(self, returned: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturningBlock(returned) for _ in range(3))
        self._returned = returned

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.rows(ids)
        for block in self.blocks:
            x = mean_of(block(x)).add_(1.0)
        return self._returned(self.out(x))


class ReturningBlock(Block):
    def __init__(self, returned: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._returned = returned

    def forward(self, x: torch.Tensor) -> Any:
        return self._returned(super().forward(x))


def mean_of(returned: Any) -> torch.Tensor:
    return returned.mean if isinstance(returned, torch.distributions.Normal) else returned


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    "returned", [lambda x: torch.distributions.Normal(x, 1.0), lambda x: x.view(2, -1).view(6, -1)]
)
@pytest.mark.parametrize("place", PLACES)
def test_a_module_may_return_any_object_and_a_view_that_is_changed(
    place: str, returned: Callable[[torch.Tensor], Any], nvme_path: Path
) -> None:
    def loss_of(model: Callable[..., Any], number: int) -> torch.Tensor:
        return mean_of(model(batch(number))).square().mean()

    expected = trained_plain(seeded(partial(Returning, returned)), loss_of)
    groups = {"infinity": {"wrap": ["ReturningBlock"]}}
    with engine_of(place, nvme_path, seeded(partial(Returning, returned)), **groups) as engine:
        assert trained(engine, loss_of) == expected


class Unused(Model):
    """What the first block makes for an output that no loss uses passes through the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Side(), Pass()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.blocks[1](*self.blocks[0](self.rows(ids)))
        return nn.functional.cross_entropy(self.out(x), ids)


class Side(Block):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.side(x)


class Pass(Block):
    def forward(self, x: torch.Tensor, side: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), side


@pytest.mark.parametrize("place", PLACES)
def test_what_no_loss_depends_on_has_no_gradient(place: str, nvme_path: Path) -> None:
    decay = {"lr": 0.01, "weight_decay": 0.5}
    expected = seeded(Unused)
    optimizer = torch.optim.AdamW(expected.parameters(), **decay, fused=True)
    model = seeded(Unused)
    changes = {"optimizer": {"type": "AdamW", "params": decay}, "infinity": {"wrap": ["Side", "Pass"]}}
    with engine_of(place, nvme_path, model, **changes) as engine:
        for number in range(STEPS):
            loss = expected(batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(batch(number)))
            engine.step()
        for (name, value), sharded_value in zip(
            expected.state_dict().items(), model.state_dict().values(), strict=True
        ):
            assert torch.equal(value, sharded_value.full_tensor()), name


class InPlace(Model):
    """The outputs of the blocks, in three dimensions, are views, and change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outer() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.rows(ids.view(1, -1))
        for block in self.blocks:
            x = block(x).add_(x)
        return nn.functional.cross_entropy(self.out(x)[0], ids.view(-1))


class Outer(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrap", [["Outer"], ["Outer", "Linear"]])
@pytest.mark.parametrize("place", PLACES)
def test_outputs_that_are_views_may_change_in_place(place: str, wrap: list[str], nvme_path: Path) -> None:
    expected = trained_plain(seeded(InPlace))
    with engine_of(place, nvme_path, seeded(InPlace), infinity={"wrap": wrap}) as engine:
        assert trained(engine) == expected


# Hooks of gradients.


@pytest.mark.parametrize("when", ["before", "after", "removed"])
@pytest.mark.parametrize("place", [*PLACES, "NVMe, vertical"])
def test_hooks_change_the_gradients_of_their_parameters(place: str, when: str, nvme_path: Path) -> None:
    mask = (torch.arange(12) >= 8)[:, None]

    def train_new_rows(model: nn.Module) -> Any:
        return model.rows.weight.register_hook(lambda grad: grad * mask)  # type: ignore[union-attr, operator]

    plain = seeded()
    first = plain.rows.weight.detach().clone()  # type: ignore[union-attr, operator]
    handle = train_new_rows(plain)
    if when == "removed":
        handle.remove()
    expected = trained_plain(plain)
    changed = (plain.rows.weight != first).any(1)  # type: ignore[union-attr, operator]
    assert bool(changed[:8].any()) == (when == "removed")
    model = seeded()
    handle = train_new_rows(model) if when != "after" else None
    several = {"gradient_accumulation_steps": 2} if place == "NVMe, vertical" else {}
    with engine_of(place, nvme_path, model, **several) as engine:
        if handle is None:
            train_new_rows(model)
        elif when == "removed":
            handle.remove()
        if several:
            for number in range(STEPS):  # two micro-batches alike: the sum of two halves
                engine.train_batch(iter([batch(number)] * 2))
        else:
            assert trained(engine) == expected
        now = model.state_dict()["rows.weight"].full_tensor()
        assert torch.equal((now != first).any(1)[:8], changed[:8]) and bool((now != first)[8:].any())


@pytest.mark.parametrize("place", PLACES)
def test_hooks_after_the_gradient_see_what_was_reduced(place: str, nvme_path: Path) -> None:
    norms: list[float] = []

    def look(parameter: torch.Tensor) -> None:
        norms.append(local_of(parameter.grad).square().sum().item())  # type: ignore[arg-type]

    for model in (plain := seeded(), paged := seeded()):
        model.out.bias.register_post_accumulate_grad_hook(look)  # type: ignore[union-attr, operator]
    trained_plain(plain)
    expected, norms[:] = [*norms], []
    with engine_of(place, nvme_path, paged) as engine:
        trained(engine)
    assert norms == expected and len(norms) == STEPS


@pytest.mark.parametrize("place", PLACES)
def test_hooks_after_the_gradient_may_change_it_to_what_16_bits_do_not_hold(place: str, nvme_path: Path) -> None:
    values = []
    for where in ("memory", place):
        model = seeded()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda changed: changed.grad.mul_(1 / 3))
        with engine_of(where, nvme_path, model, bf16={"enabled": True}) as engine:
            trained(engine)
            values.append(dict(engine.named_weights(torch.float32)))
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


# Parameters that are changed or looked at.

CHANGES: dict[str, Callable[[Any], object]] = {
    "clamped": lambda model: [p.clamp_(-0.1, 0.1) for p in model.parameters()],
    "initialised": lambda model: nn.init.constant_(model.out.weight, 0.5),
    "through data": lambda model: model.out.weight.data.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_parameters_changed_after_an_evaluation_are_changed(place: str, change: str, nvme_path: Path) -> None:
    @torch.no_grad()
    def evaluate_and_change(model: nn.Module) -> None:
        model(batch(99))
        CHANGES[change](model)

    expected = trained_plain(seeded(), before=evaluate_and_change)
    with engine_of(place, nvme_path, seeded()) as engine:
        assert trained(engine, before=evaluate_and_change) == expected


@pytest.mark.parametrize("place", PLACES)
def test_after_an_evaluation_masters_are_read_and_not_what_was_gathered(place: str, nvme_path: Path) -> None:
    with engine_of(place, nvme_path, model := seeded(), bf16={"enabled": True}) as engine:
        before = {name: value.full_tensor() for name, value in model.state_dict().items()}
        with torch.no_grad():
            engine(batch(0))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name])  # type: ignore[operator]


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.mul_(3),
    "through data": lambda weight: weight.data.mul_(3),
    "another tensor": lambda weight: setattr(weight, "data", torch.zeros(8, 8)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", [*PLACES, "a loop of one's own"])
def test_a_forward_that_changes_a_weight_is_refused_and_nothing_is_lost(
    place: str, write: str, nvme_path: Path
) -> None:
    expected = trained_plain(seeded())
    model = seeded()
    if place == "a loop of one's own":
        model = sharded(MixedPrecisionPolicy())
        swap = infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB")
        swap.page(model, PagingOptions(update="backward"))
        engine, run = swap, model
    else:
        engine = run = engine_of(place, nvme_path, model)  # type: ignore[assignment]
    with engine:
        with torch.no_grad():
            hook = lambda module, args: WRITES[write](module.inner.weight)  # noqa: E731
            handle = model.blocks[1].register_forward_pre_hook(hook)  # type: ignore[index, union-attr, operator]
            with pytest.raises(InfinityError, match=r"blocks\.1\.inner\.weight was changed while gathered"):
                run(batch(0))
            handle.remove()
        assert (trained_alone(model, swap) if run is model else trained(engine)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES)
def test_a_write_between_forward_and_backward_is_refused_before_anything_changes(place: str, nvme_path: Path) -> None:
    with engine_of(place, nvme_path, model := seeded()) as engine:
        loss = engine(batch(0))
        with torch.no_grad():
            model.out.weight.mul_(2)  # type: ignore[union-attr, operator]
        with pytest.raises(InfinityError, match=r"out\.weight was changed while gathered"):
            engine.backward(loss)
        engine.zero_grad()
        assert trained(engine) == trained_plain(seeded())


def test_an_embedding_that_changes_its_rows_is_refused(nvme_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(12, 8, max_norm=0.1), nn.Linear(8, 8))
    with (
        engine_of("memory", nvme_path, model, infinity={}) as engine,
        pytest.raises(InfinityError, match=r"0\.weight.*max_norm"),
    ):
        engine(batch(0))


@pytest.mark.parametrize("place", PLACES)
def test_loading_by_assignment_sets_the_parameters_that_are_there(place: str, nvme_path: Path) -> None:
    with engine_of(place, nvme_path, model := seeded()) as engine:
        trained(engine)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        whole = {name: value.full_tensor() for name, value in values.items()}
        trained(engine)
        model.load_state_dict(values, assign=True)
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), whole[name])
        expected = seeded()
        expected.load_state_dict(whole)
        assert engine(batch(5)).item() == expected(batch(5)).item()


# What comes first.


def evaluate_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model(batch(99))


def call_a_part(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0](torch.ones(2, 8))


def be_interrupted(model: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for part in (model.rows, model.blocks[1], model.out):
        handle = part.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        handle.remove()


@pytest.mark.parametrize("first", [evaluate_in_inference_mode, call_a_part, be_interrupted])
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_whatever_came_first(place: str, first: Callable[[Any], object], nvme_path: Path) -> None:
    expected = trained_plain(seeded())
    with engine_of(place, nvme_path, model := seeded()) as engine:
        first(model)
        assert trained(engine, before=first) == expected


@pytest.mark.parametrize("before", ["forward", "a part's forward", "training"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_that_ran_before_is_paged(dtype: torch.dtype | None, before: str, nvme_path: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    expected = trained_plain(sharded(policy))
    model = sharded(policy)
    with torch.set_grad_enabled(before == "training"):
        loss = model.blocks[0](torch.ones(2, 8)) if before == "a part's forward" else model(batch(99))
    if before == "training":
        loss.backward()
        model.zero_grad()
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(model, PagingOptions(update="backward"))
        assert trained_alone(model, swap) == expected


class Lightning(Model):
    def validation_step(self, ids: torch.Tensor) -> torch.Tensor:
        return self(ids) + self.out.weight.sum()


@pytest.mark.parametrize("place", PLACES)
def test_a_method_that_is_a_forward_may_call_the_forward(place: str, nvme_path: Path) -> None:
    with engine_of(place, nvme_path, model := seeded(Lightning)) as engine:
        assert isinstance(model, FSDPModule)
        register_fsdp_forward_method(model, "validation_step")
        for _ in range(2):
            with torch.no_grad():
                found = model.validation_step(batch(1)).item()  # type: ignore[union-attr, operator]
            assert found == seeded(Lightning).validation_step(batch(1)).item()  # type: ignore[union-attr, operator]
            groups = [
                group
                for m in model.modules()
                if isinstance(m, FSDPModule)
                for group in m._get_fsdp_state()._fsdp_param_groups
            ]
            assert all(isinstance(group, GuardedGroup) and group.is_sharded for group in groups)
        assert trained(engine) == trained_plain(seeded(Lightning))
