"""Moments in 8 bits: the format is bitsandbytes', and the kernel's numbers are those of plain PyTorch, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.aio import page_checksums
from infinity.optim import AdamSettings, kernel
from infinity.optim.coded_moments import BLOCK_NUMEL, blocks_of, code_values, decode, encode
from infinity.optim.kernel import GradPiece, PageSums

SETTINGS = AdamSettings(
    lr=1e-2,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.1,
    decoupled_weight_decay=True,
    maximize=False,
    fused=True,
)


class State:
    """A sub-group of shards, all of which begin with a block, with coded moments and some kind of master; `step` by the kernel,
    `expect` in PyTorch, shard by shard."""

    def __init__(self, shards: list[int], master: str = "split", seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        offsets = [0, *itertools.accumulate(blocks_of(numel) * BLOCK_NUMEL for numel in shards)]
        self.shards = list(zip(offsets, shards, strict=False))
        self.numel = offsets[-1]
        whole = torch.randn(self.numel, generator=self.random)
        self.moments = {
            "exp_avg": torch.full((self.numel,), 127, dtype=torch.uint8),
            "exp_avg_sq": torch.zeros(self.numel, dtype=torch.uint8),
            "scales": torch.zeros(2 * blocks_of(self.numel)),
        }
        self.master: dict[str, torch.Tensor] = {"master": whole.clone()}
        if master == "split":
            compute, remainder = (
                torch.empty(self.numel, dtype=torch.bfloat16),
                torch.empty(self.numel, dtype=torch.int16),
            )
            ties = kernel.split(whole, compute, remainder)
            self.master = {"compute_param": compute, "remainder": remainder, "ties": ties}
        elif master != "full":
            self.master["compute_param"] = whole.to(getattr(torch, master))
        self.expected = [
            [whole[at : at + numel].clone(), *(torch.zeros(numel) for _ in range(2))] for at, numel in self.shards
        ]

    def draw(self) -> list[torch.Tensor]:
        grads = []
        for _, numel in self.shards:
            powers = torch.randint(-40, 20, (numel,), generator=self.random)
            grad = torch.randn(numel, generator=self.random) * torch.exp2(powers.float())
            grads.append(grad * (torch.rand(numel, generator=self.random) < 0.9))
        return grads

    def step(self, grads: list[torch.Tensor], step: int, **more: object) -> None:
        pieces = [GradPiece(at, grad) for (at, _), grad in zip(self.shards, grads, strict=True)]
        ties = kernel.update(SETTINGS, step=step, grad_scale=1.0, pieces=pieces, **self.moments, **self.master, **more)
        if "ties" in self.master:
            self.master["ties"] = ties

    def expect(self, grads: list[torch.Tensor], step: int) -> None:
        for grad, (master, exp_avg, exp_avg_sq) in zip(grads, self.expected, strict=True):
            fields = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master}
            kernel.update(SETTINGS, step=step, grad_scale=1.0, pieces=[GradPiece(0, grad)], **fields)
            exp_avg.copy_(decode(*encode(exp_avg, signed=True), signed=True))
            exp_avg_sq.copy_(decode(*encode(exp_avg_sq, signed=False), signed=False))

    def check(self) -> None:
        master = self.master.get("master")
        if master is None:
            master = kernel.join(**self.master)
        scales = self.moments["scales"].view(2, -1)
        here = [master, *(decode(self.moments[name], scales[n], signed=not n) for n, name in enumerate(MOMENTS))]
        for (at, numel), there in zip(self.shards, self.expected, strict=True):
            for values, expected in zip(here, there, strict=True):
                assert torch.equal(values[at : at + numel].view(torch.int32), expected.view(torch.int32))


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("instructions", kernel.INSTRUCTIONS)
@pytest.mark.parametrize("master", ["split", "full", "bfloat16", "float16"])
def test_the_kernel_gives_the_numbers_of_plain_pytorch(master: str, instructions: str) -> None:
    state = State([40_011, 256, 1, 3000], master)
    for step in range(1, 5):
        grads = state.draw()
        state.expect(grads, step)
        state.step(grads, step, instructions=instructions)
        state.check()


@given(
    shards=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=settings.default.max_examples * 2 // 5)
def test_shards_of_any_length_keep_blocks_of_their_own(shards: list[int], threads: int, seed: int) -> None:
    state = State(shards, seed=seed)
    for step in (1, 2):
        grads = state.draw()
        state.expect(grads, step)
        state.step(grads, step, threads=threads)
    state.check()


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_are_those_of_the_paper(signed: bool) -> None:
    """Built as section 2.1 of arXiv:2110.02861 describes it, and not as the kernel does: by decades of equally spaced means."""
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float64)
        positive += (10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
    values = torch.tensor(sorted([*([-x for x in positive] if signed else []), 0, *positive, 1]), dtype=torch.float64)
    assert torch.allclose(code_values(signed=signed).double(), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("instructions", kernel.INSTRUCTIONS)
def test_every_code_comes_back_and_every_value_gets_the_nearest(signed: bool, instructions: str) -> None:
    """Values around every middle between two codes, and every octave, by the kernel: a step that changes no moment."""
    table = code_values(signed=signed)
    middles = (table[1:] + table[:-1]) / 2
    octaves = 2.0 ** torch.arange(-30, 1).float()
    values = torch.cat([middles, octaves, *(middles * (1 + d * 2.0**-22) for d in (-2, -1, 1, 2)), table])
    values = values.clamp(-1, 1) if signed else values.clamp(0, 1)
    values = torch.nn.functional.pad(values, (0, -values.numel() % (BLOCK_NUMEL - 1))).view(-1, BLOCK_NUMEL - 1)
    values = torch.nn.functional.pad(values, (1, 0), value=1.0).reshape(-1)  # a 1 in every block
    codes, scales = encode(values, signed=signed)
    assert torch.equal(scales, torch.ones_like(scales))
    nearest = (values[:, None].double() - table.double()).abs().min(1).values
    distance = (values.double() - decode(codes, scales, signed=signed).double()).abs()
    tiny = (values > 0) & (values < table[1] / 2) if not signed else torch.zeros_like(values, dtype=torch.bool)
    assert (distance <= nearest * (1 + 1e-4))[~tiny].all()  # in the very middle, either of the two
    assert (codes[tiny] == 1).all()  # no zero for what isn't zero
    grad = values if signed else values.sqrt()
    expected = encode(grad if signed else grad * grad, signed=signed)
    field, of_field = ("exp_avg", 0) if signed else ("exp_avg_sq", 1)
    codes, scales = coded_at_once(grad, instructions)
    assert torch.equal(codes[field], expected[0])
    assert torch.equal(scales[of_field], expected[1])


def coded_at_once(grad: torch.Tensor, instructions: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The codes, by field, and scales (a row for each) by the kernel, with betas of which the moments are the gradient and its
    square at once."""
    at_once = AdamSettings(
        lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0, decoupled_weight_decay=True, maximize=False, fused=True
    )
    codes = {name: torch.zeros(grad.numel(), dtype=torch.uint8) for name in MOMENTS}
    scales = torch.zeros(2, blocks_of(grad.numel()))
    kernel.update(
        at_once,
        step=1,
        grad_scale=1.0,
        pieces=[GradPiece(0, grad)],
        **codes,
        scales=scales.view(-1),
        master=torch.zeros(grad.numel()),
        instructions=instructions,
    )
    return codes, scales


LEAST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    "values",
    [
        [LARGEST, -LARGEST, LARGEST / 3, 1.0, LEAST],  # the inverse of the scale is no normal number
        [-LARGEST, LARGEST / 1e7, 2.0**126],
        [LEAST, -LEAST / 2, LEAST / 4, 0.0],
        [LEAST / 2, -LEAST / 4],
        [-0.0, 0.0],
        [-3.0, 3.0, -1e-30],
        [torch.nan, -LARGEST],
        [-torch.nan, LARGEST],
        [-torch.inf, 1.0],
    ],
)
@pytest.mark.parametrize("instructions", kernel.INSTRUCTIONS)
def test_blocks_at_the_ends_of_what_fp32_can_say(values: list[float], instructions: str) -> None:
    grad = torch.tensor(values).repeat(BLOCK_NUMEL)[:BLOCK_NUMEL]
    codes, scales = coded_at_once(grad, instructions)
    for signed, name, moment in ((True, "exp_avg", grad), (False, "exp_avg_sq", grad * grad)):
        expected, scale = encode(moment, signed=signed)
        assert torch.equal(codes[name], expected)
        assert torch.allclose(scales[int(not signed)], scale, rtol=0, atol=0, equal_nan=True)


@given(seed=st.integers(0, 1 << 20), numel=st.integers(1, 2000), signed=st.booleans(), power=st.integers(-130, 110))
def test_decoded_moments_have_the_same_codes(seed: int, numel: int, signed: bool, power: int) -> None:
    random = torch.Generator().manual_seed(seed)
    powers = torch.randint(-30, 15, (numel,), generator=random) + power
    moments = torch.randn(numel, generator=random) * torch.exp2(powers.float())
    moments = moments if signed else moments.abs()
    codes, scales = encode(moments, signed=signed)
    decoded = decode(codes, scales, signed=signed)
    again = encode(decoded, signed=signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    for block in range(blocks_of(numel)):  # the largest of a block comes back as it was
        place = slice(block * BLOCK_NUMEL, (block + 1) * BLOCK_NUMEL)
        largest = moments[place].abs().argmax()
        if moments[place][largest].abs() >= torch.finfo(torch.float32).tiny:
            assert decoded[place][largest].abs() == moments[place][largest].abs()


@pytest.mark.parametrize("instructions", kernel.INSTRUCTIONS)
def test_a_block_with_what_is_no_number_is_none(instructions: str) -> None:
    state = State([1000], "full")
    grad = torch.ones(1000)
    grad[300], grad[600] = torch.nan, torch.inf
    state.expect([grad], 1)
    state.step([grad], 1, instructions=instructions)
    state.check()
    exp_avg = decode(state.moments["exp_avg"], state.moments["scales"].view(2, -1)[0], signed=True)
    assert exp_avg[256:768].isnan().all() and exp_avg[:256].isfinite().all() and exp_avg[768:].isfinite().all()


def test_pages_of_coded_moments_and_scales_are_verified_and_summed() -> None:
    numel = 32768 + 2048  # half a page of codes, and less than one of scales
    state = State([numel])
    pages = {"compute_param": 17, "remainder": 17, "exp_avg": 9, "exp_avg_sq": 9, "scales": 1}
    memory = torch.zeros((sum(pages.values()) + 1) * 4096, dtype=torch.uint8)
    whole = memory[-memory.data_ptr() % 4096 :][: sum(pages.values()) * 4096]
    at = 0
    for name, count in pages.items():
        fields = state.master if name in state.master else state.moments
        of_field = whole[at : at + fields[name].nbytes].view(fields[name].dtype)
        fields[name] = of_field.copy_(fields[name])
        at += count * 4096
    before = page_checksums(memoryview(whole.numpy()))
    grads = state.draw()
    state.expect(grads, 1)
    sums = PageSums(whole, before)
    state.step(grads, 1, sums=sums)
    state.check()
    assert sums.wrong_page is None and sums.new == page_checksums(memoryview(whole.numpy()))
    for page in (17 + 16, 34 + 8, 34 + 18):  # of the remainder, the half page of codes, the scales
        whole[page * 4096 + 17] ^= 1
        state.step(grads, 2, sums=(again := PageSums(whole, page_checksums(memoryview(whole.numpy())))))
        assert again.wrong_page is None
        expected = again.new
        whole[page * 4096 + 17] ^= 1
        state.step(grads, 2, sums=(again := PageSums(whole, expected)))
        assert again.wrong_page == page


def test_what_does_not_fit_is_refused() -> None:
    state = State([512], "full")
    grad = torch.ones(100)
    with pytest.raises(ValueError, match="must begin with a block"):
        kernel.update(SETTINGS, step=1, grad_scale=1.0, pieces=[GradPiece(64, grad)], **state.moments, **state.master)
    scales = state.moments.pop("scales")
    with pytest.raises(ValueError, match="scales must be given for 8-bit moments"):
        state.step([torch.ones(512)], 1)
    with pytest.raises(ValueError, match="the scales must be 4 elements"):
        state.step([torch.ones(512)], 1, scales=scales[:3])
    floats = {name: torch.zeros(512) for name in MOMENTS}
    with pytest.raises(ValueError, match="scales must be given for 8-bit moments"):
        kernel.update(SETTINGS, step=1, grad_scale=1.0, pieces=[], **floats, scales=scales, master=torch.zeros(512))
