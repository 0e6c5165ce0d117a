"""One training step beside what it could be: NVMe, in memory, and the floor of the drive, interleaved in one run.

    python bench/step.py --params 40M --rounds 5 --nvme-path /local_nvme

Every round steps the same model both ways and measures the drive in between. Prints a table and, last, one JSON line; with
--save the line is appended to bench/results/step.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

from gpt import GPT, config_for  # noqa: E402
from results import machine, save  # noqa: E402

import infinity  # noqa: E402
from infinity.units import MIB, parse_count  # noqa: E402


def make_engine(args: argparse.Namespace, nvme_path: str | None) -> infinity.Engine:
    device = {"device": "nvme", "nvme_path": nvme_path} if nvme_path else {"device": "none"}
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
        "infinity": {"backend": args.backend, "pinned_bytes_max": args.pinned_bytes_max},
    }
    torch.manual_seed(0)
    with infinity.init_empty():
        model = GPT(config_for(parse_count(args.params), args.context))
    return infinity.initialize(model=model, config=config)[0]


@dataclass
class Parts:
    """Seconds of one step, and its bytes."""

    forward: float
    backward: float
    step: float
    stall: float
    read_bytes: int
    written_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.step


def one_step(engine: infinity.Engine, batch: torch.Tensor) -> Parts:
    """A whole step, its writes included."""
    before = engine.swap_stats()
    began = time.perf_counter()
    loss = F.cross_entropy(engine(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
    forward = time.perf_counter()
    engine.backward(loss)
    backward = time.perf_counter()
    engine.step()
    if engine.swap is not None:
        engine.swap.stager.settle_all()
    ended = time.perf_counter()
    after = engine.swap_stats()
    moved = (0.0, 0, 0)
    if before is not None and after is not None:
        moved = (
            after.stall_seconds - before.stall_seconds,
            after.read_bytes - before.read_bytes,
            after.written_bytes - before.written_bytes,
        )
    return Parts(forward - began, backward - forward, ended - backward, *moved)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--params", default="40M", help="size of the model (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds, after one that is not counted (default: %(default)s)"
    )
    parser.add_argument("--backend", default="auto", help="auto, io_uring or threads")
    parser.add_argument("--pinned-bytes-max", default="auto", help='such as "256MiB" (default: %(default)s)')
    parser.add_argument("--nvme-path", default=str(HERE.parent / ".nvme"))
    parser.add_argument("--save", action="store_true", help="append the JSON line to bench/results/step.jsonl")
    args = parser.parse_args()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    batch = torch.randint(0, 256, (args.batch_size, args.context + 1), generator=torch.Generator().manual_seed(0))
    memory, nvme = make_engine(args, None), make_engine(args, args.nvme_path)
    rows: list[tuple[Parts, Parts, infinity.DriveRates]] = []
    with memory, nvme:
        for number in range(args.rounds + 1):
            round_ = (
                one_step(memory, batch),
                one_step(nvme, batch),
                infinity.measure_drive(args.nvme_path, nbytes=256 * MIB, rounds=1, backend=args.backend),
            )
            print(
                f"round {number}: in memory {round_[0].seconds:.3f} s, NVMe {round_[1].seconds:.3f} s, "
                f"stall {round_[1].stall:.3f} s, drive {round_[2].read_bytes_per_s / 1e9:.2f} / "
                f"{round_[2].write_bytes_per_s / 1e9:.2f} GB/s{' (not counted)' if number == 0 else ''}",
                file=sys.stderr,
            )
            if number:
                rows.append(round_)
        assert nvme.swap is not None
        bytes_floor = nvme.swap.step_bytes()
        result = summarize(rows, bytes_floor, nvme)
    dist.destroy_process_group()
    result |= {"params": nvme.numel, "batch_size": args.batch_size, "context": args.context, "rounds": args.rounds}
    line = {"bench": "step", **machine(), **result}
    print(json.dumps(line))
    if args.save:
        save("step", line)
    return 0


def summarize(
    rows: list[tuple[Parts, Parts, infinity.DriveRates]], bytes_floor: tuple[int, int], engine: infinity.Engine
) -> dict[str, Any]:
    """Medians over the rounds; every ratio is taken within its round first."""

    def median(values: Any) -> float:
        return round(statistics.median(values), 4)

    floors = [
        engine.step_floor_seconds(
            compute_seconds=in_memory.seconds,
            read_bytes_per_s=drive.read_bytes_per_s,
            write_bytes_per_s=drive.write_bytes_per_s,
        )
        for in_memory, _, drive in rows
    ]
    drive_only = [bytes_floor[0] / d.read_bytes_per_s + bytes_floor[1] / d.write_bytes_per_s for _, _, d in rows]
    optimizer_read = 12 * engine.shard_numel
    optimizer_floor = [optimizer_read / d.read_bytes_per_s + bytes_floor[1] / d.write_bytes_per_s for _, _, d in rows]
    stats = engine.swap_stats()
    assert stats is not None
    return {
        "backend": engine.swap.backend if engine.swap else None,
        "in_memory_seconds": median(m.seconds for m, _, _ in rows),
        "nvme_seconds": median(n.seconds for _, n, _ in rows),
        "nvme_min_max_seconds": [
            round(min(n.seconds for _, n, _ in rows), 4),
            round(max(n.seconds for _, n, _ in rows), 4),
        ],
        "nvme_over_in_memory": median(n.seconds / m.seconds for m, n, _ in rows),
        "floor_seconds": median(floors),
        "nvme_over_floor": median(n.seconds / f for (_, n, _), f in zip(rows, floors, strict=True)),
        "drive_seconds": median(drive_only),
        "optimizer_step_seconds": median(n.step for _, n, _ in rows),
        "optimizer_step_over_drive": median(n.step / f for (_, n, _), f in zip(rows, optimizer_floor, strict=True)),
        "stall_seconds": median(n.stall for _, n, _ in rows),
        "read_bytes_per_param": median(n.read_bytes / engine.shard_numel for _, n, _ in rows),
        "written_bytes_per_param": median(n.written_bytes / engine.shard_numel for _, n, _ in rows),
        "drive_read_gb_per_s": median(d.read_bytes_per_s / 1e9 for _, _, d in rows),
        "drive_write_gb_per_s": median(d.write_bytes_per_s / 1e9 for _, _, d in rows),
        "pinned_bytes": stats.pinned_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
