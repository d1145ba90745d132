"""Who sends which part of which tensor to whom, in rounds of a bounded size. Computed on every rank
from what all ranks have and want, so that all have the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

import torch

from fsdp_overlap.weights.regions import Region, slabs, whole

ALIGNMENT = 16
"""Bytes. Parts of a message begin at multiples of it, so that they can be viewed in any dtype."""


class Side(NamedTuple):
    """What a rank has of a tensor, or wants of it. ``mesh`` lists the ranks that the tensor is
    spread over. It is empty for a plain tensor, which is whole wherever it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[Region, ...]
    mesh: tuple[int, ...] = ()


class Note(NamedTuple):
    """What a rank tells the others: what it ``has`` and ``wants``, by name."""

    has: Mapping[str, Side]
    wants: Mapping[str, Side]


class Part(NamedTuple):
    """A region of a tensor within a message. ``held`` is the number of the region in which its
    sender has it, ``wanted`` that in which its receiver wants it."""

    name: str
    region: Region
    dtype: torch.dtype
    held: int
    wanted: int

    @property
    def nbytes(self) -> int:
        return -(-self.region.numel * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass
class Round:
    """What one rank sends to each rank and receives from each. What it has itself is in ``own``.

    If it is ``gathered``, each rank sends the same to all, and ``sends`` has that once, at the
    place of this rank. ``completes`` lists the tensors of which nothing comes later.
    """

    gathered: bool
    sends: list[list[Part]]
    receives: list[list[Part]]
    own: list[Part] = field(default_factory=list)
    completes: list[str] = field(default_factory=list)

    @classmethod
    def empty(cls, gathered: bool, ranks: int) -> Round:
        return cls(gathered, [[] for _ in range(ranks)], [[] for _ in range(ranks)])


Holders = dict[Region, list[int]]
"""The ranks that have each region of a tensor."""


@dataclass
class Routed:
    """How one tensor travels: which ranks have each region, and what each rank wants.

    ``sources`` are those of each rank. They differ where each rank gets the tensor of its own mesh.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: list[Holders]
    held: list[dict[Region, int]]
    """For each rank, the numbers of its regions."""
    wants: list[tuple[Region, ...]]

    @property
    def is_gathered(self) -> bool:
        """Whether every rank wants all of it, and no two have the same."""
        every = whole(self.shape)
        first = self.sources[0]
        return (
            len(self.wants) > 1
            and all(wants == (every,) for wants in self.wants)
            and all(holders is first for holders in self.sources)
            and all(len(ranks) == 1 for ranks in first.values())
        )

    @property
    def copies(self) -> int:
        """How many times as much as a piece the rank that has most of it may have to send."""
        numel = whole(self.shape).numel
        asked = sum(region.numel for wants in self.wants for region in wants)
        most = max(sum(region.numel for region in held) for held in self.held)
        return max(1, -(-asked * most // max(1, numel * numel)))

    def source(self, region: Region, target: int) -> int:
        """The rank that sends ``region`` to ``target``: itself if it can, else one that others who
        want the same do not all ask."""
        ranks = self.sources[target][region]
        return target if target in ranks else ranks[target * len(ranks) // len(self.wants)]

    def pieces(self, most: int) -> list[dict[Region, Region]]:
        """The tensor in pieces of about ``most`` elements: of each region that a rank has, the part
        that is in the piece. So all ranks that have something send some of each piece."""
        regions = dict.fromkeys(region for holders in self.sources for region in holders)
        numel = whole(self.shape).numel
        count = max(1, -(-numel // most))
        cut = {region: _slabs_of(region, -(-region.numel // count)) for region in regions}
        return [
            {region: slabs[number] for region, slabs in cut.items() if number < len(slabs)}
            for number in range(max(map(len, cut.values()), default=1))
        ]

    def parts(self, piece: Mapping[Region, Region], sender: int, target: int) -> Iterator[Part]:
        """What ``sender`` sends to ``target`` of a piece, in the order in which it lies in the
        message."""
        for region, held in self.held[sender].items():
            if region not in piece or region not in self.sources[target]:
                continue
            if self.source(region, target) == sender:
                for wanted, want in enumerate(self.wants[target]):
                    if (found := piece[region] & want) is not None:
                        yield Part(self.name, found, self.dtype, held, wanted)


def _slabs_of(region: Region, most: int) -> list[Region]:
    return [
        Region(tuple(map(add, region.offsets, slab.offsets)), slab.sizes)
        for slab in slabs(region.sizes, max(1, most))
    ]


def on_several_meshes(notes: Sequence[Note]) -> list[str]:
    """The names that stand for a tensor on each of several meshes: copies, or tensors of their own,
    as those of experts."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for note in notes:
        for name, side in note.has.items():
            found.setdefault(name, set()).add(side.mesh)
    return [name for name, meshes in found.items() if len(meshes) > 1]


def route(notes: Sequence[Note], *, strict: bool, one: bool) -> list[Routed]:
    """How tensors travel, in the order in which ranks named them. ``notes`` are those of all ranks.

    ``strict``: whether it is an error if nobody wants a tensor. ``one``: whether a name stands for
    one tensor, of which those on several meshes are copies; else each rank gets that of its own
    mesh.

    Raises:
        ValueError: what ranks have and want does not go together; names each tensor.
    """
    names = dict.fromkeys(name for note in notes for name in note.has)
    wanted = dict.fromkeys(name for note in notes for name in note.wants)
    problems = [f"nobody has {name!r}" for name in wanted if name not in names]
    if strict:
        problems += [f"nobody wants {name!r}" for name in names if name not in wanted]
    found = []
    for name in names:
        if name in wanted:
            try:
                found.append(_routed(name, notes, one))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("; ".join(problems[:8]) + more)
    return found


def _routed(name: str, notes: Sequence[Note], one: bool) -> Routed:
    has = {rank: note.has[name] for rank, note in enumerate(notes) if name in note.has}
    wants = {rank: note.wants[name] for rank, note in enumerate(notes) if name in note.wants}
    _check_same(
        name, "shape", [(rank, side.shape) for rank, side in (*has.items(), *wants.items())]
    )
    for sides in (has, wants):
        _check_same(name, "dtype", [(rank, side.dtype) for rank, side in sides.items()])
    side = next(iter(has.values()))
    by_mesh: dict[tuple[int, ...], Holders] = {}
    for rank, each in has.items():
        holders = by_mesh.setdefault(each.mesh, {})
        for region in each.regions:
            holders.setdefault(region, []).append(rank)
    for holders in by_mesh.values():
        there, all_of_it = sum(region.numel for region in holders), whole(side.shape).numel
        if there != all_of_it:
            raise ValueError(f"of {name!r} ranks have {there} elements, and it has {all_of_it}")
    of_mesh = {mesh: dict(sorted(holders.items())) for mesh, holders in by_mesh.items()}
    first = next(iter(of_mesh.values()))
    sources = [
        of_mesh[has[rank].mesh] if rank in has and not one else first for rank in range(len(notes))
    ]
    asked = next(iter(wants.values())).dtype
    none: tuple[Region, ...] = ()
    return Routed(
        name,
        side.shape,
        asked if asked.itemsize < side.dtype.itemsize else side.dtype,
        sources,
        [
            {region: has[rank].regions.index(region) for region in sorted(has[rank].regions)}
            if rank in has
            else {}
            for rank in range(len(notes))
        ],
        [wants[rank].regions if rank in wants else none for rank in range(len(notes))],
    )


def _check_same(name: str, what: str, given: Sequence[tuple[int, object]]) -> None:
    first: dict[object, int] = {}
    for rank, value in given:
        first.setdefault(value, rank)
    if len(first) > 1:
        told = ", ".join(f"{value} on rank {rank}" for value, rank in first.items())
        raise ValueError(f"{name!r} has not the same {what} everywhere: {told}")


def plan_rounds(tensors: Iterable[Routed], me: int, ranks: int, most_bytes: int) -> list[Round]:
    """The rounds of rank ``me`` of so many ``ranks``. In each, no rank sends or receives more than
    about ``most_bytes``."""
    rounds: list[Round] = []
    room = 0
    for tensor in tensors:
        gathered = tensor.is_gathered
        cost = tensor.dtype.itemsize * (1 if gathered else tensor.copies)
        for piece in tensor.pieces(max(1, most_bytes // cost)):
            nbytes = sum(part.numel for part in piece.values()) * cost
            if not rounds or nbytes > room or rounds[-1].gathered != gathered:
                rounds.append(Round.empty(gathered, ranks))
                room = most_bytes
            room -= nbytes
            _add(rounds[-1], tensor, piece, me)
        rounds[-1].completes.append(tensor.name)
    return rounds


def _add(into: Round, tensor: Routed, piece: Mapping[Region, Region], me: int) -> None:
    others = [rank for rank in range(len(tensor.wants)) if rank != me]
    own = list(tensor.parts(piece, me, me))
    if into.gathered:
        into.sends[me] += own
        into.receives[me] += own
    else:
        into.own += own
        for target in others if tensor.held[me] else ():
            into.sends[target] += tensor.parts(piece, me, target)
    for sender in others if tensor.wants[me] else ():
        into.receives[sender] += tensor.parts(piece, sender, me)
