"""A DCP planner whose ranks do not send their plans to the first one, and what they send of what
they wrote. A rank sends numbers, and one of them the names, because the first rank of a large job
gets all of it."""

from __future__ import annotations

import gc
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, cached_property, partial
from hashlib import sha256
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_overlap.checkpoint.checksums import checksum_of
from fsdp_overlap.checkpoint.metadata import read_metadata
from fsdp_overlap.checkpoint.stager import StagedTensor
from fsdp_overlap.tensor.placement import RaggedShard, copied_dims
from fsdp_overlap.torch_internals import StorageInfo


class _MeshSummary(NamedTuple):
    """What some ranks must have in common: how many they are, how many tensors lie over them, and
    digests: of names, shapes and placements, and of ranges."""

    ranks: int
    tensors: int
    digest: str
    ranges: str


class _PlanSummary(NamedTuple):
    """What a rank tells the first one.

    The keys of ``sharded`` stand for ranks that tensors lie over, those of ``plain`` are outermost
    keys of the state dict, with digests of what is below them and not sharded.
    """

    sharded: dict[str, _MeshSummary]
    plain: dict[str, str]


class _Assignment(NamedTuple):
    """What the first rank answers, in keys of :class:`_PlanSummary`.

    The rank is the first that has some, and so tells the names of these sharded tensors
    (``describes``), and writes what is not sharded (``writes``). Other ranks have the names that
    are below ``shares`` too, and of these the rank leaves to others what is below ``skips``.
    """

    describes: list[str]
    writes: list[str]
    shares: list[str]
    skips: list[str]


class ShardedSavePlanner(DefaultSavePlanner):
    """A planner for jobs of many ranks: the first rank does not put together the plans of all.

    What each rank writes of a sharded tensor follows from the tensor's name, mesh and placements.
    So ranks compare digests of these, and afterwards tell where in their files it is. Of copies
    one is written, and the ranks that have them share that work. What is not sharded is written by
    the first rank that has it. If a name stands for tensors over several meshes, these must be
    copies, and all other sharded tensors over these meshes too. They are compared. The checkpoint
    is an ordinary one, which any reader loads.

    Use it with :class:`SafeFileSystemWriter`, on all ranks that the tensors lie over::

        dcp.save(state, storage_writer=SafeFileSystemWriter(path), planner=ShardedSavePlanner())

    Raises:
        CheckpointException: on all ranks, before anything is written: ranks have other tensors
            over the same mesh, or not all ranks of a mesh save; or the writer is another one.
    """

    def __init__(self) -> None:
        super().__init__()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if not isinstance(storage_meta, PlannedStorageMeta):
            raise TypeError(
                "ShardedSavePlanner needs storage_writer=SafeFileSystemWriter(...); with another "
                "writer use torch's DefaultSavePlanner"
            )
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self._key_of = cache(_mesh_key)
        self._sharded: dict[str, dict[str, DTensor]] = defaultdict(dict)
        self._plain: dict[str, dict[str, Any]] = defaultdict(dict)
        for fqn, value in sorted(self.state_dict.items()):
            if not isinstance(value, DTensor):
                _check_plain(fqn, value)
                self._plain[str(self.mappings[fqn][0])][fqn] = value
            elif value.device_mesh.get_coordinate() is not None:
                self._sharded[self._key_of(value.device_mesh)][fqn] = value
        plain = {key: _digest(map(_known, values.items())) for key, values in self._plain.items()}
        self.plan = SavePlan([], planner_data=_PlanSummary(self._mesh_summaries(), plain))
        return self.plan

    def _mesh_summaries(self) -> dict[str, _MeshSummary]:
        """Return what is known of the tensors over some ranks. Ranges are known to the ranks that
        have them alone: those along one dimension of a mesh."""
        ranks: dict[str, int] = {}
        facts: dict[str, list[object]] = defaultdict(list)
        ranges: dict[str, list[int]] = defaultdict(list)
        hashes: dict[int, int] = {}
        for key, tensors in self._sharded.items():
            for fqn, tensor in tensors.items():
                mesh = tensor.device_mesh
                ranks[key] = mesh.size()
                kinds = [str(each) for each in tensor.placements if type(each) is not RaggedShard]
                facts[key].append((self.mappings[fqn], tuple(tensor.shape), tensor.dtype, kinds))
                for dim, each in enumerate(tensor.placements):
                    if isinstance(each, RaggedShard):
                        if id(each.ranges) not in hashes:
                            hashes[id(each.ranges)] = hash(each.ranges)  # numbers: same everywhere
                        line = self._key_of(mesh, dim)
                        ranks[line] = mesh.size(dim)
                        ranges[line].append(hashes[id(each.ranges)])
        return {
            key: _MeshSummary(number, len(facts[key]), _digest(facts[key]), _digest(ranges[key]))
            for key, number in ranks.items()
        }

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        summaries: list[_PlanSummary] = [plan.planner_data for plan in all_plans]
        _check([each.sharded for each in summaries])
        keys: dict[str, list[str]] = {}  # those of the same tensors
        for key, agreed in {
            key: of for each in summaries for key, of in each.sharded.items()
        }.items():
            if agreed.tensors:
                keys.setdefault(agreed.digest, []).append(key)
        shared = {key: of[0] for of in keys.values() if len(of) > 1 for key in of}
        described: set[str] = set()
        written: set[tuple[str, str]] = set()
        answers = []
        for each in summaries:
            assignment = _Assignment(
                [key for key, of in each.sharded.items() if of.tensors and key not in described],
                [key for key, digest in each.plain.items() if (key, digest) not in written],
                [key for key in each.sharded if key in shared],
                [key for key in each.sharded if shared.get(key, key) != key],
            )
            described.update(assignment.describes)
            written.update((key, each.plain[key]) for key in assignment.writes)
            answers.append(SavePlan([], planner_data=assignment))
        self.metadata = PlannedMetadata()
        return answers, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        assignment: _Assignment = new_plan.planner_data
        plain = {fqn: value for key in assignment.writes for fqn, value in self._plain[key].items()}
        whole = create_default_local_save_plan(plain, True).items
        self._whole = {item.index: item for item in whole}
        self._parts: dict[MetadataIndex, tuple[str, int, torch.Size]] = {}
        self._checksums: dict[MetadataIndex, tuple[torch.Size, int]] = {}
        items = []
        for key, tensors in self._sharded.items():
            numbers = {fqn: number for number, fqn in enumerate(tensors)}
            for item in _parts(tensors):
                if key in assignment.shares:
                    tensor, index = tensors[item.index.fqn], item.index
                    values = (
                        tensor.peek(index)
                        if isinstance(tensor, StagedTensor)
                        else self.lookup_object(index)
                    )
                    self._checksums[index] = values.shape, checksum_of(values)
                if key not in assignment.skips:
                    self._parts[item.index] = key, numbers[item.index.fqn], _sizes(item)
                    items.append(item)
        self._infos = {
            key: [
                TensorInfo(fqn, self.mappings[fqn], tensor.shape, tensor.dtype)
                for fqn, tensor in self._sharded[key].items()
            ]
            for key in assignment.describes
        }
        self.plan = SavePlan(items + whole, storage_data=new_plan.storage_data)
        return self.plan

    def write_result(self, results: Iterable[WriteResult]) -> RankWriteResult:
        """Return what this rank wrote, for the first one."""
        written = RankWriteResult(
            [], self._infos, defaultdict(partial(array, "q")), [], self._checksums
        )
        files: dict[str, int] = {}
        for result in results:
            if result.index in self._whole:
                item = self._whole[result.index]
                written.plain.append(PlainWriteResult(item, self.mappings[item.index.fqn], result))
                continue
            info: StorageInfo = result.storage_data
            if info.relative_path not in files:
                files[info.relative_path] = len(files)
                written.files.append((info.relative_path, info.transform_descriptors))
            key, number, sizes = self._parts[result.index]
            row = number, files[info.relative_path], info.offset, info.length
            written.rows[key].extend((*row, *(result.index.offset or ()), *sizes))
        return written


def _mesh_key(mesh: DeviceMesh, dim: int | None = None) -> str:
    """Return a key that stands for all ranks of ``mesh``, or for those along ``dim`` at this rank's
    place. It is the same on each of these ranks."""
    ranks = mesh.mesh
    if dim is not None:
        place = mesh.get_coordinate()
        assert place is not None
        ranks = ranks[tuple(slice(None) if d == dim else at for d, at in enumerate(place))]
    return _digest((tuple(ranks.shape), ranks.flatten().tolist()))


def _parts(tensors: Mapping[str, DTensor]) -> list[WriteItem]:
    """Return what this rank writes of ``tensors``, which lie over one mesh. Of copies one is
    written. Ranks that have them take turns, so that each writes as many bytes as the others."""
    loads: dict[tuple[int, ...], list[int]] = {}
    mine = {}
    for fqn, tensor in tensors.items():
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert place is not None
        dims = copied_dims(tensor._spec) if tensor.numel() else tuple(range(mesh.ndim))
        of_copies = loads.setdefault(dims, [0] * prod(mesh.size(dim) for dim in dims))
        owner = of_copies.index(min(of_copies))
        of_copies[owner] += tensor.numel() * tensor.dtype.itemsize
        number = 0
        for dim in dims:
            number = number * mesh.size(dim) + place[dim]
        if number == owner:
            mine[fqn] = tensor
    items = create_default_local_save_plan(mine, False).items
    return [item for item in items if prod(_sizes(item)) or not mine[item.index.fqn].numel()]


def _sizes(item: WriteItem) -> torch.Size:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes


def _known(named: tuple[str, Any]) -> tuple[object, ...]:
    """Return what must be known of a value that is not sharded, so that another rank's may be
    written."""
    fqn, value = named
    return (fqn, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (fqn,)


def _check_plain(fqn: str, value: object) -> None:
    if hasattr(value, "__create_write_items__") or hasattr(value, "local_shards"):
        raise TypeError(
            f"{fqn!r} is a {type(value).__name__}, of which only its class knows what each rank "
            "has; use torch's DefaultSavePlanner"
        )


def _check(summaries: Sequence[Mapping[str, _MeshSummary]]) -> None:
    """Check that ranks have in common what they must.

    Raises:
        ValueError: they have not.
    """
    firsts: dict[str, tuple[int, _MeshSummary]] = {}
    tellers: Counter[str] = Counter()
    for rank, each in enumerate(summaries):
        tellers.update(each.keys())
        for key, agreed in each.items():
            first, of_first = firsts.setdefault(key, (rank, agreed))
            if agreed != of_first:
                raise ValueError(
                    f"rank {rank} of those that save has {agreed.tensors} tensors where rank "
                    f"{first} has {of_first.tensors}, or others, or cut otherwise: save the same "
                    "sharded tensors on all ranks that they lie over"
                )
    for key, (first, agreed) in firsts.items():
        if tellers[key] != agreed.ranks:
            raise ValueError(
                f"tensors of rank {first} lie over {agreed.ranks} ranks, of which {tellers[key]} "
                "save them: save on all of them, or use torch's DefaultSavePlanner"
            )


def _digest(facts: Iterable[object]) -> str:
    return sha256(repr(list(facts)).encode()).hexdigest()[:16]


class TensorInfo(NamedTuple):
    """A tensor that ranks hold parts of. ``path`` is its place in the state dict."""

    fqn: str
    path: tuple[str | int, ...]
    shape: torch.Size
    dtype: torch.dtype


class PlainWriteResult(NamedTuple):
    """A value that one rank wrote whole."""

    item: WriteItem
    path: tuple[str | int, ...]
    result: WriteResult


class RankWriteResult(NamedTuple):
    """What a rank wrote. Keys stand for the ranks that tensors lie over.

    ``rows`` has for each part: the number of its tensor, the number of its file, where it lies in
    that and how many bytes it has, then its offsets in the tensor, then its sizes. ``tensors`` is
    sent by one of the ranks. ``checksums`` are those of parts of which there should be copies.
    """

    files: list[tuple[str, Sequence[str] | None]]
    tensors: dict[str, list[TensorInfo]]
    rows: dict[str, array[int]]
    plain: list[PlainWriteResult]
    checksums: dict[MetadataIndex, tuple[torch.Size, int]]


def merge_results(results: Sequence[RankWriteResult]) -> Metadata:
    """Return the metadata of what all ranks wrote.

    Raises:
        ValueError: what should be copies differs, or parts do not make up a tensor.
    """
    _check_replicas(results)
    tensors = {key: found for each in results for key, found in each.tensors.items()}
    paths: dict[str, tuple[str | int, ...]] = {}
    found: dict[str, TensorStorageMetadata] = {}
    for fqn, path, shape, dtype in (each for known in tensors.values() for each in known):
        paths[fqn] = path
        found[fqn] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [])
    storage: dict[MetadataIndex, StorageInfo] = {}
    volumes = dict.fromkeys(found, 0)
    writers: dict[str, set[str]] = {fqn: set() for fqn in found}
    for each in results:
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
                f"{prod(found[fqn].size)}: {_UNIQUE_NAMES}"
            )
    plain: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for item, path, result in (value for each in results for value in each.plain):
        fqn, data = item.index.fqn, item.tensor_data
        if fqn in found:
            raise ValueError(f"{fqn!r} is sharded on some ranks alone: {_UNIQUE_NAMES}")
        if fqn not in plain:  # other ranks may have it too; the first one counts
            paths[fqn], storage[result.index] = path, result.storage_data
            plain[fqn] = (
                BytesStorageMetadata()
                if data is None
                else TensorStorageMetadata(data.properties, data.size, [data.chunk])
            )
    return Metadata({**found, **plain}, planner_data=paths, storage_data=storage)


def _check_replicas(results: Sequence[RankWriteResult]) -> None:
    known: dict[MetadataIndex, tuple[torch.Size, int]] = {}
    for each in results:
        for index, checksum in each.checksums.items():
            if known.setdefault(index, checksum) != checksum:
                raise ValueError(
                    f"{index.fqn!r} has other values on some ranks, or other parts: {_UNIQUE_NAMES}"
                )


_UNIQUE_NAMES = (
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
def paused_gc() -> Iterator[None]:
    """Pause Python's collector of cycles, which would look at all that is being made, again and
    again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
