"""The loads of ranks, and which rank gets what so that loads come out even."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_overlap.layout.spec import ParamSpec

# Ranks are even if their bytes differ by at most this part of what each gets next.
_EVEN = 0.001


@dataclass(frozen=True, eq=False)
class Item:
    """A parameter, with the grain and the work that its layout gives it."""

    spec: ParamSpec
    grain: int
    work: int

    @cached_property
    def numel(self) -> int:
        return self.spec.numel

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.spec.dtype.itemsize

    @cached_property
    def is_rock(self) -> bool:
        """Whether it may not be cut and has work to balance."""
        return self.work > 0 and self.grain >= self.numel


class Loads:
    """What each rank holds so far. A rank's fair share is an equal part of all expected items."""

    def __init__(self, world_size: int) -> None:
        self._bytes = [0.0] * world_size
        self._work = [0.0] * world_size
        self._all_bytes = self._all_work = 0

    def copy(self) -> Loads:
        """A copy that may change independently."""
        loads = Loads(self.world_size)
        loads._bytes, loads._work = [*self._bytes], [*self._work]
        loads._all_bytes, loads._all_work = self._all_bytes, self._all_work
        return loads

    def expect(self, items: Iterable[Item]) -> None:
        """Counts ``items`` into what the ranks share."""
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

    def fraction(self, item: Item) -> tuple[float, float]:
        """The bytes and the work of ``item``, each as a fraction of a rank's fair share."""
        return (
            item.nbytes * self.world_size / max(1, self._all_bytes),
            item.work * self.world_size / max(1, self._all_work),
        )

    def weight(self, item: Item) -> float:
        """The bytes and the work of ``item`` in one number: the sum of both fractions."""
        return sum(self.fraction(item))

    def add(self, rank: int, item: Item, part: float = 1.0) -> None:
        """Gives ``part`` of ``item`` to ``rank``."""
        self._bytes[rank] += item.nbytes * part
        self._work[rank] += item.work * part

    def add_to_all(self, items: Iterable[Item]) -> None:
        """Gives an equal part of ``items`` to each rank. The items must have no work."""
        part = sum(item.nbytes for item in items) / self.world_size
        self._bytes = [held + part for held in self._bytes]

    def are_even(self, items: Sequence[Item]) -> bool:
        """Whether the ranks hold nearly the same bytes, compared with the bytes of ``items``. Then
        equal parts of ``items`` keep them even."""
        spread = max(self._bytes) - min(self._bytes)
        return spread * self.world_size <= _EVEN * sum(item.nbytes for item in items)

    def least_bytes(self) -> int:
        """The rank that holds the fewest bytes."""
        return min(range(self.world_size), key=self._bytes.__getitem__)


def assign(rocks: Sequence[Item], loads: Loads) -> dict[Item, int]:
    """Gives each of ``rocks`` an owner, and adds it to the owner's load.

    The largest rock is first. Each goes to the rank with the least load at that moment (Graham,
    "Bounds on multiprocessing timing anomalies", 1969). Sizes and loads are the larger of the
    fractions of bytes and of work.
    """
    sizes = [loads.fraction(rock) for rock in rocks]
    heap = [
        (max(held), rank, *held)
        for rank, held in enumerate(zip(loads.bytes, loads.work, strict=True))
    ]
    heapq.heapify(heap)
    owners = {}
    for i in sorted(range(len(rocks)), key=lambda i: (-max(sizes[i]), i)):
        _, rank, nbytes, work = heap[0]
        nbytes, work = nbytes + sizes[i][0], work + sizes[i][1]
        heapq.heapreplace(heap, (max(nbytes, work), rank, nbytes, work))
        owners[rocks[i]] = rank
        loads.add(rank, rocks[i])
    return owners


def water_fill(levels: Sequence[float], amount: float) -> list[float]:
    """Divides ``amount`` among ``levels`` so that the lowest ones rise to one common level. Returns
    how much to add to each."""
    ordered = sorted(levels)
    below = 0.0
    level = ordered[-1] + amount
    for count, (low, high) in enumerate(
        zip(ordered, [*ordered[1:], float("inf")], strict=True), start=1
    ):
        below += low
        if high * count - below >= amount:
            level = (amount + below) / count
            break
    return [max(0.0, level - each) for each in levels]
