"""The headers of safetensors files, and the index of several files, as transformers writes them.

Source: https://huggingface.co/docs/safetensors/index#format. A file begins with the length of the
header in eight bytes, little-endian, and the header: JSON that names each tensor's dtype, shape and
range of the bytes that follow, without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from fsdp_overlap.checkpoint.files import CheckpointError, refusing

INDEX = "model.safetensors.index.json"
"""The name of the index of several files."""

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""The format's names of torch's dtypes."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_MAX_HEADER = 100_000_000
"""Bytes. The format's limit."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. Its elements begin at byte ``start`` of the file, in row-major order."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SafetensorsFile:
    """The content of a file's header. ``identity`` changes when the file is replaced or written."""

    path: Path
    tensors: dict[str, FileTensor]
    metadata: dict[str, str]
    identity: tuple[int, ...] = field(repr=False)


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the start of a file of ``tensors``, each a name, a dtype and a shape, in order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for name, dtype, shape in tensors:
        stop = start + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def identity_of(file: int | Path) -> tuple[int, ...]:
    """Return what changes when a file, given by path or descriptor, is replaced or written: device,
    inode, size and time of the last write."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_header(path: Path) -> SafetensorsFile:
    """Return the content of the header of the file at ``path``.

    Raises:
        CheckpointError: there is no such file, it is cut off, or its header is damaged.
    """
    try:
        with path.open("rb") as file, refusing(str(path)):
            identity = identity_of(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER:
                raise ValueError(f"its header claims {length:,} bytes")
            text = file.read(length)
            if len(text) < length:
                raise ValueError("it is cut off within the header")
            return _parsed(path, json.loads(text), 8 + length, identity)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def _parsed(
    path: Path, entries: dict[str, Any], start: int, identity: tuple[int, ...]
) -> SafetensorsFile:
    metadata = entries.pop("__metadata__", {})
    size = identity[2]
    tensors: dict[str, FileTensor] = {}
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        if not all(type(number) is int for number in (first, last, *entry["shape"])):
            raise ValueError(f"shape and offsets of {name!r} are {entry}")
        dtype = TORCH_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name!r} is of dtype {entry['dtype']}, which torch does not have")
        tensor = FileTensor(name, path, dtype, tuple(entry["shape"]), start + first)
        if first != expected or last - first != tensor.nbytes or min(tensor.shape, default=0) < 0:
            raise ValueError(f"{name!r} has shape {list(tensor.shape)} and bytes {first} to {last}")
        tensors[name], expected = tensor, last
    if start + expected != size:
        cut_off = "it is cut off: " if size < start + expected else ""
        raise ValueError(
            f"{cut_off}it has {size:,} bytes, and its header says {start + expected:,}"
        )
    return SafetensorsFile(path, tensors, metadata, identity)


def find_files(path: Path) -> list[Path]:
    """Return the files of weights at ``path``: the file itself, those that an index at ``path`` or
    in the folder names, or all of the folder.

    Raises:
        CheckpointError: there is no file, or the index is damaged.
    """
    if path.is_dir():
        if (path / INDEX).exists():
            return find_files(path / INDEX)
        if files := sorted(path.glob("*.safetensors")):
            return files
        raise CheckpointError(f"{path} has no file *.safetensors")
    if path.name.endswith(".index.json"):
        with refusing(str(path)):
            names = json.loads(path.read_text())["weight_map"].values()
            if any(os.path.basename(name) != name for name in names):
                raise ValueError("it names files outside of its folder")
            return [path.with_name(name) for name in dict.fromkeys(names)]
    return [path]
