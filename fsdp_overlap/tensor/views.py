"""Views that stay one range on each rank: contiguous in the flattened tensor, or every n-th
element of it.

Examples are ``view(-1)``, ``unsqueeze(0)``, ``tensor[2]``, ``tensor[4:8]``, ``chunk(3)`` and
``flatten()[::11]``. torch itself says, by a meta tensor, which elements a view has, in which shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from fsdp_overlap.tensor.ops import call_with, needs_gradient, raise_in_backward
from fsdp_overlap.tensor.ragged_dtensor import (
    RaggedDTensor,
    RaggedShard,
    raise_unsupported,
    with_range,
)
from fsdp_overlap.tensor.tiles import has_tiles
from fsdp_overlap.torch_internals import DTensorSpec


def view(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that returns one view of a sharded tensor or several. They share its memory."""
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, RaggedDTensor):
        if name in ("view_as", "reshape_as") and tensor is not None:
            other: Any = args[1] if len(args) > 1 else kwargs["other"]
            return tensor.view(other._shape) if name == "view_as" else tensor.reshape(other._shape)
        raise_unsupported(f"{name} of a plain tensor by a RaggedDTensor")
    if name == "__getitem__" and isinstance(args[1], RaggedDTensor):
        raise_unsupported("selecting elements by a mask (other than to assign to them)")
    if name == "view_as" and needs_gradient([tensor]):
        # Zero-bubble pipelines find by it where autograd accumulates the gradient.
        raise RuntimeError(
            "view_as on a sharded parameter, which autograd does not know: zero-bubble pipelines "
            "need fully_shard(reshard_after_forward=False)"
        )
    meta = torch.empty(tensor._shape, dtype=tensor._local_tensor.dtype, device="meta")

    def stand_in(value: Any) -> Any:
        if value is tensor:
            return meta
        if isinstance(value, RaggedDTensor):  # the argument of view_as
            return torch.empty(value._shape, device="meta")
        return value

    metas = call_with(stand_in, func, args, kwargs)
    if metas is meta:  # as flatten() of a flat tensor does
        return tensor
    if isinstance(metas, torch.Tensor):
        return _view(name, tensor, meta, metas)
    return tuple(_view(name, tensor, meta, item) for item in metas)


def reinterpret(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RaggedDTensor:
    """Run ``view_as_real`` and ``view_as_complex``.

    Raises:
        RuntimeError: two ranks hold the two halves of a complex number.
    """
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, RaggedDTensor):
        raise_unsupported(name)
    local, spec = tensor._local_tensor.detach(), tensor._spec
    meta = func(torch.empty(tensor._shape, dtype=local.dtype, device="meta"))
    if name == "view_as_real":
        ranges = [(rank, 2 * start, 2 * stop) for rank, start, stop in tensor.placement.ranges]
        local = func(local).view(-1)
    else:
        ends = [end for _, *held in tensor.placement.ranges for end in held]
        is_cut = any(p.is_shard(len(tensor._shape) - 1) for p in spec.placements)
        if is_cut or any(end % 2 for end in ends):
            raise_unsupported(f"{name} of a tensor that is cut between two halves of a number")
        ranges = [(rank, start // 2, stop // 2) for rank, start, stop in tensor.placement.ranges]
        local = func(local.view(-1, 2))
    spec = with_range(spec, RaggedShard(tuple(ranges)), meta.shape, meta.dtype)
    return _alias(name, tensor, local, spec)


def _alias(
    name: str, tensor: RaggedDTensor, local: torch.Tensor, spec: DTensorSpec
) -> RaggedDTensor:
    """Return a tensor whose range ``local`` shares the memory of ``tensor``."""
    alias = tensor.alias_of(local, spec)
    return cast(RaggedDTensor, raise_in_backward(name, alias, [tensor]))


def _view(
    name: str, tensor: RaggedDTensor, meta: torch.Tensor, result: torch.Tensor
) -> RaggedDTensor:
    is_range = (
        result.untyped_storage()._cdata == meta.untyped_storage()._cdata
        and result.dtype == meta.dtype
        and (result.is_contiguous() or (result.dim() == 1 and result.stride(0) > 0))
    )
    if not is_range:
        raise_unsupported(f"{name} to a view that is not contiguous in the flattened tensor")
    first, count = int(result.storage_offset()), result.numel()
    stride = 1 if result.is_contiguous() else result.stride(0)
    if has_tiles(tensor._spec):
        # A contiguous part of the whole tensor may be no range, or several ranges, of a tile.
        if result.shape != meta.shape:
            raise_unsupported(f"{name} of a tensor that is cut along {tensor._spec.placements}")
        return _alias(name, tensor, tensor._local_tensor.detach(), tensor._spec)

    def before(element: int) -> int:
        """Return how many elements of the view lie before ``element`` of the tensor."""
        return min(max(-(-(element - first) // stride), 0), count)

    if count == meta.numel():
        ranges = tensor.placement.ranges
    else:
        ranges = tuple(
            (rank, before(start), before(stop))
            for rank, start, stop in tensor.placement.ranges
            if before(start) < before(stop)
        )
    placement = RaggedShard(ranges)
    here, _ = tensor.local_range
    start, stop = placement.local_range(tensor.range_rank)
    offset = first + start * stride - here if stop > start else 0
    local = tensor._local_tensor.detach()[offset::stride][: stop - start]
    return _alias(
        name, tensor, local, with_range(tensor._spec, placement, result.shape, result.dtype)
    )
