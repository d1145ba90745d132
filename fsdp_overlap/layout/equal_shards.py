"""Shards that are equal because padding was asked for: plain collectives, at the cost of memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heapreplace

from fsdp_overlap.layout.balance import Item, Loads
from fsdp_overlap.layout.bucket_plan import align
from fsdp_overlap.layout.sections import Owned, Sections, step_of

Bins = list[list[Item]]


def equal_sections(items: Sequence[Item], most_padding: float, loads: Loads) -> Sections | None:
    """Sections of a bucket, which may be padded to the size of the largest. They are added to
    ``loads``. ``None`` if that would take more padding than ``most_padding``, a fraction of the
    bucket.

    There can be no padding inside of a parameter. So each rank that does not hold the end of a
    parameter is full to the element. Where that is impossible, nothing is cut.
    """
    numel = sum(item.numel for item in items)
    most = (1 + most_padding) * numel / loads.world_size if numel else 0.0
    bins = _in_bins(items, loads.world_size)
    largest = max(map(_size, bins))
    lumps = [item for item in items if not item.is_cut]
    cut = [item for item in items if item.is_cut]
    sections = _in_line(lumps, cut, int(min(most, largest - 1)), loads)
    if sections is None and largest <= most:
        sections = _with_nothing_cut(bins, loads)
    return sections


def _aligned(item: Item) -> int:
    return align(item.numel, item.spec.alignment)


def _size(items: Iterable[Item]) -> int:
    return sum(map(_aligned, items))


def _in_bins(items: Iterable[Item], count: int) -> Bins:
    """Divides ``items`` among bins: the largest first, each into the bin that holds the least."""
    bins: Bins = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for item in sorted(items, key=lambda item: -item.numel):
        size, i = heap[0]
        bins[i].append(item)
        heapreplace(heap, (size + _aligned(item), i))
    return bins


def _with_nothing_cut(bins: Bins, loads: Loads) -> Sections:
    sections: Sections = [[] for _ in range(loads.world_size)]
    for rank, items in _owned(bins, range(loads.world_size), loads).items():
        sections[rank] = [(item, 0, item.numel) for item in items]
    return sections


def _in_line(
    lumps: Sequence[Item], cut: Sequence[Item], most: int, loads: Loads
) -> Sections | None:
    """Sections of at most ``most`` elements, in which the parameters in ``cut`` lie one after the
    other, each rank full, with ``lumps`` on neighbouring ranks that hold nothing else."""
    steps = {step_of(item) for item in cut}
    if len(steps) != 1:
        return None
    (step,) = steps
    counts = [-(-item.numel // step) for item in cut]
    unit = cut[0].spec.alignment
    if step % unit or (step > unit and any(item.numel % step for item in cut)):
        return None

    def ranks_for(each: int) -> int:
        return len(_packed(lumps, each * step)) + -(-sum(counts) // each)

    world_size = loads.world_size
    largest_lump = max(map(_aligned, lumps), default=0)
    first = max(1, -(-largest_lump // step), -(-sum(counts) // world_size))
    tried = range(first, most // step + 1)
    found = bisect_left(tried, -world_size, key=lambda each: -ranks_for(each))
    if found == len(tried):
        return None
    each = tried[found]
    bins = _packed(lumps, each * step)
    levels = loads.levels

    # The lumps lie before the first parameter that is cut, or between two, or behind the last.
    def places() -> Iterable[tuple[float, int, int]]:
        for before in range(len(cut) + 1):
            left = -(-sum(counts[:before]) // each)
            right = -(-sum(counts[before:]) // each)
            for at in range(left, world_size - right - len(bins) + 1):
                yield max(levels[at : at + len(bins)], default=0.0), at, before

    _, at, before = min(places())
    sections: Sections = [[] for _ in range(world_size)]
    for rank, items in _owned(bins, range(at, at + len(bins)), loads).items():
        sections[rank] = [(item, 0, item.numel) for item in items]
    for begin, members in ((0, cut[:before]), (at + len(bins), cut[before:])):
        position = begin * each  # in steps
        for item in members:
            start = 0
            while start < item.numel:
                rank, used = divmod(position, each)
                stop = min(item.numel, start + (each - used) * step)
                sections[rank].append((item, start, stop))
                loads.add(rank, item, (stop - start) / item.numel)
                position += -(-(stop - start) // step)
                start = stop
    return sections


def _packed(items: Iterable[Item], size: int) -> Bins:
    """Packs ``items`` into bins of ``size``: the largest first, each into the first with room."""
    bins: Bins = []
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


def _owned(bins: Bins, ranks: Sequence[int], loads: Loads) -> Owned:
    """Gives each bin to a rank: the heaviest to the one with the least load."""
    heaviest = sorted(bins, key=lambda items: -loads.weight(items))
    levels = loads.levels
    emptiest = sorted(ranks, key=levels.__getitem__)
    owned = dict(zip(emptiest, heaviest, strict=True))
    for rank, items in owned.items():
        for item in items:
            loads.add(rank, item)
    return owned
