"""`infinity-bench plan`: predicts whether, how and how fast a model trains on a machine. Measures only for a PATH. Main
thread."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from functools import partial
from typing import Any

from infinity.cli.arguments import check_files, check_plot, values_of, write_json
from infinity.cli.plan.answer import Case, Easing, answer
from infinity.cli.plan.arguments import add_arguments as add_arguments
from infinity.cli.plan.arguments import base_bits, model_from
from infinity.cli.plan.machines import PRESETS, preset_of
from infinity.cli.plan.training_config import config_for
from infinity.cli.program import usage_checked
from infinity.cli.training import work_from
from infinity.errors import ConfigError
from infinity.plan.machine import DriveSpeed, Machine
from infinity.plan.search import fastest_lora_work, fastest_work
from infinity.plan.splits import OPTIONS, problem_of, splits_of
from infinity.plan.transformer import Transformer
from infinity.plan.work import Work
from infinity.schedule.timeline import trace_events

SUMMARY = "predict memory and step time of a model on this machine or on another"
DESCRIPTION = """\
Plan a training: memory per tier, bytes, time and bottleneck of every placement of the model's states, and the fastest
that fits; and the same for LoRA and generation on frozen weights that stay in their files. Describe the model by
--params, by --layers and --hidden, or by --hf-config. Describe the machine by --preset, by a PATH on this one, which is
measured, or by its figures, which also override those of a preset or PATH. Rates are in GB/s and TFLOP/s, sizes like
"80GB"."""

EPILOG = """\
examples:
  infinity-bench plan /local_nvme --params 8B --write-config config.json
  infinity-bench plan --preset "RTX 4090" --params 8B --batch-size 4
  infinity-bench plan --preset "RTX 4090" --params 8B --tokens-per-step 131072
  infinity-bench plan --preset dgx-h100 --hf-config config.json --accumulation 8

exit code: 0 if full training, LoRA or generation fits; 1 if none does, or if full training does not and --write-config
or --timeline is given; 2 for wrong usage.
docs/plan.md says where each figure comes from, and lists the keys of --json."""

_GPU_FIGURES = {"--gpu-memory": "device_bytes", "--gpu-bandwidth": "device_bytes_per_s", "--link": "link_bytes_per_s"}


def run(asked: argparse.Namespace) -> int:
    if asked.preset == "list":
        for name, machine in PRESETS.items():
            print(f"{name:14} {machine.name}")
        return 0
    with usage_checked():
        _check(asked)
        case = _case(asked)
    told = answer(case, lora_rank=asked.lora, base_bits=base_bits(asked))
    from infinity.cli.plan.report import as_json, print_report

    nvme_path = str(asked.path.absolute()) if asked.path is not None else "/local_nvme"
    if asked.json != "-":
        print_report(told)
    if asked.json is not None:
        write_json(as_json(told, nvme_path), asked.json)
    if asked.plot is not None:
        from infinity.cli.plan.plot import draw

        draw(told.plans[0].work, case.machine, asked.plot, **case.pinned_sizes)
    if (chosen := told.chosen) is None:
        unwritten = [file for file in (asked.write_config, asked.timeline) if file is not None]
        for file in unwritten:
            older = ", an older file stays there" if file.exists() else ""
            print(f"infinity-bench plan: full training does not fit: nothing written to {file}{older}", file=sys.stderr)
        return 0 if any(plan.fits for plan in told.frozen) and not unwritten else 1
    if asked.write_config is not None:
        write_json(config_for(chosen, nvme_path), asked.write_config)
    if asked.timeline is not None:
        events = trace_events(chosen.simulated.timeline if chosen.simulated else [])
        asked.timeline.write_text(json.dumps({"traceEvents": events}) + "\n")
    return 0


def _check(asked: argparse.Namespace) -> None:
    if asked.preset is None and asked.path is not None and not asked.path.is_dir():
        advice = "name an existing folder on the drive to plan with, or another machine by --preset"
        raise ConfigError(f"{asked.path}: {advice}")
    if (asked.read is None) != (asked.write is None):
        raise ConfigError("--read and --write go together: give both")
    if asked.activation_buffer is not None and asked.offload_activations != "nvme":
        raise ConfigError("--activation-buffer is for --offload-activations nvme: give both, or leave it out")
    if asked.tokens_per_step is not None and (asked.accumulation or asked.schedule):
        raise ConfigError("--tokens-per-step chooses the micro-batches: leave --accumulation and --schedule out")
    at_once = asked.micro_batches_at_once or 1
    if (asked.accumulation or at_once) % at_once:
        count = f"the {asked.accumulation} micro-batches of --accumulation"
        raise ConfigError(f"--micro-batches-at-once {at_once} must divide {count}")
    if asked.durability == "step" and asked.cache:
        raise ConfigError("--durability step keeps no state in host memory: leave --cache out")
    if asked.durability == "step" and asked.offload_activations == "nvme":
        raise ConfigError("--durability step keeps only committed state on NVMe: use --offload-activations cpu")
    check_plot(asked.plot)
    check_files(asked, "json", "write_config", "timeline")


def _case(asked: argparse.Namespace) -> Case:
    model = model_from(asked)
    if asked.plot is not None and model.experts is not None:
        raise ConfigError("--plot draws dense models of other sizes: leave it out for a mixture of experts")
    searched = _left_open(asked)
    asked.batch_size = asked.batch_size or 1
    asked.accumulation = asked.accumulation or asked.micro_batches_at_once or 1
    asked.schedule = asked.schedule or "horizontal"
    machine = _with_figures(_machine(asked, model), asked)
    work = work_from(
        asked,
        model,
        ranks=machine.ranks,
        at_once=asked.micro_batches_at_once,
        checkpointing=not asked.no_checkpointing,
        groups_per_block=asked.groups_per_block,
        activations=asked.offload_activations or "none",
        activation_buffer_bytes_max=asked.activation_buffer,
        durable=asked.durability == "step",
        **{name: getattr(asked, name) or 1 for name in OPTIONS},
    )
    if (problem := problem_of(work)) is not None:
        raise ConfigError(problem)
    if asked.tokens_per_step is None and work.micro_batches < work.stages:
        raise ConfigError(
            f"--pipeline-stages {work.stages} needs as many micro-batches: give --accumulation {work.stages}"
        )
    cache_bytes = asked.cache if asked.pinned_bytes_max is None else asked.cache or 0
    pool_bytes = _pool_bytes(asked, work)
    if asked.tokens_per_step is not None:
        least = min(split.tokens * split.stages for split in splits_of(work, machine, searched))
        how: dict[str, Any] = {"sequences": _sequences(asked.tokens_per_step, least, model), "left_open": searched}
        how |= {"pinned_bytes": pool_bytes, "cache_bytes": cache_bytes}
        lora_work = fastest_lora_work(work, machine, lora_rank=asked.lora, base_bits=base_bits(asked), **how)
        work = fastest_work(work, machine, **how)
        return Case(work, machine, _pool_bytes(asked, work), cache_bytes, lora_work=lora_work)
    gradients: Easing = ("--gradient-memory 0",) if asked.gradient_memory is None else ()
    left_open = asked.offload_activations is None and not machine.device_is_host
    activations: Easing = ("--offload-activations cpu",) if left_open else ()
    easings = tuple(dict.fromkeys([(), gradients, activations, gradients + activations]))
    return Case(work, machine, pool_bytes, cache_bytes, easings)


def _left_open(asked: argparse.Namespace) -> set[str]:
    """Return the attributes of `Work` that --tokens-per-step may choose: those that no option gives."""
    given = {
        "samples": asked.batch_size,
        "micro_batches_at_once": asked.micro_batches_at_once,
        "checkpointing": True if asked.no_checkpointing else None,
        "activations": asked.offload_activations,
        "gradient_bytes_max": asked.gradient_memory,
        **{name: getattr(asked, name) for name in OPTIONS},
    }
    return {name for name, value in given.items() if value is None}


def _sequences(tokens: int, least: int, model: Transformer) -> int:
    """Return the sequences of a step. least: tokens of the micro-batches that were given, or of a sequence, of all ranks."""
    if tokens % least:
        nearest = [count * least for count in (tokens // least, tokens // least + 1) if count]
        raise ConfigError(
            f"--tokens-per-step {tokens} must be a multiple of {least}, the tokens of all ranks at once: "
            f"{' or '.join(map(str, nearest))}"
        )
    return tokens // model.seq


def _pool_bytes(asked: argparse.Namespace, work: Work) -> int | None:
    if asked.pinned_bytes_max is None:
        return None
    pool_bytes: int = asked.pinned_bytes_max - (asked.cache or 0) - work.activation_buffer_bytes
    if pool_bytes <= 0:
        raise ConfigError(
            "--pinned-bytes-max includes the cache and the activation buffer, and leaves nothing for the pool: raise it"
        )
    return pool_bytes


def _machine(asked: argparse.Namespace, model: Transformer) -> Machine:
    if asked.preset is not None:
        if (preset := preset_of(asked.preset)) is None:
            raise ConfigError(f"--preset {asked.preset}: no such preset; there are {', '.join(PRESETS)}")
        return preset
    if asked.path is not None:
        from infinity.cli.plan.here import measure_machine

        return measure_machine(asked.path, model, samples=asked.batch_size, report=partial(print, file=sys.stderr))
    needed = {"--tflops": "flops_per_s", "--host-memory": "host_bytes", "--host-bandwidth": "host_bytes_per_s"}
    needed |= {} if asked.cpu else _GPU_FIGURES
    missing = [name for name, attribute in needed.items() if getattr(asked, attribute) is None]
    if missing:
        ways = "--preset NAME, PATH for this one, or its figures"
        raise ConfigError(f"name a machine: {ways}; missing: {', '.join(missing)}")
    given = values_of(asked, "flops_per_s host_bytes host_bytes_per_s")
    return Machine(name="the machine given", device_is_host=asked.cpu, **given)


def _with_figures(machine: Machine, asked: argparse.Namespace) -> Machine:
    if asked.cpu and not machine.device_is_host:
        raise ConfigError(f"--cpu: {machine.name} has a GPU: leave --cpu out, or give all figures of another machine")
    of_gpu = [name for name, attribute in _GPU_FIGURES.items() if getattr(asked, attribute) is not None]
    if of_gpu and machine.device_is_host:
        raise ConfigError(f"{', '.join(of_gpu)}: {machine.name} has no GPU: leave them out, or name another machine")
    names = vars(asked).keys() & {field.name for field in dataclasses.fields(machine)}
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if asked.drive_bytes is not None:
        given["drive_free_bytes"] = None
    if asked.read is not None:
        given["drive"] = DriveSpeed(asked.read, asked.write)
    if asked.mixed is not None:
        if (drive := given.get("drive", machine.drive)) is None:
            raise ConfigError("--mixed goes with --read and --write: give all three")
        given["drive"] = dataclasses.replace(drive, mixed=(asked.mixed / 2, asked.mixed / 2))
    if machine.device_is_host and asked.ranks_per_node is not None and asked.flops_per_s is None:
        # They share its cores.
        given["flops_per_s"] = machine.flops_per_s / asked.ranks_per_node * machine.ranks_per_node
    changed = dataclasses.replace(machine, **given)
    if changed.ranks_per_node > 1 and changed.node_link_bytes_per_s == float("inf") and not changed.device_is_host:
        raise ConfigError("several GPUs: give --node-link, the GB/s between those of a node")
    if changed.nodes > 1 and changed.network_bytes_per_s == float("inf"):
        raise ConfigError("several nodes: give --network, the GB/s from a node to the others")
    return changed
