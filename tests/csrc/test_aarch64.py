"""The checksums as an ARM processor computes them, where a cross compiler and qemu are installed: its own instruction."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import sanitized

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = [sanitized.CSRC / "base/crc32c.cpp", sanitized.HERE / "test_crc32c.cpp", sanitized.MAIN]
DOCTEST = Path("/usr/include/doctest")


@pytest.mark.long
def test_checksums_are_the_same_by_the_instruction_of_arm(tmp_path: Path) -> None:
    for needed in (COMPILER, EMULATOR):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} isn't installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    if not DOCTEST.is_dir():
        pytest.skip("the header doctest/doctest.h isn't installed (Debian: doctest-dev)")
    (tmp_path / "doctest").symlink_to(DOCTEST)  # alone: the other headers in that folder are this machine's
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-static"]
    places = [f"-I{sanitized.CSRC}", f"-isystem{tmp_path}"]
    program = tmp_path / "program"
    command = [COMPILER, *flags, *places, *map(str, SOURCES), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the way in use is armv8" in done.stdout
