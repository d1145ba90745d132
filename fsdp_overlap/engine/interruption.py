"""Forwards and backwards that were interrupted, by a ``KeyboardInterrupt``: Note [errors]."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

from fsdp_overlap.engine.forward_method import ForwardMethod
from fsdp_overlap.engine.unit import Context, Unit
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.torch_internals import current_graph_task_id


def is_interrupted(context: Context) -> bool:
    """Return whether a forward or backward of ``context`` began, and neither ended nor is under
    way. Not meant for every step: it looks at the frames of all threads."""
    if not context.has_schedule:
        return False
    running: Any = context.schedule.running_units
    if not running:
        return context.schedule.has_broken_backward
    return not any(_calls_of(running))


def end_interrupted(unit: Unit, module: nn.Module, schedule: Schedule) -> None:
    """End the forwards that a ``KeyboardInterrupt`` has left, if there are any, as if they had
    raised. A forward of ``module`` is about to begin: on its own, or for ``unit``, whose parameters
    another unit reads in it."""
    if current_graph_task_id() != -1 or all(each is not module for each in unit.modules):
        return
    running: Any = schedule.running_units
    if len([*_calls_of(running)]) > (unit in running):  # more than the call that begins
        return
    schedule.end_interrupted()
    for each in dict.fromkeys(running):
        del each.under_way[: -1 if each is unit else None]
        each.saved_tensors.reset()


def _calls_of(units: Sequence[Unit]) -> Iterator[FrameType]:
    """Yield the frame of each call to a module of ``units`` that is under way on some thread."""
    modules = {id(module) for unit in units for module in unit.modules}
    codes = nn.Module.__call__.__code__, ForwardMethod.__call__.__code__
    for frame in sys._current_frames().values():
        within: FrameType | None = frame
        while within is not None:
            if within.f_code in codes:
                names = within.f_locals
                called = names["self"]
                called = names.get("module") if isinstance(called, ForwardMethod) else called
                if id(called) in modules:
                    yield within
            within = within.f_back
