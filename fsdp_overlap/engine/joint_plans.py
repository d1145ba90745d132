"""Plans of several units together, before they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import nn

from fsdp_overlap.engine.param import ParamInfo, owned_parameters, owner_of
from fsdp_overlap.engine.unit import unit_of
from fsdp_overlap.layout.plan import Planner, rollback_on_error

LargeModules = Callable[
    [Sequence[nn.Module], Sequence[ParamInfo], Collection[nn.Module]], list[nn.Module]
]


def plan_jointly(
    units: Sequence[nn.Module | Sequence[nn.Module]],
    ignored_params: Collection[nn.Parameter],
    plans_of: Callable[[nn.Module], Planner],
    made: Sequence[Planner],
    large_modules: LargeModules | None,
) -> None:
    """Do ``ctx.plan_layout()``. ``plans_of`` returns the plans over the mesh of the unit that has
    this first module, and ``made`` has those that exist. ``large_modules`` finds implicit units.

    Raises:
        ValueError: a module is a unit already, was planned before, or is named twice.
    """
    lists = [[unit] if isinstance(unit, nn.Module) else list(unit) for unit in units]
    modules = [module for members in lists for module in members]
    for module in modules:
        if unit_of(module) is not None or any(plans.has(module) for plans in made):
            raise ValueError(
                f"{type(module).__name__} is a unit or was planned already: call plan_layout() "
                "once, before fully_shard()"
            )
    if len(set(modules)) != len(modules):
        raise ValueError("plan_layout() was given a module twice; name each unit once")
    by_plans: dict[Planner, list[list[nn.Module]]] = {}
    for members in lists:
        by_plans.setdefault(plans_of(members[0]), []).append(members)
    with rollback_on_error(by_plans):
        for plans, planned in by_plans.items():
            among = set(modules)
            if large_modules is not None:
                planned, among = _with_implicit(planned, ignored_params, among, large_modules)
            owned = _untied(owned_parameters(unit, ignored_params, among) for unit in planned)
            plans.plan_ahead(planned, [[item.spec for item in items] for items in owned])


def _with_implicit(
    units: Sequence[list[nn.Module]],
    ignored_params: Collection[nn.Parameter],
    among: set[nn.Module],
    large_modules: LargeModules,
) -> tuple[list[list[nn.Module]], set[nn.Module]]:
    """Return ``units`` with the implicit units of each before it, and ``among`` with these."""
    found: list[list[nn.Module]] = []
    for unit in units:
        [owned] = _untied([owned_parameters(unit, ignored_params, among)])
        inner = large_modules(unit, owned, among)
        found += [*([module] for module in inner), unit]
        among = among.union(inner)
    return found, among


def _untied(units: Iterable[Sequence[ParamInfo]]) -> list[list[ParamInfo]]:
    """Return the parameters of each of ``units`` that no unit before it owns."""
    owned: set[int] = set()
    found = []
    for items in units:
        own = [i for i in items if id(i.parameter) not in owned and owner_of(i.parameter) is None]
        owned.update(id(item.parameter) for item in own)
        found.append(own)
    return found
