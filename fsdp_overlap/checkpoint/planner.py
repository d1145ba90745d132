"""A DCP save planner for many ranks, which send the coordinator summaries in place of plans.

Of what they wrote, ranks send numbers, and one of them the names, because the coordinator of a
large job receives all of it.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, cached_property, partial
from hashlib import sha256
from itertools import chain
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
from fsdp_overlap.tensor.ragged_dtensor import RaggedShard
from fsdp_overlap.tensor.tiles import copied_dims
from fsdp_overlap.torch_internals import StorageInfo


class _MeshSummary(NamedTuple):
    """What the ranks of a mesh must have in common: their number, the number of tensors on the
    mesh, and digests of names, shapes and placements (``digest``), and of ``ranges``."""

    ranks: int
    tensors: int
    digest: str
    ranges: str


class _PlanSummary(NamedTuple):
    """What a rank sends to the coordinator: summaries of its ``sharded`` tensors by mesh key, and
    digests of its ``plain`` values by outermost key of the state dict."""

    sharded: dict[str, _MeshSummary]
    plain: dict[str, str]


class _Assignment(NamedTuple):
    """What the coordinator assigns to a rank, in keys of :class:`_PlanSummary`.

    The rank sends the names of the sharded tensors on the meshes ``describes``, and writes the
    plain values ``writes``. The tensors of ``shares`` are on other meshes too, and those of
    ``skips`` are written by ranks of another mesh.
    """

    describes: list[str]
    writes: list[str]
    shares: list[str]
    skips: list[str]


class ShardedSavePlanner(DefaultSavePlanner):
    """A planner for jobs of many ranks, whose coordinator does not merge the plans of all.

    What each rank writes of a sharded tensor follows from the tensor's name, mesh and placements.
    So ranks compare digests of these, and send afterwards where in their files it is. One replica
    is written, and the ranks that hold replicas divide that work. Values that are not sharded are
    written by the first rank that has them. If a name stands for tensors on several meshes, these
    must be replicas, as must all other sharded tensors on these meshes. They are compared. The
    checkpoint is an ordinary one, which any reader loads.

    Use it with :class:`SafeFileSystemWriter`, on all ranks of the tensors' meshes::

        dcp.save(state, storage_writer=SafeFileSystemWriter(path), planner=ShardedSavePlanner())

    Raises:
        CheckpointException: on all ranks, before anything is written: the tensors on a mesh differ
            between its ranks, or not all ranks of a mesh save; or the writer is another one.
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
        plain = {key: _digest(map(_facts_of, of.items())) for key, of in self._plain.items()}
        self.plan = SavePlan([], planner_data=_PlanSummary(self._mesh_summaries(), plain))
        return self.plan

    def _mesh_summaries(self) -> dict[str, _MeshSummary]:
        """Return the summaries of this rank's meshes. Ranges are the same only along one dimension
        of a mesh, which has a key of its own."""
        ranks: dict[str, int] = {}
        facts: dict[str, list[object]] = defaultdict(list)
        ranges: dict[str, list[int]] = defaultdict(list)
        hashes: dict[int, int] = {}
        for key, tensors in self._sharded.items():
            for fqn, tensor in tensors.items():
                mesh = tensor.device_mesh
                ranks[key] = mesh.size()
                kinds = [str(p) for p in tensor.placements if type(p) is not RaggedShard]
                facts[key].append((self.mappings[fqn], tuple(tensor.shape), tensor.dtype, kinds))
                for dim, placement in enumerate(tensor.placements):
                    if isinstance(placement, RaggedShard):
                        address = id(placement.ranges)
                        if address not in hashes:
                            hashes[address] = hash(placement.ranges)  # of ints: equal on all ranks
                        dim_key = self._key_of(mesh, dim)
                        ranks[dim_key] = mesh.size(dim)
                        ranges[dim_key].append(hashes[address])
        return {
            key: _MeshSummary(count, len(facts[key]), _digest(facts[key]), _digest(ranges[key]))
            for key, count in ranks.items()
        }

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        summaries: list[_PlanSummary] = [plan.planner_data for plan in all_plans]
        by_mesh = _common_summaries([summary.sharded for summary in summaries])
        meshes: dict[str, list[str]] = {}  # those with the same tensors
        for key, mesh in by_mesh.items():
            if mesh.tensors:
                meshes.setdefault(mesh.digest, []).append(key)
        shared = {key: keys[0] for keys in meshes.values() if len(keys) > 1 for key in keys}
        described: set[str] = set()
        written: set[tuple[str, str]] = set()
        plans = []
        for sharded, plain in summaries:
            assignment = _Assignment(
                [key for key, mesh in sharded.items() if mesh.tensors and key not in described],
                [key for key, digest in plain.items() if (key, digest) not in written],
                [key for key in sharded if key in shared],
                [key for key in sharded if shared.get(key, key) != key],
            )
            described.update(assignment.describes)
            written.update((key, plain[key]) for key in assignment.writes)
            plans.append(SavePlan([], planner_data=assignment))
        self.metadata = PlannedMetadata()
        return plans, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        assignment: _Assignment = new_plan.planner_data
        plain = {fqn: value for key in assignment.writes for fqn, value in self._plain[key].items()}
        plain_items = create_default_local_save_plan(plain, True).items
        self._plain_items = {item.index: item for item in plain_items}
        self._parts: dict[MetadataIndex, tuple[str, int, torch.Size]] = {}
        self._checksums: dict[MetadataIndex, tuple[torch.Size, int]] = {}
        items = []
        for key, tensors in self._sharded.items():
            numbers = {fqn: number for number, fqn in enumerate(tensors)}
            for item in _write_items(tensors):
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
        self.plan = SavePlan(items + plain_items, storage_data=new_plan.storage_data)
        return self.plan

    def write_result(self, results: Iterable[WriteResult]) -> RankWriteResult:
        """Return what this rank wrote, for the coordinator."""
        written = RankWriteResult(
            [], self._infos, defaultdict(partial(array, "q")), [], self._checksums
        )
        files: dict[str, int] = {}
        for result in results:
            if item := self._plain_items.get(result.index):
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
    """Return a key for all ranks of ``mesh``, or for this rank's along ``dim``. It is the same on
    each of these ranks."""
    ranks = mesh.mesh
    if dim is not None:
        place = mesh.get_coordinate()
        assert place is not None
        ranks = ranks[tuple(slice(None) if d == dim else at for d, at in enumerate(place))]
    return _digest((tuple(ranks.shape), ranks.flatten().tolist()))


def _write_items(tensors: Mapping[str, DTensor]) -> list[WriteItem]:
    """Return what this rank writes of ``tensors``, which are on one mesh. One replica of each is
    written, by the rank that writes the fewest bytes so far."""
    loads: dict[tuple[int, ...], list[int]] = {}
    own = {}
    for fqn, tensor in tensors.items():
        mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert place is not None
        dims = copied_dims(tensor._spec) if tensor.numel() else tuple(range(mesh.ndim))
        of_replicas = loads.setdefault(dims, [0] * prod(mesh.size(dim) for dim in dims))
        writer = of_replicas.index(min(of_replicas))
        of_replicas[writer] += tensor.numel() * tensor.dtype.itemsize
        replica = 0
        for dim in dims:
            replica = replica * mesh.size(dim) + place[dim]
        if replica == writer:
            own[fqn] = tensor
    items = create_default_local_save_plan(own, False).items
    return [item for item in items if prod(_sizes(item)) or not own[item.index.fqn].numel()]


def _sizes(item: WriteItem) -> torch.Size:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes


def _facts_of(item: tuple[str, Any]) -> tuple[object, ...]:
    """Return what must be equal of a plain value on two ranks, so that one of them is written."""
    fqn, value = item
    return (fqn, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (fqn,)


def _check_plain(fqn: str, value: object) -> None:
    if hasattr(value, "__create_write_items__") or hasattr(value, "local_shards"):
        raise TypeError(
            f"{fqn!r} is a {type(value).__name__}, of which only its class knows what each rank "
            "has; use torch's DefaultSavePlanner"
        )


def _common_summaries(summaries: Sequence[Mapping[str, _MeshSummary]]) -> dict[str, _MeshSummary]:
    """Return the summary of each mesh, if all of the mesh's ranks have it.

    Raises:
        ValueError: they do not.
    """
    firsts: dict[str, tuple[int, _MeshSummary]] = {}
    senders: Counter[str] = Counter()
    for rank, by_mesh in enumerate(summaries):
        senders.update(by_mesh.keys())
        for key, mesh in by_mesh.items():
            first, of_first = firsts.setdefault(key, (rank, mesh))
            if mesh != of_first:
                raise ValueError(
                    f"rank {rank} of those that save has {mesh.tensors} tensors where rank "
                    f"{first} has {of_first.tensors}, or others, or cut otherwise: save the same "
                    "sharded tensors on all ranks that they lie over"
                )
    for key, (first, mesh) in firsts.items():
        if senders[key] != mesh.ranks:
            raise ValueError(
                f"tensors of rank {first} lie over {mesh.ranks} ranks, of which {senders[key]} "
                "save them: save on all of them, or use torch's DefaultSavePlanner"
            )
    return {key: mesh for key, (_, mesh) in firsts.items()}


def _digest(facts: Iterable[object]) -> str:
    return sha256(repr(list(facts)).encode()).hexdigest()[:16]


class TensorInfo(NamedTuple):
    """A sharded tensor. ``path`` is its place in the state dict."""

    fqn: str
    path: tuple[str | int, ...]
    shape: torch.Size
    dtype: torch.dtype


class PlainWriteResult(NamedTuple):
    """A value that is not sharded, which one rank wrote."""

    item: WriteItem
    path: tuple[str | int, ...]
    result: WriteResult


class RankWriteResult(NamedTuple):
    """What a rank wrote, by mesh keys.

    ``rows`` has for each chunk: the index of its tensor, the index of its file, its offset in the
    file and its length in bytes, then its offsets in the tensor, then its sizes. ``tensors`` is
    sent by one rank of a mesh. ``checksums`` are those of chunks that should be replicas.
    """

    files: list[tuple[str, Sequence[str] | None]]
    tensors: dict[str, list[TensorInfo]]
    rows: dict[str, array[int]]
    plain: list[PlainWriteResult]
    checksums: dict[MetadataIndex, tuple[torch.Size, int]]


def merge_results(results: Sequence[RankWriteResult]) -> Metadata:
    """Return the metadata of what all ranks wrote.

    Raises:
        ValueError: replicas differ, or the chunks of a tensor do not cover it.
    """
    _check_replicas(results)
    tensors = {key: infos for result in results for key, infos in result.tensors.items()}
    paths: dict[str, tuple[str | int, ...]] = {}
    sharded: dict[str, TensorStorageMetadata] = {}
    for fqn, path, shape, dtype in chain.from_iterable(tensors.values()):
        paths[fqn] = path
        sharded[fqn] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [])
    storage: dict[MetadataIndex, StorageInfo] = {}
    volumes = dict.fromkeys(sharded, 0)
    meshes: dict[str, set[str]] = {fqn: set() for fqn in sharded}
    for result in results:
        for key, rows in result.rows.items():
            infos, numbers, at = tensors[key], rows.tolist(), 0
            while at < len(numbers):
                number, file, start, length = numbers[at : at + 4]
                fqn, _, shape, _ = infos[number]
                middle, end = at + 4 + len(shape), at + 4 + 2 * len(shape)
                offsets = torch.Size(numbers[at + 4 : middle])
                sizes = torch.Size(numbers[middle:end])
                at = end
                chunks = sharded[fqn].chunks
                name, descriptors = result.files[file]
                index = MetadataIndex(fqn, offsets, len(chunks))
                storage[index] = StorageInfo(name, start, length, descriptors)
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                volumes[fqn] += prod(sizes)
                meshes[fqn].add(key)
    for fqn, volume in volumes.items():
        if len(meshes[fqn]) > 1:
            raise ValueError(
                f"{fqn!r} lies over several meshes, over which there are not the same sharded "
                "tensors: save it from one of them, or use torch's DefaultSavePlanner"
            )
        if volume != prod(sharded[fqn].size):
            raise ValueError(
                f"the parts that ranks wrote of {fqn!r} have {volume} elements, and it has "
                f"{prod(sharded[fqn].size)}: {_UNIQUE_NAMES}"
            )
    plain: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for item, path, written in (value for result in results for value in result.plain):
        fqn, data = item.index.fqn, item.tensor_data
        if fqn in sharded:
            raise ValueError(f"{fqn!r} is sharded on some ranks alone: {_UNIQUE_NAMES}")
        if fqn not in plain:  # other ranks may have it too; the first one counts
            paths[fqn], storage[written.index] = path, written.storage_data
            plain[fqn] = (
                BytesStorageMetadata()
                if data is None
                else TensorStorageMetadata(data.properties, data.size, [data.chunk])
            )
    return Metadata({**sharded, **plain}, planner_data=paths, storage_data=storage)


def _check_replicas(results: Sequence[RankWriteResult]) -> None:
    first: dict[MetadataIndex, tuple[torch.Size, int]] = {}
    for result in results:
        for index, checksum in result.checksums.items():
            if first.setdefault(index, checksum) != checksum:
                raise ValueError(
                    f"{index.fqn!r} has other values on some ranks, or other parts: {_UNIQUE_NAMES}"
                )


_UNIQUE_NAMES = (
    "a name must stand for one tensor; give those of other ranks, such as experts, other names"
)


class PlannedMetadata(Metadata):
    """The metadata of the checkpoint in ``folder``. Ranks other than the coordinator read it at
    the first access, because for many ranks it is large."""

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
    """A ``StorageMeta`` that identifies :class:`SafeFileSystemWriter` to the planner. Pickled, it
    is an ordinary one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageMeta, tuple(vars(self).values())
