"""Moments in bf16: the kernel's numbers are those of plain PyTorch, bit for bit, and rounding is right on average."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.aio import page_checksums
from infinity.optim import AdamSettings, kernel
from infinity.optim.kernel import GradPiece, PageSums
from infinity.optim.small_moments import key_of, random_words, round_moments, rounded_by_chance

KEY = key_of("blocks.3.weight")
FIELDS = ("exp_avg", "exp_avg_sq")


def settings_of(decoupled: bool = True) -> AdamSettings:
    return AdamSettings(
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.1,
        decoupled_weight_decay=decoupled,
        maximize=False,
        fused=True,
    )


class State:
    """A sub-group with small moments and some kind of master; `step` by the kernel, `expect` in PyTorch."""

    def __init__(self, numel: int, master: str, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.numel = numel
        self.whole = torch.randn(numel, generator=self.random)
        self.moments = {name: torch.zeros(numel, dtype=torch.bfloat16) for name in FIELDS}
        self.master: dict[str, torch.Tensor] = {"master": self.whole.clone()}
        if master == "split":
            compute, remainder = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
            ties = kernel.split(self.whole, compute, remainder)
            self.master = {"compute_param": compute, "remainder": remainder, "ties": ties}
        elif master != "full":
            self.master["compute_param"] = self.whole.to(getattr(torch, master))
        self.expected = [self.whole.clone(), *(torch.zeros(numel, dtype=torch.bfloat16) for _ in FIELDS)]

    def draw(self) -> torch.Tensor:
        powers = torch.randint(-60, 20, (self.numel,), generator=self.random)
        grad = torch.randn(self.numel, generator=self.random) * torch.exp2(powers.float())
        return grad * (torch.rand(self.numel, generator=self.random) < 0.95)

    def step(self, pieces: list[GradPiece], step: int, **more: object) -> None:
        ties = kernel.update(
            settings_of(), step=step, grad_scale=1.0, pieces=pieces, **self.moments, **self.master, **more
        )
        if "ties" in self.master:
            self.master["ties"] = ties

    def expect(self, grad: torch.Tensor, step: int, place: int) -> None:
        master, *moments = self.expected
        exp_avg, exp_avg_sq = (moment.float() for moment in moments)
        kernel.update(
            settings_of(),
            step=step,
            grad_scale=1.0,
            pieces=[GradPiece(0, grad)],
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            master=master,
        )
        for moment, rounded in zip(
            moments, round_moments(exp_avg, exp_avg_sq, key=KEY, step=step, place=place), strict=True
        ):
            moment.copy_(rounded)

    def check(self) -> None:
        master = self.master.get("master")
        if master is None:
            master = kernel.join(**self.master)
        for here, there in zip([master, *self.moments.values()], self.expected, strict=True):
            bits = torch.int32 if here.itemsize == 4 else torch.int16
            assert torch.equal(here.view(bits), there.view(bits))


@pytest.mark.parametrize("instructions", kernel.INSTRUCTIONS)
@pytest.mark.parametrize("master", ["split", "full", "bfloat16", "float16"])
def test_the_kernel_gives_the_numbers_of_plain_pytorch(master: str, instructions: str) -> None:
    state = State(40_011, master)
    place = (1 << 32) - 20_000  # in the middle, the seed changes
    for step in range(1, 5):
        grad = state.draw()
        state.expect(grad, step, place)
        state.step([GradPiece(0, grad, key=KEY, place=place)], step, instructions=instructions)
        state.check()


@given(
    numel=st.integers(1, 3000),
    cuts=st.sets(st.integers(1, 2999), max_size=6),
    place=st.integers(0, 1 << 40),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=settings.default.max_examples * 2 // 5)
def test_cutting_a_shard_anywhere_changes_no_bit(
    numel: int, cuts: set[int], place: int, threads: int, seed: int
) -> None:
    state = State(numel, "split", seed)
    places = [0, *sorted(cut for cut in cuts if cut < numel), numel]
    for step in (1, 2):
        grad = state.draw()
        state.expect(grad, step, place)
        pieces = [
            GradPiece(a, grad[a:b], start=a, shard_numel=numel, key=KEY, place=place + a)
            for a, b in itertools.pairwise(places)
        ]
        state.step(pieces, step, threads=threads)
    state.check()


def test_pages_of_small_moments_are_verified_and_summed() -> None:
    numel = 32768 + 4096
    state = State(numel, "split")
    memory = torch.empty(8 * numel + 4096, dtype=torch.uint8)
    whole = memory[-memory.data_ptr() % 4096 :][: 8 * numel]
    for number, fields in enumerate((state.master, state.moments)):
        for other, name in enumerate(list(fields)[:2]):
            at = 4 * numel * number + 2 * numel * other
            fields[name] = whole[at : at + 2 * numel].view(fields[name].dtype).copy_(fields[name])
    before = page_checksums(memoryview(whole.numpy()))
    grad = state.draw()
    state.expect(grad, 1, 0)
    sums = PageSums(whole, before)
    state.step([GradPiece(0, grad, key=KEY)], 1, sums=sums)
    state.check()
    assert sums.wrong_page is None and sums.new == page_checksums(memoryview(whole.numpy()))
    whole[5 * 4096 + 17] ^= 1
    state.step([GradPiece(0, grad, key=KEY)], 2, sums=(again := PageSums(whole, sums.new)))
    assert again.wrong_page == 5


def test_a_moment_is_rounded_to_its_neighbours_and_right_on_average() -> None:
    numel = 400_000
    values = torch.full((numel,), 1.0 + 0.3 / 128)
    words = random_words(KEY, 7, 123, numel)
    for random in (words & 0xFFFF, words >> 16):
        rounded = rounded_by_chance(values, random).float()
        assert set(rounded.tolist()) == {1.0, 1.0 + 1 / 128}
        up = (rounded > 1).double().mean().item()
        assert abs(up - 0.3) < 5 * (0.3 * 0.7 / numel) ** 0.5
        lags = rounded - rounded.mean()
        for lag in (1, 2, 64, 2048):
            correlation = (lags[lag:] * lags[:-lag]).mean() / lags.square().mean()
            assert abs(correlation.item()) < 5 / numel**0.5
    assert torch.equal(rounded_by_chance(rounded, words & 0xFFFF).float(), rounded)  # what bf16 holds stays


def test_random_bits_depend_on_parameter_step_and_place_alone() -> None:
    words = random_words(KEY, 3, 1000, 5000)
    assert torch.equal(words[200:300], random_words(KEY, 3, 1200, 100))
    others = (KEY + 1, 3, 1000), (KEY, 4, 1000), (KEY, 3, 1000 + (1 << 32)), (KEY, 3, 1001)
    for key, step, place in others:
        assert (words == random_words(key, step, place, 5000)).double().mean() < 0.01


@pytest.mark.parametrize("instructions", kernel.INSTRUCTIONS)
def test_what_is_no_number_stays_none(instructions: str) -> None:
    grad = torch.ones(40)
    grad[3], grad[20], grad[33] = torch.nan, -torch.nan, torch.inf
    state = State(40, "full")
    state.step([GradPiece(0, grad, key=KEY)], 1, instructions=instructions)
    for moment in state.moments.values():
        assert moment[[3, 20]].isnan().all() and moment[33] == torch.inf
        assert moment[[0, 39]].isfinite().all()


def test_moments_of_two_dtypes_are_refused() -> None:
    state = State(64, "full")
    state.moments["exp_avg"] = state.moments["exp_avg"].float()
    with pytest.raises(ValueError, match="both moments must have one dtype"):
        state.step([], 1)
