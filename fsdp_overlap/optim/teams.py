"""Teams: the ranks that share out the matrices of a parameter, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from weakref import ref

import torch
import torch.distributed as dist

from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.comm.process_groups import GroupCache, alive
from fsdp_overlap.comm.streams import current_device
from fsdp_overlap.engine.mesh import MeshInfo, mesh_info_of
from fsdp_overlap.optim.matrices import Division, Holding, Split, divide, whole_parts
from fsdp_overlap.tensor.placement import Tile, is_cut, range_dim, tile_at, tile_of
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from fsdp_overlap.tensor.row_tensor import Sharded


class Team:
    """The ranks that share out the matrices of some parameters, and their process group.

    The group is that of the context which shards the parameters, so it has the context's watch and
    ends with ``ctx.reset()``. A new team takes the place of one whose group has ended.
    """

    def __init__(self, ranks: Sequence[int], like: dist.ProcessGroup, example: Sharded) -> None:
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        """This rank's place among them."""
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
        """Where the ranks exchange."""
        return current_device(self._device_type)

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def connect(self, groups: GroupCache) -> None:
        """Takes the group from ``groups``. Collective over the ranks at the first call."""
        if not self.is_connected:
            group = groups.connect(self.ranks, alive(self._like), self._device_type)
            self._group = ref(group)

    def has_ended(self, groups: GroupCache) -> bool:
        """Whether ``groups`` no longer has the group."""
        if self._group is None:
            return False
        found = groups.find(self.ranks, alive(self._like), self._device_type)
        return found is None or found is not self._group()

    @property
    def group(self) -> dist.ProcessGroup:
        """Nothing here keeps it from being destroyed."""
        assert self._group is not None, "not connected"
        return alive(self._group)


@dataclass(frozen=True, eq=False)
class Member:
    """This rank's part in sharing out one parameter: its ``rank`` in the ``team``, and the element
    of its tile at which its range starts. ``team`` is ``None`` if this rank is alone."""

    rank: int
    start: int
    split: Split
    division: Division
    team: Team | None = None


class Teams:
    """The teams of the parameters that one optimizer steps.

    A team is made of the ranks along those dimensions of a parameter's mesh along which ranks hold
    parts of the same matrices, or copies of them.
    """

    def __init__(self) -> None:
        self._members: dict[torch.Tensor, Member] = {}
        self._teams: dict[tuple[ref[GroupCache], Sequence[int]], Team] = {}
        self._own = GroupCache(separate=False)
        """Groups for parameters that no context shards."""

    def member(self, parameter: torch.Tensor) -> Member:
        """This rank's part in the team of a parameter that was given to :meth:`join`."""
        return self._members[parameter]

    def connect(self, team: Team) -> None:
        """Gives ``team`` its group. Collective over its ranks at the first call."""
        team.connect(self._groups(team.mesh_info))

    def begin_step(self, team: Team) -> None:
        """Gives ``team`` its group, and notes that this rank begins to exchange. Where a rank is
        missing, the others find that by asking."""
        self.connect(team)
        if team.mesh_info is not None:
            team.mesh_info.faults.begins("an optimizer's step", team.group)

    def join(self, parameters: Iterable[tuple[torch.Tensor, Split]]) -> None:
        """Finds the teams of ``parameters``, each given with its split. Collective for teams that
        are not just the ranks which hold ranges, at the first call for a parameter."""
        others: dict[Team, list[tuple[Sharded, Split]]] = {}
        for parameter, split in parameters:
            known = self._members.get(parameter)
            if known is not None and known.split == split:
                continue
            if not isinstance(parameter, Sharded):
                tile = Tile((0,) * parameter.dim(), tuple(parameter.shape))
                self._add(parameter, split, None, (Holding(tile, 0, parameter.numel()),))
                continue
            across = _dims_across_matrices(parameter, split)
            team = self._team(parameter, across)
            if team is None:
                self._add(parameter, split, team, (_holding(parameter),))
            elif isinstance(parameter, RaggedDTensor) and across == [range_dim(parameter._spec)]:
                self._add(parameter, split, team, _holdings_of_ranges(parameter, team))
            else:
                others.setdefault(team, []).append((parameter, split))
        for team, members in others.items():
            # Plans follow from tiles, so ranks of tensor parallelism may have other ranges.
            self.connect(team)
            mine = [_holding(each) for each, _ in members]
            found = gather_objects(mine, team.group, team.device, "Muon")
            for (each, split), holdings in zip(members, zip(*found, strict=True), strict=True):
                self._add(each, split, team, holdings)

    def drop_ended(self) -> None:
        """Forgets the teams whose groups a reset has ended. What they agreed on, others may have
        to agree on anew."""
        ended = {
            key
            for key, team in self._teams.items()
            if key[0]() is not (groups := self._groups(team.mesh_info)) or team.has_ended(groups)
        }
        if not ended:
            return
        gone = {self._teams.pop(key) for key in ended}
        for parameter, member in list(self._members.items()):
            if member.team in gone:
                del self._members[parameter]

    def give_up(self, error: BaseException) -> None:
        """Ends the exchanges for which other ranks wait for this one in vain, because ``error``
        ended its step."""
        for mesh_info in {team.mesh_info for team in self._teams.values() if team.is_connected}:
            if mesh_info is not None:
                mesh_info.faults.gave_up("Muon.step()", error)
        self._own.close()
        self._own = GroupCache(separate=False)

    def _add(
        self,
        parameter: torch.Tensor,
        split: Split,
        team: Team | None,
        holdings: tuple[Holding, ...],
    ) -> None:
        rank = 0 if team is None else team.rank
        division = divide(tuple(parameter.shape), split, holdings)
        self._members[parameter] = Member(rank, holdings[rank].start, split, division, team)

    def _groups(self, mesh_info: MeshInfo | None) -> GroupCache:
        return self._own if mesh_info is None else mesh_info.group_cache

    def _team(self, parameter: Sharded, dims: Sequence[int]) -> Team | None:
        if not dims:
            return None
        mesh = parameter.device_mesh
        if len(dims) == 1:
            like = mesh.get_group(dims[0])
            ranks = dist.get_process_group_ranks(like)
        else:
            like = mesh.get_group(_own_dim(parameter))
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            ranks = (
                mesh.mesh[
                    tuple(
                        slice(None) if dim in dims else place
                        for dim, place in enumerate(coordinate)
                    )
                ]
                .flatten()
                .tolist()
            )
        key = ref(self._groups(mesh_info_of(parameter.edits))), tuple(ranks)
        if key not in self._teams:
            self._teams[key] = Team(ranks, like, parameter)
        return self._teams[key]


def _dims_across_matrices(parameter: Sharded, split: Split) -> list[int]:
    """The dimensions of the parameter's mesh along which ranks hold parts of the same matrices, or
    copies of them. They are the same on every rank."""
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
    if all(whole_parts(shape, split, tile) is not None for tile in tiles):
        cutting = []
    return [
        dim
        for dim, placement in enumerate(spec.placements)
        if spec.mesh.size(dim) > 1 and (dim in cutting or not is_cut(placement))
    ]


def _own_dim(parameter: Sharded) -> int:
    """The dimension of the parameter's mesh along which it is sharded."""
    if isinstance(parameter, RaggedDTensor):
        return range_dim(parameter._spec)
    return next(dim for dim, placement in enumerate(parameter.placements) if is_cut(placement))


def _holding(parameter: Sharded) -> Holding:
    """What this rank holds: a range of its tile, or rows, which are a tile of their own."""
    tile = tile_of(parameter._spec)
    if isinstance(parameter, RaggedDTensor):
        return Holding(tile, *parameter.local_range)
    return Holding(tile, 0, tile.numel)


def _holdings_of_ranges(parameter: RaggedDTensor, team: Team) -> tuple[Holding, ...]:
    """What the ranks of ``team`` hold, which hold ranges of the same tile."""
    tile = tile_of(parameter._spec)
    ranges = {rank: (start, stop) for rank, start, stop in parameter.placement.ranges}
    return tuple(Holding(tile, *ranges.get(rank, (0, 0))) for rank in range(len(team.ranks)))
