"""Cuts parameters over ranks so that the fullest rank holds as little as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from fsdp_overlap.layout.balance import Item, Loads, water_level
from fsdp_overlap.layout.sections import Owned, Sections, step_of

# The search for the lowest cap ends at this part of the largest grain, or of a fair share.
_PRECISION, _SMALLEST_STEP = 0.125, 1e-6


@dataclass(frozen=True)
class Grains:
    """A parameter as the grains that it may be cut into: ``count`` of ``numel`` elements. The last
    may have fewer. ``nbytes`` and ``work`` are of one grain, as a fraction of a rank's fair
    share."""

    item: Item
    numel: int
    count: int
    nbytes: float
    work: float

    @staticmethod
    def of(item: Item, loads: Loads) -> Grains:
        numel = step_of(item)
        parts = max(1, item.numel) / numel
        nbytes, work = loads.fraction(item)
        # Nothing is free of charge, so that parameters without elements find a place too.
        return Grains(item, numel, ceil(parts), max(nbytes / parts, 1e-12), work / parts)


Taken = list[tuple[Grains, list[tuple[int, int]]]]
"""The parameters that lie in a segment, in order. Each has pairs of a rank and the number of grains
that it takes."""


def fill(line: Sequence[Item], lumps: Owned, loads: Loads) -> Sections:
    """Sections of a bucket. ``lumps`` have their owners. The parameters in ``line`` lie between
    them, and are added to ``loads``.

    A parameter that is cut cannot pass a rank that owns anything else. So owners of lumps divide
    the ranks into segments, which overlap in these owners, and a parameter lies in one segment.

    Ranks are filled in order, each up to a cap on its bytes and on its work. The result has the
    lowest cap under which everything finds a place. It is found by trying.
    """
    # Fine grains come last: they fill what coarse ones leave.
    grains = sorted(
        (Grains.of(item, loads) for item in line),
        key=lambda each: (-each.nbytes, -each.item.nbytes),
    )
    segments = segments_between(lumps, loads.world_size)
    taken = _least_cap(grains, segments, loads) if grains else [[] for _ in segments]
    sections: Sections = [[] for _ in range(loads.world_size)]
    for (_, last), members in zip(segments, taken, strict=True):
        for each, parts in members:
            item, start = each.item, 0
            for rank, count in parts:
                stop = min(item.numel, start + count * each.numel)
                sections[rank].append((item, start, stop))
                loads.add(rank, item, (stop - start) / max(1, item.numel))
                start = stop
        sections[last] += [(item, 0, item.numel) for item in lumps.get(last, ())]
    return sections


def segments_between(owners: Iterable[int], world_size: int) -> list[tuple[int, int]]:
    """The runs of ranks, first and last, that a parameter can be cut over: up to the first of
    ``owners``, between neighbours, and from the last on."""
    ends = sorted(owners)
    if not ends:
        return [(0, world_size - 1)]
    segments = list(zip([0, *ends], ends, strict=False))
    return segments if ends[-1] == world_size - 1 else [*segments, (ends[-1], world_size - 1)]


def _least_cap(
    grains: Sequence[Grains], segments: Sequence[tuple[int, int]], loads: Loads
) -> list[Taken]:
    nbytes, work = loads.bytes, loads.work
    coarsest = max(max(each.nbytes, each.work) for each in grains)
    precision = max(_PRECISION * coarsest, _SMALLEST_STEP)
    infeasible = _lowest_level(grains, nbytes, work)
    step = precision
    while True:
        cap = infeasible + step
        taken = _take(cap, grains, segments, nbytes, work)
        if taken is not None:
            break
        infeasible, step = cap, 2 * step
    while cap - infeasible > 1.5 * precision:
        middle = (cap + infeasible) / 2
        found = _take(middle, grains, segments, nbytes, work)
        if found is None:
            infeasible = middle
        else:
            cap, taken = middle, found
    return taken


def _lowest_level(
    grains: Sequence[Grains], nbytes: Sequence[float], work: Sequence[float]
) -> float:
    """A cap that nothing can be below: where ranks would be if everything could be cut anywhere."""
    all_bytes = sum(each.count * each.nbytes for each in grains)
    all_work = sum(each.count * each.work for each in grains)
    level = water_level(nbytes, all_bytes)
    if all_work:
        level = max(level, water_level(list(map(max, nbytes, work)), min(all_bytes, all_work)))
    return level


def _take(
    cap: float,
    grains: Sequence[Grains],
    segments: Sequence[tuple[int, int]],
    nbytes: Sequence[float],
    work: Sequence[float],
) -> list[Taken] | None:
    """What ranks take, segment by segment, if none may take a grain that lifts it above ``cap``.
    ``None`` if something is left."""
    left = list(grains)
    taken: list[Taken] = []
    rank, held_bytes, held_work = 0, nbytes[0], work[0]
    for first, last in segments:
        if rank < first:
            rank, held_bytes, held_work = first, nbytes[first], work[first]
        members: Taken = []
        for each in list(left):
            at, has_bytes, has_work = rank, held_bytes, held_work
            grain_bytes, grain_work, rest = each.nbytes, each.work, each.count
            parts: list[tuple[int, int]] = []
            while True:
                room = (cap - has_bytes) / grain_bytes
                if grain_work:
                    room = min(room, (cap - has_work) / grain_work)
                if room >= 1:
                    count = min(int(room), rest)
                    parts.append((at, count))
                    rest -= count
                    has_bytes += count * grain_bytes
                    has_work += count * grain_work
                    if not rest:
                        break
                if at == last:
                    break
                at += 1
                has_bytes, has_work = nbytes[at], work[at]
            if not rest:
                left.remove(each)
                members.append((each, parts))
                rank, held_bytes, held_work = at, has_bytes, has_work
        taken.append(members)
    return None if left else taken
