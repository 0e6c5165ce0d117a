"""A read returns the bytes that were written, or fails: through the Python API, on files of one drive and of several."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import infinity
from infinity._aio import crc32c_ways, page_checksums
from infinity.aio import File, IoEngine, PinnedPool, Priority, Request, StripedFile
from infinity.errors import IntegrityError

KIB = 1 << 10
PAGE = 4096
PAGES = 96
BLOCK_BYTES = 16 * KIB
ZEROS = 0x98F94189
FLIPS = int(os.environ.get("INFINITY_FLIPS", "20"))


class Machine:
    """An engine of two drives, and a file over one or both of them, whose parts anybody may open by their paths."""

    def __init__(self, folder: Path, backend: str, drives: int) -> None:
        self.pool = PinnedPool(2 * PAGES * PAGE)
        self.engine = IoEngine(self.pool, backend=backend, block_bytes=BLOCK_BYTES, queue_depth=4, drives=2)
        self.paths = [folder / f"drive{number}" for number in range(drives)]
        files = [File(path, create=True, drive=number, checksums=True) for number, path in enumerate(self.paths)]
        self.file: File | StripedFile = files[0]
        if drives > 1:
            self.file = StripedFile(files, pattern=[0, 1, 0], stripe_bytes=8 * KIB)
        self.file.reserve(PAGES * PAGE)
        self.lease = self.pool.lease(PAGES * PAGE)
        self.bytes = self.lease.view(torch.uint8)

    def write(self, page: int, data: bytes) -> None:
        self.bytes[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._move("write", page, len(data))

    def read(self, page: int, count: int) -> bytes:
        self._move("read", page, count * PAGE)
        return self.bytes[: count * PAGE].numpy().tobytes()

    def _move(self, operation: str, page: int, nbytes: int) -> None:
        request = Request(operation, self.file, page * PAGE, self.lease, 0, nbytes, Priority.PREFETCH)
        self.engine.wait(self.engine.start([request]))

    def close(self) -> None:
        self.lease.give_back()
        with contextlib.suppress(IntegrityError):
            self.engine.close()
        self.file.close()
        for path in self.paths:
            path.unlink()


@pytest.fixture(params=[1, 2], ids=["one drive", "two drives"])
def machine(request: pytest.FixtureRequest, nvme_path: Path, backend: str) -> Iterator[Machine]:
    made = Machine(nvme_path, backend, request.param)
    yield made
    made.close()


def flip(path: Path | str, bit: int) -> None:
    """Change one bit of a file behind its engine's back."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, bit // 8)[0] ^ 1 << bit % 8
        os.pwrite(descriptor, bytes([byte]), bit // 8)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_the_sum_is_crc32c() -> None:
    assert crc32c_ways()[-1] == "table"
    assert crc32c(b"123456789") == 0xE3069283
    data = random.Random(0).randbytes(3 * PAGE)
    sums = [crc32c(data[at : at + PAGE]) for at in range(0, len(data), PAGE)]
    assert page_checksums(data) == b"".join(each.to_bytes(4, "little") for each in sums)
    assert {page_checksums(data, way=way) for way in crc32c_ways()} == {page_checksums(data)}
    with pytest.raises(ValueError, match="no way"):
        page_checksums(data, way="abacus")
    assert page_checksums(bytearray(PAGE)) == ZEROS.to_bytes(4, "little")
    with pytest.raises(ValueError, match="whole pages"):
        page_checksums(data[1:])


acts = st.lists(st.tuples(st.booleans(), st.integers(0, PAGES - 1), st.integers(1, 40)), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings.default.max_examples // 10)
@given(acts=acts, seed=st.integers(0, 99))
def test_any_order_of_writes_and_reads_verifies(
    machine: Machine, acts: Sequence[tuple[bool, int, int]], seed: int
) -> None:
    draw = random.Random(seed)
    stored = bytearray(machine.read(0, PAGES))
    for writes, page, most in acts:
        count = min(most, PAGES - page)
        if writes:
            data = draw.randbytes(count * PAGE)
            machine.write(page, data)
            stored[page * PAGE : (page + count) * PAGE] = data
        assert machine.read(page, count) == stored[page * PAGE : (page + count) * PAGE]
    assert machine.read(0, PAGES) == stored
    assert machine.file.checksums(0, PAGES * PAGE) == page_checksums(stored)


def test_every_flipped_bit_is_found(machine: Machine) -> None:
    draw = random.Random(1)
    assert machine.read(0, PAGES) == bytes(PAGES * PAGE)  # never written: zeros
    machine.write(0, draw.randbytes(PAGES * PAGE * 3 // 4))
    for path in machine.paths:
        nbytes = path.stat().st_size
        for bit in [0, 8 * nbytes - 1, *(draw.randrange(8 * nbytes) for _ in range(FLIPS))]:
            flip(path, bit)
            with pytest.raises(IntegrityError) as caught:
                machine.read(0, PAGES)
            error = caught.value
            assert (error.errno, error.operation, error.path) == (errno.EBADMSG, "read", str(path))
            assert error.page_offset == bit // 8 // PAGE * PAGE
            assert f"page at offset {error.page_offset} of the file doesn't hold what was written there" in str(error)
            flip(path, bit)
    machine.read(0, PAGES)
    print(f"{len(machine.paths) * (FLIPS + 2)} bits flipped, each found")


def test_whoever_verifies_by_himself_finds_what_a_read_would(machine: Machine) -> None:
    def move(operation: str) -> Request:
        request = Request(operation, machine.file, 0, machine.lease, 0, PAGES * PAGE, Priority.PREFETCH)
        machine.engine.wait(machine.engine.start([request], sums_by_caller=True))
        return request

    data = random.Random(5).randbytes(PAGES * PAGE)
    machine.bytes.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    move("write")
    assert machine.file.checksums(0, PAGES * PAGE) == PAGES * ZEROS.to_bytes(4, "little")
    with pytest.raises(IntegrityError):
        machine.read(0, PAGES)
    machine.file.set_checksums(0, page_checksums(data))
    assert machine.read(0, PAGES) == data
    for path in machine.paths:
        bit = 8 * (path.stat().st_size - 1)
        flip(path, bit)
        with pytest.raises(IntegrityError) as told:
            machine.read(0, PAGES)
        with pytest.raises(IntegrityError) as found:
            machine.engine.verify(move("read"))
        assert found.value.page_offset == told.value.page_offset == bit // 8 // PAGE * PAGE
        assert found.value.path == told.value.path == str(path)
        flip(path, bit)
    machine.engine.verify(move("read"))


def test_an_error_of_integrity_is_one_of_io() -> None:
    error = IntegrityError("why", errno.EBADMSG, "read", "file", 1, 2, "threads")
    error.page_offset = 4096
    assert isinstance(error, infinity.IoError) and infinity.IntegrityError is IntegrityError
    error.concerning("group 3")
    assert str(error) == "group 3: why"
    assert "group 3: why" in repr(error)


def test_a_page_of_another_place_or_time_is_found(machine: Machine) -> None:
    first, second = random.Random(2).randbytes(8 * PAGE), random.Random(3).randbytes(8 * PAGE)
    machine.write(0, first)
    path = machine.paths[0]
    before = path.read_bytes()
    machine.write(0, second)
    for at in range(0, 4 * PAGE, PAGE):
        now = path.read_bytes()
        for page in (before[at : at + PAGE], now[at + PAGE : at + 2 * PAGE], bytes(PAGE)):  # older, elsewhere, never
            with path.open("r+b") as file:
                file.seek(at)
                file.write(page)
            with pytest.raises(IntegrityError):
                machine.read(0, PAGES)
        path.write_bytes(now)
    assert machine.read(0, 8) == second


def test_a_hole_where_the_file_was_truncated_and_written_again_is_found(machine: Machine) -> None:
    machine.write(0, random.Random(2).randbytes(PAGES * PAGE))
    for path in machine.paths:
        os.truncate(path, PAGE)
    with pytest.raises(infinity.IoError, match="the file ends before offset"):
        machine.read(0, PAGES)
    last = random.Random(3).randbytes(8 * PAGE)
    machine.write(PAGES - 8, last)
    assert machine.read(PAGES - 8, 8) == last
    with pytest.raises(IntegrityError) as caught:
        machine.read(0, PAGES - 8)
    assert caught.value.page_offset >= PAGE


def test_the_sums_go_with_a_file_to_who_opens_it_next(nvme_path: Path, backend: str) -> None:
    machine = Machine(nvme_path, backend, 2)
    data = random.Random(4).randbytes(20 * PAGE)
    machine.write(3, data)
    sums = machine.file.checksums(0, PAGES * PAGE)
    assert sums[3 * 4 : 23 * 4] == page_checksums(data)
    assert machine.file.checksums(4 * PAGE, PAGE) == sums[16:20]
    again = [File(path, drive=number, checksums=True) for number, path in enumerate(machine.paths)]
    machine.file = StripedFile(again, pattern=[0, 1, 0], stripe_bytes=8 * KIB)
    assert machine.file.checked
    assert machine.file.checksums(0, PAGES * PAGE) == bytes(PAGES * 4)  # unknown
    flip(machine.paths[0], 8 * 3 * PAGE)
    machine.read(0, PAGES)
    machine.file.set_checksums(0, sums)
    with pytest.raises(IntegrityError):
        machine.read(0, PAGES)
    machine.file.set_checksums(0, bytes(PAGES * 4))
    machine.read(0, PAGES)
    machine.close()


def test_what_can_not_be_is_refused(nvme_path: Path) -> None:
    with (
        File(nvme_path / "plain", create=True) as plain,
        File(nvme_path / "checked", create=True, checksums=True) as file,
    ):
        assert file.checked and not plain.checked
        for offset, nbytes in ((1, PAGE), (0, 100), (-PAGE, PAGE), (0, -PAGE)):
            with pytest.raises(ValueError, match="whole pages"):
                file.checksums(offset, nbytes)
        for sums in (b"123", bytearray(5)):
            with pytest.raises(ValueError, match="4 bytes per page"):
                file.set_checksums(0, sums)
        with pytest.raises(ValueError, match="whole pages"):
            file.set_checksums(7, bytes(4))
        with pytest.raises(ValueError, match="no checksums are kept"):
            plain.checksums(0, PAGE)
        with pytest.raises(ValueError, match="no checksums are kept"):
            plain.set_checksums(0, bytes(4))
        with pytest.raises(TypeError):
            file.set_checksums(0, "text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is closed"):
        file.checksums(0, PAGE)
