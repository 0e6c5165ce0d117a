"""The arguments of `infinity-bench plan`: the model, the machine, the training, what is written."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from infinity.cli.arguments import (
    add_json,
    add_path,
    add_schedule,
    add_scheme,
    checked_value,
    count,
    size,
    size_or_none,
)
from infinity.plan.frozen_groups import BASE_BITS
from infinity.units import parse_count

OPTIMIZERS = ("AdamW", "Muon", "SGD", "plain-SGD")

LORA_RANK_DEFAULT = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them, in groups."""
    add_path(
        parser,
        "folder on the drive, nvme_path of the config that is written; without --preset this machine and that drive are "
        "measured",
    )
    _add_model(parser)
    _add_machine(parser)
    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch-size",
        type=count,
        default=1,
        metavar="N",
        help="samples per micro-batch and GPU (default: 1)",
    )
    training.add_argument(
        "--accumulation",
        type=count,
        default=1,
        metavar="N",
        help="micro-batches per step (default: 1)",
    )
    add_schedule(training, default="horizontal")
    training.add_argument("--no-checkpointing", action="store_true", help="keep all activations, recompute none")
    training.add_argument(
        "--pinned-bytes-max",
        type=size,
        metavar="BYTES",
        help="pinned memory of a rank, its cache and the buffer of activations included (default: as fits best)",
    )
    training.add_argument(
        "--cache",
        type=size_or_none,
        metavar="BYTES",
        help="part of it that keeps copies and optimizer state from step to step (default: all memory that is left, or 0 with "
        "--pinned-bytes-max)",
    )
    training.add_argument(
        "--gradient-memory",
        type=size_or_none,
        metavar="BYTES",
        help="host memory of a rank in which gradients wait for their update; what doesn't fit waits on NVMe (default: all, "
        "or 0 where nothing fits otherwise)",
    )
    training.add_argument(
        "--offload-activations",
        choices=("none", "cpu", "nvme"),
        help="where saved activations wait for their backward, as infinity.offload_activations (default: none, the GPU; cpu "
        "where nothing fits otherwise)",
    )
    training.add_argument(
        "--activation-buffer",
        type=size,
        metavar="BYTES",
        help="pinned memory of a rank through which those on NVMe pass (default: 256 MiB, and more where they need it)",
    )
    training.add_argument(
        "--durability",
        choices=("none", "step"),
        default="none",
        help="step: every step is committed, which takes twice the space on the drives and no cache (default: none)",
    )
    add_scheme(training)
    training.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="AdamW",
        help="what is kept of each parameter beside its master: two numbers (AdamW), one of the blocks' matrices and two of "
        "all else (Muon), one (SGD, with momentum), or none (plain-SGD) (default: AdamW)",
    )
    training.add_argument(
        "--groups-per-block",
        type=count,
        default=1,
        metavar="N",
        help="wrap the parts of a block as so many groups: less memory, more collectives (default: 1)",
    )
    training.add_argument(
        "--lora",
        type=count,
        default=LORA_RANK_DEFAULT,
        metavar="RANK",
        help="rank of the adapters that are trained on frozen weights in their files (default: %(default)s)",
    )
    training.add_argument(
        "--base-bits",
        type=int,
        choices=BASE_BITS,
        help="bits of those frozen weights: 16, or bitsandbytes' 8 or 4 for the matrices of the blocks (default: what "
        "--hf-config says, else 16)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--write-config", type=Path, metavar="FILE", help="write a training config for the chosen strategy"
    )
    add_json(output)
    output.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw step time over parameters (needs matplotlib)"
    )
    output.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write what the chosen strategy does when, for chrome://tracing"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--params",
        type=checked_value(parse_count, at_least=1),
        metavar="COUNT",
        help='number of parameters, such as "70B"',
    )
    for name, meaning in (("layers", "blocks"), ("hidden", "hidden size"), ("heads", "attention heads")):
        model.add_argument(f"--{name}", type=count, metavar="N", help=meaning)
    model.add_argument("--vocab", type=count, metavar="N", help="vocabulary (default: 32000)")
    model.add_argument("--seq", type=count, metavar="N", help="tokens of a sample (default: 2048)")
    model.add_argument(
        "--hf-config",
        type=Path,
        metavar="FILE",
        help="config.json of a Hugging Face model, dense or a mixture of experts",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """The figures have the names of attributes of Machine, and their units."""
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--preset", metavar="NAME", help='a known machine, or a GPU such as "RTX 3090"; "list" names them'
    )
    machine.add_argument("--nodes", type=count, metavar="N", help="nodes (default: 1)")
    machine.add_argument("--gpus", type=count, dest="ranks_per_node", metavar="N", help="GPUs of a node, or processes")
    for name, attribute, meaning in (
        ("gpu-memory", "device_bytes", "memory of a GPU"),
        ("host-memory", "host_bytes", "memory of a node"),
        ("drive-size", "drive_bytes", "capacity of a node's drives together"),
    ):
        machine.add_argument(f"--{name}", type=size, dest=attribute, metavar="BYTES", help=meaning)
    mixed = "GB/s that they read and write together while doing as much of each; without it they take turns"
    for name, attribute, meaning in (
        ("tflops", "flops_per_s", "TFLOP/s that a GPU reaches while training"),
        ("gpu-bandwidth", "device_bytes_per_s", "GB/s of a GPU's memory"),
        ("link", "link_bytes_per_s", "GB/s between host and GPU, each way"),
        ("host-bandwidth", "host_bytes_per_s", "GB/s of a node's memory"),
        ("read", "read", "GB/s that a node's drives read"),
        ("write", "write", "GB/s that they write"),
        ("mixed", "mixed", mixed),
        ("node-link", "node_link_bytes_per_s", "GB/s between the GPUs of a node"),
        ("network", "network_bytes_per_s", "GB/s from a node to the others"),
    ):
        rate = partial(_rate, meaning.split()[0])
        machine.add_argument(f"--{name}", type=rate, dest=attribute, metavar="RATE", help=meaning)
    machine.add_argument("--cpu", action="store_true", help="compute on the CPU: there is no GPU")


def _rate(unit: str, text: str) -> float:
    """The number in `text`, which is of GB or TFLOP per second, without the prefix."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"expected a number of {unit} above 0, without the unit, such as 12.5, got {text}"
        )
    return value * {"G": 1e9, "T": 1e12}[unit[0]]
