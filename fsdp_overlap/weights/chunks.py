"""Chunks: the boxes of a tensor that ranks hold."""

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
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from fsdp_overlap.tensor.ragged_dtensor import RaggedDTensor, RaggedShard, local_range, range_dim
from fsdp_overlap.tensor.tiles import Tile, tile_at, tile_of
from fsdp_overlap.torch_internals import StridedShard


class Chunk(NamedTuple):
    """A box of a tensor, as ``ChunkStorageMetadata`` of DCP."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def __and__(self, other: Chunk) -> Chunk | None:
        """Return the intersection, if there is one."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(offset + size, other_offset + other_size) - start
            for offset, size, other_offset, other_size, start in zip(
                *self, *other, starts, strict=True
            )
        )
        return Chunk(starts, sizes) if all(size > 0 for size in sizes) else None

    def moved(self, offsets: Sequence[int]) -> Chunk:
        """Return the same chunk of a larger tensor in which this tensor begins at ``offsets``."""
        return Chunk(tuple(map(add, self.offsets, offsets)), self.sizes)

    def first_position(self, shape: Sequence[int]) -> int | None:
        """Return the position of the first element in the flattened tensor of ``shape``, if all of
        them are neighbors there."""
        numel, stride, first, is_adjacent = 1, 1, 0, True
        for full, offset, size in list(zip(shape, *self, strict=True))[::-1]:
            # Elements are neighbors if whole rows are, or one row.
            is_adjacent = is_adjacent and (numel == stride or size == 1)
            first += offset * stride
            numel, stride = numel * size, stride * full
        return first if is_adjacent else None

    def of(self, outer: Chunk, values: torch.Tensor) -> torch.Tensor:
        """Return a view of this chunk in ``values``, the values of the chunk ``outer``."""
        for dim, size in enumerate(self.sizes):
            if size != outer.sizes[dim]:
                values = values.narrow(dim, self.offsets[dim] - outer.offsets[dim], size)
        return values


def full_chunk(shape: Sequence[int]) -> Chunk:
    """Return the chunk that is all of a tensor of ``shape``."""
    return Chunk((0,) * len(shape), tuple(shape))


def slab(shape: tuple[int, ...], max_numel: int, number: int) -> Chunk:
    """Return chunk ``number`` of a tensor that is split into contiguous chunks of at most
    ``max_numel`` elements, or one."""
    offsets, sizes = [], []
    for size, step, count in reversed(_steps(shape, max_numel)):
        number, along = divmod(number, count)
        offsets.append(along * step)
        sizes.append(min(step, size - along * step))
    return Chunk(tuple(offsets[::-1]), tuple(sizes[::-1]))


def slab_count(shape: tuple[int, ...], max_numel: int) -> int:
    """Return the number of chunks of :func:`slab`."""
    return prod(count for _, _, count in _steps(shape, max_numel))


@lru_cache(maxsize=1024)
def _steps(shape: tuple[int, ...], max_numel: int) -> tuple[tuple[int, int, int], ...]:
    """Return for each dimension ``(its size, the size of a slab, the number of slabs)``."""
    rest = prod(shape)
    steps: list[tuple[int, int, int]] = []
    is_cut = True
    for size in shape:
        is_cut = is_cut and rest > max_numel
        rest //= max(1, size)
        step = max(1, max_numel // max(1, rest)) if is_cut else max(1, size)
        is_cut = is_cut and step == 1
        steps.append((size, step, max(1, -(-size // step))))
    return tuple(steps)


def local_chunks(tensor: torch.Tensor) -> list[tuple[Chunk, torch.Tensor]]:
    """Return the chunks of ``tensor``, sharded or not, on this rank, and views of their values."""
    finish_pending_steps()
    if isinstance(tensor, RaggedDTensor):
        spec, local = tensor._spec, tensor._local_tensor.detach()
        chunks = _chunks_of_range(tile_of(spec), *local_range(spec))
        parts = local.split([chunk.numel for chunk in chunks])
        return [(chunk, part.view(chunk.sizes)) for chunk, part in zip(chunks, parts, strict=True)]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        tile = tile_of(tensor._spec)
        local = tensor._local_tensor.detach()
        return [(Chunk(tile.offsets, tile.shape), local)] if tile.numel else []
    return [(full_chunk(tensor.shape), tensor.detach())] if tensor.numel() else []


def _chunks_of_range(tile: Tile, start: int, stop: int) -> tuple[Chunk, ...]:
    """Return the chunks of elements ``[start, stop)`` of a flattened tile, in order."""
    return tuple(
        Chunk(box.offsets, box.sizes).moved(tile.offsets) for box in boxes(tile.shape, start, stop)
    )


def chunks_by_rank(tensor: DTensor) -> Mapping[int, tuple[Chunk, ...]]:
    """Return the chunks of ``tensor`` on each rank, in the order of :func:`local_chunks`, by global
    rank: of a ``RaggedDTensor`` on the ranks along its ragged dimension, of another on all.

    Raises:
        TypeError: a placement is neither a shard nor a replica, or it is cut otherwise than by
            ``distribute_tensor``.
    """
    spec, ranks = tensor._spec, tensor.device_mesh.mesh
    if isinstance(tensor, RaggedDTensor):
        dim, tile, coordinate = range_dim(spec), tile_of(spec), spec.mesh.get_coordinate()
        assert coordinate is not None
        place: list[int | slice] = list(coordinate)
        place[dim] = slice(None)
        along, placement = ranks[tuple(place)].tolist(), spec.placements[dim]
        assert isinstance(placement, RaggedShard)
        return {
            along[rank]: _chunks_of_range(tile, start, stop)
            for rank, start, stop in placement.ranges
        }
    check_placements(tensor)
    coordinates = product(*map(range, ranks.shape))
    tiles = (
        (rank, tile_at(spec, at))
        for rank, at in zip(ranks.flatten().tolist(), coordinates, strict=True)
    )
    return {rank: (Chunk(tile.offsets, tile.shape),) for rank, tile in tiles if tile.numel}


def check_placements(tensor: DTensor) -> None:
    """Check that the chunks of a DTensor that is no ``RaggedDTensor`` are where ``tile_at`` says.

    Raises:
        TypeError: a placement is neither a shard nor a replica, or it is cut otherwise than by
            ``distribute_tensor``.
    """
    if not _is_known(tensor):
        raise TypeError(
            f"a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements}: only "
            "Shard(dim) and Replicate() are supported, and parts as distribute_tensor makes "
            "them; redistribute() it first"
        )


def _is_known(tensor: DTensor) -> bool:
    """Return whether this rank's shard is the box that ``tile_at`` computes. A strided shard is one
    if later mesh dimensions cut it into ``split_factor`` parts."""
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return True  # this rank has no shard
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, StridedShard):
            parts = 1
            for later, other in enumerate(tensor.placements[dim + 1 :], dim + 1):
                if type(other) is Shard and other.dim == placement.dim:
                    parts *= mesh.size(later)
            if parts != placement.split_factor:
                return False
        elif type(placement) is not Shard and not placement.is_replicate():
            return False
    return tuple(tensor._local_tensor.shape) == tile_of(tensor._spec).shape
