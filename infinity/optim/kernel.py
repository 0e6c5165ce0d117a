"""The update kernel: torch's fused Adam and AdamW, bit for bit, in one pass over memory.

It converts, unscales and clips the gradient on the way in, and makes the compute parameter on the way out. A master may
be split into compute parameter and remainder. Tensors are updated in place, on the caller's thread and a few more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from infinity import _optim
from infinity.optim.adam import AdamSettings, adam_
from infinity.optim.coded_moments import blocks_of
from infinity.units import PAGE_BYTES

log = logging.getLogger("infinity")

INSTRUCTIONS: tuple[str, ...] = tuple(_optim.instruction_sets())
"""Instruction sets of this CPU that the kernel supports, fastest first. All give the same numbers."""

_GRAD_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_COMPUTE_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MOMENT_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.uint8: "uint8"}
_BITS = (torch.int16, torch.uint16)


@dataclass(frozen=True)
class GradPiece:
    """The gradient of elements [offset, offset + numel) of a sub-group.

    grad: fp32, bf16 or fp16, 1-D and contiguous, in host memory, with numel elements. start, shard_numel: the elements
    begin at `start` in a shard of `shard_numel`; by default the piece is the whole shard. torch rounds the last few
    elements of a shard differently, and the kernel matches torch's result for the shard, however it is cut. key, place:
    for bf16 moments, `small_moments.key_of` the parameter, and the first element's index in the whole parameter.
    """

    offset: int
    grad: torch.Tensor
    start: int = 0
    shard_numel: int | None = None
    key: int = 0
    place: int = 0

    @property
    def row(self) -> tuple[int, int, int, int, int, int, int]:
        """The piece as the compiled kernel expects it."""
        numel = self.grad.numel()
        whole = self.start + numel if self.shard_numel is None else self.shard_numel
        return self.grad.data_ptr(), self.offset, numel, self.start, whole, self.key, self.place


_Checked = tuple[torch.Tensor | None, Collection[torch.dtype], str, int]
"""A tensor, its allowed dtypes, its name, and its required number of elements."""


@dataclass
class PageSums:
    """Checksums of the pages of a sub-group's fields.

    An update verifies each page, changes it, and sums it while cached: [Note: Sums on the way] in csrc/optim/adam.h.

    pages: the memory (uint8, whole aligned 4 KiB pages, in host memory); bytes between fields stay unchanged. expected:
    4 bytes per page, as from `infinity.aio.File.checksums`; zeros for pages that are not verified. Set by the update:
    new, the new checksums in the same form, zeros for pages of no field; wrong_page, the number of the first page that
    failed, or None. If one failed, the fields are torn.
    """

    pages: torch.Tensor
    expected: bytes
    new: bytes = b""
    wrong_page: int | None = None


def update(
    settings: AdamSettings,
    *,
    step: float,
    grad_scale: float,
    pieces: Sequence[GradPiece],
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scales: torch.Tensor | None = None,
    master: torch.Tensor | None = None,
    compute_param: torch.Tensor | None = None,
    remainder: torch.Tensor | None = None,
    staged: torch.Tensor | None = None,
    ties: torch.Tensor | None = None,
    sums: PageSums | None = None,
    threads: int | None = None,
    instructions: str = INSTRUCTIONS[0],
) -> torch.Tensor:
    """Take one Adam step in place on the elements of a sub-group that `pieces` name.

    All tensors are 1-D, contiguous, in host memory and of one length. exp_avg and exp_avg_sq cover the whole sub-group:
    both fp32; or both bf16, rounded as in small_moments.py; or both uint8, coded as in coded_moments.py, with `scales`
    (fp32) of all blocks of the first, then of the second. The master is either `master` (fp32), from which
    compute_param (bf16 or fp16) is set if given; or compute_param (bf16), remainder (int16 or uint16) and ties of
    `split`.

    Pieces ascend without overlap, and their gradients have one dtype. `step` counts this step, from 1. Gradients are
    multiplied by `grad_scale` in fp32 (clipping, loss scale, averaging). `threads` share the work (None: torch's
    number), including the calling thread; the GIL is released. `staged`: if given, compute parameters of a split master
    are read from it, and the new ones are written to it too. `sums`: checksums to verify and recompute.

    Returns the new ties of the whole sub-group if the master is split; ties outside all pieces stay. The numbers are
    those of torch's fused kernel: see `matches_torch`. Raises ValueError for wrong tensors or pieces.
    """
    numel = exp_avg.numel()
    grad_dtype = pieces[0].grad.dtype if pieces else torch.float32
    expected = np.frombuffer(sums.expected if sums is not None else b"", dtype="<u4").astype(np.uint32, copy=False)
    _check(
        (exp_avg, _MOMENT_DTYPES, "exp_avg", numel),
        (exp_avg_sq, _MOMENT_DTYPES, "exp_avg_sq", numel),
        (master, (torch.float32,), "the master", numel),
        (compute_param, _COMPUTE_DTYPES if master is not None else (torch.bfloat16,), "the compute parameter", numel),
        (remainder, _BITS, "the remainder", numel),
        (staged, (torch.bfloat16,), "what is staged", numel),
        (sums.pages if sums is not None else None, (torch.uint8,), "pages", expected.size * PAGE_BYTES),
        *[(piece.grad, _GRAD_DTYPES, "gradients", piece.grad.numel()) for piece in pieces],
    )
    if exp_avg.dtype is not exp_avg_sq.dtype:
        raise ValueError(f"both moments must have one dtype, got {exp_avg.dtype} and {exp_avg_sq.dtype}")
    if (scales is not None) != (exp_avg.dtype is torch.uint8):
        raise ValueError(f"scales must be given for 8-bit moments, and only for these; the moments are {exp_avg.dtype}")
    if scales is not None:
        _check((scales, (torch.float32,), "the scales", 2 * blocks_of(numel)))
    if (master is None) == (remainder is None) or (master is None and compute_param is None):
        raise ValueError("pass the master either in full, or as compute parameter and remainder")
    for piece in pieces:
        if piece.grad.dtype is not grad_dtype:
            raise ValueError(f"gradients of one update must have one dtype, got {grad_dtype} and {piece.grad.dtype}")
    addressed = {"scales": scales, "master": master, "copy": compute_param, "remainder": remainder, "staged": staged}
    addressed["pages"] = sums.pages if sums is not None else None
    new_ties, new_sums, wrong_page = _optim.update(
        lr=settings.lr,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        decoupled=settings.decoupled_weight_decay,
        maximize=settings.maximize,
        step=step,
        grad_scale=grad_scale,
        grad_dtype=_GRAD_DTYPES[grad_dtype],
        compute_dtype=_COMPUTE_DTYPES[compute_param.dtype] if compute_param is not None else "bfloat16",
        moments_dtype=_MOMENT_DTYPES[exp_avg.dtype],
        pieces=[piece.row for piece in pieces],
        numel=numel,
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        ties=(torch.empty(0, dtype=torch.int32) if ties is None else ties).numpy(),
        expected=expected,
        threads=threads or torch.get_num_threads(),
        instructions=instructions,
        **{name: 0 if tensor is None else tensor.data_ptr() for name, tensor in addressed.items()},
    )
    if sums is not None:
        sums.new = new_sums.astype("<u4", copy=False).tobytes()
        sums.wrong_page = wrong_page if wrong_page >= 0 else None
    return torch.from_numpy(new_ties)


# [Note: Split masters]
# The compute parameter is the master's upper 16 bits, rounded to nearest even as torch converts. The remainder is the
# lower 16 bits. A remainder above 0x8000 means that the compute parameter was rounded up by one in the last place;
# below, that it was not. At 0x8000, a tie, it was rounded to the even neighbour: an odd compute parameter was not
# rounded up, and an even one may have been. So a list has the ties that were rounded up; one in 131072 of the masters
# in training is a tie. Every master is restored bit for bit, including infinities, denormals and values that round up
# to infinity. A NaN stays a NaN.


def split(
    master: torch.Tensor,
    compute_param: torch.Tensor,
    remainder: torch.Tensor,
    *,
    threads: int | None = None,
    instructions: str = INSTRUCTIONS[0],
) -> torch.Tensor:
    """Set `compute_param` (bf16) and `remainder` (int16 or uint16) from `master` (fp32): see [Note: Split masters].

    Returns the ties that were rounded up: ascending indices (int32). `join` restores the master from the three, bit for
    bit except for the payload of a NaN. All are 1-D and contiguous, in host memory, of one length.
    """
    _check_split(master, "the master", compute_param, remainder, master.numel())
    ties = _optim.split(
        master=master.data_ptr(),
        numel=master.numel(),
        copy=compute_param.data_ptr(),
        remainder=remainder.data_ptr(),
        threads=threads or torch.get_num_threads(),
        instructions=instructions,
    )
    return torch.from_numpy(ties)


def join(
    compute_param: torch.Tensor,
    remainder: torch.Tensor,
    ties: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    threads: int | None = None,
    instructions: str = INSTRUCTIONS[0],
) -> torch.Tensor:
    """Return the master (fp32) from the results of `split`, in `out` if given."""
    numel = compute_param.numel()
    master = torch.empty(numel, dtype=torch.float32) if out is None else out
    _check_split(master, "out", compute_param, remainder, numel)
    _optim.join(
        copy=compute_param.data_ptr(),
        remainder=remainder.data_ptr(),
        numel=numel,
        ties=ties.numpy(),
        master=master.data_ptr(),
        threads=threads or torch.get_num_threads(),
        instructions=instructions,
    )
    return master


def accumulate(
    sums: torch.Tensor, grads: torch.Tensor, *, threads: int | None = None, instructions: str = INSTRUCTIONS[0]
) -> None:
    """Add `grads` (fp32, bf16 or fp16) to `sums` (fp32), as `sums.add_(grads.float())` does, in one pass over memory.

    Both are 1-D, contiguous, in host memory, of one length; ValueError for others. (torch's own mixed sum takes 20
    times as long.)
    """
    _check((sums, (torch.float32,), "sums", sums.numel()), (grads, _GRAD_DTYPES, "gradients", sums.numel()))
    _optim.accumulate(
        grad_dtype=_GRAD_DTYPES[grads.dtype],
        grads=grads.data_ptr(),
        numel=sums.numel(),
        sums=sums.data_ptr(),
        threads=threads or torch.get_num_threads(),
        instructions=instructions,
    )


def norms(
    gradients: Sequence[torch.Tensor], *, threads: int | None = None, instructions: str = INSTRUCTIONS[0]
) -> torch.Tensor:
    """Return the 2-norm of each gradient (fp32, 1-D), bit for bit torch's `vector_norm` if `norms_match_torch`.

    gradients: each fp32, bf16 or fp16, 1-D and contiguous, in host memory; one of the `threads` (None: torch's number)
    processes each. Raises ValueError for others.
    """
    _check(*[(gradient, _GRAD_DTYPES, "gradients", gradient.numel()) for gradient in gradients])
    computed = _optim.norms(
        gradients=[(_GRAD_DTYPES[gradient.dtype], gradient.data_ptr(), gradient.numel()) for gradient in gradients],
        threads=threads or torch.get_num_threads(),
        instructions=instructions,
    )
    return torch.from_numpy(computed)


@functools.cache
def norms_match_torch() -> bool:
    """Return True if `norms` has the bits of torch's, compared on the first call. See [Note: The same as torch]."""
    random = torch.Generator().manual_seed(0)
    sizes = [*_CHECK_SIZES, *range(1, 24)]  # all remainders of torch's eight partial sums
    drawn = [
        torch.randn(numel, generator=random, dtype=torch.float32, device="cpu") for numel in sizes for _ in range(20)
    ]
    expected = torch.stack([torch.linalg.vector_norm(gradient) for gradient in drawn])
    return torch.equal(norms(drawn).view(torch.int32), expected.view(torch.int32))


# [Note: The same as torch]
# The kernel rounds where torch's binary does. torch's source does not determine that: the compiler chose where a
# product and a sum are rounded once. Another torch or CPU may differ, so before the kernel is used it is compared with
# the installed torch, once for each path through the arithmetic.
_CHECK_STEPS = 2
_CHECK_SIZES = (4096, 1021, 77, 5)
_equal_to_torch: dict[tuple[object, ...], bool] = {}


def matches_torch(settings: AdamSettings) -> bool:
    """Return True if the kernel gives the numbers of torch's fused kernel here with such settings, bit for bit.

    False if settings.fused is not set, because torch's plain loop rounds differently. Otherwise found by comparing some
    thousand elements, on the first call for a kind of settings and number of threads: [Note: The same as torch].
    """
    if not settings.fused:
        return False
    threads = torch.get_num_threads()
    decays = settings.weight_decay != 0
    key = (settings.decoupled_weight_decay, decays, settings.maximize, 1 - settings.betas[0] < 0.5, threads)
    if key not in _equal_to_torch:
        _equal_to_torch[key] = all(_same_steps(settings, numel) for numel in _CHECK_SIZES)
        if not _equal_to_torch[key] and sum(not equal for equal in _equal_to_torch.values()) == 1:
            log.warning(
                "torch %s rounds Adam differently from infinity's update kernel on this machine: using torch's kernel, "
                "which takes more passes over memory",
                torch.__version__,
            )
    return _equal_to_torch[key]


def _same_steps(settings: AdamSettings, numel: int) -> bool:
    """Return True if a few steps agree on random elements, some of them very large, very small or zero."""
    random = torch.Generator().manual_seed(numel)

    def draw() -> torch.Tensor:
        normal = torch.randn(numel, generator=random)
        powers = torch.randint(-60, 15, (numel,), generator=random) * (torch.rand(numel, generator=random) < 0.3)
        return normal * torch.exp2(powers.float()) * (torch.rand(numel, generator=random) < 0.98)

    fields = draw(), draw(), draw().square()
    ours, theirs = [field.clone() for field in fields], [field.clone() for field in fields]
    for done in range(_CHECK_STEPS):
        grad = draw()
        pieces = [GradPiece(0, grad.clone())]
        master, avg, avg_sq = ours
        update(settings, step=done + 1, grad_scale=1.0, pieces=pieces, master=master, exp_avg=avg, exp_avg_sq=avg_sq)
        masters, avgs, avg_sqs = ([field] for field in theirs)
        steps = [torch.tensor(float(done))]
        adam_(settings, masters=masters, grads=[grad], exp_avgs=avgs, exp_avg_sqs=avg_sqs, steps=steps)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ours, theirs, strict=True))


def _check_split(
    master: torch.Tensor, named: str, compute_param: torch.Tensor, remainder: torch.Tensor, numel: int
) -> None:
    of_bf16 = (compute_param, (torch.bfloat16,), "the compute parameter", numel)
    _check((master, (torch.float32,), named, numel), of_bf16, (remainder, _BITS, "the remainder", numel))


def _check(*checked: _Checked) -> None:
    for tensor, dtypes, named, numel in checked:
        if tensor is None:
            continue
        if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{named} must be 1-D, contiguous and in host memory for the update kernel")
        if tensor.dtype not in dtypes or tensor.numel() != numel:
            raise ValueError(
                f"{named} must be {numel} elements of {(*dtypes,)}, got {tensor.numel()} of {tensor.dtype}"
            )
