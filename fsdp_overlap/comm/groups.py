"""Process groups for the lanes, made at first use and once for each distinct set of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class LaneGroups:
    """The groups that a bucket's collectives run on. A communicator runs one collective at a time,
    so those that are to run beside each other need one each.

    ``gather`` and ``reduce`` are over the same ranks, among which parameters are sharded;
    ``across`` is over the ranks that hold copies, ``None`` on a mesh of one dimension.
    """

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup
    across: dist.ProcessGroup | None = None

    @property
    def of_all(self) -> list[dist.ProcessGroup]:
        """Groups that together connect all ranks of the mesh: one for each of its dimensions."""
        groups = [self.reduce] if self.across is None else [self.reduce, self.across]
        return [group for group in groups if group.size() > 1]


class GroupCache:
    """The process groups of one context. Ranks must ask for them in the same order."""

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def get(self, mesh: DeviceMesh, separate: bool = True) -> LaneGroups:
        """The groups of a mesh of one dimension, or of ``(replicate, shard)``. Collective over the
        mesh at its first call.

        ``separate``: whether reductions run on a group of their own, if this context has such.
        """
        shard = mesh.get_group(mesh.ndim - 1)
        gather = self._take("all_gather", shard, mesh)
        reduce = self._take("reduce_scatter", shard, mesh) if separate else gather
        if mesh.ndim == 1:
            return LaneGroups(gather, reduce)
        return LaneGroups(gather, reduce, self._take("all_reduce", mesh.get_group(0), mesh))

    def get_part(self, mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
        """The group of ``size`` neighbours of this rank along the dimension that ``mesh`` shards
        over, which ``size`` divides. Collective over the mesh at its first call."""
        shard = mesh.get_group(mesh.ndim - 1)
        first = shard.rank() // size * size
        ranks = dist.get_process_group_ranks(shard)[first : first + size]
        key = "part", tuple(ranks)
        if key not in self._groups:
            self._groups[key] = _new_group(ranks, shard, mesh, "part")
        return self._groups[key]

    def _take(self, purpose: str, group: dist.ProcessGroup, mesh: DeviceMesh) -> dist.ProcessGroup:
        """``group``, or another of the same ranks where it serves another purpose already."""
        ranks = dist.get_process_group_ranks(group)
        key = purpose, tuple(ranks)
        if key not in self._groups:
            is_taken = any(group is other for other in self._groups.values())
            if is_taken and self.separate and len(ranks) > 1:
                group = _new_group(ranks, group, mesh, purpose)
            self._groups[key] = group
        return self._groups[key]


def _new_group(
    ranks: Sequence[int], like: dist.ProcessGroup, mesh: DeviceMesh, purpose: str
) -> dist.ProcessGroup:
    with _made_by_members(f"fsdp_overlap_{purpose}_{'_'.join(map(str, ranks))}"):
        return dist.new_group(
            list(ranks),
            timeout=group_timeout(like, mesh.device_type),
            use_local_synchronization=True,
            group_desc=f"fsdp_overlap_{purpose}",
        )


# Of the default group, because a rank that joins the next one may be a fresh process.
_serials: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


@contextmanager
def _made_by_members(name: str) -> Iterator[None]:
    """Lets ``dist.new_group(use_local_synchronization=True)`` need no help from ranks that are not
    in the group, also where ranks are in different numbers of groups.

    torch names such a group after how many groups this rank has made, so that ranks which have made
    different numbers would wait for each other for ever, now, or when the user next makes a group
    with all ranks. And where the default group is bound to a device, NCCL would split it, which
    takes all ranks.
    """
    default, hash_ranks, count = dist.group.WORLD, c10d._hash_ranks_to_str, c10d._world.group_count
    assert default is not None
    serials = _serials.setdefault(default, Counter())
    serials[name] += 1  # a context after another: the members have all made as many of this name
    group_name = f"{name}_{serials[name]}"
    bound, default.bound_device_id = default.bound_device_id, None
    c10d._hash_ranks_to_str = lambda ranks: group_name
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = hash_ranks
        c10d._world.group_count = count
        default.bound_device_id = bound


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout of ``group``, or ``None`` where its backend does not tell."""
    backend = group._get_backend(torch.device(device_type))
    return getattr(getattr(backend, "options", None), "_timeout", None)
