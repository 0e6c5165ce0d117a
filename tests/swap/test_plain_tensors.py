"""What the plain face of the swap manager promises: tensors of any shape and dtype come back bit for bit, from a pool that
is smaller than all of them together, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity import InfinityError, SwapManager
from infinity.errors import BudgetError, IoError
from infinity.units import MIB

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
SHAPES = [(), (1,), (4096,), (4097,), (3, 5), (2, 1, 7, 11), (70_000,)]
POOL_BYTES = 8 * MIB


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits at all, NaNs among them; of a bool, a valid one."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return (left.shape, left.dtype) == (right.shape, right.dtype) and torch.equal(bits(left), bits(right))


def leased_bytes(swap: SwapManager) -> int:
    if swap._machinery is None:
        return 0
    return swap._machinery.pool.leased_bytes


@pytest.fixture
def swap(nvme_path: Path, backend: str) -> Iterator[SwapManager]:
    with SwapManager(nvme_path, pinned_bytes_max=POOL_BYTES, backend=backend, block_bytes=64 << 10) as manager:
        assert not list(nvme_path.glob("*/*.arena"))
        yield manager
    assert list(nvme_path.iterdir()) == []


def test_tensors_of_every_dtype_and_shape_come_back(swap: SwapManager) -> None:
    tensors = {f"{dtype} {shape}": random_bits(shape, dtype, seed=len(shape)) for dtype in DTYPES for shape in SHAPES}
    for name, tensor in tensors.items():
        swap.tensors.register(name, tensor)
    for name, tensor in tensors.items():
        with swap.tensors.use(name) as found:
            assert same_bits(found, tensor), name
    assert leased_bytes(swap) == 0


def test_more_than_the_pool_flows_through_it(swap: SwapManager) -> None:
    tensors = [random_bits((3 * MIB,), torch.uint8, seed=k) for k in range(6)]
    for k, tensor in enumerate(tensors):
        swap.tensors.register(str(k), tensor)
    swap.flush()
    for k, tensor in enumerate(tensors):
        with swap.tensors.use(str(k)) as found:
            if k + 1 < len(tensors):
                assert swap.tensors.prefetch(str(k + 1))
            assert same_bits(found, tensor)
    stats = swap.stats()
    assert stats.pinned_peak_bytes <= stats.pinned_bytes == POOL_BYTES
    assert stats.read_bytes == stats.written_bytes == stats.arena_bytes == 18 * MIB
    assert stats.demand_reads == 1


def test_strided_tensor_is_stored_by_its_elements(swap: SwapManager) -> None:
    base = random_bits((6, 8), torch.int32)
    for name, tensor in {"transposed": base.t(), "stepped": base[::2, 1::3], "expanded": base[0].expand(4, 8)}.items():
        swap.tensors.register(name, tensor)
        with swap.tensors.use(name) as found:
            assert found.is_contiguous()
            assert same_bits(found, tensor)


def test_registered_tensor_is_a_copy(swap: SwapManager) -> None:
    tensor = torch.zeros(10, requires_grad=True)
    swap.tensors.register("x", tensor)
    with torch.no_grad():
        tensor.fill_(1.0)
    with swap.tensors.use("x") as found:
        assert not found.requires_grad
        assert not found.any()


def test_update_is_seen_by_the_next_use(swap: SwapManager) -> None:
    swap.tensors.register("x", torch.arange(5000.0))
    for _ in range(3):
        with swap.tensors.update("x") as found:
            found += 1
    swap.flush()
    with swap.tensors.use("x") as found:
        assert torch.equal(found, torch.arange(5000.0) + 3)


def test_update_that_raises_leaves_the_stored_bytes(swap: SwapManager) -> None:
    swap.tensors.register("x", torch.ones(5000))

    def spoil() -> None:
        with swap.tensors.update("x") as found:
            found.fill_(7.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spoil()
    assert leased_bytes(swap) == 0
    with swap.tensors.use("x") as found:
        assert torch.equal(found, torch.ones(5000))


def test_use_writes_nothing(swap: SwapManager) -> None:
    swap.tensors.register("x", torch.ones(10))
    swap.flush()
    written = swap.stats().written_bytes
    with swap.tensors.use("x") as found:
        found.fill_(3.0)
    swap.flush()
    with swap.tensors.use("x") as found:
        assert torch.equal(found, torch.ones(10))
    assert swap.stats().written_bytes == written


def test_use_that_raises_frees_its_lease(swap: SwapManager) -> None:
    swap.tensors.register("x", torch.ones(10))
    with pytest.raises(ZeroDivisionError), swap.tensors.use("x"):
        raise ZeroDivisionError
    assert leased_bytes(swap) == 0


def test_two_names_are_used_at_once(swap: SwapManager) -> None:
    for k in range(2):
        swap.tensors.register(str(k), torch.full((1000,), float(k)))
    with swap.tensors.use("0") as zero, swap.tensors.update("1") as one:
        one += zero + 1
    with swap.tensors.use("1") as one:
        assert one.unique().tolist() == [2.0]


def test_tensor_larger_than_the_pool_names_what_would_do(nvme_path: Path) -> None:
    tensor = torch.zeros(POOL_BYTES + 1, dtype=torch.uint8)
    with SwapManager(nvme_path, pinned_bytes_max=POOL_BYTES, backend="threads") as swap:
        with pytest.raises(BudgetError, match=r"tensor 'big' of 8\.00 MiB .* at least 8392704"):
            swap.tensors.register("big", tensor)
        assert swap.stats().arena_bytes == 0
        with pytest.raises(KeyError):
            swap.tensors.prefetch("big")
    with SwapManager(nvme_path, pinned_bytes_max=8392704, backend="threads") as swap:
        swap.tensors.register("big", tensor)


def test_pool_below_the_least_is_refused_at_once(nvme_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"4\.00 KiB is below the least that works, 8\.00 MiB"):
        SwapManager(nvme_path, pinned_bytes_max="4KiB")
    assert list(nvme_path.iterdir()) == []


def test_tensor_in_use_is_not_used_again(swap: SwapManager) -> None:
    swap.tensors.register("x", torch.ones(10))

    def again() -> None:
        with swap.tensors.update("x"):
            pass

    with swap.tensors.use("x"):
        with pytest.raises(InfinityError, match="'x' is in use already"):
            again()
        assert swap.tensors.prefetch("x")  # it is here
    assert leased_bytes(swap) == 0
    again()


def test_unknown_name_is_a_key_error(swap: SwapManager) -> None:
    with pytest.raises(KeyError, match="'missing'"), swap.tensors.use("missing"):
        pass
    with pytest.raises(KeyError, match="'missing'"), swap.tensors.update("missing"):
        pass
    with pytest.raises(KeyError, match="'missing'"):
        swap.tensors.prefetch("missing")


def test_name_that_is_taken_is_refused_and_its_bytes_stay(swap: SwapManager) -> None:
    swap.tensors.register("x", torch.ones(10))
    with pytest.raises(ValueError, match=r"'x' is registered already: use update\(\)"):
        swap.tensors.register("x", torch.zeros(10))
    with swap.tensors.use("x") as found:
        assert torch.equal(found, torch.ones(10))


def test_tensor_without_elements_is_refused(swap: SwapManager) -> None:
    with pytest.raises(ValueError, match="has no elements"):
        swap.tensors.register("x", torch.ones(0, 3))


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_tensor_that_can_not_be_copied_frees_its_lease(swap: SwapManager, kind: str) -> None:
    tensor = torch.ones(4, device="meta") if kind == "meta" else torch.eye(3).to_sparse()
    with pytest.raises((RuntimeError, ValueError)):
        swap.tensors.register("x", tensor)
    assert leased_bytes(swap) == 0
    swap.tensors.register("x", torch.ones(4))  # the name isn't taken


def test_prefetch_makes_the_use_no_demand_read(swap: SwapManager) -> None:
    swap.tensors.register("x", torch.ones(10))
    swap.flush()
    assert swap.tensors.prefetch("x")
    assert swap.tensors.prefetch("x")
    with swap.tensors.use("x"):
        pass
    assert swap.stats().demand_reads == 0


def test_closed_manager_says_so(nvme_path: Path, backend: str) -> None:
    swap = SwapManager(nvme_path, pinned_bytes_max=POOL_BYTES, backend=backend)
    swap.tensors.register("x", torch.ones(10))
    swap.close()
    swap.close()
    calls = [
        lambda: swap.tensors.register("y", torch.ones(1)),
        lambda: swap.tensors.prefetch("x"),
        swap.flush,
        swap.stats,
    ]
    for call in [*calls, lambda: swap.tensors.use("x").__enter__(), lambda: swap.tensors.update("x").__enter__()]:
        with pytest.raises(InfinityError, match="closed"):
            call()
    assert list(nvme_path.iterdir()) == []


def test_close_waits_for_updates_and_leaves_nothing(nvme_path: Path, backend: str) -> None:
    swap = SwapManager(nvme_path, pinned_bytes_max=POOL_BYTES, backend=backend)
    for k in range(4):
        swap.tensors.register(str(k), torch.zeros(MIB // 4))
        with swap.tensors.update(str(k)) as found:
            found += 1
    swap.tensors.prefetch("0")
    swap.close()
    assert list(nvme_path.iterdir()) == []


def test_nothing_is_left_where_the_block_raised(nvme_path: Path) -> None:
    def work() -> None:
        with SwapManager(nvme_path, pinned_bytes_max=POOL_BYTES, backend="threads") as swap:
            swap.tensors.register("x", torch.ones(10))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert list(nvme_path.iterdir()) == []


def test_unknown_backend_is_refused_and_leaves_nothing(nvme_path: Path) -> None:
    with SwapManager(nvme_path, pinned_bytes_max=POOL_BYTES, backend="magnets") as swap, pytest.raises(ValueError):
        swap.tensors.register("x", torch.ones(10))
    assert list(nvme_path.iterdir()) == []


def lose_the_drive(swap: SwapManager) -> None:
    """From now on every transfer of `x` goes where the file doesn't reach."""
    chunk = swap._tensors.by_name["x"].chunk
    chunk.reads = tuple(type(span)(1 << 40, 0, span.nbytes) for span in chunk.reads)


def test_failed_read_is_raised_by_use_and_frees_its_lease(swap: SwapManager) -> None:
    swap.tensors.register("x", torch.ones(10))
    lose_the_drive(swap)
    with pytest.raises(IoError) as caught, swap.tensors.use("x"):
        pass
    assert caught.value.operation == "read"
    assert leased_bytes(swap) == 0


@settings(
    max_examples=settings.default.max_examples * 3 // 20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=5),
    moves=st.lists(st.tuples(st.sampled_from(["use", "update", "prefetch", "flush", "fail"]), st.integers(0, 4))),
)
def test_any_order_of_calls_keeps_the_bytes(nvme_path: Path, sizes: list[int], moves: list[tuple[str, int]]) -> None:
    with SwapManager(nvme_path, pinned_bytes_max=POOL_BYTES, backend="threads") as swap:
        content = [0] * len(sizes)
        for k, size in enumerate(sizes):
            swap.tensors.register(str(k), torch.zeros(size, dtype=torch.uint8))
        for move, number in moves:
            k = number % len(sizes)
            if move == "prefetch":
                swap.tensors.prefetch(str(k))
            elif move == "flush":
                swap.flush()
            elif move == "use":
                with swap.tensors.use(str(k)) as found:
                    assert found.unique().tolist() == [content[k]]
            elif move == "update":
                with swap.tensors.update(str(k)) as found:
                    assert found.unique().tolist() == [content[k]]
                    content[k] += 1
                    found.fill_(content[k])
            else:
                with pytest.raises(ZeroDivisionError), swap.tensors.update(str(k)) as found:
                    raise ZeroDivisionError(found.fill_(255))
        for k, expected in enumerate(content):
            with swap.tensors.use(str(k)) as found:
                assert found.unique().tolist() == [expected]
    assert list(nvme_path.iterdir()) == []
