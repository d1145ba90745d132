"""Errors of this rank and of others. Ranks post their status in the store, because a collective
would only wait. See Note [polling peers]."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp_overlap.comm.optimizer_groups import own_groups_of_optimizers
from fsdp_overlap.comm.process_groups import GroupCache, group_timeout
from fsdp_overlap.comm.store_mailbox import StoreMailbox, has_peers
from fsdp_overlap.desync.order_check import Interval, OrderCheck
from fsdp_overlap.desync.order_differences import describe_difference, first_difference

# How long the others have to post what they issued, once it is known that ranks differ.
GRACE_SECONDS = 2.0


class Fault(RuntimeError):
    """Why a collective will never be done."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank posts for the others of one mesh."""

    event: str = ""
    """The last thing that happened to the rank, such as an error that left the model."""
    failure: str = ""
    """The error that it raised in place of a collective's result, if any."""
    progress: tuple[int, int] = (0, 0)
    """How many order checks it issued, and how many other collectives."""
    issued: dict[str, int | None] = field(default_factory=dict)
    """How many collectives it issued on each group, by the group's name."""
    exchanges: dict[str, int] = field(default_factory=dict)
    """How many exchanges beside units it began on each group, by the group's name."""
    has_reset: bool = False
    raised_at: dict[str, int | None] | None = None
    """What ``issued`` was at ``event``, if that was an error."""
    saves: bool = False
    """Whether it saved after that, and issued nothing in between."""
    units: tuple[str, ...] = ()
    """The labels of the mesh's param groups, in the order in which they were made."""
    history: tuple[Interval, ...] = ()
    position: str = ""
    """Where the rank stands still, as JSON. Empty if it does not, or nothing watches for hangs."""
    hang_report: str = ""
    """Where all ranks stand, as this one has found."""

    @classmethod
    def parse(cls, text: str) -> RankStatus:
        fields = json.loads(text)
        fields["progress"] = tuple(fields["progress"])
        fields["units"] = tuple(fields["units"])
        fields["history"] = tuple(Interval(*interval) for interval in fields["history"])
        return cls(**fields)


Statuses = dict[int, RankStatus]
"""What others have posted, by rank."""


class RankGroup(Protocol):
    """Some ranks, such as those of one mesh, and what this one knows of them."""

    @property
    def device(self) -> torch.device: ...
    @property
    def groups_per_dim(self) -> Sequence[dist.ProcessGroup]:
        """Groups that together connect all these ranks. Empty if none were made yet."""
        ...

    @property
    def order_check(self) -> OrderCheck: ...
    @property
    def labels(self) -> Sequence[str]:
        """The labels of the param groups that this rank has sharded over the mesh, in order."""
        ...


# Of ranks that issue nothing in a checked order.
_UNUSED_CHECK = OrderCheck(torch.device("cpu"), str)


@dataclass(frozen=True)
class OptimizerRanks:
    """The ranks of a group that serves an optimizer's steps alone. They compare nothing but how
    much they issue."""

    device: torch.device
    groups_per_dim: Sequence[dist.ProcessGroup]
    order_check: OrderCheck = _UNUSED_CHECK
    labels: Sequence[str] = ()


class ErrorMonitor:
    """What one context knows of faults.

    A rank that waits long posts what it issued, and reads what the others issued. It waits in vain
    if their collectives differ, or if a rank gave up. After a fault the groups of the context are
    closed, so that all ranks learn of it at once. Where groups cannot be closed, ranks compare how
    many collectives each has issued when they meet to reset.
    """

    def __init__(
        self,
        rank_groups: Callable[[], Iterable[RankGroup]],
        groups: GroupCache,
        monitors: Callable[[], Iterable[ErrorMonitor]],
    ) -> None:
        self._rank_groups = rank_groups
        self._groups = groups
        self._monitors = monitors
        """Return those of all contexts whose groups can be closed."""
        self.position = self.hang_report = ""
        """Where this rank stands still, and where all do, for the others."""
        self._failure = ""
        self._event = ""
        self._has_reset = self._saves = False
        self._raised_at: dict[str, int | None] | None = None
        self._resets = self._cleared = 0
        """How often ranks were to meet in a reset, and how often when the last fault was
        forgotten."""
        self._resets_before: dict[str, int] = {}
        """How many resets came before the first at which ranks met in a store, by its name. Ranks
        of tensor parallelism that share a store may have reset more or less often before."""
        self._exchanges: dict[str, tuple[frozenset[int], int, str]] = {}
        """The ranks that exchange data beside units, how often this one began to with them, and
        what the last time was for, by the name of their group."""
        self._posting = Lock()
        """Is held while a status is made and posted, so that none replaces a later one."""

    def poll(self) -> None:
        """Look for a reason why a collective lasts. Do not wait for the others.

        Raises:
            Fault: the collective will never be done; says why.
        """
        self.post()
        if reason := self._read() or self._read_resets():
            raise Fault(self._fail(reason))

    def check(self) -> None:
        """Refuse to go on after a fault that the desync monitor has found.

        Raises:
            RuntimeError: there was one, and ``ctx.reset()`` was not called since.
        """
        if self._failure:
            raise RuntimeError(
                f"{self._failure}. Call ctx.reset() on every rank before the next forward"
            )

    def post(self) -> None:
        """Post what this rank has issued, and where it stands."""
        with self._posting:
            for rank_group, group, name in self._groups_to_compare():
                self._mailbox(name, group).post(self._status(rank_group))

    def statuses(self, most: int | None = None) -> list[Statuses]:
        """Return what the others have posted, for each set of ranks of the context: all of them, or
        the first ``most``."""
        return [statuses for _, statuses in self._statuses(most)]

    def ranks(self) -> list[list[int]]:
        """Return the ranks of each set whose :meth:`statuses` these are."""
        groups = [group for _, group, _ in self._groups_to_compare()]
        return [sorted(dist.get_process_group_ranks(group)) for group in groups]

    def explain(self, failure: RuntimeError) -> str:
        """Return why a collective ended with ``failure``."""
        if str(failure) == self._failure:
            return self._failure  # poll() has raised it
        if self._failure:
            return f"ctx.reset() was not called, on every rank, since {self._failure}"
        self.post()
        # A rank that closed the connection on purpose posted the reason before. A rank that died
        # is not waited for: the launcher may be about to end this rank too.
        died = f"a rank died, or did not come in time{self._events()}: {failure}"
        return self._fail(self._read() or died)

    def explain_difference(self, unit: str) -> str:
        """Return what ranks did differently. ``unit`` is where, empty if that is not known. Wait
        for the others to post, at most :data:`GRACE_SECONDS`."""
        self.post()
        end = time.monotonic() + GRACE_SECONDS
        while not (reason := self._read()) and time.monotonic() < end:
            time.sleep(GRACE_SECONDS / 40)  # the others are about to post
        if not reason and unit:
            reason = (
                f"ranks planned unit {unit!r} differently, by shapes, dtypes or layouts: every "
                "rank must build the same model and shard it in the same way"
            )
        return self._fail(
            reason
            or "ranks ran different units, before the collectives that are remembered or on ranks "
            "that this one does not compare itself with"
        )

    def post_error(self, where: str, error: BaseException) -> None:
        """Post that ``error`` left the model, in ``where``. Others may wait for this rank in
        vain."""
        if self._groups.can_close:
            self._event = f"{where} raised {error!r}"
            self._raised_at = self._groups.collectives_issued()
            self.post()

    def before_save(self, what: str, is_interrupted: bool, uses_groups: bool = False) -> None:
        """Post that this rank saves after an error that left the model, or after a forward or
        backward that ``is_interrupted``, if it has issued nothing since: others that wait for it
        would wait in vain. ``what`` names the save, and ``uses_groups`` says whether it needs
        the context's groups.

        Raises:
            RuntimeError: the save itself would wait in vain, because ranks may have been
                interrupted in different places, and issued different collectives on its group.
        """
        compared = list(self._groups_to_compare()) if is_interrupted or self._event else []
        if not any(has_peers(group) for _, group, _ in compared):
            return
        issued = self._groups.collectives_issued()
        if is_interrupted and self._raised_at != issued:
            self._event, self._raised_at = "was interrupted in a forward or backward", issued
        if self._raised_at == issued and self._groups.can_close:
            self._saves = True
            self.post()
        if is_interrupted and (uses_groups or not self._groups.can_close):
            raise RuntimeError(
                f"{what} after a forward or backward that was interrupted or raised, perhaps not "
                "where other ranks were, for which it would then wait in vain: call ctx.reset() on "
                "every rank before it"
            )

    def begin_exchange(self, what: str, group: dist.ProcessGroup) -> None:
        """Note that this rank begins ``what``, as a step of an optimizer, for which the ranks of
        ``group`` exchange data. All of them must take it between the same other collectives."""
        name = group.group_name
        if name not in self._exchanges:
            self._exchanges[name] = frozenset(dist.get_process_group_ranks(group)), 0, what
        ranks, before, _ = self._exchanges[name]
        self._exchanges[name] = ranks, before + 1, what

    def give_up(self, what: str, error: BaseException) -> None:
        """End what the others wait for, because ``error`` left collectives of ``what`` half
        done on this rank. Afterwards the context must be reset."""
        if self._groups.can_close and not self._failure:
            self._fail(f"{what} raised {error!r}")

    def wait_for_resets(self, error: BaseException | None) -> None:
        """Wait for ``ctx.reset()`` on all ranks, before everything is dropped. The others may have
        to learn of the reset first. End collectives that will never be done.
        ``error`` is the one that this rank handles, if any. Must be called on every rank.

        Raises:
            RuntimeError: some ranks did not come, or they issued more or fewer collectives than
                this rank on a group that is the user's.
        """
        compared = list(self._groups_to_compare())
        if not compared:
            return
        self._has_reset = True
        for _, _, name in compared:
            self._resets_before.setdefault(name, self._resets)
        self._resets += 1
        self._event = "called ctx.reset()" + (f" after {error!r}" if error is not None else "")
        for other in [*self._other_monitors(), self]:  # this one last, because it is read first
            other.post()
        statuses: list[tuple[RankGroup, Statuses]] = []
        for rank_group, group, name in compared:
            timeout = group_timeout(group, rank_group.device.type)
            # A name for this reset alone: a rank that has met the others goes on, and may post
            # other statuses at once.
            number = self._resets - self._resets_before[name]
            store = StoreMailbox(f"{name}/reset/{number}", group)
            met = store.barrier(timeout, self._status(rank_group))
            if late := [rank for rank in store.others if rank not in met]:
                raise RuntimeError(
                    f"ranks {late} did not call ctx.reset() in time, or died: this rank "
                    f"{self._event}; it must be called on every rank"
                )
            statuses.append((rank_group, _parsed(met)))
        apart = self._apart(statuses)
        self._groups.close()
        for name, ranks in apart.items():
            if self._groups.is_closed(name):
                continue  # a new one takes its place
            if not self._groups.owns(name):
                raise RuntimeError(
                    f"ctx.reset() cannot bring the ranks together: ranks {ranks} and this one have "
                    f"issued different numbers of collectives on the process group {name!r}, "
                    f"which belongs to the program ({self._event}{self._events()}). End all "
                    "ranks and start them again from a checkpoint"
                )
            self._groups.abort(name)

    def _apart(self, posted: Iterable[tuple[RankGroup, Statuses]]) -> dict[str, list[int]]:
        """Return the groups on which others issued more or fewer collectives than this rank, by
        name, and which ranks did. ``posted`` is from the reset. All ranks of a group agree on
        whether it is among them."""
        found: dict[str, list[int]] = {}
        for rank_group, statuses in posted:
            for name, mine in self._groups.collectives_issued().items():
                for rank, status in statuses.items():
                    if name not in status.issued:
                        continue  # that rank is in another row or column of the mesh
                    theirs = status.issued[name]
                    is_counted = mine is not None and theirs is not None
                    is_behind = status.progress != rank_group.order_check.progress
                    if (mine != theirs) if is_counted else is_behind:
                        found.setdefault(name, []).append(rank)
        return found

    def clear(self) -> None:
        """Forget the last fault. Everything is at rest again."""
        self._failure = self._event = ""
        self._has_reset = self._saves = False
        self._raised_at = None
        self._exchanges.clear()
        self._cleared = self._resets

    def _fail(self, text: str) -> str:
        """Note what happened, and end what the other ranks wait for. Return ``text``."""
        self._failure = text
        self.post()
        self._groups.close()
        return text

    def _groups_to_compare(self) -> Iterator[tuple[RankGroup, dist.ProcessGroup, str]]:
        """Yield the groups in which ranks compare themselves, with a name for the mailbox of each.
        Two meshes over the same ranks share a group, so the name also counts the group's uses."""
        seen: Counter[str] = Counter()
        serving = own_groups_of_optimizers(self._groups)
        others = [OptimizerRanks(torch.device(own.device_type), [own.group]) for own in serving]
        for rank_group in [*self._rank_groups(), *others]:
            for group in rank_group.groups_per_dim:
                label = self._groups.label(group)
                yield rank_group, group, f"{label}/{seen[label]}"
                seen[label] += 1

    def _mailbox(self, name: str, group: dist.ProcessGroup) -> StoreMailbox:
        """Return the mailbox since the last reset. What ranks posted before no longer holds, and
        groups that cannot be closed, whose names these are, are the same after it."""
        number = self._cleared - self._resets_before.get(name, self._cleared)
        return StoreMailbox(f"{name}/after/{number}", group)

    def _status(self, rank_group: RankGroup) -> str:
        """Return what this rank posts for the others of ``rank_group`` now."""
        check, issued = rank_group.order_check, self._groups.collectives_issued()
        status = RankStatus(
            self._event,
            self._failure,
            check.progress,
            issued,
            {name: begun for name, (_, begun, _) in self._exchanges.copy().items()},
            self._has_reset,
            self._raised_at,
            self._saves and self._raised_at == issued,
            tuple(rank_group.labels),
            tuple(check.history),
            self.position,
            self.hang_report,
        )
        return json.dumps(asdict(status), default=list)

    def _statuses(self, most: int | None = None) -> Iterator[tuple[RankGroup, Statuses]]:
        for rank_group, group, name in self._groups_to_compare():
            yield rank_group, _parsed(self._mailbox(name, group).read(most))

    def _read(self) -> str:
        """Return why this rank waits for a collective in vain, by what the others have posted.
        Empty if there is no reason. What they posted a while ago still holds."""
        reason = ""
        for rank_group, statuses in self._statuses():
            check = rank_group.order_check
            histories = {rank: status.history for rank, status in statuses.items()}
            found = first_difference({dist.get_rank(): check.history, **histories})
            if found is not None:
                units = {rank: status.units for rank, status in statuses.items()}
                units[dist.get_rank()] = tuple(rank_group.labels)
                return describe_difference(*found, units, exchanged=not check.confirms)
            for rank, status in statuses.items():
                if status.has_reset and self._is_ahead(check, status):
                    reason = reason or f"rank {rank} {status.event}: call it on every rank"
                elif status.saves and self._waits_for_saving(check, status):
                    reason = reason or (
                        f"rank {rank} saves, and its last forward or backward did not finish "
                        f"({status.event}): call ctx.reset() on every rank before the next forward"
                    )
                elif status.failure:
                    # If that rank learned of the failure from another, the text names the other.
                    is_first = " ended: " not in status.failure
                    reason = reason or (f"rank {rank} ended: " if is_first else "") + status.failure
                elif status.progress > check.progress and (what := self._skipped(rank, status)):
                    reason = reason or (
                        f"rank {rank} went on without {what} that this rank has begun with it: "
                        "call it on every rank, or on none"
                    )
        return reason

    def _skipped(self, rank: int, status: RankStatus) -> str:
        """Return what this rank has begun together with ``rank``, which posted ``status``, more
        often than that. Empty if nothing."""
        for name, (ranks, begun, what) in self._exchanges.copy().items():
            if rank in ranks and status.exchanges.get(name, 0) < begun:
                return what
        return ""

    def _read_resets(self) -> str:
        """Return as :meth:`_read`, for ranks that issued less than this one and wait for it in
        the reset of another context."""
        for other in self._other_monitors():
            late = {rank: n for _, statuses in other._statuses() for rank, n in statuses.items()}
            for rank_group, statuses in self._statuses():
                for rank in late.keys() & statuses.keys():
                    is_waited_for = self._is_ahead(rank_group.order_check, statuses[rank])
                    if late[rank].has_reset and not other._has_reset and is_waited_for:
                        return (
                            f"rank {rank} {late[rank].event}, of another context: call it on every "
                            "rank, and of every context in the same order"
                        )
        return ""

    def _waits_for_saving(self, check: OrderCheck, status: RankStatus) -> bool:
        """Return whether this rank waits in the step in which the one that posted ``status`` did
        not finish, and did not stop itself where that did. What an earlier step left in the store
        is of no account."""
        mine, theirs = self._raised_at or {}, status.raised_at or {}
        stopped_alike = bool(mine) and all(
            mine[name] == count for name, count in theirs.items() if name in mine
        )
        is_recent = check.progress[0] - status.progress[0] <= 1
        return is_recent and not stopped_alike and self._is_ahead(check, status)

    def _is_ahead(self, check: OrderCheck, status: RankStatus) -> bool:
        """Return whether this rank has issued more than the one that posted ``status``. What nobody
        checks, such as an optimizer's step, counts too."""
        issued = self._groups.collectives_issued()
        return status.progress < check.progress or any(
            (theirs or 0) < (issued.get(name) or 0)
            for name, theirs in status.issued.items()
            if self._groups.owns(name)
        )

    def _other_monitors(self) -> list[ErrorMonitor]:
        return [other for other in self._monitors() if other is not self]

    def _events(self) -> str:
        events = {
            f"rank {rank}: {status.event}"
            for _, statuses in self._statuses()
            for rank, status in statuses.items()
            if status.event
        }
        return f" ({'; '.join(sorted(events))})" if events else ""


def _parsed(messages: Mapping[int, str]) -> Statuses:
    return {rank: RankStatus.parse(text) for rank, text in messages.items()}
