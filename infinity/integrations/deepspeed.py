"""DeepSpeed with infinity's I/O: its swappers, checkpoint writer and I/O tools use our engine.

`install()` replaces two methods of one class of DeepSpeed, `uninstall()` restores them. As a command, the module runs a
script or one of DeepSpeed's own commands with the handle installed:

    python -m infinity.integrations.deepspeed train.py --some options
    python -m infinity.integrations.deepspeed ds_io --read --folder /local_nvme --io_size 400M
"""

from __future__ import annotations

import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from infinity.extras import needs

with needs("deepspeed"):
    import deepspeed
    from deepspeed.accelerator import get_accelerator

from infinity.deepspeed.aio_handle import AioHandle

_COMMANDS = ("ds_io", "ds_nvme_tune")
_REPLACED = ("load", "is_compatible")
_originals: dict[type, dict[str, Any]] = {}  # what the class itself had under these names


class _Handle(AioHandle):
    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return True also for memory that DeepSpeed has pinned."""
        return super().is_pinned(buffer) or bool(get_accelerator().is_pinned(buffer))


def install() -> None:
    """From now on all code in DeepSpeed that requests its aio handle gets infinity's; nothing is compiled.

    Call it before the engine is made, since existing handles do not change. May be called again.
    """
    builder = get_accelerator().get_op_builder("AsyncIOBuilder")
    if builder in _originals:
        return
    _originals[builder] = {name: vars(builder)[name] for name in _REPLACED if name in vars(builder)}
    builder.load = lambda self, verbose=False: SimpleNamespace(aio_handle=_Handle)
    builder.is_compatible = lambda self, verbose=False: True
    _forget_compatibility()


def uninstall() -> None:
    """Undo `install`; handles made meanwhile still work."""
    for builder, methods in _originals.items():
        for name in _REPLACED:
            delattr(builder, name)
        for name, method in methods.items():
            setattr(builder, name, method)
    _originals.clear()
    _forget_compatibility()


def main(arguments: list[str]) -> None:
    """Run a script, or one of DeepSpeed's I/O commands, with the handle installed."""
    if not arguments:
        sys.exit(f"usage: python -m infinity.integrations.deepspeed {{{','.join(_COMMANDS)},SCRIPT.py}} [options]")
    install()
    name, *sys.argv[1:] = arguments
    if name not in _COMMANDS:
        sys.argv[0] = name
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[0] = str(_write_ds_io(Path(folder)).with_name(name))
        script = shutil.which(name) or str(Path(sys.executable).with_name(name))
        code = compile(Path(script).read_text(), script, "exec")
        # Not run_path, which would set sys.argv[0]: ds_nvme_tune looks for ds_io next to that.
        exec(code, {"__name__": "__main__"})


def _write_ds_io(folder: Path) -> Path:
    """Write a ds_io with the handle installed: ds_nvme_tune runs the ds_io in its own folder for every measurement."""
    command = folder / "ds_io"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {__spec__.name} ds_io "$@"\n')
    command.chmod(0o700)
    return command


def _forget_compatibility() -> None:
    """Clear DeepSpeed's cache of the builders that work here."""
    vars(deepspeed.ops).pop("__compatible_ops__", None)


if __name__ in ("__main__", "__mp_main__"):
    # Import the module under its real name: a second copy would not know what was replaced. Processes that the command spawns
    # run this file too, and need the handle as well.
    from infinity.integrations import deepspeed as this_module

    this_module.install()
    if __name__ == "__main__":
        this_module.main(sys.argv[1:])
