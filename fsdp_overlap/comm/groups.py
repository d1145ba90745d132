"""Process groups for the lanes, made at first use and once for each distinct set of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.watch import Watch, watch_over

# Of a receive that nothing is ever sent for.
NO_TAG = 2**31 - 1

# How often a group of a name was made since the default group was.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LaneGroups:
    """The groups that a bucket's collectives run on. A communicator runs one collective at a time,
    so those that are to run beside each other need one each.

    ``gather`` and ``reduce`` are over the same ranks, among which parameters are sharded;
    ``across`` and ``confirm_across`` are over the ranks that hold copies, ``None`` on a mesh of one
    dimension. What is reduced across copies starts at another moment on each rank, and would keep a
    confirmation waiting that others need before they start it.
    """

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup
    across: dist.ProcessGroup | None = None
    confirm_across: dist.ProcessGroup | None = None

    @property
    def to_confirm(self) -> list[dist.ProcessGroup]:
        """As :attr:`of_all`, for confirmations."""
        groups = (self.reduce, self.confirm_across)
        return [group for group in groups if group is not None and group.size() > 1]

    @property
    def of_all(self) -> list[dist.ProcessGroup]:
        """Groups that together connect all ranks of the mesh: one for each of its dimensions."""
        groups = [self.reduce] if self.across is None else [self.reduce, self.across]
        return [group for group in groups if group.size() > 1]


class GroupCache:
    """The process groups of one context. Ranks must ask for them in the same order.

    With gloo all of them are its own, so that :meth:`close` ends nobody else's collectives.
    """

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self.watch: Watch | None = None
        """Asked when a collective lasts or fails."""
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._closable: list[dist.ProcessGroup] = []

    def get(self, mesh: DeviceMesh, separate: bool = True) -> LaneGroups:
        """The groups of a mesh of one dimension, or of ``(replicate, shard)``. Collective over the
        mesh at its first call.

        ``separate``: whether reductions run on a group of their own, if this context has such.
        """
        shard = mesh.get_group(mesh.ndim - 1)
        gather = self._take("all_gather", shard, mesh)
        separate = separate and self.separate
        reduce = self._take("reduce_scatter", shard, mesh) if separate else gather
        if mesh.ndim == 1:
            return LaneGroups(gather, reduce)
        copies = mesh.get_group(0)
        across = self._take("all_reduce", copies, mesh)
        if not can_close(mesh.device_type, copies):
            return LaneGroups(gather, reduce, across)
        return LaneGroups(gather, reduce, across, self._take("order_check", copies, mesh))

    def get_part(self, mesh: DeviceMesh, size: int) -> dist.ProcessGroup:
        """The group of ``size`` neighbours of this rank along the dimension that ``mesh`` shards
        over, which ``size`` divides. Collective over the mesh at its first call."""
        shard = mesh.get_group(mesh.ndim - 1)
        first = shard.rank() // size * size
        ranks = dist.get_process_group_ranks(shard)[first : first + size]
        key = "part", tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self._make(ranks, shard, mesh, "part")
        return self._groups[key]

    @property
    def can_close(self) -> bool:
        """Whether there are groups that :meth:`close` closes, which the user has not destroyed."""
        return any(group in c10d._world.pg_map for group in self._closable)

    def close(self) -> None:
        """Ends the connections of the groups that can be closed: what waits on them raises, here
        and on the other ranks."""
        for group in self._closable:
            # gloo has no other way: a wait that times out closes all connections of its group.
            peer = (group.rank() + 1) % group.size()
            with suppress(RuntimeError):  # which it always is
                group.recv([torch.empty(1)], peer, NO_TAG).wait(timedelta(milliseconds=1))

    def renew(self) -> None:
        """Gives up the groups that can be closed: the next :meth:`get` makes new ones."""
        for key, group in list(self._groups.items()):
            if group in self._closable:
                del self._groups[key]
        for group in self._closable:
            dist.destroy_process_group(group)
        self._closable.clear()

    def _take(self, purpose: str, group: dist.ProcessGroup, mesh: DeviceMesh) -> dist.ProcessGroup:
        """``group``, or another of the same ranks where it serves another purpose already."""
        ranks = dist.get_process_group_ranks(group)
        key = purpose, tuple(ranks)
        if key not in self._groups:
            is_taken = any(group is other for other in self._groups.values())
            is_needed = is_taken and self.separate
            if len(ranks) > 1 and (is_needed or can_close(mesh.device_type, group)):
                group = self._make(ranks, group, mesh, purpose)
            self._groups[key] = group
        return self._groups[key]

    def _make(
        self, ranks: Sequence[int], like: dist.ProcessGroup, mesh: DeviceMesh, purpose: str
    ) -> dist.ProcessGroup:
        """A group of ``ranks`` that is otherwise ``like`` another. Collective over them."""
        timeout = group_timeout(like, mesh.device_type)
        try:
            with _made_by_members(f"fsdp_overlap_{purpose}_{'_'.join(map(str, ranks))}"):
                group = dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    use_local_synchronization=True,
                    group_desc=f"fsdp_overlap_{purpose}",
                )
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {list(ranks)} did not all come within {timeout} to make the process group "
                f"of their {purpose}s: a rank died or runs something else, or ctx.reset() was not "
                f"called on every rank: {error}"
            ) from error
        assert isinstance(group, dist.ProcessGroup)
        if can_close(mesh.device_type, group):
            self._closable.append(group)
        if self.watch is not None:
            watch_over(group, self.watch)
        return group


@contextmanager
def _made_by_members(name: str) -> Iterator[None]:
    """Lets ``dist.new_group(use_local_synchronization=True)`` need no help from ranks that are not
    in the group, also where ranks are in different numbers of groups.

    torch names such a group after how many groups this rank has made, so that ranks which have made
    different numbers would wait for each other for ever, now, or when the user next makes a group
    with all ranks. And where the default group is bound to a device, NCCL would split it, which
    takes all ranks.
    """
    default, hash_ranks = dist.group.WORLD, c10d._hash_ranks_to_str
    made = c10d._world.group_count
    assert default is not None
    # A context after another. The members have all made as many of this name since the default
    # group was made, in processes that may have had another before. No name serves twice: what
    # ranks met by is still in the store.
    names = _made.setdefault(default, Counter())
    group_name = f"{name}_{names[name]}"
    names[name] += 1
    bound, default.bound_device_id = default.bound_device_id, None
    c10d._hash_ranks_to_str = lambda ranks: group_name
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = hash_ranks
        c10d._world.group_count = made
        default.bound_device_id = bound


def backend_name(device_type: str, group: dist.ProcessGroup) -> str:
    """``"gloo"``, ``"nccl"``, ...: the backend that serves ``device_type`` in ``group``."""
    return group._get_backend(torch.device(device_type)).name().lower()


def can_close(device_type: str, group: dist.ProcessGroup) -> bool:
    """Whether the host waits for the collectives of ``group``, and they can be made to end."""
    return device_type == "cpu" and backend_name(device_type, group) == "gloo"


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout of ``group``, or ``None`` where its backend does not tell."""
    backend = group._get_backend(torch.device(device_type))
    return getattr(getattr(backend, "options", None), "_timeout", None)
