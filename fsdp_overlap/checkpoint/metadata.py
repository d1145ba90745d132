"""A checkpoint's ``.metadata``, checked against itself and against the files beside it."""

from __future__ import annotations

import hashlib
import os
import stat
from bisect import bisect_right, insort
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_overlap.checkpoint.entries import DTYPES, shape_of
from fsdp_overlap.checkpoint.errors import CheckpointError
from fsdp_overlap.checkpoint.pickles import Maker, Record, read_pickle, record

METADATA_FILE = ".metadata"
CHECKSUM_FILE = ".metadata.sha256"
"""Written by ours beside the metadata, which has no checksum of its own."""

_DCP = "torch.distributed.checkpoint"
_CLASSES = "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta"
_CLASSES += " TensorProperties TensorStorageMetadata"
_ADMITTED: dict[str, Any] = {
    **DTYPES,
    **{f"{_DCP}.metadata.{name}": record(name) for name in _CLASSES.split()},
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": record("_MEM_FORMAT_ENCODING"),
    f"{_DCP}.filesystem._StorageInfo": record("_StorageInfo"),
    "torch.Size": Maker(shape_of),
    "torch.serialization._get_layout": Maker(str),
    "collections.OrderedDict": Maker(dict),
    # Where the checkpoint was when it was written, which nobody reads.
    **{
        f"{module}.{name}": record("path")
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the checkpoint at ``folder``.

    Every tensor is covered exactly once by its chunks, and every chunk by an entry of a regular
    file in ``folder`` that is large enough for it and shares no byte with another entry.

    Raises:
        CheckpointError: it is not so, or the metadata is missing, damaged or no metadata.
    """
    path = folder / METADATA_FILE
    size = file_size(path)
    with path.open("rb") as file:
        _check_sum(folder, file)
        value = read_pickle(file, _ADMITTED, str(path))
        if file.tell() != size:
            raise CheckpointError(f"{path} is damaged: bytes are left after the end")
    try:
        metadata = _metadata(value)
        _check_entries(folder, metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (AttributeError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return metadata


def file_size(path: Path) -> int:
    """Bytes of the regular file at ``path``.

    Raises:
        CheckpointError: there is none.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; a complete checkpoint has it") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file, as those of a checkpoint are")
    return status.st_size


def _check_sum(folder: Path, file: BufferedReader) -> None:
    path = folder / CHECKSUM_FILE
    if not path.exists():
        return  # torch's own writer makes none
    if file_size(path) > 256:
        raise CheckpointError(f"{path} is no checksum")
    found = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    if path.read_bytes().strip() != found.encode():
        raise CheckpointError(
            f"{folder / METADATA_FILE} is damaged: its checksum is not that in {path.name} (if "
            "another writer has saved over this checkpoint, remove that file)"
        )


def _metadata(value: Any) -> Metadata:
    state = _state(value, "Metadata")
    tensors = {
        _text(fqn): _storage_type(item)
        for fqn, item in _typed(state["state_dict_metadata"], dict).items()
    }
    entries = {
        _index(index): _storage_info(info)
        for index, info in _typed(state["storage_data"], dict).items()
    }
    if len(entries) != len(state["storage_data"]):
        raise ValueError("two entries of one value")
    paths = state.get("planner_data")
    if paths is not None:
        for fqn, path in _typed(paths, dict).items():
            _check_path(fqn, path, tensors)
    metadata = Metadata(tensors, paths, entries)
    metadata.storage_meta = StorageMeta()
    metadata.version = state.get("version")
    return metadata


def _storage_type(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Record) and value.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(value, "TensorStorageMetadata")
    dtype = _typed(state["properties"], Record).state[0]
    if state["properties"].kind != "TensorProperties" or dtype not in DTYPES.values():
        raise ValueError("a tensor without a dtype")
    size = shape_of(state["size"])
    chunks = []
    for item in _typed(state["chunks"], list):
        chunk = _state(item, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(shape_of(chunk["offsets"]), shape_of(chunk["sizes"])))
    _check_tiles(size, chunks)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(value: Any) -> MetadataIndex:
    state = _state(value, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_text(state["fqn"]), None if offset is None else shape_of(offset))


def _storage_info(value: Any) -> _StorageInfo:
    state = _state(value, "_StorageInfo")
    if state.get("transform_descriptors"):
        raise CheckpointError(
            f"entries are transformed by {state['transform_descriptors']}, which is not supported"
        )
    name = _text(state["relative_path"])
    if name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise CheckpointError(f"file {name!r} is not in the checkpoint's folder")
    offset, length = shape_of((state["offset"], state["length"]))
    return _StorageInfo(name, offset, length)


def _check_path(fqn: Any, path: Any, tensors: dict[str, Any]) -> None:
    """A key's path in the nested state dict, as DCP flattens it."""
    if ".".join(map(str, _typed(path, tuple))) != fqn or fqn not in tensors:
        raise ValueError(f"{path!r} is not the path of a key")
    for step in path:
        # A list is filled up to its largest index.
        if type(step) not in (str, int) or (type(step) is int and not 0 <= step < len(tensors)):
            raise ValueError(f"{path!r} is not a path")


def _check_tiles(size: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> None:
    """Every element is in exactly one chunk."""
    for chunk in chunks:
        if len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size):
            raise ValueError(f"chunk {chunk} of a tensor of {tuple(size)}")
        if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError(f"chunk {chunk} reaches beyond the tensor of {tuple(size)}")
    filled = [chunk for chunk in chunks if prod(chunk.sizes)]
    if sum(prod(chunk.sizes) for chunk in filled) != prod(size):
        raise ValueError(f"chunks do not cover a tensor of {tuple(size)}")
    if not size:
        return
    # Boxes that end before the next one begins cannot overlap it: sweep the longest dimension.
    sweep = max(range(len(size)), key=lambda dim: size[dim])
    filled.sort(key=lambda chunk: chunk.offsets[sweep])
    active: list[tuple[int, int]] = []
    for i, chunk in enumerate(filled):
        del active[: bisect_right(active, (chunk.offsets[sweep], len(filled)))]
        for _, j in active:
            if _overlap(chunk, filled[j]):
                raise ValueError(f"chunks {chunk} and {filled[j]} overlap")
        insort(active, (chunk.offsets[sweep] + chunk.sizes[sweep], i))


def _overlap(first: ChunkStorageMetadata, second: ChunkStorageMetadata) -> bool:
    return all(
        a < b + n and b < a + m
        for a, m, b, n in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    )


def _check_entries(folder: Path, metadata: Metadata) -> None:
    """Every value has its entries, and every entry its bytes in a file."""
    needed: dict[MetadataIndex, int] = {}
    for fqn, item in metadata.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            needed[MetadataIndex(fqn)] = 0
            continue
        for chunk in item.chunks:
            numel = prod(chunk.sizes)
            index = MetadataIndex(fqn, chunk.offsets)
            needed[index] = max(needed.get(index, 0), numel * item.properties.dtype.itemsize)
    entries = metadata.storage_data
    for index, nbytes in needed.items():
        if index not in entries:
            raise ValueError(f"{index.fqn} has no entry at {index.offset}")
        if nbytes > entries[index].length:
            raise CheckpointError(
                f"{index.fqn} claims {nbytes:,} bytes of an entry of {entries[index].length:,}"
            )
    if unknown := entries.keys() - needed.keys():
        raise ValueError(f"entries of unknown values: {sorted(index.fqn for index in unknown)[:3]}")
    by_file: dict[str, list[_StorageInfo]] = {}
    for info in entries.values():
        by_file.setdefault(info.relative_path, []).append(info)
    for name, infos in by_file.items():
        size, end = file_size(folder / name), 0
        for info in sorted(infos, key=lambda info: info.offset):
            if info.offset < end:
                raise ValueError(f"entries of {name} overlap")
            end = info.offset + info.length
        if end > size:
            raise CheckpointError(f"{name} has {size:,} bytes of the {end:,} that were written")


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind != kind:
        raise ValueError(f"a {kind} was expected")
    return {} if value.state is None else _typed(value.state, dict)


def _typed(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {kind.__name__} was expected, not {value!r}")
    return value


def _text(value: Any) -> str:
    return str(_typed(value, str))
