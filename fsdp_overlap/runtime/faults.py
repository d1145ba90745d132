"""What went wrong, here or on another rank: told to the others by the store, for collectives only
wait."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch.distributed as dist

from fsdp_overlap.comm.board import Board
from fsdp_overlap.comm.groups import GroupCache, group_timeout
from fsdp_overlap.runtime.order_check import (
    Interval,
    describe_difference,
    first_difference,
)

if TYPE_CHECKING:
    from fsdp_overlap.runtime.domain import Domain

# For the others to tell what they issued, once it is known that it is not the same.
GRACE_SECONDS = 2.0

# Of all contexts: a rank that waits in the reset of one does not come to collectives of another.
_all: WeakSet[Faults] = WeakSet()


@dataclass(frozen=True)
class Note:
    """What a rank tells the others of one mesh."""

    event: str = ""
    """The last that happened to it, as an error that left the model."""
    failure: str = ""
    """What it ended for."""
    progress: tuple[int, int] = (0, 0)
    """How many checks and other collectives it issued."""
    has_reset: bool = False
    units: tuple[str, ...] = ()
    """Of the mesh's buckets, in the order in which they were made."""
    history: tuple[Interval, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Note:
        fields = json.loads(text)
        fields["progress"] = tuple(fields["progress"])
        fields["units"] = tuple(fields["units"])
        fields["history"] = tuple(Interval(*interval) for interval in fields["history"])
        return cls(**fields)


class Faults:
    """What one context knows of faults. Asked while a collective lasts and when one has failed.

    Who waits long posts what it issued, and reads what the others did: the first that is not the
    same, and the ranks that gave up, tell that it waits in vain. After a fault the groups of the
    context are closed, where they can be, so that all ranks learn of it at once.
    """

    def __init__(self, domains: Callable[[], Iterable[Domain]], groups: GroupCache) -> None:
        self._domains = domains
        self._groups = groups
        self._failure = ""
        self._event = ""
        self._has_reset = False
        _all.add(self)

    def look(self) -> None:
        """A collective lasts. Does not wait for the others.

        Raises:
            RuntimeError: it will never be done.
        """
        self._post()
        if told := self._read() or self._read_resets():
            raise RuntimeError(self._fail(told))

    def explain(self, failure: RuntimeError) -> str:
        """Why a collective ended with ``failure``."""
        if str(failure) == self._failure:
            return self._failure  # which look() has told
        if self._failure:
            return f"ctx.reset() was not called, on every rank, since {self._failure}"
        self._post()
        # Who closed the connection on purpose has said so before, and nobody waits for the dead:
        # the launcher may be about to end this rank too.
        died = f"a rank died, or did not come in time{self._events()}: {failure}"
        return self._fail(self._read() or died)

    def explain_difference(self, unit: str) -> str:
        """What ranks did that is not the same, with ``unit`` if that is known."""
        self._post()
        end = time.monotonic() + GRACE_SECONDS
        while not (told := self._read()) and time.monotonic() < end:
            time.sleep(GRACE_SECONDS / 40)  # the others are about to tell
        if told:
            return self._fail(told)
        if unit:
            return self._fail(
                f"ranks planned unit {unit!r} differently, by shapes, dtypes or layouts: every "
                "rank must build the same model and shard it in the same way"
            )
        return self._fail(
            "ranks ran different units, before the collectives that are remembered or on ranks "
            "that this one does not compare itself with"
        )

    def raised(self, where: str, error: BaseException) -> None:
        """``error`` left the model, in ``where``; others may wait for this rank in vain."""
        if self._groups.can_close:
            self._event = f"{where} raised {error!r}"
            self._post()

    def meet(self, error: BaseException | None) -> None:
        """Before all is dropped, on every rank: waits for the others, which may have to learn of it
        first, and closes the groups. ``error`` is what this rank handles.

        Raises:
            RuntimeError: some did not come.
        """
        if not self._groups.can_close:
            return
        self._has_reset = True
        self._event = "called ctx.reset()" + (f" after {error!r}" if error is not None else "")
        for other in [*self._others(), self]:  # which is read first
            other._post()
        for _, group, name in self._boards():
            late = Board(f"{name}/reset", group).meet(group_timeout(group, "cpu"))
            if late:
                raise RuntimeError(
                    f"ranks {late} did not call ctx.reset() in time, or died: this rank "
                    f"{self._event}; it must be called on every rank"
                )
        self._groups.close()

    def clear(self) -> None:
        """All is at rest again."""
        self._failure = self._event = ""
        self._has_reset = False

    def _fail(self, text: str) -> str:
        """Notes what happened, and ends what the other ranks wait for."""
        self._failure = text
        self._post()
        self._groups.close()
        return text

    def _boards(self) -> Iterator[tuple[Domain, dist.ProcessGroup, str]]:
        """The groups that a rank compares itself in, with a name for their board: of two meshes
        over the same ranks both have the same group."""
        seen: Counter[str] = Counter()
        for domain in self._domains():
            for group in domain.groups_of_all:
                yield domain, group, f"{group.group_name}/{seen[group.group_name]}"
                seen[group.group_name] += 1

    def _post(self) -> None:
        for domain, group, name in self._boards():
            check = domain.order_check
            note = Note(
                self._event,
                self._failure,
                check.progress,
                self._has_reset,
                tuple(domain.labels),
                tuple(check.history),
            )
            Board(name, group).post(json.dumps(asdict(note), default=list))

    def _notes(self) -> Iterator[tuple[Domain, dict[int, Note]]]:
        for domain, group, name in self._boards():
            notes = Board(name, group).read()
            yield domain, {rank: Note.parse(text) for rank, text in notes.items()}

    def _read(self) -> str:
        """What the others tell for which a collective is waited for in vain, if they do. What they
        told a while ago still holds."""
        told = ""
        for domain, notes in self._notes():
            check = domain.order_check
            histories = {rank: note.history for rank, note in notes.items()}
            found = first_difference({dist.get_rank(): check.history, **histories})
            if found is not None:
                units = {dist.get_rank(): domain.labels, **{r: n.units for r, n in notes.items()}}
                return describe_difference(*found, units, exchanged=not check.confirms)
            for rank, note in notes.items():
                if note.has_reset and note.progress < check.progress:
                    told = told or f"rank {rank} {note.event}: call it on every rank"
                elif note.failure:
                    # It may have been told itself.
                    is_first = " ended: " not in note.failure
                    told = told or (f"rank {rank} ended: " if is_first else "") + note.failure
        return told

    def _read_resets(self) -> str:
        """As :meth:`_read`, of ranks that have issued less than this one, and wait for it in the
        reset of another context."""
        for other in self._others():
            late = {rank: n for _, notes in other._notes() for rank, n in notes.items()}
            for domain, notes in self._notes():
                for rank in late.keys() & notes.keys():
                    is_behind = notes[rank].progress < domain.order_check.progress
                    if late[rank].has_reset and not other._has_reset and is_behind:
                        return (
                            f"rank {rank} {late[rank].event}, of another context: call it on every "
                            "rank, and of every context in the same order"
                        )
        return ""

    def _others(self) -> list[Faults]:
        return [other for other in _all if other is not self and other._groups.can_close]

    def _events(self) -> str:
        events = {
            f"rank {rank}: {note.event}"
            for _, notes in self._notes()
            for rank, note in notes.items()
            if note.event
        }
        return f" ({'; '.join(sorted(events))})" if events else ""
