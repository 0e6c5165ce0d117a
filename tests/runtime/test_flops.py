"""The report of `flops_profiler`: what it counts, when, and what its keys leave out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

pytestmark = pytest.mark.usefixtures("one_rank")

FORWARD_FLOPS = 2 * 4 * (8 * 16 + 16 * 8) * 2  # of two blocks, for four samples


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def trained(path: Path, steps: int = 4, *, train_batch_size: int = 8, **profiler: Any) -> list[float]:
    """Losses of a training in which evaluations come between the steps. train_batch_size: set after the first step."""
    place = {"device": "nvme", "nvme_path": str(path)}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "flops_profiler": profiler,
    }
    engine, *_ = infinity.initialize(model=Blocks(), config=config)
    losses = []
    with engine:
        for step in range(steps):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            with torch.no_grad():
                engine(x)
            for _ in range(engine.gradient_accumulation_steps()):
                loss = engine(x).square().mean()
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
            engine.set_train_batch_size(train_batch_size)
    return losses


def value(report: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)}:\s+(.*)$", report, re.MULTILINE)
    assert found is not None, report
    return found[1]


def test_one_report_and_the_same_training(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = trained(nvme_path)
    assert "Profile" not in capsys.readouterr().out
    assert trained(nvme_path, enabled=True, profile_step=2) == expected
    report = capsys.readouterr().out
    assert report.count("Profile summary at step 2") == 1
    assert value(report, "fwd flops per GPU") == f"{FORWARD_FLOPS / 1e3:.2f} K"
    assert value(report, "fwd MACs per GPU") == f"{FORWARD_FLOPS / 2e3:.2f} KMACs"
    assert value(report, "params of model") == "544"
    assert (value(report, "batch size per GPU"), value(report, "gradient accumulation steps")) == ("4", "2")
    assert float(value(report, "samples/second")) > 0
    (block,) = re.findall(
        r"^    \(0\): Sequential: 272 = 50.00% params, .* = 50.00% MACs, (.*) = ", report, re.MULTILINE
    )
    assert float(block.split()[0]) > 0
    assert len(re.findall("Linear: 128 = 23.53% params, 512 MACs = 25.00% MACs", report)) == 2  # those without bias


def test_a_batch_that_was_set_later_is_the_one_reported(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(nvme_path, train_batch_size=12, enabled=True, profile_step=2)
    assert value(capsys.readouterr().out, "gradient accumulation steps") == "3"


def test_its_keys_say_how_much_and_where(nvme_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.txt"
    trained(nvme_path, enabled=True, detailed=False, module_depth=1, output_file=str(file), recompute_fwd_factor=1.0)
    report = file.read_text()
    assert "Profile" not in capsys.readouterr().out
    assert "Detailed" not in report
    assert re.findall("depth (.):", report) == ["0", "1"]
    value(report, "bwd FLOPS per GPU = 3 * fwd flops / bwd latency")
    trained(nvme_path, enabled=True, top_modules=2, output_file=str(file))
    report = file.read_text()
    assert re.findall("depth (.):", report) == ["0", "1", "2", "3"]
    assert re.search(r"depth 3:\n    params      - \{'Linear': '544', 'GELU': '0'\}", report)


def test_a_report_that_has_no_place_ends_no_training(
    nvme_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trained(nvme_path, enabled=True, output_file=str(tmp_path / "nowhere" / "report.txt"))
    assert "Profile summary" in capsys.readouterr().out
    assert "nowhere/report.txt can't be written (No such file or directory)" in caplog.text


def test_a_training_that_ends_before_reports_nothing_and_says_so(
    nvme_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trained(nvme_path, steps=2, enabled=True, profile_step=2)
    assert "Profile" not in capsys.readouterr().out
    assert "flops_profiler wrote no report: profile_step is 2, and the training ended at step 2" in caplog.text
    caplog.clear()
    trained(nvme_path, steps=2, enabled=True, profile_step=1)
    assert "no report" not in caplog.text
