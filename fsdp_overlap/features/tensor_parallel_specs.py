"""Specs of sharded parameters that lie over a mesh of their own too: tensor parallelism."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param import ParamInfo, concatenate_meshes
from fsdp_overlap.tensor.ragged_dtensor import contiguous_spec
from fsdp_overlap.torch_internals import DTensorSpec

_joint: WeakKeyDictionary[MeshInfo, dict[DeviceMesh, DeviceMesh]] = WeakKeyDictionary()
"""The mesh of all dimensions, by the parameter's own mesh."""


def spec_over_both(
    mesh_info: MeshInfo, item: ParamInfo, placement: Placement, dtype: torch.dtype
) -> DTensorSpec:
    """Return how the sharded form of a parameter lies over the mesh of ``mesh_info`` and its own.
    ``placement`` is that along the dimension of the mesh that shards."""
    mesh, parameter = mesh_info.tensor_mesh, item.parameter
    meshes = _joint.setdefault(mesh_info, {})
    if (spmd := item.placement) is not None:
        full = spmd.full.mesh
        if full not in meshes:
            meshes[full] = spmd.full.sharded_mesh(mesh)
        placements = spmd.sharded_placements(mesh, placement)
        return contiguous_spec(meshes[full], placements, spmd.shape, dtype)
    assert isinstance(parameter, DTensor)
    other = parameter.device_mesh
    if other not in meshes:
        meshes[other] = concatenate_meshes(mesh, other)
    placements = (*mesh_info.placements(placement), *parameter.placements)
    return contiguous_spec(meshes[other], placements, parameter.shape, dtype)
