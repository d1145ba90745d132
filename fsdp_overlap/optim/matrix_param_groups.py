"""Divide the parameters of a model into those that are stepped as matrices, and all others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_overlap.optim.contiguous import local_of
from fsdp_overlap.optim.matrices import Split, part_rows
from fsdp_overlap.optim.parameter_kinds import HIDDEN, parameter_kinds
from fsdp_overlap.tensor.ragged_dtensor import ShardedParam
from fsdp_overlap.tensor.subclasses import is_subclass

T = TypeVar("T")


def matrix_param_groups(
    model: nn.Module,
    option: str,
    values: tuple[T, T],
    chosen: Mapping[str, T],
    split: Mapping[str, Split],
) -> list[dict[str, Any]]:
    """Return a param group for each value of ``option`` and each split that occurs in ``model``,
    those of matrices first. ``values``: that of matrices, which by default are the hidden ones
    (:func:`parameter_kinds`), and that of all others. ``chosen`` has other values by name.

    Raises:
        ValueError: a pattern matches no parameter, a value is unknown, or ``split`` names a
            parameter that is not stepped as matrices.
    """
    of_matrices, of_others = values
    value_of = {
        name: of_matrices if kind == HIDDEN else of_others
        for name, kind in parameter_kinds(model).items()
    }
    for pattern, value in chosen.items():
        if value not in values:
            raise ValueError(
                f"{option} of {pattern!r} = {value!r}: use {of_matrices!r} or {of_others!r}"
            )
    value_of |= _by_name(value_of, chosen, option)
    splits = _by_name(value_of, split, "split")
    groups: dict[tuple[T, Split], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        value, parts = value_of[name], splits.get(name, 1)
        parts = parts if isinstance(parts, int) else tuple(parts)
        if value == of_others and name in splits:
            raise ValueError(f"split names {name!r}, for which {option} is {value!r}")
        group = groups.setdefault((value, parts), {option: value, "params": []})
        if value == of_matrices:
            group["split"] = parts
        group["params"].append(parameter)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0][0] == of_others)]


def check_matrices(parameter: torch.Tensor, split: Split, what: str, instead: str) -> None:
    """Check that ``parameter`` can be stepped as matrices.

    Raises:
        ValueError, TypeError: it cannot, by ``what``; ``instead`` says what to do.
    """
    shape = tuple(parameter.shape)
    if parameter.dim() < 2 or not local_of(parameter).is_floating_point():
        raise ValueError(
            f"{what} steps matrices, not a parameter of shape {shape} and {parameter.dtype}: "
            f"{instead}"
        )
    if is_subclass(local_of(parameter)):
        raise TypeError(
            f"a parameter of shape {shape} is a {type(local_of(parameter)).__name__}, and {what} "
            f"computes with plain tensors: {instead}"
        )
    is_sharded = isinstance(parameter, ShardedParam)
    if isinstance(parameter, DTensor) and not is_sharded:
        raise TypeError(
            f"a parameter of shape {shape} is a DTensor with placements {parameter.placements}, "
            "of another library: shard it by fsdp_overlap.fully_shard"
        )
    if not is_sharded and not parameter.is_contiguous():
        raise ValueError(
            f"a parameter of shape {shape} is not contiguous (strides {parameter.stride()}); "
            "replace its data by .contiguous() first"
        )
    part_rows(shape, split)


def _by_name(names: Mapping[str, Any], patterns: Mapping[str, T], what: str) -> dict[str, T]:
    """Return the value of each of ``names`` that a pattern matches, that of the last one if several
    match."""
    value_of = {}
    for pattern, value in patterns.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            some = ", ".join(list(names)[:4])
            raise ValueError(f"{what}: {pattern!r} matches no parameter; there are {some}, ...")
        value_of.update(dict.fromkeys(matching, value))
    return value_of


def choice_table(model: nn.Module, option: str, groups: list[dict[str, Any]]) -> str:
    """Return a table of what steps the parameters of ``model``: a line for each kind of parameter
    and value of ``option``. Numbers in names, as of blocks, are left out."""
    value_of = {p: str(group[option]) for group in groups for p in group["params"]}
    order = list(dict.fromkeys(value_of.values()))
    parameters = dict(model.named_parameters())
    lines: dict[tuple[str, str], list[nn.Parameter]] = {}
    names: dict[tuple[str, str], dict[str, None]] = {}
    for name, kind in parameter_kinds(model).items():
        line = value_of[parameters[name]], kind
        lines.setdefault(line, []).append(parameters[name])
        names.setdefault(line, {})[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)] = None
    rows = [(option, "kind", "parameters", "elements", "names")]
    for line in sorted(lines, key=lambda line: (order.index(line[0]), line[1] != HIDDEN, line[1])):
        elements = sum(parameter.numel() for parameter in lines[line])
        rows.append((*line, f"{len(lines[line])}", f"{elements:,}", ", ".join(names[line])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    alignments = "<<>><"
    return "\n".join(
        "  ".join(
            f"{cell:{a}{w}}" for cell, a, w in zip(row, alignments, widths, strict=True)
        ).rstrip()
        for row in rows
    )
