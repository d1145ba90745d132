"""The load of each rank, and the assignment of parameters to owner ranks that balances it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_overlap.layout.plan import ParamSpec

# Ranks are even if their bytes differ by at most this part of what each gets next.
_EVEN = 0.001


@dataclass(frozen=True, eq=False)
class Item:
    """A parameter, with the block size, the work and the padding that its layout gives it.
    ``is_atomic``: whether one rank holds all of it, whatever its block size."""

    spec: ParamSpec
    block_size: int
    work: int
    max_padding: float = 0.0
    is_atomic: bool = False

    @cached_property
    def numel(self) -> int:
        return self.spec.numel

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.spec.dtype.itemsize


class Loads:
    """The bytes and the work of each rank so far. A rank's fair share is an equal part of all
    expected items."""

    def __init__(self, world_size: int) -> None:
        self._bytes = [0.0] * world_size
        self._work = [0.0] * world_size
        self._all_bytes = self._all_work = 0

    def expect(self, items: Iterable[Item]) -> None:
        """Add ``items`` to what the ranks will share."""
        for item in items:
            self._all_bytes += item.nbytes
            self._all_work += item.work

    @property
    def world_size(self) -> int:
        return len(self._bytes)

    @property
    def bytes(self) -> list[float]:
        """The bytes that each rank holds, as a fraction of its fair share."""
        share = max(1, self._all_bytes) / self.world_size
        return [held / share for held in self._bytes]

    @property
    def work(self) -> list[float]:
        """The work that each rank has, as a fraction of its fair share."""
        share = max(1, self._all_work) / self.world_size
        return [held / share for held in self._work]

    @property
    def levels(self) -> list[float]:
        """The bytes or the work of each rank, whichever is the larger fraction."""
        return list(map(max, self.bytes, self.work))

    def fraction(self, item: Item) -> tuple[float, float]:
        """Return the bytes and the work of ``item``, each as a fraction of a rank's fair share."""
        return (
            item.nbytes * self.world_size / max(1, self._all_bytes),
            item.work * self.world_size / max(1, self._all_work),
        )

    def weight(self, items: Iterable[Item]) -> float:
        """Return the bytes or the work of ``items``, whichever is more, as a fraction of a rank's
        fair share."""
        fractions = [self.fraction(item) for item in items]
        return max(map(sum, zip(*fractions, strict=True)), default=0.0)

    def add(self, rank: int, item: Item, part: float = 1.0) -> None:
        """Give ``part`` of ``item`` to ``rank``."""
        self._bytes[rank] += item.nbytes * part
        self._work[rank] += item.work * part

    def add_to_all(self, items: Iterable[Item]) -> None:
        """Give an equal part of ``items`` to each rank. The items must have no work."""
        part = sum(item.nbytes for item in items) / self.world_size
        self._bytes = [held + part for held in self._bytes]

    def are_even(self, items: Sequence[Item]) -> bool:
        """Return whether the ranks hold nearly the same bytes, compared with those of ``items``.
        Then equal parts of ``items`` keep them even."""
        spread = max(self._bytes) - min(self._bytes)
        return spread * self.world_size <= _EVEN * sum(item.nbytes for item in items)


def assign_owners(items: Sequence[Item], loads: Loads) -> dict[Item, int]:
    """Assign an owner to each of ``items``, and add the item to the owner's load.

    The largest item is first. Each goes to the rank with the least load at that moment (Graham,
    "Bounds on multiprocessing timing anomalies", 1969). Sizes and loads are the larger of the
    fractions of bytes and of work.
    """
    sizes = {item: loads.fraction(item) for item in items}
    heap = [
        (max(held), rank, *held)
        for rank, held in enumerate(zip(loads.bytes, loads.work, strict=True))
    ]
    heapq.heapify(heap)
    owners = {}
    for item in sorted(items, key=lambda item: -max(sizes[item])):
        _, rank, nbytes, work = heap[0]
        nbytes, work = nbytes + sizes[item][0], work + sizes[item][1]
        heapq.heapreplace(heap, (max(nbytes, work), rank, nbytes, work))
        owners[item] = rank
        loads.add(rank, item)
    return owners


def assign_to_adjacent_ranks(items: Sequence[Item], loads: Loads) -> dict[Item, int]:
    """Assign owners as :func:`assign_owners` does, but among as few adjacent ranks as can hold
    ``items``: those with the least load."""
    sizes = {item: loads.fraction(item) for item in items}
    ordered = sorted(items, key=lambda item: -max(sizes[item]))
    bins: list[tuple[float, float]] = []
    for item in ordered:
        nbytes, work = sizes[item]
        for i, (held_bytes, held_work) in enumerate(bins):
            if held_bytes + nbytes <= 1 and held_work + work <= 1:
                bins[i] = held_bytes + nbytes, held_work + work
                break
        else:
            bins.append((nbytes, work))
    width = min(len(bins), loads.world_size)
    levels = loads.levels
    first = min(
        range(0, loads.world_size - width + 1, width),
        key=lambda first: max(levels[first : first + width]),
    )
    window = list(zip(loads.bytes, loads.work, strict=True))[first : first + width]
    owners = {}
    for item in ordered:
        nbytes, work = sizes[item]
        place = min(range(width), key=lambda i: max(window[i][0] + nbytes, window[i][1] + work))
        window[place] = window[place][0] + nbytes, window[place][1] + work
        owners[item] = first + place
        loads.add(first + place, item)
    return owners


def water_level(levels: Sequence[float], amount: float) -> float:
    """Return the level to which the lowest of ``levels`` rise together if they share ``amount``."""
    ordered = sorted(levels)
    below = 0.0
    for count, (low, high) in enumerate(
        zip(ordered, [*ordered[1:], float("inf")], strict=True), start=1
    ):
        below += low
        if high * count - below >= amount:
            return (amount + below) / count
    raise AssertionError("unreachable: the last level may rise without end")
