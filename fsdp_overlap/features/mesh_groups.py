"""Process groups that the user hands in: ``FsdpContext(groups=...)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from weakref import ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.process_groups import GroupCache, alive, registered_backend
from fsdp_overlap.torch_internals import is_registered

# What a group is for, in the library's words, by the field of MeshGroups.
PURPOSES = {
    "gather": "all_gather",
    "reduce": "reduce_scatter",
    "replicas": "all_reduce",
    "confirm": "order_check",
}


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
        replicas: for what travels between ranks that hold replicas, along the first dimension of a
            mesh ``(replicate, shard)``.
        confirm: for confirmations between ranks that hold replicas. Only gloo on a CPU has them.
    """

    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    confirm: dist.ProcessGroup | None = None

    def checked(self, mesh: DeviceMesh) -> Iterator[tuple[str, list[int], dist.ProcessGroup]]:
        """Yield the purpose, the ranks and the group of each one that was given.

        Raises:
            TypeError: one is no process group of this rank.
            ValueError: one does not suit ``mesh``. The text says what does.
        """
        for name, purpose in PURPOSES.items():
            group = getattr(self, name)
            if group is not None:
                _check(group, name, mesh)
                yield purpose, dist.get_process_group_ranks(group), group


def _check(group: object, name: str, mesh: DeviceMesh) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"groups: {name} is a {type(group).__name__}; give a process group that this rank is a "
            "member of"
        )
    if not is_registered(group):
        raise ValueError(f"groups: {name} was destroyed; give a process group that still exists")
    is_across = name in ("replicas", "confirm")
    if is_across and mesh.ndim == 1:
        raise ValueError(
            f"groups: {name} connects ranks that hold replicas, and {mesh} has no replicas; leave "
            "it out, or use a mesh (replicate, shard)"
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


class GivenGroups:
    """The groups that the user handed in for the meshes of one context.

    Raises:
        TypeError: what was given for a mesh is no :class:`MeshGroups`, or a group in it is none of
            this rank.
        ValueError: a group does not suit its mesh, or two were handed in for the same use.
    """

    def __init__(self, cache: GroupCache, given: Mapping[DeviceMesh, MeshGroups]) -> None:
        self._given: dict[DeviceMesh, dict[str, ref[dist.ProcessGroup]]] = {}
        for mesh, groups in given.items():
            self._add(cache, mesh, groups)

    def _add(self, cache: GroupCache, mesh: DeviceMesh, groups: MeshGroups) -> None:
        if not isinstance(groups, MeshGroups):
            raise TypeError(f"groups: {mesh} has a {type(groups).__name__}; give a MeshGroups")
        if groups.reduce not in (None, groups.gather) and not cache.separate:
            raise ValueError(
                "groups: reduce is another group than gather, and "
                "separate_reduce_scatter_group=False makes both use one; leave one of the two out"
            )
        for purpose, ranks, group in groups.checked(mesh):
            known = cache.groups.setdefault((purpose, tuple(ranks)), ref(group))
            if known() is not group:
                raise ValueError(
                    f"groups: two groups for the {purpose} of ranks {ranks}, for meshes that have "
                    "the same ranks; hand in the same one for both"
                )
        self._given[mesh] = {
            name: ref(group) for name in PURPOSES if (group := getattr(groups, name)) is not None
        }

    def by_mesh(self) -> dict[DeviceMesh, MeshGroups]:
        """Return them as they were handed in."""
        return {
            mesh: MeshGroups(**{name: alive(group) for name, group in groups.items()})
            for mesh, groups in self._given.items()
        }
