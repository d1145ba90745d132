"""Transfers of a tensor's chunks between the ranks of a mesh.

Chunks are found by binary search, so that a rank visits only those that overlap its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import TypeVar

from fsdp_overlap.weights.chunks import Chunk

ChunkHolders = dict[Chunk, list[int]]
"""The ranks that have each chunk of a tensor."""


class ChunkIndex:
    """The chunks of a tensor of ``shape``, in order, for finding those that overlap another."""

    def __init__(self, shape: Sequence[int], chunks: Iterable[Chunk]) -> None:
        self.chunks = sorted(chunks)
        self._strides = [*accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1]
        bounds = [self._bounds_of(chunk) for chunk in self.chunks]
        self._starts = [start for start, _ in bounds]
        # The last end so far. If chunks are ranges or rows, it is the chunk's own.
        self._ends = [*accumulate((end for _, end in bounds), max)]

    def overlapping(self, other: Chunk) -> list[Chunk]:
        """Return the chunks that have elements in common with ``other``, in order."""
        start, end = self._bounds_of(other)
        near = self.chunks[bisect_right(self._ends, start) : bisect_left(self._starts, end)]
        return [chunk for chunk in near if chunk & other is not None]

    def place(self, chunk: Chunk) -> int:
        """Return the place of ``chunk``, which is one of them."""
        return bisect_left(self.chunks, chunk)

    def _bounds_of(self, chunk: Chunk) -> tuple[int, int]:
        """Return where a chunk begins and ends in the flattened tensor."""
        start = end = 0
        for offset, size, stride in zip(chunk.offsets, chunk.sizes, self._strides, strict=False):
            start += offset * stride
            end += (offset + size - 1) * stride
        return start, end + 1


T = TypeVar("T")
WantedChunks = list[tuple[list[Chunk], list[int]]]
"""Chunks, and the ranks that want them."""


class MeshTransfer:
    """A tensor on one mesh: the chunks that ranks hold, and those that ranks want, of ``ranks``
    ranks in all."""

    def __init__(
        self,
        holders: ChunkHolders,
        wants: dict[tuple[Chunk, ...], list[int]],
        shape: Sequence[int],
        ranks: int,
    ) -> None:
        self._all_held = ChunkIndex(shape, holders)
        self.ordered = self._all_held.chunks
        self.holders = {chunk: sorted(ranks) for chunk, ranks in holders.items()}
        self.wants = {chunks: sorted(wants[chunks]) for chunks in wants}
        self._shape = shape
        self._ranks = ranks
        self._sends: dict[int, list[tuple[int, Chunk, WantedChunks]]] = {}
        self._receives: dict[int, list[tuple[int, Chunk, tuple[int, list[Chunk]]]]] = {}

    @property
    def wanted_numel(self) -> int:
        """How many elements all ranks together want."""
        return sum(
            len(ranks) * sum(chunk.numel for chunk in chunks)
            for chunks, ranks in self.wants.items()
        )

    @property
    def max_held_numel(self) -> int:
        """The most elements that a rank holds."""
        held = self._held.values()
        return max((sum(chunk.numel for chunk in chunks) for chunks in held), default=0)

    def part(self, number: int, parts: int) -> slice:
        """Return the places of the chunks of part ``number`` of ``parts``: adjacent chunks, about
        as many elements in each part."""
        starts, numel = self._starts, self._starts[-1]
        first, last = (-(-numel * n // parts) for n in (number, number + 1))
        return slice(bisect_left(starts, first), bisect_left(starts, last))

    @cached_property
    def _starts(self) -> list[int]:
        """The number of elements before each chunk, and in all."""
        return [*accumulate((chunk.numel for chunk in self.ordered), initial=0)]

    @cached_property
    def _held(self) -> Mapping[int, list[Chunk]]:
        by_rank: dict[int, list[Chunk]] = {}
        for chunk in self.ordered:
            for rank in self.holders[chunk]:
                by_rank.setdefault(rank, []).append(chunk)
        return by_rank

    @cached_property
    def _wanted(self) -> Mapping[int, tuple[Chunk, ...]]:
        return {rank: chunks for chunks, ranks in self.wants.items() for rank in ranks}

    @cached_property
    def _all_wanted(self) -> tuple[ChunkIndex, Mapping[Chunk, list[tuple[Chunk, ...]]]]:
        by_chunk: dict[Chunk, list[tuple[Chunk, ...]]] = {}
        for chunks in self.wants:
            for chunk in chunks:
                by_chunk.setdefault(chunk, []).append(chunks)
        return ChunkIndex(self._shape, by_chunk), by_chunk

    def source(self, chunk: Chunk, target: int) -> int:
        """Return the rank that sends ``chunk`` to ``target``: itself if it holds the chunk, else a
        holder, among which targets are divided."""
        ranks = self.holders[chunk]
        return target if _in(target, ranks) else ranks[target * len(ranks) // self._ranks]

    def sends(self, me: int) -> list[tuple[int, Chunk, WantedChunks]]:
        """Return the chunks of which rank ``me`` sends elements, each with its place, and with what
        others want of it."""
        if me not in self._sends:
            self._sends[me] = [
                (self._all_held.place(chunk), chunk, wanting)
                for chunk in self._held.get(me, ())
                if (wanting := self._wanting(chunk, me))
            ]
        return self._sends[me]

    def _wanting(self, chunk: Chunk, me: int) -> WantedChunks:
        """Return what other ranks want of ``chunk`` from rank ``me``."""
        holders = self.holders[chunk]
        place = bisect_left(holders, me)
        # The targets of which source() is this rank.
        first, last = (-(-at * self._ranks // len(holders)) for at in (place, place + 1))
        index, by_chunk = self._all_wanted
        overlapping: dict[tuple[Chunk, ...], list[Chunk]] = {}
        for want in index.overlapping(chunk):
            for chunks in by_chunk[want]:
                overlapping.setdefault(chunks, []).append(want)
        wanting = []
        for chunks, wants in overlapping.items():
            ranks = self.wants[chunks]
            targets = ranks[bisect_left(ranks, first) : bisect_left(ranks, last)]
            if others := [rank for rank in targets if not _in(rank, holders)]:
                wanting.append((wants, others))
        return wanting

    def receives(self, me: int) -> list[tuple[int, Chunk, tuple[int, list[Chunk]]]]:
        """Return the chunks of which rank ``me`` wants elements, each with its place, its source,
        and what is wanted of it."""
        if me not in self._receives:
            overlapping: dict[Chunk, list[Chunk]] = {}
            for want in sorted(self._wanted.get(me, ())):
                for chunk in self._all_held.overlapping(want):
                    overlapping.setdefault(chunk, []).append(want)
            self._receives[me] = [
                (self._all_held.place(chunk), chunk, (self.source(chunk, me), wants))
                for chunk, wants in sorted(overlapping.items())
            ]
        return self._receives[me]


def at_places(items: Sequence[tuple[int, Chunk, T]], places: slice) -> Iterator[tuple[Chunk, T]]:
    """Yield those of ``items``, in order of their places, that are at ``places``."""
    first, last = (
        None if place is None else bisect_left(items, place, key=itemgetter(0))
        for place in (places.start, places.stop)
    )
    for _, chunk, value in items[first:last]:
        yield chunk, value


def _in(rank: int, ranks: Sequence[int]) -> bool:
    place = bisect_left(ranks, rank)
    return place < len(ranks) and ranks[place] == rank
