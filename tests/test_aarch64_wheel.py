"""A wheel for aarch64, cross-compiled here and used by an emulated Python: its I/O, its arithmetic and a training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = os.environ.get("INFINITY_AARCH64")
NEEDED = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

TESTS = (
    "tests/csrc/test_binding.py",
    "tests/aio/test_checksums.py",
    "tests/optim/test_kernel.py",
    *(
        f"tests/parity/test_parity.py::test_nvme_equals_memory[{name}]"
        for name in ("plain", "accumulation and clipping")
    ),
    "tests/parity/test_parity.py::test_own_loop_equals_stock_fsdp2_and_adamw[plain-True]",
)

NOT_OF_QEMU = (
    # statx says that it tells the alignment of direct transfers, and leaves it at 0
    "tests/csrc/test_binding.py::test_a_file_takes_what_the_drive_takes_where_asked",
    "tests/csrc/test_binding.py::test_direct_alignment_is_a_power_of_two_that_4_kib_satisfies",
    # a forked child can't start threads, and the emulator's own are among those of the process
    "tests/optim/test_kernel.py::test_a_forked_child_updates_with_threads_of_its_own",
    "tests/optim/test_kernel.py::test_no_threads_come_or_go_beside_another_openmp_runtime",
)
"""Tests of what qemu 7.2 emulates differently from a kernel."""


@pytest.fixture(scope="module")
def python() -> Path:
    if not FOLDER:
        pytest.skip("INFINITY_AARCH64 names no folder that tools/aarch64_python.sh made")
    for command, package in NEEDED.items():
        if shutil.which(command) is None:
            pytest.skip(f"{command} isn't installed (Debian: {package})")
    return Path(FOLDER).resolve() / "bin" / "python"


@pytest.fixture(scope="module")
def wheel(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, str(ROOT / "tools" / "build_wheels.py"), "--emulated", str(python), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*aarch64.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(python: Path, wheel: Path, *command: object) -> str:
    """What a command of the emulated Python prints; outside of the checkout, so that it imports the wheel."""
    environ = os.environ | {"PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    words = [str(python), *map(str, command)]
    done = subprocess.run(words, cwd=wheel, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_io_its_arithmetic_and_small_trainings_pass(python: Path, wheel: Path) -> None:
    config = ["-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", "-o", "timeout=1800"]
    config += [f"--deselect={test}" for test in NOT_OF_QEMU]
    print(run(python, wheel, "-m", "pytest", *config, *(ROOT / test for test in TESTS)))


def test_the_demo_has_the_losses_of_memory(python: Path, wheel: Path, nvme_path: Path) -> None:
    numbers = ["--params", "1M", "--steps", "3", "--context", "64", "--batch-size", "2", "--no-compare"]
    losses = []
    for where in (["--nvme-path", nvme_path], ["--in-memory"]):
        result = wheel.parent / "result.json"
        run(python, wheel, ROOT / "examples" / "train_lm.py", *numbers, *where, "--json", result)
        told = json.loads(result.read_text())
        assert told["backend"] == ("threads" if "--nvme-path" in where else None)  # qemu has no io_uring
        losses.append([step["loss"] for step in told["steps"]])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
