"""Tiles: what the dimensions of a mesh that cut a tensor leave to a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from fsdp_overlap.torch_internals import DTensorSpec, StridedShard


@dataclass(frozen=True)
class Tile:
    """The box of a tensor that is spread over ranks in ranges.

    It is what the other dimensions of the mesh leave to this rank. If they cut nothing, it is the
    whole tensor.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this tile of ``whole``, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.shape, strict=True)):
            if size != whole.shape[dim]:
                whole = whole.narrow(dim, offset, size)
        return whole


def tile_of(spec: DTensorSpec) -> Tile:
    """Return this rank's tile."""
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None
    return tile_at(spec, coordinate)


def tile_at(spec: DTensorSpec, coordinate: Sequence[int]) -> Tile:
    """Return the tile of the rank at ``coordinate`` of the mesh. Dimensions of the mesh cut in
    turn, each as ``torch.chunk`` does, and those by which rows of tiles are cut come last."""
    meta = spec.tensor_meta
    assert meta is not None
    shape = list(meta.shape)
    offsets = [0] * len(shape)
    placements: list[tuple[int, Any]] = list(enumerate(spec.placements))
    for dim, placement in sorted(placements, key=lambda each: isinstance(each[1], StridedShard)):
        if is_cut(placement):
            size = shape[placement.dim]
            chunk = -(-size // spec.mesh.size(dim))
            start = min(chunk * coordinate[dim], size)
            offsets[placement.dim] += start
            shape[placement.dim] = min(chunk, size - start)
    return Tile(tuple(offsets), tuple(shape))


def is_cut(placement: Placement) -> bool:
    """Return whether ranks have chunks along a dimension of the tensor."""
    return isinstance(placement, (Shard, StridedShard))


def has_tiles(spec: DTensorSpec) -> bool:
    """Return whether the mesh cuts the tensor into tiles. The answer is the same on every rank."""
    return any(
        isinstance(placement, Shard) and spec.mesh.size(dim) > 1
        for dim, placement in enumerate(spec.placements)
    )


def copied_dims(spec: DTensorSpec) -> tuple[int, ...]:
    """Return the dimensions of the mesh along which ranks hold the same elements."""
    return tuple(dim for dim, placement in enumerate(spec.placements) if placement.is_replicate())


def cut_dims(spec: DTensorSpec) -> tuple[int, ...]:
    """Return the dimensions of the mesh along which ranks hold different elements."""
    return tuple(
        dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()
    )


def is_on_mesh(local: torch.Tensor, spec: DTensorSpec) -> bool:
    """Return whether the mesh's backend can work on ``local``. It cannot if ``local`` is
    kept elsewhere, as on the host."""
    return local.device.type in (spec.mesh.device_type, "meta")
