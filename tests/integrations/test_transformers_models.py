"""Hugging Face's models as they are shipped: on NVMe they train to the bits of the same training in memory."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: tools/test_integration.sh transformers")

from hugging_face import SHIPPED, differences, outcome

launch.import_also("transformers.models.clip.modeling_clip")


@pytest.mark.parametrize("name", SHIPPED)
def test_trains_as_in_memory(name: str, one_rank: None, nvme_path: Path) -> None:
    ours = outcome(name, nvme_path)
    assert not differences(ours, outcome(name, None))
    assert len({loss for loss, _ in ours[0]}) > 1, "it learns"
