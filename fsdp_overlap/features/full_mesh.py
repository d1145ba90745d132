"""Parameters over a mesh of all parallelism, of which data parallelism has some dimensions.

The user names these dimensions by ``dp_mesh_dims``. A parameter has the same values along them
before it is sharded, and is laid out over the whole mesh before and after.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

# ---- Annotations of spmd_types ----

Placements = tuple[Placement, ...]


def annotated_placements(
    where: str, parameter: torch.Tensor, mesh: DeviceMesh, data_names: Collection[str]
) -> tuple[Placements, Placements] | None:
    """Return the placements over ``mesh`` with which ``parameter`` and its gradient are annotated.
    ``None`` if they are not. ``where`` names it in errors.

    ``data_names``: the dimensions of data parallelism. The parameter is the same along them, and
    its gradient is a part of a sum.

    Raises:
        ValueError: there is no annotation for another dimension of more than one rank, or it is of
            a kind that parameters are not. Or the parameter differs along a dimension that ``mesh``
            has not, or that belongs to data parallelism.
    """
    spmd: Any = sys.modules.get("spmd_types")  # whoever annotates has imported it
    types = {} if spmd is None else dict(spmd.get_local_type(parameter))
    if not types:
        return None
    if (cuts := spmd.get_partition_spec(parameter)) is not None:
        types.update(spmd.types.partition_spec_to_shard_types(cuts))
    placements: list[Placement] = []
    of_gradient: list[Placement] = []
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        kind = spmd.R
        if name not in data_names and mesh.size(dim) > 1:
            kind = types.pop(spmd.MeshAxis.of(mesh.get_group(dim)), None)
        if kind is spmd.R:
            placements.append(Replicate())
            of_gradient.append(Partial())
        elif kind is spmd.I:
            placements.append(Replicate())
            of_gradient.append(Replicate())
        elif isinstance(kind, spmd.Shard):
            placements.append(Shard(kind.dim % max(1, parameter.ndim)))
            of_gradient.append(placements[-1])
        else:
            raise ValueError(
                f"spmd_types has {kind} for {where} along {name!r} of {mesh}: annotate it there as "
                "R, I or S(dim), by spmd_types.assert_type()"
            )
    if other := {axis: kind for axis, kind in types.items() if kind is not spmd.R}:
        raise ValueError(
            f"spmd_types has {other} for {where}: it must be R along the dimensions of data "
            f"parallelism, and may be something else only along other dimensions of {mesh}"
        )
    return tuple(placements), tuple(of_gradient)


# ---- Parameters over a mesh of all parallelism ----

if TYPE_CHECKING or hasattr(fsdp, "DataParallelMeshDims"):
    from torch.distributed.fsdp import DataParallelMeshDims
else:  # torch 2.11

    @dataclass
    class DataParallelMeshDims:
        """The dimensions of a mesh to shard along and to copy along, by name, as in later torch."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None


@dataclass(frozen=True)
class SPMDMesh:
    """A mesh, and the names of its dimensions that data parallelism has.

    Parameters are sharded along the dimensions ``shard``, and copied along the dimensions
    ``replicate``. Several dimensions of a kind become one.
    """

    mesh: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    @cached_property
    def data(self) -> DeviceMesh:
        """The mesh of data parallelism: one dimension, or two, ``(replicate, shard)``. Collective
        over all ranks at the first call if several dimensions become one."""
        parts = [self._as_one(names) for names in (self.replicate, self.shard) if names]
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

    def _as_one(self, names: tuple[str, ...]) -> DeviceMesh:
        if len(names) == 1:
            return self.mesh[names[0]]
        return self.mesh[names]._flatten("_".join(names))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return cast(tuple[str, ...], self.mesh.mesh_dim_names)

    @cached_property
    def dp_dims(self) -> frozenset[int]:
        """The numbers of the dimensions that data parallelism has."""
        return frozenset(self.names.index(name) for name in self.shard + self.replicate)

    @cached_property
    def shard_dim(self) -> int:
        """The number of the first dimension that parameters are sharded along."""
        return self.names.index(self.shard[0])

    def keeps_dims(self, data: DeviceMesh) -> bool:
        """Return whether sharded parameters lie over :attr:`mesh` as it is, if they are sharded
        over ``data``, the mesh of data parallelism in one form or another."""
        return len(self.shard) == 1 and data == self.data

    def sharded_mesh(self, data: DeviceMesh) -> DeviceMesh:
        """Return the mesh that sharded parameters lie over. If it is another than :attr:`mesh`,
        ``data`` stands where the first dimension was that parameters are sharded along."""
        if self.keeps_dims(data):
            return self.mesh
        parts = [
            data if dim == self.shard_dim else self.mesh[name]
            for dim, name in enumerate(self.names)
            if dim == self.shard_dim or dim not in self.dp_dims
        ]
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def spmd_mesh(mesh: DeviceMesh | None, dims: Any) -> SPMDMesh:
    """Return ``mesh`` with what ``dims``, a ``DataParallelMeshDims``, says of it.

    Raises:
        TypeError: ``dims`` is something else.
        ValueError: ``mesh`` has no such dimensions, or one is named twice, or none to shard along.
    """
    if not (hasattr(dims, "shard") and hasattr(dims, "replicate")):
        raise TypeError(
            f"dp_mesh_dims is a {type(dims).__name__}: give a DataParallelMeshDims, as "
            "DataParallelMeshDims(shard='dp')"
        )
    names = None if mesh is None else mesh.mesh_dim_names
    if mesh is None or names is None:
        raise ValueError(
            f"dp_mesh_dims names dimensions of the mesh, and {mesh or 'no mesh was given, which'} "
            "has no names: pass mesh=init_device_mesh(..., mesh_dim_names=...)"
        )
    found = SPMDMesh(mesh, _names(dims.shard), _names(dims.replicate))
    given = found.shard + found.replicate
    for name in given:
        if name not in names:
            raise ValueError(f"dp_mesh_dims: {name!r} is no dimension of the mesh, {names}")
        if given.count(name) > 1:
            raise ValueError(
                f"dp_mesh_dims names {name!r} twice: parameters are sharded along a dimension or "
                "copied along it"
            )
    if not found.shard:
        raise ValueError(
            f"dp_mesh_dims={dims} names no dimension to shard along: for copies alone, give the "
            "mesh one more dimension of one rank, and name it as shard"
        )
    return found


def spmd_mesh_of(mesh_info: Any) -> SPMDMesh | None:
    """Return what the ``mesh_info`` of a ``ShardPlacementResult`` says of the mesh that a parameter
    lies over. ``None`` if it tells of the mesh of data parallelism alone.

    Raises:
        ValueError: as :func:`spmd_mesh` does.
    """
    dims = getattr(mesh_info, "dp_mesh_dims", None)
    return None if dims is None else spmd_mesh(getattr(mesh_info, "spmd_mesh", None), dims)


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


@dataclass(frozen=True)
class SPMDPlacement:
    """How one parameter is laid out over a full mesh before it is sharded.

    ``placements`` are those of the parameter, whose shape over all ranks is ``shape``.
    ``of_gradient`` are those of its gradient if both are plain tensors on each rank. ``None`` if
    they are DTensors, because then each gradient tells itself.
    """

    full: SPMDMesh
    placements: Placements
    shape: torch.Size
    of_gradient: Placements | None = None

    @cached_property
    def plain_grad_is_partial(self) -> bool:
        """Whether a plain gradient is a part of a sum along dimensions that data parallelism has
        not."""
        return any(
            placement.is_partial() and dim not in self.full.dp_dims
            for dim, placement in enumerate(self.of_gradient or ())
        )

    def cuts_after(self, dim: int) -> int:
        """Return how many parts ranks make of dimension ``dim`` of the tensor, along those
        dimensions of the mesh that come after the one to shard along."""
        mesh, parts = self.full.mesh, 1
        for mesh_dim, placement in enumerate(self.placements):
            if mesh_dim > self.full.shard_dim and placement.is_shard(dim):
                parts *= mesh.size(mesh_dim)
        return parts

    def sharded_placements(self, data: DeviceMesh, placement: Placement) -> Placements:
        """Return how the parameter lies over ``full.sharded_mesh(data)`` when it is sharded.
        ``placement`` is that along the dimension to shard along."""
        full = self.full
        if full.keeps_dims(data):
            return tuple(
                placement if dim == full.shard_dim else own
                for dim, own in enumerate(self.placements)
            )
        found: list[Placement] = []
        for dim, own in enumerate(self.placements):
            if dim == full.shard_dim:
                found += [*[Replicate()] * (data.ndim - 1), placement]
            elif dim not in full.dp_dims:
                found.append(own)
        return tuple(found)

    def is_reduced(self, gradient: torch.Tensor) -> bool:
        """Return whether what this rank has of ``gradient`` is the gradient of its tile of the
        parameter, but for the sum over data parallelism."""
        if self.of_gradient is not None:
            return not self.plain_grad_is_partial
        return isinstance(gradient, DTensor) and gradient.placements == self._wanted(gradient)

    def _wanted(self, gradient: DTensor) -> Placements:
        """Return how ``gradient`` lies once it is summed over all that is not data parallelism."""
        return tuple(
            its if dim in self.full.dp_dims and not its.is_shard() else own
            for dim, (its, own) in enumerate(zip(gradient.placements, self.placements, strict=True))
        )

    def reduce(self, gradient: torch.Tensor, dtype: torch.dtype) -> DTensor:
        """Return ``gradient``, summed in ``dtype`` over all dimensions that data parallelism has
        not. Collective over these.

        Raises:
            RuntimeError: it is no gradient of a parameter that lies here.
        """
        mesh = self.full.mesh
        if self.of_gradient is not None:
            gradient = DTensor.from_local(gradient, mesh, self.of_gradient, run_check=False)
        if not isinstance(gradient, DTensor) or gradient.device_mesh != mesh:
            raise RuntimeError(
                f"the gradient of a parameter over {mesh} is a {type(gradient).__name__} over "
                f"{getattr(gradient, 'device_mesh', 'no mesh')}"
            )
        if any(gradient.placements[dim].is_shard() for dim in self.full.dp_dims):
            raise RuntimeError(
                f"the gradient of a parameter over {mesh} is placed as {gradient.placements}, cut "
                "along a dimension of data parallelism"
            )
        return cast(DTensor, gradient.to(dtype)).redistribute(placements=self._wanted(gradient))


def spmd_placement(where: str, parameter: torch.Tensor, full: SPMDMesh) -> SPMDPlacement:
    """Return how ``parameter`` lies over ``full``. ``where`` names it in errors.

    Raises:
        ValueError: it does not lie over that mesh, or differs along dimensions of data parallelism.
    """
    if not isinstance(parameter, DTensor):
        annotated = annotated_placements(where, parameter, full.mesh, full.shard + full.replicate)
        if annotated is None:
            raise ValueError(
                f"{where} is a plain tensor, and dp_mesh_dims is for parameters over the whole of "
                f"{full.mesh}: distribute it with Replicate() along the dimensions of data "
                "parallelism, as distribute_module() does, or leave dp_mesh_dims out and pass "
                f"these alone as mesh={list(full.replicate + full.shard)}"
            )
        placements, of_gradient = annotated
        shape = list(parameter.shape)
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                shape[placement.dim] *= full.mesh.size(dim)
        return SPMDPlacement(full, placements, torch.Size(shape), of_gradient)
    if parameter.device_mesh != full.mesh:
        raise ValueError(
            f"{where} is a DTensor over {parameter.device_mesh}, and dp_mesh_dims is for those "
            f"over the whole of {full.mesh}: distribute it over that, or leave dp_mesh_dims out "
            "and pass the dimensions of data parallelism alone as the mesh"
        )
    for dim in sorted(full.dp_dims):
        if not parameter.placements[dim].is_replicate():
            raise ValueError(
                f"{where} is placed as {parameter.placements}, and dp_mesh_dims gives "
                f"{full.names[dim]!r} to data parallelism: place it as Replicate() there"
            )
    return SPMDPlacement(full, parameter.placements, parameter.shape)
