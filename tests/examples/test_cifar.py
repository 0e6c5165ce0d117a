"""The example that scripts written for DeepSpeed are compared with: it learns, on one rank and on two, with its own JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def settings_at(folder: Path, **changes: Any) -> str:
    """The example's JSON with its swap files in `folder`."""
    settings = json.loads((EXAMPLES / "cifar.json").read_text())
    for name in ("offload_param", "offload_optimizer"):
        settings["zero_optimization"][name]["nvme_path"] = str(folder)
    file = folder.parent / f"{folder.name}.json"
    file.write_text(json.dumps({**settings, **changes}))
    return str(file)


def figures(output: str) -> tuple[list[float], int]:
    losses = [float(loss) for loss in re.findall(r"loss: (\d+\.\d+)", output)]
    (accuracy,) = re.findall(r"Accuracy on held-out images: (\d+) %", output)
    return losses, int(accuracy)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks"), [("forked_ranks", 1), ("torchrun", 2)])
def test_it_learns(launcher: str, ranks: int, request: pytest.FixtureRequest, nvme_path: Path) -> None:
    config = settings_at(nvme_path)
    run = request.getfixturevalue(launcher)
    done = run(EXAMPLES / "cifar.py", "--deepspeed", "--deepspeed_config", config, ranks=ranks)
    Path(config).unlink()
    losses, accuracy = figures(done.stdout)
    assert losses[0] > 2.0 > 0.5 > losses[-1]
    assert accuracy > 90
    assert not list(nvme_path.iterdir())


@pytest.mark.slow
def test_it_learns_in_fp16(forked_ranks: Any, nvme_path: Path) -> None:
    config = settings_at(nvme_path, bf16={"enabled": False}, fp16={"enabled": True, "initial_scale_power": 24})
    done = forked_ranks(EXAMPLES / "cifar.py", "--deepspeed_config", config, "-e", "2", ranks=1)
    Path(config).unlink()
    assert "Skipping step. Attempted loss scale: 16777216, " in done.stdout
    assert figures(done.stdout)[1] > 90
