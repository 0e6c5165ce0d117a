"""The program infinity-run: what a hostfile says, which commands come of it, and how they end, over an ssh that stays here."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.cli.hostfile import Host, choose, read_hostfile
from infinity.cli.launch import main
from infinity.errors import ConfigError

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
[ "$1" = away ] && { echo "no route" >&2; exit 255; }
shift
setsid --wait sh -c "$*"
"""
"""Runs the command here in a session of its own, as sshd would: what is done to ssh alone does not end it."""

PYTHON = """#!/bin/sh
printf '%s\\0' "$PWD" "$GIVEN" "$CUDA_VISIBLE_DEVICES" "$@" >> "$TOLD"
exit "${STATUS:-0}"
"""
"""In the place of Python: tells how it was started."""

ODD = ["--", "a b", "it's", '"', "$HOME `id` \\", "two\nlines", "", "--hostfile", "*"]
HOSTS = [Host("a", 2), Host("b", 4)]


@pytest.fixture(autouse=True)
def _ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("ssh", SSH), ("python", PYTHON)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hostfile(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "hosts").write_text(text)
        return str(tmp_path / "hosts")

    return write


def told(tmp_path: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """What the stand-in for Python was told: folder, $GIVEN, $CUDA_VISIBLE_DEVICES, its arguments; of one host."""
    file = tmp_path / "told"
    file.unlink(missing_ok=True)
    python = str(tmp_path / "bin" / "python")
    assert main([f"--python={python}", f"--env=TOLD={file}", *arguments]) == 0, capfd.readouterr().err
    return file.read_text().split("\0")[:-1]


# The hostfile


def test_a_hostfile_is_read_as_deepspeed_reads_it(hostfile: Callable[[str], str]) -> None:
    text = "# the pool\nworker-0 slots=2\n\n  root@10.0.0.2\tslots=04  # two of them\r\nlocalhost slots=1"
    assert read_hostfile(Path(hostfile(text))) == [Host("worker-0", 2), Host("root@10.0.0.2", 4), Host("localhost", 1)]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a slots=1\n\na slots=2", ", line 3", "a is listed twice; name each host once"),
        ("a", ", line 1", "no slots"),
        ("a slots=0", ", line 1", "slots=0; expected"),
        ("a slots=-1", ", line 1", "slots=-1; expected"),
        ("a slots=many", ", line 1", "slots=many; expected"),
        ("a slots = 2", ", line 1", "'slots' is unknown"),
        ("a slots=2 slots=3", ", line 1", "slots=2 slots=3; expected"),
        ("a slots=2 max_slots=3", ", line 1", "'max_slots=3' is unknown"),
        ("slots=2", ", line 1", "not a host name"),
        ("-oProxyCommand=x slots=2", ", line 1", "not a host name"),
        *[(f"a{c}b slots=2", ", line 1", "not a host name") for c in "\0`;$&|<'\\"],
        ("# no hosts\n", "", "has no host"),
        ("", "", "has no host"),
    ],
)
def test_a_hostfile_that_cannot_be_used_says_where_and_what_was_expected(
    hostfile: Callable[[str], str], text: str, line: str, reason: str
) -> None:
    path = hostfile(text)
    with pytest.raises(ConfigError) as refused:
        read_hostfile(Path(path))
    assert str(refused.value).startswith(f"hostfile {path}{line}")
    assert reason in str(refused.value) and ("worker-0 slots=8" in str(refused.value) or "once" in reason)


def test_a_hostfile_that_is_not_there_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hostfile", str(tmp_path / "none"), "x.py"]) == 1
    assert re.fullmatch(r"infinity-run: hostfile .*none: No such file or directory; .*\n", capsys.readouterr().err)
    assert main(["--hostfile", str(tmp_path), "x.py"]) == 1


@pytest.mark.inputs
@given(
    st.one_of(st.text(), st.lists(st.sampled_from(["a", "b", " slots=", "1", "0", "#", "\n", "\t", "x"])).map("".join))
)
def test_any_hostfile_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_text(text)
    try:
        hosts = read_hostfile(path)
    except ConfigError:
        return
    assert hosts and all(host.slots >= 1 for host in hosts) and len({host.name for host in hosts}) == len(hosts)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, HOSTS),
        ({"include": "b"}, [HOSTS[1]]),
        ({"include": "b@a:1"}, [Host("a", 2, (1,)), HOSTS[1]]),
        ({"include": "b:3,0@b:2"}, [Host("b", 4, (0, 2, 3))]),
        ({"include": "a:0,1"}, [HOSTS[0]]),
        ({"exclude": "a"}, [HOSTS[1]]),
        ({"exclude": "a:0,1@b:2"}, [Host("b", 4, (0, 1, 3))]),
    ],
)
def test_hosts_and_slots_are_chosen_as_deepspeed_does(options: dict[str, str], expected: list[Host]) -> None:
    assert choose(HOSTS, **options) == expected
    assert choose(HOSTS, include="b@a:1")[0].ranks == 1


def test_hosts_with_the_name_of_a_user_are_chosen_by_both() -> None:
    mine, yours = Host("me@a", 2), Host("you@a", 2)
    assert choose([mine, yours], include="you@a@me@a:1") == [Host("me@a", 2, (1,)), yours]
    assert choose([mine, yours], exclude="me@a") == [yours]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"include": "c"}, "--include c: there is no host 'c'; there are a, b"),
        ({"include": "a:2"}, "a has the slots 0 to 1, not 2"),
        ({"exclude": "a:x"}, "such as a:0,2, got 'a:x'"),
        ({"include": "a:"}, "got 'a:'"),
        ({"include": ""}, "there is no host ''"),
        ({"exclude": "a@b"}, "leaves no slot of a, b"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        choose(HOSTS, **options)


# The commands


def test_arguments_and_variables_arrive_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], hostfile: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", ODD[4] + ODD[5])
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    asked = ["--env=GIVEN", f"--workdir={folder}", f"--hostfile={hostfile('a slots=3')}", "--include=a:0,2"]
    got = told(tmp_path, capfd, *asked, "x.py", *ODD)
    assert got[:3] == [str(folder), ODD[4] + ODD[5], "0,2"]
    assert got[3:5] == ["-m", "infinity.cli.torchrun"] and got[-len(ODD) - 1 :] == ["x.py", *ODD]


def test_a_dry_run_prints_what_a_shell_runs_to_the_same_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], hostfile: Callable[[str], str]
) -> None:
    hosts = hostfile("root@a slots=3\nb slots=1\nlocalhost slots=2")
    python = tmp_path / "bin" / "python"
    asked = ["-H", hosts, f"--python={python}", f"--env=TOLD={tmp_path / 'told'}", "--env=GIVEN=2", "--ssh_port", "22"]
    assert main([*asked, "--ssh-option=Compression=yes", "--dry-run", "-m", "x", *ODD]) == 0
    printed = capfd.readouterr().out
    assert not (tmp_path / "told").exists()
    assert re.findall("^# (.*)", printed, re.M) == ["root@a, ranks: 3", "b, ranks: 1", "localhost, ranks: 2"]
    first, *_, last = shlex.split(printed, comments=True)
    assert first == "ssh" and "ssh" not in last
    for arguments in (["-n"], []):
        subprocess.run(["sh", *arguments], input=printed, text=True, check=True, timeout=60)
    runs = (tmp_path / "told").read_text().split(f"{tmp_path}\0")[1:]
    assert len(runs) == 3
    for rank, (run, ranks) in enumerate(zip(runs, (3, 1, 2), strict=True)):
        given_value, slots, *arguments = run.split("\0")[:-1]
        assert (given_value, slots) == ("2", "") and arguments[-len(ODD) - 2 :] == ["--module", "x", *ODD]
        place = {"--nnodes=3", f"--node-rank={rank}", f"--nproc-per-node={ranks}", "--master-port=29500"}
        assert {*place, "--master-addr=a"} <= {*arguments}
    assert "ssh -p 22 -o Compression=yes -o BatchMode=yes" in printed


def test_what_runs_on_this_machine_alone_needs_no_ssh_and_no_port(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], hostfile: Callable[[str], str]
) -> None:
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\nexit 255\n")
    hosts = hostfile(f"{socket.gethostname()} slots=5\naway slots=1")
    for asked, ranks in (["--num-gpus", "3"], 3), (["-H", hosts, "--num_nodes", "1"], 5):
        got = told(tmp_path, capfd, *asked, "x.py")
        assert got[3:] == [
            "-m",
            "infinity.cli.torchrun",
            "--standalone",
            "--node-rank=0",
            f"--nproc-per-node={ranks}",
            "x.py",
        ]
    got = told(tmp_path, capfd, "-H", hosts, "--num-nodes=1", "--master_port=29999", "--num-gpus=1", "x.py")
    assert {"--nnodes=1", "--master-port=29999", "--nproc-per-node=1"} <= {*got}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["--num-nodes=3"], "--num-nodes 3: there are only 2"),
        (["--include=b:1", "--num-gpus=2"], "--nproc-per-node 2: conflicts with the slots chosen of b"),
        (["--env=NOT_SET_HERE"], "--env NOT_SET_HERE: expected NAME=VALUE"),
        (["--env=a-b=3"], "--env a-b=3: expected NAME=VALUE"),
        ([], "can't reach the first one as localhost: give its address with --master-addr"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    hostfile: Callable[[str], str], capsys: pytest.CaptureFixture[str], asked: list[str], reason: str
) -> None:
    assert main(["-H", hostfile("localhost slots=2\nb slots=2"), *asked, "x.py"]) == 1
    assert reason in capsys.readouterr().err


def test_a_host_that_fails_is_named_with_the_next_move(
    tmp_path: Path, hostfile: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "-H",
        hostfile("one slots=1\naway slots=1"),
        f"--python={tmp_path / 'bin' / 'python'}",
        "--env=TOLD=/dev/null",
    ]
    assert main([*asked, "--ssh-port=7", "x.py"]) == 255
    err = capfd.readouterr().err
    assert "away: no route\n" in err
    assert "infinity-run: away can't be reached" in err and "ssh-copy-id away" in err
    assert "`ssh -p 7 -o BatchMode=yes -o ServerAliveInterval=30 away true`" in err

    asked += ["--include=one"]
    assert main([*asked, "--env=STATUS=9", "x.py"]) == 9
    err = capfd.readouterr().err
    assert "infinity-run: one ended with status 9" in err and "`ssh one`" in err
    assert main([*asked, "--workdir=/not/here", "x.py"]) == 1
    assert "infinity-run: cannot enter /not/here: make it on this host" in capfd.readouterr().err
    assert main([*asked, "--python=/not/here", "x.py"]) == 127
    assert "/not/here" in capfd.readouterr().err


def test_without_ssh_the_next_move_is_to_install_it(
    tmp_path: Path, hostfile: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["-H", hostfile("one slots=1"), "x.py"]) == 1
    assert "install openssh-client" in capsys.readouterr().err


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys; from infinity.cli.launch import main\n"
        "assert main(['--num-gpus=2', '--dry-run', 'x.py']) == 0\n"
        "assert not {'torch', 'numpy', 'pydantic', 'rich'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Real runs: two hosts, both here

SUM = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
place = f"{dist.get_rank()} {os.environ['LOCAL_RANK']}"
sys.stdout.write(f"{place} {total.item()} {sys.argv[1:]} {sys.stdin.read()!r}\\n")  # at once: ranks share a pipe, unbuffered
dist.destroy_process_group()
"""

WAIT = """
import os, pathlib, signal, sys, time
rank, action = os.environ["RANK"], sys.argv[1]
if action == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("up", rank).touch()
while len(os.listdir("up")) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
sys.stdout.write("up\\n")
if action == "fail" and rank == "1":
    sys.exit(7)
time.sleep(600)
"""


class Run:
    """infinity-run on hosts, whose processes are found by a variable that they all have."""

    def __init__(self, text: str, *arguments: str, one: int = 1, two: int = 1) -> None:
        Path("hosts").write_text(f"one slots={one}\ntwo slots={two}\n" if two else f"one slots={one}\n")
        Path("script.py").write_text(text)
        Path("up").mkdir()
        self.mark = f"INFINITY_MARK={uuid.uuid4()}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = ["--hostfile=hosts", "--master-addr=127.0.0.1", f"--master-port={port}", f"--env={self.mark}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "infinity.cli.launch", *place, "--env=OMP_NUM_THREADS=1", "script.py", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_up(self) -> None:
        assert self.process.stdout is not None
        for _ in Path("hosts").read_text().splitlines():
            assert self.process.stdout.readline().endswith("up\n")

    def alive(self) -> list[str]:
        """The processes that the run has started on its hosts."""
        alive = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    alive.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return alive

    def wait_until_gone(self, seconds: float) -> None:
        last = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < last, self.alive()
            time.sleep(0.05)


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(text: str, *arguments: str, **slots: int) -> Run:
        runs.append(Run(text, *arguments, **slots))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


@pytest.mark.slow
def test_hosts_with_different_slots_are_one_group_of_ranks(start: Callable[..., Run]) -> None:
    run = start(SUM, *ODD, one=2, two=1)
    out, err = run.process.communicate(timeout=120)
    assert run.process.returncode == 0, err
    places = [("one", 0, 0), ("one", 1, 1), ("two", 2, 0)]
    assert sorted(out.splitlines()) == [f"{host}: {rank} {local} 6.0 {ODD} ''" for host, rank, local in places]


@pytest.mark.slow
def test_a_host_that_fails_ends_the_other_and_its_status_is_passed_on(start: Callable[..., Run]) -> None:
    run = start(WAIT, "fail")
    run.wait_until_up()
    _, err = run.process.communicate(timeout=120)  # the other would go on for ten minutes
    assert run.process.returncode == 7
    assert re.search("^infinity-run: two ended with status 7; ", err, re.M)
    assert "Traceback" not in err and "\ntwo: Root Cause" in err
    run.wait_until_gone(30)


@pytest.mark.slow
def test_ctrl_c_ends_even_ranks_that_do_not_want_to(start: Callable[..., Run]) -> None:
    run = start(WAIT, "stubborn")
    run.wait_until_up()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)
    _, err = run.process.communicate(timeout=60)
    assert run.process.returncode == 130
    assert err.endswith("infinity-run: interrupted\n") and "Traceback" not in err
    run.wait_until_gone(30)  # what was killed may be about to end


@pytest.mark.slow
def test_nothing_outlives_a_launcher_that_was_killed(start: Callable[..., Run]) -> None:
    run = start(WAIT, "wait", two=0)
    run.wait_until_up()
    run.process.kill()
    run.wait_until_gone(10)
