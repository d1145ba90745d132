"""Placements of sharded parameters: ranges and tiles over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from fsdp_overlap.torch_internals import DTensorSpec, StridedShard, TensorMeta

FOR_TORCH = (
    "from fsdp_overlap import distribute_tensor, in place of torch's, or shard with "
    "FsdpContext(layout=PerTensor())"
)
"""What to do where a function of torch does not know :class:`RaggedShard`."""


class RaggedShard(Placement):
    """Each rank holds one contiguous range of the flattened tensor, possibly empty.

    ``ranges`` lists ``(rank, start, stop)``, in elements, for the ranks that hold any. All of these
    ranks have the same list, as DTensor asks of a placement. If other dimensions of the mesh cut
    the tensor too, as tensor parallelism does, what is flattened is this rank's :class:`Tile`.
    """

    def __init__(self, ranges: tuple[tuple[int, int, int], ...]) -> None:
        super().__init__()
        self.ranges = ranges

    def local_range(self, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of what ``rank`` holds, or ``(0, 0)`` if it holds nothing."""
        for owner, start, stop in self.ranges:
            if owner == rank:
                return start, stop
        return 0, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[object, ...]]:
        # The base class is written in C++ and cannot be pickled.
        return RaggedShard, (self.ranges,)

    def __str__(self) -> str:
        # Functions of torch that know no placement but DTensor's own put it into their error.
        return f"{self!r} of fsdp_overlap ({FOR_TORCH})"

    def __repr__(self) -> str:
        held = ", ".join(f"{rank}: {start}-{stop}" for rank, start, stop in self.ranges[:4])
        more = ", ..." if len(self.ranges) > 4 else ""
        return f"RaggedShard({held}{more})"


def contiguous_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Return the DTensor spec of a contiguous tensor of ``shape`` over ``mesh``. ``placements`` has
    an entry for each dimension of the mesh."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


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


def range_dim(spec: DTensorSpec) -> int:
    """Return the dimension of the mesh whose ranks hold ranges."""
    for dim, placement in enumerate(spec.placements):
        if isinstance(placement, RaggedShard):
            return dim
    raise ValueError(f"{spec.placements} has no RaggedShard")


def has_range(tensor: DTensor) -> bool:
    """Return whether ranks hold a range of ``tensor`` each: a sharded tensor, or a state that an
    optimizer made by ``DTensor.from_local(..., placements=parameter.placements)``."""
    return any(isinstance(placement, RaggedShard) for placement in tensor._spec.placements)


def local_range(spec: DTensorSpec) -> tuple[int, int]:
    """Return ``(start, stop)`` of what this rank holds of its tile, flattened."""
    dim = range_dim(spec)
    placement = spec.placements[dim]
    assert isinstance(placement, RaggedShard)
    return placement.local_range(spec.mesh.get_local_rank(dim))


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
    offloaded."""
    return local.device.type in (spec.mesh.device_type, "meta")


def with_range(
    spec: DTensorSpec, placement: RaggedShard, shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Return ``spec`` with other ranges, of another shape and dtype, over the same ranks."""
    dim = range_dim(spec)
    placements = (*spec.placements[:dim], placement, *spec.placements[dim + 1 :])
    return contiguous_spec(spec.mesh, placements, shape, dtype)
