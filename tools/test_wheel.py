#!/usr/bin/env python3
"""`make test-wheel`: installs a wheel into an environment of its own and uses it there, without compiler and liburing.

The doctor looks at the machine; a small training is run whole, then killed with SIGKILL in the middle and resumed, and must end
with the same losses to the last bit. What the wheel depends on comes from this Python's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS, KILLED_AFTER = 8, 4
WHERE = """
import sys
from pathlib import Path
import infinity._aio
libraries = Path("/proc/self/maps").read_text()
assert "liburing" not in libraries, "liburing is loaded as a library"
assert not hasattr(infinity._aio, "make_worse"), "it is a test build: unset INFINITY_TEST_BUILD"
print(Path(infinity.__file__).parent)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Use a wheel where neither compiler nor liburing is.")
    parser.add_argument("wheel", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            check(options.wheel.resolve(), Path(scratch))
        except (AssertionError, subprocess.CalledProcessError) as error:
            said = (error.stderr or error.stdout or "") if isinstance(error, subprocess.CalledProcessError) else ""
            print(f"test_wheel: {options.wheel.name}: {error}\n{said[-3000:]}", file=sys.stderr)
            return 1
    print(f"test_wheel: {options.wheel.name}: works")
    return 0


def check(wheel: Path, scratch: Path) -> None:
    home = scratch / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel)
    site = next((home / "lib").glob("python3*/site-packages"))
    (site / "dependencies.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    tools = scratch / "tools"  # a PATH with the commands of the wheel alone
    tools.mkdir()
    for command in (home / "bin").glob("infinity-*"):
        (tools / command.name).symlink_to(command)
    environ = {"PATH": str(tools), "HOME": str(scratch), "OMP_NUM_THREADS": "1"}
    where = run(python, "-c", WHERE, environ=environ, cwd=scratch).strip()
    assert where.startswith(str(home)), f"another infinity was imported, from {where}"
    print(run(python, "-m", "infinity", environ=environ, cwd=scratch))
    drive = ROOT / ".nvme"  # a disk: where there is little space, /tmp may be memory
    drive.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=drive) as folder:
        print(run("infinity-bench", "doctor", folder, environ=environ, cwd=scratch).splitlines()[-1])
        whole = losses(python, Path(folder) / "whole", scratch / "whole.json", environ)
        assert len(whole) == STEPS
        resumed = killed_and_resumed(python, Path(folder) / "killed", scratch / "killed.json", environ)
        first = STEPS - len(resumed)
        assert 0 < first < STEPS, f"it went on at step {first} of {STEPS}"
        assert resumed == whole[first:], f"from step {first} on: {resumed} instead of {whole[first:]}"
    print(f"a training that was killed went on after step {first} of {STEPS}, to the same losses")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "infinity-offload")
    left = [file.name for file in [*site.glob("infinity*"), *(home / "bin").glob("infinity*")]]
    assert not left, f"pip uninstall left {', '.join(left)}"


def training(python: Path, folder: Path, result: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    numbers = ["--params", "1M", "--steps", STEPS, "--context", "64", "--batch-size", "2", "--seed", "1"]
    names = ["--nvme-path", folder, "--durability", "step", "--resume", "--json", result]
    return [str(part) for part in (python, ROOT / "examples" / "train_lm.py", *numbers, *names, "--no-compare")]


def losses(python: Path, folder: Path, result: Path, environ: dict[str, str]) -> list[float]:
    run(*training(python, folder, result), environ=environ, cwd=result.parent)
    return [step["loss"] for step in json.loads(result.read_text())["steps"]]


def killed_and_resumed(python: Path, folder: Path, result: Path, environ: dict[str, str]) -> list[float]:
    command = training(python, folder, result)
    with subprocess.Popen(command, env=environ, cwd=result.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split()[:2] == ["step", f"{KILLED_AFTER}/{STEPS}"]:
                process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    return losses(python, folder, result, environ)


def run(*command: object, environ: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    words = [str(part) for part in command]
    if environ is not None and os.sep not in words[0]:
        words[0] = str(Path(environ["PATH"]) / words[0])
    return subprocess.run(words, env=environ, cwd=cwd, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
