"""Compare plans across ranks: ``FsdpContext(validate_layouts=True)``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist

from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param import hash_of
from fsdp_overlap.engine.unit import Unit


def compare_plans(units: Sequence[Unit], mesh_info: MeshInfo) -> None:
    """Check that the ranks of ``mesh_info`` planned ``units`` alike. Collective over its mesh.

    Raises:
        RuntimeError: ranks planned differently.
    """
    mine = [
        (f"{unit.name!r} ({unit.module_class_name})", hash_of(repr(plans).encode()))
        for unit in units
        if (
            plans := [
                f"{param_group.plan!r} {param_group.comm_policy}"
                for param_group in unit.param_groups
                if param_group.mesh_info is mesh_info
            ]
        )
    ]
    of_all = {dist.get_rank(): mine}
    # The plans of all ranks are collected first, so that every rank finds the same difference.
    for group in mesh_info.groups.per_dim:  # which together connect all ranks
        known = gather_objects(of_all, group, mesh_info.device, "the comparison of plans")
        of_all = {rank: theirs for part in known for rank, theirs in part.items()}
    first = min(of_all)
    for rank, theirs in sorted(of_all.items()):
        for ours, other in zip_longest(of_all[first], theirs, fillvalue=("none", 0)):
            if ours != other:
                what = f"where rank {first} has unit {ours[0]}, rank {rank} has {other[0]}"
                if ours[0] == other[0]:
                    what = (
                        f"unit {ours[0]} has other parameters, dtypes or layouts on rank {first} "
                        f"than on rank {rank}"
                    )
                raise RuntimeError(
                    f"ranks planned differently: {what}; every rank must build the same model and "
                    "shard it in the same order, and ctx.plan_layout() it or not"
                )
