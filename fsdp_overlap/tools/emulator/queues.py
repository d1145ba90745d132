"""Streams and happens-before (vector clocks)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_overlap.tools.emulator.sites import Site

Clock = dict[int, int]
"""How many operations of each queue, by its index, are known to be done."""


class Stamp(NamedTuple):
    """An operation: the ``tick``-th of queue ``queue``."""

    queue: int
    tick: int


class Enqueued(NamedTuple):
    """The operation that took place ``number`` of all that was enqueued. It may have several ticks
    of its queue, of which ``tick`` is the first."""

    number: int
    queue: int
    tick: int
    operation: str
    site: Site


class Waited(NamedTuple):
    """A wait for the first ``tick`` operations of queue ``source``."""

    number: int
    queue: int
    source: int
    tick: int
    site: Site


RECENT = 64
"""The operations and waits of each queue that are kept for the timelines of findings."""


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
    made_at: Site = field(default_factory=Site)
    group: str = ""
    """The process group whose collectives it runs, if it was made for one."""
    is_of_graph: bool = False
    """Whether what it runs are replays of a graph."""
    recent: deque[Enqueued | Waited] = field(default_factory=lambda: deque(maxlen=RECENT))
    waits: dict[int, Waited] = field(default_factory=dict)
    """The last wait for each queue that was waited for by itself."""

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
    source: int = -1
    """The index of the queue."""

    @classmethod
    def of(cls, queue: Queue) -> Moment:
        return cls(dict(queue.clock), queue.ends, queue.index)
