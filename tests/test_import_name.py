"""`import infinity` when other modules have that name: the one that is found, and the error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` where `paths` come before the checkout."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd="/", capture_output=True, text=True, check=False
    )


def test_the_sure_name_has_the_same_names_and_loads_no_torch() -> None:
    code = """
import sys
import infinity_offload as sure
assert "torch" not in sys.modules
import infinity
assert sure.SwapManager is infinity.SwapManager and sure.__version__ == infinity.__version__
assert {*infinity.__all__} <= {*dir(sure)}
from infinity_offload import Engine
try:
    sure.Engin
except AttributeError as error:
    assert "'Engin'" in str(error)
else:
    raise AssertionError
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_another_infinity_on_the_path_is_named_with_the_next_move(tmp_path: Path) -> None:
    (tmp_path / "infinity.py").write_text("inf = float('inf')\n")
    for code in ("import infinity_offload", "import infinity, infinity_offload", "from infinity_offload import bench"):
        done = python(code, tmp_path)
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and last.startswith("ImportError: `import infinity` finds"), done.stderr
        assert str(tmp_path / "infinity.py") in last and str(ROOT / "infinity") in last and "PYTHONPATH" in last

    site = tmp_path / "lib" / "site-packages"
    (site / "infinity").mkdir(parents=True)
    (site / "infinity" / "__init__.py").touch()
    assert "pip uninstall" in python("import infinity_offload", site).stderr


def test_a_folder_without_modules_is_no_other_infinity(tmp_path: Path) -> None:
    (tmp_path / "infinity").mkdir()  # runs and logs are often called so
    assert python("import infinity_offload as sure; sure.PagingOptions", tmp_path).returncode == 0


def test_names_of_the_other_distribution_are_said_to_be_hidden() -> None:
    done = python("from infinity import inf")
    assert done.returncode == 1 and "distribution `infinity`, which infinity-offload hides" in done.stderr


def test_the_other_distribution_is_listed_where_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "infinity.py").touch()
    (tmp_path / "infinity-1.5.dist-info").mkdir()
    (tmp_path / "infinity-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: infinity\nVersion: 1.5\n"
    )
    (tmp_path / "infinity-1.5.dist-info" / "top_level.txt").write_text("infinity\n")
    code = f"import runpy, sys; sys.path.append({str(tmp_path)!r}); runpy.run_module('infinity', run_name='__main__')"
    done = python(code)
    assert (
        "also called infinity" in done.stdout and "infinity, which can't be used in the same environment" in done.stdout
    )
