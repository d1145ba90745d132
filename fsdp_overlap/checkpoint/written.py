"""What ranks tell of what they wrote, and the metadata that is made of it.

For :class:`~fsdp_overlap.checkpoint.planner.ShardedSavePlanner`. A rank tells numbers, and one of
them the names, because the first rank of a large job gets all of it.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

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
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_overlap.checkpoint.metadata import read_metadata
from fsdp_overlap.torch_internals import StorageInfo


class Described(NamedTuple):
    """A tensor that ranks hold parts of. ``path`` is its place in the state dict."""

    fqn: str
    path: tuple[str | int, ...]
    shape: torch.Size
    dtype: torch.dtype


class Plain(NamedTuple):
    """A value that one rank wrote whole."""

    item: WriteItem
    path: tuple[str | int, ...]
    result: WriteResult


class Written(NamedTuple):
    """What a rank wrote. Keys stand for the ranks that tensors lie over.

    ``rows`` has for each part: the number of its tensor, the number of its file, where it lies in
    that and how many bytes it has, then its offsets in the tensor, then its sizes. ``tensors`` is
    told by one of the ranks. ``checksums`` are those of parts of which there should be copies.
    """

    files: list[tuple[str, Sequence[str] | None]]
    tensors: dict[str, list[Described]]
    rows: dict[str, array[int]]
    plain: list[Plain]
    checksums: dict[MetadataIndex, tuple[torch.Size, int]]


def put_together(told: Sequence[Written]) -> Metadata:
    """The metadata of what all ranks wrote.

    Raises:
        ValueError: what should be copies differs, or parts do not make up a tensor.
    """
    _compare_copies(told)
    tensors = {key: found for each in told for key, found in each.tensors.items()}
    paths: dict[str, tuple[str | int, ...]] = {}
    found: dict[str, TensorStorageMetadata] = {}
    for fqn, path, shape, dtype in (each for known in tensors.values() for each in known):
        paths[fqn] = path
        found[fqn] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [])
    storage: dict[MetadataIndex, StorageInfo] = {}
    volumes = dict.fromkeys(found, 0)
    writers: dict[str, set[str]] = {fqn: set() for fqn in found}
    for each in told:
        for key, rows in each.rows.items():
            known, numbers, at = tensors[key], rows.tolist(), 0
            while at < len(numbers):
                number, file, start, length = numbers[at : at + 4]
                fqn, _, shape, _ = known[number]
                middle, end = at + 4 + len(shape), at + 4 + 2 * len(shape)
                offsets = torch.Size(numbers[at + 4 : middle])
                sizes = torch.Size(numbers[middle:end])
                at = end
                chunks = found[fqn].chunks
                name, descriptors = each.files[file]
                index = MetadataIndex(fqn, offsets, len(chunks))
                storage[index] = StorageInfo(name, start, length, descriptors)
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                volumes[fqn] += prod(sizes)
                writers[fqn].add(key)
    for fqn, volume in volumes.items():
        if len(writers[fqn]) > 1:
            raise ValueError(
                f"{fqn!r} lies over several meshes, over which there are not the same sharded "
                "tensors: save it from one of them, or use torch's DefaultSavePlanner"
            )
        if volume != prod(found[fqn].size):
            raise ValueError(
                f"the parts that ranks wrote of {fqn!r} have {volume} elements, and it has "
                f"{prod(found[fqn].size)}: {_ONE_NAME}"
            )
    plain: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for item, path, result in (value for each in told for value in each.plain):
        fqn, data = item.index.fqn, item.tensor_data
        if fqn in found:
            raise ValueError(f"{fqn!r} is sharded on some ranks alone: {_ONE_NAME}")
        if fqn not in plain:  # other ranks may have it too; the first one counts
            paths[fqn], storage[result.index] = path, result.storage_data
            plain[fqn] = (
                BytesStorageMetadata()
                if data is None
                else TensorStorageMetadata(data.properties, data.size, [data.chunk])
            )
    return Metadata({**found, **plain}, planner_data=paths, storage_data=storage)


def _compare_copies(told: Sequence[Written]) -> None:
    known: dict[MetadataIndex, tuple[torch.Size, int]] = {}
    for each in told:
        for index, checksum in each.checksums.items():
            if known.setdefault(index, checksum) != checksum:
                raise ValueError(
                    f"{index.fqn!r} has other values on some ranks, or other parts: {_ONE_NAME}"
                )


_ONE_NAME = (
    "a name must stand for one tensor; give those of other ranks, such as experts, other names"
)


class PlannedMetadata(Metadata):
    """The metadata of a checkpoint in ``folder``. The rank that wrote it has it. Others read it
    when they first ask for a part of it, because for many ranks it is large."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    @cached_property
    def values(self) -> Metadata:
        assert self.folder is not None
        return read_metadata(self.folder)

    def __reduce__(self) -> tuple[type[PlannedMetadata], tuple[Path | None]]:
        return PlannedMetadata, (self.folder,)


for _field in fields(Metadata):
    setattr(PlannedMetadata, _field.name, property(attrgetter(f"values.{_field.name}")))


class PlannedStorageMeta(StorageMeta):
    """By which the planner knows the writer. In files it is an ordinary one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageMeta, tuple(vars(self).values())


@contextmanager
def without_collector() -> Iterator[None]:
    """Python's collector of cycles would look at all that is being made, again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
