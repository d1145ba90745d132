"""How checkpoints cut a rank's part of a sharded tensor into chunks of a bounded size."""

from __future__ import annotations

import torch

from fsdp_overlap.tensor.boxes import Box, pieces
from fsdp_overlap.tensor.placement import local_range, range_dim, tile_of
from fsdp_overlap.torch_internals import DTensorSpec

# A chunk has at most a rank's share of the tile, but this limit lies between these two sizes. A
# writer copies a chunk from a GPU before it writes it, and torch's reader holds two chunks. So the
# size of a chunk bounds the memory that saving and loading take.
_BYTES_OF_A_CHUNK = (8 << 20, 32 << 20)


def chunks_of(spec: DTensorSpec) -> list[Box]:
    """Boxes that cover what this rank holds. Their ``offsets`` count in the whole tensor, their
    ``start`` in the rank's tile."""
    meta = spec.tensor_meta
    assert meta is not None
    if not meta.shape.numel():  # without an empty chunk a load would miss the key
        return [Box((0,) * len(meta.shape), tuple(meta.shape), 0)]
    least, most = (n // meta.dtype.itemsize for n in _BYTES_OF_A_CHUNK)
    tile = tile_of(spec)
    share = tile.numel // spec.mesh.size(range_dim(spec))
    own = pieces(tile.shape, *local_range(spec), min(max(share, least), most))
    return [box.moved(tile.offsets) for box in own]


def all_of_a_storage(values: torch.Tensor) -> torch.Tensor:
    """A view of ``values``, which are contiguous, that fills a storage of its own.

    Writers copy a tensor that fills only a part of its storage, and keep all such copies until the
    file is done.
    """
    if values.device.type != "cpu":  # writers copy it to the host anyway
        return values
    start = values.storage_offset() * values.element_size()
    part = values.untyped_storage()[start : start + values.nbytes]
    whole = torch.empty(0, dtype=values.dtype)
    return whole.set_(part, 0, values.size(), values.stride())
