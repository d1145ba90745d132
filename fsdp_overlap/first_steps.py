"""Looks at the first steps of optimizers, for numbers that are worse than the user may know."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdp_overlap.engine.context import ModelContext
from fsdp_overlap.engine.mesh import mesh_info_of

LOW = {torch.bfloat16, torch.float16}


class Watch(Protocol):
    """Looks on, for what the first steps do not show."""

    def look(self) -> bool:
        """Look once all optimizers have stepped again. Return whether nothing is left to see."""
        ...


class FirstSteps:
    """What the first steps of optimizers do with the parameters of one context. It is looked at
    when one of them steps again, because several step one after the other. Then the hook is
    removed, unless there may be something to warn of: a :class:`Watch` looks on.

    ``optimizers``: those that stepped. ``had``: the ids of their parameters, and ``used`` those of
    parameters that had a gradient, or need none. ``is_scaled``: whether a gradient scaler gave one
    its scale. ``backwards``: how many came before the first step.
    """

    is_scaled = False
    backwards = 0
    _watch: Watch | None = None
    _is_over = False

    def __init__(self, context: ModelContext) -> None:
        self._context = weakref.ref(context)
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._in_round: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.had: set[int] = set()
        self.used: set[int] = set()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        weakref.finalize(context, self._hook.remove)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        context = self._context()
        if context is not None and not self._is_over:
            self._record(context, optimizer)
        hooks: Any = self._hook.hooks_dict_ref()
        # torch iterates over the hooks, and may lose the last alone meanwhile.
        if self._is_over and next(reversed(hooks)) == self._hook.id:
            self._hook.remove()

    def _record(self, context: ModelContext, optimizer: Optimizer) -> None:
        own = {id(parameter) for unit in context.units for parameter in unit.sharded_parameters}
        given = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        if not given:
            return
        self.had.update(map(id, given))
        self.used.update(id(p) for p in given if had_gradient(p, optimizer))
        self.is_scaled |= getattr(optimizer, "found_inf", None) is not None
        self.backwards = self.backwards or context.schedule.backwards
        if optimizer in self._in_round:
            self._in_round.clear()
            self._look(context)
        self.optimizers.add(optimizer)
        self._in_round.add(optimizer)

    def _look(self, context: ModelContext) -> None:
        if self._watch is None and self._may_warn(context):
            from fsdp_overlap.features.numerics import NumericsWatch

            self._watch = NumericsWatch(self, context)
        self._is_over = self._watch is None or self._watch.look()

    def _may_warn(self, context: ModelContext) -> bool:
        trained = {id(p) for u in context.units for p in u.sharded_parameters if p.requires_grad}
        groups = [param_group for unit in context.units for param_group in unit.param_groups]
        return not trained <= self.had <= self.used or any(
            not LOW.isdisjoint((each.shard.dtype, each.compute_dtype, each.reduce_dtype))
            for each in groups
        )


def had_gradient(parameter: Any, optimizer: Optimizer) -> bool:
    """Return whether a step of ``optimizer`` may have had a gradient of ``parameter``, or needs
    none. A host that runs ahead does not know: it gives zeros where no rank has one."""
    mesh_info = mesh_info_of(parameter.edits)
    if mesh_info is None or not parameter.requires_grad or parameter.edits.stepper is not None:
        return True
    is_known = mesh_info.syncs_unused_params
    return is_known and (parameter.grad is not None or parameter in optimizer.state)


def watch_first_steps(context: ModelContext) -> bool:
    """Look at the first steps, on the first rank that has parameters of ``context``. Return whether
    there are any."""
    meshes = {p.device_mesh for unit in context.units for p in unit.sharded_parameters}
    if meshes and min(int(mesh.mesh.min()) for mesh in meshes) == dist.get_rank():
        FirstSteps(context)
    return bool(meshes)
