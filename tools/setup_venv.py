#!/usr/bin/env python3
"""`make setup`: brings .venv up to date with this checkout, and does nothing where nothing changed.

Needs nothing but a Python of 3.10 or newer and its standard library. The steps, in order:

    system packages   what the build needs (venv, Python.h, liburing) through apt-get, where we may use it
    venv              .venv, or the one that is there
    build tools       setuptools and pybind11, as pyproject.toml asks for them
    torch             the one that is there, else the build for this machine [Note: Which torch]
    package           infinity itself, editable, with what it depends on
    extension         infinity._aio, _optim and _decode out of csrc/, in place; once `test` was named, the test build
    extras            test, dev, docs, plot: those named on the command line

[Note: Stamps] Each step has a digest of all that it depends on; the digests of finished steps stand in
.venv/.infinity-setup.json, and a step whose digest stands there is not run. A step is named there as `running` before
it starts: found there at the next start, it was interrupted, and what it left half done is cleared away first.

[Note: Which torch] A torch that the venv already has stays, if infinity is tested on it: 2.13 to 2.15. If instead the
Python that the venv is made with has one, the venv is made to see it. That saves a second copy of several GB, and keeps
the build that the machine was set up with. Otherwise one is installed:
  - with an NVIDIA GPU: the newest of these from the package index, which comes with CUDA;
  - without: the CPU build. It is known by its local version, 2.13.0+cpu, which only the index of CPU builds carries (or
    a wheel at hand); asking for exactly that version makes sure that pip cannot prefer the CUDA build of the same
    number, which is what the ordinary index holds. `--no-deps` asks the CPU index for torch and nothing else; what
    torch depends on comes with the package step. Only if the CPU build is out of reach the ordinary one is taken:
    several GB more, but it works as well.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PYTHON_OLDEST = (3, 10)
TORCH_OLDEST = (2, 13)
TORCH_UNTESTED = (2, 16)
TORCH_CPU = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".infinity-setup.json"

ASK_VENV = """
import importlib.metadata, json, sys, sysconfig
from pathlib import Path
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = None
print(json.dumps({
    "version": sys.version.split()[0],
    "system_python": sys.base_prefix == "/usr",
    "headers": Path(sysconfig.get_path("include"), "Python.h").exists(),
    "packages": sysconfig.get_path("purelib"),
    "extension_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "torch": torch,
}))
"""


class SetupError(Exception):
    """What is wrong and what to do about it, in words for the user."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Bring .venv up to date with this checkout.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="optional dependencies to install too")
    parser.add_argument(
        "--this-python", action="store_true", help="recreate .venv if it has another Python than this one"
    )
    options = parser.parse_args()
    if sys.version_info < PYTHON_OLDEST:
        found = sys.version.split()[0]
        return fail(
            f"Python 3.10 or newer is needed, {sys.executable} is {found}: "
            "name another, as in PYTHON=python3.12 make setup"
        )
    os.chdir(ROOT)
    started = time.monotonic()
    try:
        with only_one_at_a_time():
            did = set_up(options.extras, options.this_python)
    except SetupError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next make setup continues from here", file=sys.stderr)
        return 130
    if did:
        say(f"ready in {time.monotonic() - started:.0f} s; activate with . .venv/bin/activate")
    return 0


def set_up(extras: list[str], this_python: bool) -> bool:
    """Run the steps that are due. Returns whether there were any."""
    compiler = cxx_compiler()
    open_venv(this_python)
    stamp = Stamp.load()
    if stamp.interrupted:
        say(f"the last set-up did not get past the step '{stamp.interrupted}': going on from there")
        clear_half_installed()
    get_python_headers(ask_venv())
    have_liburing = get_liburing(compiler, stamp)
    if "test" in extras or "dev" in extras:
        get_doctest(compiler, stamp)

    build_tools = build_requirements()
    with stamp.step("build tools", digest(build_tools, ask_venv()["version"])) as due:
        if due:
            say("installing the build tools: " + ", ".join(build_tools))
            pip("install", *build_tools)

    install_torch(stamp)
    facts = ask_venv()

    if "test" in extras or "extra test" in stamp.done:  # else make setup and make test would undo each other's work
        os.environ.setdefault("INFINITY_TEST_BUILD", "1")
    # Compiling is part of the package step, so that one counts as the extension step too.
    extension = extension_digest(facts, have_liburing)
    extension_files = [ROOT / "infinity" / (name + facts["extension_suffix"]) for name in ("_aio", "_optim", "_decode")]
    package_digest = digest(file_digest("pyproject.toml", __file__), facts["version"], facts["torch"])
    with stamp.step("package", package_digest) as due:
        if due:
            say("installing infinity and what it depends on, and compiling its extensions (one to three minutes)")
            for file in extension_files:  # pip would keep one that was linked from other sources
                file.unlink(missing_ok=True)
            pip("install", "--no-build-isolation", "--editable", ".")
            stamp.finish("extension", extension)

    with stamp.step("extension", extension, there=all(file.exists() for file in extension_files)) as due:
        if due:
            say("compiling the extensions")
            run(
                [str(VENV_PYTHON), "setup.py", "-q", "build_ext", "--inplace", "--force"],
                "the extensions do not compile",
            )

    for extra in extras:
        with stamp.step(f"extra {extra}", package_digest) as due:
            if due:
                say(f"installing what the extra '{extra}' asks for (less than a minute)")
                pip("install", "--no-build-isolation", f"infinity-offload[{extra}]")
    return stamp.did


# The venv


def open_venv(this_python: bool) -> None:
    """Keep the .venv that is there if it serves, else make one."""
    reason = None
    if VENV.exists():
        stamp = Stamp.load()
        if stamp.interrupted == "venv":
            reason = "was left half made"
        elif stamp.root is not None and stamp.root != str(ROOT):
            reason = f"was made for {stamp.root}"
        elif not VENV_PYTHON.exists() or not works([str(VENV_PYTHON), "-c", ""]):
            reason = "has no Python that runs"
        elif this_python and ask_venv()["version"] != sys.version.split()[0]:
            reason = f"has Python {ask_venv()['version']}, not {sys.version.split()[0]}"
        if reason is None:
            if stamp.root is None:
                adopt_venv(stamp)
            return
        if stamp.root is None and any(VENV.iterdir()):
            raise SetupError(f".venv {reason} and was not made by make setup: remove it and run make setup again")
        say(f".venv {reason}: recreating it")
        shutil.rmtree(VENV)
    make_venv()


def adopt_venv(stamp: Stamp) -> None:
    """Take over a venv that the user made; some tools make them without pip."""
    if not works([str(VENV_PYTHON), "-m", "pip", "--version"]):
        run([str(VENV_PYTHON), "-m", "ensurepip"], ".venv has no pip: remove .venv and run make setup again")
    say("using the .venv that is there")
    stamp.root = str(ROOT)
    stamp.save()


def make_venv() -> None:
    get_venv_module()
    torch, torch_folder = torch_of_this_python()
    in_outer_venv = torch is not None and sys.prefix != sys.base_prefix and is_inside(torch_folder, Path(sys.prefix))
    python = sys.executable
    if is_inside(Path(sys.prefix), VENV):  # .venv is activated, and we are about to replace it
        python = getattr(sys, "_base_executable", sys.executable)
        torch = None
    VENV.mkdir(exist_ok=True)
    stamp = Stamp.load()
    stamp.root = str(ROOT)
    with stamp.step("venv", digest(sys.version)):
        say(f"making .venv with Python {sys.version.split()[0]}" + (f", which brings torch {torch}" if torch else ""))
        sight = ["--system-site-packages"] if torch and not in_outer_venv else []
        making = [python, "-m", "venv", *sight, str(VENV)]
        made = subprocess.run(making, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if made.returncode != 0:
            raise SetupError(f".venv could not be made:\n{made.stdout.strip()}")
        if torch and in_outer_venv:  # a venv cannot inherit from another one, but it can have its folder on its path
            Path(ask_venv()["packages"], "infinity-outer-venv.pth").write_text(f"{torch_folder}\n")


def torch_of_this_python() -> tuple[str | None, Path]:
    """Version and folder of a torch that this Python has, if infinity is tested on it."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None, Path()
    if not is_tested(torch.version):
        tested = f"{dotted(TORCH_OLDEST)} or newer, below {dotted(TORCH_UNTESTED)}"
        say(f"infinity is not tested on torch {torch.version}, which this Python has: .venv gets its own ({tested})")
        return None, Path()
    return torch.version, Path(str(torch.locate_file(""))).resolve()


def ask_venv() -> dict[str, Any]:
    asked = subprocess.run([str(VENV_PYTHON), "-c", ASK_VENV], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise SetupError(
            f".venv/bin/python does not run: remove .venv and run make setup again\n{asked.stderr.strip()}"
        )
    facts: dict[str, Any] = json.loads(asked.stdout)
    return facts


def clear_half_installed() -> None:
    """Make pip see as absent what an interrupted run of it left unfinished: the last thing that pip writes of a package
    is the line in RECORD about its own note INSTALLER."""
    for info in Path(ask_venv()["packages"]).glob("*.dist-info"):
        record = info / "RECORD"
        if not record.exists() or "/INSTALLER" not in record.read_text(errors="replace"):
            say(f"clearing the half installed {info.name.split('-')[0]}")
            shutil.rmtree(info)


# torch


def install_torch(stamp: Stamp) -> None:
    there = ask_venv()["torch"]
    if there is not None and is_tested(there):
        return
    with stamp.step("torch", digest(TORCH_CPU, str(TORCH_OLDEST), str(TORCH_UNTESTED)), there=False):
        if nvidia_gpu():
            say("installing torch with CUDA, for the NVIDIA GPU of this machine (several GB: this takes a while)")
            pip("install", f"torch>={dotted(TORCH_OLDEST)},<{dotted(TORCH_UNTESTED)}")
            return
        say(f"no NVIDIA GPU here: installing torch {TORCH_CPU}, the CPU build (200 MB to load, 700 MB in .venv)")
        impatient = ["--retries", "1", "--timeout", "20"]
        wanted = ["--no-deps", "--extra-index-url", TORCH_CPU_INDEX, f"torch=={TORCH_CPU}+cpu"]
        if pip_succeeds("install", *impatient, *wanted):
            return
        say("the CPU build is out of reach: installing the ordinary one, which brings CUDA along (several GB)")
        pip("install", f"torch=={TORCH_CPU}")


def nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def is_tested(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and TORCH_OLDEST <= (int(numbers[1]), int(numbers[2])) < TORCH_UNTESTED


# What the system must bring


def cxx_compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise SetupError(f"the C++ compiler that CXX names, {named[0]}, is not there: unset CXX or install it")
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name) is not None:
            # Some Pythons were built with a compiler that is not on this machine, and would ask for it.
            if not shutil.which(shlex.split(sysconfig.get_config_var("CC") or "cc")[0]):
                os.environ.setdefault("CC", name)
                os.environ["CXX"] = name
            return [name]
    raise SetupError(
        "there is no C++ compiler: install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
    )


def get_venv_module() -> None:
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return
    package = f"python{dotted(sys.version_info[:2])}-venv"
    why_not = apt_install(package) if sys.base_prefix == "/usr" else "this Python does not come from apt"
    importlib.invalidate_caches()
    if importlib.util.find_spec("ensurepip") is None:
        reason = f" and could not be installed ({why_not})" if why_not else ""
        raise SetupError(
            f"Python's venv module is missing{reason}: apt-get install {package}, then run make setup again"
        )


def get_python_headers(facts: dict[str, Any]) -> None:
    if facts["headers"]:
        return
    package = f"python{'.'.join(facts['version'].split('.')[:2])}-dev"
    why_not = apt_install(package) if facts["system_python"] else "this Python does not come from apt"
    if not ask_venv()["headers"]:
        reason = f" and could not be installed ({why_not})" if why_not else ""
        raise SetupError(f"Python.h is missing{reason}: apt-get install {package}, then run make setup again")


def get_liburing(compiler: list[str], stamp: Stamp) -> bool:
    """Returns whether its header is there; setup.py finds out whether it serves."""
    return get_library(
        compiler,
        stamp,
        "liburing.h",
        "liburing-dev",
        "infinity is built without io_uring and uses its other I/O backends",
    )


def get_doctest(compiler: list[str], stamp: Stamp) -> bool:
    return get_library(compiler, stamp, "doctest/doctest.h", "doctest-dev", "the C++ tests are skipped")


def get_library(compiler: list[str], stamp: Stamp, header: str, package: str, without: str) -> bool:
    """Whether `header` can be included, after asking apt-get for it; asked once only: a refusal can take minutes."""
    if has_header(compiler, header):
        return True
    if package not in stamp.apt_refused:
        why_not = apt_install(package)
        if why_not is None and has_header(compiler, header):
            return True
        stamp.apt_refused[package] = why_not or f"it brought no {header}"
        stamp.save()
    why_not = stamp.apt_refused[package]
    say(f"no {package} ({why_not}): {without}. To have it: apt-get install {package}, then make setup")
    return False


def has_header(compiler: list[str], header: str) -> bool:
    flags = shlex.split(os.environ.get("CPPFLAGS", "")) + shlex.split(os.environ.get("CXXFLAGS", ""))
    command = [*compiler, *flags, "-x", "c++", "-E", "-"]
    asked = subprocess.run(command, input=f"#include <{header}>\n", capture_output=True, text=True, check=False)
    return asked.returncode == 0


def apt_install(package: str) -> str | None:
    """Install a Debian package. Returns None, or why it could not be."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    as_root = []
    if os.geteuid() != 0:
        as_root = ["sudo", "-n"]
        if shutil.which("sudo") is None or not works(["sudo", "-n", "true"]):
            return "not root, and no sudo without a password"
    say(f"installing {package} with apt-get")
    patience = ["-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
    apt = [*as_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", *patience]
    install = [*apt, "install", "-y", "--no-install-recommends", package]
    if works(install) or (works([*apt, "update"]) and works(install)):
        return None
    return f"apt-get install {package} failed"


# Stamps


class Stamp:
    """What has been done to .venv [Note: Stamps]."""

    def __init__(
        self, root: str | None, interrupted: str | None, done: dict[str, str], refused: dict[str, str]
    ) -> None:
        self.root = root  # the checkout that the venv was made for; None: not ours yet
        self.interrupted = interrupted
        self.done = done
        self.apt_refused = refused  # Debian package: why
        self.did = False

    @staticmethod
    def load() -> Stamp:
        try:
            read = json.loads(STAMP.read_text())
            return Stamp(read["root"], read["running"], read["done"], read["apt_refused"])
        except (FileNotFoundError, ValueError, KeyError):
            return Stamp(None, None, {}, {})

    def save(self, running: str | None = None) -> None:
        written = STAMP.with_suffix(".new")
        content = {"root": self.root, "running": running, "done": self.done, "apt_refused": self.apt_refused}
        written.write_text(json.dumps(content, indent=1) + "\n")
        written.replace(STAMP)

    @contextlib.contextmanager
    def step(self, name: str, digest: str, there: bool = True) -> Iterator[bool]:
        """Yields whether the step is due, and notes it as done if the body gets to its end. `there` says whether the
        step's product still exists."""
        due = self.done.get(name) != digest or not there
        if not due:
            yield False
            return
        self.did = True
        self.done.pop(name, None)
        self.save(running=name)
        yield True
        self.finish(name, digest)

    def finish(self, name: str, digest: str) -> None:
        self.done[name] = digest
        self.save()


def extension_digest(facts: dict[str, Any], have_liburing: bool) -> str:
    folders = ("csrc", "tests/csrc/faulty")
    sources = sorted(str(path) for folder in folders for path in Path(folder).rglob("*") if path.is_file())
    named = ("INFINITY_DEV", "INFINITY_TEST_BUILD", "CC", "CXX", "CPPFLAGS", "CXXFLAGS", "CFLAGS", "LDFLAGS")
    environment = [os.environ.get(name, "") for name in named]
    return digest(
        file_digest("setup.py", *sources), facts["extension_suffix"], facts["version"], have_liburing, environment
    )


def file_digest(*paths: str) -> str:
    return digest(*((Path(path).name, hashlib.sha256(Path(path).read_bytes()).hexdigest()) for path in paths))


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def only_one_at_a_time() -> Iterator[None]:
    """Two set-ups of one checkout would tread on each other: the second waits."""
    with Path(__file__).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make setup is at work in this checkout: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Running things


def build_requirements() -> list[str]:
    """build-system.requires of pyproject.toml; `tomllib` is younger than our oldest Python, but pip carries its own."""
    read = "try: import tomllib\nexcept ImportError: from pip._vendor import tomli as tomllib\n"
    read += "import json; print(json.dumps(tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires']))"
    asked = subprocess.run([str(VENV_PYTHON), "-c", read], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise SetupError(f"pyproject.toml cannot be read:\n{asked.stderr.strip()}")
    requirements: list[str] = json.loads(asked.stdout)
    return requirements


PROGRESS_SECONDS = 15

PIP_ENVIRONMENT = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_USER": "0",
}


def pip(*arguments: str) -> None:
    run(
        [str(VENV_PYTHON), "-m", "pip", "-qq", *arguments],
        "pip failed; its reason stands above. Is the package index within reach? make setup continues from here",
        PIP_ENVIRONMENT,
    )


def pip_succeeds(*arguments: str) -> bool:
    return works([str(VENV_PYTHON), "-m", "pip", "-qq", *arguments], PIP_ENVIRONMENT)


def run(command: list[str], if_it_fails: str, environment: dict[str, str] | None = None) -> None:
    """Run with its errors shown."""
    if not works(command, environment, errors=None):
        raise SetupError(if_it_fails)


def works(
    command: list[str], environment: dict[str, str] | None = None, errors: int | None = subprocess.DEVNULL
) -> bool:
    """Run without output, but say now and then that it is at work; whether it succeeded."""
    variables, nothing, began = {**os.environ, **(environment or {})}, subprocess.DEVNULL, time.monotonic()
    with subprocess.Popen(command, env=variables, stdin=nothing, stdout=nothing, stderr=errors) as process:
        while True:
            try:
                return process.wait(PROGRESS_SECONDS) == 0
            except subprocess.TimeoutExpired:
                say(f"... {time.monotonic() - began:.0f} s, still at work")


def is_inside(path: Path, folder: Path) -> bool:
    return folder.resolve() in (path.resolve(), *path.resolve().parents)


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def fail(reason: str) -> int:
    print(f"setup: error: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
