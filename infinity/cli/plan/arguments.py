"""The arguments of `infinity-bench plan`: the model, the machine, the training, what is written."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from infinity.cli.arguments import add_json, add_path, checked_value, count, size
from infinity.cli.plan.hf_config import SEQ_DEFAULT, read_hf_config, stored_bits
from infinity.cli.training import add_training
from infinity.errors import ConfigError
from infinity.plan.frozen_groups import BASE_BITS
from infinity.plan.transformer import Transformer, dense_transformer, heads_for, transformer_of
from infinity.units import parse_count

VOCABULARY_DEFAULT = 32_000


def base_bits(asked: argparse.Namespace) -> int:
    bits: int | None = asked.base_bits
    return bits or (stored_bits(asked.hf_config) if asked.hf_config is not None else 16)


def model_from(asked: argparse.Namespace) -> Transformer:
    ways = [asked.params is not None, asked.layers is not None or asked.hidden is not None, asked.hf_config is not None]
    if sum(ways) != 1:
        raise ConfigError("describe the model once: --params COUNT, or --layers N --hidden N, or --hf-config FILE")
    if asked.hf_config is not None:
        for name in ("heads", "vocab"):
            if getattr(asked, name) is not None:
                raise ConfigError(f"--{name} comes from --hf-config: leave it out")
        return read_hf_config(asked.hf_config, seq=asked.seq)
    seq = asked.seq or SEQ_DEFAULT
    vocab = asked.vocab or VOCABULARY_DEFAULT
    if asked.params is not None:
        if asked.heads is not None:
            raise ConfigError("--heads goes with --layers and --hidden, not with --params")
        try:
            return transformer_of(asked.params, seq=seq, vocab=vocab)
        except ValueError as error:
            raise ConfigError(f"--params: {error}") from None
    if asked.layers is None or asked.hidden is None:
        raise ConfigError("--layers and --hidden go together: give both")
    heads = asked.heads or heads_for(asked.hidden)
    if asked.hidden % heads:
        raise ConfigError(f"--heads {heads} does not divide --hidden {asked.hidden}")
    return dense_transformer(layers=asked.layers, hidden=asked.hidden, heads=heads, seq=seq, vocab=vocab)


OPTIMIZERS = ("AdamW", "Muon", "SGD", "plain-SGD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(
        parser,
        "folder on the drive, and nvme_path of the written config; without --preset this machine and that drive are "
        "measured",
    )
    add = parser.add_argument_group("model").add_argument
    text = 'number of parameters, such as "70B"'
    add("--params", type=checked_value(parse_count, at_least=1), metavar="COUNT", help=text)
    for name, meaning in (
        ("layers", "blocks"),
        ("hidden", "hidden size"),
        ("heads", "attention heads"),
        ("vocab", "vocabulary (default: 32000)"),
        ("seq", "tokens of a sample (default: 2048)"),
    ):
        add(f"--{name}", type=count, metavar="N", help=meaning)
    text = "config.json of a Hugging Face model, dense or a mixture of experts"
    add("--hf-config", type=Path, metavar="FILE", help=text)
    add = parser.add_argument_group("machine").add_argument
    add("--preset", metavar="NAME", help='a known machine, or a GPU such as "RTX 3090"; "list" lists them')
    add("--nodes", type=count, metavar="N", help="nodes (default: 1)")
    add("--gpus", type=count, dest="ranks_per_node", metavar="N", help="GPUs of a node, or processes")
    for name, attribute, meaning in (
        ("gpu-memory", "device_bytes", "memory of a GPU"),
        ("host-memory", "host_bytes", "memory of a node"),
        ("drive-size", "drive_bytes", "capacity of a node's drives together"),
    ):
        add(f"--{name}", type=size, dest=attribute, metavar="BYTES", help=meaning)
    mixed = "GB/s that they read and write together, in equal parts; without it they take turns"
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
        add(f"--{name}", type=partial(_rate, meaning.split()[0]), dest=attribute, metavar="RATE", help=meaning)
    add("--cpu", action="store_true", help="compute on the CPU: there is no GPU")
    group = parser.add_argument_group("training")
    add = group.add_argument
    text = "tokens of a step, over all GPUs: choose the micro-batches, how many run at once, where activations and "
    text += (
        "gradients wait, and over how many GPUs the model is split, for the fastest step that fits; other options are "
    )
    text += "kept"
    add("--tokens-per-step", type=checked_value(parse_count, at_least=1), metavar="COUNT", help=text)
    add_training(group, batch_size=1, schedule="horizontal", optimizers=OPTIMIZERS, cache=None)
    group.set_defaults(batch_size=None, accumulation=None, schedule=None)  # None: not given
    text = "micro-batches that pass through a group before the next, as infinity.micro_batches_at_once (default: by "
    text += "--schedule, all or one)"
    add("--micro-batches-at-once", type=count, metavar="K", help=text)
    add("--no-checkpointing", action="store_true", help="keep all activations, recompute none")
    text = "pinned memory of a rank, including cache and activation buffer (default: what fits best)"
    add("--pinned-bytes-max", type=size, metavar="BYTES", help=text)
    text = "where saved activations wait for their backward, as infinity.offload_activations (default: none, the GPU; "
    text += "cpu if nothing fits otherwise)"
    add("--offload-activations", choices=("none", "cpu", "nvme"), help=text)
    text = "pinned memory of a rank for activations on NVMe (default: 256 MiB, or more if needed)"
    add("--activation-buffer", type=size, metavar="BYTES", help=text)
    text = "step: commit every step, which takes twice the space on the drives and excludes a cache (default: none)"
    add("--durability", choices=("none", "step"), default="none", help=text)
    text = "wrap each block as N groups: less memory, more collectives (default: 1)"
    add("--groups-per-block", type=count, default=1, metavar="N", help=text)
    for name, attribute, meaning in (
        ("tensor-parallel", "tensor_ranks", "neighbouring GPUs split each matrix, as tensor_parallel.autotp_size"),
        (
            "expert-parallel",
            "expert_ranks",
            "neighbouring GPUs share the experts of a block, as expert_parallel.autoep_size",
        ),
        ("pipeline-stages", "stages", "stages of a pipeline, as num_stages of PipelineModule"),
    ):
        add(f"--{name}", type=count, dest=attribute, metavar="N", help=f"{meaning} (default: 1)")
    text = "rank of the LoRA adapters on frozen weights in their files (default: %(default)s)"
    add("--lora", type=count, default=16, metavar="RANK", help=text)
    text = "bits of those frozen weights: 16, or 8 or 4 for the matrices of the blocks (default: from "
    text += "--hf-config, else 16)"
    add("--base-bits", type=int, choices=BASE_BITS, help=text)
    group = parser.add_argument_group("output")
    add_json(group)
    for name, metavar, meaning in (
        ("write-config", "FILE", "write a training config for the chosen strategy"),
        ("plot", "FILE.png", "draw step time over parameters (needs matplotlib)"),
        ("timeline", "FILE", "write a timeline of the chosen strategy, for chrome://tracing"),
    ):
        group.add_argument(f"--{name}", type=Path, metavar=metavar, help=meaning)


def _rate(unit: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"expected a number of {unit} above 0, without the unit, such as 12.5, got {text}"
        )
    return value * {"G": 1e9, "T": 1e12}[unit[0]]
