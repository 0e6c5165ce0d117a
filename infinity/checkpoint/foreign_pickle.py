"""Reads files that other programs saved with `torch.save`, and runs no code in them. Tensors stay in the file until
their elements are read. Any thread.

[Note: Pickles of other programs]
`torch.save` writes a zip archive: a pickle of everything but the elements of tensors, and a record for each storage.
Such a pickle names classes and functions to call. Here none is called: a few names that data needs (ordered dicts,
sizes, tensors) map to a stand-in of ours that makes plain data, all others to an `Inert`, which stores its arguments
and does nothing. No module is imported, so the program that wrote the file need not be installed. Reads are
bounded by the length of the file: see careful_pickle.py.
"""

from __future__ import annotations

import math
import os
import pickle
import reprlib
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from infinity.checkpoint.careful_pickle import CarefulUnpickler
from infinity.errors import CheckpointError, parsing
from infinity.store.files import open_regular
from infinity.store.foreign import parse_shape
from infinity.units import MIB

_PICKLE = "/data.pkl"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Header of a file in a zip archive: its mark, the lengths of its name and extra field (PKWARE's APPNOTE, 4.3.7)."""

_SHARED_MAX = 64
_REPEATED_BYTES_MAX = 64 * MIB
"""A file may expand by this factor, since tensors share elements, and by these bytes more for expanded tensors."""

_CLASSES_MAX = 1000
_NAME_LENGTH_MAX = 1000

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Inert:
    """A placeholder for an object of an unknown class: its data, without behaviour. of: module and name of the
    class."""

    of: ClassVar[str] = ""

    def __new__(cls, *arguments: Any, **named: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop an item, as those of lists and sets."""

    def append(self, item: Any) -> None:
        pass

    extend = add = append

    def attributes(self) -> Mapping[str, Any]:
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in a file. offset: of its first element in the file, in bytes. stride: in elements."""

    __slots__ = ("dtype", "offset", "path", "shape", "stride")
    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("a tensor has no other state")

    def __sizeof__(self) -> int:
        """Return the bytes that its elements take, for `weigh`."""
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, first: int = 0, numel: int | None = None) -> torch.Tensor:
        """Read elements from the index `first` on, flat. Raises CheckpointError if the file no longer holds them."""
        numel = self.numel - first if numel is None else numel
        if self.stride == _contiguous(self.shape):
            return self._read_bytes(first, numel)
        extent = self._read_bytes(0, _extent(self.shape, self.stride))
        return extent.as_strided(self.shape, self.stride).reshape(-1)[first : first + numel]

    def whole(self) -> torch.Tensor:
        return self.read().reshape(self.shape)

    def _read_bytes(self, first: int, numel: int) -> torch.Tensor:
        elements = torch.empty(numel, dtype=self.dtype)
        into = elements.view(torch.uint8).numpy().data
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset + first * self.dtype.itemsize)
                if file.readinto(into) < into.nbytes:
                    raise CheckpointError(f"{self.path} became shorter while it was read: start again")
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be read ({error}): copy it again") from None
        return elements


def load_foreign(path: Path) -> Any:
    """Load what `torch.save` wrote to a file: plain data with `PickledTensor` and `Inert` in it. Raises
    CheckpointError."""
    with parsing(f"{path} is damaged", "copy it again"):
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                content = _Archive(path, file.fileno(), archive)
                return _Unpickler(content).load()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: copy the whole checkpoint") from None
        except zipfile.BadZipFile:
            raise CheckpointError(f"{path} is cut off, or torch.save did not write it: copy it again") from None


class _Archive:
    def __init__(self, path: Path, file: int, archive: zipfile.ZipFile) -> None:
        self.path, self._file, self._archive = path, file, archive
        self.nbytes = os.fstat(file).st_size
        (self._prefix,) = (n[: -len(_PICKLE)] for n in archive.namelist() if n.endswith(_PICKLE) and n.count("/") == 1)
        if f"{self._prefix}/byteorder" in archive.namelist():
            with archive.open(f"{self._prefix}/byteorder") as byteorder:
                if byteorder.read(len("little") + 1) != b"little":
                    raise ValueError("its numbers are big-endian")
        self._place(_PICKLE)
        self.pickle = archive.read(f"{self._prefix}{_PICKLE}")

    def storage(self, key: str) -> tuple[int, int]:
        """Return the offset of a storage's bytes in the file, and their number."""
        if len(key) > _NAME_LENGTH_MAX:
            raise ValueError("the name of a storage is too long")
        return self._place(f"/data/{key}")

    def _place(self, name: str) -> tuple[int, int]:
        info = self._archive.getinfo(f"{self._prefix}{name}")
        header = os.pread(self._file, _LOCAL_HEADER.size, info.header_offset)
        mark, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        offset = info.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if mark != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED or offset + info.file_size > self.nbytes:
            raise ValueError(f"{info.filename} is not as torch.save writes it")
        return offset, info.file_size


class _Storage(NamedTuple):
    dtype: torch.dtype
    offset: int
    nbytes: int


class _Unpickler(CarefulUnpickler):
    def __init__(self, archive: _Archive) -> None:
        self._tensor_bytes_max = _SHARED_MAX * archive.nbytes + _REPEATED_BYTES_MAX
        super().__init__(archive.pickle, self._tensor_bytes_max)
        self._archive = archive
        self._inert: dict[str, type[Inert]] = {}
        self._stand_ins: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): _Dict,
            ("collections", "defaultdict"): lambda factory=None: _Dict(),
            ("torch", "Size"): lambda sizes: self.spend(tuple(sizes)),
            ("_codecs", "encode"): lambda text, coding="latin1": self.spend(str.encode(text, "latin1")),
            ("torch._utils", "_rebuild_tensor_v2"): self._make_tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, *flags: data,
            ("torch._tensor", "_rebuild_from_type_v2"): self._make_without_attributes,
        }
        for module in ("builtins", "__builtin__"):
            for kind in (set, frozenset):
                self._stand_ins[module, kind.__name__] = partial(self._make_set, kind)

    def find_class(self, module: str, name: str) -> Any:
        if len(module) + len(name) > _NAME_LENGTH_MAX:
            raise pickle.UnpicklingError("the name of a class is too long")
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (stand_in := self._stand_ins.get((module, name))) is not None:
            return stand_in
        full_name = f"{module}.{name}"
        if full_name not in self._inert:
            if len(self._inert) == _CLASSES_MAX:
                raise pickle.UnpicklingError(f"it names more than {_CLASSES_MAX} classes")
            self._inert[full_name] = type("Inert", (Inert,), {"of": full_name})
        return self._inert[full_name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it names an unknown kind of storage, {reprlib.repr(pid)}")
        return _Storage(dtype, *self._archive.storage(key))

    def _make_set(self, kind: Callable[[list[Any]], Any], members: Any = ()) -> Any:
        return self.spend(kind(self.checked_keys(members)))

    def _make_without_attributes(self, make: Any, kind: Any, arguments: Any, state: Any) -> Any:
        return make(*arguments) if any(make is stand_in for stand_in in self._stand_ins.values()) else None

    def _make_tensor(self, storage: Any, first: Any, shape: Any, stride: Any, *others: Any) -> PickledTensor:
        shape = parse_shape(shape)
        stride = tuple(islice(stride, len(shape) + 1))
        numbers = (first, *stride)
        if not isinstance(storage, _Storage) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise pickle.UnpicklingError("it holds an invalid tensor")
        nbytes = storage.dtype.itemsize
        if len(shape) != len(stride) or (first + _extent(shape, stride)) * nbytes > storage.nbytes:
            raise pickle.UnpicklingError(f"it holds a tensor of shape {shape} in too few bytes")
        if math.prod(shape) * nbytes > self._tensor_bytes_max:
            raise pickle.UnpicklingError(f"it holds a tensor of shape {shape} that repeats a few numbers")
        return PickledTensor(self._archive.path, storage.offset + first * nbytes, storage.dtype, shape, stride)


class _Dict(dict[Any, Any]):
    """A dict whose attributes, like `_metadata` of a state dict, are dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(size or 1 for size in shape[number + 1 :]) for number in range(len(shape)))


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last, these included."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0
