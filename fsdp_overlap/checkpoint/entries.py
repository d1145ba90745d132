"""One entry of a ``.distcp`` file: what ``torch.save`` wrote of a tensor or of another value."""

from __future__ import annotations

import ctypes
import io
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch

from fsdp_overlap.checkpoint.errors import CheckpointError
from fsdp_overlap.checkpoint.pickles import Maker, Record, read_pickle, record

BLOCK_BYTES = 4 << 20
"""What reading holds in memory beside its targets."""

_LOCAL_HEADER = 30  # bytes, before a record's name and extra field


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
# The storage of every dtype that has none of its own.
_STORAGES["torch.storage.UntypedStorage"] = torch.uint8


@dataclass(frozen=True)
class Bytes:
    """``numel`` elements of ``dtype`` from byte ``start`` of a file."""

    dtype: torch.dtype
    start: int
    numel: int


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of ``storage``; ``offset`` and ``stride`` in elements of ``dtype``."""

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

    def read(self, file: BinaryIO) -> torch.Tensor:
        """The whole tensor, on the CPU."""
        flat = torch.empty(self.storage.numel * self.storage.dtype.itemsize, dtype=torch.uint8)
        _read_into(file, self.storage.start, flat)
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)

    def copy_box(
        self,
        file: BinaryIO,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Copies the box at ``offsets`` of ``lengths`` into ``target``, a block of rows at a
        time."""
        if not self.is_contiguous:  # which DCP writes of plain tensors only
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
        file: BinaryIO,
        block: torch.Tensor,
        dim: int,
        position: int,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """``position``: the element of the storage at which the tensor ``[dim:]`` begins."""
        inner = self.size[dim + 1 :]
        row = prod(inner)
        position += offsets[dim] * row
        itemsize = self.dtype.itemsize
        if row * itemsize > BLOCK_BYTES:
            for i in range(lengths[dim]):
                at = position + i * row
                self._copy_rows(file, block, dim + 1, at, offsets, lengths, target[i])
            return
        most = max(1, BLOCK_BYTES // max(1, row * itemsize))
        for i in range(0, lengths[dim], most):
            rows = min(most, lengths[dim] - i)
            part = block[: rows * row * itemsize]
            _read_into(file, self.storage.start + (position + i * row) * itemsize, part)
            values = part.view(self.dtype).view(rows, *inner)
            for d, (offset, length) in enumerate(
                zip(offsets[dim + 1 :], lengths[dim + 1 :], strict=True), start=1
            ):
                values = values.narrow(d, offset, length)
            target[i : i + rows].copy_(values)


def read_entry(file: BinaryIO, start: int, length: int, where: str) -> Any:
    """The value of the entry in bytes ``[start, start + length)`` of ``file``, with
    :class:`StoredTensor` in place of tensors. Reads all of it, to compare checksums.

    Raises:
        CheckpointError: the entry is damaged, or holds what no checkpoint needs.
    """
    try:
        return _read_entry(file, start, length, where)
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, OverflowError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from None


def _read_entry(file: BinaryIO, start: int, length: int, where: str) -> Any:
    with zipfile.ZipFile(_Slice(file, start, length)) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        if len(infos) != len(archive.infolist()):
            raise CheckpointError(f"{where} is damaged: two records of one name")
        positions = {name: _check_record(file, start, length, info) for name, info in infos.items()}
        pickles = [name for name in infos if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{where} is not what torch.save writes: no data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if archive.read(folder + "byteorder").decode() != sys.byteorder:
            raise CheckpointError(f"{where} has the byte order of another kind of machine")

        def storage(identity: Any) -> Bytes:
            kind, dtype, key, _, numel = identity
            name = f"{folder}data/{key}"
            if kind != "storage" or not isinstance(dtype, torch.dtype) or name not in infos:
                raise ValueError("a storage that is not in the file")
            if _count(numel) * dtype.itemsize != infos[name].file_size:
                raise ValueError(
                    f"a storage of {infos[name].file_size:,} bytes claims {numel:,} elements of "
                    f"{dtype}"
                )
            return Bytes(dtype, positions[name], numel)

        return read_pickle(io.BytesIO(archive.read(pickles[0])), _ADMITTED, where, storage)


def plain_value(value: Any, file: BinaryIO, where: str) -> Any:
    """``value`` of an entry with tensors read from ``file``, as the user saved it."""
    if isinstance(value, StoredTensor):
        return value.read(file).clone()
    if isinstance(value, dict):
        return {plain_value(k, file, where): plain_value(v, file, where) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        items = [plain_value(item, file, where) for item in value]
        return torch.Size(items) if isinstance(value, torch.Size) else type(value)(items)
    if isinstance(value, Record) and value.kind == "device":
        return torch.device(*value.args)
    if isinstance(value, (bool, int, float, str, bytes, torch.dtype)) or value is None:
        return value
    raise CheckpointError(f"{where} holds something that is no value of a checkpoint")


def shape_of(value: Any) -> torch.Size:
    """``value``, of a pickle, as a shape."""
    if not isinstance(value, tuple):
        raise ValueError(f"{value!r} is not a shape")
    return torch.Size([_count(n) for n in value])


def _tensor(dtype: torch.dtype, storage: Any, offset: Any, size: Any, stride: Any) -> StoredTensor:
    shape, strides = shape_of(size), shape_of(stride)
    if not isinstance(storage, Bytes) or len(shape) != len(strides):
        raise ValueError("a tensor that is none")
    last = _count(offset)
    if prod(shape):
        last += sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    if last * dtype.itemsize > storage.numel * storage.dtype.itemsize:
        raise ValueError(f"a tensor of {tuple(shape)} reaches beyond its storage")
    return StoredTensor(storage, dtype, offset, tuple(shape), tuple(strides))


def _rebuild_tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> StoredTensor:
    return _tensor(storage.dtype, storage, offset, size, stride)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> StoredTensor:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    return _tensor(dtype, storage, offset, size, stride)


# What torch.save writes of tensors and plain values, by the names that it gives them.
_ADMITTED: dict[str, Any] = {
    **DTYPES,
    **_STORAGES,
    "torch._utils._rebuild_tensor_v2": Maker(_rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v3": Maker(_rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": Maker(lambda tensor, *_: tensor),
    "torch.Size": Maker(shape_of),
    "torch.device": record("device"),
    "collections.OrderedDict": Maker(dict),
}


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of elements")
    return value


def _check_record(file: BinaryIO, start: int, length: int, info: zipfile.ZipInfo) -> int:
    """Where in ``file`` the record's bytes begin, once they have the checksum that it names."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise zipfile.BadZipFile(f"record {info.filename} is compressed")
    file.seek(start + info.header_offset)
    header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"record {info.filename} has no header")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    position = start + info.header_offset + _LOCAL_HEADER + names
    if position + info.file_size > start + length:
        raise zipfile.BadZipFile(f"record {info.filename} reaches beyond its entry")
    file.seek(position)
    checksum = 0
    for part in _parts(file, info.file_size):
        checksum = zlib.crc32(part, checksum)
    if checksum != info.CRC:
        raise zipfile.BadZipFile(f"the checksum of {info.filename} does not match")
    return position


def _parts(file: BinaryIO, size: int) -> Iterator[memoryview]:
    """The next ``size`` bytes, a block at a time in the same memory."""
    block = memoryview(bytearray(min(size, BLOCK_BYTES)))
    while size:
        count = file.readinto(block[: min(size, BLOCK_BYTES)])  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the file ends early")
        yield block[:count]
        size -= count


def _read_into(file: BinaryIO, position: int, target: torch.Tensor) -> None:
    """Fills ``target``, contiguous bytes on the CPU, from ``position`` on."""
    file.seek(position)
    memory = memoryview((ctypes.c_char * target.numel()).from_address(target.data_ptr())).cast("B")
    while memory:
        count = file.readinto(memory)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the file ends early")
        memory = memory[count:]


class _Slice(io.RawIOBase):
    """A part of a file, for reading."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view[:count])  # type: ignore[attr-defined]
        self._position += count
        return count
