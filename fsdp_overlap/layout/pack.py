"""Pack the parameters of a param group into the ranks' segments of its flat buffer.

Segments are contiguous, and so are parameters. So a parameter that is cut lies at the end of one
segment and at the beginning of a later one, and fills all segments between them.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate
from math import ceil

from fsdp_overlap.layout.balance import Item, Loads, water_level
from fsdp_overlap.layout.plan import ParamGroupPlan, align

DEFAULT_PADDING = 0.01
"""How much padding equal shards may take, as a fraction of a param group. Shards that would take
more are ragged."""

Segments = list[list[tuple[Item, int, int]]]
"""``(item, start, stop)`` for each rank, in order: elements ``[start, stop)`` of a parameter."""

ItemsByRank = dict[int, list[Item]]
"""The atomic parameters of each owner."""

# The search for the lowest cap ends at this fraction of the largest block, or of a fair share.
_PRECISION, _SMALLEST_STEP = 0.125, 1e-6


def cut_step(item: Item) -> int:
    """Return the least number of elements between two cuts of ``item``. If its layout allows cuts
    anywhere, they are aligned."""
    if item.is_atomic:
        return max(1, item.numel)
    return item.block_size if item.block_size > 1 else item.spec.alignment


def plan_of(segments: Segments, max_padding: float = 0.0) -> ParamGroupPlan:
    """Return the plan of a flat buffer of ``segments``. Shards are equal if that takes at most
    :data:`DEFAULT_PADDING`, or ``max_padding`` if it is more, and ragged otherwise. There is no
    padding inside a parameter, so shards can be equal only if each one that ends inside a parameter
    is as large as the largest."""
    specs, offsets, block_sizes, ranks, numels = [], [], [], [], []
    alignment = next(item.spec.alignment for segment in segments for item, _, _ in segment)
    position = 0
    is_inside = False  # whether a segment ends inside a parameter
    least_inside = sys.maxsize  # the size of the smallest such segment
    for rank, segment in enumerate(segments):
        begin = position
        for item, start, stop in segment:
            if start == 0:
                position = align(position, alignment)
                specs.append(item.spec)
                offsets.append(position)
                block_sizes.append(item.block_size)
                ranks.append(rank)
            position += stop - start
        if segment:
            item, _, stop = segment[-1]
            is_inside = stop < item.numel
        if is_inside:
            least_inside = min(least_inside, position - begin)
        else:
            position = align(position, alignment)
        numels.append(position - begin)
    largest, held = max(numels), sum(numels)
    padding = largest * len(numels) - held
    is_possible = least_inside >= largest and largest % alignment == 0
    if is_possible and padding <= max(DEFAULT_PADDING, max_padding) * held:
        begins = [0, *accumulate(numels[:-1])]
        offsets = [
            offset - begins[rank] + largest * rank
            for offset, rank in zip(offsets, ranks, strict=True)
        ]
        numels = [largest] * len(numels)
    return ParamGroupPlan(tuple(specs), tuple(offsets), tuple(numels), tuple(block_sizes))


# ---- ragged shards ----


@dataclass(frozen=True)
class DivisibleItem:
    """A parameter and its ``count`` blocks of ``block_size`` elements. The last one may have fewer.
    ``nbytes`` and ``work`` are those of one block, as fractions of a rank's fair share."""

    item: Item
    block_size: int
    count: int
    nbytes: float
    work: float

    @staticmethod
    def of(item: Item, loads: Loads) -> DivisibleItem:
        block_size = cut_step(item)
        blocks = max(1, item.numel) / block_size
        nbytes, work = loads.fraction(item)
        # Not 0, so that parameters without elements are placed too.
        return DivisibleItem(
            item, block_size, ceil(blocks), max(nbytes / blocks, 1e-12), work / blocks
        )


Placed = list[tuple[DivisibleItem, list[tuple[int, int]]]]
"""The parameters in an interval of ranks, in order, each with ``(rank, number of blocks)``."""


def pack(divided: Sequence[Item], owned: ItemsByRank, loads: Loads) -> Segments:
    """Return the segments of a param group: the atomic parameters in ``owned``, and the ``divided``
    ones between them, which are added to ``loads``.

    A divided parameter cannot pass an owner of another one. So the owners divide the ranks into
    intervals, whose ends are owners, and a divided parameter lies in one interval.

    Ranks are filled in order, each up to a cap on its bytes and its work. A binary search finds the
    lowest cap under which everything has a place.
    """
    # Small blocks come last: they fill what large ones leave.
    items = sorted(
        (DivisibleItem.of(item, loads) for item in divided),
        key=lambda item: (-item.nbytes, -item.item.nbytes),
    )
    intervals = intervals_between(owned, loads.world_size)
    placed = _lowest_cap(items, intervals, loads) if items else [[] for _ in intervals]
    segments: Segments = [[] for _ in range(loads.world_size)]
    for (_, last), members in zip(intervals, placed, strict=True):
        for divisible, blocks in members:
            item, start = divisible.item, 0
            for rank, count in blocks:
                stop = min(item.numel, start + count * divisible.block_size)
                segments[rank].append((item, start, stop))
                loads.add(rank, item, (stop - start) / max(1, item.numel))
                start = stop
        segments[last] += [(item, 0, item.numel) for item in owned.get(last, ())]
    return segments


def intervals_between(owners: Iterable[int], world_size: int) -> list[tuple[int, int]]:
    """Return the intervals of ranks, ``(first, last)``, among which a parameter can be divided: up
    to the first of ``owners``, between adjacent ones, and from the last on."""
    ends = sorted(owners)
    if not ends:
        return [(0, world_size - 1)]
    intervals = list(zip([0, *ends], ends, strict=False))
    return intervals if ends[-1] == world_size - 1 else [*intervals, (ends[-1], world_size - 1)]


def _lowest_cap(
    items: Sequence[DivisibleItem], intervals: Sequence[tuple[int, int]], loads: Loads
) -> list[Placed]:
    nbytes, work = loads.bytes, loads.work
    largest_block = max(max(item.nbytes, item.work) for item in items)
    precision = max(_PRECISION * largest_block, _SMALLEST_STEP)
    infeasible = _lower_bound(items, nbytes, work)
    step = precision
    while True:
        cap = infeasible + step
        placed = _place(cap, items, intervals, nbytes, work)
        if placed is not None:
            break
        infeasible, step = cap, 2 * step
    while cap - infeasible > 1.5 * precision:
        middle = (cap + infeasible) / 2
        placed_lower = _place(middle, items, intervals, nbytes, work)
        if placed_lower is None:
            infeasible = middle
        else:
            cap, placed = middle, placed_lower
    return placed


def _lower_bound(
    items: Sequence[DivisibleItem], nbytes: Sequence[float], work: Sequence[float]
) -> float:
    """Return the lowest conceivable cap: the load of ranks if everything could be cut anywhere."""
    all_bytes = sum(item.count * item.nbytes for item in items)
    all_work = sum(item.count * item.work for item in items)
    level = water_level(nbytes, all_bytes)
    if all_work:
        level = max(level, water_level(list(map(max, nbytes, work)), min(all_bytes, all_work)))
    return level


def _place(
    cap: float,
    items: Sequence[DivisibleItem],
    intervals: Sequence[tuple[int, int]],
    nbytes: Sequence[float],
    work: Sequence[float],
) -> list[Placed] | None:
    """Return where ``items`` lie, interval by interval, so that no rank's load exceeds ``cap``.
    ``None`` if there is not enough room."""
    left = list(items)
    placed: list[Placed] = []
    rank, held_bytes, held_work = 0, nbytes[0], work[0]
    for first, last in intervals:
        if rank < first:
            rank, held_bytes, held_work = first, nbytes[first], work[first]
        members: Placed = []
        for item in list(left):
            at, has_bytes, has_work = rank, held_bytes, held_work
            block_bytes, block_work, rest = item.nbytes, item.work, item.count
            blocks: list[tuple[int, int]] = []
            while True:
                room = (cap - has_bytes) / block_bytes
                if block_work:
                    room = min(room, (cap - has_work) / block_work)
                if room >= 1:
                    count = min(int(room), rest)
                    blocks.append((at, count))
                    rest -= count
                    has_bytes += count * block_bytes
                    has_work += count * block_work
                    if not rest:
                        break
                if at == last:
                    break
                at += 1
                has_bytes, has_work = nbytes[at], work[at]
            if not rest:
                left.remove(item)
                members.append((item, blocks))
                rank, held_bytes, held_work = at, has_bytes, has_work
        placed.append(members)
    return None if left else placed


# ---- equal shards, with padding ----


def pack_equal(items: Sequence[Item], max_padding: float, loads: Loads) -> Segments | None:
    """Return segments that can be padded to the size of the largest, and add them to ``loads``.
    ``None`` if that takes more padding than ``max_padding``, a fraction of the param group.

    There can be no padding inside a parameter. So each segment that ends inside one is full to the
    element. Where that is impossible, nothing is cut.
    """
    numel = sum(item.numel for item in items)
    limit = (1 + max_padding) * numel / loads.world_size if numel else 0.0
    bins = _into_equal_bins(items, loads.world_size)
    largest = max(sum(map(_aligned, members)) for members in bins)
    segments = _pack_full(items, int(min(limit, largest - 1)), loads)
    if segments is None and largest <= limit:
        owned = _assign_bins(bins, range(loads.world_size), loads)
        segments = [[(item, 0, item.numel) for item in owned[rank]] for rank in range(len(bins))]
    return segments


def _aligned(item: Item) -> int:
    return align(item.numel, item.spec.alignment)


def _into_equal_bins(items: Iterable[Item], count: int) -> list[list[Item]]:
    """Divide ``items`` among ``count`` bins: the largest first, each into the emptiest bin."""
    bins: list[list[Item]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for item in sorted(items, key=lambda item: -item.numel):
        size, i = heap[0]
        bins[i].append(item)
        heapreplace(heap, (size + _aligned(item), i))
    return bins


def _into_bins_of(size: int, items: Iterable[Item]) -> list[list[Item]]:
    """Divide ``items`` among bins of ``size``: the largest first, each into the first bin with
    room."""
    bins: list[list[Item]] = []
    rooms: list[int] = []
    for item in sorted(items, key=lambda item: -item.numel):
        numel = _aligned(item)
        for i, room in enumerate(rooms):
            if numel <= room:
                bins[i].append(item)
                rooms[i] -= numel
                break
        else:
            bins.append([item])
            rooms.append(size - numel)
    return bins


def _assign_bins(bins: Sequence[list[Item]], ranks: Sequence[int], loads: Loads) -> ItemsByRank:
    """Assign each bin to a rank: the heaviest to the one with the least load."""
    heaviest = sorted(bins, key=lambda items: -loads.weight(items))
    levels = loads.levels
    owned = dict(zip(sorted(ranks, key=levels.__getitem__), heaviest, strict=True))
    for rank, items in owned.items():
        for item in items:
            loads.add(rank, item)
    return owned


def _pack_full(items: Sequence[Item], max_numel: int, loads: Loads) -> Segments | None:
    """Return segments of at most ``max_numel`` elements: divided parameters one after the other in
    full segments, and atomic ones on adjacent ranks that hold nothing else. ``None`` if there are
    no such segments."""
    atomic = [item for item in items if item.is_atomic]
    divided = [item for item in items if not item.is_atomic]
    steps = {cut_step(item) for item in divided}
    if len(steps) != 1:
        return None
    (step,) = steps
    counts = [-(-item.numel // step) for item in divided]
    alignment = divided[0].spec.alignment
    if step % alignment or (step > alignment and any(item.numel % step for item in divided)):
        return None

    def ranks_for(size: int) -> int:
        return len(_into_bins_of(size * step, atomic)) + -(-sum(counts) // size)

    world_size = loads.world_size
    largest_atomic = max(map(_aligned, atomic), default=0)
    first = max(1, -(-largest_atomic // step), -(-sum(counts) // world_size))
    sizes = range(first, max_numel // step + 1)  # in steps
    index = bisect_left(sizes, -world_size, key=lambda size: -ranks_for(size))
    if index == len(sizes):
        return None
    size = sizes[index]
    bins = _into_bins_of(size * step, atomic)
    levels = loads.levels

    # Atomic parameters lie before the first divided one, between two, or after the last.
    def places() -> Iterator[tuple[float, int, int]]:
        for before in range(len(divided) + 1):
            left = -(-sum(counts[:before]) // size)
            right = -(-sum(counts[before:]) // size)
            for at in range(left, world_size - right - len(bins) + 1):
                yield max(levels[at : at + len(bins)], default=0.0), at, before

    _, at, before = min(places())
    segments: Segments = [[] for _ in range(world_size)]
    for rank, members in _assign_bins(bins, range(at, at + len(bins)), loads).items():
        segments[rank] = [(item, 0, item.numel) for item in members]
    for begin, members in ((0, divided[:before]), (at + len(bins), divided[before:])):
        position = begin * size  # in steps
        for item in members:
            start = 0
            while start < item.numel:
                rank, used = divmod(position, size)
                stop = min(item.numel, start + (size - used) * step)
                segments[rank].append((item, start, stop))
                loads.add(rank, item, (stop - start) / item.numel)
                position += -(-(stop - start) // step)
                start = stop
    return segments
