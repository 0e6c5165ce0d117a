"""Options of a training that is planned or timed, and the work that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_args

from infinity.cli.arguments import count, size_or_none
from infinity.plan.transformer import Transformer
from infinity.plan.work import Work, moments_of
from infinity.schedule.scheme import (
    MOMENT_BYTES_OF,
    MasterWeights,
    Schedule,
    Scheme,
    Update,
    choose_update,
)


def add_training(
    parser: argparse._ActionsContainer,
    *,
    batch_size: int,
    schedule: Schedule,
    optimizers: Sequence[str],
    cache: int | None,
) -> None:
    add = parser.add_argument
    text = f"sequences per micro-batch and GPU (default: {batch_size})"
    add("--batch-size", type=count, default=batch_size, metavar="N", help=text)
    add("--accumulation", type=count, default=1, metavar="N", help="micro-batches per step (default: 1)")
    text = "horizontal: one micro-batch after the other, as in a loop; vertical: all of them through a group before "
    text += f"the next, as in Engine.train_batch (default: {schedule})"
    add("--schedule", choices=get_args(Schedule), default=schedule, help=text)
    text = "how masters are stored on NVMe: split into compute parameter and remainder, or in full (default: split)"
    add("--master-weights", choices=get_args(MasterWeights), default="split", help=text)
    text = "dtype of AdamW's two moments on NVMe; bf16 saves 4 bytes per parameter, 8bit saves 6, and both change the "
    text += "results (default: fp32)"
    add("--moments-dtype", choices=[*MOMENT_BYTES_OF], default="fp32", help=text)
    text = "when state on NVMe is updated; auto: in the backward, if there is space for what that takes with clipping "
    text += "or accumulation, else before the next forward"
    add("--update", choices=("auto", *get_args(Update)), default="auto", help=text)
    add("--no-clipping", action="store_true", help="do not clip gradients (default: at a norm of 1)")
    text = "optimizer, with its moments per parameter: two (AdamW and Adam), one for the blocks' matrices and two for "
    text += "all else (Muon), one (SGD, with momentum), or none (plain-SGD) (default: AdamW)"
    add("--optimizer", choices=optimizers, default="AdamW", help=text)
    default = "all memory that is left, or 0 if that is faster or with --pinned-bytes-max" if cache is None else cache
    text = "part of the pinned memory that keeps compute parameters and optimizer state from step to step "
    add("--cache", type=size_or_none, default=cache, metavar="BYTES", help=f"{text}(default: {default})")
    text = "host memory of a rank in which gradients wait for their update; the others wait on NVMe (default: all that fit)"
    add("--gradient-memory", type=size_or_none, metavar="BYTES", help=text)


def work_from(
    options: argparse.Namespace, model: Transformer, *, ranks: int = 1, at_once: int | None = None, **others: Any
) -> Work:
    """Return the work of one rank in a step, from the options of `add_training`. at_once: micro-batches that pass
    through a group before the next; None: as --schedule says. others: more attributes of `Work`."""
    if at_once is None:
        at_once = options.accumulation if options.schedule == "vertical" else 1
    muon = options.optimizer == "Muon"
    update, speculative = choose_update(
        options.update,
        clipping=not options.no_clipping,
        accumulation=options.accumulation // at_once,
        loss_scaling=False,
        collective=muon and ranks > 1,
    )
    scheme = Scheme(
        options.master_weights,
        update,
        moments=moments_of(options.optimizer, model),
        moment_bytes=MOMENT_BYTES_OF[options.moments_dtype],
        speculative=speculative,
        collective=muon and ranks > 1,
    )
    return Work(
        model,
        ranks=ranks,
        samples=options.batch_size,
        micro_batches=options.accumulation,
        micro_batches_at_once=at_once,
        clipping=not options.no_clipping,
        scheme=scheme,
        muon=muon,
        gradient_bytes_max=options.gradient_memory,
        unasked=options.update == "auto",
        **others,
    )
