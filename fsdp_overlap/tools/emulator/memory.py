"""Race detection: the operations that read and write a piece of memory, and whether they are
ordered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

import torch

from fsdp_overlap.tools.emulator.queues import Queue, Stamp
from fsdp_overlap.tools.emulator.sites import Site


class ByteRange(NamedTuple):
    """The bytes ``[start, stop)`` of a piece of memory. With a ``pitch`` only those that lie less
    than ``width`` bytes after a multiple of it, from ``start`` on, and perhaps not all of them."""

    start: int
    stop: int
    width: int
    pitch: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ByteRange:
        """Return the bytes of its storage that ``tensor`` lies in."""
        size, count = tensor.element_size(), tensor.numel()
        start = int(tensor.storage_offset()) * size
        if count == 0:
            return cls(0, 0, 0)
        if tensor.is_contiguous():
            return cls(start, start + count * size, count * size)
        width, pitch, last = size, 0, size
        # From the innermost dimension outwards: those without gaps make longer rows, and others
        # are steps from row to row.
        steps = zip(tensor.stride(), tensor.shape, strict=True)
        for stride, times in sorted((stride * size, times) for stride, times in steps if times > 1):
            last += stride * (times - 1)
            if pitch or stride > width:
                pitch = gcd(pitch, stride)
            else:
                width = last
        return cls(start, start + last, width, pitch)

    def overlaps(self, other: ByteRange) -> bool:
        """Return whether the two may share bytes."""
        if self.start >= other.stop or other.start >= self.stop:
            return False
        pitch = gcd(self.pitch, other.pitch)
        if not pitch:
            return True
        offset = (other.start - self.start) % pitch
        return offset < self.width or offset + other.width > pitch

    def covers(self, other: ByteRange) -> bool:
        """Return whether this has all bytes of ``other``, as far as is known."""
        if self.pitch:
            return self == other
        return self.start <= other.start and other.stop <= self.stop


class Access(NamedTuple):
    """An operation reads or writes a ``byte_range`` of a piece of memory."""

    stamp: Stamp
    operation: str
    site: Site
    writes: bool
    byte_range: ByteRange
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
            if (
                (access.writes or earlier.writes)
                and not queue.knows(earlier.stamp)
                and access.byte_range.overlaps(earlier.byte_range)
            ):
                yield earlier

    def note(self, access: Access) -> None:
        """Remember ``access``. Forget an earlier one if every later access that conflicts with it
        also conflicts with ``access``."""
        mine = access.stamp.queue
        self.accesses = [
            earlier
            for earlier in self.accesses
            if not (access.writes or (earlier.stamp.queue == mine and not earlier.writes))
            or not access.byte_range.covers(earlier.byte_range)
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
        whole = max(self.nbytes, 1)
        self.accesses.extend(
            access._replace(byte_range=ByteRange(0, whole, whole)) for access in accesses
        )
