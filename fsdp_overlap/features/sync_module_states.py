"""Broadcasts parameters and buffers of the first rank of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param import ParamInfo, modules_outside_units, tp_local_tensor
from fsdp_overlap.tensor.subclasses import inner_tensors


def sync_module_states_from_first(
    modules: Sequence[nn.Module],
    by_mesh: Mapping[MeshInfo, Sequence[ParamInfo]],
    mesh: DeviceMesh,
) -> None:
    """Give parameters the values that they have on the first rank of their mesh, and the
    buffers of ``modules`` those that they have on the first rank of ``mesh``. Collective over these
    meshes."""
    for mesh_info, items in by_mesh.items():
        for item in items:
            for values in inner_tensors(tp_local_tensor(item.parameter)):
                _broadcast_from_first(values, mesh_info.mesh)
    for _, owner in modules_outside_units(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and not buffer.is_meta:
                _broadcast_from_first(tp_local_tensor(buffer), mesh)


def _broadcast_from_first(values: torch.Tensor, mesh: DeviceMesh) -> None:
    """Overwrite ``values`` with those of the first rank. Take as much memory again if they are
    not contiguous, or not on the device of ``mesh``."""
    if not values.numel():
        return
    values = values.detach()
    sent = values.to(mesh.device_type).contiguous()
    # Sent as bytes, because not every backend knows every dtype.
    raw = sent.view(-1).view(torch.uint8)
    for dim in range(mesh.ndim):
        coordinate = list(mesh.get_coordinate() or ())
        coordinate[dim] = 0
        first = int(mesh.mesh[tuple(coordinate)])
        dist.broadcast(raw, first, group=mesh.get_group(dim))
    if sent is not values:
        values.copy_(sent)
