"""Floor 7. `infinity-bench doctor`: would training with NVMe work here, and what would make it work better?

Reads the machine, tries the real thing on a few MiB, and leaves nothing behind. Runs on the main thread.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the commands of `infinity-bench`."""
    parser = subparsers.add_parser("doctor", help="check whether training with NVMe works here")
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="PATH", help="the nvme_path; the current directory if none"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(func=run)


def run(asked: argparse.Namespace) -> int:
    """Report on the path asked for; 0 where training with NVMe would work, else 1."""
    from infinity.aio import probe
    from infinity.errors import InfinityError
    from infinity.store import RunFolder

    backends = [{"name": name, "available": available, "reason": reason} for name, available, reason in probe()]
    path = (asked.path or Path()).absolute()
    reasons = [] if any(each["available"] for each in backends) else ["no I/O backend is available"]
    try:
        RunFolder(path).close()
    except InfinityError as error:
        reasons.append(str(error))
    if asked.json:
        print(json.dumps({"path": str(path), "works": not reasons, "reasons": reasons, "backends": backends}, indent=2))
    else:
        for each in backends:
            print(f"{'ok' if each['available'] else '--':4}  {each['name']}: {each['reason']}")
        print(f"{path}: training with NVMe " + (f"does not work: {'; '.join(reasons)}" if reasons else "works"))
    return 1 if reasons else 0
