"""Divide the parameters of a unit into pieces that are reduced one by one, as DDP's buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_overlap.layout.spec import ParamSpec

MAX_PIECES = 4  # of which one's reduction stays exposed
MIN_SHARD_BYTES = 1 << 20  # of a piece: smaller reductions are dominated by latency


def in_pieces(specs: Sequence[ParamSpec], world_size: int) -> list[ParamSpec]:
    """Return ``specs``, in which trainable parameters have the number of a piece. Pieces are
    contiguous and of about equal size. There are none if the parameters are too small for two."""
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
