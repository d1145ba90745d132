"""Divides the parameters of a model into Muon's and AdamW's param groups."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeVar

from torch import nn

from fsdp_overlap.optim.matrices import Split
from fsdp_overlap.torch_internals import ConvNd

ALGORITHMS = ("muon", "adamw")

T = TypeVar("T")


def muon_param_groups(
    model: nn.Module, algorithms: Mapping[str, str], split: Mapping[str, Split]
) -> list[dict[str, Any]]:
    """Return a param group for each algorithm and split that occurs in ``model``, Muon's first.

    Raises:
        ValueError: a pattern matches no parameter, an algorithm is unknown, or ``split`` names a
            parameter that AdamW steps.
    """
    chosen = _default_algorithms(model)
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


def _default_algorithms(model: nn.Module) -> dict[str, str]:
    """Return the algorithm for each parameter name. Muon takes matrices and stacks of matrices, but
    no embeddings, no convolutions and not the output head. The head is the last matrix, if it has
    the shape of the largest embedding."""
    embeddings = set()
    others = set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            embeddings.add(module.weight)
        elif isinstance(module, ConvNd):
            others.add(module.weight)
    named = dict(model.named_parameters())
    matrices = [
        name
        for name, parameter in named.items()
        if _is_matrix(parameter) and parameter not in embeddings and parameter not in others
    ]
    # Only the largest embedding counts: one of positions may have the shape of a matrix by chance.
    largest = max(embeddings, key=lambda parameter: parameter.numel(), default=None)
    if largest is not None and matrices and named[matrices[-1]].shape == largest.shape:
        matrices.pop()
    return {name: "muon" if name in matrices else "adamw" for name in named}


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether it is a matrix or a stack of several. A stack of one is something else, for
    example learned positions ``[1, n, d]``."""
    is_stack = parameter.dim() > 2 and prod(parameter.shape[:-2]) > 1
    return (parameter.dim() == 2 or is_stack) and parameter.is_floating_point()


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
