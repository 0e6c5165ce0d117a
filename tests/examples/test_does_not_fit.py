"""The demo's second half: a limit of memory that holds, and steps within it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MIB = 1 << 20


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_steps_within_a_limit_and_the_same_in_memory(nvme_path: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    small = ["--params", "300k", "--limit", "2GiB", "--pinned-bytes-max", "16MiB", "--context", "16", "--steps", "2"]
    command = [sys.executable, str(EXAMPLES / "does_not_fit.py"), *small]
    done = subprocess.run(
        [*command, "--nvme-path", str(nvme_path), "--json", str(result)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(result.read_text())
    assert len(summary["steps"]) == 2 and summary["peak_rss_bytes"] < 2 << 30
    assert summary["in_memory_ended"] == "well"  # so small a model does fit
    begins, *_, fits, point, next_move = filter(None, done.stdout.splitlines())
    assert "300k parameters take 2 steps within 2GiB of memory, with" in begins and "About 1 minutes" in begins
    assert "In memory, the same fits within 2GiB" in fits and "docs/quickstart.md" in next_move
    assert point.startswith("With infinity, within 2GiB: 2 steps, peak ")
    assert "memory allowed" in done.stdout
    assert list(nvme_path.iterdir()) == []


def test_without_room_on_the_drive_it_is_left_out_and_says_how_much(
    nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("does_not_fit").main(["--params", "900T", "--nvme-path", str(nvme_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("left out:") and "are free there" in said and "--nvme-path" in said
