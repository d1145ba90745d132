"""The planner: gives every rank as much of the whole model as the others have.

A parameter that may not be cut, or is not worth it, is a *lump*. All others are cut, where their
layout allows. A rank's section of the flat buffer is contiguous, and so is each parameter. So a
parameter that is cut lies at the end of one rank's section and at the beginning of the next, and
fills all of the sections between them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import lcm

from fsdp_overlap.layout.balance import Item, Loads, assign, assign_together
from fsdp_overlap.layout.bucket_plan import BucketPlan, align
from fsdp_overlap.layout.equal_shards import equal_sections
from fsdp_overlap.layout.filling import fill, segments_between
from fsdp_overlap.layout.layouts import LayoutRule, PerTensor, layout_for
from fsdp_overlap.layout.rows_plan import RowsPlan
from fsdp_overlap.layout.sections import MOST_PADDING, Owned, Sections, plan_of
from fsdp_overlap.layout.spec import ParamSpec

# A parameter of at most this part of a rank's fair share, of bytes and of work, is not worth
# cutting.
_PEBBLE = 0.01


Plan = BucketPlan | RowsPlan
"""Where the parameters of a bucket lie: in ranges, or in chunks of rows."""


def plan_units(
    units: Sequence[Sequence[ParamSpec]], world_size: int, layout: LayoutRule
) -> list[Plan]:
    """Plans the buckets of ``units``, in order. Parameters of a unit share a bucket if they have
    the same dtype at rest, the same dtype in compute and the same trainability, if all of them or
    none are opaque, and in ``PerTensor()``, and if they are of the same piece.

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
        self._loads = Loads(world_size)

    def copy(self) -> Planner:
        """A planner that knows the same units, and plans independently from now on."""
        other = copy.copy(self)
        other._loads = self._loads.copy()
        return other

    def plan(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]:
        """Returns the plans of each unit's buckets. Loads come out most even if all units are
        planned together."""
        by_unit = [self._buckets(specs) for specs in units]
        # Rows are the same on every rank, whatever else is planned.
        buckets = [each for unit in by_unit for each in unit if isinstance(each, _Bucket)]
        loads = self._loads
        loads.expect(item for bucket in buckets for item in bucket.items)
        for bucket in buckets:
            bucket.divide(loads)
        _give_owners(buckets, loads)
        plans = {}
        for bucket in sorted(buckets, key=lambda bucket: bucket.freedom(loads.world_size)):
            plans[bucket] = bucket.plan(loads)
        return [
            [plans[each] if isinstance(each, _Bucket) else each for each in unit]
            for unit in by_unit
        ]

    def _buckets(self, specs: Sequence[ParamSpec]) -> list[_Bucket | RowsPlan]:
        found: dict[tuple[object, ...], list[Item]] = {}
        for spec in specs:
            rule = layout_for(self.layout, spec)
            padding = getattr(rule, "max_padding", 0.0)
            item = Item(spec, lcm(rule.grain(spec), spec.block), rule.work(spec), padding)
            dtypes = spec.dtype, spec.keeps_dtype, spec.grad_dtype
            travels = spec.is_opaque, spec.is_extension, spec.is_kept, spec.requires_grad
            kind = isinstance(rule, PerTensor), dtypes, travels, spec.piece
            found.setdefault(kind, []).append(item)
        world_size = self._loads.world_size
        return [
            RowsPlan(tuple(item.spec for item in items), world_size) if in_rows else _Bucket(items)
            for (in_rows, *_), items in found.items()
        ]


class _Bucket:
    """The parameters of a bucket. ``lumps`` lie whole on one rank each, which is decided before
    others are placed. Those in ``line`` lie one after the other on as many ranks as it takes."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.is_lumpy = False
        self.lumps: list[Item] = []
        self.line: list[Item] = []
        self.owned: Owned = {}
        self.equal: Sections | None = None

    def divide(self, loads: Loads) -> None:
        """Decides which parameters are lumps: all that are not cut if those are most of the bucket.
        Otherwise only large ones, because a line cannot pass the owner of a lump."""
        if self.is_sand:
            self.line += self.items
            return
        uncut = sum(item.numel for item in self.items if item.grain >= item.numel)
        self.is_lumpy = 2 * uncut >= sum(item.numel for item in self.items)
        for item in self.items:
            is_small = max(loads.fraction(item)) <= _PEBBLE
            if item.grain >= item.numel or is_small:
                whole = replace(item, is_cut=False)
                (self.lumps if self.is_lumpy or not is_small else self.line).append(whole)
            else:
                self.line.append(item)

    def give(self, owners: dict[Item, int]) -> None:
        """Notes who owns the lumps."""
        for item in self.lumps:
            self.owned.setdefault(owners[item], []).append(item)

    @cached_property
    def is_sand(self) -> bool:
        """Whether everything may be cut anywhere."""
        return all(item.grain == 1 for item in self.items)

    @cached_property
    def most_padding(self) -> float:
        """How much padding was asked for to make shards equal."""
        return max((item.padding for item in self.items), default=0.0)

    def freedom(self, world_size: int) -> tuple[int, int]:
        """Buckets with little freedom are planned first, so that others can even out what they
        leave: those with a line that has to pass owners of lumps, and then those of coarse
        grain."""
        segments = segments_between(self.owned, world_size)
        longest = max(last - first for first, last in segments)
        return longest, -max((item.grain for item in self.line), default=0)

    def plan(self, loads: Loads) -> BucketPlan:
        """Cuts what is to be cut, and adds it to ``loads``."""
        if self.equal is not None:
            return plan_of(self.equal, self.most_padding)
        if self.is_sand and (self.most_padding > MOST_PADDING or loads.are_even(self.items)):
            return _equal(self.items, loads)
        return plan_of(fill(self.line, self.owned, loads))


def _give_owners(buckets: Sequence[_Bucket], loads: Loads) -> None:
    """Gives lumps their owners. Sand waits, because nothing of it needs one if ranks are even."""
    for bucket in buckets:
        if bucket.most_padding > MOST_PADDING and not bucket.is_sand:
            bucket.equal = equal_sections([*bucket.lumps, *bucket.line], bucket.most_padding, loads)
    rest = [bucket for bucket in buckets if not bucket.is_sand and bucket.equal is None]
    together = [bucket for bucket in rest if bucket.lumps and not bucket.is_lumpy]
    for bucket in sorted(together, key=lambda each: -loads.weight(each.lumps)):
        bucket.give(assign_together(bucket.lumps, loads))
    scattered = [bucket for bucket in rest if bucket.is_lumpy]
    owners = assign([item for each in scattered for item in each.lumps], loads)
    for bucket in scattered:
        bucket.give(owners)


def _equal(items: Sequence[Item], loads: Loads) -> BucketPlan:
    """Plans a bucket of nothing but sand on ranks that are even: all shards have the same size."""
    offsets = []
    end, unit = 0, items[0].spec.alignment
    for item in items:
        offsets.append(align(end, unit))
        end = offsets[-1] + item.numel
    loads.add_to_all(items)
    shard = align(-(-end // loads.world_size), unit)
    return BucketPlan(
        tuple(item.spec for item in items), tuple(offsets), (shard,) * loads.world_size
    )
