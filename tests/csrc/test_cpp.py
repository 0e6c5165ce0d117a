"""Compiles csrc/aio and csrc/optim with their C++ tests of this folder, and runs them under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
FLAGS = [
    *(
        "-std=c++17",
        "-O1",
        "-g1",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fno-omit-frame-pointer",
        "-pthread",
    ),
    *(f"-I{CSRC}", f"-I{CSRC / 'aio'}"),
]
SOURCES = {
    "aio": [*(CSRC / "aio").glob("*.cpp"), *HERE.glob("test_*.cpp"), *HERE.glob("fuzz/fuzz_*.cpp")],
    "optim": [
        *(CSRC / "optim").glob("*.cpp"),
        CSRC / "aio/process.cpp",
        *HERE.glob("optim/test_*.cpp"),
        HERE / "test_main.cpp",
    ],
}
VARIANTS = {
    "asan+ubsan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "tsan": ["-fsanitize=thread"],
}
COMPILE_JOBS = 2
RUN_SECONDS_MAX = 300


def _compiles(folder: Path, text: str, *flags: str) -> bool:
    source = folder / "try.cpp"
    source.write_text(text)
    command = ["g++", "-std=c++17", str(source), "-o", str(folder / "try"), *flags]
    return subprocess.run(command, capture_output=True).returncode == 0


def _requirements(folder: Path, sanitizer: list[str]) -> list[str]:
    """Flags for what is optional and present. Skips the test, with the reason, if something necessary isn't."""
    if shutil.which("g++") is None:
        pytest.skip("g++ isn't installed")
    if not _compiles(folder, "#include <doctest/doctest.h>\nint main() {}\n", "-DDOCTEST_CONFIG_IMPLEMENT"):
        pytest.skip("the header doctest/doctest.h isn't installed (Debian: doctest-dev)")
    if not _compiles(folder, "int main() {}\n", *sanitizer):
        pytest.skip(f"g++ can't link with {' '.join(sanitizer)}: the sanitizer's runtime isn't installed")
    uring = ["-DINFINITY_HAVE_LIBURING", "-luring"]
    text = "#include <liburing.h>\nint main() { io_uring_submit_and_get_events(nullptr); }\n"
    return uring if _compiles(folder, text, *uring) else []


def _build(part: str, folder: Path, flags: list[str]) -> Path:
    sources = [path for path in SOURCES[part] if path.name != "bindings.cpp"]
    sources.sort(key=lambda path: path.stat().st_size, reverse=True)

    def compile_one(source: Path) -> Path:
        unit = folder / f"{source.stem}.o"
        done = subprocess.run(
            ["g++", *FLAGS, *flags, "-c", str(source), "-o", str(unit)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return unit

    with ThreadPoolExecutor(COMPILE_JOBS) as pool:
        units = [str(unit) for unit in pool.map(compile_one, sources)]
    program = folder / f"{part}_tests"
    done = subprocess.run(["g++", *FLAGS, *units, *flags, "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def _fixed_addresses() -> list[str]:
    """TSan of g++ 12 can't live with the address randomisation of newer kernels; setarch -R switches that off."""
    command = ["setarch", "-R"]
    if shutil.which("setarch") is None or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        return []
    return command


@pytest.mark.slow
@pytest.mark.parametrize("part", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cpp_core_is_clean_under(variant: str, part: str, tmp_path: Path) -> None:
    optional = _requirements(tmp_path, VARIANTS[variant])
    program = _build(part, tmp_path, [*VARIANTS[variant], *optional])
    environment = os.environ | {"INFINITY_TEST_DIR": str(tmp_path), "TSAN_OPTIONS": "halt_on_error=1"}
    command = [*(_fixed_addresses() if variant == "tsan" else []), str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)
    if variant == "tsan" and "unexpected memory mapping" in done.stderr:
        pytest.skip("TSan can't run under this kernel's address randomisation, and setarch -R is refused here")
    assert done.returncode == 0, done.stdout + done.stderr
