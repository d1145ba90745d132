"""Teams: the ranks that share out the matrices of a parameter, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from fsdp_overlap.comm.group_facts import alive
from fsdp_overlap.comm.pool import Loan, borrow, give_back
from fsdp_overlap.comm.streams import has_streams
from fsdp_overlap.optim.matrices import Division, Holding, Split, divide, whole_parts
from fsdp_overlap.optim.newton_schulz import fast_dtype
from fsdp_overlap.tensor.placement import Tile, range_dim, tile_at, tile_of
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True, eq=False)
class Member:
    """This rank's part in the team of one parameter: its ``rank``, and the element of its tile at
    which its range starts."""

    rank: int
    start: int
    split: Split
    division: Division
    reference: ref[dist.ProcessGroup] | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the team, ``None`` for a rank alone. Nothing here keeps it from
        being destroyed."""
        return None if self.reference is None else alive(self.reference)


class Teams:
    """The teams of the parameters that one optimizer steps. ``dtype`` is that of the products, if
    the user chose one.

    A team is made of the ranks along those dimensions of a parameter's mesh along which ranks hold
    parts of the same matrices, or copies of them. Its process group is the mesh's where that is one
    dimension, and else one that is borrowed until this object is freed.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._agreed: WeakKeyDictionary[dist.ProcessGroup, torch.dtype] = WeakKeyDictionary()
        self._members: dict[torch.Tensor, Member] = {}
        self._loans: dict[tuple[int, ...], Loan] = {}
        self._lent: list[Loan] = []
        finalize(self, give_back, self._lent).atexit = False

    def member(self, parameter: torch.Tensor) -> Member:
        """This rank's part in the team of a parameter that was given to :meth:`join`."""
        return self._members[parameter]

    def dtype(self, group: dist.ProcessGroup | None, device: torch.device) -> torch.dtype:
        """The dtype that matrices are multiplied and sent in. Where processors differ, all ranks of
        ``group`` take one that none of them is slow with: collective at its first call."""
        if self._dtype is not None:
            return self._dtype
        if group is None or has_streams(device):
            return fast_dtype(device)
        if group not in self._agreed:
            found = [torch.float32] * group.size()
            dist.all_gather_object(found, fast_dtype(device), group)
            self._agreed[group] = found[0] if len(set(found)) == 1 else torch.float32
        return self._agreed[group]

    def join(self, parameters: Iterable[tuple[torch.Tensor, Split]]) -> None:
        """Finds the teams of ``parameters``, each given with its split. Collective for teams that
        are not just the ranks which hold ranges, at the first call for a parameter."""
        others: dict[dist.ProcessGroup, list[tuple[ShardedTensor, Split]]] = {}
        for parameter, split in parameters:
            known = self._members.get(parameter)
            if known is not None and known.split == split:
                continue
            if not isinstance(parameter, ShardedTensor):
                tile = Tile((0,) * parameter.dim(), tuple(parameter.shape))
                self._add(parameter, split, None, (Holding(tile, 0, parameter.numel()),))
                continue
            across = _dims_across_matrices(parameter, split)
            group = self._group(parameter, across)
            if group is None or across == [range_dim(parameter._spec)]:
                self._add(parameter, split, group, _holdings_of_ranges(parameter, group))
            else:
                others.setdefault(group, []).append((parameter, split))
        for group, members in others.items():
            # Plans follow from tiles, so ranks of tensor parallelism may have other ranges.
            mine = [Holding(tile_of(each._spec), *each.local_range) for each, _ in members]
            found: list[list[Holding]] = [[] for _ in range(group.size())]
            dist.all_gather_object(found, mine, group)
            for (each, split), holdings in zip(members, zip(*found, strict=True), strict=True):
                self._add(each, split, group, holdings)

    def _add(
        self,
        parameter: torch.Tensor,
        split: Split,
        group: dist.ProcessGroup | None,
        holdings: tuple[Holding, ...],
    ) -> None:
        rank = 0 if group is None else group.rank()
        self._members[parameter] = Member(
            rank,
            holdings[rank].start,
            split,
            divide(tuple(parameter.shape), split, holdings),
            None if group is None else ref(group),
        )

    def _group(self, parameter: ShardedTensor, dims: Sequence[int]) -> dist.ProcessGroup | None:
        mesh = parameter.device_mesh
        if len(dims) < 2:
            return mesh.get_group(dims[0]) if dims else None
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        index = tuple(slice(None) if dim in dims else place for dim, place in enumerate(coordinate))
        ranks = tuple(mesh.mesh[index].flatten().tolist())
        if ranks not in self._loans:
            loan = borrow("optimizer", parameter.range_group, ranks, mesh.device_type)
            self._loans[ranks] = loan
            self._lent.append(loan)
        return self._loans[ranks].group


def _dims_across_matrices(parameter: ShardedTensor, split: Split) -> list[int]:
    """The dimensions of the parameter's mesh along which ranks hold parts of the same matrices, or
    copies of them. They are the same on every rank."""
    spec = parameter._spec
    cutting = [
        dim
        for dim, placement in enumerate(spec.placements)
        if isinstance(placement, Shard) and placement.dim >= parameter.dim() - 2
    ]
    shape = tuple(parameter.shape)
    places = (
        range(spec.mesh.size(dim)) if isinstance(placement, Shard) else (0,)
        for dim, placement in enumerate(spec.placements)
    )
    tiles = {tile_at(spec, place) for place in product(*places)} if cutting else set()
    if all(whole_parts(shape, split, tile) is not None for tile in tiles):
        cutting = []
    return [
        dim
        for dim, placement in enumerate(spec.placements)
        if spec.mesh.size(dim) > 1 and (dim in cutting or not isinstance(placement, Shard))
    ]


def _holdings_of_ranges(
    parameter: ShardedTensor, group: dist.ProcessGroup | None
) -> tuple[Holding, ...]:
    """What the ranks of ``group`` hold, which hold ranges of the same tile, or this rank alone."""
    tile = tile_of(parameter._spec)
    if group is None:
        return (Holding(tile, *parameter.local_range),)
    ranges = {rank: (start, stop) for rank, start, stop in parameter.placement.ranges}
    return tuple(Holding(tile, *ranges.get(rank, (0, 0))) for rank in range(group.size()))
