"""Who has which regions of a tensor, and who asks whom for them. Regions are searched in order, so
that a rank looks at those that touch its own and not at all ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import TypeVar

from fsdp_overlap.weights.regions import Region

Holders = dict[Region, list[int]]
"""The ranks that have each region of a tensor."""


class Ordered:
    """Regions of a tensor of ``shape`` in order, and which of them touch another."""

    def __init__(self, shape: Sequence[int], regions: Iterable[Region]) -> None:
        self.regions = sorted(regions)
        self._strides = [*accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1]
        spans = [self._span(region) for region in self.regions]
        self._starts = [start for start, _ in spans]
        # The last end so far. It is the region's own where regions are ranges or rows.
        self._ends = [*accumulate((end for _, end in spans), max)]

    def touching(self, other: Region) -> list[Region]:
        """Those that have elements in common with ``other``, in order."""
        start, end = self._span(other)
        near = self.regions[bisect_right(self._ends, start) : bisect_left(self._starts, end)]
        return [region for region in near if region & other is not None]

    def place(self, region: Region) -> int:
        """The place of one of them."""
        return bisect_left(self.regions, region)

    def _span(self, region: Region) -> tuple[int, int]:
        """Where it begins and ends in the flattened tensor."""
        start = end = 0
        for offset, size, stride in zip(region.offsets, region.sizes, self._strides, strict=False):
            start += offset * stride
            end += (offset + size - 1) * stride
        return start, end + 1


T = TypeVar("T")
Wanting = list[tuple[list[Region], list[int]]]
"""Regions that ranks want, and these ranks."""


class Flow:
    """What ranks want of a tensor, and the ranks that have it. ``ranks`` is how many there are."""

    def __init__(
        self,
        holders: Holders,
        wants: dict[tuple[Region, ...], list[int]],
        shape: Sequence[int],
        ranks: int,
    ) -> None:
        self._all_held = Ordered(shape, holders)
        self.ordered = self._all_held.regions
        self.holders = {region: sorted(ranks) for region, ranks in holders.items()}
        self.wants = {regions: sorted(wants[regions]) for regions in wants}
        self._shape = shape
        self._ranks = ranks
        self._leaving: dict[int, list[tuple[int, Region, Wanting]]] = {}
        self._coming: dict[int, list[tuple[int, Region, tuple[int, list[Region]]]]] = {}

    @property
    def asked_numel(self) -> int:
        """How many elements all ranks together want."""
        return sum(
            len(ranks) * sum(region.numel for region in regions)
            for regions, ranks in self.wants.items()
        )

    @property
    def most_held(self) -> int:
        """How many elements the rank has that has most."""
        held = self._held.values()
        return max((sum(region.numel for region in regions) for regions in held), default=0)

    def run(self, number: int, runs: int) -> slice:
        """The places of some neighbours among regions, if these are divided into so many ``runs``
        of about as many elements."""
        starts, numel = self._starts, self._starts[-1]
        first, last = (-(-numel * each // runs) for each in (number, number + 1))
        return slice(bisect_left(starts, first), bisect_left(starts, last))

    @cached_property
    def _starts(self) -> list[int]:
        """How many elements are before each region, and in all."""
        return [*accumulate((region.numel for region in self.ordered), initial=0)]

    @cached_property
    def _held(self) -> Mapping[int, list[Region]]:
        found: dict[int, list[Region]] = {}
        for region in self.ordered:
            for rank in self.holders[region]:
                found.setdefault(rank, []).append(region)
        return found

    @cached_property
    def _wanted(self) -> Mapping[int, tuple[Region, ...]]:
        return {rank: regions for regions, ranks in self.wants.items() for rank in ranks}

    @cached_property
    def _all_wanted(self) -> tuple[Ordered, Mapping[Region, list[tuple[Region, ...]]]]:
        found: dict[Region, list[tuple[Region, ...]]] = {}
        for regions in self.wants:
            for region in regions:
                found.setdefault(region, []).append(regions)
        return Ordered(self._shape, found), found

    def source(self, region: Region, target: int) -> int:
        """The rank that sends ``region`` to ``target``: itself if it can, else one that others who
        want the same do not all ask."""
        ranks = self.holders[region]
        return target if _in(target, ranks) else ranks[target * len(ranks) // self._ranks]

    def leaving(self, me: int) -> list[tuple[int, Region, Wanting]]:
        """The regions that rank ``me`` sends of, each with its place among all, and with the parts
        that others want of it."""
        if me not in self._leaving:
            self._leaving[me] = [
                (self._all_held.place(region), region, wanting)
                for region in self._held.get(me, ())
                if (wanting := self._asking(region, me))
            ]
        return self._leaving[me]

    def _asking(self, region: Region, me: int) -> Wanting:
        holders = self.holders[region]
        place = bisect_left(holders, me)
        # Those for which source() gives this rank.
        first, last = (-(-each * self._ranks // len(holders)) for each in (place, place + 1))
        ordered, by_region = self._all_wanted
        touched: dict[tuple[Region, ...], list[Region]] = {}
        for want in ordered.touching(region):
            for regions in by_region[want]:
                touched.setdefault(regions, []).append(want)
        found = []
        for regions, wants in touched.items():
            ranks = self.wants[regions]
            near = ranks[bisect_left(ranks, first) : bisect_left(ranks, last)]
            if targets := [rank for rank in near if not _in(rank, holders)]:
                found.append((wants, targets))
        return found

    def coming(self, me: int) -> list[tuple[int, Region, tuple[int, list[Region]]]]:
        """The regions that rank ``me`` wants some of, each with its place among all, the rank that
        it comes from, and what is wanted of it."""
        if me not in self._coming:
            touched: dict[Region, list[Region]] = {}
            for want in sorted(self._wanted.get(me, ())):
                for region in self._all_held.touching(want):
                    touched.setdefault(region, []).append(want)
            self._coming[me] = [
                (self._all_held.place(each), each, (self.source(each, me), touched[each]))
                for each in sorted(touched)
            ]
        return self._coming[me]


def between(found: Sequence[tuple[int, Region, T]], places: slice) -> Iterator[tuple[Region, T]]:
    """Those of ``found``, which is in order, that are at ``places``."""
    first, last = (
        None if each is None else bisect_left(found, each, key=itemgetter(0))
        for each in (places.start, places.stop)
    )
    for _, region, what in found[first:last]:
        yield region, what


def _in(rank: int, ranks: Sequence[int]) -> bool:
    place = bisect_left(ranks, rank)
    return place < len(ranks) and ranks[place] == rank
