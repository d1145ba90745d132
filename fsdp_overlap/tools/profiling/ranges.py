"""Ranges that engines mark in a trace: what is issued or waited for at a moment, and which pass
runs."""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_overlap.tools.profiling.events import TraceEvent
from fsdp_overlap.tools.profiling.intervals import Interval, clip, covers, subtract, union
from fsdp_overlap.tools.profiling.names import CHECK, EngineMark

OPTIMIZER = "optimizer"
ELSEWHERE = "outside units"


class Ranges:
    """Finds the range around an event on the event's own thread. Ranges must not nest."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self._by_thread: dict[Any, list[TraceEvent]] = defaultdict(list)
        for e in sorted(events, key=_start):
            self._by_thread[e.thread].append(e)

    def around(self, event: TraceEvent) -> TraceEvent | None:
        """Return the range in which `event` starts."""
        ranges = self._by_thread.get(event.thread, [])
        k = bisect.bisect_right(ranges, event.start, key=_start) - 1
        return ranges[k] if k >= 0 and event.start <= ranges[k].end else None


class EngineRanges:
    """When an engine itself works on a thread, from the ranges that it marks."""

    def __init__(self, ranges: Iterable[TraceEvent]) -> None:
        spans: dict[Any, list[Interval]] = defaultdict(list)
        for e in ranges:
            spans[e.thread].append((e.start, e.end))
        self._by_thread = {thread: union(found) for thread, found in spans.items()}

    def covers(self, event: TraceEvent) -> bool:
        """Return whether `event` starts while the engine works on its thread."""
        return covers(self._by_thread.get(event.thread, []), event.start)

    def outside(self, event: TraceEvent) -> list[Interval]:
        """Return the parts of `event` in which the engine does not work."""
        busy = clip(self._by_thread.get(event.thread, []), event.start, event.end)
        return subtract([(event.start, event.end)], busy)

    def spans(self) -> list[Interval]:
        """Return when the engine works, on any thread."""
        return union(span for spans in self._by_thread.values() for span in spans)


class Phases:
    """Which pass of which unit a thread computes at a moment: "forward blocks.0". What activation
    checkpointing recomputes is a part of the backward that it is recomputed for."""

    def __init__(
        self,
        marked: Iterable[tuple[TraceEvent, EngineMark]],
        optimizer_steps: Iterable[TraceEvent],
        backward: Mapping[Any, list[Interval]],
    ) -> None:
        changes: dict[Any, list[tuple[float, bool, str]]] = defaultdict(list)
        for event, mark in marked:
            turn, _, pass_ = mark.role.partition(" ")
            is_recomputed = pass_ == "forward" and covers(backward[event.thread], event.start)
            if pass_ and not is_recomputed:
                change = event.start, turn == "begin", f"{pass_} {mark.unit}"
                changes[event.thread].append(change)
        for step in optimizer_steps:
            changes[step.thread] += [(step.start, True, OPTIMIZER), (step.end, False, OPTIMIZER)]
        self._times: dict[Any, list[float]] = {}
        self._labels: dict[Any, list[str]] = {}
        for thread, at_thread in changes.items():
            # Changes at one moment, as where an emulated host takes no time, are in order already.
            at_thread.sort(key=lambda change: change[:2])
            self._times[thread] = [at for at, _, _ in at_thread]
            self._labels[thread] = _innermost(at_thread)

    def at(self, thread: Any, time: float) -> str:
        """Return the innermost pass and unit; `ELSEWHERE` if there is none."""
        k = bisect.bisect_right(self._times.get(thread, []), time)
        return self._labels[thread][k - 1] if k else ELSEWHERE


def _innermost(changes: list[tuple[float, bool, str]]) -> list[str]:
    """Return the label from each change on."""
    labels: list[str] = []
    under_way: list[str] = []
    for _, begins, label in changes:
        if begins:
            under_way.append(label)
        elif label in under_way:  # else it began before the trace
            del under_way[len(under_way) - 1 - under_way[::-1].index(label)]
        labels.append(under_way[-1] if under_way else ELSEWHERE)
    return labels


class Waits:
    """Finds the wait that belongs to an issue. Each issue is waited for once. Of several with one
    name (from two models), the first issued is taken to be waited for first."""

    def __init__(self, marked: Iterable[tuple[TraceEvent, EngineMark]]) -> None:
        issues: dict[tuple[str, str], list[TraceEvent]] = defaultdict(list)
        waits: dict[tuple[str, str], list[TraceEvent]] = defaultdict(list)
        for event, mark in sorted(marked, key=lambda pair: pair[0].start):
            if mark.role in ("issue", "wait"):
                found = issues if mark.role == "issue" else waits
                found[mark.operation, mark.unit].append(event)
        self._of: dict[int, Interval] = {}
        # The issue of a confirmation is not marked: only the wait for it, on the same thread, is.
        self._confirmations = [
            (event, unit)
            for (operation, unit), found in waits.items()
            if operation == CHECK and unit
            for event in found
        ]
        for key, issued in issues.items():
            following = iter(waits[key])
            for issue in issued:
                # An earlier wait belongs to what was issued before the trace began.
                wait = next((wait for wait in following if wait.start >= issue.start), None)
                if wait is not None:
                    self._of[id(issue)] = wait.start, wait.end

    def of(self, issue: TraceEvent) -> Interval | None:
        return self._of.get(id(issue))

    def confirmations(self, issuers: Iterable[TraceEvent]) -> dict[int, tuple[str, Interval]]:
        """Return the ops that issued a confirmation, by id, each with the unit that it is for and
        the wait. Such an op is the last one called before the wait on the wait's thread."""
        found = {}
        called: dict[Any, list[TraceEvent]] = defaultdict(list)
        for issuer in sorted(issuers, key=_start):
            called[issuer.thread].append(issuer)
        for wait, unit in self._confirmations:
            k = bisect.bisect(called[wait.thread], wait.start, key=_start)
            if k:
                found[id(called[wait.thread][k - 1])] = unit, (wait.start, wait.end)
        return found


def _start(event: TraceEvent) -> float:
    return event.start
