"""What a rank holds of a whole tensor, told without a collective."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_overlap import RaggedDTensor
from fsdp_overlap.tensor.ops import own_elements


def held_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the part of ``whole`` that this rank has if it lies as the sharded ``like`` does,
    flat."""
    if isinstance(like, RaggedDTensor):
        return own_elements(whole, like._spec)
    sizes, offsets = compute_local_shape_and_global_offset(
        whole.shape, like.device_mesh, like.placements
    )
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
    return whole.flatten()
