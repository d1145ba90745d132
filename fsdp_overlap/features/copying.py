"""Copies sharded modules: copy.deepcopy()."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fsdp_overlap.engine.context import model_context_of
from fsdp_overlap.engine.param import (
    parameter_like,
    parameters_outside_units,
    plain_class,
    tp_local_tensor,
)
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.features.grad_dtypes import sync_grad_dtypes
from fsdp_overlap.features.opaque_parameters import OpaqueParamInfo
from fsdp_overlap.features.tied_parameters import copy_owners
from fsdp_overlap.tensor.ragged_dtensor import attributes_of


def copy_unit(unit: Unit, memo: dict[int, Any]) -> None:
    """Put copies of the modules of ``unit``, which become a unit too, into ``memo``."""
    for each in (unit, *unit.owners):
        if not each.is_complete:
            raise RuntimeError(
                f"unit {each.name!r} is of several modules, of which one was deleted, or owns "
                "a parameter of another, and cannot be copied without it: keep, and copy, the "
                "module that holds all of them"
            )
    if unit.owners:
        copy_owners(unit, memo)
    sync_grad_dtypes(unit.param_groups)
    kept = _copy_parameters(unit, memo)
    if any(
        param_group.shares_shard or not item.registrations
        for param_group in unit.param_groups
        for item in param_group.owned
    ):
        raise RuntimeError(
            f"{unit.name!r} has weights that were tied after fully_shard(), and cannot be "
            "copied: tie them before"
        )
    originals = unit.modules
    duplicates = []
    for module in originals:
        plain = plain_class(type(module))
        memo[id(module)] = duplicate = plain.__new__(plain)
        duplicates.append(duplicate)
    _copy_attributes(unit, memo)  # not before: they may lead to modules and other parameters
    for module, duplicate in zip(originals, duplicates, strict=True):
        state = _without_hooks(module.__getstate__(), unit)
        del state["_fsdp_unit"]
        duplicate.__setstate__(deepcopy(state, memo))
    context = deepcopy(model_context_of(unit), memo)
    meshes = {}
    for param_group in unit.param_groups:
        mesh_info = context.mesh_info_of(param_group.mesh_info.mesh)
        mesh_info.plans.place(duplicates, [param_group.plan])
        for item, spec in zip(param_group.owned, param_group.plan.specs, strict=True):
            full = item.placement.full if item.placement is not None else None
            # As FSDP2's ShardPlacementResult.
            meshes[memo[id(item.parameter)]] = SimpleNamespace(
                mesh_info=SimpleNamespace(
                    mesh=mesh_info.mesh,
                    spmd_mesh=full and full.mesh,
                    dp_mesh_dims=full,
                ),
                placement=Shard(spec.cut_dim),
            )
    tied = {memo[id(table[name])] for tie in unit.ties for table, name in tie.registrations}
    assert unit.make_unit is not None
    options = replace(
        unit.options,
        mp_policy=_keeping_dtypes(unit.mp_policy, kept),
        reshard_after_forward=unit.reshard_after_forward,
        shard_placement_fn=meshes.__getitem__,
        full_mesh=None,
        # What the unit does not own, the copy does not: ignored, or frozen and added later.
        ignored=frozenset(
            parameter
            for _, parameter, *_ in parameters_outside_units(duplicates)
            if parameter not in meshes and parameter not in tied
        ),
    )
    copied_unit = unit.make_unit(duplicates, context, options)
    copied_unit.unowned = deepcopy(unit.unowned, memo)
    for module, duplicate in zip(originals, duplicates, strict=True):
        object.__setattr__(duplicate, "__class__", type(module))
    for mine, its in zip(unit.param_groups, copied_unit.param_groups, strict=True):
        # For an optimizer that is copied together with the model.
        memo.update(zip(map(id, mine.sharded_parameters), its.sharded_parameters, strict=True))
    _copy_state(unit, copied_unit)


def _copy_state(unit: Unit, other: Unit) -> None:
    """Copy values, gradients and settings to ``other``, which was sharded likewise."""
    for mine, its in zip(unit.param_groups, other.param_groups, strict=True):
        mine.edits.finish_step()  # of a thread
        its.copy_values_of(mine)
        its.full.keeps_storage = mine.full.keeps_storage
        for parameter, duplicate in zip(
            mine.sharded_parameters, its.sharded_parameters, strict=True
        ):
            duplicate.requires_grad_(parameter.requires_grad)
            duplicate.grad = deepcopy(parameter.grad)
    unit.settings.copy_to(other.settings)


def _copy_parameters(unit: Unit, memo: dict[int, Any]) -> set[nn.Parameter]:
    """Put into ``memo`` a parameter without values for each of the unit's. Return those that keep
    their dtype."""
    kept: set[nn.Parameter] = set()
    for param_group in unit.param_groups:
        device = param_group.device if param_group.never_cast else param_group.shard.device
        for spec, item, sharded in zip(
            param_group.plan.specs, param_group.owned, param_group.sharded_parameters, strict=True
        ):
            # make_unit() takes this over. Of its values only the shard is copied, below.
            empty = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            if param_group.is_extension:
                empty = sharded._local_tensor.new_zeros(spec.shape)
            copied = parameter_like(item.parameter, empty, spec.requires_grad)
            if spec.grad_dtype is not None:
                copied.grad_dtype = spec.grad_dtype
            memo[id(item.parameter)] = memo[id(sharded)] = copied
            if isinstance(item, OpaqueParamInfo):
                memo.update((alias, empty.view_as(empty)) for alias in item.aliases)
            if spec.keeps_dtype:
                kept.add(copied)
    return kept


def _copy_attributes(unit: Unit, memo: dict[int, Any]) -> None:
    """Give the parameters in ``memo`` copies of the attributes that the unit's have."""
    for param_group in unit.param_groups:
        for parameter, sharded in zip(
            param_group.parameters, param_group.sharded_parameters, strict=True
        ):
            attributes = attributes_of(parameter) | attributes_of(sharded)
            del attributes["_fsdp_owner"]
            copied = memo[id(parameter)]
            own = vars(tp_local_tensor(copied))  # of its class, if it has one of its own
            given = {name: value for name, value in attributes.items() if name not in own}
            vars(copied).update(deepcopy(given, memo))


# The attributes in which nn.Module notes hooks, and how to call those of a forward.
_HOOK_TABLES = (
    "_load_state_dict_post_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def _without_hooks(state: dict[str, Any], unit: Unit) -> dict[str, Any]:
    """Return a copy of ``state``, a module's ``__dict__``, without the hooks of its ``unit``."""
    state = dict(state)
    installed = [
        key
        for name in ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
        for key, hook in state[name].items()
        if isinstance(hook, partial) and hook.args and hook.args[0] is unit
    ]
    for name in _HOOK_TABLES:
        kept = [(key, hook) for key, hook in state[name].items() if key not in installed]
        state[name] = OrderedDict(kept)
    return state


def _keeping_dtypes(
    policy: MixedPrecisionPolicy, parameters: set[nn.Parameter]
) -> MixedPrecisionPolicy:
    """Return the policy of a copy, in which ``parameters`` keep their dtype. ``policy`` itself may
    know the original parameters by identity, and the copy has others."""
    if not parameters:
        return policy
    changes: Any = {"param_dtype_override_fn": lambda p: p.dtype if p in parameters else None}
    return replace(policy, **changes)
