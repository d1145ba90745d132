"""Implicit units: large modules, such as an embedding or a head, of what no other unit takes.

See Note [implicit units] in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from fsdp_overlap.engine.options import UnitOptions
from fsdp_overlap.engine.param import ParamInfo
from fsdp_overlap.engine.unit import Unit, unit_of

LARGE = 16 << 20
"""The bytes of a parameter from which on its module becomes a unit. On many ranks collectives of
smaller ones take about as long as starting them."""


def large_modules(
    modules: Sequence[nn.Module],
    owned: Sequence[ParamInfo],
    units: Collection[nn.Module] = (),
) -> list[nn.Module]:
    """Return the modules in a unit of ``modules`` that are to be units of their own, in the order
    of registration: those without children that have a large parameter, of those ``owned``, and
    none that another module has too. There are none if no unit lies within ``modules``. ``units``:
    modules that will be units."""
    if len(modules) != 1 or not _is_around_units(modules[0], units):
        return []
    shared = {item.module() for item in owned if len(item.registrations) > 1}
    large = dict.fromkeys(item.module() for item in owned if _is_large(item))
    return [
        module
        for module in large
        if not (module is None or module in modules or module in shared or module._modules)
        and type(module).forward is not nn.Module.forward  # as that of nn.ParameterList is
    ]


def _is_large(item: ParamInfo) -> bool:
    return item.spec.numel * item.spec.dtype.itemsize >= LARGE


def _is_around_units(module: nn.Module, units: Collection[nn.Module]) -> bool:
    inner = (child for child in module.modules() if child is not module)
    return any(unit_of(child) is not None or child in units for child in inner)


def options_of(options: UnitOptions) -> UnitOptions:
    """Return the options of implicit units in a unit that has ``options``. Their forwards cast
    nothing: only those of modules that the user made a unit do."""
    policy = replace(options.mp_policy, cast_forward_inputs=False, output_dtype=None)
    return replace(options, mp_policy=policy, is_implicit=True)


def reads_in_backward(module: nn.Module) -> bool:
    """Return whether the backward of ``module`` may read parameters. That of an embedding of
    torch's own, with no hooks of users, does not."""
    is_own = type(module).forward is nn.Embedding.forward and "forward" not in vars(module)
    is_plain = all(type(each) is nn.Parameter for each in module._parameters.values())
    return not (is_own and is_plain) or bool(module._forward_hooks)


def connect_implicit(outer: Unit, modules: Sequence[nn.Module]) -> None:
    """Make the implicit units within ``modules``, which are those of ``outer``, its own."""
    inner = [unit_of(child) for module in modules for child in module.modules()]
    found = [unit for unit in inner if unit is not None and unit.options.is_implicit]
    outer.implicit = [unit for unit in found if not unit.is_implicit]
    for unit in outer.implicit:
        unit.is_implicit = True
