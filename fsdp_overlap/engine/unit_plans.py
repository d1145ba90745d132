"""The plans of a context's units: made ahead or one by one, and the same on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from fsdp_overlap.engine.ownership import kind_of, owned_parameters
from fsdp_overlap.layout import LayoutRule, ParamSpec, Plan
from fsdp_overlap.layout.pieces import in_pieces
from fsdp_overlap.layout.planner import Planner


class UnitPlans:
    """How units are laid out, also those that are not made yet."""

    def __init__(self, world_size: int, layout: LayoutRule) -> None:
        self._world_size = world_size
        self._layout = layout
        self._planner = Planner(world_size, layout)
        self._ahead: weakref.WeakKeyDictionary[nn.Module, list[Plan]]
        self._ahead = weakref.WeakKeyDictionary()
        self._is_first = True
        """Whether no unit with parameters was planned yet."""

    def has(self, module: nn.Module) -> bool:
        """Whether ``module`` is the first of a unit that was planned ahead and is not made yet."""
        return module in self._ahead

    def plan(
        self,
        units: Sequence[Sequence[nn.Module]],
        ignored: Collection[nn.Parameter],
        among: Collection[nn.Module],
    ) -> None:
        """Plans ``units`` together: each will be a unit of these modules. ``among``: all modules
        that will be units, or belong to one that is a list."""
        owned = [owned_parameters(unit, ignored, among) for unit in units]
        specs = self._begin_in_pieces([[item.spec for item in items] for items in owned])
        planned = self._planner.plan(specs)
        for unit, plans in zip(units, planned, strict=True):
            self.place(unit, plans)

    def place(self, modules: Sequence[nn.Module], plans: list[Plan]) -> None:
        """Notes how ``modules`` are to be laid out when they become a unit."""
        self._ahead[modules[0]] = [*self._ahead.get(modules[0], []), *plans]

    def take(
        self, modules: Sequence[nn.Module], specs: Sequence[ParamSpec], may_be_first: bool = True
    ) -> list[Plan]:
        """The plans for ``modules``, which are becoming a unit of the parameters ``specs``. They
        are made now unless they were made ahead. ``may_be_first``: whether the unit is the first of
        its model if it is the first here.

        Raises:
            ValueError: the unit was planned ahead with other parameters.
        """
        plans = self._ahead.get(modules[0])
        if plans is None:
            if may_be_first:
                [specs] = self._begin_in_pieces([specs])
            return self._planner.plan([specs])[0]
        different = _unquantized(spec for plan in plans for spec in plan.specs) ^ _unquantized(
            specs
        )
        if different:
            names = sorted({spec.fqn for spec in different})
            more = ", ..." if len(names) > 3 else ""
            raise ValueError(
                f"{kind_of(modules)} was planned with other parameters "
                f"({', '.join(names[:3])}{more}): give plan_layout() all modules that will be "
                "units, the same ignored_params, and parameters as frozen as they will be; units "
                "with a param_dtype_override_fn cannot be planned ahead"
            )
        del self._ahead[modules[0]]
        return plans

    def _begin_in_pieces(
        self, units: Sequence[Sequence[ParamSpec]]
    ) -> Sequence[Sequence[ParamSpec]]:
        """``units``, the first of all that are planned in pieces: see Note [pieces]."""
        for index, specs in enumerate(units if self._is_first else ()):
            if specs:
                self._is_first = False
                return [*units[:index], in_pieces(specs, self._world_size), *units[index + 1 :]]
        return units

    def way_back(self) -> Callable[[], None]:
        """A function that takes back what is planned between now and its call."""
        before = self._planner.copy(), self._ahead.copy(), self._is_first

        def go_back() -> None:
            self._planner, self._ahead, self._is_first = before

        return go_back


def _unquantized(specs: Iterable[ParamSpec]) -> set[ParamSpec]:
    """``specs`` without what travels how, because ahead of a unit nobody knows that."""
    return {replace(spec, block=1, is_kept=False, piece=0) for spec in specs}


@contextmanager
def all_or_none(several: Iterable[UnitPlans]) -> Iterator[None]:
    """Takes back what is planned in the ``with`` block if the block raises."""
    ways_back = [plans.way_back() for plans in several]
    try:
        yield
    except BaseException:
        for go_back in ways_back:
            go_back()
        raise


def plan_together(
    units: Sequence[Sequence[nn.Module]],
    plans_for: Callable[[nn.Module], UnitPlans],
    made: Sequence[UnitPlans],
    ignored: Collection[nn.Parameter],
) -> None:
    """Plans ``units``, each with those that have the same plans: ``plans_for`` the unit's first
    module. ``made`` are all plans of the context.

    Raises:
        ValueError: a module is a unit already, was planned before, or is named twice. Nothing is
            planned then.
    """
    _check_plannable(units, made)
    among = {module for modules in units for module in modules}
    by_plans: dict[UnitPlans, list[Sequence[nn.Module]]] = {}
    for modules in units:
        by_plans.setdefault(plans_for(modules[0]), []).append(modules)
    with all_or_none(by_plans):
        for plans, members in by_plans.items():
            plans.plan(members, ignored, among)


def _check_plannable(units: Sequence[Sequence[nn.Module]], made: Sequence[UnitPlans]) -> None:
    modules = [module for unit in units for module in unit]
    for module in modules:
        if "_fsdp_unit" in module.__dict__ or any(plans.has(module) for plans in made):
            raise ValueError(
                f"{type(module).__name__} is a unit or was planned already: call "
                "plan_layout() once, before fully_shard()"
            )
    if len(set(modules)) != len(modules):
        raise ValueError("plan_layout() was given a module twice; name each unit once")
