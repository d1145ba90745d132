"""Contexts that units were given by default: those of one tree become one."""

from __future__ import annotations

from fsdp_overlap.engine.context import ModelContext, model_context_of
from fsdp_overlap.engine.unit import unit_of


def take_in_units_within(ctx: ModelContext) -> bool:
    """Take in the units that lie within those of ``ctx``. Return false if some have to wait,
    because their own context awaits a backward."""
    is_complete = True
    for outer in ctx.units:
        for child in (child for module in outer.modules for child in module.modules()):
            unit = unit_of(child)
            if unit is None or unit.context is ctx:
                continue
            other = model_context_of(unit)
            if not other.is_implicit:
                continue
            if other.schedule.awaits_backward:
                is_complete = False
                continue
            unit.check_registrations()
            other.rest()
            unit.context = ctx
            unit.index = ctx.register(unit)
    return is_complete
