"""The I/O engine at its best beside fio at its best on the same bytes, in interleaved rounds.

    python bench/aio.py /local_nvme --save

It is `infinity-bench sweep --fio` (docs/sweep.md), reduced to one line of JSON. --quick and --size are those of the sweep;
--save appends the line to bench/results/aio.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from results import machine, save

LOADS = ("read", "write", "mixed")


def sweep(path: Path, options: list[str]) -> dict[str, Any]:
    """The JSON object of a sweep, whose report goes to standard error."""
    command = [sys.executable, "-m", "infinity.cli.bench", "sweep", str(path), "--fio", "--no-profile", "--json", "-"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder on the drive")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--size", help="of the file")
    parser.add_argument("--save", action="store_true", help="append the line to bench/results/aio.jsonl")
    args = parser.parse_args()
    options = [*(["--quick"] if args.quick else []), *(["--size", args.size] if args.size else [])]
    found = sweep(args.path, options)
    drive = {key: found["drive"][key] for key in ("model", "file_system")}
    line = {"bench": "aio", **machine(), "drive": drive, "fio_version": found["versions"]["fio"]}
    line |= {key: found[key] for key in ("quick", "rounds", "file_bytes", "ratio")}
    line |= {load: {"infinity": found[load], "fio": found["fio"][load]} for load in LOADS}
    line |= {"recommended": found["recommended"], "default": found["default"]}
    print(json.dumps(line))
    if args.save:
        save("aio", line)


if __name__ == "__main__":
    main()
