"""`python -m infinity`: prints infinity's version, its folder and its surroundings. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

import infinity
from infinity import _aio
from infinity.torch_versions import TESTED, why_too_old, why_untested

DISTRIBUTION = "infinity-offload"

_COMMANDS = {
    "infinity-bench doctor PATH": "checks machine, limits, drive and GPU, and suggests fixes",
    "infinity-bench plan --params 7B": "predicts which model fits which machine, and its speed",
    "infinity-bench sweep PATH": "measures a drive and saves its best settings",
    "infinity-bench step PATH": "times training steps against plain PyTorch and the drive",
    "infinity-bench report PATH": "runs doctor, sweep and step, and prints one row to share",
    "infinity-run --hostfile FILE ...": "trains on the hosts of a hostfile, or on this machine",
    "infinity-ckpt": "inspects, verifies, converts and imports checkpoints",
}


def main() -> int:
    for name, text in [*_versions(), ("", ""), *_COMMANDS.items()]:
        print(f"{name:<34}{text}".rstrip())
    return 0


def _versions() -> list[tuple[str, str]]:
    installed, torch = _version_of(DISTRIBUTION), _version_of("torch")
    usable = [name for name, usable, _ in _aio.probe() if usable]
    return [
        ("infinity", f"{infinity.__version__}, in {Path(infinity.__file__).parent}"),
        (f"distribution {DISTRIBUTION}", installed or "not installed: this is a checkout"),
        *[("also called infinity", f"{name}, which can't be used in the same environment") for name in _others()],
        ("Python", f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"),
        ("torch", _said_of(torch) if torch else "not installed"),
        ("I/O backends usable here", ", ".join(usable)),
    ]


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _others() -> list[str]:
    """Return other distributions whose `import infinity` this one hides."""
    return sorted({*importlib.metadata.packages_distributions().get("infinity", ())} - {DISTRIBUTION})


def _said_of(torch: str) -> str:
    if why_too_old(torch):
        return f"{torch}, which is too old: infinity needs {TESTED}"
    if why_untested(torch):
        return f"{torch}, newer than the tested versions ({TESTED})"
    return f"{torch} (tested: {TESTED})"


if __name__ == "__main__":
    sys.exit(main())
