"""Divides the parameters of a unit into pieces, each of which travels by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_overlap.layout.spec import ParamSpec

# So many at most. What stays exposed of a reduction is one of them.
MAX_PIECES = 4

# The bytes that a rank holds of a piece, at least. Smaller ones would take their time to begin.
MIN_SHARD_BYTES = 1 << 20


def in_pieces(specs: Sequence[ParamSpec], world_size: int) -> list[ParamSpec]:
    """Return ``specs``, of which those that are trainable are numbered by pieces of about equal
    size, in the order in which they are given. They stay as they are if they are too small for
    two."""
    movable = [spec for spec in specs if spec.requires_grad and not spec.is_extension]
    total = sum(map(_bytes, movable))
    count = min(MAX_PIECES, total // (MIN_SHARD_BYTES * world_size))
    if count < 2 or len(movable) < 2:
        return list(specs)
    pieces: dict[ParamSpec, int] = {}
    before = 0
    for spec in movable:
        pieces[spec] = 1 + before * count // total
        before += _bytes(spec)
    return [replace(spec, piece=pieces.get(spec, 0)) for spec in specs]


def _bytes(spec: ParamSpec) -> int:
    return spec.numel * spec.dtype.itemsize
