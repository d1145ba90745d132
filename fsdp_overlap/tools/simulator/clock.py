"""The time of what an emulated device runs: compute on streams, collectives on links."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from operator import attrgetter

import torch.distributed as dist

from fsdp_overlap.tools.emulator import Operation, active
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.profiling.intervals import Interval, clip, measure, union
from fsdp_overlap.tools.simulator.costs import Costs
from fsdp_overlap.tools.simulator.fusion import Fusion


@dataclass
class TimedOperation:
    """An operation on a stream. Times in seconds since the device's start."""

    name: str
    stream: int
    enqueued: float
    start: float
    end: float
    group: str = ""
    """The process group of a collective."""
    given: int = 0
    """Bytes that a collective reads on this rank; ``got``: that it writes."""
    got: int = 0


@dataclass
class Row:
    """Compute on a stream without a pause, and its last operation."""

    start: float
    end: float
    last: TimedOperation


class LinkSchedule:
    """A link, which collectives share. It is given to whoever is ready first, so what one takes is
    time that others do not have."""

    def __init__(self) -> None:
        self.busy: list[Interval] = []

    def reserve(self, ready: float, seconds: float) -> float:
        """Return when a collective ends that needs the link for ``seconds`` and is ready at
        ``ready``. It may begin before one that was enqueued earlier and is ready later."""
        k = bisect.bisect_right(self.busy, ready, key=_end)
        start = at = ready
        first = k
        left = seconds
        while k < len(self.busy):
            begin, end = self.busy[k]
            if begin > at and begin - at >= left:
                break
            left -= max(0.0, begin - at)
            at = max(at, end)
            k += 1
        end = at + left
        if k > first:  # it filled gaps: they are one interval now
            start = min(start, self.busy[first][0])
        self.busy[first:k] = [(start, end)]
        return end


@dataclass
class Clock:
    """Says when operations end, and records them."""

    costs: Costs
    computed: float = 0.0
    """Seconds of compute so far, as if it had been alone."""
    ran: list[TimedOperation] = field(default_factory=list)
    links: dict[str, LinkSchedule] = field(default_factory=dict)
    pace: float = 1.0
    """How many times as long compute takes on this device as the costs say."""
    ended: dict[str, float] = field(default_factory=dict)
    """When the last collective of each process group ends."""
    rows: dict[Queue, list[Row]] = field(default_factory=dict)
    """The compute of each stream."""
    fusion: Fusion = field(default_factory=lambda: Fusion(lambda storage: None))
    fuses: bool = True
    """Whether operations are fused now, if the costs have them fused."""

    def on_host(self, operation: Operation) -> float:
        if self.is_fused(operation) and self.fusion.is_open(active().current):
            return 0.0  # the kernel is enqueued
        return self.costs.on_host(operation)

    def end(self, operation: Operation, stream: Queue, enqueued: float, ready: float) -> float:
        if self.is_fused(operation):
            seconds = self.costs.compiled(operation, stream, self.fusion)
            return self._compute(operation.name, stream, enqueued, ready, seconds)
        if self.costs.compiles:
            written = self.costs.write_inputs(operation, stream, self.fusion)
            if written:
                ready = self._compute("write", stream, enqueued, ready, written)
        if operation.group is not None:
            return self._collective(operation, operation.group, stream, enqueued, ready)
        seconds = self.costs.compute(operation)
        return self._compute(operation.name, stream, enqueued, ready, seconds)

    def is_fused(self, operation: Operation) -> bool:
        """Return whether ``operation`` becomes a part of a kernel."""
        return self.fuses and self.costs.is_fused(operation)

    def _compute(
        self, name: str, stream: Queue, enqueued: float, ready: float, seconds: float
    ) -> float:
        seconds *= self.pace
        self.computed += seconds
        end = self._disturbed(ready, seconds)
        ran = TimedOperation(name, stream.index, enqueued, ready, end)
        self.ran.append(ran)
        rows = self.rows.setdefault(stream, [])
        if rows and ready <= rows[-1].end:
            rows[-1].end, rows[-1].last = end, ran
        else:
            rows.append(Row(ready, end, ran))
        return end

    def _collective(
        self,
        operation: Operation,
        group: dist.ProcessGroup,
        stream: Queue,
        enqueued: float,
        ready: float,
    ) -> float:
        ranks, name = dist.get_process_group_ranks(group), group.group_name
        # NCCL runs the collectives of a communicator one after the other, on whatever streams.
        ready = max(ready, self.ended.get(name, 0.0))
        link = self.links.setdefault(self.costs.link(ranks), LinkSchedule())
        busy = self._busy_after(ready)
        end = self.ended[name] = link.reserve(ready, self.costs.collective(operation, ranks))
        self._delay(ready, busy)
        given, got = (sum(t.nbytes for t in each) for each in (operation.reads, operation.writes))
        ran = TimedOperation(operation.name, stream.index, enqueued, ready, end, name, given, got)
        self.ran.append(ran)
        return end

    def _disturbed(self, start: float, seconds: float) -> float:
        """Return when compute ends that would last ``seconds`` if no collective were under way."""
        slower = 1.0 + self.costs.slowdown
        if slower == 1.0:
            return start + seconds
        at = start
        for begin, end in self._busy_after(start):
            quiet = max(0.0, begin - at)
            if quiet >= seconds:
                break
            seconds -= quiet
            at = max(at, begin)
            if (end - at) / slower >= seconds:
                return at + seconds * slower
            seconds -= (end - at) / slower
            at = end
        return at + seconds

    def _delay(self, since: float, busy_before: list[Interval]) -> None:
        """Let compute that is enqueued already end later, as far as links are now busy beside it
        that were not before. Pauses of a stream take that up. What else waits for such compute has
        been told its end, and does not learn of this."""
        lost = 1.0 - 1.0 / (1.0 + self.costs.slowdown)  # of a second beside a collective
        if not lost:
            return
        busy = self._busy_after(since)
        for stream, rows in self.rows.items():
            end = 0.0
            for row in rows[bisect.bisect_right(rows, since, key=attrgetter("end")) :]:
                more = _overlap(row, busy) - _overlap(row, busy_before)
                row.end += max(0.0, end - row.start) + lost * more
                row.last.end = end = row.end
            stream.ends = max(stream.ends, end)

    def _busy_after(self, start: float) -> list[Interval]:
        """Return when any link is busy, from ``start`` on."""
        return union(
            (max(begin, start), end)
            for link in self.links.values()
            for begin, end in link.busy[bisect.bisect_right(link.busy, start, key=_end) :]
        )


def _end(interval: Interval) -> float:
    return interval[1]


def _overlap(row: Row, busy: list[Interval]) -> float:
    return measure(clip(busy, row.start, row.end))
