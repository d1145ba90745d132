"""How even ranks can be if things cannot be cut: a bound that no assignment is below."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

# The bound is found to this part of a fair share.
PRECISION = 1e-4
# No more than so many things a rank are counted: with more of them the bound is 1 for all purposes.
MAX_PER_RANK = 100


def least_imbalance(things: Mapping[float, int], ranks: int) -> float:
    """A lower bound of the largest load over the mean. ``things`` has how many there are of each
    size."""
    share = sum(size * count for size, count in things.items()) / ranks
    sizes = sorted(
        ((size / share, count) for size, count in things.items() if size and count), reverse=True
    )
    low = max(1.0, *(_of_fullest(sizes, ranks, more) for more in range(MAX_PER_RANK)))
    high = low
    while _bins_for(sizes, high) > ranks:
        low, high = high, 2 * high
    while high - low > PRECISION:
        middle = (low + high) / 2
        if _bins_for(sizes, middle) > ranks:
            low = middle
        else:
            high = middle
    return low


def _of_fullest(sizes: list[tuple[float, int]], ranks: int, more: int) -> float:
    """Among the ``more * ranks + 1`` largest things, a rank has ``more + 1``: at least the smallest
    of them. 0 if there are not so many things."""
    first, last = more * ranks - more, more * ranks  # the places of these, the largest being at 0
    total, place = 0.0, 0
    for size, count in sizes:
        total += size * max(0, min(last + 1, place + count) - max(first, place))
        place += count
    return total if place > last else 0.0


def _bins_for(sizes: list[tuple[float, int]], capacity: float) -> int:
    """A lower bound of how many bins of ``capacity`` hold everything (Martello and Toth, "Lower
    bounds and reduction procedures for the bin packing problem", 1990).

    Things larger than half of a bin have one each. Beside those that leave less than ``small``,
    nothing of at least ``small`` fits, so all that is between goes elsewhere.
    """
    slack = capacity * (1 + 1e-9)
    most = 0
    for small in [0.0, *(size for size, _ in sizes if size <= slack / 2)]:
        alone = sum(count for size, count in sizes if size > slack - small)
        halves = [(size, count) for size, count in sizes if slack / 2 < size <= slack - small]
        number = sum(count for _, count in halves)
        room = number * slack - sum(size * count for size, count in halves)
        rest = sum(size * count for size, count in sizes if small <= size <= slack / 2)
        most = max(most, alone + number + max(0, ceil((rest - room) / slack - 1e-6)))
    return most
