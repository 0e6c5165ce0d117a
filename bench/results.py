"""The environment that every benchmark stores with its numbers, and the files of results."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, Any]:
    """Return the environment of a number."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{os.cpu_count()} x {model}",
        "kernel": platform.release(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def save(name: str, line: dict[str, Any]) -> None:
    """Append one result to bench/results/NAME.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
