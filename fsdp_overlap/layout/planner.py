"""Plan the param groups of a model: in equal shards where everything may be cut, else balanced."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdp_overlap.layout.layouts import Flat, LayoutRule
from fsdp_overlap.layout.param_group_plan import Plan, equal_shards
from fsdp_overlap.layout.spec import ParamSpec

if TYPE_CHECKING:
    from fsdp_overlap.layout.balanced_planner import BalancedPlanner


def plan_units(
    units: Sequence[Sequence[ParamSpec]], world_size: int, layout: LayoutRule
) -> list[Plan]:
    """Plan the param groups of ``units``, in order. Parameters of a unit share a param group if
    they have the same dtype at rest, the same dtype in compute and the same trainability, if all of
    them or none are opaque, and in ``PerTensor()``, and if they are of the same piece.

    Loads are balanced over all units. The same input gives the same plan on every rank.

    Raises:
        ValueError: ``world_size`` is not positive.
        TypeError: ``layout`` gives a parameter something that is no layout.
    """
    return [plan for plans in Planner(world_size, layout).plan(units) for plan in plans]


class Planner:
    """Plans units as they are made."""

    def __init__(self, world_size: int, layout: LayoutRule) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size} is not a number of ranks; use 1 or more")
        self._world_size = world_size
        self._layout = layout
        self._in_equal_shards: list[Sequence[Sequence[ParamSpec]]] = []
        """What was planned while everything could be cut anywhere."""
        self._balanced: BalancedPlanner | None = None

    def copy(self) -> Planner:
        """Return a planner that has planned what this one has."""
        other = copy(self)
        other._in_equal_shards = [*self._in_equal_shards]
        other._balanced = None if self._balanced is None else self._balanced.copy()
        return other

    def plan(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]:
        """Return the plans of each unit's param groups. Loads are most even if all units are
        planned together. If it raises, the planner is as before."""
        is_flat = type(self._layout) is Flat and all(s.block == 1 for specs in units for s in specs)
        if self._balanced is not None or not is_flat:
            return self._plan_balanced(units)
        self._in_equal_shards.append(units)
        return [_param_groups(specs, self._world_size) for specs in units]

    def _plan_balanced(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]:
        # Imported here, because Flat() needs none of it.
        from fsdp_overlap.layout.balanced_planner import BalancedPlanner

        if self._balanced is None:
            self._balanced = BalancedPlanner(self._world_size, self._layout)
            for planned in self._in_equal_shards:
                self._balanced.plan(planned)  # the same plans, of which it notes the loads
        return self._balanced.plan(units)


def _param_groups(specs: Sequence[ParamSpec], world_size: int) -> list[Plan]:
    by_kind: dict[tuple[object, ...], list[ParamSpec]] = {}
    for spec in specs:
        by_kind.setdefault(spec.kind, []).append(spec)
    return [equal_shards(each, world_size) for each in by_kind.values()]


# ---- The first unit, which is reduced in pieces as DDP's buckets are: Note [pieces] ----

MAX_PIECES = 4  # of which one's reduction stays exposed
MIN_SHARD_BYTES = 1 << 20  # of a piece: smaller reductions are dominated by latency


def in_pieces(specs: Sequence[ParamSpec], world_size: int) -> list[ParamSpec]:
    """Return ``specs``, in which trainable parameters have the number of a piece. Pieces are
    contiguous and of about equal size. There are none if the parameters are too small for two."""
    movable = [spec for spec in specs if spec.requires_grad and not spec.is_extension]
    total = sum(map(_bytes, movable))
    count = min(MAX_PIECES, total // (MIN_SHARD_BYTES * world_size))
    if count < 2 or len(movable) < 2:
        return list(specs)
    pieces: dict[ParamSpec, int] = {}
    before = 0
    for spec in movable:
        pieces[spec] = 1 + before * count // total
        before += _bytes(spec)
    return [replace(spec, piece=pieces.get(spec, 0)) for spec in specs]


def _bytes(spec: ParamSpec) -> int:
    return spec.numel * spec.dtype.itemsize
