"""One version: that of the package, which its commands, the distribution, the changelog and the citation have, too."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import launch
import pytest

import infinity

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("module", ["infinity.cli.bench", "infinity.cli.ckpt"])
def test_commands_say_the_version(module: str) -> None:
    done = launch.program(module, "--version")
    assert (done.returncode, done.stdout) == (0, f"infinity {infinity.__version__}\n")


def test_python_m_infinity_says_what_runs_where_without_torch() -> None:
    code = "import runpy, sys; runpy.run_module('infinity'); sys.stderr.write(str('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "False")
    done = subprocess.run([sys.executable, "-m", "infinity"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].split(maxsplit=1) == ["infinity", f"{infinity.__version__}, in {Path(infinity.__file__).parent}"]
    assert any(re.match(r"torch +\d+\.\d+.*tested", line) for line in lines)
    assert any(line.startswith("I/O backends") and line.endswith("threads") for line in lines)


def test_the_distribution_has_the_version_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text and 'version = { attr = "infinity.__version__" }' in text
    try:
        installed = importlib.metadata.version("infinity-offload")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("infinity-offload is not installed as a distribution: make setup")
    assert installed == infinity.__version__


def test_the_citation_and_the_changelog_have_the_version() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None and cited[1] == infinity.__version__
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [head for head in heads if head != "Unreleased"]
    assert heads and (not released or released[0].split()[0] == infinity.__version__)
