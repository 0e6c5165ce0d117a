"""Faults that are real: full, shrinking, vanishing and failing file systems, refused rights, signals, and dying processes.

`INFINITY_KILLS` is how often a training is killed, `INFINITY_FLIPS` how many bits are changed for each way of updating (5 and 3
by default, more in `make torture`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import scene
import torch
import torch.distributed as dist
from children import Nursery

import infinity
from infinity.checkpoint import work_folder
from infinity.store.run_folder import RunFolder

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
KILLS = int(os.environ.get("INFINITY_KILLS", "3"))
PATIENCE_SECONDS = 120
MIB = 1 << 20
FLIPS = int(os.environ.get("INFINITY_FLIPS", "3"))
LEFT_BYTES_MAX = 64 << 10
"""What a killed run may leave until the next one comes: a folder with a lock and a note."""
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The losses of the same training held in memory, to the last bit."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with scene.make(None) as engine:
            return [scene.step(engine, number).hex() for number in range(2 * scene.STEPS)]
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[Path]:
    """A file system of one's own, where root and the kernel allow it."""
    place = Path(tempfile.mkdtemp(prefix="infinity-mount-"))
    done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        place.rmdir()
        pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


@contextlib.contextmanager
def ext4(nbytes: int, folder: Path) -> Iterator[Path]:
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(nbytes)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 isn't installed")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted("-o", "loop,errors=remount-ro", str(image)) as place:
        yield place
    image.unlink()


def fill(folder: Path) -> None:
    """Write until nothing more fits."""
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def losses(engine: infinity.Engine, first: int, count: int) -> list[str]:
    return [scene.step(engine, number).hex() for number in range(first, first + count)]


def arena_descriptor(folder: Path) -> str:
    """This process's way to its arena in `folder`, which has no name."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            link = str(each.readlink())
            found += [each] if link.startswith(str(folder)) and link.endswith(".arena (deleted)") else []
    assert len(found) == 1
    return str(found[0])


@pytest.mark.usefixtures("one_rank")
def test_a_full_file_system_is_told_before_the_first_step_and_does_not_matter_after(expected: list[str]) -> None:
    with mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs") as place:
        with scene.make(place, "forward") as engine:  # which takes the least
            fill(place)
            assert losses(engine, 0, scene.STEPS) == expected[: scene.STEPS]  # its space was reserved
        fill(place)
        with pytest.raises(infinity.StoreError, match=r"are needed|can be made|could not be reserved"):
            scene.make(place)
        assert [each.name for each in place.iterdir()] == ["ballast"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("form", ["dcp", "arena"])
def test_a_checkpoint_that_meets_a_full_file_system_leaves_the_last_one(
    form: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[str]
) -> None:
    with mounted("-t", "tmpfs", "-o", "size=2m", "tmpfs") as place, scene.make(nvme_path) as engine:
        losses(engine, 0, 1)
        engine.save_checkpoint(place, tag="good", format=form)
        engine.finish_checkpoint()
        fill(place)
        with pytest.raises(infinity.CheckpointError, match="free"):
            engine.save_checkpoint(place, tag="next", format=form)
        monkeypatch.setattr(work_folder, "check_space", lambda *args: None)  # as if the space went meanwhile
        with pytest.raises(infinity.CheckpointError, match="No space left"):  # noqa: PT012 - the first call raises, or the second
            engine.save_checkpoint(place, tag="next", format=form)
            engine.finish_checkpoint()
        assert sorted(each.name for each in place.iterdir()) == ["ballast", "good", "latest"]
        engine.load_checkpoint(place)
        assert losses(engine, 1, 2) == expected[1:3]


@pytest.mark.usefixtures("one_rank")
def test_an_arena_truncated_underneath_is_an_error(nvme_path: Path) -> None:
    engine = scene.make(nvme_path)
    losses(engine, 0, 1)
    assert engine.swap is not None
    engine.swap.flush()
    os.truncate(arena_descriptor(nvme_path), 4096)
    with pytest.raises(infinity.IoError, match=r"the file ends before offset"):
        losses(engine, 1, 1)
    with contextlib.suppress(infinity.IoError):
        engine.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "read ahead"])
def test_what_was_in_a_truncated_arena_before_it_grew_again_is_an_error(ahead: bool, nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.tensors.register("first", torch.ones(MIB))
        swap.flush()
        os.truncate(arena_descriptor(nvme_path), 4096)
        swap.tensors.register("second", torch.full((MIB,), 2.0))
        swap.flush()
        assert not ahead or swap.tensors.prefetch("first")
        told = (
            r"first, generation 1 of the extent of 4194304 bytes at offset 0 of the arena: read 4 MiB .* doesn't hold"
        )
        with pytest.raises(infinity.IntegrityError, match=told), swap.tensors.use("first"):
            pass
        with swap.tensors.use("second") as tensor:
            assert torch.equal(tensor, torch.full((MIB,), 2.0))


def flip(path: str, bit: int) -> None:
    """Change one bit of a file, as a drive may."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, bit // 8)[0] ^ 1 << bit % 8
        os.pwrite(descriptor, bytes([byte]), bit // 8)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("update", ["forward", "step", "backward"])
def test_a_bit_that_a_drive_has_changed_is_never_used(update: str, nvme_path: Path) -> None:
    """The training stops, and says where. If the page is overwritten before it is read, nothing changes."""
    draw = random.Random(update)
    found = 0
    with scene.make(None, update) as engine:
        expected, last = losses(engine, 0, 3), scene.weights(engine)
    for _ in range(FLIPS):
        engine = scene.make(nvme_path, update)
        assert engine.swap is not None
        assert losses(engine, 0, 1) == expected[:1]
        engine.swap.flush()
        engine.swap.stager.drop_all()  # what is read ahead already would be written before it is read again
        bit = draw.randrange(8 * engine.swap.stats().arena_bytes)
        flip(arena_descriptor(nvme_path), bit)
        refusal: infinity.IntegrityError | None = None
        try:
            assert losses(engine, 1, 1) == expected[1:2]
            assert losses(engine, 2, 1) == expected[2:]
            assert all(torch.equal(value, last[name]) for name, value in scene.weights(engine).items())
        except infinity.IntegrityError as error:
            refusal = error
        if refusal is not None:
            assert re.match(r"(sub-)?group .*, generation \d+ of .*: read .*\.arena: the page at offset", str(refusal))
            assert refusal.page_offset == bit // 8 // 4096 * 4096
            assert 0 <= refusal.page_offset - refusal.extent_offset < refusal.extent_bytes
            assert refusal.generation >= 1
            found += 1
        with contextlib.suppress(infinity.IoError):
            engine.close()
    print(
        f"{FLIPS} bits flipped: {found} told before they were used, {FLIPS - found} written over before they were read"
    )
    assert found > FLIPS // 2


def test_the_error_names_the_extent_and_how_often_it_was_written(nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB") as swap:
        swap.tensors.register("first", torch.ones(10))
        swap.tensors.register("second", torch.ones(3000))
        for _ in range(2):
            with swap.tensors.update("second") as tensor:
                tensor.add_(1)
        swap.flush()
        flip(arena_descriptor(nvme_path), 8 * 8192 + 3)
        with pytest.raises(infinity.IntegrityError) as caught, swap.tensors.use("second"):
            pass
        error = caught.value
        assert (error.extent_offset, error.extent_bytes, error.generation) == (4096, 12288, 3)
        assert error.page_offset == 8192 and error.path.endswith("rank0.arena")
        assert str(error).startswith(
            "second, generation 3 of the extent of 12288 bytes at offset 4096 of the arena: read"
        )


@pytest.mark.usefixtures("one_rank")
def test_without_checksums_nobody_finds_it(nvme_path: Path) -> None:
    with infinity.SwapManager(nvme_path, pinned_bytes_max="16MiB", checksums=False) as swap:
        swap.tensors.register("first", torch.ones(MIB))
        swap.flush()
        flip(arena_descriptor(nvme_path), 8 * 4096 + 3)
        with swap.tensors.use("first") as tensor:
            assert not torch.equal(tensor, torch.ones(MIB))


@pytest.mark.usefixtures("one_rank")
def test_a_path_that_disappears_takes_nothing_with_it(nvme_path: Path, expected: list[str]) -> None:
    folder = nvme_path / "swap"
    with scene.make(folder) as engine:
        assert losses(engine, 0, 2) == expected[:2]
        shutil.rmtree(folder)
        assert losses(engine, 2, 2) == expected[2:4]
    assert not folder.exists()
    with mounted("-t", "tmpfs", "-o", "size=32m", "tmpfs") as place:
        engine = scene.make(place)
        subprocess.run(["umount", "-l", str(place)], check=True)
        assert losses(engine, 0, 2) == expected[:2]
        engine.close()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=True)  # for the fixture to take away


@pytest.mark.usefixtures("one_rank")
def test_a_read_only_file_system_is_told(nvme_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=32m", "tmpfs") as place, scene.make(nvme_path) as engine:
        losses(engine, 0, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(infinity.StoreError, match="not writable"):
            scene.make(place)
        with pytest.raises(infinity.CheckpointError, match="Read-only"):
            engine.save_checkpoint(place)


@pytest.mark.usefixtures("one_rank")
def test_a_file_system_that_goes_read_only_stops_the_training(tmp_path: Path) -> None:
    with ext4(64 << 20, tmp_path) as place:
        device = Path(
            subprocess.run(
                ["findmnt", "-no", "SOURCE", str(place)], capture_output=True, text=True, check=True
            ).stdout.strip()
        ).name
        trigger = Path(f"/sys/fs/ext4/{device}/trigger_fs_error")
        if not trigger.exists():
            pytest.skip("this kernel's ext4 can't be made to fail")
        engine = scene.make(place)
        losses(engine, 0, 1)
        assert engine.swap is not None
        engine.swap.flush()
        trigger.write_text("1")  # the kernel's own answer to a bad drive
        with pytest.raises(infinity.InfinityError, match=r"EROFS|EIO|torn"):
            losses(engine, 1, 3)
        with contextlib.suppress(infinity.IoError):
            engine.close()


def no_memlock() -> None:
    """As in a container without rights: no page may be locked."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))


def run(*arguments: str, before: Callable[[], None] | None = None) -> str:
    command = [sys.executable, str(HELPERS / "scene.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, preexec_fn=before)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_in(output: str) -> list[str]:
    return [line.split()[2] for line in output.splitlines() if line.startswith("step ")]


def test_no_memory_may_be_locked(nvme_path: Path, expected: list[str]) -> None:
    output = run(str(nvme_path), before=no_memlock)
    assert losses_in(output) == expected[: scene.STEPS]
    assert "ready io_uring" not in output or "memlock" in output


def test_io_uring_refused_by_seccomp(nvme_path: Path, expected: list[str]) -> None:
    output = run(str(nvme_path), "--no-io-uring")
    assert losses_in(output) == expected[: scene.STEPS]
    assert "ready io_uring" not in output
    assert "io_uring is refused here" in output


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def left_bytes(folder: Path) -> int:
    return sum(each.lstat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_training_and_gives_the_space_back(number: int, nursery: Nursery, nvme_path: Path) -> None:
    child = nursery.start(str(nvme_path), "--steps", "100000")
    nursery.until("step")
    os.kill(child, number)
    assert nursery.until("end")[-1].split()[2] != "0"
    assert left_bytes(nvme_path) <= LEFT_BYTES_MAX
    if number == signal.SIGINT:  # Python's own, which runs what must be run
        assert not list(nvme_path.iterdir())
    RunFolder(nvme_path).close()
    assert not list(nvme_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_kill_at_any_instant_leaves_no_bytes_and_a_whole_checkpoint(
    nursery: Nursery, nvme_path: Path, tmp_path: Path, expected: list[str]
) -> None:
    def launch(steps: int, *more: str) -> int:
        return nursery.start(str(nvme_path), "--save", str(tmp_path), "--steps", str(steps), *more)

    began = time.monotonic()
    launch(scene.STEPS)
    nursery.until("step")
    stepping = time.monotonic()
    nursery.until("end")
    start_seconds, step_seconds = stepping - began, time.monotonic() - stepping
    draw = random.Random(0)
    resumed = 0
    for number in range(KILLS):
        shutil.rmtree(tmp_path, ignore_errors=True)
        child = launch(scene.STEPS)
        if number % 4 == 0:
            time.sleep(draw.uniform(0, start_seconds))
        else:
            nursery.until("step")
            time.sleep(draw.uniform(0, step_seconds))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        nursery.until("end")
        assert left_bytes(nvme_path) <= LEFT_BYTES_MAX
        if not (tmp_path / "latest").exists():
            continue  # killed before the first was whole
        launch(2 * scene.STEPS, "--resume")
        found = [line.split() for line in nursery.until("end") if line.startswith("step ")]
        first = int(found[0][1])
        assert [loss for _, _, loss in found] == expected[first:]
        resumed += 1
        assert not list(nvme_path.iterdir())
    print(f"\nkilled {KILLS} times, of which {resumed} went on from a checkpoint, bit for bit")


@pytest.mark.slow
def test_the_rank_that_is_left_ends_with_an_error(nvme_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(HELPERS / "scene.py"), str(nvme_path), "--steps", "100000"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
    try:
        assert ranks[1].stdout is not None
        for line in ranks[1].stdout:
            if line.startswith("step 2 "):
                break
        ranks[1].kill()
        _, complaint = ranks[0].communicate(timeout=PATIENCE_SECONDS)
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    assert ranks[0].returncode not in (0, -errno.EPERM)
    assert "Error" in complaint
    assert left_bytes(nvme_path) <= LEFT_BYTES_MAX
