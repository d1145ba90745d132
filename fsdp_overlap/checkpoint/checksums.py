"""CRC-32 checksums of tensors and zip files, by the fastest library that is installed."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import io
import struct
import zipfile
from collections.abc import Callable
from typing import IO, Any, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

try:  # several times as fast; an optional dependency
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["BLOCK_BYTES", "ChecksumStream", "checksum_of", "crc32", "streams_work"]

BLOCK_BYTES = 256 << 10
"""Elements are read, written and checked in blocks of this size, which fits a core's cache. Each
thread that reads has one block beside its targets."""

_ZIP64_SIZE = 0xFFFFFFFF  # marks a size that is in the zip64 extra field


class ChecksumStream(io.RawIOBase):
    """Forwards the zip that one ``torch.save`` writes to ``target``, with checksums by
    :func:`crc32`.

    Until it is closed, ``torch.save`` computes none in this thread. In its zips a checksum follows
    each record, and all follow again in the directory at the end, so nothing needs to be buffered.

    Raises:
        ValueError: what is written is no such zip.
    """

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._next: Callable[[memoryview], memoryview] = self._header
        self._name = 0  # the bytes of a record's name and padding that are still to come
        self._has_data = False
        self._size = self._sum = 0  # of the record's data so far
        self._records: list[tuple[int, int]] = []  # sizes and checksums
        self._option = get_crc32_options()
        set_crc32_options(False)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")
        self._target.write(self._next(part))
        return len(part)

    def close(self) -> None:
        if not self.closed:
            set_crc32_options(self._option)
            self._target.close()
        super().close()

    def _header(self, part: memoryview) -> memoryview:
        if part[:4] == b"PK\x01\x02":
            self._next = lambda part: part
            return self._directory(part)
        flags, self._name, padding = _fields(part, b"PK\x03\x04", "<6xH18xHH")
        self._name += padding
        self._has_data = bool(flags & 8)  # then a descriptor follows
        self._size = self._sum = 0
        self._next = self._named
        return part

    def _named(self, part: memoryview) -> memoryview:
        self._name -= len(part)
        if not self._name:
            self._next = self._data
            if not self._has_data:
                self._end_record()
        return part

    def _data(self, part: memoryview) -> memoryview:
        width = (len(part) - 8) // 2
        sizes = self._size.to_bytes(8, "little")[:width] * 2  # compressed and not
        if len(part) in (16, 24) and part[:4] == b"PK\x07\x08" and part[8:] == sizes:
            part = _with(part, 4, self._sum)
            self._end_record()
            return part
        for start in range(0, len(part), BLOCK_BYTES):
            block = part[start : start + BLOCK_BYTES]
            self._sum = crc32(block, self._sum)
            self._target.write(block)
        self._size += len(part)
        return part[:0]

    def _end_record(self) -> None:
        self._records.append((self._size, self._sum))
        self._next = self._header

    def _directory(self, part: memoryview) -> memoryview:
        position = 0
        for size, checksum in self._records:
            at = part[position:]
            _, stated, *lengths = _fields(at, b"PK\x01\x02", "<20xLLHHH")
            if stated not in (size, _ZIP64_SIZE):
                raise ValueError(f"torch.save wrote {size:,} bytes of a record of {stated:,}")
            part = _with(part, position + 16, checksum)
            position += 46 + sum(lengths)
        if position != len(part):
            raise ValueError("torch.save wrote records that are not in its zip's directory")
        return part


@functools.cache
def streams_work() -> bool:
    """Return whether this torch saves as :class:`ChecksumStream` expects, and can turn off its
    checksums in one thread, as 2.11 cannot."""
    before = get_crc32_options()
    contextvars.copy_context().run(set_crc32_options, not before)
    if get_crc32_options() != before:
        set_crc32_options(before)
        return False
    file = io.BytesIO()
    stream = ChecksumStream(file)
    try:
        torch.save([torch.arange(3), torch.empty(0)], cast(IO[bytes], stream))
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except Exception:
        return False
    finally:
        stream.close()


def _fields(part: memoryview, start: bytes, form: str) -> tuple[int, ...]:
    if part[:4] != start:
        raise ValueError("torch.save did not write what follows in a zip")
    return struct.unpack_from(form, part)


def _with(part: memoryview, position: int, checksum: int) -> memoryview:
    changed = bytearray(part)
    changed[position : position + 4] = checksum.to_bytes(4, "little")
    return memoryview(changed)


def checksum_of(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the elements."""
    values = tensor.detach().contiguous().cpu()
    return crc32((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
