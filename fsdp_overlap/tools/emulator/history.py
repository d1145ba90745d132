"""Recent operations and waits of each queue, for the timeline of a finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from fsdp_overlap.tools.emulator.queues import Enqueued, Moment, Queue, Stamp, Waited
from fsdp_overlap.tools.emulator.sites import Site

AROUND = 10
"""The entries before and after an access that its timeline has."""


@dataclass(eq=False)
class Timeline:
    """What was enqueued around the two accesses of a finding, in the order of enqueueing."""

    queues: Sequence[Queue]
    first: int
    """The number of the entry of the earlier access; 0 if that is too long ago to be known."""
    second: int
    entries: list[Enqueued | Waited]
    to_come: int = AROUND
    """How many of the next entries are still to be added."""

    @property
    def lanes(self) -> dict[int, str]:
        """The names of all queues, by index."""
        return {queue.index: queue.name for queue in self.queues}


class History:
    """Numbers what is enqueued, and keeps the last entries of each queue."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._queues = queues
        self._numbers = count(1)
        self._growing: list[Timeline] = []

    def enqueue(self, queue: Queue, operation: str, site: Site) -> None:
        """Note what ``queue`` does next."""
        tick = queue.clock.get(queue.index, 0) + 1
        entry = Enqueued(next(self._numbers), queue.index, tick, operation, site)
        queue.recent.append(entry)
        if self._growing:
            self._grow(entry)

    def wait(self, queue: Queue, moment: Moment, site: Site) -> None:
        """Note that ``queue`` waits for ``moment``."""
        source = moment.source
        tick = moment.clock.get(source, 0)
        entry = Waited(next(self._numbers), queue.index, source, tick, site)
        queue.waits[source] = entry
        queue.recent.append(entry)
        if self._growing:
            self._grow(entry)

    def timeline(self, first: Stamp, second: Stamp) -> Timeline:
        """Return what was enqueued around two operations, of which ``second`` is the last one that
        was. It grows by what comes next."""
        entries: list[Enqueued | Waited] = sorted(
            entry for queue in self._queues for entry in queue.recent
        )
        earlier, later = _position(entries, first), _position(entries, second)
        kept = range(later - AROUND, later + 1)
        around = range(earlier - AROUND, earlier + AROUND + 1) if earlier >= 0 else range(0)
        timeline = Timeline(
            self._queues,
            entries[earlier].number if earlier >= 0 else 0,
            entries[later].number if later >= 0 else 0,
            [entry for at, entry in enumerate(entries) if at in kept or at in around],
        )
        self._growing.append(timeline)
        return timeline

    def _grow(self, entry: Enqueued | Waited) -> None:
        for timeline in self._growing:
            timeline.entries.append(entry)
            timeline.to_come -= 1
        self._growing = [timeline for timeline in self._growing if timeline.to_come]


def _position(entries: Sequence[Enqueued | Waited], stamp: Stamp) -> int:
    """Return which of ``entries`` is the operation ``stamp``; -1 if none is. An operation has a
    stamp for what it reads, and another one for what it writes."""
    found = -1
    for at, entry in enumerate(entries):
        is_operation = isinstance(entry, Enqueued) and entry.queue == stamp.queue
        if is_operation and entry.tick <= stamp.tick:
            found = at
    return found
