"""Names of units: those of their modules in the outermost unit."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_overlap.engine.unit import Unit, unit_of


def unit_names(units: Sequence[Unit]) -> dict[Unit, str]:
    """Return the name of each unit that lies within another, relative to the outermost unit around
    it. A unit of several modules is named by all of their names."""
    names: dict[Unit, str] = {}
    for outer in units:
        if outer in names:
            continue
        names_within: dict[Unit, list[str]] = {}
        for module in outer.modules:
            for name, child in module.named_modules():
                unit = unit_of(child)
                if unit is not None and unit is not outer:
                    names_within.setdefault(unit, []).append(name)
        names.update((unit, ", ".join(names_within[unit])) for unit in names_within)
    return names


def name_units(units: Sequence[Unit]) -> None:
    """Find the root among ``units``, all units of a context, and name them as users know
    them."""
    names = unit_names(units)
    tops = [unit for unit in units if unit not in names]
    for unit in units:
        kind = unit.module_class_name
        unit.set_root(tops == [unit] and not unit.has_several_modules)
        unit.rename(names.get(unit) or (kind if unit.is_root else f"{kind}[{unit.index}]"))
