"""A checkpoint's ``.metadata``, checked against itself and against the files beside it."""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from io import BufferedReader
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_overlap.checkpoint.files import (
    CheckpointError,
    file_size,
    local_path,
    opened,
    refuse_holes,
    refusing,
)
from fsdp_overlap.checkpoint.unpickler import Global, Record, unpickle
from fsdp_overlap.checkpoint.values import DTYPES, checked, make_size
from fsdp_overlap.torch_internals import StorageInfo

METADATA_FILE = ".metadata"
CHECKSUM_FILE = ".metadata.sha256"
"""``SafeFileSystemWriter`` writes it, because the metadata has no checksum of its own."""

_MAX_OVERHEAD = 1 << 20  # bytes of a tensor's entry beyond those of the tensor
_MAX_CUTS = 8  # dimensions along which a tensor may be cut
_MAX_PATH_LENGTH = 100  # keys of a path
_MAX_GAPS = 1 << 20  # list items without a value
_MAX_NAME_LENGTH = 255  # characters; file systems have the same limit

_DCP = "torch.distributed.checkpoint"
_ALLOWED: dict[str, Any] = {
    **DTYPES,
    "collections.OrderedDict": Global(OrderedDict),
    "torch.Size": Global(torch.Size),
    **{
        f"{_DCP}.metadata.{kind.__name__}": Global(kind)
        for kind in (
            *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
            *(TensorProperties, TensorStorageMetadata),
        )
    },
    f"{_DCP}.filesystem._StorageInfo": Global(StorageInfo),
    # Not used: memory formats, layouts, and the path that was written to.
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": Global(object),
    "torch.serialization._get_layout": Global(object),
    **{
        f"{module}.{name}": Global(object)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """Return the metadata of the checkpoint at ``folder``, a path or a URL as ``file:///mnt/a``.

    The chunks of every tensor cover it exactly once, and every chunk has an entry in a regular file
    in ``folder``, which is large enough for it and shares no byte with another entry.

    Raises:
        CheckpointError: this does not hold, or the metadata is missing or damaged.
        ValueError: ``folder`` is a URL of other storage.
    """
    folder = local_path(folder)
    path = folder / METADATA_FILE
    if not path.exists() and any(folder.glob(f"__*{METADATA_FILE}")):
        raise CheckpointError(
            f"{folder} was saved with use_collectives=False: ranks have metadata of their own, "
            "which torch's FileSystemReader loads"
        )
    with opened(path) as file, refusing(str(path)):
        size = file_size(path)
        refuse_holes(file, 0, size)
        _check_digest(folder, file)
        metadata = _metadata(unpickle(file.read(size), _ALLOWED))
        _check_entries(folder, metadata)
    return metadata


@functools.cache
def can_copy(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch can copy a tensor of ``source`` into one of ``target``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.empty(1, dtype=target).copy_(torch.empty(1, dtype=source))
        except (RuntimeError, NotImplementedError):
            return False
    return True


def _check_digest(folder: Path, file: BufferedReader) -> None:
    path = folder / CHECKSUM_FILE
    if not os.path.lexists(path):
        return  # torch's own writer writes no checksum
    if file_size(path) > 256:
        raise CheckpointError(f"{path.name} is no checksum")
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    if path.read_bytes().strip() != digest.encode():
        raise CheckpointError(
            f"it is damaged: its checksum is not that in {path.name} (if another writer has saved "
            "over this checkpoint, remove that file)"
        )


def _metadata(value: Any) -> Metadata:
    state = _state_of(value, Metadata)
    tensors = {
        checked(fqn, str): _storage_metadata(item)
        for fqn, item in checked(state["state_dict_metadata"], dict).items()
    }
    entries = {
        _index(index): _storage_info(info)
        for index, info in checked(state["storage_data"], dict).items()
    }
    if len(entries) != len(state["storage_data"]):
        raise ValueError("two entries of one value")
    paths = state.get("planner_data")
    if paths is not None:
        check_paths(checked(paths, dict), tensors)
    metadata = Metadata(tensors, paths, entries)
    metadata.storage_meta = StorageMeta()
    version = state.get("version")
    metadata.version = version if isinstance(version, str) else None
    return metadata


def _storage_metadata(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Record) and value.make is BytesStorageMetadata:
        return BytesStorageMetadata()
    state = _state_of(value, TensorStorageMetadata)
    dtype, *_ = _state_of(state["properties"], TensorProperties, tuple)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a dtype")
    size = _size(state["size"])
    chunks = []
    for item in checked(state["chunks"], list):
        chunk = _state_of(item, ChunkStorageMetadata)
        chunks.append(ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])))
    _check_chunks(size, chunks)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _size(value: Any) -> torch.Size:
    if isinstance(value, Record) and value.make is torch.Size:
        (value,) = value.args
    return make_size(None, value)


def _index(value: Any) -> MetadataIndex:
    state = _state_of(value, MetadataIndex)
    offset = state.get("offset")
    return MetadataIndex(checked(state["fqn"], str), None if offset is None else _size(offset))


def _storage_info(value: Any) -> StorageInfo:
    state = _state_of(value, StorageInfo)
    if state.get("transform_descriptors"):
        raise CheckpointError("entries are transformed (compressed, say): not supported")
    name = checked(state["relative_path"], str)
    if (
        name != os.path.basename(name)
        or name in ("", ".", "..")
        or "\\" in name
        or "\0" in name
        or len(name) > _MAX_NAME_LENGTH
    ):
        name = name[:_MAX_NAME_LENGTH]
        raise CheckpointError(f"file {name!r} is not in the checkpoint's folder")
    offset, length = _size((state["offset"], state["length"]))
    return StorageInfo(name, offset, length)


def check_paths(paths: Mapping[Any, Any], tensors: Mapping[str, Any]) -> None:
    """Check the paths of the flattened keys in the nested state dict.

    Raises:
        ValueError: a path is malformed or too long, or would make a load fill long lists.
    """
    lengths: dict[tuple[Any, ...], int] = {}  # of lists, which DCP fills up to the last item
    for fqn, path in paths.items():
        if len(checked(path, tuple)) > _MAX_PATH_LENGTH:
            raise ValueError(f"a key has a path of more than {_MAX_PATH_LENGTH} steps")
        if any(type(step) not in (str, int) for step in path):
            raise ValueError("a key has a path that is none")
        if ".".join(map(str, path)) != checked(fqn, str) or fqn not in tensors:
            raise ValueError(f"{fqn!r} has the path of another key")
        for i, step in enumerate(path):
            if type(step) is int:
                if step < 0:
                    raise ValueError(f"{fqn!r} has a negative index")
                lengths[path[:i]] = max(lengths.get(path[:i], 0), step + 1)
    if sum(lengths.values()) > len(paths) * _MAX_PATH_LENGTH + _MAX_GAPS:
        raise ValueError(f"lists of {sum(lengths.values()):,} items for {len(paths):,} values")


def _check_chunks(size: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> None:
    """Check that every element is in exactly one chunk."""
    for chunk in chunks:
        if len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size):
            raise ValueError(f"chunk {chunk} of a tensor of {tuple(size)}")
        if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError(f"chunk {chunk} reaches beyond the tensor of {tuple(size)}")
    boxes = [(chunk.offsets, chunk.sizes, 1) for chunk in chunks if prod(chunk.sizes)]
    cut = [dim for dim, n in enumerate(size) if any(box[1][dim] != n for box in boxes)]
    if len(cut) > _MAX_CUTS:
        raise ValueError(f"a tensor of {tuple(size)} is cut along {len(cut)} dimensions")
    # The count of chunks over each element follows from its differences along all dimensions. One
    # chunk adds 1 and -1 in turn at its corners, and 0 elsewhere. So the sum over all chunks must
    # be that of one chunk as large as the tensor. No pairs of chunks are compared.
    if prod(size):
        boxes.append((torch.Size([0] * len(size)), torch.Size(size), -1))
    corners: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes, weight in boxes:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[d] + e * sizes[d] for d, e in zip(cut, ends, strict=True))
            corners[corner] += -weight if sum(ends) % 2 else weight
    if any(corners.values()):
        raise ValueError(f"chunks do not cover a tensor of {tuple(size)} exactly once")


def _check_entries(folder: Path, metadata: Metadata) -> None:
    """Check that every value has its entries, and that the files contain them."""
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
            raise ValueError(f"{index.fqn!r} has no entry at {index.offset}")
        length = entries[index].length
        if nbytes > length:
            raise CheckpointError(
                f"{index.fqn!r} claims {nbytes:,} bytes of an entry of {length:,}"
            )
        if index.offset is not None and length > nbytes + _MAX_OVERHEAD:
            raise CheckpointError(f"{index.fqn!r}, {nbytes:,} bytes, has an entry of {length:,}")
    if unknown := entries.keys() - needed.keys():
        raise ValueError(f"entries of unknown values: {sorted(index.fqn for index in unknown)[:3]}")
    by_file: dict[str, list[StorageInfo]] = {}
    for info in entries.values():
        by_file.setdefault(info.relative_path, []).append(info)
    for name, infos in by_file.items():
        size, end = file_size(folder / name), 0
        for info in sorted(infos, key=lambda info: info.offset):
            if info.offset < end:
                raise ValueError(f"entries of {name!r} overlap")
            end = info.offset + info.length
        if end > size:
            raise CheckpointError(f"{name!r} has {size:,} bytes of the {end:,} that were written")


def _state_of(value: Any, kind: Any, state: type[Any] = dict) -> Any:
    """Return the pickled state of ``value``, an object of ``kind``, which is of type ``state``."""
    if not isinstance(value, Record) or value.make is not kind:
        raise ValueError(f"a {kind.__name__} was expected")
    return state() if value.state is None else checked(value.state, state)
