"""A paged tensor behaves as the tensor that it stands for; it reads and changes no other bytes.

Most tests use shards laid out by hand and an ordinary tensor that takes the same operations; the end on a model that
FSDP2 sharded over one rank.
"""

from __future__ import annotations

import contextlib
import copy
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from infinity import InfinityError, PagingOptions, SwapManager
from infinity.aio import IoEngine, PinnedPool
from infinity.device import Device
from infinity.store.arena import Arena
from infinity.store.layout import SPACE_ALIGN, Field, Shard, plan_layout
from infinity.store.run_folder import RunFolder
from infinity.swap.paged_model import PagedModel
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.plan import ACCESS_BYTES
from infinity.swap.shard import PagedShard
from infinity.swap.stager import Stager

CPU = torch.device("cpu")
SHAPE = (4, 6, 5)
Operation = Callable[[torch.Tensor], Any]


@dataclass
class Bench:
    """Shards over a real arena: `a` of SHAPE, `long` cut by sub-groups, `uneven` with padding, `kept` resident."""

    model: PagedModel
    engine: IoEngine
    pool: PinnedPool

    def tensor(self, name: str, which: Field = Field.MASTER) -> PagedTensor:
        return PagedTensor.over(self.shard(name), which, contextlib.nullcontext, CPU)

    def shard(self, name: str) -> PagedShard:
        return next(shard for shard in self.model.shards if shard.name == name)

    def pair(self, name: str = "a", seed: int = 0) -> tuple[PagedTensor, torch.Tensor]:
        """A paged tensor and an ordinary one with the same elements."""
        paged = self.tensor(name)
        ordinary = torch.randn(paged.shape, generator=torch.Generator().manual_seed(seed))
        paged.copy_(ordinary)
        return paged, ordinary

    def copy_of(self, name: str) -> torch.Tensor:
        """The parameter to gather, as stored in the arena."""
        shard = self.shard(name)
        return shard.read(Field.COMPUTE, 0, shard.padded_shape.numel())


SHARDS = {
    "before": ((100,), (100,)),
    "a": (SHAPE, SHAPE),
    "long": ((5 * SPACE_ALIGN + 77,), (5 * SPACE_ALIGN + 77,)),
    "uneven": ((3, 5), (4, 5)),
    "empty": ((0, 5), (2, 5)),
    "kept": ((10, 3), (10, 3)),
}


@pytest.fixture
def bench(nvme_path: Path) -> Iterator[Bench]:
    folder = RunFolder(nvme_path)
    pool = PinnedPool(256 << 10)
    engine = IoEngine(pool, backend="threads")
    arena = Arena(folder, engine, name="rank0.arena")
    stager = Stager(engine, pool, arena, Device())
    shapes = [(torch.Size(shape), torch.Size(padded)) for shape, padded in SHARDS.values()]
    specs = [
        Shard(name, 0, padded.numel(), True, name == "kept") for name, (_, padded) in zip(SHARDS, shapes, strict=True)
    ]
    model = PagedModel(
        layout=plan_layout(specs, groups=1, sub_group_numel_max=SPACE_ALIGN, compute_itemsize=2),
        group_names=["root"],
        shapes=shapes,
        compute_dtype=torch.bfloat16,
        stager=stager,
        arena=arena,
        stored="the test",
    )
    yield Bench(model, engine, pool)
    assert pool.leased_bytes == 0
    engine.close()
    arena.close()
    folder.close()


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and (found.shape, found.dtype) == (expected.shape, expected.dtype)
            and torch.equal(found.clone(), expected)
        )
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(same(f, e) for f, e in zip(found, expected, strict=True))
    return bool(found == expected)


# Views.

VIEWS: dict[str, Operation] = {
    "view": lambda t: t.view(6, 20),
    "view(-1)": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(2, 60),
    "narrow": lambda t: t.narrow(1, 2, 3),
    "slice": lambda t: t[1:3, ::2, 1:],
    "select": lambda t: t[2],
    "element": lambda t: t[2, 3, 4],
    "transpose": lambda t: t.transpose(0, 2),
    "t": lambda t: t[0].t(),
    "T": lambda t: t[1].T,
    "permute": lambda t: t.permute(2, 0, 1),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t[:1].squeeze(0),
    "expand": lambda t: t[:1].expand(3, 6, 5),
    "diagonal": lambda t: t[0].diagonal(),
    "unfold": lambda t: t.unfold(1, 2, 2),
    "flatten": lambda t: t.flatten(1),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "movedim": lambda t: t.movedim(0, 1),
    "as_strided": lambda t: t.as_strided((3, 2), (10, 1), 7),
    "view_as": lambda t: t.view_as(torch.empty(20, 6)),
    "nothing": lambda t: t[:0],
    "view of a view": lambda t: t[1:].transpose(1, 2)[:, 1:4, 2:].narrow(0, 1, 2),
}
MANY: dict[str, Operation] = {
    "split": lambda t: t.split(4, 1),
    "split sizes": lambda t: t.split([1, 5], 1),
    "chunk": lambda t: t.chunk(3, 1),
    "unbind": lambda t: t.unbind(0),
    "tensor_split": lambda t: t.tensor_split(2, 2),
    "iteration": lambda t: list(t),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_is_another_paged_tensor_of_the_same_elements(bench: Bench, name: str) -> None:
    paged, ordinary = bench.pair()
    before = bench.engine.read_bytes
    found, expected = VIEWS[name](paged), VIEWS[name](ordinary)
    assert isinstance(found, PagedTensor)
    assert bench.engine.read_bytes == before
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert same(found, expected)


@pytest.mark.parametrize("name", MANY)
def test_views_in_a_list_are_paged_tensors(bench: Bench, name: str) -> None:
    paged, ordinary = bench.pair()
    found, expected = MANY[name](paged), MANY[name](ordinary)
    assert all(isinstance(each, PagedTensor) for each in found)
    assert same(found, expected)


def test_paged_tensor_holds_no_elements(bench: Bench) -> None:
    paged, _ = bench.pair("long")
    assert paged.untyped_storage().nbytes() == 0
    assert paged[5:].untyped_storage().nbytes() == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_view_in_another_dtype_has_that_dtype_or_is_refused(bench: Bench, dtype: torch.dtype) -> None:
    paged, ordinary = bench.pair()
    try:
        found = paged.view(dtype)
    except (RuntimeError, InfinityError):  # torch's refusal, or ours
        return
    assert same(found, ordinary.view(dtype))


# Reading.

READS: dict[str, Operation] = {
    "add": lambda t: t + 1,
    "two of it": lambda t: t * t[0],
    "matmul": lambda t: t @ torch.ones(5, 2),
    "sum": lambda t: t.sum(dim=1),
    "norm": lambda t: torch.linalg.vector_norm(t),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.transpose(0, 1).contiguous(),
    "to bf16": lambda t: t.to(torch.bfloat16),
    "double": lambda t: t.double(),
    "item": lambda t: t[1, 2, 3].item(),
    "float": lambda t: float(t[1, 2, 3]),
    "comparison": lambda t: (t > 0).sum(),
    "index": lambda t: t[torch.tensor([2, 0])],
    "mask": lambda t: t[t > 0.5],
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "cat": lambda t: torch.cat([t, torch.ones(1, 6, 5)]),
    "stack": lambda t: torch.stack([t, t]),
    "cat of views": lambda t: torch.cat([t[1:], t[:1]]),
    "sort": lambda t: t.sort(),
    "max": lambda t: t.max(dim=0),
    "equal": lambda t: torch.equal(t, t.clone()),
    "isfinite": lambda t: torch.isfinite(t).all(),
    "reshape that copies": lambda t: t.transpose(0, 1).reshape(-1),
    "einsum": lambda t: torch.einsum("abc,abc->b", t, t),
    "foreach": lambda t: torch._foreach_norm([t, t[0]]),
    "out": lambda t: torch.add(t, 1, out=torch.empty(SHAPE)),
    "into an ordinary tensor": lambda t: torch.zeros(SHAPE).copy_(t),
    "added to an ordinary tensor": lambda t: torch.ones(SHAPE).add_(t, alpha=2),
    "len": lambda t: (len(t), t.dim(), t.numel(), t.element_size(), t.is_contiguous()),
}


@pytest.mark.parametrize("name", READS)
def test_reading_equals_that_of_an_ordinary_tensor(bench: Bench, name: str) -> None:
    paged, ordinary = bench.pair()
    found = READS[name](paged)
    assert not isinstance(found, PagedTensor)
    assert same(found, READS[name](ordinary))
    assert torch.equal(paged.clone(), ordinary)


def test_reading_goes_across_sub_groups(bench: Bench) -> None:
    paged, ordinary = bench.pair("long")
    assert torch.equal(paged.clone(), ordinary)
    for start in (0, 1, SPACE_ALIGN - 3, 2 * SPACE_ALIGN + 5):
        for count in (1, 7, SPACE_ALIGN, 2 * SPACE_ALIGN + 11):
            assert torch.equal(paged[start : start + count].clone(), ordinary[start : start + count])


def test_a_range_larger_than_the_access_buffer_is_read_and_written_in_parts(nvme_path: Path) -> None:
    numel = ACCESS_BYTES // 4 + 5000
    folder = RunFolder(nvme_path)
    pool = PinnedPool(ACCESS_BYTES)
    engine = IoEngine(pool, backend="threads")
    arena = Arena(folder, engine, name="rank0.arena")
    model = PagedModel(
        layout=plan_layout([Shard("big", 0, numel)], groups=1, sub_group_numel_max=1 << 24, compute_itemsize=2),
        group_names=["root"],
        shapes=[(torch.Size([numel]), torch.Size([numel]))],
        compute_dtype=torch.bfloat16,
        stager=Stager(engine, pool, arena, Device()),
        arena=arena,
        stored="the test",
    )
    paged = PagedTensor.over(model.shards[0], Field.MASTER, contextlib.nullcontext, CPU)
    ordinary = torch.randn(numel)
    paged.copy_(ordinary)
    assert torch.equal(paged.clone(), ordinary)
    assert torch.equal(model.shards[0].read(Field.COMPUTE, 0, numel), ordinary.bfloat16().float())
    engine.close()
    arena.close()
    folder.close()


def test_small_read_reads_pages_not_the_shard(bench: Bench) -> None:
    paged, ordinary = bench.pair("long")
    before = bench.engine.read_bytes
    assert paged[SPACE_ALIGN].item() == ordinary[SPACE_ALIGN].item()
    assert bench.engine.read_bytes - before == 4096


def test_tensor_without_elements_reads_nothing(bench: Bench) -> None:
    empty = bench.tensor("empty")
    before = bench.engine.read_bytes
    assert same(empty.clone(), torch.empty(0, 5))
    empty.zero_()
    empty.copy_(torch.empty(0, 5))
    assert bench.engine.read_bytes == before


def test_bytes_never_written_are_zeros(bench: Bench) -> None:
    for which in (Field.MASTER, Field.MOMENT_1, Field.MOMENT_2):
        assert not bench.tensor("long", which).clone().any()


# Factories.

FACTORIES: dict[str, Operation] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda t: torch.full_like(t, 3),
    "zeros_like in bf16": lambda t: torch.zeros_like(t, dtype=torch.bfloat16),
    "zeros_like of a view": lambda t: torch.zeros_like(t.transpose(0, 1)),
    "new_zeros": lambda t: t.new_zeros(2, 3),
    "new_zeros of its size": lambda t: t.new_zeros(t.shape),
    "new_ones": lambda t: t.new_ones((7,)),
    "new_full": lambda t: t.new_full((2,), 5.0),
    "new_tensor": lambda t: t.new_tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_reads_nothing(bench: Bench, name: str) -> None:
    paged, ordinary = bench.pair()
    before = bench.engine.read_bytes
    found, expected = FACTORIES[name](paged), FACTORIES[name](ordinary)
    assert bench.engine.read_bytes == before
    assert not isinstance(found, PagedTensor)
    assert (found.stride(), found.device) == (expected.stride(), expected.device)
    assert same(found, expected)


@pytest.mark.parametrize("make", [torch.empty_like, torch.rand_like, torch.randn_like, lambda t: t.new_empty(4)])
def test_factory_of_any_values_reads_nothing(bench: Bench, make: Operation) -> None:
    paged, ordinary = bench.pair()
    before = bench.engine.read_bytes
    torch.manual_seed(3)
    found = make(paged)
    torch.manual_seed(3)
    expected = make(ordinary)
    assert bench.engine.read_bytes == before
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert make not in (torch.rand_like, torch.randn_like) or torch.equal(found, expected)
    assert found.untyped_storage().nbytes() > 0


# Writing.


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


WRITES: dict[str, Operation] = {
    "copy_": lambda t: t.copy_(torch.arange(float(t.numel())).view(t.shape)),
    "copy_ that broadcasts": lambda t: t.copy_(torch.tensor(2.0)),
    "copy_ from bf16": lambda t: t.copy_(torch.full(t.shape, 1.5, dtype=torch.bfloat16)),
    "mul_": lambda t: t.mul_(3),
    "add_": lambda t: t.add_(torch.ones(t.shape), alpha=0.5),
    "addcmul_": lambda t: t.addcmul_(torch.ones(t.shape), torch.ones(t.shape), value=2),
    "lerp_": lambda t: t.lerp_(torch.ones(t.shape), 0.25),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(-1),
    "clamp_": lambda t: t.clamp_(min=0),
    "normal_": lambda t: t.normal_(1.0, 2.0, generator=generator()),
    "uniform_": lambda t: t.uniform_(-1, 1, generator=generator()),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 9.0),
    "iadd": lambda t: t.__iadd__(1),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t, generator=generator()),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "out": lambda t: torch.mul(torch.ones(t.shape), 4, out=t),
    "itself": lambda t: t.add_(t),
}
PLACES: dict[str, Operation] = {
    "all of it": lambda t: t,
    "a row": lambda t: t[2],
    "rows": lambda t: t[1:3],
    "columns": lambda t: t[:, 1:4, ::2],
    "transposed": lambda t: t.transpose(0, 2)[1:],
    "flat": lambda t: t.view(-1)[7:101],
    "nothing": lambda t: t[4:],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WRITES)
def test_write_changes_exactly_its_range(bench: Bench, name: str, place: str) -> None:
    paged, ordinary = bench.pair()
    neighbours = {other: bench.pair(other, seed=5)[1] for other in ("before", "long", "uneven", "kept")}
    target = PLACES[place](paged)
    returned = WRITES[name](target)
    WRITES[name](PLACES[place](ordinary))
    assert (returned[0] if isinstance(returned, list) else returned) is target
    assert torch.equal(paged.clone(), ordinary)
    for other, expected in neighbours.items():
        assert torch.equal(bench.tensor(other).clone(), expected), other
    assert torch.equal(bench.copy_of("a"), ordinary.bfloat16().float().view(-1))


def test_setitem_writes(bench: Bench) -> None:
    paged, ordinary = bench.pair()
    for tensor in (paged, ordinary):
        tensor[1, 2:4] = 7.0
        tensor[3] = torch.arange(30.0).view(6, 5)
        tensor[torch.tensor([0, 2]), 0] = -1.0
    assert torch.equal(paged.clone(), ordinary)


def test_write_goes_across_sub_groups(bench: Bench) -> None:
    paged, ordinary = bench.pair("long")
    for start, count in [(1, 7), (SPACE_ALIGN - 3, 6), (SPACE_ALIGN, SPACE_ALIGN), (700, 3 * SPACE_ALIGN)]:
        for tensor in (paged, ordinary):
            tensor[start : start + count].mul_(-2)
        assert torch.equal(paged.clone(), ordinary)
    assert torch.equal(bench.copy_of("long"), ordinary.bfloat16().float())


def test_copy_from_a_paged_tensor(bench: Bench) -> None:
    paged, ordinary = bench.pair()
    paged[:2].copy_(paged[1:3])
    assert torch.equal(paged.clone(), torch.cat([ordinary[1:3], ordinary[2:]]))


def test_foreach_writes_several(bench: Bench) -> None:
    (a, plain_a), (b, plain_b) = bench.pair("a"), bench.pair("kept")
    torch._foreach_add_([a, b], 1.0)
    assert torch.equal(a.clone(), plain_a + 1)
    assert torch.equal(b.clone(), plain_b + 1)


def test_writing_the_master_sets_the_copy_rounded_as_torch_rounds(bench: Bench) -> None:
    numel = bench.shard("long").shape.numel()
    bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator()).to(torch.int32)
    ordinary = bits.view(torch.float32)
    ordinary = torch.where(ordinary.isnan(), 1.0 + 2.0**-8, ordinary)  # ties, denormals, infinities
    bench.tensor("long").copy_(ordinary)
    assert torch.equal(bench.copy_of("long"), ordinary.bfloat16().float())


def test_writing_the_master_sets_the_resident_copy(bench: Bench) -> None:
    paged, ordinary = bench.pair("kept")
    resident = bench.shard("kept").resident
    assert resident is not None
    assert torch.equal(resident, ordinary.bfloat16().view(-1))
    paged[3:5] *= 2
    ordinary[3:5] *= 2
    assert torch.equal(resident, ordinary.bfloat16().view(-1))


def test_writing_a_moment_leaves_the_master_and_its_copy(bench: Bench) -> None:
    _, ordinary = bench.pair()
    bench.tensor("a", Field.MOMENT_1).fill_(3.0)
    assert torch.equal(bench.tensor("a").clone(), ordinary)
    assert torch.equal(bench.copy_of("a"), ordinary.bfloat16().float().view(-1))
    assert not bench.tensor("a", Field.MOMENT_2).clone().any()
    assert bench.tensor("a", Field.MOMENT_1).clone().unique().tolist() == [3.0]


@pytest.mark.parametrize("change", [lambda t: t.t_(), lambda t: t.unsqueeze_(0), lambda t: t.transpose_(0, 1)])
def test_changing_the_shape_in_place_is_done_or_refused(bench: Bench, change: Operation) -> None:
    paged, ordinary = bench.pair()
    paged, ordinary = paged[0], ordinary[0]
    expected = ordinary.clone()
    try:
        change(paged)
    except (RuntimeError, InfinityError):  # torch's refusal, or ours
        pass
    else:
        change(expected)
    assert torch.equal(bench.tensor("a")[0].clone(), ordinary)
    assert same(paged, expected)


# What would look into the storage.


def test_numpy_and_lists(bench: Bench) -> None:
    paged, ordinary = bench.pair()
    assert np.array_equal(paged.numpy(), ordinary.numpy())
    assert np.array_equal(np.asarray(paged[1]), ordinary[1].numpy())
    assert np.asarray(paged, dtype=np.float64).dtype == np.float64
    assert paged.tolist() == ordinary.tolist()


def test_repr_reads_nothing(bench: Bench) -> None:
    paged, _ = bench.pair()
    before = bench.engine.read_bytes
    assert repr(paged) == str(paged) == f"{paged}" == "PagedTensor(a, master, size=(4, 6, 5))"
    assert repr(paged[1:, 0]) == "PagedTensor(a, master, size=(3, 5))"
    assert bench.engine.read_bytes == before


def test_copies_are_ordinary_tensors(bench: Bench) -> None:
    paged, ordinary = bench.pair()
    for made in (copy.deepcopy(paged), copy.copy(paged), copy.deepcopy({"x": [paged]})["x"][0]):
        assert type(made) is torch.Tensor
        assert torch.equal(made, ordinary)
        made.zero_()
    assert torch.equal(paged.clone(), ordinary)


def test_one_tensor_stays_one_in_a_deep_copy(bench: Bench) -> None:
    paged, _ = bench.pair()
    first, second = copy.deepcopy([paged, paged])
    assert first is second


def test_saved_tensor_is_loaded_without_the_library(bench: Bench) -> None:
    paged, ordinary = bench.pair()
    file = io.BytesIO()
    torch.save({"whole": paged, "view": paged[1:3].transpose(0, 1)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["whole"]) is torch.Tensor
    assert same(loaded["whole"], ordinary)
    assert same(loaded["view"], ordinary[1:3].transpose(0, 1))


RISKY = """
import sys
from contextlib import nullcontext
from pathlib import Path
import numpy as np
import torch
from infinity.aio import IoEngine, PinnedPool
from infinity.device import Device
from infinity.store.arena import Arena
from infinity.store.layout import Field, Shard, plan_layout
from infinity.store.run_folder import RunFolder
from infinity.swap.paged_model import PagedModel
from infinity.swap.paged_tensor import PagedTensor
from infinity.swap.stager import Stager

folder = RunFolder(sys.argv[1])
pool = PinnedPool(8 << 20)
engine = IoEngine(pool, backend="threads")
arena = Arena(folder, engine, name="rank0.arena")
size = torch.Size([10])
model = PagedModel(
    layout=plan_layout([Shard("a", 0, 10)], groups=1, sub_group_numel_max=1 << 20, compute_itemsize=2),
    group_names=["root"], shapes=[(size, size)], compute_dtype=torch.bfloat16,
    stager=Stager(engine, pool, arena, Device()), arena=arena, stored="the test",
)
paged = PagedTensor.over(model.shards[0], Field.MASTER, nullcontext, torch.device("cpu"))
paged.copy_(torch.arange(10.0))
ways = {
    "from_dlpack": lambda: torch.from_dlpack(paged),
    "numpy.from_dlpack": lambda: torch.from_numpy(np.from_dlpack(paged).copy()),
    "apply_": lambda: paged.apply_(lambda x: x),
}
for way, read in ways.items():
    try:
        found = read()
    except Exception:
        print(way, "refused", flush=True)
        continue
    print(way, end=" ", flush=True)
    try:
        print("right" if found.tolist() == list(range(10)) else "wrong", flush=True)
    except Exception:
        print("broken", flush=True)
"""


def test_foreign_readers_get_the_elements_or_a_refusal(nvme_path: Path) -> None:
    """In a process of its own: what looks into a storage without elements may take the process with it."""
    ran = subprocess.run([sys.executable, "-c", RISKY, str(nvme_path)], capture_output=True, text=True)
    found = dict(line.split() for line in ran.stdout.splitlines())
    ways = {"from_dlpack", "numpy.from_dlpack", "apply_"}
    assert (ran.returncode, {way: found.get(way) for way in ways if found.get(way) not in ("right", "refused")}) == (
        0,
        {},
    )


# The padded twin.


def test_twin_turns_into_the_padded_shard(bench: Bench) -> None:
    """The steps that FSDP2 takes with a shard that is smaller than its padded size."""
    paged, ordinary = bench.pair("uneven")
    writes = bench.engine.written_bytes
    twin = paged.new_zeros(torch.Size([4, 5]))
    assert isinstance(twin, PagedTensor)
    twin.narrow(0, 0, 3).copy_(paged)
    assert bench.engine.written_bytes == writes
    assert torch.equal(twin.clone(), torch.cat([ordinary, torch.zeros(1, 5)]))
    local = twin.view(-1).view(4, 5).narrow(0, 0, 3)
    local.mul_(2)
    assert torch.equal(paged.clone(), ordinary * 2)


def test_blank_twin_is_never_read_or_written(bench: Bench) -> None:
    paged, ordinary = bench.pair("uneven")
    twin = paged.new_zeros(torch.Size([4, 5]))
    uses: list[Operation] = [
        torch.Tensor.clone,
        lambda t: t.tolist(),
        torch.sum,
        lambda t: t.mul_(2),
        lambda t: t[1] + 1,
    ]
    for use in uses:
        with pytest.raises(InfinityError, match="padded twin of uneven is read before"):
            use(twin)
    for source in (torch.ones(3, 5), paged[:0].expand(0, 5), bench.tensor("a")[0, :3], paged.detach().t().t()[:1]):
        with pytest.raises(InfinityError, match="can only be filled with its own shard"):
            twin[:3].copy_(source)
    with pytest.raises(InfinityError, match="can only be filled with its own shard"):
        twin[1:].copy_(paged)
    assert torch.equal(paged.clone(), ordinary)


def test_zeros_of_another_size_are_ordinary(bench: Bench) -> None:
    paged, _ = bench.pair("uneven")
    for size in [(3, 5), (4, 6), (20,)]:
        assert not isinstance(paged.new_zeros(size), PagedTensor)
    assert not isinstance(bench.tensor("uneven", Field.MOMENT_1).new_zeros((4, 5)), PagedTensor)


# A model.

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded_model(mesh: DeviceMesh) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    return model


@pytest.fixture
def paged_model(mesh: DeviceMesh, nvme_path: Path, backend: str) -> Iterator[tuple[nn.Sequential, SwapManager]]:
    model = sharded_model(mesh)
    with SwapManager(nvme_path, pinned_bytes_max="8MiB", backend=backend) as swap:
        swap.page(model, PagingOptions(param_persistence_threshold=20))  # the biases of the second layer stay in memory
        yield model, swap
    assert list(nvme_path.iterdir()) == []


def locals_of(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.data._local_tensor for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


def test_paged_parameters_hold_the_values_of_the_model(
    paged_model: tuple[nn.Sequential, SwapManager], mesh: DeviceMesh
) -> None:
    model, _ = paged_model
    expected = locals_of(sharded_model(mesh))
    found = locals_of(model)
    assert found.keys() == expected.keys()
    for name, local in found.items():
        assert isinstance(local, PagedTensor)
        assert torch.equal(local.clone(), expected[name])


def test_forward_and_gradients_equal_those_in_memory(
    paged_model: tuple[nn.Sequential, SwapManager], mesh: DeviceMesh
) -> None:
    model, _ = paged_model
    oracle = sharded_model(mesh)
    for seed in range(3):  # the first pass is recorded, the others are read ahead
        given = torch.randn(5, 12, generator=torch.Generator().manual_seed(seed))
        outputs = []
        for each in (model, oracle):
            each.zero_grad()
            outputs.append(each(given))
            outputs[-1].float().square().sum().backward()
        assert torch.equal(*outputs)
        grads = [{n: p.grad.to_local() for n, p in m.named_parameters()} for m in (model, oracle)]
        assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[1])


@pytest.mark.parametrize("name", ["0.weight", "2.weight", "2.bias"])
def test_writing_through_the_master_changes_what_is_gathered(
    paged_model: tuple[nn.Sequential, SwapManager], name: str
) -> None:
    model, swap = paged_model
    local = locals_of(model)[name]
    assert (local._shard.resident is not None) == (name == "2.bias")

    def gathered() -> torch.Tensor:
        shard = local._shard
        with swap.paging.parameters.gathering(shard.group, training=True, dtype=torch.bfloat16):
            return shard.elements(shard.delivery.on_device()).clone().view(local.shape)

    assert torch.equal(gathered(), local.clone().bfloat16())
    values = torch.randn(local.shape, generator=generator())
    with torch.no_grad():
        model.get_parameter(name).copy_(torch.distributed.tensor.distribute_tensor(values, local_mesh(model)))
    assert torch.equal(gathered(), values.bfloat16())
    local[2:4].mul_(1.001)
    values[2:4].mul_(1.001)
    assert torch.equal(gathered(), values.bfloat16())


def local_mesh(model: nn.Module) -> DeviceMesh:
    mesh: DeviceMesh = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
    return mesh


def test_gather_in_another_dtype_is_refused(paged_model: tuple[nn.Sequential, SwapManager]) -> None:
    model, swap = paged_model
    shard = locals_of(model)["0.weight"]._shard
    gathering = swap.paging.parameters.gathering(shard.group, training=True, dtype=torch.float16)
    with (
        pytest.raises(InfinityError, match=r"group 0 is gathered in torch\.float16, .* for torch\.bfloat16"),
        gathering,
    ):
        pass


def test_parameters_without_values_are_not_gathered(mesh: DeviceMesh, nvme_path: Path) -> None:
    with torch.device("meta"):
        model = sharded_model(mesh)
    with SwapManager(nvme_path, pinned_bytes_max="8MiB", backend="threads") as swap:
        swap.page(model, PagingOptions(param_persistence_threshold=0))
        with pytest.raises(InfinityError, match=r"0\.\w+ is uninitialised"):
            model(torch.ones(2, 12))


def test_state_dict_goes_through_a_file(paged_model: tuple[nn.Sequential, SwapManager], mesh: DeviceMesh) -> None:
    model, _ = paged_model
    file = io.BytesIO()
    torch.save(locals_of(model), file)
    file.seek(0)
    expected = locals_of(sharded_model(mesh))
    loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
