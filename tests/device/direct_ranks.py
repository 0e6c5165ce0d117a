"""A rank of a training that reads past host memory on the device that isn't there: prints what its last step read, and was to
read."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "parity")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import training  # noqa: E402
from fake import LateRuntime  # noqa: E402
from fake_reader import FakeReader  # noqa: E402
from quiet import come_to_rest  # noqa: E402

from infinity.device import StreamDevice  # noqa: E402
from infinity.swap import machinery, manager  # noqa: E402
from infinity.swap.paging import Paging  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runtime = LateRuntime()
    patched: Any = manager
    patched.device_for = lambda torch_device: StreamDevice(runtime)
    patched = machinery
    patched.direct_reader_for = lambda torch_device, descriptors: FakeReader(runtime, descriptors)
    steps: list[tuple[int, int]] = []
    bounds: list[int] = []
    end_step = Paging.end_step

    def end(paging: Paging) -> None:
        swap: Any = paging.owner
        swap.stager.settle_all()  # what is read ahead of the next step is then the same after each
        end_step(paging)
        assert swap.paging.parameters.ahead is not None
        bounds.append(swap.paging.parameters.ahead.bytes_max)
        come_to_rest(swap)
        steps.append((swap.stats().read_bytes, swap.step_bytes()[0]))

    Paging.end_step = end  # type: ignore[method-assign]
    training.STEPS = 4
    case = dataclasses.replace(
        training.CASES["updated in the step"],
        evaluate=False,
        direct=True,
        accumulation=1,
        prefetch=3 * training.BLOCK_NUMEL,
        persistence_threshold=0,
        live=10**9,
        reuse=0,
    )
    with runtime.watching():
        training.with_engine(case, sys.argv[1])
    (before, said), (after, _) = steps[-2:]
    print(
        json.dumps(
            {
                "read": after - before,
                "said": said,
                "bound": max(bounds),
                "device_bytes_max": runtime.device_bytes_max,
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()


main()
