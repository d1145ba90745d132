"""Module and autograd hooks: what a forward and a backward tell the schedule."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_overlap.runtime.order import Call
from fsdp_overlap.runtime.schedule import Schedule
from fsdp_overlap.runtime.trees import map_tensors, tensors_in
from fsdp_overlap.runtime.unit import Unit


def install(module: nn.Module, unit: Unit) -> None:
    """Makes every forward of ``module`` run on unsharded parameters."""
    module.register_forward_pre_hook(partial(_before_forward, unit), prepend=True, with_kwargs=True)
    # Also after a forward that raised, so that it leaves the sharded parameters in the module.
    module.register_forward_hook(partial(_after_forward, unit), always_call=True)


def _before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    unit.context.settle(unit)
    unit.follow_trainability()
    unit.context.schedule.before_forward(unit)
    unit.use_unsharded()
    policy = unit.mp_policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        cast = partial(_cast_floating, policy.param_dtype)
        args, kwargs = map_tensors(cast, args), map_tensors(cast, kwargs)
    return args, kwargs


def _after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    schedule = unit.context.schedule
    # torch calls this while it handles the error of a forward that raised, with no output.
    raised = output is None and sys.exc_info()[0] is not None
    call = schedule.after_forward(unit, raised)
    if not schedule.is_in_use(unit):
        unit.use_sharded()
    if unit.mp_policy.output_dtype is not None:
        output = map_tensors(partial(_cast_floating, unit.mp_policy.output_dtype), output)
    if call is not None:
        _announce_backward(call, schedule, output)
    return output


def _announce_backward(call: Call, schedule: Schedule, output: Any) -> None:
    before_backward = partial(_before_backward, weakref.ref(schedule), call)
    hooked = False
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(before_backward)
            hooked = True
    if hooked:
        schedule.add_call(call)


def _before_backward(schedule: weakref.ref[Schedule], call: Call, gradient: torch.Tensor) -> None:
    alive = schedule()
    if alive is not None:
        alive.before_backward(call)


def _cast_floating(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
