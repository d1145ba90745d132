"""The planner: gives whole parameters to the ranks with the least load, cuts others to fill gaps.

A parameter that may not be cut and has work is a *rock*. All others are *sand*. A rank's section of
the flat buffer is contiguous, and so is each parameter. So sand that is cut lies at the end of one
rank's section and at the beginning of the next, and fills all of the sections between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_overlap.layout.balance import Item, Loads, assign, water_fill
from fsdp_overlap.layout.bucket_plan import BucketPlan, align
from fsdp_overlap.layout.layouts import LayoutRule, layout_for
from fsdp_overlap.layout.sections import Sections, line, nearest_cut, plan_of
from fsdp_overlap.layout.spec import ParamSpec

# Sand of at most this part of a rank's fair share of bytes is not worth cutting.
_PEBBLE = 0.01


def plan_units(
    units: Sequence[Sequence[ParamSpec]], world_size: int, layout: LayoutRule
) -> list[BucketPlan]:
    """Plans the buckets of ``units``, in order. Parameters of a unit share a bucket if they have
    the same dtype at rest, the same dtype in compute and the same trainability.

    Loads are balanced over all units. The same input gives the same plan on every rank.

    Raises:
        ValueError: ``world_size`` is not positive.
        TypeError: ``layout`` gives a parameter something that is no layout.
    """
    return [plan for plans in Planner(world_size, layout).plan(units) for plan in plans]


class Planner:
    """Plans units as they become known, and remembers what each rank holds already."""

    def __init__(self, world_size: int, layout: LayoutRule) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size} is not a number of ranks; use 1 or more")
        self.layout = layout
        self.loads = Loads(world_size)

    def plan(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[BucketPlan]]:
        """Returns the plans of each unit's buckets. Loads come out most even if all units are
        planned together."""
        by_unit = [self._buckets(specs) for specs in units]
        buckets = [bucket for unit in by_unit for bucket in unit]
        loads = self.loads
        loads.expect(item for bucket in buckets for item in bucket)
        rocks = [item for bucket in buckets if _is_rocky(bucket) for item in bucket if item.is_rock]
        owners = assign(rocks, loads)
        plans = (self._plan(bucket, owners) for bucket in buckets)
        return [[next(plans) for _ in unit] for unit in by_unit]

    def _buckets(self, specs: Sequence[ParamSpec]) -> list[list[Item]]:
        found: dict[tuple[torch.dtype, bool, bool], list[Item]] = {}
        for spec in specs:
            rule = layout_for(self.layout, spec)
            item = Item(spec, rule.grain(spec), rule.work(spec))
            kind = spec.dtype, spec.keeps_dtype, spec.requires_grad
            found.setdefault(kind, []).append(item)
        return list(found.values())

    def _plan(self, items: Sequence[Item], owners: dict[Item, int]) -> BucketPlan:
        if _is_rocky(items):
            return plan_of(_between_rocks(items, owners, self.loads))
        if all(item.grain == 1 for item in items) and self.loads.are_even(items):
            return _equal(items, self.loads)
        return plan_of(_leveling(items, self.loads))


def _equal(items: Sequence[Item], loads: Loads) -> BucketPlan:
    """Plans a bucket of nothing but sand on ranks that are even: all shards have the same size."""
    offsets = []
    end = 0
    for item in items:
        offsets.append(align(end))
        end = offsets[-1] + item.numel
    loads.add_to_all(items)
    shard = align(-(-end // loads.world_size))
    return BucketPlan(
        tuple(item.spec for item in items), tuple(offsets), (shard,) * loads.world_size
    )


def _is_rocky(items: Sequence[Item]) -> bool:
    rocks = sum(item.numel for item in items if item.is_rock)
    return 2 * rocks > sum(item.numel for item in items)


def _leveling(items: Sequence[Item], loads: Loads) -> Sections:
    """Sections of a bucket of mostly sand: one line, of which each rank takes what it lacks."""
    amount = sum(map(loads.weight, items))
    levels = loads.bytes
    if any(item.work for item in items):
        levels = [2 * max(pair) for pair in zip(loads.bytes, loads.work, strict=True)]
    sections = line(items, water_fill(levels, amount), loads.weight)
    for rank, pieces in enumerate(sections):
        for item, start, stop in pieces:
            loads.add(rank, item, (stop - start) / max(1, item.numel))
    return sections


def _between_rocks(items: Sequence[Item], owners: dict[Item, int], loads: Loads) -> Sections:
    """Sections of a bucket of mostly rocks, which have their owners. Small sand goes whole to the
    rank with the fewest bytes. Large sand is cut to fill gaps."""
    sections: Sections = [[] for _ in range(loads.world_size)]
    sand = []
    for item in items:
        if item in owners:
            sections[owners[item]].append((item, 0, item.numel))
        elif loads.fraction(item)[0] > _PEBBLE:
            sand.append(item)
        else:
            rank = loads.least_bytes()
            sections[rank].append((item, 0, item.numel))
            loads.add(rank, item)
    if sand:
        _fill_gaps(sections, sand, loads)
    return sections


def _fill_gaps(sections: Sections, sand: Sequence[Item], loads: Loads) -> None:
    """Adds ``sand`` to ``sections``, the largest first. Each goes to the neighbouring ranks whose
    gaps together hold most of it."""
    gaps = water_fill(loads.bytes, sum(loads.fraction(item)[0] for item in sand))
    # Whether sand may be added at this end of a rank's section.
    is_free_at_start = [True] * len(sections)
    is_free_at_end = [True] * len(sections)
    for item in sorted(sand, key=lambda item: -item.nbytes):
        share = loads.fraction(item)[0]
        runs = [
            _run(first, share, gaps, sections, is_free_at_start)
            for first in range(len(sections))
            if is_free_at_end[first]
        ]
        first, last, _ = min(runs, key=lambda run: share - run[2])
        start = 0
        for rank in range(first, last + 1):
            stop = max(start, nearest_cut(item, start + gaps[rank] / share * item.numel))
            stop = item.numel if rank == last else stop
            if start < stop:
                place = len(sections[rank]) if rank == first else 0
                sections[rank].insert(place, (item, start, stop))
            loads.add(rank, item, (stop - start) / item.numel)
            gaps[rank] = max(0.0, gaps[rank] - (stop - start) / item.numel * share)
            is_free_at_start[rank] &= rank == first
            is_free_at_end[rank] &= rank == last
            start = stop


def _run(
    first: int,
    share: float,
    gaps: Sequence[float],
    sections: Sections,
    is_free_at_start: Sequence[bool],
) -> tuple[int, int, float]:
    """The ranks from ``first`` on that sand of size ``share`` would lie on, as ``(first, last, how
    much of it their gaps hold)``. The run ends at the first rank whose section holds anything else,
    because sand cannot pass that."""
    last, held = first, gaps[first]
    while held < share and last + 1 < len(gaps) and is_free_at_start[last + 1]:
        last += 1
        held += gaps[last]
        if sections[last]:
            break
    return first, last, min(held, share)
