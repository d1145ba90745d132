"""Process groups that the user made for the collectives of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.group_facts import registered_backend
from fsdp_overlap.torch_internals import is_registered

# What a group is for, in the library's words, by the field of MeshGroups.
PURPOSES = {
    "gather": "all_gather",
    "reduce": "reduce_scatter",
    "copies": "all_reduce",
    "confirm": "order_check",
}

LANES = ("all_gather", "reduce_scatter", "all_reduce")
"""The lanes whose groups can be given options of their own."""


@dataclass(frozen=True)
class MeshGroups:
    """The process groups that collectives over one mesh run on. ``None`` leaves the choice to the
    library.

    They stay the user's: the library never closes, aborts or destroys them, and lends them to
    nobody. Each has the ranks of a dimension of the mesh, in the mesh's order, and the mesh's
    backend.

    Args:
        gather: for all-gathers, along the dimension that parameters are sharded over.
        reduce: for reduce-scatters, and the check of their order, along the same dimension. It may
            be the group of ``gather``. Both then run one after the other.
        copies: for what travels between ranks that hold copies, along the first dimension of a mesh
            ``(replicate, shard)``.
        confirm: for confirmations between ranks that hold copies. Only gloo on a CPU has them.
    """

    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    copies: dist.ProcessGroup | None = None
    confirm: dist.ProcessGroup | None = None

    def checked(self, mesh: DeviceMesh) -> Iterator[tuple[str, list[int], dist.ProcessGroup]]:
        """The purpose, the ranks and the group of each one that was given.

        Raises:
            TypeError: one is no process group of this rank.
            ValueError: one does not suit ``mesh``. The text says what does.
        """
        for field in fields(self):
            group = getattr(self, field.name)
            if group is not None:
                _check(group, field.name, mesh)
                yield PURPOSES[field.name], dist.get_process_group_ranks(group), group


def _check(group: object, name: str, mesh: DeviceMesh) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"groups: {name} is a {type(group).__name__}; give a process group that this rank is a "
            "member of"
        )
    if not is_registered(group):
        raise ValueError(f"groups: {name} was destroyed; give a process group that still exists")
    is_across = name in ("copies", "confirm")
    if is_across and mesh.ndim == 1:
        raise ValueError(
            f"groups: {name} connects ranks that hold copies, and {mesh} has no copies; leave it "
            "out, or use a mesh (replicate, shard)"
        )
    wanted = mesh.get_group(0 if is_across else mesh.ndim - 1)
    ranks, expected = map(dist.get_process_group_ranks, (group, wanted))
    if ranks != expected:
        raise ValueError(
            f"groups: {name} connects ranks {ranks}; give a group of ranks {expected}, in this "
            f"order, as {mesh} has them on this rank"
        )
    backend = registered_backend(group, mesh.device_type)
    suitable = registered_backend(wanted, mesh.device_type)
    if backend != suitable:
        raise ValueError(
            f"groups: {name} has the backend {backend or 'of other devices'} for "
            f"{mesh.device_type}; give a group with {suitable}, which {mesh} has"
        )
