"""Parameters that are DTensors already, over the ranks of tensor parallelism, or over those of all
parallelism.

What each of these ranks holds is the parameter's tile. The tile is sharded among the ranks of data
parallelism, and compute sees the DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_overlap.engine.full_mesh import OnFullMesh
from fsdp_overlap.engine.opaque import is_opaque, opaque_like
from fsdp_overlap.tensor.placement import tile_of
from fsdp_overlap.torch_internals import AsyncCollectiveTensor, DTensorSpec, TensorMeta


def tile_in(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's tile of an unsharded parameter, which shares its memory: all of a plain one."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def check(where: str, parameter: DTensor) -> None:
    """Checks ``parameter`` before its tile is sharded. ``where`` names it in errors.

    Raises:
        TypeError: it is placed otherwise than by ``Shard`` and ``Replicate``, or cut in another
            order than that of its mesh's dimensions.
        ValueError: it is not cut as ``distribute_tensor`` cuts.
    """
    for placement in parameter.placements:
        if type(placement) not in (Shard, Replicate):
            raise TypeError(
                f"{where} is a DTensor placed as {parameter.placements}; only Shard(dim) and "
                "Replicate() are supported"
            )
    spec = parameter._spec
    if spec.shard_order != DTensorSpec.compute_default_shard_order(spec.placements):
        raise TypeError(
            f"{where} is a DTensor cut in the order {spec.shard_order}; only that of the "
            "dimensions of its mesh is supported"
        )
    held, expected = tuple(parameter._local_tensor.shape), tile_of(spec).shape
    if held != expected:
        raise ValueError(
            f"{where} is a DTensor of shape {tuple(parameter.shape)} placed as "
            f"{parameter.placements}, of which this rank holds {held} and not {expected}: cut it "
            "by torch.distributed.tensor.distribute_tensor"
        )


def check_beside(where: str, parameter: DTensor, mesh: DeviceMesh) -> None:
    """Checks that ``parameter``, which lies over the ranks of tensor parallelism, can be sharded
    over ``mesh`` as well. ``where`` names it in errors.

    Raises:
        ValueError: the two meshes do not go together.
    """
    try:
        beside(mesh, parameter.device_mesh)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{where} is a DTensor over {parameter.device_mesh}, which does not go together with "
            f"{mesh}, over which it is to be sharded: make one mesh, as init_device_mesh("
            f'{mesh.device_type!r}, (2, 4), mesh_dim_names=("dp", "tp")), and use mesh["tp"] for '
            'tensor parallelism and mesh["dp"] here. For DTensors over all of it, use '
            'dp_mesh_dims=DataParallelMeshDims(shard="dp")'
        ) from error


def beside(mesh: DeviceMesh, tensor_parallel: DeviceMesh) -> DeviceMesh:
    """The mesh that has the dimensions of both.

    Raises:
        RuntimeError, TypeError: the two are not different dimensions, with names, of one mesh.
    """
    return DeviceMesh._concatenate([mesh, tensor_parallel])


def parameter_like(
    parameter: torch.Tensor, tile: torch.Tensor, requires_grad: bool
) -> nn.Parameter:
    """A new parameter that lies over the ranks of tensor parallelism as ``parameter`` does, and has
    its class. This rank has ``tile`` of it."""
    if is_opaque(parameter):
        return opaque_like(parameter, tile)
    if isinstance(parameter, DTensor):
        return nn.Parameter(_wrap(tile, parameter._spec), requires_grad)
    return nn.Parameter(tile, requires_grad)


def give_memory(
    parameter: nn.Parameter, view: torch.Tensor, aliases: Iterable[torch.Tensor] = ()
) -> None:
    """Makes ``view`` this rank's tile of ``parameter``, with a version counter of its own.
    ``aliases`` are other tensors that are its elements, and stay so."""
    for alias in aliases:
        alias.data = view
    if not isinstance(parameter, DTensor):
        parameter.data = view
        return
    wrapped = _wrap(view.data, parameter._spec)
    parameter.data = wrapped  # sets its dtype alone
    parameter._local_tensor = wrapped._local_tensor
    parameter._spec = wrapped._spec


def _wrap(tile: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor that lies as ``spec`` says. It has this rank's ``tile``, and the tile's dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    spec = DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, tile.dtype)
    )
    return DTensor.__new__(DTensor, tile, spec, requires_grad=False)


def is_placed_like(
    parameter: torch.Tensor, gradient: torch.Tensor, on_full_mesh: OnFullMesh | None
) -> bool:
    """Whether a rank's tile of ``gradient`` is the gradient of its tile of ``parameter``."""
    if on_full_mesh is not None:
        return on_full_mesh.has_tile(gradient)
    if not isinstance(parameter, DTensor):
        return True
    return isinstance(gradient, DTensor) and gradient.placements == parameter.placements


def placed_like(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    on_full_mesh: OnFullMesh | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``gradient``, placed as ``parameter`` is. Autograd may have left it placed otherwise, as
    parts of a sum on the ranks of tensor parallelism. Then it is brought there in ``dtype``, which
    is collective over these ranks.

    Raises:
        RuntimeError: it is no DTensor, though ``parameter`` is one, or lies over another mesh.
    """
    if is_placed_like(parameter, gradient, on_full_mesh):
        return gradient
    if on_full_mesh is not None:
        return on_full_mesh.summed(gradient, dtype)
    assert isinstance(parameter, DTensor)
    if not isinstance(gradient, DTensor) or gradient.device_mesh != parameter.device_mesh:
        raise RuntimeError(
            f"the gradient of a parameter over {parameter.device_mesh} is a "
            f"{type(gradient).__name__} over {getattr(gradient, 'device_mesh', 'no mesh')}"
        )
    return cast(DTensor, gradient.to(dtype)).redistribute(placements=parameter.placements)
