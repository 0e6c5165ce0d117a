"""The program `infinity-ckpt`. Heavy modules (torch, pydantic, rich) are imported only when a command runs, so that
--help is fast."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import infinity
from infinity.cli.arguments import named_path, size, values_of
from infinity.cli.program import run_program
from infinity.units import format_bytes, format_count

JSON_FORMAT = 1
"""Incremented when a key of a JSON report changes its meaning or is removed, not when one is added."""

_EPILOG = """\
exit code: 0 on success; 1 if it failed or the checkpoint is damaged, with the reason; 2 for wrong usage; 130 after Ctrl-C.
"""
_DTYPES = ("fp32", "bf16", "fp16")
_CHECKPOINT = "a checkpoint, or the folder that it was saved to"
_METAVARS = {"checkpoint": "CKPT", "output": "OUT", "base": "MODEL", "adapter": "ADAPTER"}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity-ckpt",
        description="Show and verify checkpoints, convert them to models or stock checkpoints, and import DeepSpeed's.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"infinity {infinity.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "show what a checkpoint holds: steps, ranks, parameters, bytes"
    info = _add(commands, "info", _info, text, checkpoint=_CHECKPOINT)
    info.add_argument("--tensors", action="store_true", help="also list every tensor of the model")
    text = "read every file of a checkpoint and compare it with the hash taken when it was written"
    _add(commands, "verify", _verify, text, checkpoint=_CHECKPOINT)
    text = "write the model in a checkpoint as safetensors, using the memory of one tensor"
    model = "the folder for the model; created if missing"
    consolidate = _add(commands, "consolidate", _consolidate, text, checkpoint=_CHECKPOINT, output=model)
    text = "dtype of the parameters (default: %(default)s, the masters)"
    consolidate.add_argument("--dtype", choices=_DTYPES, default="fp32", help=text)
    text = "convert an arena checkpoint to torch.distributed.checkpoint's format, which stock FSDP2 + AdamW loads"
    new = "the folder of the new checkpoint; must be new or empty"
    _add(commands, "export", _export, text, checkpoint=_CHECKPOINT, output=new)
    text = "convert a DeepSpeed checkpoint (ZeRO 1 to 3, or universal; Adam) to one of infinity's, for load_checkpoint;"
    text += " runs no code in it"
    theirs = "a DeepSpeed checkpoint, or the folder that it was saved to"
    new = "the folder for load_checkpoint; must be new or empty"
    imported = _add(commands, "import", _import, text, checkpoint=theirs, output=new)
    imported.add_argument("--dry-run", action="store_true", help="show what would be imported, and write nothing")
    text = "merge a LoRA adapter into a model and write it as safetensors, using the memory of one tensor"
    base, adapter = "the base model: a folder with safetensors", "the folder that PEFT's save_pretrained wrote"
    merge = _add(commands, "merge", _merge, text, base=base, adapter=adapter, output=model)
    text = "a larger model is split into several files, with an index (default: %(default)s)"
    for writer in (consolidate, merge):
        writer.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE", help=text)
    return parser


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, **paths: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary, epilog=_EPILOG)
    for path, text in paths.items():
        parser.add_argument(path, type=named_path, metavar=_METAVARS[path], help=text)
    if "checkpoint" in paths:
        parser.add_argument("--tag", help="the checkpoint in that folder (default: the latest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout, and nothing else")
    parser.set_defaults(func=run)
    return parser


def _info(options: argparse.Namespace) -> int:
    from infinity.checkpoint.consolidate import open_model
    from infinity.checkpoint.manifest import others
    from infinity.cli.tables import print_facts

    with open_model(options.checkpoint, options.tag) as model:
        manifest = model.manifest
        parameters = [shape for name, (_, shape) in model.tensors.items() if name not in model.buffers]
        of_manifest: dict[str, Any] = dict.fromkeys(("saved", "global_steps", "ranks", "files")) | {
            "state_format": "dcp"
        }
        if manifest is not None:
            of_manifest = values_of(manifest, "saved global_steps ranks state_format") | {"files": len(manifest.files)}
        facts: dict[str, Any] = {
            "checkpoint": str(model.path),
            **of_manifest,
            "parameters": sum(math.prod(shape) for shape in parameters),
            "parameter_tensors": len(parameters),
            "tied": model.aliases,
            "nbytes": sum(file.stat().st_size for file in model.path.iterdir() if file.is_file()),
            "hashed": manifest is not None,
        }
        tensors: list[dict[str, Any]] = []
        for name, (dtype, shape) in model.tensors.items() if options.tensors else ():
            kind = str(dtype).removeprefix("torch.")
            tensors.append({"name": name, "shape": list(shape), "dtype": kind, "buffer": name in model.buffers})
    if options.json:
        return _print_report(options, facts | ({"tensors": tensors} if options.tensors else {}), "")
    print_facts(
        {
            "checkpoint": facts["checkpoint"],
            "saved": facts["saved"],
            "optimizer steps": facts["global_steps"],
            "written by": f"{facts['ranks']} rank(s)" if facts["ranks"] else None,
            "format": {"dcp": "PyTorch's (dcp)", "arena": "the arenas' bytes (arena)"}[facts["state_format"]],
            "parameters": f"{format_count(facts['parameters'])} in {facts['parameter_tensors']} tensors",
            "tied": ", ".join(f"{alias} = {name}" for alias, name in facts["tied"].items()) or None,
            "on the drive": format_bytes(facts["nbytes"]),
            "hashes": "yes, for every file" if facts["hashed"] else "none: save_checkpoint did not write it",
            "other checkpoints": others(model.path.parent, but=model.path.name),
        }
    )
    for tensor in tensors:
        print(f"{tensor['name']}  {tensor['dtype']} {tensor['shape']}{' (buffer)' if tensor['buffer'] else ''}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from infinity.checkpoint.manifest import FILE_NAME, damage, find_checkpoint, load_manifest
    from infinity.errors import CheckpointError

    path = find_checkpoint(options.checkpoint, options.tag)
    manifest = load_manifest(path)
    if manifest is None:
        raise CheckpointError(f"{path} has no {FILE_NAME} to compare it with: save_checkpoint writes one")
    with _progress("verifying", shown=not options.json) as begin:
        wrong = dict(damage(path, manifest, progress=begin(manifest.nbytes)))
    unlisted = {file.name for file in path.iterdir()} - {*manifest.files, FILE_NAME}
    wrong |= dict.fromkeys(sorted(unlisted), "it is not in the manifest")
    if options.json or not wrong:
        damaged = [{"file": name, "why": why} for name, why in wrong.items()]
        about = {"files": len(manifest.files), "nbytes": manifest.nbytes, "damaged": damaged}
        text = f"{path} is whole: {len(manifest.files)} files, {format_bytes(manifest.nbytes)}"
        _print_report(options, {"checkpoint": str(path), "whole": not wrong, **about}, text)
    for name, why in wrong.items():
        print(f"infinity-ckpt: {path / name} is damaged: {why}", file=sys.stderr)
    return 1 if wrong else 0


def _consolidate(options: argparse.Namespace) -> int:
    from infinity.checkpoint.consolidate import DTYPES, consolidate

    with _progress("writing", shown=not options.json) as begin:
        files = consolidate(
            options.checkpoint,
            options.output,
            tag=options.tag,
            dtype=DTYPES[options.dtype],
            max_shard_bytes=options.max_shard_size,
            progress=begin,
        )
    return _tell_written(options, files, dtype=options.dtype)


def _export(options: argparse.Namespace) -> int:
    from infinity.checkpoint.export import export
    from infinity.checkpoint.manifest import load_manifest

    with _progress("writing", shown=not options.json) as begin:
        path = export(options.checkpoint, options.output, tag=options.tag, progress=begin)
    manifest = load_manifest(path)
    assert manifest is not None
    report = {"checkpoint": str(path), "files": len(manifest.files), "nbytes": manifest.nbytes}
    return _print_report(options, report, f"{format_bytes(manifest.nbytes)} in {path}: {len(manifest.files)} files")


def _import(options: argparse.Namespace) -> int:
    from infinity.checkpoint.deepspeed_import import import_deepspeed

    with _progress("writing", shown=not options.json) as begin:
        imported = import_deepspeed(
            options.checkpoint, options.output, tag=options.tag, dry=options.dry_run, progress=begin
        )
    source, state = imported.source, imported.training_state
    facts: dict[str, Any] = {
        "from": str(source.path),
        "kind": source.kind,
        "ranks": source.ranks,
        "checkpoint": str(imported.path),
        "written": not options.dry_run,
        "parameters": imported.numel,
        "parameter_tensors": len(source.parameters),
        "frozen_tensors": sum(parameter.steps is None for parameter in source.parameters),
        "tied": dict(source.aliases),
        "buffers": list(source.buffers),
        "parameter_groups": len(source.groups),
        "global_steps": state["global_steps"],
        "skipped_steps": state["skipped_steps"],
        "client_state": sorted(map(str, state["client_state"])),
        "left_out": list(imported.left_out),
        "nbytes": imported.nbytes,
    }
    place = f"{format_bytes(imported.nbytes)} in {imported.path}"
    lines = [
        f"{source.path}: {source.kind}, {source.ranks} rank(s), step {facts['global_steps']}, "
        f"{format_count(imported.numel)} parameters in {facts['parameter_tensors']} tensors",
        *(f"left out: {reason}" for reason in imported.left_out),
        f"nothing is written; an import writes {place}"
        if options.dry_run
        else f'{place}: load_checkpoint("{options.output}")',
    ]
    return _print_report(options, facts, "\n".join(lines))


def _merge(options: argparse.Namespace) -> int:
    from infinity.checkpoint.merge import merge

    with _progress("writing", shown=not options.json) as begin:
        files = merge(
            options.base, options.adapter, options.output, max_shard_bytes=options.max_shard_size, progress=begin
        )
    return _tell_written(options, files)


def _tell_written(options: argparse.Namespace, files: Sequence[Path], **more: str) -> int:
    nbytes = sum(file.stat().st_size for file in files)
    text = f"{format_bytes(nbytes)} in {options.output}: {', '.join(file.name for file in files)}"
    return _print_report(options, {"files": [str(file) for file in files], "nbytes": nbytes, **more}, text)


def _print_report(options: argparse.Namespace, report: dict[str, Any], text: str) -> int:
    print(json.dumps({"format": JSON_FORMAT, **report}, indent=2) if options.json else text)
    return 0


@contextmanager
def _progress(activity: str, *, shown: bool) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Show a progress bar on a terminal. Yields a function from the total bytes to one that is called with the bytes
    just done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn(activity), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:

        def begin(total: int) -> Callable[[int], None]:
            task = bar.add_task(activity, total=total)
            return lambda nbytes: bar.advance(task, nbytes)

        yield begin


if __name__ == "__main__":
    sys.exit(main())
