"""Queues, which do one thing after the other, and what is known to come before what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[int, int]
"""How many operations of each queue, by its index, are known to be done."""


class Stamp(NamedTuple):
    """An operation: the ``tick``-th of queue ``queue``."""

    queue: int
    tick: int


@dataclass(eq=False)
class Queue:
    """A stream, or the host. Its clock is a vector clock: an operation comes before what is
    enqueued next exactly if the clock counts it."""

    index: int
    name: str
    clock: Clock = field(default_factory=dict)
    ends: float = 0.0
    """When the last operation ends, in emulated seconds."""
    is_captured: bool = False
    """Whether what is enqueued is captured in a graph."""
    device: int = 0
    """The number of the device that it is a stream of."""

    def knows(self, stamp: Stamp) -> bool:
        """Return whether ``stamp`` comes before what is enqueued next."""
        return stamp.tick <= self.clock.get(stamp.queue, 0)

    def learn(self, clock: Clock, ends: float) -> None:
        """Order what is enqueued from now on after all that ``clock`` counts, which ends at
        ``ends``."""
        mine = self.clock
        for queue, tick in clock.items():
            if tick > mine.get(queue, 0):
                mine[queue] = tick
        self.ends = max(self.ends, ends)

    def add(self) -> Stamp:
        """Enqueue an operation."""
        tick = self.clock.get(self.index, 0) + 1
        self.clock[self.index] = tick
        return Stamp(self.index, tick)


@dataclass(frozen=True)
class Moment:
    """All that was enqueued on a queue when the moment was taken, and all that comes before it."""

    clock: Clock
    ends: float

    @classmethod
    def of(cls, queue: Queue) -> Moment:
        return cls(dict(queue.clock), queue.ends)
