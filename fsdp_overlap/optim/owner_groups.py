"""Owner groups: the ranks among which a parameter's shared matrices are assigned to owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from weakref import ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.comm_streams import CommStream, current_device, make_comm_stream
from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.comm.optimizer_groups import find_for_optimizer, get_for_optimizer
from fsdp_overlap.comm.process_groups import GroupCache, alive
from fsdp_overlap.engine.mesh import MeshInfo, mesh_info_of
from fsdp_overlap.optim.matrices import (
    MatrixPartition,
    ShardRange,
    Split,
    partition_matrices,
    uncut_part_rows,
)
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, ShardedParam, range_dim
from fsdp_overlap.tensor.tiles import Tile, is_cut, tile_at, tile_of


class OwnerGroup:
    """The ranks that share the matrices of some parameters, and their process group.

    The process group belongs to the context that shards the parameters, so it has the context's
    watchdog and ends with ``ctx.reset()``. Then a new owner group replaces this one.
    """

    def __init__(
        self, ranks: Sequence[int], like: dist.ProcessGroup, example: ShardedParam
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        """This rank's place in ``ranks``."""
        self._like = ref(like)
        self._device_type = example.device_mesh.device_type
        self._edits = example.edits
        self._group: ref[dist.ProcessGroup] | None = None

    @property
    def mesh_info(self) -> MeshInfo | None:
        """The mesh of the parameters. ``None`` if no context shards them."""
        return mesh_info_of(self._edits)

    @property
    def device(self) -> torch.device:
        """The device of the messages."""
        return current_device(self._device_type)

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def connect(self, groups: GroupCache) -> None:
        """Get the process group from ``groups``. Collective over the ranks at the first call."""
        if not self.is_connected:
            group = get_for_optimizer(groups, self.ranks, alive(self._like), self._device_type)
            self._group = ref(group)

    def has_ended(self, groups: GroupCache) -> bool:
        """Return whether ``groups`` no longer has the process group."""
        if self._group is None:
            return False
        current = find_for_optimizer(groups, self.ranks, alive(self._like), self._device_type)
        return current is None or current is not self._group()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. It is referred to weakly, so that it can be destroyed."""
        assert self._group is not None, "not connected"
        return alive(self._group)


@dataclass(frozen=True, eq=False)
class Ownership:
    """The ``partition`` of one parameter's matrices over the ranks of ``owner_group`` (``None`` for
    one rank), this ``rank`` among them, and the ``start`` of its range in the flattened tile."""

    rank: int
    start: int
    split: Split
    partition: MatrixPartition
    owner_group: OwnerGroup | None = None


class OwnerGroups:
    """The owner groups of the parameters that one ``optimizer`` steps. Errors have its name.

    An owner group has the ranks along those dimensions of a parameter's mesh along which ranks hold
    parts of the same matrices, or replicas of them.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._ownerships: dict[torch.Tensor, Ownership] = {}
        self._groups: dict[tuple[ref[GroupCache], Sequence[int]], OwnerGroup] = {}
        self._own_cache = GroupCache(separate=False)
        """Process groups for parameters that no context shards."""
        self._comm_streams: dict[torch.device, CommStream] = {}

    def ownership_of(self, parameter: torch.Tensor) -> Ownership:
        """Return the ownership of a parameter that was passed to :meth:`add`."""
        return self._ownerships[parameter]

    def group_of_mesh(self, parameter: torch.Tensor) -> OwnerGroup | None:
        """Return the group of all ranks of the mesh of ``parameter``, or ``None`` for one rank."""
        if not isinstance(parameter, ShardedParam) or parameter.device_mesh.size() == 1:
            return None
        return self._group_over(parameter, range(parameter.device_mesh.ndim))

    def shares(self, parameter: torch.Tensor) -> bool:
        """Return whether ranks share matrices of ``parameter``, or may do."""
        known = self._ownerships.get(parameter)
        return known is None or bool(known.partition.shared)

    def comm_stream_of(self, device: torch.device) -> CommStream:
        """Return the stream on which what is on ``device`` is exchanged."""
        if device not in self._comm_streams:
            self._comm_streams[device] = make_comm_stream(device)
        return self._comm_streams[device]

    def connect(self, groups: Iterable[OwnerGroup]) -> None:
        """Connect ``groups``, which is collective over each of them at the first call."""
        for group in groups:
            group.connect(self._cache_of(group.mesh_info))

    def begin_step(self, group: OwnerGroup) -> None:
        """Connect ``group``, and report to the error monitor that this rank begins to exchange."""
        self.connect([group])
        if group.mesh_info is not None:
            group.mesh_info.faults.monitor.begin_exchange("an optimizer's step", group.group)

    def add(self, parameters: Iterable[tuple[torch.Tensor, Split]]) -> None:
        """Find the owner groups of ``parameters``, each given with its split. Collective at the
        first call for a parameter, unless the owner group is just the ranks that hold ranges of one
        tile."""
        gathered_members: dict[OwnerGroup, list[tuple[ShardedParam, Split]]] = {}
        for parameter, split in parameters:
            known = self._ownerships.get(parameter)
            if known is not None and known.split == split:
                continue
            if not isinstance(parameter, ShardedParam):
                tile = Tile((0,) * parameter.dim(), tuple(parameter.shape))
                self._add(parameter, split, None, (ShardRange(tile, 0, parameter.numel()),))
                continue
            dims = _dims_across_matrices(parameter, split)
            group = self._group_over(parameter, dims)
            if group is None:
                self._add(parameter, split, group, (_shard_range(parameter),))
            elif isinstance(parameter, RaggedDTensor) and dims == [range_dim(parameter._spec)]:
                self._add(parameter, split, group, _shard_ranges(parameter, group))
            else:
                gathered_members.setdefault(group, []).append((parameter, split))
        for group, members in gathered_members.items():
            # Ranges follow from tiles, so ranks of tensor parallelism may have other ranges.
            group.connect(self._cache_of(group.mesh_info))
            own = [_shard_range(parameter) for parameter, _ in members]
            ranges_by_rank = gather_objects(own, group.group, group.device, self._optimizer)
            for member, ranges in zip(members, zip(*ranges_by_rank, strict=True), strict=True):
                self._add(*member, group, ranges)

    def drop_ended(self) -> None:
        """Drop the owner groups whose process groups a reset has ended, and their ownerships: other
        ranks may follow."""
        ended = {
            key
            for key, group in self._groups.items()
            if key[0]() is not (cache := self._cache_of(group.mesh_info)) or group.has_ended(cache)
        }
        if not ended:
            return
        dropped = {self._groups.pop(key) for key in ended}
        for parameter, ownership in list(self._ownerships.items()):
            if ownership.owner_group in dropped:
                del self._ownerships[parameter]

    def abort(self, error: BaseException) -> None:
        """End the exchanges in which other ranks wait for this one, whose step ``error`` ended."""
        for comm_stream in self._comm_streams.values():
            comm_stream.before_compute()  # what is under way may still use its buffers
        connected = [group for group in self._groups.values() if group.is_connected]
        for mesh_info in {group.mesh_info for group in connected}:
            if mesh_info is not None:
                mesh_info.faults.monitor.give_up(f"{self._optimizer}.step()", error)
        self._own_cache.close()
        self._own_cache = GroupCache(separate=False)

    def _add(
        self,
        parameter: torch.Tensor,
        split: Split,
        group: OwnerGroup | None,
        ranges: tuple[ShardRange, ...],
    ) -> None:
        rank = 0 if group is None else group.rank
        partition = partition_matrices(tuple(parameter.shape), split, ranges)
        ownership = Ownership(rank, ranges[rank].start, split, partition, group)
        self._ownerships[parameter] = ownership

    def _cache_of(self, mesh_info: MeshInfo | None) -> GroupCache:
        return self._own_cache if mesh_info is None else mesh_info.group_cache

    def _group_over(self, parameter: ShardedParam, dims: Sequence[int]) -> OwnerGroup | None:
        if not dims:
            return None
        mesh = parameter.device_mesh
        if len(dims) == 1:
            like = mesh.get_group(dims[0])
            ranks = dist.get_process_group_ranks(like)
        else:
            like = mesh.get_group(_shard_dim(parameter))
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            along = [slice(None) if dim in dims else at for dim, at in enumerate(coordinate)]
            ranks = mesh.mesh[tuple(along)].flatten().tolist()
        key = ref(self._cache_of(mesh_info_of(parameter.edits))), tuple(ranks)
        if key not in self._groups:
            self._groups[key] = OwnerGroup(ranks, like, parameter)
        return self._groups[key]


def _dims_across_matrices(parameter: ShardedParam, split: Split) -> list[int]:
    """Return the dimensions of the parameter's mesh along which ranks hold parts of the same
    matrices, or replicas of them. They are the same on every rank."""
    spec = parameter._spec
    cutting = [
        dim
        for dim, placement in enumerate(spec.placements)
        if is_cut(placement) and placement.dim >= parameter.dim() - 2
    ]
    shape = tuple(parameter.shape)
    places = (
        range(spec.mesh.size(dim)) if is_cut(placement) else (0,)
        for dim, placement in enumerate(spec.placements)
    )
    tiles = {tile_at(spec, place) for place in product(*places)} if cutting else set()
    if all(uncut_part_rows(shape, split, tile) is not None for tile in tiles):
        cutting = []
    return [
        dim
        for dim, placement in enumerate(spec.placements)
        if spec.mesh.size(dim) > 1 and (dim in cutting or not is_cut(placement))
    ]


def _shard_dim(parameter: ShardedParam) -> int:
    """Return the dimension of the parameter's mesh along which it is sharded."""
    if isinstance(parameter, RaggedDTensor):
        return range_dim(parameter._spec)
    return next(dim for dim, placement in enumerate(parameter.placements) if is_cut(placement))


def _shard_range(parameter: ShardedParam) -> ShardRange:
    """Return the range of its tile that this rank holds: all of it under ``PerTensor()``."""
    tile = tile_of(parameter._spec)
    if isinstance(parameter, RaggedDTensor):
        return ShardRange(tile, *parameter.local_range)
    return ShardRange(tile, 0, tile.numel)


def _shard_ranges(parameter: RaggedDTensor, group: OwnerGroup) -> tuple[ShardRange, ...]:
    """Return the range of each rank of ``group``, all of the same tile."""
    tile = tile_of(parameter._spec)
    ranges = {rank: (start, stop) for rank, start, stop in parameter.placement.ranges}
    return tuple(ShardRange(tile, *ranges.get(rank, (0, 0))) for rank in range(len(group.ranks)))
