"""Which part of a tensor this rank has, as boxes of the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from operator import add
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from fsdp_overlap.tensor.boxes import boxes
from fsdp_overlap.tensor.placement import RaggedShard, local_range, range_dim, tile_at, tile_of
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor
from fsdp_overlap.torch_internals import StridedShard


class Chunk(NamedTuple):
    """A box of a tensor: where it begins and how large it is, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def __and__(self, other: Chunk) -> Chunk | None:
        """Return what both have, if anything."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(mine + size, its + other_size) - start
            for mine, size, its, other_size, start in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, starts, strict=True
            )
        )
        return Chunk(starts, sizes) if all(size > 0 for size in sizes) else None

    def moved(self, offsets: Sequence[int]) -> Chunk:
        """Return the same chunk of a larger tensor, in which this tensor begins at ``offsets``."""
        return Chunk(tuple(map(add, self.offsets, offsets)), self.sizes)

    def of(self, outer: Chunk, values: torch.Tensor) -> torch.Tensor:
        """Return this chunk of ``values``, which are those of ``outer``, as a view."""
        for dim, size in enumerate(self.sizes):
            if size != outer.sizes[dim]:
                values = values.narrow(dim, self.offsets[dim] - outer.offsets[dim], size)
        return values


def full_chunk(shape: Sequence[int]) -> Chunk:
    """Return all of a tensor of ``shape``."""
    return Chunk((0,) * len(shape), tuple(shape))


def slab(shape: tuple[int, ...], most: int, number: int) -> Chunk:
    """Return one chunk of the tensor of ``shape``, cut into chunks of at most ``most`` elements,
    but of one element at least, which follow each other in the flattened tensor."""
    offsets, sizes = [], []
    for size, step, count in reversed(_steps(shape, most)):
        number, along = divmod(number, count)
        offsets.append(along * step)
        sizes.append(min(step, size - along * step))
    return Chunk(tuple(offsets[::-1]), tuple(sizes[::-1]))


def slab_count(shape: tuple[int, ...], most: int) -> int:
    """Return how many chunks :func:`slab` gives."""
    return prod(count for _, _, count in _steps(shape, most))


@lru_cache(maxsize=1024)
def _steps(shape: tuple[int, ...], most: int) -> tuple[tuple[int, int, int], ...]:
    """Return for each dimension its size, that of a slab, and how many slabs follow each other in
    it."""
    rest = prod(shape)
    found: list[tuple[int, int, int]] = []
    is_cut = True
    for size in shape:
        is_cut = is_cut and rest > most
        rest //= max(1, size)
        step = max(1, most // max(1, rest)) if is_cut else max(1, size)
        is_cut = is_cut and step == 1
        found.append((size, step, max(1, -(-size // step))))
    return tuple(found)


def local_chunks(tensor: torch.Tensor) -> list[tuple[Chunk, torch.Tensor]]:
    """Return what this rank has of ``tensor``, which may lie over ranks: chunks, and views of their
    values."""
    if isinstance(tensor, RaggedDTensor):
        spec, local = tensor._spec, tensor._local_tensor.detach()
        tile, (start, stop) = tile_of(spec), local_range(spec)
        return [
            (
                Chunk(box.offsets, box.sizes).moved(tile.offsets),
                local[box.start - start : box.start - start + box.numel].view(box.sizes),
            )
            for box in boxes(tile.shape, start, stop)
        ]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        tile = tile_of(tensor._spec)
        local = tensor._local_tensor.detach()
        return [(Chunk(tile.offsets, tile.shape), local)] if tile.numel else []
    return [(full_chunk(tensor.shape), tensor.detach())] if tensor.numel() else []


def chunks_by_rank(tensor: DTensor) -> Mapping[int, tuple[Chunk, ...]]:
    """Return what each rank has of ``tensor``, in the order of its :func:`local_chunks`, by global
    ranks: of a sharded parameter all ranks that its ranges are divided among, of another DTensor
    all of its mesh.

    Raises:
        TypeError: it is placed otherwise than by shards and copies, or cut otherwise than by
            ``distribute_tensor``.
    """
    spec, ranks = tensor._spec, tensor.device_mesh.mesh
    if isinstance(tensor, RaggedDTensor):
        dim, tile, coordinate = range_dim(spec), tile_of(spec), spec.mesh.get_coordinate()
        assert coordinate is not None
        place: list[int | slice] = list(coordinate)
        place[dim] = slice(None)
        row, ranges = ranks[tuple(place)].tolist(), spec.placements[dim]
        assert isinstance(ranges, RaggedShard)
        return {
            row[rank]: tuple(
                Chunk(box.offsets, box.sizes).moved(tile.offsets)
                for box in boxes(tile.shape, start, stop)
            )
            for rank, start, stop in ranges.ranges
        }
    if not _is_known(tensor):
        raise TypeError(
            f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements}: only "
            "Shard(dim) and Replicate() are supported, and parts as distribute_tensor makes "
            "them; redistribute() it first"
        )
    coordinates = product(*map(range, ranks.shape))
    tiles = (
        (rank, tile_at(spec, at))
        for rank, at in zip(ranks.flatten().tolist(), coordinates, strict=True)
    )
    return {rank: (Chunk(tile.offsets, tile.shape),) for rank, tile in tiles if tile.numel}


def _is_known(tensor: DTensor) -> bool:
    """Return whether this rank's part is a box, and the one that is reckoned. A strided shard is
    one where it is cut after, by other dimensions of the mesh, into as many parts as it says."""
    if tensor.device_mesh.get_coordinate() is None:
        return True  # nothing of it is here
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
