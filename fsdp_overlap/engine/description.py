"""What ``print(ctx)`` shows: the units of a context as a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.engine.unit import Unit
from fsdp_overlap.engine.units import unit_names
from fsdp_overlap.layout import LayoutRule

HEAD = ("unit", "parameters", "elements", "dtype", "whole", "here", "mesh", "shards", "kept whole")

# Columns of numbers, to be aligned to the right.
RIGHT = {1, 2, 4, 5}


def describe(
    units: Sequence[Unit],
    mesh: DeviceMesh | None,
    layout: LayoutRule,
    prefetch: int,
    separates_groups: bool,
    flags: Sequence[str],
) -> str:
    """The options of a context and a table of its units. Not collective.

    Neighbouring units that are alike share a row, whose figures are those of one unit. Bytes are
    those of parameters at rest: ``whole`` counts all of the unit, ``here`` what this rank holds.
    """
    where = "all ranks" if mesh is None else _mesh(mesh)
    rule = getattr(layout, "__name__", repr(layout))
    options = [f"mesh {where}", f"layout {rule}", f"prefetch {prefetch}"]
    if not separates_groups:
        options.append("one group for gathers and reductions")
    options += flags
    lines = [f"FsdpContext of {_count(len(units), 'unit')}{_totals(units)}", "; ".join(options)]
    if units:
        lines += _aligned([HEAD, *_rows(units)])
    return "\n".join(lines)


def _totals(units: Sequence[Unit]) -> str:
    buckets = [bucket for unit in units for bucket in unit.buckets]
    if not buckets:
        return ""
    parameters = sum(len(bucket.plan.specs) for bucket in buckets)
    elements = sum(spec.numel for bucket in buckets for spec in bucket.plan.specs)
    whole, here = (_size(sum(each)) for each in zip(*map(_bytes_of, units), strict=True))
    return (
        f": {_count(parameters, 'parameter')} of {elements:,} elements, {whole} whole, {here} "
        "on this rank"
    )


def _rows(units: Sequence[Unit]) -> list[tuple[str, ...]]:
    names = unit_names(units)
    named = [(names.get(unit, unit.module_kind), _row(unit, unit not in names)) for unit in units]
    rows = []
    for row, group in groupby(named, key=lambda each: each[1]):
        alike = [name for name, _ in group]
        name = alike[0] if len(alike) == 1 else f"{alike[0]} ... {alike[-1]} ({len(alike)})"
        rows.append((name, *row))
    return rows


def _row(unit: Unit, is_outermost: bool) -> tuple[str, ...]:
    specs = [spec for bucket in unit.buckets for spec in bucket.plan.specs]
    whole, here = _bytes_of(unit)
    meshes = dict.fromkeys(_mesh(bucket.domain.mesh) for bucket in unit.buckets)
    is_equal = all(bucket.plan.is_equal for bucket in unit.buckets)
    pieces = len({spec.piece for spec in specs if spec.piece})
    dtypes = ", ".join(dict.fromkeys(bucket.dtypes for bucket in unit.buckets))
    return (
        str(len(specs)),
        f"{sum(spec.numel for spec in specs):,}",
        f"{dtypes}, {_count(pieces, 'piece')}" if pieces else dtypes,
        _size(whole),
        "meta" if unit.is_meta else _size(here),
        " and ".join(meshes) or _mesh(unit.mesh),
        "equal" if is_equal else "ragged",
        _kept(unit, is_outermost),
    )


def _bytes_of(unit: Unit) -> tuple[int, int]:
    """The bytes of all parameters of ``unit``, and of what this rank holds of them."""
    whole = sum(
        spec.numel * spec.dtype.itemsize for bucket in unit.buckets for spec in bucket.plan.specs
    )
    return whole, sum(bucket.nbytes_at_rest for bucket in unit.buckets)


def _kept(unit: Unit, is_outermost: bool) -> str:
    """How long the full buffers outlive a forward."""
    asked = unit.reshard_after_forward
    if unit.part_size is not None:
        kept = f"1/{unit.part_size} until backward"
    elif asked is False or (asked is None and is_outermost):
        kept = "until backward"
    else:
        kept = "no"
    if not unit.settings.reshard_after_backward:
        if asked is False:
            kept = f"always (stage {1 if unit.settings.reduces_last_only else 2})"
        else:
            kept = "after backward" if kept == "no" else f"{kept} and after it"
    return kept + (", shards on the host" if unit.is_offloaded else "")


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


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in RIGHT else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
