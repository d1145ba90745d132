"""Which operations read and write a piece of memory, and whether they are ordered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_overlap.emulator.queues import Queue, Stamp
from fsdp_overlap.emulator.sites import Site


class Access(NamedTuple):
    """An operation reads or writes the bytes ``[start, stop)`` of a piece of memory."""

    stamp: Stamp
    operation: str
    site: Site
    writes: bool
    start: int
    stop: int
    freed_at: Site | None = None
    """Where the memory was freed since. It has another owner now."""


@dataclass(eq=False)
class TrackedMemory:
    """The memory of one storage, with the accesses that a later one may conflict with."""

    nbytes: int
    is_on_device: bool
    is_pinned: bool = False
    is_freed: bool = False
    """Whether its storage has been resized to nothing."""
    freed_at: Site | None = None
    """Where that was, or where its last tensor was dropped."""
    taken_at: Site | None = None
    """Where it was taken from the allocator."""
    accesses: list[Access] = field(default_factory=list)
    waited_for: set[Queue] = field(default_factory=set)
    """The queues that the allocator waits for before it gives the memory to a next owner, as
    ``Tensor.record_stream`` asks of it."""

    def conflicts(self, access: Access, queue: Queue) -> Iterator[Access]:
        """Yield earlier accesses that conflict with ``access``, which is enqueued on ``queue`` now:
        they are to the same bytes, one of the two writes, and nothing orders them before it."""
        for earlier in self.accesses:
            is_shared = earlier.start < access.stop and access.start < earlier.stop
            if is_shared and (access.writes or earlier.writes) and not queue.knows(earlier.stamp):
                yield earlier

    def note(self, access: Access) -> None:
        """Remember ``access``. Forget an earlier one if every later access that conflicts with it
        also conflicts with ``access``."""
        mine = access.stamp.queue
        self.accesses = [
            earlier
            for earlier in self.accesses
            if not (access.start <= earlier.start and earlier.stop <= access.stop)
            or not (access.writes or (earlier.stamp.queue == mine and not earlier.writes))
        ]
        self.accesses.append(access)

    def hand_over(self) -> list[Access]:
        """Return the accesses that the next owner of the memory has to come after: those that no
        stream of :attr:`waited_for` comes after."""
        left = [
            access
            for access in self.accesses
            if not any(queue.knows(access.stamp) for queue in self.waited_for)
        ]
        self.accesses.clear()
        self.waited_for.clear()
        freed_at = self.freed_at or Site()
        return [each if each.freed_at else each._replace(freed_at=freed_at) for each in left]

    def take_over(self, accesses: Iterable[Access]) -> None:
        """Add the last accesses of the memory's former owners. They count for all of its bytes:
        which ones they touched is not known."""
        self.accesses.extend(
            access._replace(start=0, stop=max(self.nbytes, 1)) for access in accesses
        )
