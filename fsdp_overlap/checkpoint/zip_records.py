"""Find, verify and read the records of zips within a file."""

from __future__ import annotations

import ctypes
import io
import zipfile
from collections.abc import Iterator
from io import BufferedReader
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from fsdp_overlap.checkpoint import checksums
from fsdp_overlap.checkpoint.files import CheckpointError

_MAX_DIRECTORY_BYTES = 16 << 20  # a record takes about a hundred
_LOCAL_HEADER = 30  # bytes, before a record's name and extra field


class ZipRecord(NamedTuple):
    """A record of a zip, whose bytes begin at ``position`` of the file."""

    name: str
    position: int
    size: int
    crc: int

    def verify(self, file: BufferedReader) -> None:
        """Compare the record with its checksum.

        Raises:
            ValueError: it does not match.
        """
        file.seek(self.position)
        crc = 0
        for block in _blocks(file, self.size):
            crc = checksums.crc32(block, crc)
        if crc != self.crc:
            raise ValueError(f"the checksum of record {self.name[:100]!r} does not match")

    def read(self, file: BufferedReader) -> bytes:
        """Return all bytes of the record."""
        file.seek(self.position)
        return file.read(self.size)


def find_records(file: BufferedReader, start: int, length: int) -> dict[str, ZipRecord]:
    """Return the records of the zip in bytes ``[start, start + length)`` of ``file``, by name.

    Raises:
        ValueError: records are compressed, overlap or are not all within the zip.
    """
    with zipfile.ZipFile(_Slice(file, start, length)) as archive:
        infos = archive.infolist()
    # Overlapping records would be read and checked again and again.
    if sum(info.file_size for info in infos) > length:
        raise ValueError(f"its records claim more bytes than its {length:,}")
    records = {info.filename: _find_record(file, start, length, info) for info in infos}
    if len(records) != len(infos):
        raise ValueError("two records of one name")
    return records


def _find_record(file: BufferedReader, start: int, length: int, info: zipfile.ZipInfo) -> ZipRecord:
    name = info.filename[:100]
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise ValueError(f"record {name!r} is compressed")
    position = start + info.header_offset + _LOCAL_HEADER
    if info.header_offset < 0 or position > start + length:
        raise ValueError(f"record {name!r} lies outside its entry")
    file.seek(position - _LOCAL_HEADER)
    header = file.read(_LOCAL_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"record {name!r} has no header")
    position += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if position + info.file_size > start + length:
        raise ValueError(f"record {name!r} reaches beyond its entry")
    return ZipRecord(info.filename, position, info.file_size, info.CRC)


def _blocks(file: BufferedReader, size: int) -> Iterator[memoryview]:
    """Yield the next ``size`` bytes in blocks, all in the same memory."""
    block = memoryview(bytearray(min(size, checksums.BLOCK_BYTES)))
    while size:
        count = file.readinto(block[: min(size, checksums.BLOCK_BYTES)])
        if not count:
            raise CheckpointError(f"{file.name!s} ends early")
        yield block[:count]
        size -= count


def is_memory_of(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``target``'s memory can be read from a file of elements of ``dtype``."""
    plain = target.is_cpu and target.dtype == dtype and target.is_contiguous()
    return plain and not target.is_conj() and not target.is_neg()


def read_into(file: BufferedReader, position: int, target: torch.Tensor) -> None:
    """Fill ``target``, contiguous bytes on the CPU, from ``position`` of ``file`` on."""
    increment_version(target)  # so that a save that reads it meanwhile sees this edit
    file.seek(position)
    memory = memoryview((ctypes.c_char * target.numel()).from_address(target.data_ptr())).cast("B")
    while memory:
        count = file.readinto(memory)
        if not count:
            raise CheckpointError(f"{file.name!s} ends early")
        memory = memory[count:]


class _Slice(io.RawIOBase):
    """A part of a file, for reading."""

    def __init__(self, file: BufferedReader, start: int, length: int) -> None:
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

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_DIRECTORY_BYTES:  # which would be allocated, however short the file is
            raise ValueError(f"its directory claims {size:,} bytes")
        return super().read(size) or b""

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view[:count])
        self._position += count
        return count
