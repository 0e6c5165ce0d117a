"""The program infinity-bench as a shell sees it: quick help, exit codes, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from infinity.cli import bench
from infinity.cli.arguments import check_file


def infinity_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infinity.cli.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [("--help",), ("doctor", "--help")])
def test_help_is_printed(arguments: tuple[str, ...]) -> None:
    done = infinity_bench(*arguments)
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert done.stderr == ""


def test_help_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "matplotlib", "pydantic", "rich"]
    code = (
        "import sys; from infinity.cli.bench import main\n"
        "try: main(['--help'])\n"
        f"finally: sys.stderr.write(','.join(m for m in {heavy} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "doctor" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [(), ("no-such-command",), ("doctor", "--no-such-option"), ("doctor", "a", "b")])
def test_wrong_usage_is_two_and_says_what_is_right(arguments: tuple[str, ...]) -> None:
    done = infinity_bench(*arguments)
    assert done.returncode == 2
    assert "usage: infinity-bench" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["doctor", "sweep", "plan", "step", "report"])
def test_commands_are_alike(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([command, "--help"])
    shown = capsys.readouterr().out
    for said in ("PATH", "--json FILE", f"examples:\n  infinity-bench {command} /local_nvme", "exit code: 0"):
        assert said in shown
    assert "--nvme-path" not in shown
    # Unwritable output is rejected before the work, for root too: a file as the folder, a link to nowhere.
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "result.json")
    model = ["--params", "1M"] if command in ("plan", "step") else []
    for name in ("file/result.json", "link"):
        assert bench.main([command, str(tmp_path), *model, "--json", str(tmp_path / name)]) == 2
        assert f"--json: {tmp_path / name} can't be written (" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {"file", "link"}


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    for name in ("old", "new"):
        check_file(tmp_path / name)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old", "kept")]


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert "check whether training with NVMe works here" in capsys.readouterr().err
