"""Measures how far apart tensors of recordings are."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite, prod, sqrt
from typing import Any

import torch

from fsdp_overlap.recording.recording import RankStep, TensorRecord
from fsdp_overlap.recording.sketch import PROJECTIONS, Sketch

BFLOAT16 = torch.finfo(torch.bfloat16).eps
NOISE = 1e-12


def is_equal(one: TensorRecord, other: TensorRecord) -> bool:
    """Return whether two tensors are equal to the bit."""
    return (one.sketch.digest, one.dtype, one.shape) == (
        other.sketch.digest,
        other.dtype,
        other.shape,
    )


def distance_of(one: TensorRecord, other: TensorRecord) -> float:
    """Return an estimate of the norm of the difference."""
    return one.sketch.distance(other.sketch)


def relative_distance(one: TensorRecord, other: TensorRecord) -> float:
    """Return the same over the larger norm, infinity if it is not finite or shapes differ."""
    if one.shape != other.shape:
        return inf
    size = distance_of(one, other) / max(one.sketch.norm, other.sketch.norm, NOISE)
    return size if isfinite(size) else inf


def difference_of(one: Sketch, other: Sketch) -> Sketch:
    """Return a sketch of the difference, of projections alone."""
    both = zip(one.projections, other.projections, strict=True)
    return Sketch(0, 0.0, tuple(a - b for a, b in both))


def with_estimated_norm(sketch: Sketch) -> Sketch:
    """Return a sketch with the norm that its projections tell."""
    squares = sum(value**2 for value in sketch.projections) / PROJECTIONS
    return Sketch(sketch.digest, squares, sketch.projections)


def is_rounding(size: float) -> bool:
    """Return whether a relative difference is that of values rounded to bfloat16."""
    return BFLOAT16 / 16 <= size <= BFLOAT16


def eps_of(dtype: str) -> float:
    """Return the epsilon of a dtype, 0 of integers."""
    known = getattr(torch, dtype)
    return torch.finfo(known).eps if known.is_floating_point or known.is_complex else 0.0


def rms_of(ranks: Iterable[Any], kind: str) -> float:
    """Return the root mean square of all gradients of ``kind``."""
    squares = numel = 0.0
    for rank in ranks:
        for key, record in rank.tensors.items():
            if key.kind == kind and isfinite(record.sketch.squares):
                squares += record.sketch.squares
                sizes = [prod(size) for _, size in record.chunks]
                numel += sum(sizes)
    return sqrt(squares / numel) if numel else 0.0


def coarsest_eps(ranks: Iterable[RankStep]) -> float:
    """Return the largest epsilon of parameters as modules used them, and of outputs."""
    records = (record for rank in ranks for record in rank.tensors.values())
    kinds = "parameter", "output"
    return max((eps_of(each.dtype) for each in records if each.key.kind in kinds), default=0.0)
