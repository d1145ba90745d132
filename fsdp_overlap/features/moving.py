"""Moves and casts sharded modules: to(), to_empty(), bfloat16()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_overlap.engine.context import model_context_of
from fsdp_overlap.engine.param import modules_outside_units, move_buffers
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.features.meta_init import (
    cast_param_group,
    materialize,
    register_unsharded_once,
    validate_cast,
)
from fsdp_overlap.features.tied_parameters import ties_set_aside


def check_move(unit: Unit, fn: Any) -> None:
    """Raise RuntimeError if ``fn``, which ``_apply()`` is to call, would move or cast shards where
    they cannot be."""
    for param_group in unit.param_groups:
        param_group.edits.finish_step()  # of a thread
        with torch.no_grad():
            result = fn(param_group.shard.new_empty(0))
        if param_group.never_cast:  # left alone, whatever fn does to numbers
            result = result.to(param_group.shard.dtype)
        if (refused := validate_cast(unit, param_group, result)) is not None:
            raise RuntimeError(refused)


def move_unit(
    module: nn.Module, unit: Unit, fn: Callable[..., Any], apply: Callable[[], Any]
) -> None:
    """Do to ``unit`` what ``to_empty()``, ``to()`` and the like do to all tensors by ``fn``.
    ``apply`` does it to what ``module``, of the unit, has beside the unit's parameters."""
    shards = _shards_of(module, unit)
    with torch.no_grad():
        applied = [fn(shard) for _, shard in shards]
    for param_group in unit.param_groups:
        param_group.module_info.to_none()
    try:
        with ties_set_aside(unit):
            apply()
    finally:
        unit.to_sharded()
    if unit.rests_on_host:  # shards stay on the host, buffers do not
        move_buffers([module], model_context_of(unit).device)
    if any(
        param_group.is_meta and not result.is_meta
        for (param_group, _), result in zip(shards, applied, strict=True)
    ):
        materialize(unit)
    else:
        for (param_group, shard), result in zip(shards, applied, strict=True):
            if result.dtype != shard.dtype:
                cast_param_group(unit, param_group, result)
            elif result is not shard:
                shard.copy_(result)
    register_unsharded_once(unit)


def _shards_of(module: nn.Module, unit: Unit) -> list[tuple[ParamGroup, torch.Tensor]]:
    """Return the tensors that :func:`move_unit` works on: the shards of the unit, without what is
    opaque. If the unit has several modules, each of them is called, and works on the ranges of its
    own parameters. So it does if they are of a class of their own."""
    param_groups = [param_group for param_group in unit.param_groups if not param_group.never_cast]
    mine = {id(inner._parameters) for _, inner in modules_outside_units([module])}
    flat = [group for group in param_groups if not (unit.has_several_modules or group.is_extension)]
    return [(param_group, param_group.shard) for param_group in flat] + [
        (param_group, sharded._local_tensor)
        for param_group in param_groups
        if param_group not in flat
        for item, sharded in zip(param_group.owned, param_group.sharded_parameters, strict=True)
        if any(id(registered) in mine for registered, _ in item.registrations)
    ]
