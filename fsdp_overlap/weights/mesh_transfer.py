"""Who has which chunks of a tensor, and who receives them from whom. Chunks are searched in
order, so that a rank scans those alone that overlap its own."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import TypeVar

from fsdp_overlap.weights.tensor_chunks import Chunk

ChunkHolders = dict[Chunk, list[int]]
"""The ranks that have each chunk of a tensor."""


class ChunkIndex:
    """The chunks of a tensor of ``shape`` in order, and which of them touch another."""

    def __init__(self, shape: Sequence[int], chunks: Iterable[Chunk]) -> None:
        self.chunks = sorted(chunks)
        self._strides = [*accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1]
        spans = [self._span(chunk) for chunk in self.chunks]
        self._starts = [start for start, _ in spans]
        # The last end so far. It is the chunk's own where chunks are ranges or rows.
        self._ends = [*accumulate((end for _, end in spans), max)]

    def touching(self, other: Chunk) -> list[Chunk]:
        """Return those that have elements in common with ``other``, in order."""
        start, end = self._span(other)
        near = self.chunks[bisect_right(self._ends, start) : bisect_left(self._starts, end)]
        return [chunk for chunk in near if chunk & other is not None]

    def place(self, chunk: Chunk) -> int:
        """Return the place of one of them."""
        return bisect_left(self.chunks, chunk)

    def _span(self, chunk: Chunk) -> tuple[int, int]:
        """Return where it begins and ends in the flattened tensor."""
        start = end = 0
        for offset, size, stride in zip(chunk.offsets, chunk.sizes, self._strides, strict=False):
            start += offset * stride
            end += (offset + size - 1) * stride
        return start, end + 1


T = TypeVar("T")
WantedChunks = list[tuple[list[Chunk], list[int]]]
"""Chunks that ranks want, and these ranks."""


class MeshTransfer:
    """What ranks want of a tensor, and the ranks that have it. ``ranks`` is how many there are."""

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
        """How many elements the rank has that has most."""
        held = self._held.values()
        return max((sum(chunk.numel for chunk in chunks) for chunks in held), default=0)

    def run(self, number: int, runs: int) -> slice:
        """Return the places of some neighbors among chunks, if these are divided into so many
        ``runs`` of about as many elements."""
        starts, numel = self._starts, self._starts[-1]
        first, last = (-(-numel * each // runs) for each in (number, number + 1))
        return slice(bisect_left(starts, first), bisect_left(starts, last))

    @cached_property
    def _starts(self) -> list[int]:
        """How many elements are before each chunk, and in all."""
        return [*accumulate((chunk.numel for chunk in self.ordered), initial=0)]

    @cached_property
    def _held(self) -> Mapping[int, list[Chunk]]:
        found: dict[int, list[Chunk]] = {}
        for chunk in self.ordered:
            for rank in self.holders[chunk]:
                found.setdefault(rank, []).append(chunk)
        return found

    @cached_property
    def _wanted(self) -> Mapping[int, tuple[Chunk, ...]]:
        return {rank: chunks for chunks, ranks in self.wants.items() for rank in ranks}

    @cached_property
    def _all_wanted(self) -> tuple[ChunkIndex, Mapping[Chunk, list[tuple[Chunk, ...]]]]:
        found: dict[Chunk, list[tuple[Chunk, ...]]] = {}
        for chunks in self.wants:
            for chunk in chunks:
                found.setdefault(chunk, []).append(chunks)
        return ChunkIndex(self._shape, found), found

    def source(self, chunk: Chunk, target: int) -> int:
        """Return the rank that sends ``chunk`` to ``target``: itself if it can, else one that
        others who want the same do not all ask."""
        ranks = self.holders[chunk]
        return target if _in(target, ranks) else ranks[target * len(ranks) // self._ranks]

    def sends(self, me: int) -> list[tuple[int, Chunk, WantedChunks]]:
        """Return the chunks that rank ``me`` sends of, each with its place among all, and with the
        parts that others want of it."""
        if me not in self._sends:
            self._sends[me] = [
                (self._all_held.place(chunk), chunk, wanting)
                for chunk in self._held.get(me, ())
                if (wanting := self._asking(chunk, me))
            ]
        return self._sends[me]

    def _asking(self, chunk: Chunk, me: int) -> WantedChunks:
        holders = self.holders[chunk]
        place = bisect_left(holders, me)
        # Those for which source() gives this rank.
        first, last = (-(-each * self._ranks // len(holders)) for each in (place, place + 1))
        ordered, by_chunk = self._all_wanted
        touched: dict[tuple[Chunk, ...], list[Chunk]] = {}
        for want in ordered.touching(chunk):
            for chunks in by_chunk[want]:
                touched.setdefault(chunks, []).append(want)
        found = []
        for chunks, wants in touched.items():
            ranks = self.wants[chunks]
            near = ranks[bisect_left(ranks, first) : bisect_left(ranks, last)]
            if targets := [rank for rank in near if not _in(rank, holders)]:
                found.append((wants, targets))
        return found

    def receives(self, me: int) -> list[tuple[int, Chunk, tuple[int, list[Chunk]]]]:
        """Return the chunks that rank ``me`` wants some of, each with its place among all, the rank
        that it comes from, and what is wanted of it."""
        if me not in self._receives:
            touched: dict[Chunk, list[Chunk]] = {}
            for want in sorted(self._wanted.get(me, ())):
                for chunk in self._all_held.touching(want):
                    touched.setdefault(chunk, []).append(want)
            self._receives[me] = [
                (self._all_held.place(each), each, (self.source(each, me), touched[each]))
                for each in sorted(touched)
            ]
        return self._receives[me]


def between(found: Sequence[tuple[int, Chunk, T]], places: slice) -> Iterator[tuple[Chunk, T]]:
    """Return those of ``found``, which is in order, that are at ``places``."""
    first, last = (
        None if each is None else bisect_left(found, each, key=itemgetter(0))
        for each in (places.start, places.stop)
    )
    for _, chunk, what in found[first:last]:
        yield chunk, what


def _in(rank: int, ranks: Sequence[int]) -> bool:
    place = bisect_left(ranks, rank)
    return place < len(ranks) and ranks[place] == rank
