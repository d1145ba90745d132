"""Compare plans and initial values of parameters across ranks."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import cast

import torch
import torch.distributed as dist

from fsdp_overlap.comm.objects import gather_objects
from fsdp_overlap.desync.order_check import START, greatest
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param import UNKNOWN, hash_of
from fsdp_overlap.engine.param_group import ParamGroup
from fsdp_overlap.engine.unit import Unit

# ---- Whether ranks planned the same ----


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


# ---- Whether ranks start from the same values: Note [starts] ----

# Stands for the summary of a rank's hashes, if it is known that some ranks differ.
DIFFERENT = -1


KEPT = (
    "Now each rank keeps its own part, as with FSDP2: the model is put together from the values of "
    "all ranks."
)
COPIES = " Replicas have different copies of it, and keep them unless one broadcasts its own."


def verify_params_across_ranks(
    param_groups: Iterable[ParamGroup], keeps_own_values: bool = False
) -> None:
    """Compare what ranks start from in those ``param_groups`` that were not compared yet.
    Collective over their meshes.

    Args:
        keeps_own_values: whether ranks that differ are only warned, on the first rank.

    Raises:
        RuntimeError: on every rank, if ranks hold different values and do not keep them. Name the
            first parameter.
    """
    by_mesh: dict[MeshInfo, list[ParamGroup]] = {}
    for param_group in param_groups:
        if param_group.init_hashes is not None:
            by_mesh.setdefault(param_group.mesh_info, []).append(param_group)
    failure = ""
    # Small meshes first: a difference there is an error on all ranks of the meshes that follow.
    for mesh_info in sorted(by_mesh, key=lambda mesh_info: mesh_info.mesh.size()):
        failure = _difference(mesh_info, by_mesh[mesh_info], failure) or failure
    if failure:
        if not keeps_own_values:
            raise RuntimeError(failure)
        if any(dist.get_rank() == int(mesh_info.mesh.mesh.min()) for mesh_info in by_mesh):
            has_copies = any(mesh_info.num_replicas > 1 for mesh_info in by_mesh)
            warnings.warn(f"{failure} {KEPT}{COPIES if has_copies else ''}", stacklevel=2)
    for compared in by_mesh.values():
        for param_group in compared:
            param_group.init_hashes = None


def _difference(mesh_info: MeshInfo, param_groups: Sequence[ParamGroup], failure: str) -> str:
    """Return what differs between ranks of ``mesh_info``, or was found on another mesh, in words.
    ``failure`` is what this rank found there. Empty if nothing differs, and if ranks have different
    models, which the check of the order finds."""
    names = [f"{spec.fqn!r} of unit {b.label!r}" for b in param_groups for spec in b.plan.specs]
    hashes: list[int] = []
    for param_group in param_groups:
        assert param_group.init_hashes is not None
        hashes += param_group.init_hashes.hashes(param_group.version)
    shapes = hash_of(repr([param_group.plan.specs for param_group in param_groups]).encode())
    summary = DIFFERENT if failure else hash_of(array("q", hashes).tobytes())
    groups = mesh_info.groups_to_check
    for group in groups:
        # What differs in one group is made known to the next.
        for _, its_shapes, its_summary in mesh_info.order_check.exchange(
            [START, shapes, summary], group
        ):
            shapes = shapes if its_shapes == shapes else DIFFERENT
            summary = summary if its_summary == summary else DIFFERENT
    if shapes == DIFFERENT or summary != DIFFERENT:
        return ""

    def over_ranks(numbers: Sequence[int]) -> list[int]:
        here = torch.tensor(numbers, device=mesh_info.device)
        return cast(list[int], greatest(here, groups).tolist())

    # The greatest of a number and the greatest of its complement tell whether all ranks agree.
    complements = [UNKNOWN if number == UNKNOWN else ~number for number in hashes]
    has_failed, *of_all = over_ranks([bool(failure), *hashes, *complements])
    high, low = of_all[: len(hashes)], of_all[len(hashes) :]
    different = [
        index
        for index, (most, least) in enumerate(zip(high, low, strict=True))
        if UNKNOWN != most != ~least
    ]
    if not different:
        elsewhere = "ranks of another mesh were given different weights, as they tell"
        return failure or (elsewhere if has_failed else "")
    first = different[0]
    is_known, is_high = hashes[first] != UNKNOWN, hashes[first] == high[first]
    rank = dist.get_rank()
    ranks = over_ranks([rank if is_high else -1, rank if is_known and not is_high else -1])
    others = len(different) - 1
    differ = f"(and {others} other{'s'[: others > 1]}) differ" if others else "differs"
    return (
        f"Parameter {names[first]} {differ} across ranks {min(ranks)} and {max(ranks)} at "
        "fully_shard(). Seed or load every rank identically, or pass "
        "FsdpContext(sync_module_states=True)."
    )
