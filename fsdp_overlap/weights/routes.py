"""Who sends which part of which tensor to whom, in rounds of a bounded size. All ranks plan
the same rounds from what they told each other. What one rank sends and receives in a round is
reckoned when the round begins, and takes time for that alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from fsdp_overlap.weights.holders import Flow, Holders, between
from fsdp_overlap.weights.regions import Region, slab, slab_count, whole

ALIGNMENT = 16
"""Bytes. Parts of a message begin at multiples of it, so that they can be viewed in any dtype."""


class Side(NamedTuple):
    """How a tensor lies on ranks that have it, or want it. ``regions`` are those of each rank, by
    its place in the group; ``None`` if each has all, as of a plain tensor. ``mesh`` lists the ranks
    that it is spread over. It is empty for a plain tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: Mapping[int, tuple[Region, ...]] | None = None
    mesh: tuple[int, ...] = ()

    def on(self, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[Region, ...]]]:
        """What each of ``ranks`` has, if anything."""
        if self.regions is None:
            everything = (whole(self.shape),)
            yield from ((rank, everything) for rank in ranks)
        else:
            among = set(ranks)
            yield from (each for each in self.regions.items() if each[0] in among)


Sides = Mapping[str, Sequence[tuple[Side, Sequence[int]]]]
"""By the names of tensors: how each lies, and on which ranks, in ascending order. Several where
ranks told different things."""


class Part(NamedTuple):
    """A region of a tensor within a message."""

    name: str
    region: Region
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return -(-self.region.numel * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass
class Messages:
    """What one rank sends to others and receives from them in a round. What it has itself is in
    ``own``. If the round is gathered, each rank sends the same to all, and ``sends`` has that once,
    at the place of this rank, as has ``receives``."""

    own: list[Part] = field(default_factory=list)
    sends: dict[int, list[Part]] = field(default_factory=dict)
    receives: dict[int, list[Part]] = field(default_factory=dict)


@dataclass
class Route:
    """How tensors travel that lie in the same way: in a flow for each mesh that ranks get it from.
    ``ranks`` is how many ranks there are."""

    shape: tuple[int, ...]
    flows: list[Flow]
    ranks: int

    @cached_property
    def is_gathered(self) -> bool:
        """Whether every rank wants all of it, and no two have the same."""
        if self.ranks == 1 or len(self.flows) != 1:
            return False
        [flow] = self.flows
        asking = flow.wants.get((whole(self.shape),), ())
        return len(asking) == self.ranks and all(len(each) == 1 for each in flow.holders.values())

    @cached_property
    def copies(self) -> int:
        """How many times as much as a piece the rank that has most of it may have to send."""
        numel = whole(self.shape).numel
        asked = sum(flow.asked_numel for flow in self.flows)
        most = max((flow.most_held for flow in self.flows), default=0)
        return max(1, -(-asked * most // max(1, numel * numel)))

    def cut(self, most: int) -> Cut:
        """How to cut it into pieces of about ``most`` elements."""
        count = max(1, -(-whole(self.shape).numel // most))
        largest = max((region.numel for flow in self.flows for region in flow.holders), default=0)
        if count == 1 or largest * _MANY * (1 if self.is_gathered else self._times_asked) <= most:
            return Cut(count)
        sizes = {region.sizes for flow in self.flows for region in flow.holders}
        return Cut(max(slab_count(each, _part(each, count)) for each in sizes), count)

    @property
    def _times_asked(self) -> int:
        numel = whole(self.shape).numel
        return -(-sum(flow.asked_numel for flow in self.flows) // max(1, numel))


_MANY = 16


class Cut(NamedTuple):
    """How a tensor is cut into so many ``pieces``. Each has some of the regions, as they follow
    each other, where these are small. Else it has the part of one number of each region, cut in so
    many ``parts``, so that all ranks that have something send some of each piece. There are more
    pieces than that if a row is large."""

    pieces: int
    parts: int | None = None


def _part(sizes: tuple[int, ...], parts: int) -> int:
    return max(1, -(-whole(sizes).numel // parts))


class Routed(NamedTuple):
    """One tensor, in the dtype in which it travels."""

    name: str
    dtype: torch.dtype
    route: Route


class Piece(NamedTuple):
    """A piece of a tensor."""

    tensor: Routed
    number: int
    cut: Cut

    def gather(self, into: Messages) -> None:
        """Adds what each rank sends to all."""
        [flow] = self.tensor.route.flows
        for region in flow.ordered[self._places(flow)]:
            if (found := self._of(region)) is not None:
                [sender] = flow.holders[region]
                into.receives.setdefault(sender, []).append(self._message(found))

    def exchange(self, into: Messages, me: int) -> None:
        """Adds what rank ``me`` sends and receives. Both sides go through regions, and then through
        those that are wanted of each, in the same order."""
        for flow in self.tensor.route.flows:
            places = self._places(flow)
            for region, wanting in between(flow.leaving(me), places):
                for wants, targets in wanting:
                    parts = self._parts(region, wants)
                    for target in targets if parts else ():
                        into.sends.setdefault(target, []).extend(parts)
            for region, (sender, wants) in between(flow.coming(me), places):
                parts = self._parts(region, wants)
                if sender == me:
                    into.own += parts
                elif parts:
                    into.receives.setdefault(sender, []).extend(parts)

    def _places(self, flow: Flow) -> slice:
        """Which regions of ``flow`` the piece has some of."""
        return slice(None) if self.cut.parts else flow.run(self.number, self.cut.pieces)

    def _of(self, region: Region) -> Region | None:
        """What of ``region``, which is at one of these places, is in the piece."""
        if self.cut.parts is None:
            return region
        most = _part(region.sizes, self.cut.parts)
        if self.number >= slab_count(region.sizes, most):
            return None
        return slab(region.sizes, most, self.number).moved(region.offsets)

    def _parts(self, region: Region, wants: Iterable[Region]) -> list[Part]:
        if (found := self._of(region)) is None:
            return []
        return [self._message(both) for want in wants if (both := found & want) is not None]

    def _message(self, region: Region) -> Part:
        return Part(self.tensor.name, region, self.tensor.dtype)


@dataclass
class Round:
    """Pieces that travel together. If it is ``gathered``, each rank sends the same to all.
    ``completes`` lists the tensors of which nothing comes later."""

    gathered: bool
    pieces: list[Piece] = field(default_factory=list)
    completes: list[str] = field(default_factory=list)

    def messages(self, me: int) -> Messages:
        """What rank ``me`` sends and receives."""
        found = Messages()
        for piece in self.pieces:
            if self.gathered:
                piece.gather(found)
            else:
                piece.exchange(found, me)
        if self.gathered:
            found.sends[me] = found.receives.get(me, [])
        return found


def whole_of(shape: Sequence[int], dtype: torch.dtype, to: torch.dtype | None) -> Side:
    """All of a tensor, cast ``to`` a dtype if one is given and it has floating-point numbers."""
    return Side(tuple(shape), to if to is not None and dtype.is_floating_point else dtype)


def wants_all(has: Sides, to: torch.dtype | None, among: Collection[int] | None) -> Sides:
    """What ranks want if each has to get all of what it has a part of, cast as by
    :func:`whole_of`. ``among`` are the ranks that want anything, all by default."""
    sides: dict[tuple[object, ...], Side] = {}
    members: dict[int, list[int]] = {}
    found: dict[str, list[tuple[Side, Sequence[int]]]] = {}
    for name, each in has.items():
        for side, ranks in each:
            key = id(ranks)
            if key not in members:
                members[key] = [rank for rank in ranks if among is None or rank in among]
            if members[key]:
                want = sides.setdefault((side.shape, side.dtype), whole_of(*side[:2], to))
                found.setdefault(name, []).append((want, members[key]))
    return found


def on_several_meshes(has: Sides) -> list[str]:
    """The names that stand for a tensor on each of several meshes: copies, or tensors of their own,
    as those of experts."""
    return [name for name, sides in has.items() if len({side.mesh for side, _ in sides}) > 1]


def route(has: Sides, wants: Sides, ranks: int, *, strict: bool, one: bool) -> list[Routed]:
    """How tensors travel among so many ``ranks``, in the order of ``has``.

    ``strict``: whether it is an error if nobody wants a tensor. ``one``: whether a name stands for
    one tensor, of which those on several meshes are copies; else each rank gets that of its own
    mesh.

    Raises:
        ValueError: what ranks have and want does not go together; names each tensor.
    """
    problems = [f"nobody has {name!r}" for name in wants if name not in has]
    if strict:
        problems += [f"nobody wants {name!r}" for name in has if name not in wants]
    known: dict[tuple[tuple[int, int], ...], Route] = {}
    found = []
    for name, sides in has.items():
        if asked := wants.get(name):
            try:
                _check_same(name, "shape", [*_shapes(sides), *_shapes(asked)])
                for each in (sides, asked):
                    _check_same(name, "dtype", [(ranks[0], side.dtype) for side, ranks in each])
                # Sides that are told once are one object for all tensors that lie so.
                key = tuple((id(side), id(ranks)) for side, ranks in (*sides, *asked))
                if key not in known:
                    known[key] = _route(name, sides, asked, ranks, one)
                dtypes = sides[0][0].dtype, asked[0][0].dtype
                found.append(Routed(name, min(dtypes, key=_itemsize), known[key]))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("; ".join(problems[:8]) + more)
    return found


def _itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _shapes(sides: Sequence[tuple[Side, Sequence[int]]]) -> list[tuple[int, object]]:
    return [(ranks[0], side.shape) for side, ranks in sides]


def _route(
    name: str,
    has: Sequence[tuple[Side, Sequence[int]]],
    wants: Sequence[tuple[Side, Sequence[int]]],
    ranks: int,
    one: bool,
) -> Route:
    shape = has[0][0].shape
    by_mesh: dict[tuple[int, ...], Holders] = {}
    for side, members in has:
        holders = by_mesh.setdefault(side.mesh, {})
        for rank, regions in side.on(members):
            for region in regions:
                holders.setdefault(region, []).append(rank)
    for holders in by_mesh.values():
        there, all_of_it = sum(region.numel for region in holders), whole(shape).numel
        if there != all_of_it:
            raise ValueError(f"of {name!r} ranks have {there} elements, and it has {all_of_it}")
    # The number of the mesh from which a rank gets what it wants: its own, or else the first.
    own: dict[int, int] = {}
    if len(by_mesh) > 1 and not one:
        numbers = {mesh: number for number, mesh in enumerate(by_mesh)}
        own = {rank: numbers[side.mesh] for side, members in has for rank in members}
    asked: list[dict[tuple[Region, ...], list[int]]] = [{} for _ in by_mesh]
    for side, members in wants:
        for rank, regions in side.on(members):
            asked[own.get(rank, 0)].setdefault(regions, []).append(rank)
    flows = [
        Flow(holders, of_mesh, shape, ranks)
        for holders, of_mesh in zip(by_mesh.values(), asked, strict=True)
        if of_mesh
    ]
    return Route(shape, flows, ranks)


def _check_same(name: str, what: str, given: Sequence[tuple[int, object]]) -> None:
    first: dict[object, int] = {}
    for rank, value in given:
        first.setdefault(value, rank)
    if len(first) > 1:
        told = ", ".join(f"{value} on rank {rank}" for value, rank in first.items())
        raise ValueError(f"{name!r} has not the same {what} everywhere: {told}")


def plan_rounds(tensors: Iterable[Routed], most_bytes: int) -> list[Round]:
    """The rounds in which ``tensors`` travel. In each, no rank sends or receives more than about
    ``most_bytes``."""
    rounds: list[Round] = []
    cuts: dict[tuple[int, int], Cut] = {}
    room = 0
    for tensor in tensors:
        gathered = tensor.route.is_gathered
        cost = tensor.dtype.itemsize * (1 if gathered else tensor.route.copies)
        key = id(tensor.route), cost
        if key not in cuts:
            cuts[key] = tensor.route.cut(max(1, most_bytes // cost))
        cut = cuts[key]
        nbytes = -(-whole(tensor.route.shape).numel // (cut.parts or cut.pieces)) * cost
        for number in range(cut.pieces):
            if not rounds or nbytes > room or rounds[-1].gathered != gathered:
                rounds.append(Round(gathered))
                room = most_bytes
            room -= nbytes
            rounds[-1].pieces.append(Piece(tensor, number, cut))
        rounds[-1].completes.append(tensor.name)
    return rounds
