"""Process groups for the lanes, made at first use and once for each distinct set of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import finalize, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_overlap.comm.group_facts import (
    alive,
    backend_name,
    can_close,
    collectives_issued,
    communicates,
    connect,
    is_in_python,
    options_of,
)
from fsdp_overlap.comm.mesh_groups import LANES, PURPOSES, MeshGroups
from fsdp_overlap.comm.pool import borrow, give_back, next_turn
from fsdp_overlap.comm.shelves import Loan
from fsdp_overlap.comm.watch import Watch, watch_over

OPTIMIZER = "optimizer"
"""The purpose of groups that connect other ranks than the lanes' do."""


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
        return [group for group in groups if group is not None and communicates(group)]

    @property
    def of_all(self) -> list[dist.ProcessGroup]:
        """Groups that together connect all ranks of the mesh: one for each of its dimensions."""
        groups = [self.reduce] if self.across is None else [self.reduce, self.across]
        return [group for group in groups if communicates(group)]


class GroupCache:
    """The process groups of one context. Ranks must ask for them in the same order.

    Groups of the library are borrowed, and go back when the context is freed. With gloo all groups
    but those that the user handed in are the context's own, so that :meth:`close` ends nobody
    else's collectives. With other backends contexts share them.

    Args:
        separate: whether reductions run on another group than all-gathers.
        given: the groups that the user handed in, by mesh.
        options: the backend's options for the groups of a lane, by its name. Groups of other lanes
            have those of the mesh's group.

    Raises:
        TypeError: what was given for a mesh is no :class:`MeshGroups`, or a group in it is none of
            this rank.
        ValueError: a group does not suit its mesh, two were handed in for the same use, or there is
            no such lane.
    """

    def __init__(
        self,
        separate: bool,
        given: Mapping[DeviceMesh, MeshGroups] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.separate = separate
        self.options = dict(options or {})
        for lane in self.options:
            if lane not in LANES:
                raise ValueError(f"pg_options: there is no lane {lane!r}; use {', '.join(LANES)}")
        self.watch: Callable[[], Watch | None] = lambda: None
        """Gives the watch that is asked when a collective lasts or fails. Does not keep it
        alive."""
        self._groups: dict[tuple[str, tuple[int, ...]], ref[dist.ProcessGroup]] = {}
        self._given: dict[DeviceMesh, dict[str, ref[dist.ProcessGroup]]] = {}
        self._loans: list[Loan] = []
        self._turns: dict[str, int] = {}
        for mesh, groups in (given or {}).items():
            self._hand_in(mesh, groups)
        finalize(self, give_back, self._loans).atexit = False

    def _hand_in(self, mesh: DeviceMesh, groups: MeshGroups) -> None:
        if not isinstance(groups, MeshGroups):
            raise TypeError(f"groups: {mesh} has a {type(groups).__name__}; give a MeshGroups")
        if groups.reduce not in (None, groups.gather) and not self.separate:
            raise ValueError(
                "groups: reduce is another group than gather, and "
                "separate_reduce_scatter_group=False makes "
                "both use one; leave one of the two out"
            )
        for purpose, ranks, group in groups.checked(mesh):
            known = self._groups.setdefault((purpose, tuple(ranks)), ref(group))
            if known() is not group:
                raise ValueError(
                    f"groups: two groups for the {purpose} of ranks {ranks}, for meshes that have "
                    "the same ranks; hand in the same one for both"
                )
        self._given[mesh] = {
            name: ref(group) for name in PURPOSES if (group := getattr(groups, name)) is not None
        }

    @property
    def given(self) -> dict[DeviceMesh, MeshGroups]:
        """The groups that the user handed in, by mesh."""
        return {
            mesh: MeshGroups(**{name: alive(group) for name, group in groups.items()})
            for mesh, groups in self._given.items()
        }

    def check_options(self, mesh: DeviceMesh) -> None:
        """Checks that groups over ``mesh`` can be made with the options that the user gave.

        Raises:
            TypeError: they are those of another backend, or the backend of ``mesh`` takes none.
        """
        for lane, options in self.options.items():
            shard = mesh.get_group(mesh.ndim - 1)
            backend = backend_name(mesh.device_type, shard)
            if backend == "gloo":
                raise TypeError(f"pg_options: gloo, which {mesh} has, takes none; leave them out")
            suitable = options_of(shard, mesh.device_type)
            if suitable is not None and not isinstance(options, type(suitable)):
                raise TypeError(
                    f"pg_options: those of {lane} are a {type(options).__name__}; {backend}, which "
                    f"{mesh} has, takes a {type(suitable).__qualname__}"
                )

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
            group = self._borrow("part", shard, ranks, mesh.device_type, "all_gather")
            self._groups[key] = ref(group)
        return alive(self._groups[key])

    def find(
        self, ranks: Sequence[int], like: dist.ProcessGroup, device_type: str
    ) -> dist.ProcessGroup | None:
        """The group that an optimizer's step uses to connect ``ranks``, in this order. It may serve
        another purpose too, because ranks issue all they issue on it in the same order. ``like``
        itself serves if it connects them and cannot be closed. ``None`` if there is none yet."""
        for (_, its), group in self._groups.items():
            if its == tuple(ranks):
                return alive(group)
        is_enough = list(ranks) == dist.get_process_group_ranks(like)
        return like if is_enough and not can_close(device_type, like) else None

    def connect(
        self, ranks: Sequence[int], like: dist.ProcessGroup, device_type: str
    ) -> dist.ProcessGroup:
        """The group that :meth:`find` gives, or a new one, made as ``like``. Collective over
        ``ranks`` at its first call."""
        group = self.find(ranks, like, device_type)
        if group is None:
            group = self._borrow(OPTIMIZER, like, ranks, device_type, OPTIMIZER)
            self._groups[OPTIMIZER, tuple(ranks)] = ref(group)
        return group

    @property
    def of_optimizers(self) -> list[Loan]:
        """The groups that serve optimizers' steps alone."""
        groups = [group for (purpose, _), group in self._groups.items() if purpose == OPTIMIZER]
        return [loan for loan in self._loans if loan.reference in groups]

    def label(self, group: dist.ProcessGroup) -> str:
        """A name for this context's use of ``group``, the same on every rank."""
        return f"{group.group_name}/{self._turns[group.group_name]}"

    def owns(self, name: str) -> bool:
        """Whether the group of this name is the library's, and not the user's."""
        return any(loan.group.group_name == name for loan in self._loans)

    def is_ended(self, name: str) -> bool:
        """Whether the group of this name was closed or aborted."""
        return any(
            loan.group.group_name == name and not loan.is_sound
            for loan in self._loans
            if loan.exists
        )

    def issued(self) -> dict[str, int | None]:
        """How many collectives this rank issued on each group, by the group's name; ``None`` where
        its backend does not count."""
        groups = [alive(group) for group in self._groups.values()]
        return {
            group.group_name: collectives_issued(group) for group in groups if communicates(group)
        }

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
        """Lets go of the groups that were closed or aborted, also by another context that shares
        them. The next :meth:`get` takes others."""
        closed = [loan for loan in self._loans if not loan.is_sound]
        for key, group in list(self._groups.items()):
            if any(loan.reference() is group() for loan in closed):
                del self._groups[key]
        for loan in closed:
            self._loans.remove(loan)
            loan.let_go()

    def _take(self, purpose: str, group: dist.ProcessGroup, mesh: DeviceMesh) -> dist.ProcessGroup:
        """The group that the user handed in, or ``group``. A borrowed one over the same ranks, if
        ``group`` can be closed or serves another purpose already, or if it should have other
        options."""
        ranks = dist.get_process_group_ranks(group)
        key = purpose, tuple(ranks)
        if key not in self._groups:
            is_taken = any(group is other() for other in self._groups.values())
            is_needed = (is_taken and self.separate) or purpose in self.options
            is_needed &= not is_in_python(group, mesh.device_type)
            if communicates(group) and (is_needed or can_close(mesh.device_type, group)):
                group = self._borrow(purpose, group, ranks, mesh.device_type, purpose)
            self._groups[key] = ref(group)
        group = alive(self._groups[key])
        if group.group_name not in self._turns:
            self._turns[group.group_name] = next_turn(group)
            connect(mesh.device_type, group)
        return group

    def _borrow(
        self,
        purpose: str,
        like: dist.ProcessGroup,
        ranks: Sequence[int],
        device_type: str,
        lane: str,
    ) -> dist.ProcessGroup:
        loan = borrow(purpose, like, ranks, device_type, self.options.get(lane))
        self._loans.append(loan)
        group = loan.group
        self._turns[group.group_name] = loan.turn
        if loan.is_closable and (watch := self.watch()) is not None:
            watch_over(group, watch)
        return group
