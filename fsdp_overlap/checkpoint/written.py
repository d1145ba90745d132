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
    checksums: dict[MetadataIndex, int]


def put_together(told: Sequence[Written], into: Metadata) -> Iterator[WriteResult]:
    """Gives ``into`` the tensors and values that all ranks wrote, and yields where each part lies.

    Raises:
        ValueError: what should be copies differs; or parts do not make up a tensor, which is known
            when all are yielded.
    """
    _compare_copies(told)
    tensors = {key: found for each in told for key, found in each.tensors.items()}
    found: dict[str, TensorStorageMetadata] = {}
    into.planner_data = {}
    for described in (each for known in tensors.values() for each in known):
        properties = TensorProperties(dtype=described.dtype)
        found.setdefault(described.fqn, TensorStorageMetadata(properties, described.shape, []))
        into.planner_data[described.fqn] = described.path
    volumes = dict.fromkeys(found, 0)
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
                index = MetadataIndex(fqn, offsets, len(chunks))
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                volumes[fqn] += prod(sizes)
                path, descriptors = each.files[file]
                yield WriteResult(index, length, StorageInfo(path, start, length, descriptors))
    wrong = [fqn for fqn, volume in volumes.items() if volume != prod(found[fqn].size)]
    into.state_dict_metadata = dict(found)
    for value in (value for each in told for value in each.plain):
        fqn, data = value.item.index.fqn, value.item.tensor_data
        if fqn in into.state_dict_metadata:  # other ranks have it too; the first one counts
            wrong += [fqn] if fqn in found else []
            continue
        into.planner_data[fqn] = value.path
        into.state_dict_metadata[fqn] = (
            BytesStorageMetadata()
            if data is None
            else TensorStorageMetadata(data.properties, data.size, [data.chunk])
        )
        yield value.result
    if wrong:
        fqn = wrong[0]
        raise ValueError(
            f"the parts that ranks wrote of {fqn!r} have {volumes[fqn]} elements, and it has "
            f"{prod(found[fqn].size)} ({len(wrong)} such tensors): {_ONE_NAME}"
        )


def _compare_copies(told: Sequence[Written]) -> None:
    known: dict[MetadataIndex, int] = {}
    for each in told:
        for index, checksum in each.checksums.items():
            if known.setdefault(index, checksum) != checksum:
                raise ValueError(f"{index.fqn!r} has other values on some ranks: {_ONE_NAME}")


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
