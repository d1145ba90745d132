"""One entry of a ``.distcp`` file: what ``torch.save`` wrote for a tensor or another value."""

from __future__ import annotations

import io
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from typing import Any

import torch

from fsdp_overlap.checkpoint.checksums import BLOCK_BYTES
from fsdp_overlap.checkpoint.errors import CheckpointError
from fsdp_overlap.checkpoint.files import refuse_holes
from fsdp_overlap.checkpoint.pickles import Maker, Record, key, read_pickle
from fsdp_overlap.checkpoint.records import (
    Slice,
    check_sum,
    find_record,
    is_memory_of,
    read_into,
)
from fsdp_overlap.checkpoint.values import ADMITTED, nbytes_of

_MOST_DEEP = 100  # levels of containers in containers
_MOST_DIMS = 64


DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexDouble": torch.complex128,
        "ComplexFloat": torch.complex64,
    }.items()
}
# Dtypes without a storage class of their own use this one.
_STORAGES["torch.storage.UntypedStorage"] = torch.uint8


@dataclass(frozen=True)
class Bytes:
    """``numel`` elements of ``dtype`` from byte ``start`` of a file."""

    dtype: torch.dtype
    start: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, file: BufferedReader) -> torch.Tensor:
        flat = torch.empty(self.nbytes, dtype=torch.uint8)
        read_into(file, self.start, flat)
        return flat


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of ``storage``. ``offset`` and ``stride`` are in elements of ``dtype``."""

    storage: Bytes
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for n, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1 and step != expected:
                return False
            expected *= n
        return True

    def read(self, file: BufferedReader) -> torch.Tensor:
        """The whole tensor, on the CPU."""
        return self.view(self.storage.read(file))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in ``flat``, the storage's bytes."""
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)

    def copy_box(
        self,
        file: BufferedReader,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Copies the box that begins at ``offsets`` and has the shape ``lengths`` into ``target``,
        a block of rows at a time."""
        if not self.is_contiguous:  # DCP writes only plain tensors this way
            box = self.read(file)
            for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
                box = box.narrow(dim, offset, length)
            target.copy_(box)
            return
        if not self.size:
            target.copy_(self.read(file))
            return
        block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        self._copy_rows(file, block, 0, self.offset, offsets, lengths, target)

    def _copy_rows(
        self,
        file: BufferedReader,
        block: torch.Tensor,
        dim: int,
        position: int,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """``position``: where the part with the dimensions ``[dim:]`` begins, in elements of the
        storage."""
        inner = self.size[dim + 1 :]
        row = prod(inner)
        position += offsets[dim] * row
        itemsize = self.dtype.itemsize
        if tuple(lengths[dim + 1 :]) == inner and is_memory_of(target, self.dtype):
            at = self.storage.start + position * itemsize
            read_into(file, at, target.view(-1).view(torch.uint8))
            return
        if row * itemsize > BLOCK_BYTES:
            for i in range(lengths[dim]):
                at = position + i * row
                self._copy_rows(file, block, dim + 1, at, offsets, lengths, target[i])
            return
        most = max(1, BLOCK_BYTES // max(1, row * itemsize))
        for i in range(0, lengths[dim], most):
            rows = min(most, lengths[dim] - i)
            part = block[: rows * row * itemsize]
            read_into(file, self.storage.start + (position + i * row) * itemsize, part)
            values = part.view(self.dtype).view(rows, *inner)
            for d, (offset, length) in enumerate(
                zip(offsets[dim + 1 :], lengths[dim + 1 :], strict=True), start=1
            ):
                values = values.narrow(d, offset, length)
            target[i : i + rows].copy_(values)


def read_entry(file: BufferedReader, start: int, length: int, verify: bool = True) -> Any:
    """The value of the entry in bytes ``[start, start + length)`` of ``file``, with
    :class:`StoredTensor` in place of tensors. Reads the whole entry and compares its checksums;
    without ``verify``, the elements of tensors are neither read nor compared.

    Raises:
        CheckpointError: the entry holds something that no checkpoint needs.
        Exception: the entry is damaged.
    """
    with zipfile.ZipFile(Slice(file, start, length)) as archive:
        records = archive.infolist()
    infos = {info.filename: info for info in records}
    if len(infos) != len(records):
        raise ValueError("two records of one name")
    # Overlapping records would be read and checked again and again.
    if sum(info.file_size for info in records) > length:
        raise ValueError(f"its records claim more bytes than its {length:,}")
    pickles = [name for name in infos if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("torch.save writes one data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    positions = {}
    for name, info in infos.items():
        positions[name] = find_record(file, start, length, info)
        if verify or not name.startswith(f"{folder}data/"):
            check_sum(file, positions[name], info)
    order = folder + "byteorder"
    if order in infos:
        file.seek(positions[order])
        if file.read(min(infos[order].file_size, 16)) != sys.byteorder.encode():
            raise CheckpointError("it has the byte order of another kind of machine")

    def storage(identity: Any) -> Bytes:
        kind, dtype, name, _, numel = identity
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(name, str):
            raise ValueError("a storage that is none")
        name = f"{folder}data/{name}"
        if name not in infos:
            raise ValueError("a storage that is not in the file")
        size = infos[name].file_size
        if _count(numel) * dtype.itemsize != size:
            raise ValueError(f"a storage of {size:,} bytes claims {numel:,} elements of {dtype}")
        return Bytes(dtype, positions[name], numel)

    position, size = positions[pickles[0]], infos[pickles[0]].file_size
    refuse_holes(file, position, size)
    file.seek(position)
    return read_pickle(io.BytesIO(file.read(size)), size, _ADMITTED, storage)


def read_value(file: BufferedReader, start: int, length: int) -> Any:
    """Return the value in bytes ``[start, start + length)`` of ``file`` as the user saved it.

    Raises:
        CheckpointError: as :func:`read_entry`.
        Exception: the entry is damaged, or no checkpoint holds such a value.
    """
    return _Plain(file, length).of(read_entry(file, start, length))


class _Plain:
    """Converts each shared value once and keeps it shared: following every path to it might never
    end."""

    def __init__(self, file: BufferedReader, length: int) -> None:
        self.file = file
        # A pickle could have many values made of the same bytes. They are in it once for each, and
        # there are two of those that are made of others, such as arrays.
        self.left = 2 * length
        self.made: dict[int, Any] = {}
        self.storages: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if id(value) not in self.made:
            self.made[id(value)] = self._of(value, depth)
        return self.made[id(value)]

    def _of(self, value: Any, depth: int) -> Any:
        if depth > _MOST_DEEP:
            raise ValueError(f"containers are nested deeper than {_MOST_DEEP}")
        if isinstance(value, StoredTensor):
            place = (value.storage.start, value.storage.nbytes)
            if place not in self.storages:
                self.storages[place] = value.storage.read(self.file)
            return value.view(self.storages[place])
        if isinstance(value, dict):
            items = [(self.of(k, depth + 1), self.of(v, depth + 1)) for k, v in value.items()]
            return type(value)(items)
        if isinstance(value, Record):
            made = value.kind(*(self.of(part, depth + 1) for part in (value.state, *value.args)))
            self.left -= nbytes_of(made)
            if self.left < 0:
                raise ValueError("its values claim more bytes than it has")
            return made
        if isinstance(value, (list, tuple, set, frozenset)):
            return type(value)([self.of(item, depth + 1) for item in value])
        raise ValueError("something that is no value of a checkpoint")


def shape_of(value: Any) -> torch.Size:
    """A pickle's ``value`` as a shape."""
    if not isinstance(value, tuple) or len(value) > _MOST_DIMS:
        raise ValueError(
            f"a {type(value).__name__} is no shape, or none of {_MOST_DIMS} dimensions"
        )
    return torch.Size([_count(n) for n in value])


def _tensor(dtype: torch.dtype, storage: Any, offset: Any, size: Any, stride: Any) -> StoredTensor:
    shape, strides = shape_of(size), shape_of(stride)
    if not isinstance(storage, Bytes) or len(shape) != len(strides):
        raise ValueError("a tensor that is none")
    last = _count(offset)
    if prod(shape):
        last += sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    if last * dtype.itemsize > storage.nbytes or storage.nbytes % dtype.itemsize:
        raise ValueError(f"a tensor of {tuple(shape)} does not fit its storage")
    return StoredTensor(storage, dtype, offset, tuple(shape), tuple(strides))


def _rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, flags: Any = None
) -> StoredTensor:
    if not isinstance(storage, Bytes):
        raise ValueError("a tensor without a storage")
    return _rebuild_tensor_v3(storage, offset, size, stride, _grad, _hooks, storage.dtype, flags)


def _rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    flags: Any = None,
) -> StoredTensor:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    if flags:
        raise CheckpointError("a view that conjugates or negates is refused; resolve it, then save")
    return _tensor(dtype, storage, offset, size, stride)


def _device(kind: Any, index: Any = None) -> torch.device:
    if not isinstance(kind, str) or (index is not None and not 0 <= _count(index) < 1 << 7):
        raise ValueError("a device that is none")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _set(items: Any) -> set[Any]:
    """Empties the list: else a pickle could have the same items copied at every few bytes."""
    if not isinstance(items, list):
        raise ValueError("a set of what is no list")
    made = set(map(key, items))
    items.clear()
    return made


def _frozenset(items: Any) -> frozenset[Any]:
    return frozenset(_set(items))


def _complex(real: Any, imaginary: Any) -> complex:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise ValueError("a complex number of what are no numbers")
    return complex(real, imaginary)


# What torch.save writes for tensors and plain values, by the names in its pickles.
_ADMITTED: dict[str, Any] = {
    **DTYPES,
    **_STORAGES,
    "torch._utils._rebuild_tensor_v2": Maker(_rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v3": Maker(_rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": Maker(lambda tensor, *_: tensor),
    "torch.Size": Maker(shape_of),
    "torch.device": Maker(_device),
    "collections.OrderedDict": Maker(lambda: OrderedDict()),
    "__builtin__.set": Maker(_set),  # Python 2's name, which pickle protocol 2 writes
    "__builtin__.frozenset": Maker(_frozenset),
    "__builtin__.complex": Maker(_complex),
    **ADMITTED,
}
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        shown = f"{value:,}" if type(value) is int else f"a {type(value).__name__}"
        raise ValueError(f"{shown} is no number of elements")
    return value
