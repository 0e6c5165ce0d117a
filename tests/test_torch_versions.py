"""One range of torch everywhere; what is older or newer is named with it, in a sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infinity import torch_versions
from infinity.cli.doctor import machine_checks
from infinity.cli.doctor.machine_checks import Mark, Section
from infinity.torch_versions import ANYWAY, REQUIREMENT, why_too_old, why_untested

ROOT = Path(__file__).resolve().parent.parent


def test_what_is_packaged_installed_and_said_is_one_range() -> None:
    (major, oldest), (_, newest) = torch_versions.OLDEST, torch_versions.NEWEST
    assert torch_versions.TESTED == f"{major}.{oldest} to {major}.{newest}"
    assert f"torch>={major}.{oldest},<{major}.{newest + 1}" == REQUIREMENT
    assert f'"{REQUIREMENT}",' in (ROOT / "pyproject.toml").read_text()
    setup = (ROOT / "tools/setup_venv.py").read_text()
    assert f"TORCH_OLDEST = ({major}, {oldest})\nTORCH_UNTESTED = ({major}, {newest + 1})\n" in setup
    assert f"tested on it: {torch_versions.TESTED}." in setup


def test_make_test_torch_runs_each_of_the_range() -> None:
    (major, oldest), (_, newest) = torch_versions.OLDEST, torch_versions.NEWEST
    tool = (ROOT / "tools/test_torch_versions.sh").read_text()
    versions = re.search(r"^versions=\((.*)\)", tool, re.MULTILINE)
    assert versions is not None
    releases = [tuple(map(int, version.split(".")[:2])) for version in versions[1].split()]
    assert releases == [(major, minor) for minor in range(oldest, newest + 1)]


@pytest.mark.parametrize(
    ("version", "too_old", "untested"),
    [
        ("2.8.0", True, False),
        ("2.12.1+cu128", True, False),
        ("2.13.0+cpu", False, False),
        ("2.15.1+cu132", False, False),
        ("2.16.0a0+git0123456", False, True),
        ("3.0.0", False, True),
    ],
)
def test_versions_outside_the_range_are_named_with_it(version: str, too_old: bool, untested: bool) -> None:
    for why, expected in ((why_too_old(version), too_old), (why_untested(version), untested)):
        assert (why is not None) == expected
        assert why is None or (version in why and torch_versions.TESTED in why and REQUIREMENT in why)


@pytest.mark.parametrize(
    "use",
    [
        "infinity.initialize",
        "import infinity.swap",
        "infinity.SwapManager",
        "infinity.get_fp32_state_dict_from_zero_checkpoint",
    ],
)
def test_an_older_torch_ends_the_import_in_one_sentence(use: str) -> None:
    code = f"import infinity, torch; torch.__version__ = '2.12.1'\n{use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == f"ImportError: {why_too_old('2.12.1')}, or set {ANYWAY}=1 to try this one"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            "from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as X; del X.to_sharded",
            "FSDPParam.to_sharded",
        ),
        ("import torch.distributed.fsdp._fully_shard._fsdp_param as m; del m.FSDPParam", "FSDPParam"),
        (
            "import sys; sys.modules['torch.distributed.fsdp._fully_shard._fsdp_collectives'] = None",
            "_fsdp_collectives",
        ),
    ],
)
def test_a_torch_that_moved_what_fsdp2_keeps_to_itself_ends_the_import_in_one_sentence(
    changed: str, named: str
) -> None:
    code = f"import infinity, torch, torch.distributed.fsdp\n{changed}\ninfinity.initialize"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: torch {torch.__version__} lacks private parts of FSDP2")
    assert named in last and f"pip install '{REQUIREMENT}'" in last


def test_a_torch_that_lacks_an_attribute_is_tried_where_that_is_asked_for() -> None:
    code = (
        "from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as X; del X.to_sharded\n"
        "import infinity; infinity.initialize"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, ANYWAY: "1"}, check=True)


def test_an_older_torch_is_tried_where_that_is_asked_for() -> None:
    code = "import infinity, torch; torch.__version__ = '2.12.1'\nimport infinity.swap"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, ANYWAY: "1"}, check=True)


@pytest.mark.parametrize(("version", "mark"), [("2.12.1", Mark.FAIL), ("2.13.0+cpu", Mark.OK), ("2.99.0", Mark.WARN)])
def test_the_doctor_knows_the_range(version: str, mark: Mark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    section = Section("software", "Software")
    machine_checks.check_software(section)
    (finding,) = (finding for finding in section.findings if finding.name == "torch")
    assert (finding.mark, version in finding.text) == (mark, True)
    assert (REQUIREMENT in finding.next_move) == (mark is not Mark.OK)
