"""`infinity-bench sweep`: measures how fast a drive is, and with which settings. Only the drive's profile stays. Main
thread."""

from __future__ import annotations

import argparse
from pathlib import Path

from infinity.cli.arguments import add_json, check_files, check_plot, checked_value, count, named_path
from infinity.cli.doctor.path_checks import refusal
from infinity.cli.program import usage_checked
from infinity.errors import ConfigError, InfinityError
from infinity.units import GIB, MIB, format_bytes, parse_bytes, parse_count

_SIZE_MAX = 8 * GIB
_QUICK_SIZE_MAX = 2 * GIB
_SIZE_MIN = 64 * MIB
_FREE_SHARE = 10
"""Without --size the test file takes at most one part in this many of the free space."""

SUMMARY = "measure a drive and find the settings that serve training best"
DESCRIPTION = """\
Measure drives at many settings (backend, block size, queue depth, rings, mix of reads and writes) and find the best
for a training step. Prints them as a block for the training config and stores them in PATH/.infinity-drive.json. Takes
about five minutes, with --quick one. Run it while nothing else uses the machine."""

EPILOG = """\
examples:
  infinity-bench sweep /local_nvme --quick
  infinity-bench sweep /nvme0 /nvme1 --json sweep.json

exit code: 0 when done; 1 if the drive fails; 2 for wrong usage.
docs/sweep.md says what is measured, and lists the keys of --json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", type=named_path, metavar="PATH", help="folder on the drive to measure (nvme_path)")
    add("--quick", action="store_true", help="less exact, in about a minute")
    text = (
        'size of the test file, such as "4GiB" (default: 8 GiB, with --quick 2 GiB, at most a tenth of the free space)'
    )
    add("--size", type=checked_value(parse_bytes, at_least=_SIZE_MIN), metavar="BYTES", help=text)
    add("--rounds", type=count, metavar="N", help="final rounds (default: 5, with --quick 3)")
    add("--backend", action="append", metavar="NAME", help="only this I/O backend; may be given several times")
    add("--fio", action="store_true", help="measure fio on the same bytes and print the ratio")
    text = 'size of a model in the table of step times, such as "7B"; may be given several times (default: 1B, 7B, 70B)'
    add("--params", action="append", type=checked_value(parse_count, at_least=1), metavar="COUNT", help=text)
    add_json(parser)
    add("--plot", type=Path, metavar="FILE.png", help="draw bandwidth over block size (needs matplotlib)")
    add("--no-profile", action="store_true", help="do not write PATH/.infinity-drive.json")


def run(options: argparse.Namespace) -> int:
    with usage_checked():
        sizes = _check(options)
    from infinity.cli.sweep.run import Sweep

    sweep = Sweep(options, sizes)
    try:
        sweep.run()
    except (InfinityError, KeyboardInterrupt, SystemExit):
        sweep.print_partial_results()
        raise
    return 0


def _check(options: argparse.Namespace) -> dict[Path, int]:
    """Check the options before the first byte is written. Returns the bytes of the test file of each path."""
    from infinity.aio import probe
    from infinity.cli.sweep.fio import find_fio
    from infinity.store.run_folder import free_bytes

    sizes = {}
    for path in options.paths:
        if (refused := refusal(path)) is not None:
            raise ConfigError(": ".join(refused))
        free = free_bytes(path)
        size_max = _QUICK_SIZE_MAX if options.quick else _SIZE_MAX
        nbytes = sizes[path] = options.size or min(size_max, free // _FREE_SHARE)
        if nbytes > free:
            raise ConfigError(
                f"{path}: a file of {format_bytes(nbytes)} does not fit into the {format_bytes(free)} that are free"
            )
        if nbytes < _SIZE_MIN:
            raise ConfigError(
                f"{path}: {format_bytes(free)} are free, too little for a good measurement: free some, or set --size"
            )
    backends = {name: (available, reason) for name, available, reason in probe()}
    for name in options.backend or []:
        if name not in backends:
            raise ConfigError(f"--backend {name}: no such backend; there are {', '.join(backends)}")
        if not backends[name][0]:
            raise ConfigError(f"--backend {name}: {backends[name][1]}")
    if not any(available for available, _ in backends.values()):
        raise ConfigError("no I/O backend is available here")
    if options.fio:
        find_fio()
    check_plot(options.plot)
    check_files(options, "json")
    return sizes
