"""Checkpoints that DeepSpeed saved become infinity's, with the same numbers, and training resumes from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
import torch.distributed.checkpoint as dcp

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: tools/test_integration.sh deepspeed")

from deepspeed_checkpoints import SAVED

from infinity.checkpoint.dcp_storage import Reader
from infinity.cli.ckpt import main

launch.import_also("deepspeed", "few_kernels")

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "deepspeed_checkpoints.py"
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2}
"""Relative, of a loss: the order of sums is another, and in bf16 what is rounded when."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "universal"),
    [(3, 1, "fp32", False), (3, 2, "bf16", False), (3, 2, "fp32", True), (2, 2, "fp32", False), (1, 2, "bf16", True)],
)
def test_training_goes_on_from_what_deepspeed_saved(
    stage: int, ranks: int, dtype: str, universal: bool, forked_ranks: Any, nvme_path: Path, tmp_path: Path
) -> None:
    theirs, out, report = tmp_path / "theirs", tmp_path / "out", tmp_path / "report.json"

    def losses(engine: str, folder: Path, ranks: int, *more: str) -> dict[str, Any]:
        options = ("--stage", str(stage), "--dtype", dtype, "--report", str(report))
        forked_ranks(SCRIPT, engine, "--folder", str(folder), *options, *more, ranks=ranks)
        told: dict[str, Any] = json.loads(report.read_text())
        return told

    expected = losses("deepspeed", theirs, ranks)["losses"]
    tag = f"global_step{SAVED}"
    if universal:
        folders = ("--input_folder", str(theirs / tag), "--output_folder", str(theirs / f"{tag}_universal"))
        one_each = ("--num_extract_workers", "1", "--num_merge_workers", "1")
        done = launch.program("deepspeed.checkpoint.ds_to_universal", *folders, *one_each)
        assert done.returncode == 0, done.stdout + done.stderr
        tag = f"{tag}_universal"
    assert main(["import", str(theirs), "--tag", tag, str(out)]) == 0

    stored = {key: torch.empty(entry.size) for key, entry in Reader(out / tag).tensors().items()}
    dcp.load(stored, checkpoint_id=out / tag, no_dist=True)
    whole = torch.load(theirs / "whole.pt")
    assert len(whole) == (7 * 3 if stage == 3 else 7)
    assert all(torch.equal(stored[key], value.view_as(stored[key])) for key, value in whole.items())
    assert {stored[key].item() for key in stored if key.endswith(".step")} == {SAVED}

    for number, places in ((1, ()), (2, ("--nvme-path", str(nvme_path)))):
        told = losses("infinity", out, number, *places)
        assert (told["seen"], told["steps"]) == (16, SAVED)
        assert told["losses"] == pytest.approx(expected, rel=TOLERANCE[dtype])
