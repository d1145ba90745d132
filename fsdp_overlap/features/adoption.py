"""Adopt parameters that a loader assigns in place of sharded ones, before their unit has run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fsdp_overlap.engine.param import (
    ParamInfo,
    difference,
    mark_owner,
    mark_replaced,
    owner_of,
    record_replacement,
)
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.unit import Unit, unit_of, unit_of_edits
from fsdp_overlap.features.meta_init import (
    cast_to_assigned,
    materialize,
    register_unsharded_once,
    update_shared_params,
)
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam
from fsdp_overlap.torch_internals import DisableTorchFunctionSubclass


def adopt(unit: Unit) -> None:
    """Adopt what was assigned in place of parameters, and use one parameter where modules of the
    unit have it in place of another."""
    update_shared_params(unit)
    _adopt_assigned(unit)


def _adopt_assigned(unit: Unit) -> None:
    """Make DTensors that were assigned in place of sharded parameters the sharded parameters, if
    they have the same shape, mesh and placements. They stay the same objects, so optimizers may
    have been made of them; one that was made of the parameters before says so in its next step.

    A unit on the meta device waits until all its parameters were assigned. Nothing is adopted once
    the unit has run, nor one of several that were assigned to one parameter.

    Raises:
        RuntimeError: one has another dtype, and its param group cannot be cast. Or it has another
            ``grad_dtype``. Nothing was changed then.
    """
    param_groups, is_meta = unit.param_groups, unit.is_meta
    if any(group.edits.has_run for group in param_groups) or not unit.has_replaced_parameters:
        return
    for inner in _inner_units(unit):  # parameters that they have too are theirs
        inner.update_registrations()
    _tie_assigned(unit)
    assigned: list[dict[int, Any]] = []
    is_complete = True
    for param_group in param_groups:
        adopted = {}
        for index, (item, sharded) in enumerate(_owned(param_group)):
            [*given] = {id(each): each for each in map(_registered, item.registrations)}.values()
            if len(given) == 1 and _is_adoptable(given[0], sharded, param_group):
                adopted[index] = given[0]
            else:
                is_complete &= not given
        assigned.append(adopted)
    if not any(assigned) or (is_meta and not is_complete):
        return
    cast_to_assigned(unit, assigned, "an assignment gives")
    if is_meta:
        materialize(unit)
    for param_group, adopted in zip(param_groups, assigned, strict=True):
        parameters = [*param_group.sharded_parameters]
        for index, parameter in adopted.items():
            form = parameters[index]
            if not is_meta:
                mark_replaced(form, by="an assignment")
            if _belongs_to_unit(parameter):
                _share_shard(parameter, param_group)
            else:
                _adopt(parameter, form)
            parameters[index] = parameter
        param_group.register(parameters)
        param_group.edits.record_values()
        param_group.edits.trainability += 1
    record_replacement()
    unit.forget_parameters()
    unit.context.require_lazy_init()
    register_unsharded_once(unit)


def _inner_units(unit: Unit) -> dict[Unit, None]:
    within = (inner for module in unit.modules for inner in module.modules())
    units = dict.fromkeys(found for inner in within if (found := unit_of(inner)) is not None)
    units.pop(unit, None)
    return units


def _tie_assigned(unit: Unit) -> None:
    """Make what was assigned in place of several parameters the parameter of the first alone."""
    first: dict[int, ParamInfo] = {}
    for param_group in unit.param_groups:
        for item, sharded in _owned(param_group):
            kept: list[tuple[dict[str, Any], str]] = []
            for registration in item.registrations:
                given, tied = _registered(registration), item
                if _is_adoptable(given, sharded, param_group):
                    tied = first.setdefault(id(given), item)
                (kept if tied is item else tied.registrations).append(registration)
            item.registrations = kept
    for param_group in unit.param_groups:
        param_group.find_registrations()


def _owned(param_group: ParamGroup) -> Iterator[tuple[ParamInfo, ShardedParam]]:
    return zip(param_group.owned, param_group.sharded_parameters, strict=True)


def _registered(registration: tuple[dict[str, Any], str]) -> Any:
    table, name = registration
    return table.get(name)


def _belongs_to_unit(parameter: Any) -> bool:
    # a copy has no edits, and an alias has no owner
    return owner_of(parameter) is not None and getattr(parameter, "edits", None) is not None


def _is_adoptable(given: Any, sharded: ShardedParam, param_group: ParamGroup) -> bool:
    if given is sharded or difference(given, sharded):
        return False
    if not _belongs_to_unit(given):
        return True
    is_alone = len(param_group.owned) == 1 and not param_group.is_extension
    is_free = not (given.edits.has_run or param_group.shares_shard)
    return is_alone and is_free and given.dtype == sharded.dtype


def _share_shard(parameter: Any, param_group: ParamGroup) -> None:
    """Make ``parameter``, of another unit, the only one of ``param_group`` too. Each of the two
    units gathers it, and reduces its own part of the gradient."""
    unit, count = unit_of_edits(parameter.edits), param_group.shard.numel()
    assert unit is not None
    owner = next(group for group in unit.param_groups if group.edits is parameter.edits)
    places = owner.plan.places(owner.mesh_info.plan_rank)
    index = owner.module_info.index_of(parameter)
    assert index is not None
    first, _ = places[index]
    owner.edits.finish_step()  # of a thread
    # Both shards are views of one memory, and so of one version. The second has what it sends
    # beside the parameter from whatever comes next there.
    old, numel = owner.shard, owner.shard.numel()
    room = old.untyped_storage().nbytes() // old.itemsize
    if room >= first + count:
        memory = old.as_strided((room,), (1,), 0)
    else:
        assert not owner.shares_shard
        memory = owner.storage.empty(first + count, old.dtype, owner.device).zero_()
    owner.shard, param_group.shard = memory[:numel], memory[first : first + count]
    owner.shard.copy_(old)
    for sharded, (start, size) in zip(owner.sharded_parameters, places, strict=True):
        sharded._local_tensor = memory[start : start + size].view(sharded._local_tensor.shape)
    owner.shares_shard = param_group.shares_shard = True
    param_group.edits = parameter.edits
    param_group.edits.has_hooks = True  # no optimizer may step it once one of the units is done


@cache
def _with_hash(cls: Any, hash_of: Any) -> Any:
    """Return a class like ``cls`` whose hash is ``hash_of``, by which optimizers may have the state
    of the parameter already."""
    if cls.__hash__ is hash_of:
        return cls
    own = {"__hash__": hash_of, "__module__": cls.__module__}
    return type(cls)(cls.__name__, (cls,), own)


@torch.no_grad()
def _adopt(parameter: Any, form: ShardedParam) -> None:
    """Make ``parameter``, a DTensor laid out as ``form`` is, the sharded parameter in its place."""
    form._local_tensor.copy_(parameter._local_tensor)
    gradient, parameter.grad = parameter.grad, None
    with DisableTorchFunctionSubclass():
        parameter.data = form  # sets its dtype and device alone
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    owner = owner_of(form)
    assert owner is not None
    parameter.__class__ = _with_hash(type(form), type(parameter).__hash__)
    parameter._local_tensor, parameter._spec = form._local_tensor, form._spec
    parameter.edits = form.edits
    parameter.edits.has_hooks |= bool(hooks)
    mark_owner(parameter, replace(owner, replaced_by=""))
    parameter.keep_gradients_in(form._given_grad_dtype)
    parameter.requires_grad_(parameter.requires_grad)  # notes what autograd gives it
    parameter.grad = gradient
