"""Runs the programs of scene.py as children that have torch already: each line of stdin is the arguments of one.

Prints each child's number, and "end NUMBER STATUS" when one has ended. Starting Python and torch each time would take seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback

import scene


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                scene.train(scene.parser().parse_args(line.split()))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print("child", child, flush=True)
        threading.Thread(target=wait_for, args=(child,), daemon=True).start()


def wait_for(child: int) -> None:
    _, status = os.waitpid(child, 0)
    os.write(1, f"end {child} {os.waitstatus_to_exitcode(status)}\n".encode())  # no lock that a fork could copy held


if __name__ == "__main__":
    main()
