"""The worker of bench/aio.py for DeepSpeed's aio_handle. Runs under a Python that has deepspeed.

Reads a JSON object per line from standard input, {"workload", "block_bytes", "queue_depth", "threads", "seconds"},
moves bytes between a file and locked memory for that time, and answers with one: {"nbytes", "seconds", "cpu_seconds"}.

    DS_ACCELERATOR=cpu python bench/aio_deepspeed.py /local_nvme/file 1073741824
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

CHUNK_BYTES = 256 << 20


def main() -> None:
    path, nbytes = Path(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps DeepSpeed's output out of the answers
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    module = AsyncIOBuilder().load()
    source = str(path)
    target = str(path.with_name(path.name + ".mixed"))
    buffers: list[Any] = []

    def handle_of(order: dict[str, Any]) -> Any:
        return module.aio_handle(order["block_bytes"], order["queue_depth"], False, True, order["threads"])

    def run(order: dict[str, Any]) -> dict[str, float]:
        reader, writer = handle_of(order), handle_of(order)
        if not buffers:
            for _ in range(2):
                buffer = reader.new_cpu_locked_tensor(CHUNK_BYTES, torch.empty(0, dtype=torch.uint8))
                buffer.view(torch.int64).random_()
                buffers.append(buffer)
            for name in (source, target):
                for offset in range(0, nbytes, CHUNK_BYTES):
                    writer.sync_pwrite(buffers[0], name, offset)
        place = 0

        def once() -> int:
            nonlocal place
            place = (place + CHUNK_BYTES) % nbytes
            if order["workload"] == "mixed":
                reader.async_pread(buffers[0], source, place)
                writer.async_pwrite(buffers[1], target, place)
                reader.wait()
                writer.wait()
                return 2 * CHUNK_BYTES
            if order["workload"] == "read":
                reader.sync_pread(buffers[0], source, place)
            else:
                writer.sync_pwrite(buffers[1], target, place)
            return CHUNK_BYTES

        once()
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        moved = 0
        while time.perf_counter() - began < order["seconds"]:
            moved += once()
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"nbytes": moved, "seconds": seconds, "cpu_seconds": cpu}

    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
