"""How much communication ran under compute, from a torch.profiler Chrome trace."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsdp_overlap.profiling.intervals import Interval, intersect, measure, subtract, union
from fsdp_overlap.profiling.trace import Kind, Pass, Timeline, read_timeline

# See Collective.ran_under_compute.
UNDER_COMPUTE = 0.5


@dataclass(frozen=True)
class Collective:
    """One collective of one unit on one rank. Times in microseconds; `start` is on the trace's
    clock.

    duration: time in flight, the union of its pieces. On gloo this includes waiting for a slower
    rank.
    overlapped: the part of `duration` in which this rank computed (see `read_timeline` for what
    counts).
    exposed: the part in which this rank waited for it. Where the trace does not say so, as on a
    GPU, where it is the stream that waits: the part in which this rank did not compute.
    room: how long this rank computed between issuing it and waiting for it; where the trace does
    not say when that was, while it was in flight.
    name, pass_: as in `InFlight`.
    """

    kind: Kind
    name: str
    pass_: Pass | None
    start: float
    duration: float
    overlapped: float
    exposed: float
    room: float

    @property
    def ran_under_compute(self) -> bool:
        """Whether at least half of its time in flight was not exposed, and there was compute for at
        least as long to hide it.

        The second keeps out what had nothing to run under, such as the first gather of a pass, even
        if it is over before the rank has come from issuing it to waiting for it.
        """
        hidden = self.duration - self.exposed
        return min(hidden, self.room) >= UNDER_COMPUTE * self.duration


@dataclass(frozen=True)
class Total:
    """Sums over collectives. Times in microseconds; collectives in flight together each count."""

    count: int
    under_compute: int
    duration: float
    exposed: float


@dataclass(frozen=True)
class OverlapSummary:
    """The collectives of one rank by start.

    exposed: microseconds in which any was exposed; moments that several share count once.
    """

    collectives: tuple[Collective, ...]
    exposed: float

    def total(self, kind: Kind, pass_: Pass | None = None) -> Total:
        """The sums for one kind, of one pass or (None) of both."""
        return _sum(c for c in self.collectives if c.kind == kind and pass_ in (None, c.pass_))


def summarize_overlap(trace: str | os.PathLike[str] | dict[str, Any]) -> OverlapSummary:
    """The overlap summary of one rank's Chrome trace, given as a path or as the loaded JSON
    object."""
    return summarize_timeline(read_timeline(trace))


def summarize_timeline(timeline: Timeline) -> OverlapSummary:
    compute = list(timeline.compute)
    collectives: list[Collective] = []
    all_exposed: list[Interval] = []
    for c in timeline.collectives:
        spans = list(c.spans)
        exposed = intersect(spans, [c.wait]) if c.wait else subtract(spans, compute)
        all_exposed += exposed
        issued = spans[0][0] if c.issued is None else c.issued
        needed = c.wait[0] if c.wait else spans[-1][1]
        collectives.append(
            Collective(
                kind=c.kind,
                name=c.name,
                pass_=c.pass_,
                start=spans[0][0],
                duration=measure(spans),
                overlapped=measure(intersect(spans, compute)),
                exposed=measure(exposed),
                room=measure(intersect(union([(issued, needed)]), compute)),
            )
        )
    return OverlapSummary(tuple(collectives), measure(union(all_exposed)))


def render_overlap(summary: OverlapSummary) -> str:
    """A plain-text table, a line for each kind and pass; times in milliseconds."""
    rows = [("collective", "pass", "ran", "under compute", "in flight ms", "exposed ms")]
    sums = {
        ("all-gather", "forward"): summary.total("all_gather", "forward"),
        ("all-gather", "backward"): summary.total("all_gather", "backward"),
        ("reduce-scatter", "backward"): summary.total("reduce_scatter"),
        ("other", ""): summary.total("other"),
    }
    for (kind, pass_), s in sums.items():
        times = f"{s.duration / 1e3:.1f}", f"{s.exposed / 1e3:.1f}"
        rows.append((kind, pass_, str(s.count), str(s.under_compute), *times))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.append(f"exposed communication time: {summary.exposed / 1e3:.1f} ms")
    return "\n".join(line.rstrip() for line in lines)


def _sum(collectives: Iterable[Collective]) -> Total:
    chosen = list(collectives)
    return Total(
        count=len(chosen),
        under_compute=sum(c.ran_under_compute for c in chosen),
        duration=sum(c.duration for c in chosen),
        exposed=sum(c.exposed for c in chosen),
    )
