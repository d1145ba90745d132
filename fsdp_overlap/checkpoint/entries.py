"""Read an entry of a ``.distcp`` file: what ``torch.save`` wrote for one tensor or value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from typing import Any

import torch

from fsdp_overlap.checkpoint.checksums import BLOCK_BYTES
from fsdp_overlap.checkpoint.files import CheckpointError, refuse_holes
from fsdp_overlap.checkpoint.unpickler import Global, Record, hashable, unpickle
from fsdp_overlap.checkpoint.values import ALLOWED, count, make_size, size_of
from fsdp_overlap.checkpoint.zip_records import find_records, is_memory_of, read_into

_MAX_DEPTH = 100  # of nested containers

# The dtype of each storage class.
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
class StoredBytes:
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

    storage: StoredBytes
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
        """Return the full tensor, on the CPU."""
        return self.view(self.storage.read(file))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor in ``flat``, the storage's bytes."""
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)

    def copy_box(
        self,
        file: BufferedReader,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Copy the box at ``offsets`` of shape ``lengths`` into ``target``, a block of rows at a
        time."""
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
        """Copy the rows of the part with the dimensions ``[dim:]``, which begins at element
        ``position`` of the storage."""
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
    """Return the value of the entry in bytes ``[start, start + length)`` of ``file``, with
    :class:`StoredTensor` in place of tensors. All checksums are compared, except, without
    ``verify``, those of the elements of tensors.

    Raises:
        CheckpointError: the entry contains something that no checkpoint needs.
        Exception: the entry is damaged.
    """
    return _build(file, start, length, verify, lambda tensor: tensor)


def read_value(file: BufferedReader, start: int, length: int) -> Any:
    """Return the value in bytes ``[start, start + length)`` of ``file`` as the user saved it.

    Raises:
        CheckpointError: as :func:`read_entry`.
        Exception: the entry is damaged, or no checkpoint holds such a value.
    """
    storages: dict[StoredBytes, torch.Tensor] = {}

    def read(tensor: StoredTensor) -> torch.Tensor:
        if tensor.storage not in storages:
            storages[tensor.storage] = tensor.storage.read(file)
        return tensor.view(storages[tensor.storage])

    return _build(file, start, length, True, read)


def _build(
    file: BufferedReader,
    start: int,
    length: int,
    verify: bool,
    convert: Callable[[StoredTensor], Any],
) -> Any:
    records = find_records(file, start, length)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("torch.save writes one data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    for name, record in records.items():
        if verify or not name.startswith(f"{folder}data/"):
            record.verify(file)
    order = records.get(folder + "byteorder")
    if order is not None and order.read(file) != sys.byteorder.encode():
        raise CheckpointError("it has the byte order of another kind of machine")

    def persistent_load(identity: Any) -> StoredBytes:
        kind, dtype, name, _, numel = identity
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(name, str):
            raise ValueError("a storage that is none")
        record = records.get(f"{folder}data/{name}")
        if record is None:
            raise ValueError("a storage that is not in the file")
        if count(numel) * dtype.itemsize != record.size:
            claimed = f"{numel:,} elements of {dtype}"
            raise ValueError(f"a storage of {record.size:,} bytes claims {claimed}")
        return StoredBytes(dtype, record.position, numel)

    record = records[pickles[0]]
    refuse_holes(file, record.position, record.size)
    value = unpickle(record.read(file), _ALLOWED, persistent_load)
    return _Builder(length, convert).build(value)


class _Builder:
    """Makes the values that a pickle describes. A shared one is made once: there may be more paths
    to it than can be followed."""

    def __init__(self, length: int, convert: Callable[[StoredTensor], Any]) -> None:
        self._convert = convert
        # A pickle could make many values of the same bytes. A genuine one has bytes for each value,
        # and makes some, such as arrays, of another value.
        self._left = 2 * length
        self._made: dict[int, Any] = {}

    def build(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, _SCALARS):
            return value
        if id(value) not in self._made:
            if depth > _MAX_DEPTH:
                raise ValueError(f"containers are nested deeper than {_MAX_DEPTH}")
            made = self._build(value, depth + 1)
            self._made[id(value)] = self._convert(made) if isinstance(made, StoredTensor) else made
        return self._made[id(value)]

    def _build(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            items = [(self.build(k, depth), self.build(v, depth)) for k, v in value.items()]
            return type(value)((hashable(k), v) for k, v in items)
        if isinstance(value, (list, tuple)):
            return type(value)([self.build(item, depth) for item in value])
        if isinstance(value, Record):
            made = value.make(
                *(
                    part if isinstance(part, StoredBytes) else self.build(part, depth)
                    for part in (value.state, *value.args)
                )
            )
            self._left -= size_of(made)
            if self._left < 0:
                raise ValueError("its values claim more bytes than it has")
            return made
        raise ValueError("something that is no value of a checkpoint")


def _make_tensor_v2(
    state: Any, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any
) -> StoredTensor:
    if not isinstance(storage, StoredBytes):
        raise ValueError("a tensor without a storage")
    grad, hooks, *metadata = rest
    return _make_tensor_v3(
        state, storage, offset, size, stride, grad, hooks, storage.dtype, *metadata
    )


def _make_tensor_v3(
    state: Any,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> StoredTensor:
    shape, strides = make_size(None, size), make_size(None, stride)
    if not isinstance(storage, StoredBytes) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a storage or a dtype")
    if metadata:
        raise CheckpointError("a view that conjugates or negates is refused; resolve it, then save")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of {len(shape)} dimensions with {len(strides)} strides")
    last = count(offset)
    if prod(shape):
        last += sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    if last * dtype.itemsize > storage.nbytes or storage.nbytes % dtype.itemsize:
        raise ValueError(f"a tensor of {tuple(shape)} does not fit its storage")
    return StoredTensor(storage, dtype, offset, tuple(shape), tuple(strides))


_ALLOWED: dict[str, Any] = {
    **ALLOWED,
    **_STORAGES,
    "torch._utils._rebuild_tensor_v2": Global(_make_tensor_v2),
    "torch._utils._rebuild_tensor_v3": Global(_make_tensor_v3),
    "torch._utils._rebuild_parameter": Global(lambda state, tensor, *_: tensor),
}
_SCALARS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
