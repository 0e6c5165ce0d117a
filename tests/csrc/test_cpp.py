"""Runs the C++ tests of csrc, which sanitized.py compiles, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import sanitized

RUN_SECONDS_MAX = 300
SEEDS = "4"
"""Each takes a second of a core; which errors threads make does not depend on them. INFINITY_FAULT_SEEDS sets their number."""


def _fixed_addresses() -> list[str]:
    """TSan of g++ 12 can't live with the address randomisation of newer kernels; setarch -R switches that off."""
    command = ["setarch", "-R"]
    if shutil.which("setarch") is None or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        return []
    return command


@pytest.mark.slow
@pytest.mark.parametrize("part", sanitized.SOURCES)
@pytest.mark.parametrize("variant", ["asan+ubsan", pytest.param("tsan", marks=pytest.mark.long)])
def test_cpp_core_is_clean_under(variant: str, part: str, tmp_path: Path) -> None:
    try:
        program = sanitized.build(part, variant)
    except sanitized.MissingError as missing:
        pytest.skip(str(missing))
    environment = os.environ | {"INFINITY_TEST_DIR": str(tmp_path), "TSAN_OPTIONS": "halt_on_error=1"}
    environment.setdefault("INFINITY_FAULT_SEEDS", SEEDS)
    command = [*(_fixed_addresses() if variant == "tsan" else []), str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)
    if variant == "tsan" and "unexpected memory mapping" in done.stderr:
        pytest.skip("TSan can't run under this kernel's address randomisation, and setarch -R is refused here")
    assert done.returncode == 0, done.stdout + done.stderr
