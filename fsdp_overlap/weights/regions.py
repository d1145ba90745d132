"""Which part of a tensor this rank has, as boxes of the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from fsdp_overlap.tensor.boxes import boxes
from fsdp_overlap.tensor.placement import local_range, tile_of
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor
from fsdp_overlap.torch_internals import StridedShard


class Region(NamedTuple):
    """A box of a tensor: where it begins and how large it is, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def __and__(self, other: Region) -> Region | None:
        """What both have, if anything."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(mine + size, its + other_size) - start
            for mine, size, its, other_size, start in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, starts, strict=True
            )
        )
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def of(self, outer: Region, values: torch.Tensor) -> torch.Tensor:
        """This region of ``values``, which are those of ``outer``, as a view."""
        for dim, size in enumerate(self.sizes):
            if size != outer.sizes[dim]:
                values = values.narrow(dim, self.offsets[dim] - outer.offsets[dim], size)
        return values


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor of ``shape``."""
    return Region((0,) * len(shape), tuple(shape))


def slabs(shape: Sequence[int], most: int) -> list[Region]:
    """The tensor of ``shape``, cut into regions of at most ``most`` elements, but of one element at
    least. They follow each other in the flattened tensor."""
    outer: tuple[int, ...] = ()
    inner, found = tuple(shape), [whole(shape)]
    for dim, size in enumerate(shape):
        rest = prod(inner[1:])
        if found[0].numel <= most:
            break
        step = max(1, most // max(1, rest))
        found = [
            Region(
                (*each.offsets[:dim], start, *each.offsets[dim + 1 :]),
                (*outer, min(step, size - start), *inner[1:]),
            )
            for each in found
            for start in range(0, size, step)
        ]
        if step > 1:
            break
        outer, inner = (*outer, 1), inner[1:]
    return found


def parts(tensor: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
    """What this rank has of ``tensor``, which may lie over ranks: regions, and views of their
    values.

    Raises:
        TypeError: it is a DTensor that is placed otherwise than by shards and copies, or cut
            otherwise than by ``distribute_tensor``.
    """
    if isinstance(tensor, ShardedTensor):
        spec, local = tensor._spec, tensor._local_tensor.detach()
        tile, (start, stop) = tile_of(spec), local_range(spec)
        return [
            (
                Region(box.moved(tile.offsets).offsets, box.sizes),
                local[box.start - start : box.start - start + box.numel].view(box.sizes),
            )
            for box in boxes(tile.shape, start, stop)
        ]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        if not _is_known(tensor):
            raise TypeError(
                f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements}: only "
                "Shard(dim) and Replicate() are supported, and parts as distribute_tensor makes "
                "them; redistribute() it first"
            )
        tile = tile_of(tensor._spec)
        local = tensor._local_tensor.detach()
        return [(Region(tile.offsets, tile.shape), local)] if tile.numel else []
    return [(whole(tensor.shape), tensor.detach())] if tensor.numel() else []


def _is_known(tensor: DTensor) -> bool:
    """Whether this rank's part is a box, and the one that is reckoned. A strided shard is one where
    it is cut after, by other dimensions of the mesh, into as many parts as it says."""
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, StridedShard):
            later = [
                tensor.device_mesh.size(other)
                for other, each in enumerate(tensor.placements)
                if other > dim and type(each) is Shard and each.dim == placement.dim
            ]
            if prod(later) != placement.split_factor:
                return False
        elif type(placement) is not Shard and not placement.is_replicate():
            return False
    return tuple(tensor._local_tensor.shape) == tile_of(tensor._spec).shape
