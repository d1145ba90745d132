"""Which operations read and write a piece of memory, and whether they are ordered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from fsdp_overlap.emulator.queues import Queue, Stamp


@dataclass(frozen=True)
class Access:
    """An operation reads or writes the bytes ``[start, stop)`` of a piece of memory."""

    stamp: Stamp
    operation: str
    place: str
    """The line of the program that enqueued it."""
    writes: bool
    start: int
    stop: int
    is_of_last_owner: bool = False
    """Whether the memory has been freed and taken again since."""


@dataclass(eq=False)
class TrackedMemory:
    """The memory of one storage, with the accesses that a later one may conflict with."""

    nbytes: int
    is_on_device: bool
    is_pinned: bool = False
    is_freed: bool = False
    """Whether its storage has been resized to nothing."""
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
        return [replace(access, is_of_last_owner=True) for access in left]

    def take_over(self, accesses: Iterable[Access]) -> None:
        """Add the last accesses of the memory's former owners. They count for all of its bytes:
        which ones they touched is not known."""
        self.accesses.extend(
            replace(access, start=0, stop=max(self.nbytes, 1)) for access in accesses
        )
