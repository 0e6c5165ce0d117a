"""Builds the C++ tests of csrc for each sanitizer; the programs stay in build/, and so do the objects.

`python tests/csrc/sanitized.py [VARIANT ...]` builds them ahead of the tests; it needs Python's standard library alone. An
object is named after all that it is made of, so nothing is compiled twice, and nothing is taken that is out of date.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "csrc"
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
FOLDER = ROOT / "build" / "tests"
FLAGS = [
    *(
        "-std=c++17",
        "-O0",
        "-g1",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fno-omit-frame-pointer",
        "-pthread",
    ),
    f"-I{CSRC}",
]
MAIN = HERE / "test_main.cpp"
BASE = [*(CSRC / "base").glob("*.cpp")]
SOURCES = {
    "aio": [
        *(*BASE, *(CSRC / "aio").glob("*.cpp"), *HERE.glob("faulty/*.cpp")),
        *(*HERE.glob("test_*.cpp"), *HERE.glob("fuzz/fuzz_*.cpp")),
    ],
    "optim": [*BASE, *(CSRC / "optim").glob("*.cpp"), *HERE.glob("optim/test_*.cpp"), MAIN],
    "decode": [*BASE, *(CSRC / "decode").glob("*.cpp"), *HERE.glob("decode/test_*.cpp"), MAIN],
}
VARIANTS = {
    "asan+ubsan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "tsan": ["-fsanitize=thread"],
}
COMPILE_JOBS = 2


class MissingError(Exception):
    """What this machine lacks to build them, in words."""


def build(part: str, variant: str) -> Path:
    """The program with the tests of `part`. Raises MissingError, or AssertionError with the compiler's words."""
    flags = [*VARIANTS[variant], *_requirements(variant)]
    sources = [path for path in SOURCES[part] if path.name != "bindings.cpp"]
    sources.sort(key=lambda path: path.stat().st_size, reverse=True)
    with _one_at_a_time():
        with ThreadPoolExecutor(COMPILE_JOBS) as pool:
            units = list(pool.map(lambda source: _object(source, variant, flags), sources))
        program = _place(f"{variant}-{part}", "", [unit.name for unit in units])
        if not program.exists():
            _compile([*FLAGS, *map(str, units), *flags], program)
    return program


def _object(source: Path, variant: str, flags: list[str]) -> Path:
    if source == MAIN:  # doctest itself: not what is tested, and long to compile with a sanitizer
        variant, flags = "plain", ["-O0"]
    # Registers in hundreds of scopes, to which nothing points: watching those takes a minute to compile.
    if source.name.startswith("kernels_"):
        flags = [*flags, "-fno-sanitize-address-use-after-scope"]
    unit = _place(f"{variant}-{source.parent.name}-{source.stem}", ".o", [*FLAGS, *flags, _text(source), _headers()])
    if not unit.exists():
        _compile([*FLAGS, *flags, "-c", str(source)], unit)
    return unit


def _place(name: str, suffix: str, of: list[str]) -> Path:
    """Where what is made `of` all that lies; what was made under its name of anything else goes."""
    place = FOLDER / f"{name}-{hashlib.sha256(repr(of).encode()).hexdigest()[:16]}{suffix}"
    for old in FOLDER.glob(f"{name}-{'?' * 16}{suffix}"):
        if old != place:
            old.unlink()
    return place


def _compile(arguments: list[str], product: Path) -> None:
    started = product.with_name(f"started-{product.name}")
    done = subprocess.run(["g++", *arguments, "-o", str(started)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    started.rename(product)


def _text(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()


@functools.cache
def _headers() -> str:
    """Every unit counts as made of every header."""
    paths = [path for folder in (CSRC, HERE) for path in folder.rglob("*") if path.suffix in (".h", ".hpp", ".inc")]
    return "".join(_text(path) for path in sorted(paths))


@functools.cache
def _requirements(variant: str) -> list[str]:
    """Flags for what is optional and present. Raises MissingError if something necessary isn't."""
    if shutil.which("g++") is None:
        raise MissingError("g++ isn't installed")
    if not _compiles("#include <doctest/doctest.h>\nint main() {}\n", "-DDOCTEST_CONFIG_DISABLE"):
        raise MissingError("the header doctest/doctest.h isn't installed (Debian: doctest-dev)")
    if not _compiles("int main() {}\n", *VARIANTS[variant]):
        raise MissingError(
            f"g++ can't link with {' '.join(VARIANTS[variant])}: the sanitizer's runtime isn't installed"
        )
    return _uring()


@functools.cache
def _uring() -> list[str]:
    uring = ["-DINFINITY_HAVE_LIBURING", "-luring"]
    text = "#include <liburing.h>\nint main() { io_uring_submit_and_get_events(nullptr); }\n"
    return uring if _compiles(text, *uring) else []


def _compiles(text: str, *flags: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cpp")
        source.write_text(text)
        command = ["g++", "-std=c++17", str(source), "-o", str(source.with_suffix("")), *flags]
        return subprocess.run(command, capture_output=True).returncode == 0


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    try:
        for variant in sys.argv[1:] or VARIANTS:
            for part in SOURCES:
                print(build(part, variant), flush=True)
    except (MissingError, AssertionError) as error:
        print(f"sanitized: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
