"""Adam and AdamW over paged parameters.

Results equal those of `torch.optim.Adam` and `torch.optim.AdamW` with the same arguments, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from infinity.aio import Lease
from infinity.errors import ConfigError, InfinityError
from infinity.optim import AdamSettings, adam_, kernel
from infinity.optim.adam import MOMENTS
from infinity.optim.coded_moments import blocks_of, decode, encode
from infinity.optim.kernel import GradPiece, PageSums
from infinity.optim.small_moments import round_moments
from infinity.store.layout import BLOCK_NUMEL, Field
from infinity.store.layout import MOMENTS as FIELDS
from infinity.swap.gradient_lap import trained_shard
from infinity.swap.manager import SwapManager
from infinity.swap.paged_optimizer import PagedOptimizer, SteppedPiece
from infinity.swap.stager import Span
from infinity.swap.sub_group import PagedSubGroup
from infinity.units import PAGE_BYTES


class PagedAdam(PagedOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` for the parameters of a model that `swap.page` was called on.

    Args:
        params: parameters or parameter groups, as in torch; all of them paged by `swap`.
        swap: the manager that paged the model.
        lr, betas, eps, weight_decay, maximize, fused, decoupled_weight_decay: as in torch.

    Raises ConfigError for parameters that `swap` did not page or that were frozen then.
    """

    moments: tuple[str, ...] = MOMENTS
    rounds_moments: bool = True

    def __init__(
        self,
        params: Any,
        *,
        swap: SwapManager,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._adopt(swap)

    def _adopt(self, swap: SwapManager) -> None:
        super()._adopt(swap)
        if tuple(self._paged_state.fields)[: len(MOMENTS)] != MOMENTS:
            raise ConfigError(
                "the Adam kernel needs its moments first: page with swap.page(model, "
                f"PagingOptions(moments={MOMENTS!r}))"
            )
        self._take_sums_over()

    def _take_sums_over(self) -> None:
        """Let updates verify and compute checksums, where possible, while the bytes are in a CPU cache: see [Note: Sums
        on the way] in csrc/optim/adam.h."""
        fused = all(group["fused"] for group in self.param_groups)
        homes = {trained_shard(p).index: n for n, group in enumerate(self.param_groups) for p in group["params"]}
        for sub in self._paging.paged.sub_groups:
            alone = len({homes.get(piece.shard) for piece in sub.layout.pieces}) == 1
            # Next to a full master, the compute parameter is written after the update, which doesn't read it.
            reads_all = sub.layout.split or Field.COMPUTE not in sub.layout.fields
            has_adams_moments = sub.layout.moments == FIELDS[: len(MOMENTS)]
            on_drive = not sub.rests_in_host and sub.gradient_extent is None
            checked = self._paging.paged.stager.io.arena.file.checked
            sub.chunk.verified_by_caller = fused and alone and reads_all and has_adams_moments and on_drive and checked

    def _settings(self, group: dict[str, Any]) -> Any:
        if group.get("amsgrad") or group.get("capturable") or group.get("differentiable"):
            raise ConfigError("amsgrad, capturable and differentiable are not available for paged parameters")
        if isinstance(group["lr"], torch.Tensor) and not group["fused"]:
            raise ConfigError("a learning rate that is a tensor needs fused=True for paged parameters: pass a float")
        return AdamSettings(
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            fused=group["fused"],
        )

    def _step_pieces(
        self, sub: PagedSubGroup, batches: Mapping[AdamSettings, list[SteppedPiece]], lease: Lease | None
    ) -> None:
        for settings, batch in batches.items():
            if kernel.matches_torch(settings):
                _step_in_one_pass(sub, settings, batch, _alike(batch), lease)
            else:
                _step_as_torch(sub, settings, batch, lease)

    def _takes_staged(self, sub: PagedSubGroup, batches: Mapping[Any, list[SteppedPiece]]) -> bool:
        return bool(batches) and all(map(kernel.matches_torch, batches))

    def _step_and_verify(
        self, sub: PagedSubGroup, batches: Mapping[AdamSettings, list[SteppedPiece]], lease: Lease
    ) -> bool:
        if len(batches) != 1:
            return False
        ((settings, batch),) = batches.items()
        alike = _alike(batch)
        if not kernel.matches_torch(settings) or len(alike) != 1:
            return False
        io, start = self._paging.paged.stager.io, sub.extent.offset
        expected = io.arena.checksums(start, sub.layout.nbytes)
        sums = PageSums(lease.view(torch.uint8, 0, sub.layout.nbytes), expected)
        _step_in_one_pass(sub, settings, batch, alike, lease, sums)
        if sums.wrong_page is not None:
            at = sums.wrong_page * PAGE_BYTES
            io.verify(sub.chunk, Span(start + at, at, PAGE_BYTES))
            raise InfinityError(
                f"checksum mismatch on a page of {sub.chunk.name} that did not reproduce: suspect faulty RAM"
            )
        sub.chunk.unverified, sub.chunk.sums = False, sums.new
        return True


class PagedAdamW(PagedAdam):
    """`torch.optim.AdamW` for the parameters of a model that `swap.page` was called on; see `PagedAdam`."""

    def __init__(self, params: Any, *, swap: SwapManager, weight_decay: float = 1e-2, **settings: Any) -> None:
        super().__init__(params, swap=swap, weight_decay=weight_decay, decoupled_weight_decay=True, **settings)


def _alike(batch: list[SteppedPiece]) -> dict[tuple[float, float, torch.dtype], list[GradPiece]]:
    """Return the gradients of each kernel call: those with the same step, scale and dtype."""
    alike: dict[tuple[float, float, torch.dtype], list[GradPiece]] = {}
    for piece in batch:
        stepped = piece.stepping
        key = (float(stepped.steps), stepped.grad_scale, piece.grad.dtype)
        shard = stepped.shard
        grad = GradPiece(
            piece.offset, piece.grad, piece.start, shard.shape.numel(), shard.key, shard.first + piece.start
        )
        alike.setdefault(key, []).append(grad)
    return alike


def _step_in_one_pass(
    sub: PagedSubGroup,
    settings: AdamSettings,
    batch: list[SteppedPiece],
    alike: Mapping[tuple[float, float, torch.dtype], list[GradPiece]],
    lease: Lease | None,
    sums: PageSums | None = None,
) -> None:
    """Step with the kernel, which converts, scales, steps and rounds in one pass. `alike`: the gradients of each of its
    calls. `sums`: also verify and sum pages."""
    fields = sub.views(lease)
    compute = fields.get(Field.COMPUTE)
    narrow = compute if sub.compute_dtype is not torch.float32 else None
    for (step, grad_scale, _), pieces in alike.items():
        common: dict[str, Any] = {"step": step + 1, "grad_scale": grad_scale, "pieces": pieces, "sums": sums}
        common |= {"exp_avg": fields[Field.MOMENT_1], "exp_avg_sq": fields[Field.MOMENT_2]}
        common |= {"scales": fields.get(Field.SCALES)}
        if sub.layout.split:
            common |= {"compute_param": compute, "remainder": fields[Field.REMAINDER], "staged": sub.staged}
            ties = kernel.update(settings, ties=sub.ties, **common)
            if sums is None or sums.wrong_page is None:
                sub.ties = ties
        else:
            kernel.update(settings, master=fields[Field.MASTER], compute_param=narrow, **common)
    if compute is not None and narrow is None:
        sub.set_master(fields[Field.MASTER], lease)
    elif not sub.layout.split and narrow is not None:
        master = fields[Field.MASTER]
        for start, end in _between(batch, sub.layout.numel):  # compute parameters were not read: see SubGroup.state
            narrow[start:end].copy_(master[start:end])


def _between(batch: list[SteppedPiece], numel: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a sub-group that are not stepped: padding, and parameters without a gradient."""
    at = 0
    for piece in sorted(batch, key=lambda stepped: stepped.offset):
        if piece.offset > at:
            yield at, piece.offset
        at = piece.offset + piece.numel
    if at < numel:
        yield at, numel


def _step_as_torch(sub: PagedSubGroup, settings: AdamSettings, batch: list[SteppedPiece], lease: Lease | None) -> None:
    """Step with torch's own operations, one after another."""
    master = sub.master(lease)
    moments = [_moments(sub, piece.place, lease) for piece in batch]
    adam_(
        settings,
        masters=[master[piece.place] for piece in batch],
        grads=[piece.scaled() for piece in batch],
        exp_avgs=[exp_avg for exp_avg, _ in moments],
        exp_avg_sqs=[exp_avg_sq for _, exp_avg_sq in moments],
        steps=[piece.stepping.steps.clone() for piece in batch],  # cloned: a shard in two pieces counts one step
    )
    for piece, stepped in zip(batch, moments, strict=True):
        _set_moments(sub, piece, stepped, lease)
    sub.set_master(master, lease)


def _moments(sub: PagedSubGroup, place: slice, lease: Lease | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments (fp32) of these elements; views if they are stored in fp32."""
    first, second = sub.view(Field.MOMENT_1, lease)[place], sub.view(Field.MOMENT_2, lease)[place]
    if not sub.layout.coded:
        return first.float(), second.float()
    of_first, of_second = _scales(sub, place, lease)
    return decode(first, of_first, signed=True), decode(second, of_second, signed=False)


def _set_moments(
    sub: PagedSubGroup, piece: SteppedPiece, moments: tuple[torch.Tensor, torch.Tensor], lease: Lease | None
) -> None:
    """Store the stepped moments of a piece, the changed result of `_moments`."""
    first, second = sub.view(Field.MOMENT_1, lease)[piece.place], sub.view(Field.MOMENT_2, lease)[piece.place]
    if sub.layout.coded:
        coded = encode(moments[0], signed=True), encode(moments[1], signed=False)
        fields = (first, second), _scales(sub, piece.place, lease)
        for codes, scales, (new_codes, new_scales) in zip(*fields, coded, strict=True):
            codes.copy_(new_codes)
            scales.copy_(new_scales)
    elif first.dtype is not torch.float32:
        shard, step = piece.stepping.shard, int(piece.stepping.steps) + 1
        rounded = round_moments(*moments, key=shard.key, step=step, place=shard.first + piece.start)
        first.copy_(rounded[0])
        second.copy_(rounded[1])


def _scales(sub: PagedSubGroup, place: slice, lease: Lease | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of these elements' blocks, of the first moment and of the second."""
    first, second = sub.view(Field.SCALES, lease).view(2, -1)
    blocks = slice(place.start // BLOCK_NUMEL, blocks_of(place.stop))
    return first[blocks], second[blocks]
