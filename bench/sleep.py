"""Times sleep and wake of an engine whose state is on NVMe, and the stream of its weights.

    python bench/sleep.py /local_nvme --params 1B --rounds 5

Takes two steps. Every round then streams the weights, and sleeps and wakes at level 1 and at level 2. Compares a hash of the
weights before and after each sleep. `drive_state` is the time that the drive needs to write the state
and read it again (14 bytes per parameter), as an engine would have to that keeps it in memory; `drive_weights` is the time to
read the weights (2 bytes). Prints a table and, last, one JSON line; --save appends it to bench/results/sleep.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint import make, parsed, shown, step
from results import machine, save

import infinity
from infinity.units import PAGE_BYTES, format_bytes

STATE_BYTES, WEIGHT_BYTES = 14, 2
"""Per parameter: a compute parameter in bf16, and its master and two moments in fp32."""


def memory() -> dict[str, int]:
    """Return the bytes of this process in host memory, the pinned pool included, and on the device."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return {"host": resident, "device": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0}


def weights_of(engine: infinity.Engine) -> tuple[float, str]:
    """Return the seconds to stream the weights without looking at them, and their hash."""
    began = time.perf_counter()
    for _ in engine.named_weights():
        pass
    seconds, digest = time.perf_counter() - began, hashlib.blake2b()
    for name, tensor in engine.named_weights():
        digest.update(name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return seconds, digest.hexdigest()


def main() -> None:
    args = parsed(__doc__, params="1B", pinned_bytes="2GiB", rounds=3)
    folder = Path(tempfile.mkdtemp(prefix="bench-sleep-", dir=args.path))
    seconds: dict[str, list[float]] = {}
    nbytes: dict[str, dict[str, int]] = {}

    def timed(name: str, call: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        call(*arguments)
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    try:
        engine, tokens = make(folder, args.params, args.pinned_bytes)
        with engine:
            step(engine, tokens)
            timed("step", step, engine, tokens)
            for number in range(args.rounds):
                print(f"round {number}", flush=True)
                drive = infinity.measure_drive(folder)
                reads, writes = 1 / drive.read_bytes_per_s, 1 / drive.write_bytes_per_s
                seconds.setdefault("drive_state", []).append(STATE_BYTES * engine.numel * (reads + writes))
                seconds.setdefault("drive_weights", []).append(WEIGHT_BYTES * engine.numel * reads)
                for level in (1, 2):
                    streamed, before = weights_of(engine)
                    seconds.setdefault("weights", []).append(streamed)
                    nbytes["awake"] = memory()
                    timed(f"sleep_{level}", engine.sleep, level)
                    nbytes[f"asleep_{level}"] = memory()
                    timed(f"wake_{level}", engine.wake)
                    nbytes[f"awake_after_{level}"] = memory()
                    assert weights_of(engine)[1] == before, "the weights have changed"
            timed("step_after", step, engine, tokens)
            numel = engine.numel
    finally:
        shutil.rmtree(folder)
    spread = shown(numel, seconds)
    for when, memories in nbytes.items():
        print(f"{when:>46} " + ", ".join(f"{kind} {format_bytes(value)}" for kind, value in memories.items()))
    line = {"bench": "sleep", **machine(), "params": numel, "pinned_bytes": args.pinned_bytes, "rounds": args.rounds}
    line |= {"nbytes": nbytes, "seconds": spread} | ({"note": args.note} if args.note else {})
    if args.save:
        save("sleep", line)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
