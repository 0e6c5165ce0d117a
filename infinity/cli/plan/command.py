"""Floor 17. `infinity-bench plan`: does this model train on that machine, how, and how fast? Runs on the main thread.

Reads what was asked, plans every strategy (plan/planner.py), and tells. Only --here measures anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.cli.arguments import (
    add_json,
    add_schedule,
    add_scheme,
    check_file,
    check_plot,
    checked_value,
    count,
    scheme_from,
    size,
    size_or_none,
    write_json,
)
from infinity.errors import ConfigError, InfinityError
from infinity.units import parse_count

if TYPE_CHECKING:
    from infinity.plan.estimate import Work
    from infinity.plan.lower_bound import DriveSpeed
    from infinity.plan.machine import Machine
    from infinity.plan.planner import Plan
    from infinity.plan.transformer import Transformer

OPTIMIZERS = {"AdamW": 2, "SGD": 1, "plain-SGD": 0}
"""How many numbers each keeps of a parameter beside its master."""

_DESCRIPTION = """\
Plan a training: memory per tier, bytes, time and what limits it, for every way to place a model's states, and the
fastest that fits. Describe the model by --params, by --layers and --hidden, or by --hf-config; the machine by --preset, by
--here, or by its figures, which also change those of a preset. Rates are in GB/s and TFLOP/s, sizes like "80GB"."""

_EPILOG = """\
exit code: 0 if something that infinity can run fits; 1 if nothing does, with the reasons; 2 for wrong usage.
docs/plan.md says where each figure comes from, and lists the keys of --json."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `infinity-bench`."""
    parser = subparsers.add_parser(
        "plan",
        help="predict memory and step time of a model on this machine or on another",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(parser)
    _add_machine(parser)
    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch",
        type=count,
        default=1,
        metavar="N",
        help="samples per GPU and pass (default: 1)",
    )
    training.add_argument(
        "--accumulation",
        type=count,
        default=1,
        metavar="N",
        help="passes per step (default: 1)",
    )
    add_schedule(training, default="horizontal")
    training.add_argument("--no-checkpointing", action="store_true", help="keep all activations, recompute none")
    training.add_argument(
        "--pinned",
        type=size,
        metavar="BYTES",
        help="pinned pool of a rank, beside its cache (default: auto)",
    )
    training.add_argument(
        "--cache",
        type=size_or_none,
        metavar="BYTES",
        help="host memory of a rank that keeps copies and optimizer state from step to step (default: all that is left)",
    )
    training.add_argument(
        "--gradient-memory",
        type=size_or_none,
        metavar="BYTES",
        help="host memory of a rank in which gradients wait for their update; what doesn't fit waits on NVMe (default: all)",
    )
    training.add_argument(
        "--offload-activations",
        choices=("none", "cpu", "nvme"),
        default="none",
        help="where saved activations wait for their backward, as infinity.offload_activations (default: none, the GPU)",
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
        help="what is kept of each parameter beside its master: two numbers (AdamW), one (SGD, with momentum), or none "
        "(plain-SGD) (default: AdamW)",
    )
    training.add_argument(
        "--groups-per-block",
        type=count,
        default=1,
        metavar="N",
        help="wrap the parts of a block as so many groups: less memory, more collectives (default: 1)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--write-config", type=Path, metavar="FILE", help="write a training config for the chosen strategy"
    )
    output.add_argument(
        "--nvme-path", metavar="PATH", help="nvme_path of that config (default: that of --here, else /local_nvme)"
    )
    add_json(output)
    output.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw step time over parameters (needs matplotlib)"
    )
    output.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write what the chosen strategy does when, for chrome://tracing"
    )
    parser.set_defaults(func=run)


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
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="config.json of a Hugging Face model")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """The figures have the names of attributes of Machine, and their units."""
    machine = parser.add_argument_group("machine")
    machine.add_argument("--preset", metavar="NAME", help='a machine that is known here; "list" names them')
    machine.add_argument("--here", type=Path, metavar="PATH", help="this machine, and the drive under PATH: measured")
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


def run(asked: argparse.Namespace) -> int:
    """Plan what was asked for: 0 where something fits, 1 where nothing does, 2 where it can't be planned as asked."""
    if asked.preset == "list":
        return _list_presets()
    try:
        _check(asked)
        model, machine = _what_and_where(asked)
    except ConfigError as error:
        print(f"infinity-bench plan: error: {error}", file=sys.stderr)
        return 2
    from infinity.cli.plan.remedies import Case, remedies
    from infinity.plan.planner import fastest_that_fits, plans_for

    work = _work(model, machine, asked)
    plans = plans_for(work, machine, pinned_bytes=asked.pinned, cache_bytes=asked.cache)
    chosen = fastest_that_fits(plans)
    _tell(asked, plans, chosen, [] if chosen else remedies(Case(work, machine, asked.pinned, asked.cache)))
    if chosen is not None:
        _write(asked, chosen)
    if asked.plot is not None:
        from infinity.cli.plan.plot import draw

        draw(work, machine, asked.plot, pinned_bytes=asked.pinned, cache_bytes=asked.cache)
    return 0 if chosen is not None else 1


def _tell(asked: argparse.Namespace, plans: list[Plan], chosen: Plan | None, remedies: list[str]) -> None:
    from infinity.cli.plan.report import as_json, print_report

    if asked.json != "-":
        print_report(plans, chosen, remedies)
    if asked.json is not None:
        write_json(as_json(plans, chosen, remedies, _nvme_path(asked)), asked.json)


def _write(asked: argparse.Namespace, chosen: Plan) -> None:
    """The files about the chosen strategy."""
    from infinity.cli.plan.report import config_for
    from infinity.schedule.timeline import trace_events

    if asked.write_config is not None:
        write_json(config_for(chosen, _nvme_path(asked)), asked.write_config)
    if asked.timeline is not None:
        asked.timeline.write_text(
            json.dumps({"traceEvents": trace_events(chosen.simulated.timeline if chosen.simulated else [])}) + "\n"
        )


def _nvme_path(asked: argparse.Namespace) -> str:
    return asked.nvme_path or (str(asked.here.absolute()) if asked.here else "/local_nvme")


def _work(model: Transformer, machine: Machine, asked: argparse.Namespace) -> Work:
    from infinity.plan.estimate import Work

    return Work(
        model,
        ranks=machine.ranks,
        samples=asked.batch,
        micro_batches=asked.accumulation,
        schedule=asked.schedule,
        checkpointing=not asked.no_checkpointing,
        groups_per_block=asked.groups_per_block,
        clipping=not asked.no_clipping,
        scheme=dataclasses.replace(
            scheme_from(asked, accumulation=asked.accumulation, schedule=asked.schedule),
            moments=OPTIMIZERS[asked.optimizer],
        ),
        gradient_bytes_max=asked.gradient_memory,
        activations=asked.offload_activations,
        activation_buffer_bytes_max=asked.activation_buffer,
        durable=asked.durability == "step",
        unasked=asked.update == "auto",
    )


def _what_and_where(asked: argparse.Namespace) -> tuple[Transformer, Machine]:
    """The model and the machine. Raises ConfigError."""
    from infinity.cli.plan.model import model_from

    model = model_from(asked)
    if asked.here is not None:
        from infinity.cli.plan.here import measure_machine

        try:
            machine = measure_machine(asked.here, model, samples=asked.batch, report=partial(print, file=sys.stderr))
        except InfinityError as error:
            raise ConfigError(f"--here: {error}") from error
    else:
        machine = _base(asked)
    return model, _with_figures(machine, asked)


def _check(asked: argparse.Namespace) -> None:
    """What contradicts itself, or can't be written, before anything is measured. Raises ConfigError."""
    if asked.preset is not None and asked.here is not None:
        raise ConfigError("--preset is another machine than --here: choose one")
    if asked.here is not None and not asked.here.is_dir():
        raise ConfigError(f"--here {asked.here}: name an existing folder on the drive to plan with")
    if (asked.read is None) != (asked.write is None):
        raise ConfigError("--read and --write go together: give both")
    if asked.activation_buffer is not None and asked.offload_activations != "nvme":
        raise ConfigError("--activation-buffer is for --offload-activations nvme: give both, or leave it out")
    if asked.durability == "step" and asked.cache:
        raise ConfigError("--durability step keeps no state in host memory: leave --cache out")
    if asked.durability == "step" and asked.offload_activations == "nvme":
        raise ConfigError(
            "--durability step keeps nothing on NVMe but what is committed: use --offload-activations cpu"
        )
    check_plot(asked.plot)
    for file in (asked.json, asked.write_config, asked.timeline):
        check_file(file)


def _base(asked: argparse.Namespace) -> Machine:
    """The preset, or a machine of nothing but the figures given. Raises ConfigError."""
    from infinity.cli.plan.machines import PRESETS
    from infinity.plan.machine import Machine

    if asked.preset is not None:
        if asked.preset not in PRESETS:
            raise ConfigError(f"--preset {asked.preset}: there is no such preset, but {', '.join(PRESETS)}")
        return PRESETS[asked.preset]
    needed = {"--tflops": "flops_per_s", "--host-memory": "host_bytes", "--host-bandwidth": "host_bytes_per_s"}
    if not asked.cpu:
        needed |= {
            "--gpu-memory": "device_bytes",
            "--gpu-bandwidth": "device_bytes_per_s",
            "--link": "link_bytes_per_s",
        }
    missing = [name for name, attribute in needed.items() if getattr(asked, attribute) is None]
    if missing:
        raise ConfigError(
            f"say which machine: --preset NAME, --here PATH, or its figures, of which {', '.join(missing)} lack"
        )
    return Machine(
        name="the machine given",
        device_is_host=asked.cpu,
        flops_per_s=asked.flops_per_s,
        host_bytes=asked.host_bytes,
        host_bytes_per_s=asked.host_bytes_per_s,
    )


def _with_figures(machine: Machine, asked: argparse.Namespace) -> Machine:
    """`machine` with the figures that were given. Raises ConfigError where one is missing that now counts."""
    names = vars(asked).keys() & {field.name for field in dataclasses.fields(machine)}
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if asked.drive_bytes is not None:
        given["drive_free_bytes"] = None
    if asked.read is not None or asked.mixed is not None:
        given["drive"] = _drive(machine, asked)
    if machine.device_is_host and asked.ranks_per_node is not None and asked.flops_per_s is None:
        # They share its cores.
        given["flops_per_s"] = machine.flops_per_s / asked.ranks_per_node * machine.ranks_per_node
    changed = dataclasses.replace(machine, **given)
    if changed.ranks_per_node > 1 and changed.node_link_bytes_per_s == float("inf") and not changed.device_is_host:
        raise ConfigError("several GPUs: say --node-link, the GB/s between those of a node")
    if changed.nodes > 1 and changed.network_bytes_per_s == float("inf"):
        raise ConfigError("several nodes: say --network, the GB/s from a node to the others")
    return changed


def _drive(machine: Machine, asked: argparse.Namespace) -> DriveSpeed:
    """The drives with the rates that were given. Raises ConfigError for a mixed rate alone."""
    from infinity.plan.lower_bound import DriveSpeed

    drive = machine.drive if asked.read is None else DriveSpeed(asked.read, asked.write)
    if drive is None:
        raise ConfigError("--mixed goes with --read and --write: give all three")
    if asked.mixed is None:
        return drive
    return dataclasses.replace(drive, mixed=(asked.mixed / 2, asked.mixed / 2))


def _list_presets() -> int:
    from infinity.cli.plan.machines import PRESETS

    for name, machine in PRESETS.items():
        print(f"{name:14} {machine.name}")
    return 0


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
