"""Plan param groups so that all ranks have equal loads.

A parameter that may not be cut, or is not worth it, is *atomic*: its owner holds all of it. All
others are divided among ranks, where their layout allows cuts. Owners are assigned first, then
param groups are packed, those with the least freedom first.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import lcm

from fsdp_overlap.layout.balance import Item, Loads, assign_owners, assign_to_adjacent_ranks
from fsdp_overlap.layout.layouts import layout_for
from fsdp_overlap.layout.pack import (
    DEFAULT_PADDING,
    ItemsByRank,
    Segments,
    intervals_between,
    pack,
    pack_equal,
    plan_of,
)
from fsdp_overlap.layout.plan import (
    LayoutRule,
    ParamGroupPlan,
    ParamSpec,
    Plan,
    Planner,
    RowLayout,
    equal_shards,
)

# A parameter of at most this fraction of a rank's fair share, of bytes and of work, is not worth
# cutting.
SMALL_FRACTION = 0.01


def plan_units(
    units: Sequence[Sequence[ParamSpec]], world_size: int, layout: LayoutRule
) -> list[Plan]:
    """Plan the param groups of ``units``, in order. Parameters of a unit share a param group if
    they have the same dtype at rest, the same dtype in compute and the same trainability, if all of
    them or none are never cast, and in ``PerTensor()``, and if they are of the same piece.

    Loads are balanced over all units. The same input gives the same plan on every rank.

    Raises:
        ValueError: ``world_size`` is not positive.
        TypeError: ``layout`` gives a parameter something that is no layout.
    """
    return [
        plan for plans in Planner(world_size, layout, BalancedPlanner).plan(units) for plan in plans
    ]


class BalancedPlanner:
    """Plans units as they are made, and keeps the loads of the ranks."""

    def __init__(self, world_size: int, layout: LayoutRule) -> None:
        self.layout = layout
        self._loads = Loads(world_size)

    def copy(self) -> BalancedPlanner:
        """Return a planner that starts with the loads of this one."""
        other = copy.copy(self)
        other._loads = copy.deepcopy(self._loads)
        return other

    def plan(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]:
        """Return the plans of each unit's param groups. Loads are most even if all units are
        planned together."""
        by_unit = [self._param_groups(specs) for specs in units]
        # Chunks of rows are the same whatever else is planned.
        param_groups = [item for unit in by_unit for item in unit if isinstance(item, _ParamGroup)]
        loads = self._loads
        loads.expect(item for param_group in param_groups for item in param_group.items)
        for param_group in param_groups:
            param_group.classify(loads)
        _assign_owners(param_groups, loads)
        by_freedom = sorted(param_groups, key=lambda group: group.freedom(loads.world_size))
        plans = {param_group: param_group.plan(loads) for param_group in by_freedom}
        return [
            [plans[item] if isinstance(item, _ParamGroup) else item for item in unit]
            for unit in by_unit
        ]

    def _param_groups(self, specs: Sequence[ParamSpec]) -> list[_ParamGroup | Plan]:
        items_of: dict[tuple[object, ...], list[Item]] = {}
        for spec in specs:
            rule = layout_for(self.layout, spec)
            padding = getattr(rule, "max_padding", 0.0)
            item = Item(spec, lcm(rule.block_size(spec), spec.block), rule.work(spec), padding)
            kind = rule if isinstance(rule, RowLayout) else None, *spec.kind
            items_of.setdefault(kind, []).append(item)
        world_size = self._loads.world_size
        return [
            rows.plan([item.spec for item in items], world_size)
            if isinstance(rows, RowLayout)
            else _ParamGroup(items)
            for (rows, *_), items in items_of.items()
        ]


class _ParamGroup:
    """The parameters of a param group: the ``atomic`` ones, whose owners are assigned first, and
    those that are ``divided`` among ranks, one after the other."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.is_mostly_atomic = False
        self.atomic: list[Item] = []
        self.divided: list[Item] = []
        self.owned: ItemsByRank = {}
        self.equal: Segments | None = None

    def classify(self, loads: Loads) -> None:
        """Decide which parameters are atomic: all that may not be cut, if those are most of the
        param group. Otherwise only large ones, because a divided parameter cannot pass an owner.
        """
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
        """How much padding the layout allows to make shards equal."""
        return max((item.max_padding for item in self.items), default=0.0)

    def freedom(self, world_size: int) -> tuple[int, int]:
        """Return the sort key by which param groups with little freedom are planned first, so that
        others can balance the rest: those in which divided parameters have few ranks between
        owners, and then those of large blocks."""
        intervals = intervals_between(self.owned, world_size)
        longest = max(last - first for first, last in intervals)
        return longest, -max((item.block_size for item in self.divided), default=0)

    def plan(self, loads: Loads) -> ParamGroupPlan:
        """Place the divided parameters, and add them to ``loads``."""
        if self.equal is not None:
            return plan_of(self.equal, self.max_padding)
        if self.is_divisible and (self.max_padding > DEFAULT_PADDING or loads.are_even(self.items)):
            loads.add_to_all(self.items)
            return equal_shards([item.spec for item in self.items], loads.world_size)
        return plan_of(pack(self.divided, self.owned, loads))


def _assign_owners(param_groups: Sequence[_ParamGroup], loads: Loads) -> None:
    """Assign owners to the atomic parameters."""
    groups = [group for group in param_groups if not group.is_divisible]
    for group in groups:
        if group.max_padding > DEFAULT_PADDING:
            items = [*group.atomic, *group.divided]
            group.equal = pack_equal(items, group.max_padding, loads)
    rest = [group for group in groups if group.equal is None]
    with_few = [group for group in rest if group.atomic and not group.is_mostly_atomic]
    for group in sorted(with_few, key=lambda group: -loads.weight(group.atomic)):
        group.assign(assign_to_adjacent_ranks(group.atomic, loads))
    mostly_atomic = [group for group in rest if group.is_mostly_atomic]
    owners = assign_owners([item for group in mostly_atomic for item in group.atomic], loads)
    for group in mostly_atomic:
        group.assign(owners)
