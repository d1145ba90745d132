"""Sends what each rank holds of a matrix to one owner, and the orthogonal matrix back.

Owners are balanced by work. The matrices travel in rounds, so that one round is on its way while
the products of another run. Of pieces that several ranks hold copies of, one copy is sent; the
result goes to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import all_to_all
from fsdp_overlap.comm.lanes import Lane
from fsdp_overlap.optim.matrices import Division, Piece, Shared, work_of
from fsdp_overlap.optim.updates import Part, Update, directions, move

# How many elements an owner gets in a round: enough for an efficient message, and few enough for
# several rounds.
ROUND_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class Parcel:
    """Matrices that ranks share, and the rank that owns them. ``parameter`` is the number of their
    parameter. ``copy`` says which copy of each piece is sent to the owner."""

    parameter: int
    matrices: Shared
    owner: int
    copy: int

    def sender(self, piece: Piece) -> int:
        return piece.holders[self.copy % len(piece.holders)]


@lru_cache(maxsize=64)
def plan_rounds(
    divisions: tuple[Division, ...], world_size: int, round_elements: int
) -> tuple[tuple[Parcel, ...], ...]:
    """Gives all shared matrices owners, and returns the parcels of each round.

    The matrices with the most work are first. Each goes to the rank with the least work, which
    includes the matrices that the rank holds whole. Among equal ranks, the one that holds most of
    the matrix gets it. Where ranks hold all of it, it goes to one of these.
    """
    loads = [0] * world_size
    for division in divisions:
        for rank, stacks in division.whole.items():
            loads[rank] += sum(map(work_of, stacks))
    shared = [(number, each) for number, one in enumerate(divisions) for each in one.shared]
    owned: list[list[Parcel]] = [[] for _ in loads]
    for number, matrices in sorted(shared, key=lambda item: -work_of(item[1])):
        held: dict[int, int] = {}
        for piece in matrices.pieces:
            for rank in piece.holders:
                held[rank] = held.get(rank, 0) + piece.last - piece.first
        is_whole = len(matrices.pieces) == 1
        owner = min(
            held if is_whole else range(world_size),
            key=lambda rank: (loads[rank], -held.get(rank, 0), rank),
        )
        loads[owner] += work_of(matrices)
        owned[owner].append(Parcel(number, matrices, owner, divisions[number].copies[owner]))
    by_owner = [_shares(parcels, round_elements) for parcels in owned]
    return tuple(
        tuple(parcel for share in shares for parcel in share)
        for shares in zip_longest(*by_owner, fillvalue=[])
    )


def _shares(parcels: Sequence[Parcel], round_elements: int) -> list[list[Parcel]]:
    """The parcels of one owner, by round. A round has no more than ``round_elements`` elements, or
    a single parcel."""
    shares: list[list[Parcel]] = []
    elements = 0
    for parcel in parcels:
        size = parcel.matrices.numel
        if not shares or elements + size > round_elements:
            shares.append([])
            elements = 0
        shares[-1].append(parcel)
        elements += size
    return shares


@dataclass(frozen=True, eq=False)
class Route:
    """Pieces in the order in which they lie in one message, and how many elements of them go to, or
    come from, each rank."""

    sizes: list[int]
    pieces: list[tuple[Parcel, Piece]]

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, Parcel, Piece]], world_size: int) -> Route:
        """``pieces`` have the other rank before them."""
        ordered = sorted(pieces, key=lambda each: each[0])
        sizes = [0] * world_size
        for rank, _, piece in ordered:
            sizes[rank] += piece.last - piece.first
        return cls(sizes, [(parcel, piece) for _, parcel, piece in ordered])


class Routes(NamedTuple):
    """What one rank sends and receives in a round: pieces that go to owners, pieces that come to
    it, results that it sends back, and results that return to it."""

    going: Route
    coming: Route
    results: Route
    returning: Route


@lru_cache(maxsize=256)
def routes(parcels: tuple[Parcel, ...], rank: int, world_size: int) -> Routes:
    """The routes of ``rank``. They are the same in every step."""
    going, coming, results, returning = [], [], [], []
    for parcel in parcels:
        for piece in parcel.matrices.pieces:
            sender = parcel.sender(piece)
            if parcel.owner not in piece.holders:
                if parcel.owner == rank:
                    coming.append((sender, parcel, piece))
                elif sender == rank:
                    going.append((parcel.owner, parcel, piece))
            if parcel.owner == rank:
                others = (holder for holder in piece.holders if holder != rank)
                results += [(holder, parcel, piece) for holder in others]
            elif rank in piece.holders:
                returning.append((parcel.owner, parcel, piece))
    return Routes(*(Route.of(each, world_size) for each in (going, coming, results, returning)))


class Travelling(NamedTuple):
    """A piece that this rank sends or receives, and its place in the buffer of a shipment."""

    parcel: Parcel
    piece: Piece
    view: torch.Tensor


class Shipment:
    """The memory of one message."""

    def __init__(self, route: Route, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = route.sizes
        self.buffer = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        views = self.buffer.split([piece.last - piece.first for _, piece in route.pieces])
        self.pieces = [
            Travelling(*one, view) for one, view in zip(route.pieces, views, strict=True)
        ]


class Owned(NamedTuple):
    """Matrices that this rank orthogonalizes for its team: the pieces that came for them, those
    that it holds itself, and where the results go that others wait for."""

    parcel: Parcel
    update: Update
    received: list[Travelling]
    own: list[tuple[Part, Piece]]
    sent_back: list[Travelling]


class Exchange:
    """One round on one rank. Call, in this order, :meth:`send`, :meth:`receive`, :meth:`send_back`
    and :meth:`finish`. Collective over ``group``. Matrices travel in ``dtype``, between ranks'
    memory on ``device``."""

    def __init__(
        self,
        parcels: tuple[Parcel, ...],
        updates: Sequence[Update],
        group: dist.ProcessGroup,
        lane: Lane,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rank = group.rank()
        self._owned = [parcel for parcel in parcels if parcel.owner == rank]
        self._routes = routes(parcels, rank, group.size())
        self._rank = rank
        self._updates = updates
        self._group = group
        self._lane = lane
        self.dtype = dtype
        self.device = device
        self._sent: Shipment | None = None
        """What the lane reads."""

    def send(self) -> None:
        """Sends to the owners what they lack."""
        going = self._shipment(self._routes.going)
        self._coming = self._shipment(self._routes.coming)
        if parts := [self._part(parcel, piece) for parcel, piece, _ in going.pieces]:
            torch._foreach_copy_([each.view for each in going.pieces], directions(parts))
        self._enqueue(self._coming, going)

    def receive(self) -> list[Owned]:
        """Waits for the matrices that this rank owns. Results must be copied to where they say
        before :meth:`send_back`."""
        self._ticket.wait()
        self._results = self._shipment(self._routes.results)
        owned = {
            parcel: Owned(parcel, self._updates[parcel.parameter], [], [], [])
            for parcel in self._owned
        }
        for each in self._coming.pieces:
            owned[each.parcel].received.append(each)
        for each in self._results.pieces:
            owned[each.parcel].sent_back.append(each)
        for parcel, one in owned.items():
            for piece in parcel.matrices.pieces:
                if self._rank in piece.holders:
                    one.own.append((self._part(parcel, piece), piece))
        return list(owned.values())

    def send_back(self) -> None:
        """Sends the results to all that hold a piece."""
        self._coming = self._shipment(self._routes.returning)
        self._enqueue(self._coming, self._results)

    def finish(self) -> None:
        """Waits for what the owners send back, and moves this rank's parameters."""
        self._ticket.wait()
        pieces = self._coming.pieces
        move(
            [self._part(each.parcel, each.piece) for each in pieces],
            [each.view for each in pieces],
        )

    def _part(self, parcel: Parcel, piece: Piece) -> Part:
        update = self._updates[parcel.parameter]
        return Part(update, parcel.matrices, piece.first, piece.last)

    def _shipment(self, route: Route) -> Shipment:
        return Shipment(route, self.dtype, self.device)

    def _enqueue(self, target: Shipment, source: Shipment) -> None:
        self._sent = source  # its memory is not given to others until the lane has read it
        self._lane.after_compute()
        self._ticket = self._lane.enqueue(
            "all_to_all",
            "Muon",
            lambda: all_to_all(
                target.buffer, source.buffer, target.sizes, source.sizes, self._group
            ),
        )
