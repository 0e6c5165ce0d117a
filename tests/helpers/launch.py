"""Runs Python programs, alone or as several ranks, in processes that are forked with torch already imported.

Starting Python and importing torch takes two seconds of a core, for torchrun and for each of its ranks. A program gets the
same here: arguments, environment, folder, a `__main__` of its own, an ordinary end. A test of the start itself uses a new
Python process (the fixture `torchrun`).

    done = program(script, "--steps", "3")                 # stdout and stderr apart, as of subprocess.run
    done = program("infinity.cli.bench", "step")           # as `python -m`
    done = code("print(1)", "arguments")                   # as `python -c`
    status, output = ranks(script, "arguments", count=2)   # as under torchrun: the first that fails ends the others
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS_MAX = 300.0
SECONDS_TO_END = 5.0
"""Between the failure of one rank and the end of those that don't heed SIGTERM."""

_modules = ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "infinity.runtime.initialize"]
_nursery: subprocess.Popen[bytes] | None = None


def import_also(*modules: str) -> None:
    """Let the programs find these imported too; those that can't be are left to the program."""
    _modules.extend(modules)
    _close()


def program(
    script: Path | str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_seconds: float = SECONDS_MAX,
) -> subprocess.CompletedProcess[str]:
    """Run a file, or a module by its name, on one thread, with this `environment` (ours where None).

    Raises subprocess.TimeoutExpired after `timeout_seconds`; the program has ended then.
    """
    kind = "module" if isinstance(script, str) else "file"
    return _alone(kind, str(script), arguments, environment, cwd, timeout_seconds)


def code(
    text: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_seconds: float = SECONDS_MAX,
) -> subprocess.CompletedProcess[str]:
    """The same for a program that is given as its text."""
    return _alone("code", text, arguments, environment, cwd, timeout_seconds)


def ranks(
    script: Path,
    *arguments: str,
    count: int,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = SECONDS_MAX,
) -> tuple[int | None, str]:
    """Run a file as `count` ranks on one thread each: 0 or 1, None after `timeout_seconds`, and all that they printed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        status = _order("file", str(script), arguments, environment, None, count, (out, out), timeout_seconds)
        return status, out.read_text(errors="replace")


def _alone(
    kind: str,
    script: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str] | None,
    cwd: Path | None,
    timeout_seconds: float,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        status = _order(kind, script, arguments, environment, cwd, 0, (out, err), timeout_seconds)
        texts = [file.read_text(errors="replace") for file in (out, err)]
    if status is None:
        raise subprocess.TimeoutExpired([script, *arguments], timeout_seconds, *texts)
    return subprocess.CompletedProcess([script, *arguments], status, *texts)


def _order(
    kind: str,
    script: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str] | None,
    cwd: Path | None,
    count: int,
    files: tuple[Path, Path],
    timeout_seconds: float,
) -> int | None:
    """Have the nursery run it; its exit status (negative: the signal), or None where it had to be ended."""
    for file in files:
        file.touch()
    order = {
        "kind": kind,
        "script": script,
        "arguments": arguments,
        "environment": dict(environment or os.environ),
        "cwd": str(cwd or Path.cwd()),
        "ranks": count,
        "files": [str(file) for file in files],
    }
    nursery = _open()
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write(json.dumps(order).encode() + b"\n")
    nursery.stdin.flush()
    leader = int(nursery.stdout.readline())
    ended = False
    try:
        ended = bool(select.select([nursery.stdout], [], [], timeout_seconds)[0])
    finally:
        with contextlib.suppress(ProcessLookupError):  # no process outlives the call
            os.killpg(leader, signal.SIGKILL)
        status = int(nursery.stdout.readline())
    return status if ended else None


def _open() -> subprocess.Popen[bytes]:
    global _nursery
    if _nursery is None or _nursery.poll() is not None:
        command = [sys.executable, __file__, *_modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        environment["PYTHONUNBUFFERED"] = ""  # a line is written at once, so that those of several ranks stay whole
        _nursery = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        atexit.register(_close)
    return _nursery


def _close() -> None:
    """End the nursery; one that waits for nothing ends with its stdin."""
    global _nursery
    if _nursery is not None:
        _nursery.communicate()
        _nursery = None


# In the nursery


def _serve() -> None:
    """Fork for each order, tell the child's id, wait, tell its status. Returns in the child that is to run its program, which
    is then what this process has left to do."""
    for line in sys.stdin.buffer:
        order = json.loads(line)
        child = os.fork()
        with contextlib.suppress(OSError):  # parent and child both do: neither may go on before it is done
            os.setpgid(child, child)
        if child == 0:
            _take_place(order)
            if order["ranks"]:
                _keep(order)
            return _run(order)
        _tell(child)
        _, status = os.waitpid(child, 0)
        _tell(os.waitstatus_to_exitcode(status))
    return None


def _tell(number: int) -> None:
    os.write(1, f"{number}\n".encode())


def _take_place(order: dict[str, Any]) -> None:
    """Environment, folder and files of the program."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for place, file in enumerate(order["files"], 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), place)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def _keep(order: dict[str, Any]) -> None:
    """Fork the ranks. Returns in each of them; their keeper waits for all and ends with 1 if one failed, else 0."""
    count = order["ranks"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alive = set()
    for rank in range(count):
        child = os.fork()
        if child == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            place |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            return
        alive.add(child)
    failed = False
    while alive:
        child, status = os.wait()
        alive.discard(child)
        if status and not failed:
            failed = True
            _end(alive)
    os._exit(failed)


def _end(processes: set[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGTERM)
    if os.fork() == 0:  # so that the keeper keeps waiting
        time.sleep(SECONDS_TO_END)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os._exit(0)


def _run(order: dict[str, Any]) -> None:
    """The program, as the last thing of this process: what it raises, Python makes of it what it always does."""
    kind, script = order["kind"], order["script"]
    sys.argv = ["-c" if kind == "code" else script, *order["arguments"]]
    sys.path[0] = str(Path(script).parent) if kind == "file" else order["cwd"]
    if kind == "module":
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    elif kind == "file":
        runpy.run_path(script, run_name="__main__")
    else:
        exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    for module in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what was imported is no garbage: a child that looked through it at its end would copy it all
    if "triton" in sys.modules:  # which says on stderr what of it is there when Python ends: with a CUDA build of torch
        atexit.register(gc.unfreeze)
    _serve()
