"""Matrices that several ranks hold parts of: to an owner each, and back.

Owners are balanced by work. The matrices travel in rounds, so that one round is on its way while
the products of another run. What is sent back takes the way that came, the other way round.
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
from fsdp_overlap.optim.matrices import Ranges, Stack

# What an owner gets in a round: large enough for an efficient message, small enough for several.
ROUND_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class CutMatrix:
    """A matrix of the parameter number ``parameter``, whose ``pieces`` (rank, first, last) in
    elements of the parameter lie in that order."""

    parameter: int
    stack: Stack
    pieces: Ranges


def cut_matrix(parameter: int, stack: Stack, ranges: Ranges) -> CutMatrix:
    """The pieces of ``stack``, a single matrix, under a placement's ``ranges``."""
    pieces = (
        (rank, max(start, stack.start), min(stop, stack.stop)) for rank, start, stop in ranges
    )
    return CutMatrix(
        parameter, stack, tuple((rank, first, last) for rank, first, last in pieces if first < last)
    )


Round = tuple[tuple[int, CutMatrix], ...]
"""Matrices that travel together, each with its owner."""


@lru_cache(maxsize=64)
def plan_rounds(matrices: tuple[CutMatrix, ...], loads: tuple[int, ...]) -> tuple[Round, ...]:
    """Gives each matrix an owner: the largest first, to the rank with the least work, where
    ``loads[rank]`` is what it has already; of equals, to the one that holds most of it."""
    loads_now = list(loads)
    owned: list[list[CutMatrix]] = [[] for _ in loads]
    for matrix in sorted(matrices, key=lambda matrix: -matrix.stack.work):
        held = {rank: last - first for rank, first, last in matrix.pieces}
        owner = min(range(len(loads)), key=lambda rank: (loads_now[rank], -held.get(rank, 0)))
        loads_now[owner] += matrix.stack.work
        owned[owner].append(matrix)
    by_owner = [
        [[(owner, matrix) for matrix in share] for share in _shares(mine)]
        for owner, mine in enumerate(owned)
    ]
    return tuple(
        tuple(pair for share in shares for pair in share)
        for shares in zip_longest(*by_owner, fillvalue=[])
    )


def _shares(matrices: Sequence[CutMatrix]) -> list[list[CutMatrix]]:
    """What an owner gets in each round."""
    shares: list[list[CutMatrix]] = []
    elements = 0
    # Equal shapes beside each other, to be batched.
    for matrix in sorted(matrices, key=lambda m: (-m.stack.work, m.stack.rows)):
        size = matrix.stack.rows * matrix.stack.columns
        if not shares or elements + size > ROUND_ELEMENTS:
            shares.append([])
            elements = 0
        shares[-1].append(matrix)
        elements += size
    return shares


class Exchange:
    """One round, on one rank. Collective over ``group``: :meth:`send`, then :meth:`send_back`."""

    def __init__(
        self,
        matrices: Round,
        group: dist.ProcessGroup,
        lane: Lane,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rank, ranks = group.rank(), range(group.size())
        self._group = group
        self._lane = lane
        # What this rank holds, in the order in which it is sent, and what it gets: by the rank at
        # the other end.
        sent = {other: [m for owner, m in matrices if owner == other] for other in ranks}
        self._out = [
            (matrix, first, last)
            for other in ranks
            for matrix in sent[other]
            for holder, first, last in matrix.pieces
            if holder == rank
        ]
        self.mine = sent[rank]
        self._in = [
            (matrix, first, last)
            for other in ranks
            for matrix in self.mine
            for holder, first, last in matrix.pieces
            if holder == other
        ]
        self._out_sizes = [
            sum(last - first for m in sent[o] for r, first, last in m.pieces if r == rank)
            for o in ranks
        ]
        self._in_sizes = [
            sum(last - first for m in self.mine for r, first, last in m.pieces if r == o)
            for o in ranks
        ]
        self._outside = torch.empty(sum(self._out_sizes), dtype=dtype, device=device)
        self._inside = torch.empty(sum(self._in_sizes), dtype=dtype, device=device)

    def send(self, read: Callable[[CutMatrix, int, int], torch.Tensor]) -> None:
        """Sends to the owners what ``read(matrix, first, last)`` gives for this rank's pieces."""
        for (matrix, first, last), part in zip(
            self._out, self._parts(self._outside, self._out), strict=True
        ):
            part.copy_(read(matrix, first, last))
        self._enqueue(self._inside, self._outside, self._in_sizes, self._out_sizes)

    def receive(self) -> list[torch.Tensor]:
        """Waits for the matrices of :attr:`mine`: ``[1, rows, columns]`` each."""
        self._ticket.wait()
        parts = self._parts(self._inside, self._in)
        pieces: dict[CutMatrix, dict[int, torch.Tensor]] = {matrix: {} for matrix in self.mine}
        for (matrix, first, _), part in zip(self._in, parts, strict=True):
            pieces[matrix][first] = part
        return [
            torch.cat([part for _, part in sorted(found.items())]).view(
                1, matrix.stack.rows, matrix.stack.columns
            )
            for matrix, found in pieces.items()
        ]

    def put(self, matrix: CutMatrix, values: torch.Tensor) -> None:
        """``values``, ``[rows, columns]``, are to be sent back for ``matrix``."""
        flat = values.reshape(-1)
        for (other, first, last), part in zip(
            self._in, self._parts(self._inside, self._in), strict=True
        ):
            if other is matrix:
                part.copy_(flat[first - matrix.stack.start : last - matrix.stack.start])

    def send_back(self) -> None:
        """After a :meth:`put` for each of :attr:`mine`."""
        self._enqueue(self._outside, self._inside, self._out_sizes, self._in_sizes)

    def finish(self, write: Callable[[CutMatrix, int, int, torch.Tensor], None]) -> None:
        """Waits for what was sent back and gives this rank's pieces to ``write``."""
        self._ticket.wait()
        for (matrix, first, last), part in zip(
            self._out, self._parts(self._outside, self._out), strict=True
        ):
            write(matrix, first, last, part)

    def _enqueue(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int],
        source_sizes: list[int],
    ) -> None:
        self._lane.after_compute()
        self._ticket = self._lane.enqueue(
            "all_to_all",
            "Muon",
            lambda: all_to_all(output, source, output_sizes, source_sizes, self._group),
        )

    @staticmethod
    def _parts(
        buffer: torch.Tensor, pieces: Sequence[tuple[CutMatrix, int, int]]
    ) -> Sequence[torch.Tensor]:
        return buffer.split([last - first for _, first, last in pieces])
