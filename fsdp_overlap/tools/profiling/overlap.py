"""Overlap of one rank's communication with its compute."""

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from fsdp_overlap.tools.profiling.backends import Compute
from fsdp_overlap.tools.profiling.intervals import (
    Interval,
    clip,
    intersect,
    measure,
    subtract,
    union,
)
from fsdp_overlap.tools.profiling.names import Kind, Pass

EXPOSED_AT_MOST = 0.5
"""A collective counts as under compute only if at most this share of it is exposed."""
_LABELS = 3


@dataclass(frozen=True)
class Collective:
    """One collective on one rank. Times are in microseconds; moments are on the trace's clock.

    Args:
        kind: what it does: ``"other"`` if it neither gathers parameters nor reduces gradients.
        name: the unit it serves; for kind ``"other"``, the operation as the trace names it, or what
            it is for: ``"confirmation of blocks.0"``.
        pass_: the pass that issued it; None for kind ``"other"``.
        issued: when the host issued it; its start in flight where the trace does not say.
        spans: when it was in flight, as a union of intervals.
        exposed_spans: when this rank waited for it. Where the trace does not say, as on a GPU,
            where the stream waits and not the host: when it was in flight and this rank did not
            compute.
        overlapped: the part of ``duration`` in which this rank computed: on a GPU every kernel
            that is no collective, on a CPU every op on a thread that gloo does not own.
        room: how long this rank computed between issuing it and waiting for it. Where the trace
            does not say when it was waited for, its time in flight counts instead.
        under: the compute that ran meanwhile, by label, and how long; at most three, the longest
            first.
        held_up: the label of the compute that came after the longest wait for it; None if there was
            no such wait.
        nbytes: what traveled to this rank (all-gather) or from it; None where the trace does not
            say.
        lanes: the streams, or with gloo the threads, that it ran on.
        group: its process group; None where the trace does not say.
        engine: what issued it, ``"fsdp_overlap"`` or ``"FSDP"``; None if no engine did.
        blocks: whether the call that issued it did not return before it was done.
    """

    kind: Kind
    name: str
    pass_: Pass | None
    issued: float
    spans: tuple[Interval, ...]
    exposed_spans: tuple[Interval, ...]
    overlapped: float
    room: float
    under: tuple[tuple[str, float], ...]
    held_up: str | None
    nbytes: int | None
    lanes: tuple[str, ...]
    group: str | None
    engine: str | None
    blocks: bool

    @property
    def start(self) -> float:
        return self.spans[0][0]

    @property
    def duration(self) -> float:
        """Time in flight. On gloo this includes waiting for a slower rank."""
        return measure(self.spans)

    @property
    def exposed(self) -> float:
        return measure(self.exposed_spans)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second that this rank received or sent; None if unknown."""
        return self.nbytes / self.duration * 1e6 if self.nbytes and self.duration else None

    @property
    def ran_under_compute(self) -> bool:
        """Whether at least half of it was hidden, see `is_hidden`."""
        return self.is_hidden(EXPOSED_AT_MOST)

    def is_hidden(self, exposed_at_most: float) -> bool:
        """Return whether at most this share of its time in flight was exposed, and there was
        compute for as long as the rest of it.

        The second condition excludes collectives that had nothing to run under, such as the first
        gather of a pass, even if such a collective is over before the rank waits for it.
        """
        hidden = self.duration - self.exposed
        return min(hidden, self.room) >= (1 - exposed_at_most) * self.duration


@dataclass(frozen=True)
class Total:
    """Sums over collectives. Times in microseconds; collectives in flight together each count.

    Args:
        count: how many there are.
        under_compute: how many of them ran under compute.
        duration: time in flight.
        exposed: the part of it in which compute waited.
        nbytes: None unless it is known for each of them.
    """

    count: int
    under_compute: int
    duration: float
    exposed: float
    nbytes: int | None

    @property
    def hidden(self) -> float | None:
        """The part of the time in flight that was not exposed, 0 to 1; None if there was none."""
        return 1 - self.exposed / self.duration if self.duration else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second that a rank received or sent while one was in flight; None if unknown."""
        return self.nbytes / self.duration * 1e6 if self.nbytes and self.duration else None


@dataclass(frozen=True)
class RankReport:
    """What one rank did. Times in microseconds, of all its steps together.

    Args:
        rank: None where the trace does not say.
        world_size: None where the trace does not say.
        steps: how many the window holds; 1 if nobody says.
        window: from the first to the last moment that is counted, on the trace's clock.
        collectives: sorted by start.
        compute: sorted by start.
        gemms: the part of compute that multiplies matrices, as a union of intervals.
        engine: when an engine worked, for example to prepare a collective, as a union of intervals.
        unknown_kernels: kernels that may be collectives, which no name tells, and how long those of
            each name ran, the longest first. They do not count as collectives.
        other_devices: the devices in the trace that this report is not of, and how long their
            kernels ran.
        left_out: how many events of the trace had a duration that is negative or longer than a day.
    """

    rank: int | None
    world_size: int | None
    steps: int
    window: Interval
    collectives: tuple[Collective, ...]
    compute: tuple[Compute, ...]
    gemms: tuple[Interval, ...]
    engine: tuple[Interval, ...]
    unknown_kernels: tuple[tuple[str, float], ...]
    other_devices: tuple[tuple[str, float], ...]
    left_out: int

    @property
    def duration(self) -> float:
        return self.window[1] - self.window[0]

    @cached_property
    def compute_time(self) -> float:
        return measure(self._busy)

    @property
    def gemm_time(self) -> float:
        """The part of `compute_time` that multiplies matrices, by the ops that started it."""
        return measure(self.gemms)

    @cached_property
    def communication_time(self) -> float:
        """The time in which any collective was in flight."""
        return measure(union(span for c in self.collectives for span in c.spans))

    @cached_property
    def exposed_time(self) -> float:
        """The time in which any collective was exposed. What several share counts once."""
        return measure(self._waits)

    @cached_property
    def _busy(self) -> list[Interval]:
        return union((c.start, c.end) for c in self.compute)

    @cached_property
    def _waits(self) -> list[Interval]:
        return union(span for c in self.collectives for span in c.exposed_spans)

    def computed(self, start: float, end: float) -> float:
        """Return how long this rank computed between two moments."""
        return measure(clip(self._busy, start, end))

    @property
    def own_time(self) -> float:
        """The time in which this rank did not wait for communication, which may be a wait for other
        ranks."""
        return self.duration - self.exposed_time

    @property
    def engine_time(self) -> float:
        """The time in which this rank neither computed nor waited, but the engine issued or
        finished collectives."""
        return self.duration - measure(union([*self._waits, *self._busy])) - self.idle_time

    @cached_property
    def idle_time(self) -> float:
        """The time in which this rank neither computed nor waited, and the engine did not work."""
        return self.duration - measure(union([*self._waits, *self._busy, *self.engine]))

    @property
    def bound(self) -> float:
        """The larger of compute and communication: no schedule of the same work is shorter."""
        return max(self.compute_time, self.communication_time)

    def total(self, kind: Kind, pass_: Pass | None = None) -> Total:
        """Return the sums for one kind, in one pass or, with None, in both."""
        same = [c for c in self.collectives if c.kind == kind and pass_ in (None, c.pass_)]
        known = all(c.nbytes is not None for c in same)
        return Total(
            count=len(same),
            under_compute=sum(c.ran_under_compute for c in same),
            duration=sum(c.duration for c in same),
            exposed=sum(c.exposed for c in same),
            nbytes=sum(c.nbytes or 0 for c in same) if known else None,
        )

    @cached_property
    def passes(self) -> tuple[tuple[Collective, ...], ...]:
        """The collectives of units, pass by pass, in the order in which the host issued them: on a
        GPU the first gathers of a forward may run before the last reduction of the backward before.
        A forward ends where backward begins, or where a unit is gathered again."""
        passes: list[list[Collective]] = []
        seen: set[str] = set()
        for c in sorted(self.collectives, key=attrgetter("issued")):
            if c.kind == "other":
                continue
            again = c.pass_ == "forward" and c.name in seen
            if not passes or passes[-1][0].pass_ != c.pass_ or again:
                passes.append([])
                seen.clear()
            passes[-1].append(c)
            seen.add(c.name)
        return tuple(tuple(found) for found in passes)

    def compute_by_op(self) -> list[tuple[str, float]]:
        """Return how much of the compute each op took, the most first."""
        times: dict[str, float] = defaultdict(float)
        for c in self.compute:
            times[c.op] += c.end - c.start
        return sorted(times.items(), key=lambda item: -item[1])


class ComputeTimeline:
    """The compute of one rank, to measure what collectives ran beside."""

    def __init__(self, compute: Sequence[Compute]) -> None:
        self._compute = compute
        self._busy = union((c.start, c.end) for c in compute)
        self._lanes: dict[str, list[Compute]] = defaultdict(list)
        for c in compute:
            self._lanes[c.lane].append(c)

    def measure(
        self,
        spans: list[Interval],
        issued: float | None = None,
        wait: Interval | None = None,
        **fields: Any,
    ) -> Collective:
        """Return a collective that was in flight for ``spans``, with these other ``fields``.

        ``issued``, ``wait``: when the host issued it and when the rank's compute was held up to
        wait for it. None where the trace does not say, as of waits on a GPU.
        """
        start, end = spans[0][0], spans[-1][1]
        busy = clip(self._busy, start, end)
        exposed = intersect(spans, [wait]) if wait else subtract(spans, busy)
        issued = start if issued is None else issued
        room = clip(self._busy, issued, wait[0]) if wait else busy
        longest = max(exposed, key=lambda span: span[1] - span[0], default=None)
        return Collective(
            issued=issued,
            spans=tuple(spans),
            exposed_spans=tuple(exposed),
            overlapped=measure(intersect(spans, busy)),
            room=measure(room),
            under=self._under(spans),
            held_up=None if longest is None else self._label_after(longest[1]),
            **fields,
        )

    def _under(self, spans: list[Interval]) -> tuple[tuple[str, float], ...]:
        parts: dict[str, list[Interval]] = {}
        for lane in self._lanes.values():
            for start, end in spans:
                # Stretches on one lane end in the order in which they start.
                first = bisect.bisect_right(lane, start, key=attrgetter("end"))
                for c in lane[first : bisect.bisect_left(lane, end, key=attrgetter("start"))]:
                    parts.setdefault(c.label, []).append((max(c.start, start), min(c.end, end)))
        times = {label: measure(union(found)) for label, found in parts.items()}
        return tuple(sorted(times.items(), key=lambda item: -item[1])[:_LABELS])

    def _label_after(self, time: float) -> str | None:
        k = bisect.bisect_left(self._compute, time, key=attrgetter("start"))
        return self._compute[k].label if k < len(self._compute) else None
