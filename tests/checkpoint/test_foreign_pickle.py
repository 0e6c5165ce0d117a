"""What torch.save wrote, read without running what is in it."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import MakesFolder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from infinity import CheckpointError
from infinity.checkpoint.foreign_pickle import Inert, PickledTensor, load_foreign


def loaded(value: Any, path: Path, **options: Any) -> Any:
    torch.save(value, path, **options)
    return load_foreign(path)


def with_pickle(pickled: bytes, path: Path) -> Path:
    """A file of torch.save with another pickle in it."""
    torch.save({"x": torch.arange(4.0)}, path.with_suffix(".before"))
    with zipfile.ZipFile(path.with_suffix(".before")) as before, zipfile.ZipFile(path, "w") as archive:
        for name in before.namelist():
            archive.writestr(name, pickled if name.endswith("/data.pkl") else before.read(name))
    return path


TENSORS = {
    "fp32": torch.randn(7, 5),
    "bf16": torch.randn(33).bfloat16(),
    "fp16": torch.randn(2, 3, 4).half(),
    "int64": torch.arange(9),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "part": torch.randn(10, 10)[2:5, 3:8],
    "transposed": torch.randn(4, 6).T,
    "expanded": torch.randn(1, 6).expand(5, 6),
    "one column": torch.randn(6, 1)[:, :1],
    "parameter": nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_whole_and_in_pieces(name: str, tmp_path: Path) -> None:
    tensor = TENSORS[name].detach()
    stored = loaded([TENSORS[name], "other"], tmp_path / "x.pt")[0]
    assert isinstance(stored, PickledTensor)
    assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
    assert torch.equal(stored.whole(), tensor)
    for first in range(tensor.numel()):
        assert torch.equal(stored.read(first, tensor.numel() - first), tensor.reshape(-1)[first:])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_data_comes_back(protocol: int, tmp_path: Path) -> None:
    ordered = OrderedDict(a=1, b=[2.5, None])
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]  # as state dicts have
    told = {
        "o": ordered,
        "s": {1, 2},
        "f": frozenset("a"),
        "t": (1, "x"),
        "b": b"\xff\0",
        "d": defaultdict(list, a=[1]),
    }
    assert loaded(told, tmp_path / "x.pt", pickle_protocol=protocol) == told
    sizes = loaded({"size": torch.Size([3, 4]), "dtype": torch.bfloat16}, tmp_path / "y.pt", pickle_protocol=protocol)
    assert sizes == {"size": (3, 4), "dtype": torch.bfloat16}


class Numbers(list[int]):
    pass


class Table(dict[str, int]):
    pass


def test_objects_become_inert_with_what_they_held(tmp_path: Path) -> None:
    told = [argparse.Namespace(a=1), Numbers([1, 2]), Table(x=1), Path("x"), argparse.Namespace]
    namespace, numbers, table, path, kind = loaded(told, tmp_path / "x.pt")
    assert isinstance(namespace, Inert) and namespace.of == "argparse.Namespace"
    assert namespace.attributes() == {"a": 1}
    assert all(isinstance(thing, Inert) for thing in (numbers, table, path))
    assert issubclass(kind, Inert)


HOSTILE = {
    "os.mkdir": b"cos\nmkdir\n(Vmarker\ntR.",
    "with protocol 4": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x06marker\x85R.",
    "by INST": b"(Vmarker\nios\nmkdir\n.",
    "by OBJ": b"(cos\nmkdir\nVmarker\no.",
    "by NEWOBJ": b"cos\nmkdir\nVmarker\n\x85\x81.",
    "eval": b"c__builtin__\neval\n(V__import__('os').mkdir('marker')\ntR.",
    "getattr": b"cbuiltins\ngetattr\n(cos\npath\nVmkdir\ntR(Vmarker\ntR.",
    "a dotted name": b"\x80\x04\x8c\x05posix\x8c\x0emkdir.__call__\x93\x8c\x06marker\x85R.",
    "a function's state": b"ctorch._utils\n_rebuild_tensor_v2\n}V_make\ncos\nmkdir\nsb(Vmarker\ntR.",
    "a function's slots": b"ctorch\nSize\n(N}V_make\ncos\nmkdir\nstb(Vmarker\ntR.",
    "a class's state": b"cos\nmkdir\n}V__call__\ncos\nmkdir\nsb(Vmarker\ntR.",
    "a tensor's type": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nmkdir\nN(Vmarker\ntNtR.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_a_pickle_names_is_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = with_pickle(HOSTILE[name], tmp_path / "x.pt")
    with contextlib.suppress(CheckpointError):
        load_foreign(path)
    assert not (tmp_path / "marker").exists()


def test_pickle_itself_would_have_run_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("os.mkdir", "with protocol 4", "by INST", "by OBJ", "eval"):
        pickle.loads(HOSTILE[name])
        (tmp_path / "marker").rmdir()


def test_an_object_that_runs_code_is_inert_amid_good_data(tmp_path: Path) -> None:
    told = loaded({"good": torch.ones(2), "evil": MakesFolder(tmp_path / "marker")}, tmp_path / "x.pt")
    assert torch.equal(told["good"].whole(), torch.ones(2))
    assert isinstance(told["evil"], Inert) and told["evil"].of.endswith(".mkdir")
    assert not (tmp_path / "marker").exists()


def test_modules_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text("import os; os.mkdir('marker')")
    path = with_pickle(b"chostile\nThing\n)R.", tmp_path / "x.pt")
    program = (
        "import sys; from pathlib import Path; from infinity.checkpoint.foreign_pickle import load_foreign\n"
        "print(load_foreign(Path(sys.argv[1])).of, 'hostile' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["hostile.Thing", "False"], done.stderr
    assert not (tmp_path / "marker").exists()


STORAGE = b"((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI4\ntQ"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (STORAGE + b"I0\n(I5\nt(I1\nttR.", "of shape (5,) in too few bytes"),
        (STORAGE + b"I1\n(I4\nt(I1\nttR.", "in too few bytes"),
        (STORAGE + b"I0\n(I2\nI2\nt(I1\nttR.", "in too few bytes"),
        (STORAGE + b"I0\n(L2000000000000L\nt(I0\nttR.", "repeats a few numbers"),
        (STORAGE + b"I-1\n(I4\nt(I1\nttR.", "invalid tensor"),
        (STORAGE + b"I0\n(I-4\nt(I1\nttR.", "(-4,) is no shape"),
        (STORAGE + b"I0\n(VX\nt(I1\nttR.", "('X',) is no shape"),
        (b"(I7\nI0\n(I4\nt(I1\nttR.", "invalid tensor"),
        (STORAGE.replace(b"V0\n", b"V../x\n") + b"I0\n(I4\nt(I1\nttR.", "no item named"),
        (STORAGE.replace(b"FloatStorage", b"OtherStorage") + b"I0\n(I4\nt(I1\nttR.", "unknown kind of storage"),
    ],
)
def test_tensors_that_cannot_be_are_refused(arguments: bytes, why: str, tmp_path: Path) -> None:
    path = with_pickle(b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt is damaged \(.*" + why.replace("(", r"\(").replace(")", r"\)")):
        load_foreign(path)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(CheckpointError, match=r"x\.pt is missing: copy the whole checkpoint"):
        load_foreign(path)
    torch.save({"x": torch.randn(1000)}, path)
    content = path.read_bytes()
    for end in (0, 1, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointError, match=r"x\.pt is cut off, or torch.save did not write it"):
            load_foreign(path)
    torch.save({"x": torch.randn(10)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"x\.pt is cut off, or torch.save did not write it"):
        load_foreign(path)
    (tmp_path / "link.pt").symlink_to(path)
    with pytest.raises(CheckpointError, match="symbolic link"):
        load_foreign(tmp_path / "link.pt")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps([1]))
        archive.writestr("x/byteorder", "big")
    with pytest.raises(CheckpointError, match="big-endian"):
        load_foreign(path)


SHARED_TUPLES = b")" + 60 * b"2\x86"  # each holds the one before twice
GROWING = {
    "lists shared sixty times": (b"]" + 60 * b"q\x010](h\x01h\x01e" + b".", "more than its size permits"),
    "tuples shared as a key": (b"}" + SHARED_TUPLES + b"Ns.", "more than its size permits"),
    "tuples shared as keys": (b"}(" + SHARED_TUPLES + b"Nu.", "more than its size permits"),
    "tuples shared in a dict": (b"(" + SHARED_TUPLES + b"Nd.", "more than its size permits"),
    "tuples shared in a set": (b"\x8f(" + SHARED_TUPLES + b"\x90.", "more than its size permits"),
    "tuples shared in a frozenset": (b"(" + SHARED_TUPLES + b"\x91.", "more than its size permits"),
    "tuples shared in an older set": (b"cbuiltins\nset\n(]" + SHARED_TUPLES + b"atR.", "more than its size permits"),
    "tuples shared as a storage": (SHARED_TUPLES + b"Q.", "not enough values|unknown kind"),
    "lists in lists": (5_000 * b"](" + 5_000 * b"e" + b".", "recursion|levels deep"),
    "numbers of one hash": (
        b"}(" + b"".join(b"\x8a\x0a" + ((2**61 - 1) * n).to_bytes(10, "little") + b"N" for n in range(9)) + b"u.",
        "key that is too large",
    ),
    "a byte array of 1 TiB": (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "EOFError"),
    "copies of a long text": (
        b"c_codecs\nencode\nq\x01(X\xa0\x86\x01\x00" + 100_000 * b"a" + b"tq\x02" + 10_000 * b"h\x01h\x02R" + b".",
        "more than its size permits",
    ),
    "5 000 classes": (b"".join(b"cmodule\nName%d\n0" % n for n in range(5000)) + b"N.", "more than 1000 classes"),
    "a name of 1 MB": (b"cmodule\n" + 1_000_000 * b"a" + b"\n.", "name of a class is too long"),
    "an extension": (b"\x82\x01.", "extension registry"),
}
"""Small pickles that take long, or much memory, if they are read as they ask for it."""


@contextlib.contextmanager
def within(seconds: float, nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        assert time.process_time() - began < seconds and tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", GROWING)
def test_time_and_memory_are_bounded_by_the_file(name: str, tmp_path: Path) -> None:
    pickled, why = GROWING[name]
    path = with_pickle(pickled, tmp_path / "x.pt")
    with within(10.0, 200 << 20), pytest.raises(CheckpointError, match=rf"x\.pt is damaged .*({why})"):
        load_foreign(path)


def test_a_memo_takes_what_is_in_it(tmp_path: Path) -> None:
    path = with_pickle(b"\x80\x02Nr\xff\xff\xff\x7f.", tmp_path / "x.pt")
    with within(10.0, 10 << 20):
        assert load_foreign(path) is None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("expanded tensors", "more than its size permits"),
        ("a compressed pickle", "not as torch.save writes it"),
        ("a storage beyond the file", "not as torch.save writes it"),
        ("200 000 dimensions", "more than 64 dimensions"),
    ],
)
def test_tensors_are_bounded_by_the_file(kind: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    if kind == "expanded tensors":
        torch.save([torch.zeros(1).expand(4_000_000) for _ in range(100)], path)
    elif kind == "a compressed pickle":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x/data.pkl", b"](" + 4_000_000 * b"]" + b"e.")
    else:
        shape = b"(" + 200_000 * b"K\x01" + b"t" if "dimensions" in kind else b"(J\x00\x00\x00\x10t"
        with_pickle(b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE + b"I0\n" + shape + b"(I1\nttR.", path)
        sizes = struct.pack("<II", 16, 16)
        assert sizes in path.read_bytes()
        if "beyond" in kind:
            path.write_bytes(path.read_bytes().replace(sizes, struct.pack("<II", 1 << 30, 1 << 30)))
    with within(10.0, 200 << 20), pytest.raises(CheckpointError, match=rf"x\.pt is damaged .*{why}"):
        load_foreign(path)


def test_a_file_that_shrinks_is_told(tmp_path: Path) -> None:
    stored = loaded(torch.randn(10000), tmp_path / "x.pt")
    os.truncate(tmp_path / "x.pt", 9000)
    with pytest.raises(CheckpointError, match=r"x\.pt became shorter while it was read"):
        stored.read()
    (tmp_path / "x.pt").unlink()
    with pytest.raises(CheckpointError, match=r"x\.pt can't be read"):
        stored.read()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_give_data_or_a_checkpoint_error(data: st.DataObject, tmp_path: Path) -> None:
    told = {"a": torch.ones(2), "b": [1, {"c": OrderedDict(x=torch.Size([1]))}], "d": argparse.Namespace(e=1)}
    torch.save(told, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        pickled = bytearray(archive.read("good/data.pkl"))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(pickled) - 1))
        pickled[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        load_foreign(with_pickle(bytes(pickled), tmp_path / "x.pt"))
