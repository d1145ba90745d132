"""What an engine's marks say of a moment: what is issued, what is waited for, whose pass runs."""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fsdp_overlap.profiling.events import Event
from fsdp_overlap.profiling.intervals import Interval
from fsdp_overlap.profiling.names import Mark

OPTIMIZER = "optimizer"
ELSEWHERE = "outside units"


class Ranges:
    """Finds the range around an event on the event's own thread. Ranges must not nest."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_thread: dict[Any, list[Event]] = defaultdict(list)
        for e in sorted(events, key=_start):
            self._by_thread[e.thread].append(e)

    def around(self, event: Event) -> Event | None:
        """The range in which `event` starts."""
        ranges = self._by_thread.get(event.thread, [])
        k = bisect.bisect_right(ranges, event.start, key=_start) - 1
        return ranges[k] if k >= 0 and event.start <= ranges[k].end else None


class Phases:
    """Whose part of which pass a thread computes at a moment: "forward blocks.0"."""

    def __init__(
        self, marked: Iterable[tuple[Event, Mark]], optimizer_steps: Iterable[Event]
    ) -> None:
        changes: dict[Any, list[tuple[float, bool, str]]] = defaultdict(list)
        for event, mark in marked:
            turn, _, pass_ = mark.role.partition(" ")
            if pass_:
                change = event.start, turn == "begin", f"{pass_} {mark.unit}"
                changes[event.thread].append(change)
        for step in optimizer_steps:
            changes[step.thread] += [(step.start, True, OPTIMIZER), (step.end, False, OPTIMIZER)]
        self._times: dict[Any, list[float]] = {}
        self._labels: dict[Any, list[str]] = {}
        for thread, at_thread in changes.items():
            at_thread.sort()
            self._times[thread] = [at for at, _, _ in at_thread]
            self._labels[thread] = _innermost(at_thread)

    def at(self, thread: Any, time: float) -> str:
        """The innermost, `ELSEWHERE` if there is none."""
        k = bisect.bisect_right(self._times.get(thread, []), time)
        return self._labels[thread][k - 1] if k else ELSEWHERE


def _innermost(changes: list[tuple[float, bool, str]]) -> list[str]:
    """The label from each change on."""
    labels: list[str] = []
    under_way: list[str] = []
    for _, begins, label in changes:
        if begins:
            under_way.append(label)
        elif label in under_way:  # or it began before the trace
            del under_way[len(under_way) - 1 - under_way[::-1].index(label)]
        labels.append(under_way[-1] if under_way else ELSEWHERE)
    return labels


class Waits:
    """Finds the wait that belongs to an issue: the first after it, and before the next issue of the
    same."""

    def __init__(self, marked: Iterable[tuple[Event, Mark]]) -> None:
        self._issues: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._waits: dict[tuple[str, str], list[Interval]] = defaultdict(list)
        for event, mark in sorted(marked, key=lambda pair: pair[0].start):
            key = (mark.operation, mark.unit)
            if mark.role == "issue":
                self._issues[key].append(event.start)
            elif mark.role == "wait":
                self._waits[key].append((event.start, event.end))

    def of(self, issue: Event, mark: Mark) -> Interval | None:
        key = (mark.operation, mark.unit)
        issues, waits = self._issues[key], self._waits[key]
        k = bisect.bisect_left(waits, (issue.start, issue.start))
        following = bisect.bisect_right(issues, issue.start)
        if k == len(waits) or (following < len(issues) and issues[following] < waits[k][0]):
            return None
        return waits[k]


def _start(event: Event) -> float:
    return event.start
