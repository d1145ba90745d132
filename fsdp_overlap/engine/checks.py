"""Compare plans and initial values of parameters across ranks."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Collection, Iterable, Sequence

import torch.distributed as dist

from fsdp_overlap.desync.order_check import START
from fsdp_overlap.engine.mesh import MeshInfo
from fsdp_overlap.engine.param import hash_of
from fsdp_overlap.engine.param_group import ParamGroup

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
        _report(failure, by_mesh, keeps_own_values)
    for compared in by_mesh.values():
        for param_group in compared:
            param_group.init_hashes = None


def _report(failure: str, mesh_infos: Collection[MeshInfo], keeps_own_values: bool) -> None:
    if not keeps_own_values:
        raise RuntimeError(failure)
    if any(dist.get_rank() == int(mesh_info.mesh.mesh.min()) for mesh_info in mesh_infos):
        has_copies = any(mesh_info.num_replicas > 1 for mesh_info in mesh_infos)
        warnings.warn(f"{failure} {KEPT}{COPIES if has_copies else ''}", stacklevel=3)


def _difference(mesh_info: MeshInfo, param_groups: Sequence[ParamGroup], failure: str) -> str:
    """Return what differs between ranks of ``mesh_info``, or was found on another mesh, in words.
    ``failure`` is what this rank found there. Empty if nothing differs, and if ranks have different
    models, which the check of the order finds."""
    hashes: list[int] = []
    for param_group in param_groups:
        assert param_group.init_hashes is not None
        hashes += param_group.init_hashes.hashes(param_group.version)
    shapes = hash_of(repr([param_group.plan.specs for param_group in param_groups]).encode())
    summary = DIFFERENT if failure else hash_of(array("q", hashes).tobytes())
    for group in mesh_info.groups_to_check:
        # What differs in one group is made known to the next.
        for _, its_shapes, its_summary in mesh_info.order_check.exchange(
            [START, shapes, summary], group
        ):
            shapes = shapes if its_shapes == shapes else DIFFERENT
            summary = summary if its_summary == summary else DIFFERENT
    if shapes == DIFFERENT or summary != DIFFERENT:
        return ""
    from fsdp_overlap.engine.start_differences import describe_difference

    return describe_difference(mesh_info, param_groups, hashes, failure)
