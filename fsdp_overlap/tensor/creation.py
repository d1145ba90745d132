"""Sharded tensors from whole ones, and DTensors from sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed import _state_dict_utils as torch_state_dicts
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.layout import Flat, ParamSpec, plan_units
from fsdp_overlap.tensor.operands import elements
from fsdp_overlap.tensor.placement import RangeShard, range_spec
from fsdp_overlap.tensor.sharded_tensor import ShardedTensor


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> ShardedTensor:
    """A sharded tensor from a whole one. Must be called on every rank of the mesh.

    Args:
        tensor: plain and whole, of the same shape on every rank, or a DTensor.
        device_mesh: 1-D.
        placements: ``[RangeShard(...)]``, as ``parameter.placements`` of the sharded parameter that
            it is to lie like; by default equal ranges.
        src_data_rank: the rank of the mesh whose values count, as in
            ``torch.distributed.tensor.distribute_tensor``. ``None``: all ranks hold the same, and
            nothing is sent.

    Raises:
        ValueError: the mesh is not 1-D, or the placement is of another kind or another size.
    """
    if device_mesh.ndim != 1:
        raise ValueError(f"a ShardedTensor lies over a 1-D mesh, got {device_mesh.ndim} dimensions")
    if placements is None:
        spec = ParamSpec("tensor", tuple(tensor.shape), tensor.dtype)
        [plan] = plan_units([[spec]], device_mesh.size(), Flat())
        placement = RangeShard(tuple(plan.ranges("tensor")))
    else:
        placement = _range_shard(placements)
    held = sum(stop - start for _, start, stop in placement.ranges)
    if held != tensor.numel() or any(r >= device_mesh.size() for r, _, _ in placement.ranges):
        raise ValueError(
            f"{placement} places {held} elements, not the {tensor.numel()} of a tensor of shape "
            f"{tuple(tensor.shape)} over {device_mesh.size()} ranks"
        )
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole, src_data_rank = whole.full_tensor(), None
    if whole.device.type != device_mesh.device_type and not whole.is_meta:
        whole = whole.to(device_mesh.device_type)
    if src_data_rank is not None and not whole.is_meta:
        whole = whole.contiguous()
        if device_mesh.get_local_rank() != src_data_rank:
            whole = torch.empty_like(whole)  # the argument stays as it is
        dist.broadcast(whole, group=device_mesh.get_group(), group_src=src_data_rank)
    start, stop = placement.local_range(device_mesh.get_local_rank())
    return ShardedTensor.wrap(
        elements(whole, start, stop).clone(),
        range_spec(device_mesh, (placement,), whole.shape, whole.dtype),
    )


def redistribute(
    tensor: ShardedTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """See :meth:`ShardedTensor.redistribute`."""
    mesh = tensor.device_mesh
    if device_mesh is not None and device_mesh != mesh:
        raise RuntimeError(
            f"redistribute from {mesh} to {device_mesh}: only placements can change; use "
            "distribute_tensor(tensor.full_tensor(), mesh)"
        )
    if placements is None or len(placements) != 1:
        raise RuntimeError(f"redistribute takes one placement, got {placements}")
    placement = placements[0]
    if not isinstance(placement, (Replicate, Shard, RangeShard)):
        raise RuntimeError(
            f"redistribute to {placement} is not supported: use Replicate(), Shard(dim) or "
            "RangeShard(...)"
        )
    whole = tensor.full_tensor()
    if isinstance(placement, RangeShard):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return torch.distributed.tensor.distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _range_shard(placements: Sequence[Placement]) -> RangeShard:
    if len(placements) == 1 and isinstance(placements[0], RangeShard):
        return placements[0]
    raise ValueError(
        f"placements={placements} do not make a ShardedTensor: pass [RangeShard(...)], as the "
        "placements of another ShardedTensor, or use torch.distributed.tensor.distribute_tensor"
    )


# torch's set_state_dict() family cuts whole tensors itself where it is given full_state_dict or
# broadcast_from_rank0, and knows no placements but DTensor's own. Two of its helpers are taught
# ours; with every other tensor they do what they did.


def _with_range_shards(torchs: Callable[..., DTensor]) -> Callable[..., DTensor]:
    @wraps(torchs)
    def distribute(
        tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> DTensor:
        if any(isinstance(placement, RangeShard) for placement in placements):
            return distribute_tensor(tensor, device_mesh, placements)
        return torchs(tensor, device_mesh, placements)

    return distribute


def _with_sharded_tensors(torchs: Callable[..., None]) -> Callable[..., None]:
    @wraps(torchs)
    def distribute(states: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            # Where the state is a DTensor, it and the whole tensor that was broadcast.
            if isinstance(pair := states.get(key), tuple) and isinstance(pair[0], ShardedTensor):
                state, whole = pair
                start, stop = state.local_range
                if state._local_tensor.is_meta:
                    states[key] = state.wrap_like(elements(whole, start, stop).clone())
                else:
                    states[key] = state.copy_(whole)
        torchs(states, keys, *args, **kwargs)

    return distribute


torch_state_dicts.distribute_tensor = _with_range_shards(torch_state_dicts.distribute_tensor)
torch_state_dicts._distribute_tensors = _with_sharded_tensors(torch_state_dicts._distribute_tensors)
