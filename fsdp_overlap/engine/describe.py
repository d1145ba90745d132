"""print(ctx): the options of a context and a table of its units."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from operator import itemgetter

from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.engine.unit import Unit, unit_names
from fsdp_overlap.layout import LayoutRule


def described(
    mesh: DeviceMesh | None,
    layout: LayoutRule,
    prefetch: int,
    others: Sequence[str],
    units: Sequence[Unit],
) -> str:
    """Return the options of a context, of which ``others`` are in words already, and a table of
    its ``units``."""
    where = "all ranks" if mesh is None else _mesh(mesh)
    rule = getattr(layout, "__name__", repr(layout))
    options = [f"mesh {where}", f"layout {rule}", f"prefetch {prefetch}", *others]
    lines = [f"FsdpContext of {_count(len(units), 'unit')}{_totals(units)}", "; ".join(options)]
    if units:
        lines += aligned([HEAD, *_rows(units)], RIGHT)
    return "\n".join(lines)


HEAD = ("unit", "parameters", "elements", "dtype", "whole", "here", "mesh", "shards", "kept whole")

# Columns of numbers, to be aligned to the right.
RIGHT = {1, 2, 4, 5}


def _totals(units: Sequence[Unit]) -> str:
    param_groups = [param_group for unit in units for param_group in unit.param_groups]
    if not param_groups:
        return ""
    parameters = sum(len(param_group.plan.specs) for param_group in param_groups)
    elements = sum(spec.numel for param_group in param_groups for spec in param_group.plan.specs)
    total, here = (_size(sum(nbytes)) for nbytes in zip(*map(_bytes_of, units), strict=True))
    return (
        f": {_count(parameters, 'parameter')} of {elements:,} elements, {total} whole, {here} "
        "on this rank"
    )


def _rows(units: Sequence[Unit]) -> list[tuple[str, ...]]:
    names = unit_names(units)
    named = [
        (names.get(unit, unit.module_class_name), _row(unit, unit not in names)) for unit in units
    ]
    rows = []
    for row, group in groupby(named, key=itemgetter(1)):
        alike = [name for name, _ in group]
        name = alike[0] if len(alike) == 1 else f"{alike[0]} ... {alike[-1]} ({len(alike)})"
        rows.append((name, *row))
    return rows


def _row(unit: Unit, is_outermost: bool) -> tuple[str, ...]:
    specs = [spec for param_group in unit.param_groups for spec in param_group.plan.specs]
    total, here = _bytes_of(unit)
    meshes = dict.fromkeys(_mesh(param_group.mesh_info.mesh) for param_group in unit.param_groups)
    is_equal = all(param_group.plan.is_equal for param_group in unit.param_groups)
    pieces = len({spec.piece for spec in specs if spec.piece})
    dtypes = ", ".join(dict.fromkeys(param_group.dtypes for param_group in unit.param_groups))
    return (
        str(len(specs)),
        f"{sum(spec.numel for spec in specs):,}",
        f"{dtypes}, {_count(pieces, 'piece')}" if pieces else dtypes,
        _size(total),
        "meta" if unit.is_meta else _size(here),
        " and ".join(meshes) or _mesh(unit.mesh),
        "equal" if is_equal else "ragged",
        _kept(unit, is_outermost),
    )


def _bytes_of(unit: Unit) -> tuple[int, int]:
    """Return the bytes of all parameters of ``unit``, and of what this rank holds of them."""
    total = sum(
        spec.numel * spec.dtype.itemsize
        for param_group in unit.param_groups
        for spec in param_group.plan.specs
    )
    return total, sum(param_group.nbytes_at_rest for param_group in unit.param_groups)


def _kept(unit: Unit, is_outermost: bool) -> str:
    """Return how long the full buffers outlive a forward."""
    asked = unit.reshard_after_forward
    if unit.post_forward_size is not None:
        kept = f"1/{unit.post_forward_size} until backward"
    elif asked is False or (asked is None and is_outermost):
        kept = "until backward"
    else:
        kept = "no"
    if not unit.settings.reshard_after_backward:
        if asked is False:
            kept = f"always (stage {1 if unit.settings.reduces_last_only else 2})"
        else:
            kept = "after backward" if kept == "no" else f"{kept} and after it"
    return kept + (", shards on the host" if unit.rests_on_host else "")


def _mesh(mesh: DeviceMesh) -> str:
    sizes = " x ".join(map(str, mesh.shape))
    names = f" ({' x '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
    return f"{mesh.device_type} {sizes}{names}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table, whose columns ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
