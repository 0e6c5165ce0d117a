"""Fixtures for every test: a folder on a real file system, the I/O backends, and a launcher for several ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import hypothesis
import launch
import pytest
from spared import thin_out

ROOT = Path(__file__).resolve().parent.parent

# A rank that dies of a signal must say where each of its threads was: such a death may not come back for days.
RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}

# How long an example takes says more about what else the machine is doing than about the code.
EXAMPLES = int(os.environ.get("INFINITY_EXAMPLES", "50"))


def pytest_configure(config: pytest.Config) -> None:
    """hypothesis draws the same examples in every run, so that a change is judged by what it changes; with
    `--hypothesis-seed` others, the same for the same seed. It keeps none from run to run, in either."""
    searching = config.getoption("--hypothesis-seed") is not None
    hypothesis.settings.register_profile(
        "house", deadline=None, max_examples=EXAMPLES, derandomize=not searching, database=None
    )
    hypothesis.settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that workers side by side end at about the same time."""
    thin_out(items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu:
        import torch

        rehearsed = ROOT / "tests" / "gpu" if os.environ.get("INFINITY_REHEARSE_GPU") else None
        for item in for_gpu if not torch.cuda.is_available() else ():
            if item.path.parent != rehearsed:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True, scope="module")
def _garbage() -> Iterator[None]:
    """Models are in cycles with their hooks, and Python looks for those rarely: hundreds of them would fill the memory."""
    yield
    gc.collect()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, and one thread: tensors as small as those of tests are faster so."""
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def nvme_path() -> Iterator[Path]:
    """An empty folder for swap files, removed afterwards. It is on a real file system, which the usual temporary folder
    often is not: under INFINITY_TEST_PATH if that is set, else under .nvme/ of the checkout."""
    parent = Path(os.environ.get("INFINITY_TEST_PATH") or ROOT / ".nvme")
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=parent))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["io_uring", "linux_aio", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each I/O backend in turn; the test is skipped, with the reason, for one that this machine refuses."""
    from infinity._aio import probe

    name: str = request.param
    found = {found: (available, reason) for found, available, reason in probe()}
    available, reason = found.get(name, (False, "not built"))
    if not available:
        pytest.skip(f"{name}: {reason}")
    return name


ABORT_AT_EXIT = "terminate called without an active exception"
"""What a rank says when torch's gloo thread lets go of its last tensor while the interpreter is already ending (seen with torch
2.13 alone, once in some hundred runs). It says nothing about the test, which runs once more then."""


class Ranks(Protocol):
    def __call__(
        self,
        script: Path,
        *arguments: str,
        ranks: int = 2,
        timeout_seconds: float = 300,
        environment: dict[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def torchrun() -> Ranks:
    """Runs a Python file as `ranks` ranks on this machine under torchrun, one thread each, and returns its exit status and
    output (stdout and stderr together, as `stdout`). Fails the test, with the output, when a rank fails (unless `check` is
    false) or when `timeout_seconds` have passed; no rank outlives the call."""
    return partial(run_ranks, start_torchrun)


@pytest.fixture
def forked_ranks() -> Ranks:
    """The same without torchrun, by ranks that have torch already (tests/helpers/launch.py): seconds of a core less a call."""
    return partial(run_ranks, fork_ranks)


def run_ranks(
    once: Callable[..., tuple[int | None, str]],
    script: Path,
    *arguments: str,
    ranks: int = 2,
    timeout_seconds: float = 300,
    environment: dict[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    where = f"{script.name} on {ranks} ranks"
    variables = {**os.environ, **RANK_ENVIRONMENT, **(environment or {})}
    status, output = once(script, arguments, ranks, variables, timeout_seconds)
    if status and ABORT_AT_EXIT in output:
        warnings.warn(f"{where}: a rank aborted at exit; run again", stacklevel=2)
        status, output = once(script, arguments, ranks, variables, timeout_seconds)
    if status is None:
        pytest.fail(f"{where}: no end after {timeout_seconds:g} s\n{output}", pytrace=False)
    if check and status != 0:
        pytest.fail(f"{where}: exit status {status}\n{output}", pytrace=False)
    return subprocess.CompletedProcess([str(script), *arguments], status, output)


def fork_ranks(
    script: Path, arguments: tuple[str, ...], count: int, environment: dict[str, str], timeout_seconds: float
) -> tuple[int | None, str]:
    return launch.ranks(script, *arguments, count=count, environment=environment, timeout_seconds=timeout_seconds)


def start_torchrun(
    script: Path, arguments: tuple[str, ...], count: int, environment: dict[str, str], timeout_seconds: float
) -> tuple[int | None, str]:
    """Its exit status, None where it had to be ended, and the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    launcher = subprocess.Popen(
        [*command, str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    in_time = True
    try:
        output, _ = launcher.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        in_time = False
        end(launcher)
        output, _ = launcher.communicate()
    finally:
        end(launcher)
    return launcher.returncode if in_time else None, output


def end(launcher: subprocess.Popen[str]) -> None:
    """End the launcher and its ranks. Each rank leads a process group of its own, so they are found by descent."""
    if launcher.poll() is not None:
        return  # the launcher waits for its ranks
    processes = [launcher.pid, *descendants(launcher.pid)]
    launcher.terminate()
    try:
        launcher.wait(timeout=5)
    except subprocess.TimeoutExpired:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def descendants(process: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found
