"""Count how far a reader walks to follow one training step: calls, functions, files and crossings inside infinity/.

    python tools/laps.py                      print the counts of a step, and of the median and largest part of it
    python tools/laps.py --outline FOLDER     write the calls of the largest parts there, indented
    python tools/laps.py --lower              write lower counts of the step to tools/ceilings.json

A crossing is a call into another file than the call before it. The model has 13 groups, in bf16 on NVMe. FSDP2 alone makes
2 300 calls in 5 files with 773 crossings in such a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import infinity

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = ROOT / "tools" / "ceilings.json"
PACKAGE = str(Path(infinity.__file__).parent)
PARTS = ("fsdp_pre_all_gather", "fsdp_post_all_gather", "_take_unreduced", "_take_step")
WARM_UP = 6
COUNTED = 6


class Call(NamedTuple):
    depth: int
    file: str
    function: str


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.b(torch.tanh(self.a(x)))
        return y


def calls_of_a_step(folder: Path, *, pinned_bytes_max: str = "auto", update: str = "auto") -> list[Call]:
    """The calls inside infinity/ of one step after the warm-up; `folder`: on the drive.

    Of a few steps the one with the fewest: where the drive is late, more is asked for again, which leads nowhere else.
    """
    torch.manual_seed(0)
    place = {"device": "nvme", "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1e6,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 262144,
        },
        "infinity": {"wrap": ["Block"], "pinned_bytes_max": pinned_bytes_max, "update": update},
    }
    model = nn.Sequential(*[Block() for _ in range(12)], nn.Linear(512, 8))
    engine, *_ = infinity.initialize(model=model, config=config)
    calls: list[Call] = []
    steps: list[list[Call]] = []
    depth = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and event in ("call", "return"):
            if event == "call":
                name = getattr(code, "co_qualname", code.co_name)
                calls.append(Call(depth, str(Path(code.co_filename).relative_to(PACKAGE)), name))
            depth += 1 if event == "call" else -1

    with engine:
        for number in range(WARM_UP + COUNTED):
            x = torch.randn(2, 512)
            calls, depth = [], 0
            sys.setprofile(profile if number >= WARM_UP else None)
            try:
                engine.backward(engine(x).float().square().mean())
                engine.step()
            finally:
                sys.setprofile(None)
            steps.append(calls)
    return min(steps[WARM_UP:], key=len)


def count(calls: list[Call]) -> dict[str, int]:
    """Calls, functions, files and crossings."""
    files = [call.file for call in calls]
    return {
        "calls": len(calls),
        "functions": len({(call.file, call.function) for call in calls}),
        "files": len({*files}),
        "crossings": sum(a != b for a, b in pairwise(files)),
    }


def parts(calls: list[Call], name: str) -> list[list[Call]]:
    """Each call of a function whose name ends so, with the calls that it makes; the shortest first."""
    found, at = [], 0
    while at < len(calls):
        end = at + 1
        if calls[at].function.endswith(name):
            while end < len(calls) and calls[end].depth > calls[at].depth:
                end += 1
            found.append(calls[at:end])
        at = end
    return sorted(found, key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outline", type=Path, metavar="FOLDER", help="write the calls of the largest parts there")
    parser.add_argument("--pinned", default="auto", metavar="BYTES", help="infinity.pinned_bytes_max")
    parser.add_argument("--update", default="auto", help="infinity.update")
    parser.add_argument("--lower", action="store_true", help="write lower counts to tools/ceilings.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="laps-", dir=".") as folder:
        calls = calls_of_a_step(Path(folder), pinned_bytes_max=asked.pinned, update=asked.update)
    result: dict[str, Any] = {"step": count(calls)}
    for name in PARTS:
        if found := parts(calls, name):
            median, longest = found[len(found) // 2], found[-1]
            result[name] = {"times": len(found), "median": count(median), "largest": count(longest)}
            if asked.outline is not None:
                asked.outline.mkdir(parents=True, exist_ok=True)
                lines = ["  " * (call.depth - longest[0].depth) + f"{call.file}: {call.function}" for call in longest]
                (asked.outline / f"{name}.txt").write_text("\n".join(lines) + "\n")
    print(json.dumps(result, indent=1))
    if asked.lower:
        ceilings = json.loads(CEILINGS.read_text())
        ceilings["step"] = {name: min(value, ceilings["step"][name]) for name, value in result["step"].items()}
        CEILINGS.write_text(json.dumps(ceilings, indent=2) + "\n")


if __name__ == "__main__":
    main()
