"""How plain parameters lie over a mesh, as the package ``spmd_types`` has noted on them.

With such a note, each rank computes with its own tile as a plain tensor, and what autograd leaves
on it is a plain tensor too. The note says what the tile is of, and what the gradient is of.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Placements = tuple[Placement, ...]


def placements_noted(
    where: str, parameter: torch.Tensor, mesh: DeviceMesh, data_names: Collection[str]
) -> tuple[Placements, Placements] | None:
    """How ``parameter`` lies over ``mesh``, and how its gradient does. ``None`` if nothing is noted
    on it. ``where`` names it in errors.

    ``data_names``: the dimensions of data parallelism. The parameter is the same along them, and
    its gradient is a part of a sum.

    Raises:
        ValueError: nothing is noted for another dimension of more than one rank, or it is of a kind
            that parameters are not. Or the parameter differs along a dimension that ``mesh`` has
            not, or that belongs to data parallelism.
    """
    spmd: Any = sys.modules.get("spmd_types")  # whoever wrote a note has imported it
    noted = {} if spmd is None else dict(spmd.get_local_type(parameter))
    if not noted:
        return None
    if (cuts := spmd.get_partition_spec(parameter)) is not None:
        noted.update(spmd.types.partition_spec_to_shard_types(cuts))
    placements: list[Placement] = []
    of_gradient: list[Placement] = []
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        kind = spmd.R
        if name not in data_names and mesh.size(dim) > 1:
            kind = noted.pop(spmd.MeshAxis.of(mesh.get_group(dim)), None)
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
    if other := {axis: kind for axis, kind in noted.items() if kind is not spmd.R}:
        raise ValueError(
            f"spmd_types has {other} for {where}: it must be R along the dimensions of data "
            f"parallelism, and may be other things only along other dimensions of {mesh}"
        )
    return tuple(placements), tuple(of_gradient)
