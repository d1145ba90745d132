"""The timeline of one rank, from its torch.profiler trace: collectives in flight, and compute.

Engines mark in a trace what they issue, what they wait for, and where a unit's forward and backward
begin and end (see `names.py`). What was in flight is recorded elsewhere, and is traced back to the
range that issued it:

- **CUDA**: kernels of collectives, by what they carry and by their names (see `kernel_names.py`). A
  kernel's correlation id names the runtime call that launched it. The issue range around that call,
  on the call's thread, issued the kernel.
- **CPU**: gloo writes a range `gloo:<operation>` on a thread of its own, without a link to what
  issued it. A group starts operations in the order in which they were issued, so the k-th range of
  an operation belongs to its k-th `c10d::` op. Where two start at one moment, neighbors may be
  taken for each other; and where several groups run the same operation at once, one that comes out
  of turn shifts all that is queued behind it.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from fsdp_overlap.tools.profiling.backends import (
    BackendRecords,
    CollectiveActivity,
    read_cpu,
    read_cuda,
)
from fsdp_overlap.tools.profiling.events import Progress, TraceEvent, read_trace
from fsdp_overlap.tools.profiling.intervals import Interval, clip, covers, union
from fsdp_overlap.tools.profiling.kernel_names import short_name
from fsdp_overlap.tools.profiling.names import (
    CONFIRMATION,
    END_OF_BACKWARD,
    OPTIMIZER_STEP,
    OWN_ENGINE,
    PREFIXES,
    PROFILER_STEP,
    EngineMark,
    Kind,
    Pass,
    read_mark,
)
from fsdp_overlap.tools.profiling.overlap import Collective, ComputeTimeline, RankReport
from fsdp_overlap.tools.profiling.ranges import EngineRanges, Phases, Ranges, Waits

_CATEGORIES = {"cpu_op", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy"}
_OF_BACKWARD = (
    "autograd::engine::evaluate_function",
    *(prefix + END_OF_BACKWARD for prefix in PREFIXES),
)
_ANNOTATIONS = (*PREFIXES, OPTIMIZER_STEP, PROFILER_STEP, "gloo:")


def read_rank(
    source: Any, steps: int | None = None, progress: Progress | None = None
) -> RankReport:
    """Return what one rank did, from whatever `read_trace` reads. `steps`: how many the trace
    holds; None for as many as it says itself.

    On a GPU, compute is every kernel that is no collective; on a CPU, every op on a thread that
    gloo does not own. What is launched or run in an engine's own ranges does not count on either.

    Raises:
        ValueError: it is not such a trace, holds calls of collectives but none in flight, or
            collectives of several devices.
    """
    events, about, left_out = read_trace(source, _is_of_use, progress)
    marked = [
        (event, mark)
        for event in events
        if event.category == "user_annotation" and (mark := read_mark(event.name))
    ]
    issues = Ranges(event for event, mark in marked if mark.role == "issue")
    step_ranges = [e for e in events if e.name.startswith((OPTIMIZER_STEP, PROFILER_STEP))]
    backward = _backward(events)
    engine = EngineRanges(
        e for e in events if e.name.startswith(PREFIXES) and e.category == "user_annotation"
    )
    phases = Phases(marked, [e for e in step_ranges if e.name.startswith(OPTIMIZER_STEP)], backward)
    if any(e.category == "kernel" for e in events):
        recorded = read_cuda(events, engine, phases)
        waits = None  # the marks show when the host waits, but here the stream waits
    else:
        recorded = read_cpu(events, engine, phases)
        waits = Waits(marked)
    marks = [event for event, _ in marked]
    start, end = window = _window(marks + step_ranges, recorded)
    compute = [c for c in recorded.compute if start <= c.start and c.end <= end]
    grouping = _Grouping(ComputeTimeline(compute), issues, backward, waits)
    collectives = sorted(grouping.collectives(recorded.activities), key=lambda c: c.spans[0])
    distributed = about.get("distributedInfo") or {}
    if distributed.get("world_size") != 1:
        _check_complete(events, issues, collectives)
    return RankReport(
        rank=distributed.get("rank"),
        world_size=distributed.get("world_size"),
        steps=steps or _count_steps(step_ranges, marks) or 1,
        window=window,
        collectives=tuple(c for c in collectives if start <= c.start and c.spans[-1][1] <= end),
        compute=tuple(compute),
        gemms=tuple(clip(recorded.gemms, start, end)),
        engine=tuple(clip(recorded.engine, start, end)),
        unknown_kernels=_times(e for e in recorded.unknown if start <= e.start),
        other_devices=tuple(sorted(recorded.other_devices.items())),
        left_out=left_out,
    )


def _times(kernels: Iterable[TraceEvent]) -> tuple[tuple[str, float], ...]:
    times: dict[str, float] = defaultdict(float)
    for e in kernels:
        times[short_name(e.name)] += e.end - e.start
    return tuple(sorted(times.items(), key=lambda item: -item[1]))


def _is_of_use(category: str, name: str) -> bool:
    if category == "user_annotation":
        return name.startswith(_ANNOTATIONS)
    return category in _CATEGORIES or name.startswith("gloo:")


def _check_complete(
    events: list[TraceEvent], issues: Ranges, collectives: list[Collective]
) -> None:
    called = [e for e in events if e.name.startswith("c10d::") and issues.around(e)]
    if called and all(c.kind == "other" for c in collectives):
        raise ValueError(
            f"the trace holds {len(called)} calls of collectives and none in flight: profile with "
            "ProfilerActivity.CUDA where they run on a GPU. If that was done, unset "
            "TORCH_NCCL_USE_COMM_NONBLOCKING, by which another thread launches them, and NCCL's "
            "zero-CTA policy, by which copies do their work, which no report tells from others"
        )


def _window(marks: list[TraceEvent], recorded: BackendRecords) -> Interval:
    """Return the time from the first mark to the end of what the host started, which on a GPU is
    later than the marks. Barriers, which programs put around what they profile, do not count."""
    in_flight = [(p.start, p.end) for p in recorded.activities if p.operation != "barrier"]
    spans = in_flight + [(c.start, c.end) for c in recorded.compute]
    spans = spans or [(p.start, p.end) for p in recorded.activities] or [(0.0, 0.0)]
    start = min((e.start for e in marks), default=min(start for start, _ in spans))
    return start, max(end for _, end in spans)


def _count_steps(steps: list[TraceEvent], marks: list[TraceEvent]) -> int | None:
    """Count the profiler's steps in which anything happened. If there are none, count the
    optimizers' steps, where all steps between two passes are one."""
    starts = sorted(e.start for e in marks)
    optimizers = sorted(e.start for e in steps if e.name.startswith(OPTIMIZER_STEP))
    profiled = [e for e in steps if e.name.startswith(PROFILER_STEP)]
    if profiled:
        moments = sorted(starts + optimizers)
        return sum(
            bisect.bisect(moments, e.start) < bisect.bisect(moments, e.end) for e in profiled
        )
    if not starts:
        return max(Counter(e.name for e in steps).values(), default=None)
    # Steps between the same two marks count once.
    return len({bisect.bisect(starts, at) for at in optimizers}) or None


class _Grouping:
    """Makes one collective of all activities that one issue range issued."""

    def __init__(
        self,
        compute: ComputeTimeline,
        issues: Ranges,
        backward: dict[Any, list[Interval]],
        waits: Waits | None,
    ) -> None:
        self._compute, self._issues = compute, issues
        self._backward, self._waits = backward, waits

    def collectives(self, activities: list[CollectiveActivity]) -> Iterator[Collective]:
        by_issue: dict[int, tuple[TraceEvent, list[CollectiveActivity]]] = {}
        others: list[CollectiveActivity] = []
        for activity in activities:
            issue = self._issues.around(activity.issuer) if activity.issuer else None
            if issue is None:
                others.append(activity)
            else:
                by_issue.setdefault(id(issue), (issue, []))[1].append(activity)
        yield from self._not_issued(others)
        for issue, issued in by_issue.values():
            yield self._issued(issue, issued)

    def _issued(self, issue: TraceEvent, activities: list[CollectiveActivity]) -> Collective:
        mark = read_mark(issue.name)
        assert mark is not None
        name = mark.unit
        if mark.kind == "other":
            name = f"{mark.operation} of {mark.unit}" if mark.unit else mark.operation
        fields: dict[str, Any] = {"pass_": self._pass_of(issue, mark), "engine": mark.engine}
        fields["issued"] = issue.start
        if mark.nbytes is not None:
            fields["nbytes"] = mark.nbytes
        if self._waits is not None:
            wait = self._waits.of(issue)
            blocks = wait is None and issue.end >= max(activity.end for activity in activities)
            fields |= {"wait": wait, "blocks": blocks}
        return self._measure(activities, mark.kind, name, **fields)

    def _not_issued(self, activities: list[CollectiveActivity]) -> Iterator[Collective]:
        """Yield confirmations, and collectives that no engine issued."""
        issuers = [activity.issuer for activity in activities if activity.issuer]
        confirmations = {} if self._waits is None else self._waits.confirmations(issuers)
        for activity in activities:
            name, fields = activity.operation, dict[str, Any]()
            if id(activity.issuer) in confirmations:
                unit, wait = confirmations[id(activity.issuer)]
                name = CONFIRMATION + unit
                fields = {"engine": OWN_ENGINE, "issued": wait[0], "wait": wait}
            yield self._measure([activity], "other", name, **fields)

    def _measure(
        self, activities: list[CollectiveActivity], kind: Kind, name: str, **fields: Any
    ) -> Collective:
        known = all(activity.nbytes is not None for activity in activities)
        spans = [(activity.start, activity.end) for activity in activities]
        defaults = {
            "pass_": None,
            "nbytes": sum(activity.nbytes or 0 for activity in activities) if known else None,
            "lanes": tuple(sorted({activity.lane for activity in activities})),
            "group": activities[0].group,
            "engine": None,
            "blocks": False,
        }
        # One that took no time at all was in flight nevertheless.
        spans = union(spans) or spans[:1]
        return self._compute.measure(spans, kind=kind, name=name, **(defaults | fields))

    def _pass_of(self, issue: TraceEvent, mark: EngineMark) -> Pass | None:
        if mark.kind == "other":
            return None
        is_backward = covers(self._backward[issue.thread], issue.start)
        return "backward" if mark.kind == "reduce_scatter" or is_backward else "forward"


def _backward(events: list[TraceEvent]) -> dict[Any, list[Interval]]:
    """Return when autograd evaluated a function, or called an engine at its end, by thread; a
    backward inside a backward nests there."""
    spans: dict[Any, list[Interval]] = defaultdict(list)
    for e in events:
        if e.name.startswith(_OF_BACKWARD):
            spans[e.thread].append((e.start, e.end))
    return defaultdict(list, {thread: union(s) for thread, s in spans.items()})
