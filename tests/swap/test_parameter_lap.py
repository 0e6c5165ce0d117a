"""How far one shard travels through the code in a gather: the work of its group is done before FSDP2 asks for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity import PagingOptions
from infinity.swap.paged_tensor import PagedTensor

pytestmark = pytest.mark.usefixtures("one_rank")

FILES_MAX, CROSSINGS_MAX = 4, 6  # paged_tensor.py, group.py, staging.py, shard.py


class Route:
    """The files of infinity that a call goes through, in its order, back again included."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if "infinity" not in path.parts or "site-packages" in path.parts or event not in ("call", "return"):
            return
        if event == "call":
            self._stack.append(path.name)
        else:
            self._stack.pop()
        self.files += self._stack[-1:]

    @property
    def crossings(self) -> int:
        return sum(a != b for a, b in pairwise(self.files))


def routed(method: Callable[..., Any], routes: dict[tuple[str, int], Route]) -> Callable[..., Any]:
    @functools.wraps(method)  # FSDP2 looks at its signature
    def call(self: PagedTensor, *args: Any, **kwargs: Any) -> Any:
        route = routes[self._shard.group.name, self._shard.index] = Route()
        sys.setprofile(route)
        try:
            return method(self, *args, **kwargs)
        finally:
            sys.setprofile(None)

    return call


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
@pytest.mark.parametrize("threshold", [0, 10**9], ids=["on NVMe", "resident"])
def test_a_shard_goes_through_four_files(
    update: Any, threshold: int, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    asked: dict[tuple[str, int], Route] = {}
    told: dict[tuple[str, int], Route] = {}
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.page(model, PagingOptions(update=update, param_persistence_threshold=threshold))
        optimizer = infinity.PagedAdamW(model.parameters(), swap=swap)
        for step in range(3):
            if step == 2:
                pre, post = PagedTensor.fsdp_pre_all_gather, PagedTensor.fsdp_post_all_gather
                monkeypatch.setattr(PagedTensor, "fsdp_pre_all_gather", routed(pre, asked))
                monkeypatch.setattr(PagedTensor, "fsdp_post_all_gather", routed(post, told))
            model(torch.ones(2, 32)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        groups = swap.paged.groups
    assert len(asked) == len(told) == sum(len(group.shards) for group in groups) == 12
    for key, route in asked.items():
        assert len({*route.files}) <= FILES_MAX, (key, route.files)
        assert route.crossings <= CROSSINGS_MAX, (key, route.files)
    assert all({*route.files} == {"paged_tensor.py"} for route in told.values())
