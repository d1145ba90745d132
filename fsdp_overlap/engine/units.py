"""The units of one context, and their names."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from fsdp_overlap.engine.domain import BucketEdits
from fsdp_overlap.engine.unit import Unit, unit_of
from fsdp_overlap.tensor.ragged_dtensor import ShardEdits


class Units:
    """The units of one context, by index. They are not kept alive."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Unit]] = []

    def add(self, unit: Unit) -> int:
        """Takes ``unit`` in and returns its index, the same on every rank."""
        self.refs.append(weakref.ref(unit))
        for bucket in unit.buckets:
            bucket.edits.unit = self.refs[-1]
        return len(self.refs) - 1

    def existing(self) -> list[Unit]:
        """The units that still exist, in the order in which they were added."""
        return [unit for ref in self.refs if (unit := ref()) is not None]


def unit_of_edits(edits: ShardEdits | None) -> Unit | None:
    """The unit whose edits these are. ``None`` if there is none, or it was freed."""
    return edits.unit() if isinstance(edits, BucketEdits) and edits.unit is not None else None


def unit_names(units: Sequence[Unit]) -> dict[Unit, str]:
    """The name of each unit that lies within another, relative to the outermost unit around it. A
    unit of several modules is named by all of their names."""
    names: dict[Unit, str] = {}
    for outer in units:
        if outer in names:
            continue
        found: dict[Unit, list[str]] = {}
        for module in outer.modules:
            for name, child in module.named_modules():
                unit = unit_of(child)
                if unit is not None and unit is not outer:
                    found.setdefault(unit, []).append(name)
        names.update((unit, ", ".join(found[unit])) for unit in found)
    return names


def name_units(units: Sequence[Unit]) -> None:
    """Finds the root among ``units``, all units of a context, and names them as users know
    them."""
    names = unit_names(units)
    tops = [unit for unit in units if unit not in names]
    for unit in units:
        kind = unit.module_kind
        unit.is_root = tops == [unit] and not unit.is_list
        unit.rename(names.get(unit) or (kind if unit.is_root else f"{kind}[{unit.index}]"))
