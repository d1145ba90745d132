"""Process groups for the lanes, made at first use and once for each distinct set of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import finalize, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.pool import (
    Loan,
    alive,
    borrow,
    can_close,
    collectives_issued,
    give_back,
    next_turn,
)
from fsdp_overlap.comm.watch import Watch, watch_over


class LaneGroups:
    """The groups that a bucket's collectives run on. A communicator runs one collective at a time,
    so collectives that are to run beside each other need a group each.

    ``gather`` and ``reduce`` connect the ranks among which parameters are sharded. ``across`` and
    ``confirm_across`` connect the ranks that hold copies. Both are ``None`` on a mesh of one
    dimension, and ``confirm_across`` also where nothing is confirmed. It is apart from ``across``
    because a reduction across copies starts at another moment on each rank. It would hold up a
    confirmation that other ranks need before they start theirs.

    Groups are referred to weakly, so that the user can destroy them. Afterwards the properties
    raise.
    """

    def __init__(
        self,
        gather: dist.ProcessGroup,
        reduce: dist.ProcessGroup,
        across: dist.ProcessGroup | None = None,
        confirm_across: dist.ProcessGroup | None = None,
    ) -> None:
        self._gather = ref(gather)
        self._reduce = ref(reduce)
        self._across = None if across is None else ref(across)
        self._confirm_across = None if confirm_across is None else ref(confirm_across)

    @property
    def gather(self) -> dist.ProcessGroup:
        return self._gather() or alive(self._gather)  # asked for each collective

    @property
    def reduce(self) -> dist.ProcessGroup:
        return self._reduce() or alive(self._reduce)

    @property
    def across(self) -> dist.ProcessGroup | None:
        return None if self._across is None else alive(self._across)

    @property
    def confirm_across(self) -> dist.ProcessGroup | None:
        return None if self._confirm_across is None else alive(self._confirm_across)

    @property
    def to_confirm(self) -> list[dist.ProcessGroup]:
        """Groups for confirmations that together connect all ranks of the mesh."""
        groups = (self.reduce, self.confirm_across)
        return [group for group in groups if group is not None and group.size() > 1]

    @property
    def of_all(self) -> list[dist.ProcessGroup]:
        """Groups that together connect all ranks of the mesh: one for each of its dimensions."""
        groups = [self.reduce] if self.across is None else [self.reduce, self.across]
        return [group for group in groups if group.size() > 1]


class GroupCache:
    """The process groups of one context. Ranks must ask for them in the same order.

    Groups of its own are borrowed, and go back when the context is freed. With gloo all groups are
    its own, so that :meth:`close` ends nobody else's collectives.
    """

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self.watch: Callable[[], Watch | None] = lambda: None
        """Gives the watch that is asked when a collective lasts or fails. Does not keep it
        alive."""
        self._groups: dict[tuple[str, tuple[int, ...]], ref[dist.ProcessGroup]] = {}
        self._loans: list[Loan] = []
        self._turns: dict[str, int] = {}
        finalize(self, give_back, self._loans).atexit = False

    def get(self, mesh: DeviceMesh, separate: bool = True) -> LaneGroups:
        """The groups of a mesh of one dimension, or of ``(replicate, shard)``. Collective over the
        mesh at its first call.

        ``separate``: whether reductions run on a group of their own, if this context separates
        them at all.
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
        """The group of ``size`` neighbours that this rank belongs to, along the dimension that
        ``mesh`` shards over. ``size`` divides that dimension. Collective over the mesh at its first
        call."""
        shard = mesh.get_group(mesh.ndim - 1)
        first = shard.rank() // size * size
        ranks = dist.get_process_group_ranks(shard)[first : first + size]
        key = "part", tuple(ranks)
        if key not in self._groups:
            self._groups[key] = ref(self._borrow("part", shard, ranks, mesh))
        return alive(self._groups[key])

    def label(self, group: dist.ProcessGroup) -> str:
        """A name for this context's use of ``group``, the same on every rank."""
        for loan in self._loans:
            if loan.reference() is group:
                return f"{group.group_name}/{loan.turn}"
        return f"{group.group_name}/{self._turns[group.group_name]}"

    def owns(self, name: str) -> bool:
        """Whether the group of this name is the context's own, and not the user's."""
        return any(loan.group.group_name == name for loan in self._loans)

    def issued(self) -> dict[str, int | None]:
        """How many collectives this rank issued on each group, by the group's name; ``None`` where
        its backend does not count."""
        groups = [alive(group) for group in self._groups.values()]
        return {group.group_name: collectives_issued(group) for group in groups if group.size() > 1}

    @property
    def can_close(self) -> bool:
        """Whether there are groups that the user has not destroyed, and whose collectives can be
        ended on every rank."""
        return any(loan.exists and loan.is_closable for loan in self._loans)

    def close(self) -> None:
        """Ends the connections of the groups that can be closed. What waits for their collectives
        raises, here and on the other ranks."""
        for loan in self._loans:
            if loan.exists and loan.is_closable:
                loan.close()

    def abort(self, name: str) -> None:
        """Ends what is under way on the group of this name, on this rank."""
        for loan in self._loans:
            if loan.group.group_name == name:
                loan.close()

    def renew(self) -> None:
        """Destroys the groups that were closed or aborted. The next :meth:`get` takes others."""
        closed = [loan for loan in self._loans if not loan.is_sound]
        for key, group in list(self._groups.items()):
            if any(loan.reference() is group() for loan in closed):
                del self._groups[key]
        for loan in closed:
            self._loans.remove(loan)
            loan.destroy()

    def _take(self, purpose: str, group: dist.ProcessGroup, mesh: DeviceMesh) -> dist.ProcessGroup:
        """``group``, or a borrowed one over the same ranks, if ``group`` can be closed or serves
        another purpose already."""
        ranks = dist.get_process_group_ranks(group)
        key = purpose, tuple(ranks)
        if key not in self._groups:
            is_taken = any(group is other() for other in self._groups.values())
            is_needed = is_taken and self.separate
            if len(ranks) > 1 and (is_needed or can_close(mesh.device_type, group)):
                group = self._borrow(purpose, group, ranks, mesh)
            elif group.group_name not in self._turns:
                self._turns[group.group_name] = next_turn(group)
            self._groups[key] = ref(group)
        return alive(self._groups[key])

    def _borrow(
        self, purpose: str, like: dist.ProcessGroup, ranks: Sequence[int], mesh: DeviceMesh
    ) -> dist.ProcessGroup:
        loan = borrow(purpose, like, ranks, mesh.device_type)
        self._loans.append(loan)
        if (watch := self.watch()) is not None:
            watch_over(loan.group, watch)
        return loan.group
