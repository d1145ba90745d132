"""What went wrong, on this rank or another. Ranks tell each other through the store, because a
collective would only wait. See Note [asking around]."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from fsdp_overlap.comm.process_groups import GroupCache, group_timeout
from fsdp_overlap.comm.store_mailbox import StoreMailbox
from fsdp_overlap.desync.order_check import (
    Interval,
    OrderCheck,
    describe_difference,
    first_difference,
)

# How long the others have to tell what they issued, once it is known that ranks differ.
GRACE_SECONDS = 2.0

# Those of all contexts, because a rank that waits in the reset of one context does not come to the
# collectives of another.
_all: WeakSet[ErrorMonitor] = WeakSet()


class Fault(RuntimeError):
    """Why a collective will never be done."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank tells the others of one mesh."""

    event: str = ""
    """The last thing that happened to the rank, such as an error that left the model."""
    failure: str = ""
    """The error that it raised in place of a collective's result, if any."""
    progress: tuple[int, int] = (0, 0)
    """How many order checks it issued, and how many other collectives."""
    issued: dict[str, int | None] = field(default_factory=dict)
    """How many collectives it issued on each group, by the group's name."""
    begun: dict[str, int] = field(default_factory=dict)
    """How many exchanges beside units it began on each group, by the group's name."""
    has_reset: bool = False
    units: tuple[str, ...] = ()
    """The labels of the mesh's param groups, in the order in which they were made."""
    history: tuple[Interval, ...] = ()
    where: str = ""
    """Where the rank stands still, as its :class:`~fsdp_overlap.desync.monitor.DesyncMonitor` says.
    Empty if it does not, or has none."""
    told: str = ""
    """Where all ranks stand, as this one has found."""

    @classmethod
    def parse(cls, text: str) -> RankStatus:
        fields = json.loads(text)
        fields["progress"] = tuple(fields["progress"])
        fields["units"] = tuple(fields["units"])
        fields["history"] = tuple(Interval(*interval) for interval in fields["history"])
        return cls(**fields)


class RankGroup(Protocol):
    """Some ranks, such as those of one mesh, and what this one knows of them."""

    @property
    def device_type(self) -> str: ...
    @property
    def groups_of_all(self) -> Sequence[dist.ProcessGroup]:
        """Groups that together connect all these ranks. Empty if none were made yet."""
        ...

    @property
    def order_check(self) -> OrderCheck: ...
    @property
    def labels(self) -> Sequence[str]:
        """The labels of the param groups that this rank has sharded over the mesh, in order."""
        ...


_UNUSED_CHECK = OrderCheck(torch.device("cpu"), False, tuple, str, lambda: None)


@dataclass(frozen=True)
class OptimizerRanks:
    """The ranks of a group that serves an optimizer's steps alone. They compare nothing but how
    much they issue."""

    device_type: str
    groups_of_all: Sequence[dist.ProcessGroup]
    order_check: OrderCheck = _UNUSED_CHECK
    labels: Sequence[str] = ()


class ErrorMonitor:
    """What one context knows of faults. It is asked while a collective lasts, and when one failed.

    A rank that waits long posts what it issued, and reads what the others issued. It waits in vain
    if their collectives differ, or if a rank gave up. After a fault the groups of the context are
    closed, so that all ranks learn of it at once. Where groups cannot be closed, ranks compare how
    many collectives each has issued when they meet to reset.
    """

    def __init__(self, parties: Callable[[], Iterable[RankGroup]], groups: GroupCache) -> None:
        self._parties = parties
        self._groups = groups
        self.where = self.told = ""
        """Where this rank stands still, and where all do, for the others."""
        self._failure = ""
        self._event = ""
        self._has_reset = False
        self._resets = self._cleared = 0
        """How often ranks were to meet in a reset, and how often when the last fault was
        forgotten."""
        self._resets_before: dict[str, int] = {}
        """How many resets came before the first at which ranks met in a store, by its name. Ranks
        of tensor parallelism that share a store may have reset more or less often before."""
        self._begun: dict[str, tuple[frozenset[int], int, str]] = {}
        """The ranks that exchange data beside units, how often this one began to with them, and
        what the last time was for, by the name of their group."""
        self._posting = Lock()
        """Is held while a note is written and posted, so that none replaces a later one."""
        _all.add(self)

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
        """Tell the others what this rank has issued, and where it stands."""
        with self._posting:
            for party, group, name in self._stores():
                self._notes_in(name, group).post(self._record_of(party))

    def notes(self, most: int | None = None) -> list[dict[int, RankStatus]]:
        """Return what the others have told, by their ranks, for each set of ranks of the context:
        all of them, or the first ``most``."""
        return [notes for _, notes in self._notes(most)]

    def ranks(self) -> list[list[int]]:
        """Return the ranks of each set whose :meth:`notes` these are."""
        return [sorted(dist.get_process_group_ranks(group)) for _, group, _ in self._stores()]

    def explain(self, failure: RuntimeError) -> str:
        """Return why a collective ended with ``failure``."""
        if str(failure) == self._failure:
            return self._failure  # look() has raised it
        if self._failure:
            return f"ctx.reset() was not called, on every rank, since {self._failure}"
        self.post()
        # A rank that closed the connection on purpose posted the reason before. A rank that died
        # is not waited for: the launcher may be about to end this rank too.
        died = f"a rank died, or did not come in time{self._events()}: {failure}"
        return self._fail(self._read() or died)

    def explain_difference(self, unit: str) -> str:
        """Return what ranks did differently. ``unit`` is where, empty if that is not known. Wait
        for the others to tell, at most :data:`GRACE_SECONDS`."""
        self.post()
        end = time.monotonic() + GRACE_SECONDS
        while not (reason := self._read()) and time.monotonic() < end:
            time.sleep(GRACE_SECONDS / 40)  # the others are about to tell
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

    def raised(self, where: str, error: BaseException) -> None:
        """Tell the others that ``error`` left the model, in ``where``. They may wait for this rank
        in vain."""
        if self._groups.can_close:
            self._event = f"{where} raised {error!r}"
            self.post()

    def begins(self, what: str, group: dist.ProcessGroup) -> None:
        """Note that this rank begins ``what``, as a step of an optimizer, for which the ranks of
        ``group`` exchange data. All of them must take it between the same other collectives."""
        name = group.group_name
        if name not in self._begun:
            self._begun[name] = frozenset(dist.get_process_group_ranks(group)), 0, what
        ranks, before, _ = self._begun[name]
        self._begun[name] = ranks, before + 1, what

    def gave_up(self, what: str, error: BaseException) -> None:
        """End what the others wait for, because ``error`` left collectives of ``what`` half
        done on this rank. Afterwards the context must be reset."""
        if self._groups.can_close and not self._failure:
            self._fail(f"{what} raised {error!r}")

    def meet(self, error: BaseException | None) -> None:
        """Meet the other ranks in ``ctx.reset()``, before everything is dropped. Wait for them,
        which may have to learn of the reset first, and end collectives that will never be done.
        ``error`` is the one that this rank handles, if any. Must be called on every rank.

        Raises:
            RuntimeError: some ranks did not come, or they issued more or fewer collectives than
                this rank on a group that is the user's.
        """
        stores = list(self._stores())
        if not stores:
            return
        self._has_reset = True
        for _, _, name in stores:
            self._resets_before.setdefault(name, self._resets)
        self._resets += 1
        self._event = "called ctx.reset()" + (f" after {error!r}" if error is not None else "")
        for other in [*self._others(), self]:  # this one last, because it is read first
            other.post()
        notes: list[tuple[RankGroup, dict[int, RankStatus]]] = []
        for party, group, name in stores:
            timeout = group_timeout(group, party.device_type)
            # A name for this reset alone: a rank that has met the others goes on, and may post
            # other notes at once.
            number = self._resets - self._resets_before[name]
            store = StoreMailbox(f"{name}/reset/{number}", group)
            met = store.meet(timeout, self._record_of(party))
            if late := [rank for rank in store.others if rank not in met]:
                raise RuntimeError(
                    f"ranks {late} did not call ctx.reset() in time, or died: this rank "
                    f"{self._event}; it must be called on every rank"
                )
            notes.append((party, _parsed(met)))
        apart = self._apart(notes)
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

    def _apart(
        self, told: Iterable[tuple[RankGroup, dict[int, RankStatus]]]
    ) -> dict[str, list[int]]:
        """Return the groups on which others issued more or fewer collectives than this rank, by
        name, and which ranks did. ``told`` is what ranks posted when they met. All ranks of a group
        agree on whether it is among them."""
        found: dict[str, list[int]] = {}
        for party, notes in told:
            for name, mine in self._groups.issued().items():
                for rank, note in notes.items():
                    if name not in note.issued:
                        continue  # that rank is in another row or column of the mesh
                    theirs = note.issued[name]
                    is_counted = mine is not None and theirs is not None
                    is_behind = note.progress != party.order_check.progress
                    if (mine != theirs) if is_counted else is_behind:
                        found.setdefault(name, []).append(rank)
        return found

    def clear(self) -> None:
        """Forget the last fault. Everything is at rest again."""
        self._failure = self._event = ""
        self._has_reset = False
        self._begun.clear()
        self._cleared = self._resets

    def _fail(self, text: str) -> str:
        """Note what happened, and end what the other ranks wait for. Return ``text``."""
        self._failure = text
        self.post()
        self._groups.close()
        return text

    def _stores(self) -> Iterator[tuple[RankGroup, dist.ProcessGroup, str]]:
        """Yield the groups in which ranks compare themselves, with a name for the notes of each.
        Two meshes over the same ranks share a group, so the name also counts the group's uses."""
        seen: Counter[str] = Counter()
        serving = self._groups.of_optimizers
        others = [OptimizerRanks(own.device_type, [own.group]) for own in serving]
        for party in [*self._parties(), *others]:
            for group in party.groups_of_all:
                label = self._groups.label(group)
                yield party, group, f"{label}/{seen[label]}"
                seen[label] += 1

    def _notes_in(self, name: str, group: dist.ProcessGroup) -> StoreMailbox:
        """Return the notes since the last reset. What ranks posted before no longer holds, and
        groups that cannot be closed, whose names these are, are the same after it."""
        number = self._cleared - self._resets_before.get(name, self._cleared)
        return StoreMailbox(f"{name}/after/{number}", group)

    def _record_of(self, party: RankGroup) -> str:
        """Return what this rank tells the others of ``party`` now."""
        check = party.order_check
        note = RankStatus(
            self._event,
            self._failure,
            check.progress,
            self._groups.issued(),
            {name: begun for name, (_, begun, _) in self._begun.copy().items()},
            self._has_reset,
            tuple(party.labels),
            tuple(check.history),
            self.where,
            self.told,
        )
        return json.dumps(asdict(note), default=list)

    def _notes(self, most: int | None = None) -> Iterator[tuple[RankGroup, dict[int, RankStatus]]]:
        for party, group, name in self._stores():
            yield party, _parsed(self._notes_in(name, group).read(most))

    def _read(self) -> str:
        """Return why this rank waits for a collective in vain, as the others tell. Empty if they
        tell no reason. What they told a while ago still holds."""
        reason = ""
        for party, notes in self._notes():
            check = party.order_check
            histories = {rank: note.history for rank, note in notes.items()}
            found = first_difference({dist.get_rank(): check.history, **histories})
            if found is not None:
                units = {dist.get_rank(): party.labels, **{r: n.units for r, n in notes.items()}}
                return describe_difference(*found, units, exchanged=not check.confirms)
            for rank, note in notes.items():
                if note.has_reset and self._is_ahead(check, note):
                    reason = reason or f"rank {rank} {note.event}: call it on every rank"
                elif note.failure:
                    # If that rank learned of the failure from another, the text names the other.
                    is_first = " ended: " not in note.failure
                    reason = reason or (f"rank {rank} ended: " if is_first else "") + note.failure
                elif note.progress > check.progress and (what := self._skipped(rank, note)):
                    reason = reason or (
                        f"rank {rank} went on without {what} that this rank has begun with it: "
                        "call it on every rank, or on none"
                    )
        return reason

    def _skipped(self, rank: int, note: RankStatus) -> str:
        """Return what this rank has begun together with ``rank``, which wrote ``note``, more often
        than that. Empty if nothing."""
        for name, (ranks, begun, what) in self._begun.copy().items():
            if rank in ranks and note.begun.get(name, 0) < begun:
                return what
        return ""

    def _read_resets(self) -> str:
        """Return like :meth:`_read`, for ranks that issued less than this one and wait for it in
        the reset of another context."""
        for other in self._others():
            late = {rank: n for _, notes in other._notes() for rank, n in notes.items()}
            for party, notes in self._notes():
                for rank in late.keys() & notes.keys():
                    is_waited_for = self._is_ahead(party.order_check, notes[rank])
                    if late[rank].has_reset and not other._has_reset and is_waited_for:
                        return (
                            f"rank {rank} {late[rank].event}, of another context: call it on every "
                            "rank, and of every context in the same order"
                        )
        return ""

    def _is_ahead(self, check: OrderCheck, note: RankStatus) -> bool:
        """Return whether this rank has issued more than the one that wrote ``note``. What nobody
        checks, such as an optimizer's step, counts too."""
        issued = self._groups.issued()
        return note.progress < check.progress or any(
            (theirs or 0) < (issued.get(name) or 0)
            for name, theirs in note.issued.items()
            if self._groups.owns(name)
        )

    def _others(self) -> list[ErrorMonitor]:
        return [other for other in _all if other is not self and other._groups.can_close]

    def _events(self) -> str:
        events = {
            f"rank {rank}: {note.event}"
            for _, notes in self._notes()
            for rank, note in notes.items()
            if note.event
        }
        return f" ({'; '.join(sorted(events))})" if events else ""


def _parsed(notes: Mapping[int, str]) -> dict[int, RankStatus]:
    return {rank: RankStatus.parse(text) for rank, text in notes.items()}
