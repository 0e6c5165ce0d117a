"""Every command that README.md and docs/quickstart.md name works: it is run here in a short form, or by .ci/run as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.cli import bench
from infinity.cli import report as report_command
from infinity.cli.plan import here
from infinity.cli.sweep import run as sweep_run
from infinity.units import MIB

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/quickstart.md")
PROGRAM = re.compile(r"(make|pip|python|torchrun|infinity-\w+|\.venv/\S+) \S")
PLAN = "infinity-bench plan /local_nvme --params 8B --write-config config.json"
SMALL = ("512, 40", "64, 3")
"""What examples/quickstart.py sets, and what it sets here: width and steps."""


def named_commands() -> dict[str, str]:
    """The page of each command: a line of an indented block, or inline code that begins with a program."""
    commands = {}
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
        lines = [line.partition("  #")[0].strip() for line in re.findall(r"^    (\S.*)$", text, re.M)]
        inline = [code for code in re.findall(r"`([^`\n]+)`", text) if PROGRAM.match(code)]
        commands |= dict.fromkeys([*lines, *inline], page)
    return commands


def recipe(target: str) -> list[str]:
    """The commands behind a target of make, with none for the environment before them."""
    made = subprocess.run(
        ["make", "-n", "--no-print-directory", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [
        line
        for line in made.splitlines()
        if "setup_venv" not in line and "echo" not in line and "install Python" not in line
    ]


def by_ci(*steps: str) -> Callable[..., None]:
    """A command that .ci/run runs as it stands, in one of these targets or programs."""

    def check(*_: Any) -> None:
        ci = (ROOT / ".ci" / "run").read_text()
        assert all(step in ci or step in (ROOT / "tools" / "test_wheel.py").read_text() for step in steps)

    return check


def demo(*_: Any) -> None:
    for line in recipe("demo"):
        name = Path(line.split()[1]).stem
        assert (ROOT / "tests" / "examples" / f"test_{name}.py").exists(), "runs the program in short forms"


def in_bench(command: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of infinity-bench with short measurements, and with the drive under `path`."""
    effort = dataclasses.replace(sweep_run.QUICK, grid_depths=(8,), steps=1, trial_seconds=0.02, round_seconds=0.02)
    monkeypatch.setattr(sweep_run, "QUICK", effort)
    for name, value in {"_NUMEL_MIN": 1 << 18, "_STEPS": 2, "_COPY_BYTES": MIB}.items():
        monkeypatch.setattr(here, name, value)
    monkeypatch.setattr(here, "_FLOPS_MAX", {"cpu": 1e8, "cuda": 1e8})
    monkeypatch.setattr(here, "measure_drive", partial(here.measure_drive, nbytes=16 * MIB))
    _, *words = command.replace("/local_nvme", str(path)).split()
    assert bench.main(words) in (0, 1)


def report(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three commands run here, in short forms."""
    more = {
        "doctor": "",
        "sweep": "--size 64MiB --rounds 1 --backend threads --no-profile",
        "step": "--steps 1 --warmup 1 --seq 16 --pinned-bytes-max 64MiB",
    }

    def short(words: list[str], *, quiet: bool) -> int:
        in_bench(" ".join(["infinity-bench", *words, *more[words[0]].split()]), path, monkeypatch)
        return 0

    monkeypatch.setattr(report_command, "run_command", short)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert bench.main(["report", str(path), "--params", "1M", "--json", "report.json"]) == 0
    header, dashes, row = (line.strip("| ").split(" | ") for line in printed.getvalue().splitlines()[-3:])
    cells = dict(zip(header, row, strict=True))
    results = json.loads(Path("report.json").read_text())
    assert len(dashes) == len(row) and cells["tokens"] == "1 × 4 × 16"
    assert cells["infinity"] == f"{results['step']['seconds']:.2f} s"
    assert cells["GB/s read, written, mixed"].split(", ")[0] == f"{results['sweep']['read']['bytes_per_s'] / 1e9:.2f}"


def quickstart(path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """examples/quickstart.py in the current folder: on one rank with what the plan wrote, on several with the page's config."""
    if ranks == 1:
        SHORT[PLAN](path, monkeypatch)
    else:
        (block,) = re.findall(r"^```json\n(.*?)^```$", (ROOT / "docs" / "quickstart.md").read_text(), re.M | re.S)
        Path("config.json").write_text(block.replace("/local_nvme", str(path)))
    Path("small.py").write_text((ROOT / "examples" / "quickstart.py").read_text().replace(*SMALL))
    status, output = launch.ranks(Path("small.py").resolve(), count=ranks)
    assert status == 0, output
    losses = re.findall(r"^step 3: loss \d\.\d+, \d+ tokens/s, read \d+\.\d+ GB/s, waited", output, re.M)
    assert len(losses) == ranks and [*Path("checkpoints").iterdir()]
    assert not [*path.iterdir()], "a run that has ended leaves nothing on the drive"


def activate(*_: Any) -> None:
    by_ci("step make test")()  # which sets up first
    script = Path(sys.prefix, "bin", "activate")
    if script.exists():
        subprocess.run(["sh", "-c", f". '{script}' && command -v infinity-bench"], check=True, capture_output=True)


def distclean(*_: Any) -> None:
    for name in ("build", ".venv", ".venv-peft", ".nvme", "kept"):
        Path(name).mkdir()
    subprocess.run(["make", "-s", "-f", ROOT / "Makefile", "distclean"], check=True)
    assert [str(left) for left in Path.cwd().iterdir() if left.is_dir()] == [str(Path.cwd() / "kept")]


def in_short(command: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda path, monkeypatch: in_bench(command, path, monkeypatch)


SHORT: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "make demo": demo,
    "make test": by_ci("step make test"),
    "make setup && . .venv/bin/activate": activate,
    "make wheels": by_ci("make test-wheel"),  # the same for one Python: tests/test_wheels.py
    "pip install dist/infinity_offload-*-cp312-*.whl": by_ci("make test-wheel", '"pip", "install"'),
    "pip uninstall infinity-offload": by_ci("make test-wheel", '"pip", "uninstall"'),
    "make distclean": distclean,
    "infinity-bench plan": in_short("infinity-bench plan --params 1B --preset laptop"),
    "infinity-bench doctor /local_nvme": in_short("infinity-bench doctor /local_nvme"),
    "infinity-bench sweep /local_nvme --quick": in_short(
        "infinity-bench sweep /local_nvme --quick --size 64MiB --rounds 1 --backend threads"
    ),
    "infinity-bench report /local_nvme": report,
    PLAN: in_short(PLAN.replace("8B", "10M --seq 64")),  # run by the next
    "python examples/quickstart.py": lambda path, patch: quickstart(path, patch, 1),
    "torchrun --nproc-per-node 8 examples/quickstart.py": lambda path, patch: quickstart(path, patch, 2),
}


@pytest.mark.usefixtures("one_rank")
def test_the_programs_of_the_readme_train(nvme_path: Path) -> None:
    whole, in_a_loop = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    for program in (whole, in_a_loop):
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1), nn.Flatten(0), _Mean())
        before = model[0].weight.detach().clone()
        if program is in_a_loop:
            fully_shard(model)
        names: dict[str, Any] = {"model": model, "dataset": torch.randn(64, 8), "infinity": infinity}
        exec(program.replace("/local_nvme", str(nvme_path)).replace("2GiB", "16MiB"), names)
        if program is in_a_loop:
            model(torch.randn(2, 8)).backward()
            names["optimizer"].step()
        assert not torch.equal(names["model"].state_dict()["0.weight"].full_tensor(), before)
        (names["swap"] if program is in_a_loop else names["engine"]).close()


class _Mean(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.float().mean()


def test_each_command_that_is_named_has_a_short_form_and_the_other_way_round() -> None:
    assert named_commands().keys() == SHORT.keys()


@pytest.mark.parametrize("command", [command for command in SHORT if command != PLAN])
def test_it_works(command: str, nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SHORT[command](nvme_path, monkeypatch)


def test_setting_up_says_that_it_is_at_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import setup_venv as setup

    monkeypatch.setattr(setup, "PROGRESS_SECONDS", 0.05)
    setup.run(["sleep", "0.2"], "it fails")
    assert "setup: ... 0 s, still at work" in capsys.readouterr().out
    with pytest.raises(setup.SetupError, match="it fails"):
        setup.run(["false"], "it fails")
