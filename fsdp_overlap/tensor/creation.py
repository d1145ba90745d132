"""Make sharded tensors from whole ones, and DTensors from sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import fsdp_overlap.tensor.dcp  # noqa: F401  (for those who save what is made here)
from fsdp_overlap.layout import Flat, ParamGroupPlan, ParamSpec, plan_units
from fsdp_overlap.tensor.comm_dtypes import as_comm_dtype
from fsdp_overlap.tensor.ops import own_elements
from fsdp_overlap.tensor.ragged_dtensor import (
    RaggedDTensor,
    RaggedShard,
    contiguous_spec,
    range_dim,
)
from fsdp_overlap.tensor.tiles import has_tiles, is_on_mesh, tile_of
from fsdp_overlap.torch_internals import DTensorSpec, patch_state_dicts


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> RaggedDTensor:
    """Shard a whole tensor. Must be called on every rank of the mesh.

    Args:
        tensor: a plain, whole tensor of the same shape on every rank, or a DTensor.
        device_mesh: may have any number of dimensions.
        placements: one for each dimension of the mesh: one ``RaggedShard(...)``, and ``Shard(dim)``
            or ``Replicate()`` for the others. Pass the ``placements`` of a sharded parameter to lay
            the tensor out like it. The default is equal ranges, over a 1-D mesh.
        src_data_rank: the rank along each dimension of the mesh whose values are taken, as in
            ``torch.distributed.tensor.distribute_tensor``. With ``None`` nothing is sent, and all
            ranks must hold the same values.

    Raises:
        ValueError: the placements are of another kind, number or size.
    """
    if placements is None:
        placements = [_equal_ranges(tensor, device_mesh)]
    _check_placements(placements, device_mesh)
    spec = contiguous_spec(device_mesh, tuple(placements), tensor.shape, tensor.dtype)
    _check_ranges(spec)
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole, src_data_rank = whole.full_tensor(), None
    if whole.device.type != device_mesh.device_type and not whole.is_meta:
        whole = whole.to(device_mesh.device_type)
    if src_data_rank is not None and not whole.is_meta:
        whole = whole.resolve_conj().resolve_neg().contiguous()  # memory is what travels
        for dim in range(device_mesh.ndim):
            if device_mesh.get_local_rank(dim) != src_data_rank:
                whole = torch.empty_like(whole)  # not to overwrite the argument
            sent = as_comm_dtype(whole)
            dist.broadcast(sent, group=device_mesh.get_group(dim), group_src=src_data_rank)
    return RaggedDTensor.wrap(own_elements(whole, spec).clone(), spec)


def _equal_ranges(tensor: torch.Tensor, mesh: DeviceMesh) -> RaggedShard:
    if mesh.ndim != 1:
        raise ValueError(
            f"placements must be given for a mesh of {mesh.ndim} dimensions, one for each"
        )
    spec = ParamSpec("tensor", tuple(tensor.shape), tensor.dtype)
    [plan] = plan_units([[spec]], mesh.size(), Flat())
    assert isinstance(plan, ParamGroupPlan)
    return RaggedShard(tuple(plan.ranges("tensor")))


def _check_placements(placements: Sequence[Placement], mesh: DeviceMesh) -> None:
    kinds = [isinstance(placement, RaggedShard) for placement in placements]
    is_known = all(isinstance(p, (Replicate, Shard, RaggedShard)) for p in placements)
    if len(placements) != mesh.ndim or kinds.count(True) != 1 or not is_known:
        raise ValueError(
            f"placements={placements} do not make a RaggedDTensor over a mesh of {mesh.ndim} "
            "dimensions: pass one for each, one of them RaggedShard(...), as the placements of "
            "another RaggedDTensor, or use torch.distributed.tensor.distribute_tensor"
        )


def _check_ranges(spec: DTensorSpec) -> None:
    tile, dim = tile_of(spec), range_dim(spec)
    placement, ranks = spec.placements[dim], spec.mesh.size(dim)
    assert isinstance(placement, RaggedShard)
    held = sum(stop - start for _, start, stop in placement.ranges)
    if held != tile.numel or any(rank >= ranks for rank, _, _ in placement.ranges):
        raise ValueError(
            f"{placement!r} places {held} elements, not the {tile.numel} of a tensor of shape "
            f"{tile.shape} over {ranks} ranks"
        )


def full_tensor(tensor: RaggedDTensor) -> torch.Tensor:
    """Return the whole of ``tensor``, a copy. Collective over its mesh."""
    spec, full = tensor._spec, _full_tile(tensor)
    if has_tiles(spec):
        placements = tuple(p if isinstance(p, Shard) else Replicate() for p in spec.placements)
        tiles = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
        full = DTensor.__new__(DTensor, full, tiles, requires_grad=False).full_tensor()
    return full.to(tensor._local_tensor.device)


def _full_tile(tensor: RaggedDTensor) -> torch.Tensor:
    """Return this rank's whole tile, on the device of the mesh, a copy. Collective over the ranks
    that hold a range each."""
    spec, local = tensor._spec, tensor._local_tensor.detach()
    tile = tile_of(spec)
    device = local.device if is_on_mesh(local, spec) else spec.mesh.device_type
    full = torch.empty(tile.numel, dtype=local.dtype, device=device)
    start, stop = tensor.local_range
    full[start:stop].copy_(local)
    group = tensor.range_group
    works = [
        dist.broadcast(as_comm_dtype(full[first:last]), group=group, group_src=rank, async_op=True)
        for rank, first, last in tensor.placement.ranges
    ]
    for work in works:
        work.wait()
    return full.view(tile.shape)


def redistribute(
    tensor: RaggedDTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """Do as :meth:`RaggedDTensor.redistribute`."""
    mesh = tensor.device_mesh
    if device_mesh is not None and device_mesh != mesh:
        raise RuntimeError(
            f"redistribute from {mesh} to {device_mesh}: only placements can change; use "
            "distribute_tensor(tensor.full_tensor(), mesh)"
        )
    if placements is None or len(placements) != mesh.ndim:
        raise RuntimeError(
            f"redistribute takes one placement for each of {mesh.ndim} dimensions of the mesh, got "
            f"{placements}"
        )
    for placement in placements:
        if not isinstance(placement, (Replicate, Shard, RaggedShard)):
            raise RuntimeError(
                f"redistribute to {placement!r} is not supported: use Replicate(), Shard(dim) or "
                "RaggedShard(...)"
            )
    whole = tensor.full_tensor().detach()
    if any(isinstance(placement, RaggedShard) for placement in placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return torch.distributed.tensor.distribute_tensor(whole, mesh, placements, src_data_rank=None)


# torch's set_state_dict() and its relatives cut whole tensors themselves if full_state_dict or
# broadcast_from_rank0 is set, and they know DTensor's own placements alone. Two of their helpers
# are patched to know ours. They treat all other tensors as before.


def with_range_shards(torchs: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Make torch's ``distribute_tensor`` take our placements as well."""

    @wraps(torchs)
    def distribute(
        tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        if device_mesh is not None and any(isinstance(p, RaggedShard) for p in placements or ()):
            return distribute_tensor(tensor, device_mesh, placements, **options)
        return torchs(tensor, device_mesh, placements, **options)

    return distribute


def _with_sharded_tensors(torchs: Callable[..., None]) -> Callable[..., None]:
    @wraps(torchs)
    def distribute(states: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            # A DTensor is here in a pair with the whole tensor that was broadcast.
            if isinstance(pair := states.get(key), tuple) and isinstance(pair[0], RaggedDTensor):
                state, whole = pair
                if state._local_tensor.is_meta:
                    states[key] = state.wrap_like(own_elements(whole, state._spec).clone())
                else:
                    states[key] = state.copy_(whole)
        torchs(states, keys, *args, **kwargs)

    return distribute


patch_state_dicts(with_range_shards, _with_sharded_tensors)
