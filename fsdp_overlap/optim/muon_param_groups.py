"""Divides the parameters of a model into Muon's and AdamW's param groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from fsdp_overlap.optim.matrices import Split
from fsdp_overlap.optim.parameter_kinds import HIDDEN, parameter_kinds

ALGORITHMS = ("muon", "adamw")

T = TypeVar("T")


def muon_param_groups(
    model: nn.Module, algorithms: Mapping[str, str], split: Mapping[str, Split]
) -> list[dict[str, Any]]:
    """Return a param group for each algorithm and split that occurs in ``model``, Muon's first. By
    default hidden matrices are Muon's (:func:`parameter_kinds`).

    Raises:
        ValueError: a pattern matches no parameter, an algorithm is unknown, or ``split`` names a
            parameter that AdamW steps.
    """
    kinds = parameter_kinds(model)
    chosen = {name: "muon" if kind == HIDDEN else "adamw" for name, kind in kinds.items()}
    for pattern, algorithm in algorithms.items():
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithms[{pattern!r}] = {algorithm!r}: use 'muon' or 'adamw'")
    chosen |= _by_name(chosen, algorithms, "algorithms")
    splits = _by_name(chosen, split, "split")
    groups: dict[tuple[str, Split], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        algorithm, parts = chosen[name], splits.get(name, 1)
        parts = parts if isinstance(parts, int) else tuple(parts)
        if algorithm == "adamw" and name in splits:
            raise ValueError(f"split names {name!r}, which AdamW steps; see algorithms")
        group = groups.setdefault((algorithm, parts), {"algorithm": algorithm, "params": []})
        if algorithm == "muon":
            group["split"] = parts
        group["params"].append(parameter)
    return [group for _, group in sorted(groups.items(), key=lambda item: item[0][0] == "adamw")]


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


def choice_table(model: nn.Module, groups: list[dict[str, Any]]) -> str:
    """Return a table of what steps the parameters of ``model``: a line for each kind of parameter
    and algorithm. Numbers in names, as of blocks, are left out."""
    algorithm_of = {p: group["algorithm"] for group in groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    lines: dict[tuple[str, str], list[nn.Parameter]] = {}
    names: dict[tuple[str, str], dict[str, None]] = {}
    for name, kind in parameter_kinds(model).items():
        line = algorithm_of[parameters[name]], kind
        lines.setdefault(line, []).append(parameters[name])
        names.setdefault(line, {})[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)] = None
    rows = [("algorithm", "kind", "parameters", "elements", "names")]
    for line in sorted(lines, key=lambda line: (line[0] != "muon", line[1] != HIDDEN, line[1])):
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
