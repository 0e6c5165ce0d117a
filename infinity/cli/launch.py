"""The program `infinity-run`: torchrun on each host of a hostfile, over ssh; if one fails, all are ended. Main thread,
and two per host that copy its output."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import infinity
from infinity.cli.arguments import count, named_path
from infinity.cli.hostfile import LOCALHOST, Host, choose, read_hostfile
from infinity.cli.program import run_program, signals_held
from infinity.cli.torchrun import HOST_SECONDS
from infinity.errors import ConfigError

_EXPORTED = re.compile("(NCCL|TORCH_NCCL|GLOO|INFINITY)_.*|PYTHONPATH|OMP_NUM_THREADS")
_LOOPBACK = (LOCALHOST, "127.0.0.1", "::1")
_PORT = 29500
_SSH_FAILED = 255
_KILL_SECONDS = HOST_SECONDS + 2
_POLL_SECONDS = 0.05

_EPILOG = (
    "Arguments after SCRIPT are passed to it. Exit code: that of the rank that failed first; 255 if ssh can't reach a "
    "host; 1 for a hostfile or an option that can't be used; 2 for wrong usage; 130 after Ctrl-C."
)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity-run",
        description="Run a script with torchrun, on this machine or, over ssh, on the hosts of a hostfile.",
        epilog=_EPILOG,
        usage="%(prog)s [options] SCRIPT [ARGUMENT ...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"infinity {infinity.__version__}")
    text = "lines such as `worker-0 slots=8`; default: this machine"
    add("-H", "--hostfile", type=named_path, metavar="FILE", help=text)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("-i", "--include", metavar="HOSTS", help="only these hosts, such as worker-0@worker-1:0,2")
    chosen.add_argument("-e", "--exclude", metavar="HOSTS", help="all but these")
    add("--num-nodes", "--num_nodes", type=count, metavar="N", help="only the first N of these hosts")
    names = ("--nproc-per-node", "--nproc_per_node", "--num-gpus", "--num_gpus")
    add(*names, type=count, metavar="N", help="ranks on each host, regardless of its slots")
    add("--master-addr", "--master_addr", metavar="NAME", help="address of the first host (default: its name)")
    text = f"a free port of the first host (default: {_PORT}; with one host, any)"
    add("--master-port", "--master_port", type=count, metavar="PORT", help=text)
    add("--ssh-port", "--ssh_port", type=count, metavar="PORT", help="port of sshd, on all hosts")
    add("--ssh-option", action="append", default=[], metavar="NAME=VALUE", help="passed to ssh -o; may be repeated")
    add("--workdir", metavar="DIR", help="working folder on all hosts (default: this one)")
    text = "set on all hosts, as are PYTHONPATH, OMP_NUM_THREADS, NCCL_*, TORCH_NCCL_*, GLOO_* and INFINITY_*"
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help=text + "; may be repeated")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    add("--python", default=sys.executable, metavar="PYTHON", help="the Python on all hosts (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the shell command of each host, and run nothing")
    add("command", nargs=argparse.PARSER, metavar="SCRIPT", help="followed by its arguments")
    parser.set_defaults(func=_run)
    return parser


def _run(options: argparse.Namespace) -> int:
    hosts = _hosts(options)
    commands = dict(_commands(options, hosts))
    if options.dry_run:
        for host in hosts:
            print(f"# {host.name}, ranks: {host.ranks}\n{shlex.join(commands[host.name])}")
        return 0
    if any(command[0] == "ssh" for command in commands.values()) and not shutil.which("ssh"):
        raise ConfigError("there is no ssh on PATH to reach other hosts: install openssh-client")
    failure = _run_until_failure(commands)
    if failure is None:
        return 0
    name, status = failure
    print(f"infinity-run: {name} {_why(name, commands[name], status)}", file=sys.stderr)
    return status


def _hosts(options: argparse.Namespace) -> list[Host]:
    ranks = options.nproc_per_node
    if options.hostfile:
        hosts = read_hostfile(options.hostfile)
    elif ranks:
        hosts = [Host(LOCALHOST, ranks)]
    else:
        import torch

        hosts = [Host(LOCALHOST, max(torch.accelerator.device_count(), 1))]
    hosts = choose(hosts, include=options.include, exclude=options.exclude)
    if options.num_nodes and options.num_nodes > len(hosts):
        raise ConfigError(f"--num-nodes {options.num_nodes}: there are only {len(hosts)}; add more to --hostfile")
    hosts = hosts[: options.num_nodes]
    numbered = [host.name for host in hosts if host.chosen]
    if ranks and numbered:
        raise ConfigError(
            f"--nproc-per-node {ranks}: conflicts with the slots chosen of {numbered[0]}; leave out either"
        )
    return [host._replace(slots=ranks) for host in hosts] if ranks else hosts


def _commands(options: argparse.Namespace, hosts: Sequence[Host]) -> Iterator[tuple[str, list[str]]]:
    exported, rendezvous = _exported(options.env), _rendezvous(options, hosts)
    here = (*_LOOPBACK, socket.gethostname(), socket.gethostname().partition(".")[0])
    folder = options.workdir or str(Path.cwd())
    refused = f"infinity-run: cannot enter {folder}: make it on this host, or name another with --workdir"
    enter = f"cd {shlex.quote(folder)} || {{ echo {shlex.quote(refused)} >&2; exit 1; }}"
    for rank, host in enumerate(hosts):
        slots = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.chosen))}"] if host.chosen else []
        program = ["env", *exported, *slots, options.python, "-m", "infinity.cli.torchrun"]
        program += [*rendezvous, f"--node-rank={rank}", f"--nproc-per-node={host.ranks}"]
        program += [*(["--module"] if options.module else []), *options.command]
        line = f"{enter}; exec {shlex.join(program)}"
        yield host.name, ["sh", "-c", line] if host.name in here else [*_ssh(options), host.name, line]


def _exported(asked: Sequence[str]) -> list[str]:
    variables = {name: value for name, value in os.environ.items() if _EXPORTED.fullmatch(name)}
    for text in asked:
        name, equals, value = text.partition("=")
        if not re.fullmatch("[A-Za-z_][A-Za-z_0-9]*", name) or not (equals or name in os.environ):
            raise ConfigError(f"--env {text}: expected NAME=VALUE, or the NAME of a variable that is set here")
        variables[name] = value if equals else os.environ[name]
    return [f"{name}={value}" for name, value in variables.items()]


def _rendezvous(options: argparse.Namespace, hosts: Sequence[Host]) -> list[str]:
    """Return torchrun's options. A static rendezvous supports hosts with different numbers of ranks."""
    if len(hosts) == 1 and not options.master_addr and not options.master_port:
        return ["--standalone"]  # on a free port
    first = options.master_addr or hosts[0].name.rpartition("@")[2]
    if first in _LOOPBACK and not options.master_addr and len(hosts) > 1:
        raise ConfigError(f"the other hosts can't reach the first one as {first}: give its address with --master-addr")
    return [f"--nnodes={len(hosts)}", f"--master-addr={first}", f"--master-port={options.master_port or _PORT}"]


def _ssh(options: argparse.Namespace) -> list[str]:
    """Return an ssh that never prompts and notices a lost host in two minutes. Of repeated options the first counts."""
    settings = [*options.ssh_option, "BatchMode=yes", "ServerAliveInterval=30"]
    port = ["-p", str(options.ssh_port)] if options.ssh_port else []
    return ["ssh", *port, *(part for setting in settings for part in ("-o", setting))]


def _why(name: str, command: Sequence[str], status: int) -> str:
    if command[0] != "ssh":
        return f"ended with status {status}; its last lines say why"
    if status == _SSH_FAILED:
        ssh = shlex.join([*command[:-1], "true"])
        return f"can't be reached, or refuses us: `{ssh}` must work without a prompt; try ssh-copy-id {name}"
    return f"ended with status {status}; its last lines say why; or run the command of --dry-run there, by `ssh {name}`"


def _run_until_failure(commands: Mapping[str, Sequence[str]]) -> tuple[str, int] | None:
    """Run each host's command until all end or one fails, then end the others. Returns the failed name and status."""
    pipe = subprocess.PIPE if len(commands) > 1 else None  # with one host, stdout may stay a terminal
    processes: dict[str, subprocess.Popen[str]] = {}
    copiers = []
    try:
        for name, command in commands.items():
            processes[name] = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=pipe,
                stderr=pipe,
                text=True,
                errors="backslashreplace",
                start_new_session=True,  # Ctrl-C reaches only us; we end them
            )
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if source is not None:
                    copiers.append(threading.Thread(target=_copy, args=(source, target, f"{name}: "), daemon=True))
                    copiers[-1].start()
        while True:
            statuses = {name: process.poll() for name, process in processes.items()}
            for name, status in statuses.items():
                if status:
                    return name, status if status > 0 else 128 - status
            if None not in statuses.values():
                return None
            time.sleep(_POLL_SECONDS)
    finally:
        with signals_held():
            _end([*processes.values()])
            for copier in copiers:
                copier.join(timeout=1)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Close stdin, so that each host ends its ranks (see torchrun.py); kill what is left after _KILL_SECONDS."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    last = time.monotonic() + _KILL_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(last - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_writing = threading.Lock()


def _copy(source: IO[str], target: IO[str], prefix: str) -> None:
    """Copy lines. If our own reader is gone, close `source`, so that the host fails."""
    with source, contextlib.suppress(OSError):
        for line in source:
            with _writing:
                target.write(prefix + line)
                target.flush()


if __name__ == "__main__":
    sys.exit(main())
