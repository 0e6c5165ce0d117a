"""What the update kernel promises: the bits of torch's own sequence of operations, whatever the lengths, dtypes, cuts, threads
and instructions; and that a master weight comes back from its compute parameter and remainder."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.aio import page_checksums
from infinity.optim import AdamSettings, adam_, kernel
from infinity.optim.kernel import GradPiece, PageSums

# The torch that the kernel was written for; an older one, or another CPU, may round differently (see matches_torch).
KNOWN_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
ARM = platform.machine() == "aarch64"
KNOWN_CPU = ARM or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
like_torch = pytest.mark.skipif(not (KNOWN_TORCH and KNOWN_CPU), reason="this torch may round otherwise")
norms_like_torch = pytest.mark.skipif(ARM, reason="torch sums norms in another order on ARM, and is left to do it")
every_instruction_set = pytest.mark.parametrize("instructions", kernel.INSTRUCTIONS)

WAYS = {
    "defaults": {},
    "no decay": {"weight_decay": 0.0},
    "maximize": {"maximize": True},
    "maximize, no decay": {"maximize": True, "weight_decay": 0.0},
    "large": {"lr": 0.3, "weight_decay": 0.5, "betas": (0.5, 0.9), "eps": 1e-3},
    "short memory": {"betas": (0.3, 0.8), "lr": 3e-5},
    "no memory": {"betas": (0.0, 0.0)},
    "at rest": {"lr": 0.0},
}
STEPS = 3


def settings_of(*, decoupled: bool = True, fused: bool | None = True, **hyper: Any) -> AdamSettings:
    chosen = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False, **hyper}
    return AdamSettings(decoupled_weight_decay=decoupled, fused=fused, **chosen)


class State:
    """The fields of one sub-group, and gradients, drawn from a seed; many a number is very large, very small or zero."""

    def __init__(self, numel: int, *, seed: int = 0) -> None:
        self.numel = numel
        self.random = torch.Generator().manual_seed(seed)
        self.master = self.draw()
        self.exp_avg = torch.zeros(numel)
        self.exp_avg_sq = torch.zeros(numel)

    def draw(self) -> torch.Tensor:
        powers = torch.randint(-140, 60, (self.numel,), generator=self.random)
        powers *= torch.rand(self.numel, generator=self.random) < 0.2
        kept = torch.rand(self.numel, generator=self.random) < 0.98
        return torch.randn(self.numel, generator=self.random) * torch.exp2(powers.float()) * kept

    def twin(self) -> State:
        other = State(self.numel)
        other.random.set_state(self.random.get_state())
        other.master, other.exp_avg, other.exp_avg_sq = (
            each.clone() for each in (self.master, self.exp_avg, self.exp_avg_sq)
        )
        return other

    def fields(self) -> list[torch.Tensor]:
        return [self.master, self.exp_avg, self.exp_avg_sq]

    def step_like_torch(self, chosen: AdamSettings, grad: torch.Tensor, step: int) -> None:
        adam_(
            chosen,
            masters=[self.master],
            grads=[grad],
            exp_avgs=[self.exp_avg],
            exp_avg_sqs=[self.exp_avg_sq],
            steps=[torch.tensor(step - 1.0)],
        )

    def step(self, chosen: AdamSettings, pieces: list[GradPiece], step: int, **more: Any) -> None:
        kernel.update(
            chosen,
            step=step,
            pieces=pieces,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            master=self.master,
            **{"grad_scale": 1.0, **more},
        )


class SplitState(State):
    """The same, with the master as compute parameter and remainder."""

    def __init__(self, whole: State, instructions: str = kernel.INSTRUCTIONS[0]) -> None:
        self.numel = whole.numel
        self.compute_param = torch.empty(self.numel, dtype=torch.bfloat16)
        self.remainder = torch.empty(self.numel, dtype=torch.int16)
        self.ties = kernel.split(whole.master, self.compute_param, self.remainder, instructions=instructions)
        self.exp_avg, self.exp_avg_sq = whole.exp_avg.clone(), whole.exp_avg_sq.clone()

    def step(self, chosen: AdamSettings, pieces: list[GradPiece], step: int, **more: Any) -> None:
        self.ties = kernel.update(
            chosen,
            step=step,
            pieces=pieces,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            compute_param=self.compute_param,
            remainder=self.remainder,
            ties=self.ties,
            **{"grad_scale": 1.0, **more},
        )

    def fields(self) -> list[torch.Tensor]:
        return [kernel.join(self.compute_param, self.remainder, self.ties), self.exp_avg, self.exp_avg_sq]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def equal_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Where one has a NaN the other has one, too; its payload may differ."""
    return all(bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all()) for a, b in zip(left, right, strict=True))


# The arithmetic


@pytest.fixture
def one_thread_of_torch() -> Iterator[None]:
    """Many small tensors take long where torch wakes its threads for each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@like_torch
@every_instruction_set
@pytest.mark.usefixtures("one_thread_of_torch")
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("way", WAYS)
def test_steps_equal_torchs_fused_kernel_for_every_length(way: str, decoupled: bool, instructions: str) -> None:
    chosen = settings_of(decoupled=decoupled, **WAYS[way])
    for numel in [*range(1, 36), 63, 127, 128, 999]:
        ours = State(numel, seed=numel)
        theirs = ours.twin()
        for step in range(1, STEPS + 1):
            ours.step(chosen, [GradPiece(0, ours.draw())], step, instructions=instructions)
            theirs.step_like_torch(chosen, theirs.draw(), step)
        assert equal_bits(ours.fields(), theirs.fields()), numel


@like_torch
@every_instruction_set
@pytest.mark.parametrize("oracle", [torch.optim.AdamW, torch.optim.Adam])
def test_millions_of_elements_equal_torchs_optimizer(
    oracle: type[torch.optim.AdamW | torch.optim.Adam], instructions: str
) -> None:
    numel = 200_007 if instructions == "portable" else 2_000_007
    chosen = settings_of(decoupled=oracle is torch.optim.AdamW)
    ours = State(numel)
    theirs = ours.twin()
    parameter = torch.nn.Parameter(theirs.master)
    optimizer = oracle(
        [parameter],
        lr=chosen.lr,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        fused=True,
    )
    for step in range(1, STEPS + 1):
        ours.step(chosen, [GradPiece(0, ours.draw())], step, instructions=instructions)
        parameter.grad = theirs.draw()
        optimizer.step()
    state = optimizer.state[parameter]
    assert equal_bits(ours.fields(), [parameter.data, state["exp_avg"], state["exp_avg_sq"]])


@like_torch
def test_late_steps_equal_torchs_bias_corrections() -> None:
    for step in [10, 1000, 65_537, 1 << 23]:
        ours = State(1000, seed=step)
        theirs = ours.twin()
        ours.step(settings_of(), [GradPiece(0, ours.draw())], step)
        theirs.step_like_torch(settings_of(), theirs.draw(), step)
        assert equal_bits(ours.fields(), theirs.fields())


@like_torch
@every_instruction_set
@pytest.mark.parametrize(("beta2", "step"), [(0.999, 1), (0.999, 600), (0.95, 7), (0.8, 2), (0.0, 1)])
def test_every_root_is_divided_as_by_torch(beta2: float, step: int, instructions: str) -> None:
    """Of two octaves of squares, as each other octave has the fractions of one of them; and of what is no usual number."""
    first, last = (torch.tensor(end).view(torch.int32).item() for end in (1.0, 4.0))
    for begin in range(first, last, 1 << 22):
        every = 64 if instructions == "portable" else 1 if instructions == kernel.INSTRUCTIONS[0] else 5
        squares = torch.arange(begin, begin + (1 << 22), every, dtype=torch.int32)
        ours = State(0)
        ours.numel = squares.numel()
        ours.exp_avg_sq = squares.view(torch.float32)
        ours.exp_avg_sq[:4] = torch.tensor([torch.inf, torch.nan, 0.0, 1e-45])
        ours.exp_avg, ours.master = torch.ones(ours.numel), torch.zeros(ours.numel)
        theirs = ours.twin()
        chosen = settings_of(betas=(0.9, beta2), eps=0.0, lr=1.0, weight_decay=0.0)
        # Where beta2 is 0, the gradients are the roots.
        grad = torch.zeros(ours.numel) if beta2 else ours.exp_avg_sq.sqrt()
        ours.step(chosen, [GradPiece(0, grad)], step, instructions=instructions)
        theirs.step_like_torch(chosen, grad, step)
        assert equal_bits(ours.fields(), theirs.fields())


@like_torch
@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.125, 0.3, 1 / 65536 / 3, 0.0])
def test_gradients_are_converted_and_scaled_as_by_torch(dtype: torch.dtype, scale: float, instructions: str) -> None:
    ours = State(5003)
    theirs = ours.twin()
    for step in range(1, STEPS + 1):
        ours.step(
            settings_of(), [GradPiece(0, ours.draw().to(dtype))], step, grad_scale=scale, instructions=instructions
        )
        theirs.step_like_torch(settings_of(), theirs.draw().to(dtype).float().mul_(scale), step)
    assert equal_bits(ours.fields(), theirs.fields())


@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compute_parameter_is_rounded_as_by_torch(dtype: torch.dtype, instructions: str) -> None:
    """At rest, with decay off, a step writes every master as it was: here all that round in some way of their own."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
    state = State((1 << 16) * len(lower))
    state.master = torch.cat([(upper << 16) + low for low in lower]).to(torch.int32).view(torch.float32)
    before = state.master.clone()
    compute_param = torch.empty(state.numel, dtype=dtype)
    grad = torch.zeros(state.numel)
    at_rest = settings_of(lr=0.0, weight_decay=0.0)
    state.step(at_rest, [GradPiece(0, grad)], 1, compute_param=compute_param, instructions=instructions)
    assert equal_bits([state.master, compute_param], [before, before.to(dtype)])


@every_instruction_set
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("way", WAYS)
def test_a_split_master_takes_the_same_steps(way: str, decoupled: bool, instructions: str) -> None:
    chosen = settings_of(decoupled=decoupled, **WAYS[way])
    whole = State(30_011)
    whole.master[::3] = whole.master[::3].half().float()  # weights that came from fp16: one in eight is a tie
    parts = SplitState(whole, instructions)
    assert parts.ties.numel() > 400
    compute_param = torch.empty(whole.numel, dtype=torch.bfloat16)
    for step in range(1, STEPS + 1):
        grad = whole.draw()
        grad[::2] = 0
        whole.step(chosen, [GradPiece(0, grad)], step, compute_param=compute_param, instructions=instructions)
        parts.step(chosen, [GradPiece(0, grad)], step, instructions=instructions)
        assert equal_bits(whole.fields(), parts.fields())
        assert equal_bits([parts.compute_param], [compute_param])


# Pieces of a sub-group


@given(
    numel=st.integers(1, 3000),
    cuts=st.sets(st.integers(1, 2999), max_size=6),
    split=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=settings.default.max_examples * 4 // 5)
def test_cutting_a_shard_anywhere_changes_no_bit(
    numel: int, cuts: set[int], split: bool, threads: int, seed: int
) -> None:
    """Not even where a vector would not end: the pieces know which elements are the last of the shard."""
    uncut, cut = State(numel, seed=seed), State(numel, seed=seed)
    places = [0, *sorted(place for place in cuts if place < numel), numel]
    target = SplitState(cut) if split else cut
    for step in range(1, STEPS + 1):
        grad = uncut.draw()
        uncut.step(settings_of(), [GradPiece(0, grad)], step)
        pieces = [GradPiece(a, grad[a:b], start=a, shard_numel=numel) for a, b in itertools.pairwise(places)]
        target.step(settings_of(), pieces, step, threads=threads)
    assert equal_bits(uncut.fields(), target.fields())


@pytest.mark.parametrize("split", [False, True])
def test_elements_in_no_piece_stay(split: bool) -> None:
    """Padding, and shards without a gradient; the ties among them, too."""
    before = State(1000)
    before.master[:] = 1.0 + 3 / 256  # halfway between two bf16 numbers, and rounded up
    after = SplitState(before.twin()) if split else before.twin()
    pieces = [GradPiece(0, torch.ones(100)), GradPiece(128, torch.ones(300)), GradPiece(640, torch.ones(1))]
    after.step(settings_of(), pieces, 1)
    inside = torch.zeros(1000, dtype=torch.bool)
    for piece in pieces:
        inside[piece.offset : piece.offset + piece.grad.numel()] = True
    for new, old in zip(after.fields(), before.fields(), strict=True):
        assert torch.equal(new[~inside], old[~inside])
        assert not (new[inside] == old[inside]).any()
    if isinstance(after, SplitState):
        assert after.ties.tolist() == (~inside).nonzero().squeeze(1).tolist()


def test_no_pieces_change_nothing() -> None:
    state = State(10)
    parts = SplitState(state)
    parts.step(settings_of(), [], 1)
    assert equal_bits(state.fields(), parts.fields())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": [GradPiece(8, torch.ones(4)), GradPiece(0, torch.ones(4))]}, "ascend"),
        ({"pieces": [GradPiece(0, torch.ones(4)), GradPiece(3, torch.ones(4))]}, "ascend"),
        ({"pieces": [GradPiece(14, torch.ones(4))]}, "end within"),
        ({"pieces": [GradPiece(0, torch.ones(4), start=5, shard_numel=8)]}, "shard"),
        ({"pieces": [GradPiece(0, torch.ones(4, dtype=torch.float64))]}, "gradients"),
        ({"pieces": [GradPiece(0, torch.ones(4)), GradPiece(4, torch.ones(4).half())]}, "one dtype"),
        ({"pieces": [GradPiece(0, torch.ones(8)[::2])]}, "contiguous"),
        ({"exp_avg_sq": torch.zeros(15)}, "16 elements"),
        ({"master": torch.zeros(16, dtype=torch.bfloat16)}, "float32"),
        ({"master": torch.zeros(4, 4)}, "1-D"),
        ({"master": None}, "in full, or"),
        ({"remainder": torch.zeros(16, dtype=torch.int16)}, "in full, or"),
        ({"compute_param": torch.zeros(16)}, "bfloat16"),
        ({"compute_param": torch.zeros(17, dtype=torch.bfloat16)}, "16 elements"),
        ({"threads": -1}, "threads"),
        ({"instructions": "sse9"}, "sse9"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "pieces": [GradPiece(0, torch.ones(16))],
        "exp_avg": torch.zeros(16),
        "exp_avg_sq": torch.zeros(16),
        "master": torch.zeros(16),
    }
    with pytest.raises(ValueError, match=message):
        kernel.update(settings_of(), step=1, grad_scale=1.0, **(given | change))


# Sums on the way

PAGE = 4096
BLOCK = 32768
"""Elements that the kernel takes at a time."""


class Pages:
    """A split state in memory of whole pages, field after field, as in an extent."""

    def __init__(self, numel: int, *, seed: int) -> None:
        state = SplitState(State(numel, seed=seed))
        self.numel, self.ties, self.random = numel, state.ties, torch.Generator().manual_seed(seed)
        memory = torch.empty(12 * numel + PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE
        self.bytes = memory[start : start + 12 * numel]
        for name, before in (("compute_param", 0), ("remainder", 2), ("exp_avg", 4), ("exp_avg_sq", 8)):
            field = getattr(state, name)
            place = self.bytes[before * numel : (before + field.itemsize) * numel].view(field.dtype)
            setattr(self, name, place.copy_(field))

    def sums(self) -> bytes:
        return page_checksums(memoryview(self.bytes.numpy()))

    def step(self, pieces: list[GradPiece], sums: PageSums | None, **more: Any) -> None:
        fields = {name: getattr(self, name) for name in ("compute_param", "remainder", "exp_avg", "exp_avg_sq")}
        given = {"step": 1, "grad_scale": 1.0, "pieces": pieces, "ties": self.ties, "sums": sums, **fields, **more}
        self.ties = kernel.update(settings_of(), **given)


@given(
    numel=st.sampled_from([2048, BLOCK, BLOCK + 2048, 2 * BLOCK + 4096]),
    cuts=st.sets(st.integers(0, 2 * BLOCK + 4096), max_size=6),
    known=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=settings.default.max_examples * 2 // 5)
def test_pages_are_summed_on_the_way(numel: int, cuts: set[int], known: bool, threads: int, seed: int) -> None:
    """Of elements that no piece covers too; and the elements are those of an update that sums nothing."""
    plain, summed, aside = (Pages(numel, seed=seed) for _ in range(3))
    places = sorted(place for place in cuts if place <= numel)
    pieces = [GradPiece(a, torch.randn(b - a, generator=plain.random)) for a, b in itertools.pairwise(places)][::2]
    sums = PageSums(summed.bytes, summed.sums() if known else bytes(12 * numel // PAGE * 4))
    plain.step(pieces, None)
    summed.step(pieces, sums, threads=threads)
    assert torch.equal(plain.bytes, summed.bytes) and torch.equal(plain.ties, summed.ties)
    assert sums.wrong_page is None
    assert sums.new == summed.sums()
    sums_aside, staged = PageSums(aside.bytes, sums.expected), aside.compute_param.clone()
    aside.compute_param.fill_(7)  # they are taken from elsewhere
    aside.step(pieces, sums_aside, threads=threads, staged=staged)
    assert torch.equal(aside.bytes, plain.bytes) and torch.equal(aside.ties, plain.ties)
    assert torch.equal(staged, aside.compute_param)
    assert (sums_aside.wrong_page, sums_aside.new) == (None, sums.new)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_page_that_is_not_as_it_was_is_found(threads: int) -> None:
    pages = Pages(BLOCK + 4096, seed=3)
    sums = PageSums(pages.bytes, pages.sums())
    random = torch.Generator().manual_seed(4)
    for _ in range(20):
        places = torch.randint(pages.bytes.numel(), (2,), generator=random)
        kept = pages.bytes.clone()
        pages.bytes[places] ^= 8
        pages.step([GradPiece(0, torch.zeros(pages.numel))], sums, threads=threads)
        assert sums.wrong_page == int(places.min()) // PAGE
        pages.bytes.copy_(kept)


def test_fields_that_lie_elsewhere_are_not_summed() -> None:
    pages = Pages(4096, seed=5)
    elsewhere = pages.exp_avg_sq.clone()
    before = pages.sums()
    pages.exp_avg_sq.zero_()  # not looked at
    sums = PageSums(pages.bytes, before)
    pages.step([GradPiece(0, torch.ones(4096))], sums, exp_avg_sq=elsewhere)
    assert sums.wrong_page is None
    at = 4 * (8 * 4096 // PAGE)
    assert sums.new[:at] == pages.sums()[:at] != before[:at]
    assert sums.new[at:] == bytes(len(before) - at)


def test_what_fills_no_whole_pages_is_not_summed() -> None:
    pages = Pages(4096, seed=6)
    for sums, change in (
        (PageSums(pages.bytes, pages.sums()[:-4]), {}),
        (PageSums(pages.bytes[:-PAGE], pages.sums()[:-4]), {}),
        (PageSums(pages.bytes, pages.sums()), {"exp_avg": pages.bytes[64 : 64 + 4 * 4096].view(torch.float32)}),
    ):
        with pytest.raises(ValueError, match="page"):
            pages.step([GradPiece(0, torch.ones(4096))], sums, **change)
    odd = Pages(4096, seed=6)
    odd.numel = 1000
    fields = {name: getattr(odd, name)[:1000] for name in ("compute_param", "remainder", "exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match="whole pages"):
        odd.step([GradPiece(0, torch.ones(1000))], PageSums(odd.bytes, odd.sums()), **fields)


def test_ties_out_of_the_sub_group_are_refused() -> None:
    compute_param, remainder = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int16)
    for ties in ([16], [-1], [3, 2], [5, 5]):
        with pytest.raises(ValueError, match="ties"):
            kernel.join(compute_param, remainder, torch.tensor(ties, dtype=torch.int32))


# Threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    one = State(400_001)
    one.master[::3] = one.master[::3].half().float()
    many, parts = one.twin(), SplitState(one)
    grad = one.draw()
    pieces = [GradPiece(0, grad[:150_000]), GradPiece(150_016, grad[150_016:])]
    one.step(settings_of(), pieces, 1, threads=1)
    many.step(settings_of(), pieces, 1, threads=threads)
    parts.step(settings_of(), pieces, 1, threads=threads)
    assert equal_bits(one.fields(), many.fields())
    assert equal_bits(one.fields(), parts.fields())


@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 33, 40_000, 100_003])
def test_gradients_are_summed_as_by_torch(numel: int, dtype: torch.dtype, instructions: str) -> None:
    state = State(numel)
    grads = [state.draw().to(dtype) for _ in range(3)]
    if numel > 2:
        grads[1][:2] = torch.tensor([float("inf"), -0.0])
    expected, sums = grads[0].float(), grads[0].float().clone()
    for grad in grads[1:]:
        expected = expected + grad.float()
        kernel.accumulate(sums, grad, threads=3, instructions=instructions)
    assert torch.equal(sums.view(torch.int32), expected.view(torch.int32))


@norms_like_torch
@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_torchs(dtype: torch.dtype, instructions: str) -> None:
    """Of several at once, long and short, with what is left of a register and of torch's eight sums."""
    assert kernel.norms_match_torch()
    lengths = [*range(70), 40_000, 100_003, 100_009, 4099]
    grads = [State(numel, seed=numel).draw().to(dtype) for numel in lengths]
    grads += [torch.tensor([1.0, float("inf")]).to(dtype), torch.full((20,), -0.0).to(dtype)]
    expected = torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads])
    found = kernel.norms(grads, threads=3, instructions=instructions)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert kernel.norms([torch.full((9,), float("nan")).to(dtype)], instructions=instructions).isnan().all()
    assert kernel.norms([], instructions=instructions).numel() == 0


@norms_like_torch
def test_norms_are_compared_with_torchs_whatever_the_default_dtype_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "norms_match_torch", kernel.norms_match_torch.__wrapped__)
    torch.set_default_dtype(torch.float64)
    try:
        assert kernel.norms_match_torch()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert kernel.norms_match_torch()


def test_norms_are_of_gradients_in_host_memory_of_whichever_dtype() -> None:
    assert kernel.norms([torch.full((4,), 2.0), torch.ones(9, dtype=torch.bfloat16)]).tolist() == [4.0, 3.0]
    with pytest.raises(ValueError, match="gradients must be 4 elements of"):
        kernel.norms([torch.zeros(4, dtype=torch.float64)])
    with pytest.raises(ValueError, match="1-D, contiguous"):
        kernel.norms([torch.zeros(2, 2)])


def test_only_gradients_of_one_length_in_host_memory_are_summed() -> None:
    with pytest.raises(ValueError, match="gradients must be 4 elements"):
        kernel.accumulate(torch.zeros(4), torch.zeros(5))
    with pytest.raises(ValueError, match="sums must be 4 elements"):
        kernel.accumulate(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4))
    with pytest.raises(ValueError, match="1-D, contiguous"):
        kernel.accumulate(torch.zeros(4), torch.zeros(8)[::2])


THREADS_AFTER_AN_UPDATE = """
import torch
from pathlib import Path
from infinity.optim import kernel
kernel.accumulate(torch.zeros(10**6), torch.ones(10**6), threads=3)
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(sum(name.startswith("inf-update") for name in names), "libgomp" in Path("/proc/self/maps").read_text())
"""


def test_torchs_own_threads_take_part_where_it_has_gnus_openmp() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS_AFTER_AN_UPDATE], capture_output=True, text=True, check=True)
    threads, has_libgomp = done.stdout.split()
    assert (threads, has_libgomp) in (("0", "True"), ("2", "False"))


THREADS_BESIDE_ANOTHER_RUNTIME = """
import ctypes, sys
from pathlib import Path
another = ctypes.CDLL(sys.argv[1])
import torch
from infinity.optim import kernel

def threads():
    return {task.name for task in Path("/proc/self/task").iterdir()}

torch.ones(1 << 20).add_(1)
before = threads()
kernel.accumulate(torch.zeros(1 << 20), torch.ones(1 << 20))
kernel.accumulate(torch.zeros(40000), torch.ones(40000))  # two shares for three threads
torch.ones(1 << 20).add_(1)
print(len(before), before == threads())
"""


def test_no_threads_come_or_go_beside_another_openmp_runtime(tmp_path: Path) -> None:
    """As packages bring one along that was loaded before torch, under a name of its own."""
    runtimes = [*(Path(torch.__file__).parent / "lib").glob("libgomp*")]
    if not runtimes:
        pytest.skip("torch has no OpenMP of GNU's in its folder here")
    another = tmp_path / "libgomp-another.so"
    name = runtimes[0].name.encode()
    another.write_bytes(runtimes[0].read_bytes().replace(name, name.replace(b"gomp", b"gimp")))
    done = subprocess.run(
        [sys.executable, "-c", THREADS_BESIDE_ANOTHER_RUNTIME, str(another)],
        env=os.environ | {"OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["3", "True"]


def test_several_python_threads_may_update_at_once() -> None:
    def run(seed: int) -> list[torch.Tensor]:
        state = State(200_003, seed=seed)
        for step in range(1, STEPS + 1):
            state.step(settings_of(), [GradPiece(0, state.draw())], step, threads=3)
        return state.fields()

    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(run, range(8)))
    assert all(equal_bits(found, run(seed)) for seed, found in enumerate(at_once))


def test_a_forked_child_updates_with_threads_of_its_own() -> None:
    state = State(200_003)
    pieces = [GradPiece(0, torch.ones(200_003))]
    state.step(settings_of(), pieces, 1, threads=3)
    child = multiprocessing.get_context("fork").Process(
        target=state.step, args=(settings_of(), pieces, 2), kwargs={"threads": 3}
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_the_gil_is_released() -> None:
    state = State(6_000_000)
    counted = 0
    done = threading.Event()

    def update() -> None:
        state.step(settings_of(), [GradPiece(0, state.exp_avg)], 1, threads=1, instructions="portable")
        done.set()

    worker = threading.Thread(target=update)
    worker.start()
    while not done.wait(1e-4):
        counted += 1
    worker.join()
    assert counted > 3


# The master as compute parameter and remainder

any_bits = st.lists(
    st.one_of(
        st.integers(0, (1 << 32) - 1),
        st.builds(lambda upper: (upper << 16) | 0x8000, st.integers(0, (1 << 16) - 1)),
        st.sampled_from(
            [0x7F7FFFFF, 0x7F7F8000, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x7F800001, 0x00008000]
        ),
    ),
    min_size=1,
    max_size=70,
)


def masters_of(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint32).view(np.float32))


def check_split(master: torch.Tensor, instructions: str) -> None:
    compute_param = torch.empty(master.numel(), dtype=torch.bfloat16)
    remainder = torch.empty(master.numel(), dtype=torch.uint16)
    ties = kernel.split(master, compute_param, remainder, instructions=instructions)
    assert equal_bits([compute_param], [master.bfloat16()])
    value = master.view(torch.int32).numpy()
    tied = ((value & 0x1FFFF) == 0x18000) & ~np.isnan(master.numpy())
    assert ties.dtype is torch.int32
    assert ties.tolist() == np.flatnonzero(tied).tolist()
    assert equal_bits([kernel.join(compute_param, remainder, ties, instructions=instructions)], [master])


@every_instruction_set
@given(values=any_bits)
@settings(max_examples=3 * settings.default.max_examples)
def test_join_inverts_split(instructions: str, values: list[int]) -> None:
    check_split(masters_of(values), instructions)


@every_instruction_set
def test_join_inverts_split_for_every_upper_half(instructions: str) -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]:
        check_split(torch.from_numpy((upper | low).astype(np.uint32).view(np.float32)), instructions)


# Whether to use it


@like_torch
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_it_matches_this_torch(way: str, decoupled: bool) -> None:
    assert kernel.matches_torch(settings_of(decoupled=decoupled, **WAYS[way]))


def test_torchs_plain_loop_is_left_to_torch() -> None:
    assert not kernel.matches_torch(settings_of(fused=False))
    assert not kernel.matches_torch(settings_of(fused=None))


def test_another_rounding_is_noticed_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rounds_otherwise(*args: Any, **lists: Any) -> None:
        adam_(*args, **lists)
        lists["exp_avg_sqs"][0][-1:].nextafter_(torch.ones(1))

    monkeypatch.setattr(kernel, "adam_", rounds_otherwise)
    monkeypatch.setattr(kernel, "_equal_to_torch", {})
    with caplog.at_level(logging.WARNING, "infinity"):
        assert not any(kernel.matches_torch(settings_of(decoupled=decoupled)) for decoupled in (True, False, True))
    assert [torch.__version__ in record.message for record in caplog.records] == [True]
