"""The operands of an op, and the part of each that meets the range of a sharded tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_overlap.tensor.boxes import boxes
from fsdp_overlap.tensor.gradient_errors import requires_grad
from fsdp_overlap.tensor.ragged_dtensor import (
    RaggedDTensor,
    ShardedParam,
    local_range,
    raise_unsupported,
)
from fsdp_overlap.tensor.tiles import tile_of
from fsdp_overlap.torch_internals import DTensorSpec


def largest_sharded(name: str, values: Iterable[Any]) -> RaggedDTensor:
    """Return the first of the largest sharded tensors among ``values``. The result of the op takes
    its layout."""
    found = [value for value in values if isinstance(value, RaggedDTensor)]
    if not found:
        raise_unsupported(name)
    return found[0] if len(found) == 1 else max(found, key=_numel)


def _numel(tensor: RaggedDTensor) -> int:
    return prod(tensor._shape)


def local_operand(name: str, value: Any, model: DTensor) -> Any:
    """Return the part of ``value`` that meets the local range of ``model``.

    A DTensor of ``model``'s layout gives its local range. A sharded tensor of another layout is
    gathered, which is collective. A plain tensor stands for a whole one: it is
    broadcast to ``model``'s shape, and gives the same range. Lists are taken item by item. Anything
    else is returned as it is.

    Raises:
        RuntimeError: the tensor does not fit ``model``'s shape.
    """
    if isinstance(value, DTensor) and same_layout(value, model):
        return value._local_tensor
    if isinstance(value, RaggedDTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return range_of(name, value, model)
    if isinstance(value, (list, tuple)):
        return [local_operand(name, item, model) for item in value]
    return value


def call_with(
    change: Callable[[Any], Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``func`` with ``change(value)`` in place of each argument."""
    return func(*map(change, args), **{name: change(value) for name, value in kwargs.items()})


def full_operand(value: Any) -> Any:
    """Return ``value``, with each sharded tensor replaced by its ``full_tensor()``. Collective over
    their mesh."""
    if isinstance(value, RaggedDTensor):
        return value.full_tensor()
    if isinstance(value, (list, tuple)):
        return [full_operand(item) for item in value]
    return value


def replicated(value: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of a DTensor that every rank holds whole. Any other tensor is
    returned as it is."""
    if isinstance(value, DTensor) and all(p.is_replicate() for p in value.placements):
        return value._local_tensor
    return value


def range_of(name: str, whole: torch.Tensor, model: DTensor) -> torch.Tensor:
    """Return the elements of ``whole`` that belong to the local range of ``model``, flat.

    They are a view if they are contiguous, else a copy. A 0-dimensional tensor is returned as it
    is, so that it does not take part in type promotion, unless ``model`` is 0-dimensional too.

    Raises:
        RuntimeError: ``whole`` is a DTensor that is divided among ranks, or does not broadcast to
            ``model``'s shape.
    """
    shape, whole = tuple(model._spec.shape), replicated(whole)
    if requires_grad(whole):
        whole = whole.detach()  # autograd must not record what is done to ranges
    if isinstance(whole, DTensor):
        raise RuntimeError(
            f"{name} on a RaggedDTensor and a DTensor placed as {whole.placements}: use "
            "full_tensor() on the DTensor, or distribute_tensor() it like the other"
        )
    if not whole.dim() and shape:
        return whole
    try:
        is_fitting = torch.broadcast_shapes(whole.shape, shape) == shape
    except RuntimeError:
        is_fitting = False
    if not is_fitting:
        raise RuntimeError(
            f"{name} on a RaggedDTensor of shape {shape} and a plain tensor of shape "
            f"{tuple(whole.shape)}, which does not broadcast to it: a plain tensor stands for the "
            "whole one; use to_local() to work on this rank's range"
        )
    return own_elements(whole.expand(shape), model._spec)


def own_elements(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return the elements of ``whole`` that this rank holds if it is laid out by ``spec``, flat.
    They are a view if they are contiguous in ``whole``, else a copy."""
    return elements(tile_of(spec).of(whole), *local_range(spec))


def elements(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements ``[start, stop)`` of the flattened ``whole``, without flattening it all."""
    if whole.is_contiguous():
        return whole.reshape(-1)[start:stop]
    parts = []
    for box in boxes(tuple(whole.shape), start, stop):
        part = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        parts.append(part.reshape(-1))
    return torch.cat(parts) if parts else whole.new_empty(0)


def same_layout(first: DTensor, second: DTensor) -> bool:
    return first._spec is second._spec or (
        first._spec.shape == second._spec.shape
        and first._spec.mesh == second._spec.mesh
        and first._spec.placements == second._spec.placements
    )


_edits = attrgetter("edits")


def record_edits(tensors: Iterable[torch.Tensor]) -> None:
    """Count an edit of each sharded tensor, so that full buffers of parameters are found stale. The
    parameters of a param group share a counter, which counts once."""
    tensors = list(tensors)
    if not all(issubclass(each, ShardedParam) for each in set(map(type, tensors))):
        tensors = [tensor for tensor in tensors if isinstance(tensor, ShardedParam)]
    for edits in set(map(_edits, tensors)):
        if edits is not None:
            edits.record_values()
