"""The program that `infinity-run` starts on each host: torchrun, until its ranks have ended or stdin closes. Main
thread, and one that waits for stdin.

Stdin shows a remote host that the launcher has ended, for any reason: sshd closes it with the connection. A terminal
(`ssh -tt`) would also hang up, but it merges stdout and stderr, and changes what they carry.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

RANK_SECONDS = 5
"""Seconds from SIGTERM to SIGKILL for the ranks of a host that has to end."""

HOST_SECONDS = RANK_SECONDS + 3
"""Seconds after which torchrun is abandoned: it may be waiting, in C++, for hosts that have ended."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with `arguments`, options as `--name=value`. Returns the status of the rank that failed first: 0 if
    none has, 128 + N for signal N."""
    # No signal handlers: before there are ranks, SIGTERM must end a process that waits in C++ for other hosts.
    threading.Thread(target=_end_with, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that no rank reads the launcher's stdin

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    script = next(place for place, argument in enumerate(arguments) if not argument.startswith("-"))
    options = parse_args([*arguments[: script + 1]])
    options.training_script_args = [*arguments[script + 1 :]]  # argparse would drop a "--" that comes first
    options.shutdown_timeout = RANK_SECONDS
    try:
        run(options)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except (OSError, RuntimeError) as error:  # of the rendezvous: a port in use, an unknown host
        print(f"torchrun: {error}", file=sys.stderr)
        return 1
    return 0


def _end_with(stdin: int) -> None:
    """End this process, and its ranks, when `stdin` closes."""
    with contextlib.suppress(OSError):
        while os.read(stdin, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(HOST_SECONDS)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
