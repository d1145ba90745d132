"""Plan the param groups of a model: in equal shards where everything may be cut, else balanced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Protocol, Self
from weakref import WeakKeyDictionary

from fsdp_overlap.layout.layouts import Flat, LayoutRule
from fsdp_overlap.layout.param_group_plan import Plan, equal_shards
from fsdp_overlap.layout.spec import ParamSpec


class BalancedPlanner(Protocol):
    """Plans param groups so that all ranks have equal loads, which it keeps."""

    def plan(self, units: Sequence[Sequence[ParamSpec]]) -> list[list[Plan]]: ...
    def copy(self) -> Self: ...


class Planner:
    """Plans the units of a model over one mesh: as they are made, or together ahead of that.

    ``make_balanced`` makes what plans them once not everything may be cut anywhere.
    """

    def __init__(
        self,
        world_size: int,
        layout: LayoutRule,
        make_balanced: Callable[[int, LayoutRule], BalancedPlanner],
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size} is not a number of ranks; use 1 or more")
        self._world_size, self._layout = world_size, layout
        self._make_balanced = make_balanced
        self._balanced: BalancedPlanner | None = None
        self._in_equal_shards: list[Sequence[Sequence[ParamSpec]]] = []
        """What was planned while everything could be cut anywhere."""
        self._ahead: WeakKeyDictionary[object, list[Plan]] = WeakKeyDictionary()
        """Plans of units that are not made yet, by their first module."""
        self._is_first = True
        """Whether no unit with parameters was planned yet."""

    def copy(self) -> Planner:
        """Return a planner that has planned what this one has."""
        other = copy(self)
        other._in_equal_shards = [*self._in_equal_shards]
        other._balanced = None if self._balanced is None else self._balanced.copy()
        other._ahead = self._ahead.copy()
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
        if self._balanced is None:
            self._balanced = self._make_balanced(self._world_size, self._layout)
            for planned in self._in_equal_shards:
                self._balanced.plan(planned)  # the same plans, of which it notes the loads
        return self._balanced.plan(units)

    def plan_unit(
        self, modules: Sequence[object], specs: Sequence[ParamSpec], may_be_first: bool = True
    ) -> list[Plan]:
        """Return the plans for ``modules``, which are becoming a unit of the parameters ``specs``.
        They are made now unless they were made ahead. ``may_be_first``: whether the unit is the
        first of its model if it is the first here.

        Raises:
            ValueError: the unit was planned ahead with other parameters.
        """
        if modules[0] in self._ahead:
            return self._plans_made_ahead(modules, specs)
        is_first = self._is_first and may_be_first and bool(specs)
        [plans] = self.plan([in_pieces(specs, self._world_size) if is_first else specs])
        self._is_first &= not is_first
        return plans

    # Units that are planned ahead

    def has(self, module: object) -> bool:
        """Return whether ``module`` is the first of a unit that was planned ahead and is not made
        yet."""
        return module in self._ahead

    def plan_ahead(
        self, units: Sequence[Sequence[object]], specs: Sequence[Sequence[ParamSpec]]
    ) -> None:
        """Plan ``units`` together: each will be a unit of these modules, with these parameters."""
        for modules, plans in zip(units, self.plan(self._begin_in_pieces(specs)), strict=True):
            self.place(modules, plans)

    def place(self, modules: Sequence[object], plans: list[Plan]) -> None:
        """Note how ``modules`` are to be laid out when they become a unit."""
        self._ahead[modules[0]] = [*self._ahead.get(modules[0], []), *plans]

    def _plans_made_ahead(
        self, modules: Sequence[object], specs: Sequence[ParamSpec]
    ) -> list[Plan]:
        plans = self._ahead[modules[0]]
        made_of = _as_known_ahead(spec for plan in plans for spec in plan.specs)
        different = made_of ^ _as_known_ahead(specs)
        if different:
            names = sorted({spec.fqn for spec in different})
            more = ", ..." if len(names) > 3 else ""
            raise ValueError(
                f"{', '.join(type(module).__name__ for module in modules)} was planned with other "
                f"parameters ({', '.join(names[:3])}{more}): give plan_layout() all modules that "
                "will be units, the same ignored_params, and parameters as frozen as they will be; "
                "units with a param_dtype_override_fn cannot be planned ahead"
            )
        del self._ahead[modules[0]]
        return plans

    def _begin_in_pieces(
        self, units: Sequence[Sequence[ParamSpec]]
    ) -> Sequence[Sequence[ParamSpec]]:
        """Return ``units``, the first of all that are planned in pieces: see Note [pieces]."""
        for index, specs in enumerate(units if self._is_first else ()):
            if specs:
                self._is_first = False
                return [*units[:index], in_pieces(specs, self._world_size), *units[index + 1 :]]
        return units


@contextmanager
def rollback_on_error(planners: Iterable[Planner]) -> Iterator[None]:
    """Take back what is planned in the ``with`` block if the block raises."""
    before = [(planner, planner.copy()) for planner in planners]
    try:
        yield
    except BaseException:
        for planner, as_before in before:
            vars(planner).update(vars(as_before))
        raise


def _as_known_ahead(specs: Iterable[ParamSpec]) -> set[ParamSpec]:
    """Return ``specs`` without what travels how, because ahead of a unit nobody knows that."""
    return {replace(spec, block=1, is_kept=False, piece=0) for spec in specs}


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
