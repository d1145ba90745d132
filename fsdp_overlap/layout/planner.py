"""The planner: gives every rank as much of the whole model as the others have.

A parameter that may not be cut, or is not worth it, is *atomic*: it lies whole on its owner. All
others are divided among ranks, where their layout allows cuts. Owners are assigned first, then
buckets are packed, those with the least freedom first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import lcm

from fsdp_overlap.layout.balance import Item, Loads, assign_owners, assign_to_adjacent_ranks
from fsdp_overlap.layout.bucket_plan import BucketPlan, align
from fsdp_overlap.layout.layouts import LayoutRule, PerTensor, layout_for
from fsdp_overlap.layout.pack import (
    DEFAULT_PADDING,
    Owned,
    Segments,
    intervals_between,
    pack,
    pack_equal,
    plan_of,
)
from fsdp_overlap.layout.rows_plan import RowsPlan
from fsdp_overlap.layout.spec import ParamSpec

# A parameter of at most this part of a rank's fair share, of bytes and of work, is not worth
# cutting.
SMALL_FRACTION = 0.01


Plan = BucketPlan | RowsPlan
"""Where the parameters of a bucket lie: in ranges, or in chunks of rows."""


def plan_units(
    units: Sequence[Sequence[ParamSpec]], world_size: int, layout: LayoutRule
) -> list[Plan]:
    """Plan the buckets of ``units``, in order. Parameters of a unit share a bucket if they have
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
        """Return a planner that knows the same units, and plans independently from now on."""
        other = copy.copy(self)
        other._loads = self._loads.copy()
        return other

    def plan(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]:
        """Return the plans of each unit's buckets. Loads come out most even if all units are
        planned together."""
        by_unit = [self._buckets(specs) for specs in units]
        # Rows are the same on every rank, whatever else is planned.
        buckets = [each for unit in by_unit for each in unit if isinstance(each, _Bucket)]
        loads = self._loads
        loads.expect(item for bucket in buckets for item in bucket.items)
        for bucket in buckets:
            bucket.classify(loads)
        _assign_owners(buckets, loads)
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
            item = Item(spec, lcm(rule.block_size(spec), spec.block), rule.work(spec), padding)
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
    """The parameters of a bucket. Those in ``atomic`` lie whole on one rank each, which is decided
    before others are placed. Those in ``divided`` lie one after the other on as many ranks as it
    takes."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.is_mostly_atomic = False
        self.atomic: list[Item] = []
        self.divided: list[Item] = []
        self.owned: Owned = {}
        self.equal: Segments | None = None

    def classify(self, loads: Loads) -> None:
        """Decide which parameters are atomic: all that are not cut, if those are most of the
        bucket. Otherwise only large ones, because what is divided cannot pass an owner."""
        if self.is_divisible:
            self.divided += self.items
            return
        uncut = sum(item.numel for item in self.items if item.block_size >= item.numel)
        self.is_mostly_atomic = 2 * uncut >= sum(item.numel for item in self.items)
        for item in self.items:
            is_small = max(loads.fraction(item)) <= SMALL_FRACTION
            if item.block_size < item.numel and not is_small:
                self.divided.append(item)
                continue
            members = self.atomic if self.is_mostly_atomic or not is_small else self.divided
            members.append(replace(item, is_atomic=True))

    def assign(self, owners: dict[Item, int]) -> None:
        """Record who owns the atomic parameters."""
        for item in self.atomic:
            self.owned.setdefault(owners[item], []).append(item)

    @cached_property
    def is_divisible(self) -> bool:
        """Whether everything may be cut anywhere."""
        return all(item.block_size == 1 for item in self.items)

    @cached_property
    def max_padding(self) -> float:
        """How much padding was asked for to make shards equal."""
        return max((item.max_padding for item in self.items), default=0.0)

    def freedom(self, world_size: int) -> tuple[int, int]:
        """Return a key by which buckets with little freedom are planned first, so that others can
        even out what they leave: those in which divided parameters have few ranks between owners,
        and then those of large blocks."""
        intervals = intervals_between(self.owned, world_size)
        longest = max(last - first for first, last in intervals)
        return longest, -max((item.block_size for item in self.divided), default=0)

    def plan(self, loads: Loads) -> BucketPlan:
        """Cut what is to be cut, and add it to ``loads``."""
        if self.equal is not None:
            return plan_of(self.equal, self.max_padding)
        if self.is_divisible and (self.max_padding > DEFAULT_PADDING or loads.are_even(self.items)):
            return _equal(self.items, loads)
        return plan_of(pack(self.divided, self.owned, loads))


def _assign_owners(buckets: Sequence[_Bucket], loads: Loads) -> None:
    """Assign owners to atomic parameters. Divisible ones need no owner when loads are even."""
    for bucket in buckets:
        if bucket.max_padding > DEFAULT_PADDING and not bucket.is_divisible:
            items = [*bucket.atomic, *bucket.divided]
            bucket.equal = pack_equal(items, bucket.max_padding, loads)
    rest = [bucket for bucket in buckets if not bucket.is_divisible and bucket.equal is None]
    with_few = [bucket for bucket in rest if bucket.atomic and not bucket.is_mostly_atomic]
    for bucket in sorted(with_few, key=lambda bucket: -loads.weight(bucket.atomic)):
        bucket.assign(assign_to_adjacent_ranks(bucket.atomic, loads))
    mostly_atomic = [bucket for bucket in rest if bucket.is_mostly_atomic]
    owners = assign_owners([item for bucket in mostly_atomic for item in bucket.atomic], loads)
    for bucket in mostly_atomic:
        bucket.assign(owners)


def _equal(items: Sequence[Item], loads: Loads) -> BucketPlan:
    """Plan a bucket of divisible parameters on ranks with even loads: all shards have the same
    size."""
    offsets = []
    end, alignment = 0, items[0].spec.alignment
    for item in items:
        offsets.append(align(end, alignment))
        end = offsets[-1] + item.numel
    loads.add_to_all(items)
    shard = align(-(-end // loads.world_size), alignment)
    return BucketPlan(
        tuple(item.spec for item in items), tuple(offsets), (shard,) * loads.world_size
    )
