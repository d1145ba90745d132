"""Parameters tied across units: the first unit owns them, and later ones read them.

Note [tied parameters] in docs/design.md says how they are gathered and reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_overlap.engine.context import ModelContext, model_context_of
from fsdp_overlap.engine.param import Owner, ParamInfo, compute_dtype, owner_of
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.unit import Tie, Unit
from fsdp_overlap.layout import ParamSpec


def find_ties(
    modules: Sequence[nn.Module],
    items: Sequence[ParamInfo],
    ctx: ModelContext,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[list[ParamInfo], list[Tie]]:
    """Return those of ``items``, the parameters in ``modules``, that belong to no unit yet, and the
    ties to the units that own the others. ``modules`` are becoming a unit in ``ctx``.

    Raises:
        ValueError: a unit around ``modules`` owns a parameter, or one that ``modules`` cannot read
            it from.
    """
    own, ties = [], []
    for item in items:
        owner = owner_of(item.parameter)
        if owner is None:
            own.append(item)
            continue
        unit: Unit | None = owner.find()
        if unit is None or not unit.is_complete:
            _refuse(item, owner, "of which a module was deleted")
        if _is_within(modules, unit):
            raise ValueError(
                f"{item.where} was sharded already, as {owner.fqn!r} of the unit {owner.unit} "
                "around it: call fully_shard on inner modules first, then on the module around them"
            )
        param_group, index = _find(unit, owner.fqn)
        spec = param_group.plan.specs[index]
        why = _conflict(unit, param_group, spec, ctx, mesh, mp_policy)
        if why is not None:
            _refuse(item, owner, why)
        ties.append(Tie(unit, param_group.owned[index], item.registrations))
    return own, ties


def connect_ties(unit: Unit, ties: Sequence[Tie]) -> None:
    """Register the sharded parameters of ``ties`` in the modules of ``unit``, and make their owners
    register the unsharded ones there too."""
    unit.ties = ties
    unit.owners = [*dict.fromkeys(tie.owner for tie in ties)]
    for tie in ties:
        _register(tie)


@contextmanager
def ties_set_aside(unit: Unit) -> Iterator[None]:
    """Have nothing registered in place of the parameters that ``unit`` reads of others within the
    ``with`` block, so that what is done to all parameters of its modules skips these."""
    for tie in unit.ties:
        places = _places(tie.registrations)
        kept = [place for place in tie.item.registrations if _places([place]).isdisjoint(places)]
        tie.item.registrations = kept
        _group_of(tie).find_registrations()
        for table, name in tie.registrations:
            table[name] = None
    try:
        yield
    finally:
        for tie in unit.ties:
            _register(tie)


def copy_owners(unit: Unit, memo: dict[int, Any]) -> None:
    """Copy the modules whose parameters ``unit`` reads, before its own."""
    for owner in unit.owners:
        for module in owner.modules:
            deepcopy(module, memo)


def _register(tie: Tie) -> None:
    known = _places(tie.item.registrations)
    new = [place for place in tie.registrations if _places([place]).isdisjoint(known)]
    tie.item.registrations += new
    param_group = _group_of(tie)
    param_group.find_registrations()
    sharded = param_group.sharded_parameters[param_group.owned.index(tie.item)]
    for table, name in tie.registrations:
        table[name] = sharded


def _places(registrations: Iterable[tuple[dict[str, Any], str]]) -> set[tuple[int, str]]:
    return {(id(table), name) for table, name in registrations}


def _group_of(tie: Tie) -> ParamGroup:
    return next(group for group in tie.owner.param_groups if tie.item in group.owned)


def _find(unit: Unit, fqn: str) -> tuple[ParamGroup, int]:
    return next(
        (param_group, index)
        for param_group in unit.param_groups
        for index, item in enumerate(param_group.owned)
        if item.fqn == fqn
    )


def _is_within(modules: Sequence[nn.Module], unit: Unit) -> bool:
    """Return whether one of ``modules`` lies within a module of ``unit``."""
    within = {inner for outer in unit.modules for inner in outer.modules()}
    return not within.isdisjoint(modules)


def _conflict(
    unit: Unit,
    param_group: ParamGroup,
    spec: ParamSpec,
    ctx: ModelContext,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
) -> str | None:
    """Return why a forward of another unit cannot read the parameter ``spec`` as ``unit`` has it,
    in words. ``None`` if it can."""
    its = model_context_of(unit)
    if its is not ctx and not (its.is_implicit and ctx.is_implicit):
        return "which has another FsdpContext: give both the same"
    if unit.mesh != mesh:
        return f"which is sharded over {unit.mesh}, and this unit over {mesh}: give both the same"
    dtype = compute_dtype(spec, mp_policy)
    if dtype != param_group.compute_dtype:
        return (
            f"which computes with it in {param_group.compute_dtype}, and this unit in {dtype}: "
            "give both the same param_dtype"
        )
    return None


def _refuse(item: ParamInfo, owner: Owner, why: str) -> NoReturn:
    raise ValueError(
        f"{item.where} is also {owner.fqn!r} of the unit {owner.unit}, {why}; or make one unit of "
        "the modules that share it, by fully_shard([a, b], ctx), or call fully_shard on neither "
        "and on a module that holds both"
    )
