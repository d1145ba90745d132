"""Sends each matrix that several ranks hold parts of to one owner, and back.

Owners are balanced by work. The matrices travel in rounds, so that one round is on its way while
the products of another run. The way back uses the same buffers, in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import all_to_all
from fsdp_overlap.comm.lanes import Lane
from fsdp_overlap.optim.matrices import CutStack, Division

# How many elements an owner gets in a round: enough for an efficient message, and few enough for
# several rounds.
ROUND_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Parcel:
    """A cut matrix and the rank that owns it. ``parameter`` is the number of its parameter."""

    parameter: int
    matrix: CutStack
    owner: int


@lru_cache(maxsize=64)
def plan_rounds(
    divisions: tuple[Division, ...], world_size: int, round_elements: int
) -> tuple[tuple[Parcel, ...], ...]:
    """Gives each cut matrix an owner, and returns the parcels of each round.

    The matrix with the most work is first. Each goes to the rank with the least work, which
    includes the matrices that the rank holds whole. Among equal ranks, the one that holds most of
    the matrix gets it.
    """
    loads = [0] * world_size
    for division in divisions:
        for rank, stacks in division.whole.items():
            loads[rank] += sum(stack.work for stack in stacks)
    cut = [(number, matrix) for number, each in enumerate(divisions) for matrix in each.cut]
    owned: list[list[Parcel]] = [[] for _ in loads]
    for number, matrix in sorted(cut, key=lambda item: -item[1].stack.work):
        held = {rank: last - first for rank, first, last in matrix.pieces}
        owner = min(range(world_size), key=lambda rank: (loads[rank], -held.get(rank, 0)))
        loads[owner] += matrix.stack.work
        owned[owner].append(Parcel(number, matrix, owner))
    by_owner = [_shares(parcels, round_elements) for parcels in owned]
    return tuple(
        tuple(parcel for share in shares for parcel in share)
        for shares in zip_longest(*by_owner, fillvalue=[])
    )


def _shares(parcels: Sequence[Parcel], round_elements: int) -> list[list[Parcel]]:
    """The parcels of one owner, by round. A round has no more than ``round_elements`` elements, or
    a single matrix."""
    shares: list[list[Parcel]] = []
    elements = 0
    for parcel in parcels:
        size = parcel.matrix.stack.numel
        if not shares or elements + size > round_elements:
            shares.append([])
            elements = 0
        shares[-1].append(parcel)
        elements += size
    return shares


class Shipment:
    """Pieces of matrices in one buffer, ordered by the rank at the other end."""

    def __init__(
        self,
        by_rank: Sequence[Sequence[tuple[Parcel, int, int]]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes = [sum(last - first for _, first, last in pieces) for pieces in by_rank]
        self.buffer = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        flat = [piece for pieces in by_rank for piece in pieces]
        views = self.buffer.split([last - first for _, first, last in flat])
        self.pieces = [
            (parcel, first, last, view)
            for (parcel, first, last), view in zip(flat, views, strict=True)
        ]


class Exchange:
    """One round on one rank. Call, in this order, :meth:`send`, :meth:`receive`, :meth:`put`,
    :meth:`send_back` and :meth:`finish`. Collective over ``group``."""

    def __init__(
        self,
        parcels: Sequence[Parcel],
        group: dist.ProcessGroup,
        lane: Lane,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rank = group.rank()
        self._group = group
        self._lane = lane
        held: list[list[tuple[Parcel, int, int]]] = [[] for _ in range(group.size())]
        owned: list[list[tuple[Parcel, int, int]]] = [[] for _ in range(group.size())]
        for parcel in parcels:
            for holder, first, last in parcel.matrix.pieces:
                if holder == rank:
                    held[parcel.owner].append((parcel, first, last))
                if parcel.owner == rank:
                    owned[holder].append((parcel, first, last))
        self._held = Shipment(held, dtype, device)
        self._owned = Shipment(owned, dtype, device)

    def send(self, read: Callable[[Parcel, int, int], torch.Tensor]) -> None:
        """Sends this rank's pieces to the owners. ``read(parcel, first, last)`` returns a piece."""
        for parcel, first, last, view in self._held.pieces:
            view.copy_(read(parcel, first, last))
        self._enqueue(self._owned, self._held)

    def receive(self) -> dict[Parcel, torch.Tensor]:
        """Waits for the matrices that this rank owns, and returns them, flat."""
        self._ticket.wait()
        found: dict[Parcel, dict[int, torch.Tensor]] = {}
        for parcel, first, _, view in self._owned.pieces:
            found.setdefault(parcel, {})[first] = view
        return {
            parcel: torch.cat([view for _, view in sorted(views.items())])
            for parcel, views in found.items()
        }

    def put(self, results: dict[Parcel, torch.Tensor]) -> None:
        """Copies ``results``, flat, into the buffer that :meth:`send_back` sends. There must be one
        for each matrix that this rank owns."""
        for parcel, first, last, view in self._owned.pieces:
            start = parcel.matrix.stack.start
            view.copy_(results[parcel][first - start : last - start])

    def send_back(self) -> None:
        self._enqueue(self._held, self._owned)

    def finish(self, write: Callable[[Parcel, int, int, torch.Tensor], None]) -> None:
        """Waits for what the owners send back, and gives this rank's pieces to ``write``."""
        self._ticket.wait()
        for parcel, first, last, view in self._held.pieces:
            write(parcel, first, last, view)

    def _enqueue(self, target: Shipment, source: Shipment) -> None:
        self._lane.after_compute()
        self._ticket = self._lane.enqueue(
            "all_to_all",
            "Muon",
            lambda: all_to_all(
                target.buffer, source.buffer, target.sizes, source.sizes, self._group
            ),
        )
