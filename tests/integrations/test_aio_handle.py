"""DeepSpeed's I/O handle on our engine: what it promises its callers, with nothing of DeepSpeed there.

The checks are those that DeepSpeed makes of its own handle (tests/unit/ops/aio there), in our words, and some more.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from infinity.deepspeed.aio_handle import AioHandle, _Call
from infinity.errors import IoError

BLOCK = 1024
NBYTES = 4 * BLOCK
MEMORY = ["locked", "plain", "unaligned", "strided"]


def make_handle(single_submit: bool = False, overlap_events: bool = True) -> AioHandle:
    return AioHandle(BLOCK, 2, single_submit, overlap_events, 2)


def random_bytes(nbytes: int = NBYTES) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)


def tensor_of(content: torch.Tensor, memory: str, handle: AioHandle) -> torch.Tensor:
    """`content` in memory of some kind."""
    made = {
        "locked": lambda: handle.new_cpu_locked_tensor(content.numel(), content),
        "plain": lambda: torch.empty_like(content),
        "unaligned": lambda: torch.empty(content.numel() + 1, dtype=content.dtype)[1:],
        "strided": lambda: torch.empty(content.numel(), 2, dtype=content.dtype)[:, 0],
    }[memory]()
    return made.copy_(content)


@pytest.mark.parametrize("single_submit", [True, False])
@pytest.mark.parametrize("overlap_events", [True, False])
def test_settings_are_reported_as_given(single_submit: bool, overlap_events: bool) -> None:
    handle = make_handle(single_submit, overlap_events)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (single_submit, overlap_events)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (BLOCK, 2, 2)
    assert handle.get_alignment() == 1024


def test_settings_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        AioHandle(0)


@pytest.mark.parametrize("memory", MEMORY)
def test_reads_fill_the_tensor(nvme_path: Path, memory: str) -> None:
    handle, content = make_handle(), random_bytes()
    (nvme_path / "file").write_bytes(content.numpy())
    for read in (handle.sync_pread, handle.async_pread):
        tensor = tensor_of(torch.zeros_like(content), memory, handle)
        assert read(tensor, str(nvme_path / "file"), 0) == (1 if read == handle.sync_pread else 0)
        if read == handle.async_pread:
            assert handle.wait() == 1
        assert torch.equal(tensor, content)


@pytest.mark.parametrize("memory", MEMORY)
def test_writes_make_the_file(nvme_path: Path, memory: str) -> None:
    handle, content = make_handle(), random_bytes()
    assert handle.sync_pwrite(tensor_of(content, memory, handle), str(nvme_path / "sync"), 0) == 1
    assert handle.async_pwrite(tensor_of(content, memory, handle), str(nvme_path / "async"), 0) == 0
    assert handle.wait() == 1
    for name in ("sync", "async"):
        assert (nvme_path / name).read_bytes() == content.numpy().tobytes()
        assert (nvme_path / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("memory", MEMORY)
def test_wait_counts_calls(nvme_path: Path, calls: int, memory: str) -> None:
    handle, contents = make_handle(), [random_bytes() for _ in range(calls)]
    for number, content in enumerate(contents):
        assert handle.async_pwrite(tensor_of(content, memory, handle), str(nvme_path / str(number)), 0) == 0
    assert handle.wait() == calls
    tensors = [tensor_of(torch.zeros_like(content), memory, handle) for content in contents]
    for number, tensor in enumerate(tensors):
        handle.async_pread(tensor, str(nvme_path / str(number)), 0)
    assert handle.wait() == calls
    assert handle.wait() == 0
    for tensor, content in zip(tensors, contents, strict=True):
        assert torch.equal(tensor, content)


@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)])
@pytest.mark.parametrize("by_descriptor", [True, False])
def test_parts_of_a_file_go_to_their_offsets(nvme_path: Path, parts: tuple[int, ...], by_descriptor: bool) -> None:
    handle, path = make_handle(), str(nvme_path / "file")
    content = tensor_of(random_bytes(sum(parts) * BLOCK), "locked", handle)
    offset = 0
    for part in parts:
        piece = content.narrow(0, offset, part * BLOCK)
        if by_descriptor:
            descriptor = os.open(path, os.O_DIRECT | os.O_CREAT | os.O_WRONLY)
            assert handle.async_pwrite(buffer=piece, fd=descriptor, file_offset=offset) == 0
            assert handle.wait() == 1
            os.close(descriptor)
        else:
            assert handle.async_pwrite(buffer=piece, filename=path, file_offset=offset) == 0
            assert handle.wait() == 1
        offset += part * BLOCK
        assert Path(path).read_bytes() == content[:offset].numpy().tobytes()
    back, offset = torch.empty_like(content), 0
    for part in parts:
        assert handle.sync_pread(back.narrow(0, 0, part * BLOCK), path, offset) == 1
        assert torch.equal(back[: part * BLOCK], content[offset : offset + part * BLOCK])
        offset += part * BLOCK


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("offset", [0, 1, 512, 3000, 4096])
@pytest.mark.parametrize("nbytes", [1, 511, 4097, (1 << 20) + 7])
def test_any_offset_and_length_leave_the_neighbourhood_alone(
    nvme_path: Path, memory: str, offset: int, nbytes: int
) -> None:
    handle, content, path = make_handle(), random_bytes(nbytes), nvme_path / "file"
    path.write_bytes(b"\7" * (offset + nbytes + 5))
    tensor = tensor_of(content, memory, handle)
    handle.sync_pwrite(tensor, str(path), offset)
    assert path.read_bytes() == b"\7" * offset + content.numpy().tobytes() + b"\7" * 5
    tensor.zero_()
    handle.sync_pread(tensor, str(path), offset)
    assert torch.equal(tensor, content)


def test_what_ends_before_the_first_boundary_may_end_at_an_aligned_address(nvme_path: Path) -> None:
    handle, path, content = make_handle(), str(nvme_path / "file"), random_bytes(511)
    memory = torch.empty(3 * 4096, dtype=torch.uint8)
    end = 2 * 4096 - memory.data_ptr() % 4096
    tensor = memory[end - 511 : end]
    handle.sync_pwrite(tensor.copy_(content), path, 1)
    handle.sync_pread(tensor.zero_(), path, 1)
    assert torch.equal(tensor, content)


def test_neighbours_that_share_a_page_may_be_written_at_once(nvme_path: Path) -> None:
    handle, content, path = make_handle(), random_bytes(64 * 1000), str(nvme_path / "file")
    for offset in range(0, content.numel(), 1000):
        handle.async_pwrite(content[offset : offset + 1000], path, offset)
    assert handle.wait() == 64
    assert Path(path).read_bytes() == content.numpy().tobytes()


def write_at_once(content: torch.Tensor, path: Path, parts: list[list[tuple[int, int]]]) -> None:
    """Write the pieces of each part from a thread and a handle of its own."""
    barrier, failures = threading.Barrier(len(parts)), []

    def write(pieces: list[tuple[int, int]]) -> None:
        handle = AioHandle(4096, 4)
        barrier.wait(60)
        try:
            for begin, end in pieces:
                handle.sync_pwrite(content[begin:end].clone(), str(path), begin)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=write, args=(pieces,)) for pieces in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert path.read_bytes() == content.numpy().tobytes()


def test_threads_may_write_neighbours_at_once(nvme_path: Path) -> None:
    path, content = nvme_path / "file", random_bytes(60_000)
    ends = sorted({*torch.randint(60_000, (40,), generator=torch.Generator().manual_seed(0)).tolist(), 60_000})
    pieces = list(zip([0, *ends], ends, strict=False))
    for _ in range(20):
        path.write_bytes(bytes(60_000))
        for _ in range(2):  # the second fails after the kernel has found a direct write under a dirty page
            with path.open("r+b") as file:
                os.fsync(file.fileno())
            write_at_once(content, path, [pieces[first::3] for first in range(3)])


def test_threads_may_make_one_file_at_once(nvme_path: Path) -> None:
    content = random_bytes(20_000)
    for number in range(20):
        parts = [[(begin, begin + 5000)] for begin in range(0, 20_000, 5000)]
        write_at_once(content, nvme_path / str(number), parts)


@pytest.mark.parametrize("validate", [False, True])
def test_a_call_moves_all_its_bytes_in_the_file_that_it_has_opened(nvme_path: Path, validate: bool) -> None:
    handle, content, path = make_handle(), random_bytes(5001), nvme_path / "file"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    handle.pwrite(content, f"/proc/self/fd/{descriptor}", validate, True, 1)
    os.close(descriptor)
    other = os.open(nvme_path / "other", os.O_CREAT | os.O_RDWR)
    assert other == descriptor
    path.rename(nvme_path / "moved")
    assert handle.wait() == 1
    os.close(other)
    assert (nvme_path / "other").stat().st_size == 0
    assert (nvme_path / "moved").read_bytes() == b"\0" + content.numpy().tobytes()


def test_calls_whose_wait_ended_early_are_waited_for_again(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, content = make_handle(), random_bytes(5001)
    (nvme_path / "read").write_bytes(content.numpy())
    back = torch.zeros_like(content)

    def interrupt(call: _Call) -> None:
        raise KeyboardInterrupt

    handle.async_pwrite(content, str(nvme_path / "written"))
    handle.async_pread(torch.empty(1, dtype=torch.uint8).expand(5001), str(nvme_path / "read"))  # can't be filled
    handle.async_pread(back, str(nvme_path / "read"))
    with monkeypatch.context() as patch:
        patch.setattr(_Call, "wait_direct", interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    with pytest.raises(RuntimeError, match="single memory location"):
        handle.wait()
    assert handle.wait() == 0
    assert torch.equal(back, content)
    assert (nvme_path / "written").read_bytes() == content.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_tensors_of_any_dtype_and_shape(nvme_path: Path, dtype: torch.dtype) -> None:
    handle, path = AioHandle(), str(nvme_path / "file")
    content = (torch.randn(33, 65) * 10).to(dtype)
    handle.sync_pwrite(content.t(), path)
    back = torch.zeros(65, 33, dtype=dtype, requires_grad=dtype.is_floating_point)
    handle.sync_pread(back, path)
    assert torch.equal(back, content.t())
    locked = handle.new_cpu_locked_tensor(content.numel(), content)
    assert locked.dtype == dtype
    assert locked.numel() == content.numel()


def test_the_forms_that_validate_and_the_word_async(nvme_path: Path) -> None:
    handle, content, path = make_handle(), random_bytes(5000), str(nvme_path / "file")
    assert handle.pwrite(content, path, True, False) == 1
    back = torch.zeros_like(content)
    assert handle.pread(back, path, validate=True, **{"async": True}, file_offset=0) == 0
    assert handle.wait() == 1
    assert handle.read(back, path, True) == handle.write(back, path, True) == 0
    assert torch.equal(back, content)
    with pytest.raises(TypeError, match="async"):
        handle.pread(back, path, True)


def test_locked_tensors_are_known_to_every_handle_until_they_are_freed() -> None:
    one, other = make_handle(), make_handle()
    tensor = one.new_cpu_locked_tensor(5000, torch.empty(0, dtype=torch.float32))
    assert tensor.data_ptr() % 4096 == 0
    assert not tensor.any()
    view = tensor.narrow(0, 17, 99)
    assert other.is_pinned(tensor)
    assert other.is_pinned(view)
    assert not other.is_pinned(torch.empty(5000))
    assert not other.free_cpu_locked_tensor(view)
    assert other.free_cpu_locked_tensor(tensor)
    assert not other.free_cpu_locked_tensor(tensor)
    assert not one.is_pinned(view)


def test_locked_memory_goes_with_its_last_view() -> None:
    handle = make_handle()
    tensor = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
    address, view = tensor.data_ptr(), tensor[10:20]
    del tensor
    gc.collect()
    assert handle.is_pinned(view)
    del view
    gc.collect()
    mapped = Path("/proc/self/maps").read_text()
    assert f"{address:x}-" not in mapped


def test_a_read_beyond_the_end_raises_with_operation_and_path(nvme_path: Path) -> None:
    handle, path = make_handle(), nvme_path / "file"
    path.write_bytes(bytes(NBYTES))
    with pytest.raises(IoError, match="only 4096 bytes") as raised:
        handle.async_pread(torch.empty(NBYTES, dtype=torch.uint8), str(path), 1)
    assert (raised.value.errno, raised.value.operation, raised.value.path) == (errno.ENODATA, "read", str(path))
    assert handle.wait() == 0


def test_a_missing_file_and_a_missing_folder_raise(nvme_path: Path) -> None:
    handle, tensor = make_handle(), torch.zeros(NBYTES, dtype=torch.uint8)
    for call in (handle.async_pread, handle.async_pwrite):
        with pytest.raises(IoError, match="none/file"):
            call(tensor, str(nvme_path / "none" / "file"))


def test_a_failed_write_raises_at_wait_and_the_others_are_done() -> None:
    handle = make_handle()
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    with pytest.raises(IoError, match="/dev/full"):
        handle.sync_pwrite(tensor, "/dev/full")
    assert handle.wait() == 0


def test_calls_nobody_waited_for_are_whole(nvme_path: Path) -> None:
    handle, content = make_handle(), random_bytes(1_000_001)
    handle.async_pwrite(content, str(nvme_path / "file"))
    del handle
    gc.collect()
    assert (nvme_path / "file").read_bytes() == content.numpy().tobytes()


@pytest.mark.parametrize("operation", ["pread", "pwrite", "sync_pread", "sync_pwrite"])
def test_waiting_lets_other_threads_run(nvme_path: Path, operation: str) -> None:
    handle, tensor, path = make_handle(), random_bytes(1 << 20), str(nvme_path / "file")
    handle.sync_pwrite(tensor, path)
    gate, ready, ran = threading.Lock(), threading.Event(), threading.Event()

    def peer() -> None:
        ready.set()
        with gate:
            ran.set()

    gate.acquire()
    thread = threading.Thread(target=peer)
    thread.start()
    assert ready.wait(60)
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(60)  # a thread that never lets go would keep the interpreter
        gate.release()
        for _ in range(1000):  # on a busy machine the other thread may get no turn during one call
            call = getattr(handle, operation)
            assert call(tensor, path, False, False) == 1 if "sync" not in operation else call(tensor, path) == 1
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join(60)
