"""What one rank did, from its torch.profiler trace: collectives in flight, and compute.

Engines mark in a trace what they issue, what they wait for, and where a unit's forward and backward
begin and end (see `names.py`). What was in flight is recorded elsewhere, and is traced back to the
range that issued it:

- **CUDA**: NCCL kernels. A kernel's correlation id names the runtime call that launched it. The
  issue range around that call, on the call's thread, issued the kernel.
- **CPU**: gloo writes a range `gloo:<operation>` on a thread of its own, without a link to what
  issued it. A group starts operations in the order in which they were issued, so the k-th range of
  an operation belongs to its k-th `c10d::` op. Where two start at one moment, neighbours may be
  taken for each other; and where several groups run the same operation at once, one that comes out
  of turn shifts all that is queued behind it.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdp_overlap.profiling.events import Event, Progress, read_trace
from fsdp_overlap.profiling.intervals import Interval, clip, covers, union
from fsdp_overlap.profiling.names import (
    CONFIRMATION,
    OPTIMIZER_STEP,
    OWN_ENGINE,
    PREFIXES,
    PROFILER_STEP,
    Kind,
    Mark,
    Pass,
    read_mark,
)
from fsdp_overlap.profiling.pieces import Compute, Piece, read_cpu, read_cuda
from fsdp_overlap.profiling.ranges import Engine, Phases, Ranges, Waits

_CATEGORIES = {"cpu_op", "cuda_runtime", "cuda_driver", "kernel"}
_ANNOTATIONS = (*PREFIXES, OPTIMIZER_STEP, PROFILER_STEP, "gloo:")


@dataclass(frozen=True)
class InFlight:
    """One collective. Times are in microseconds on the trace's clock.

    issued, wait: when the engine issued it and when the rank's compute was held up to wait for it;
    None where the trace does not say, as on a GPU, whose host runs ahead. All else: as in
    `Collective`, which is made of it.
    """

    kind: Kind
    name: str
    spans: tuple[Interval, ...]
    nbytes: int | None
    lanes: tuple[str, ...]
    group: str | None
    pass_: Pass | None = None
    engine: str | None = None
    issued: float | None = None
    wait: Interval | None = None
    blocks: bool = False


@dataclass(frozen=True)
class Timeline:
    """What one rank did: its collectives and its compute, each sorted by start.

    gemms: the part of compute that multiplies matrices. engine: when an engine worked, for example
    to prepare a collective. Both are unions of intervals.
    window: the time that all of this lies in. steps: how many the window holds.
    steps, rank, world_size: None where the trace does not say.
    """

    collectives: tuple[InFlight, ...]
    compute: tuple[Compute, ...]
    gemms: tuple[Interval, ...]
    engine: tuple[Interval, ...]
    window: Interval
    steps: int | None
    rank: int | None
    world_size: int | None


def read_timeline(source: Any, progress: Progress | None = None) -> Timeline:
    """The timeline of one rank, from whatever `read_trace` reads.

    On a GPU, compute is every kernel but NCCL's; on a CPU, every op on a thread that gloo does not
    own. What is launched or run in an engine's own ranges does not count on either.

    Raises:
        ValueError: it is not such a trace, or holds calls of collectives but none in flight.
    """
    trace = read_trace(source, _is_of_use, progress)
    events = trace.events
    marked = [
        (event, mark)
        for event in events
        if event.category == "user_annotation" and (mark := read_mark(event.name))
    ]
    issues = Ranges(event for event, mark in marked if mark.role == "issue")
    steps = [e for e in events if e.name.startswith((OPTIMIZER_STEP, PROFILER_STEP))]
    backward = _backward(events)
    engine = Engine(
        e for e in events if e.name.startswith(PREFIXES) and e.category == "user_annotation"
    )
    phases = Phases(marked, [e for e in steps if e.name.startswith(OPTIMIZER_STEP)], backward)
    if any(e.category == "kernel" for e in events):
        recorded = read_cuda(events, engine, phases)
        waits = None  # the marks show when the host waits, but here the stream waits
    else:
        recorded = read_cpu(events, engine, phases)
        waits = Waits(marked)
    found = sorted(_group(recorded.pieces, issues, backward, waits), key=lambda c: c.spans[0])
    distributed = trace.about.get("distributedInfo") or {}
    if distributed.get("world_size") != 1:
        _check_complete(events, issues, found)
    marks = [event for event, _ in marked]
    start, end = window = _window(marks + steps, found, recorded.compute)
    return Timeline(
        collectives=tuple(c for c in found if start <= c.spans[0][0] and c.spans[-1][1] <= end),
        compute=tuple(c for c in recorded.compute if start <= c.start and c.end <= end),
        gemms=tuple(clip(recorded.gemms, start, end)),
        engine=tuple(clip(recorded.engine, start, end)),
        window=window,
        steps=_count_steps(steps, marks),
        rank=distributed.get("rank"),
        world_size=distributed.get("world_size"),
    )


def _is_of_use(category: str, name: str) -> bool:
    if category == "user_annotation":
        return name.startswith(_ANNOTATIONS)
    return category in _CATEGORIES or name.startswith("gloo:")


def _check_complete(events: list[Event], issues: Ranges, found: list[InFlight]) -> None:
    called = [e for e in events if e.name.startswith("c10d::") and issues.around(e)]
    if called and all(c.kind == "other" for c in found):
        raise ValueError(
            f"the trace holds {len(called)} calls of collectives and none in flight: profile with "
            "ProfilerActivity.CUDA where they run on a GPU. If that was done, unset "
            "TORCH_NCCL_USE_COMM_NONBLOCKING, by which another thread launches them, and NCCL's "
            "zero-CTA policy, by which copies do their work, which no report tells from others"
        )


def _window(marks: list[Event], found: list[InFlight], compute: list[Compute]) -> Interval:
    """From the first mark to the end of what the host started, which on a GPU is later than the
    marks. Barriers, which programs put around what they profile, do not count."""
    spans = [span for c in found if c.name != "barrier" for span in c.spans]
    spans += [(c.start, c.end) for c in compute]
    spans = spans or [span for c in found for span in c.spans] or [(0.0, 0.0)]
    start = min((e.start for e in marks), default=min(start for start, _ in spans))
    return start, max(end for _, end in spans)


def _count_steps(steps: list[Event], marks: list[Event]) -> int | None:
    """Counts the profiler's steps in which anything happened. If there are none, counts the
    optimizers' steps, where all steps between two passes are one."""
    starts = sorted(e.start for e in marks)
    optimizers = sorted(e.start for e in steps if e.name.startswith(OPTIMIZER_STEP))
    told = [e for e in steps if e.name.startswith(PROFILER_STEP)]
    if told:
        moments = sorted(starts + optimizers)
        return sum(bisect.bisect(moments, e.start) < bisect.bisect(moments, e.end) for e in told)
    if not starts:
        return max(Counter(e.name for e in steps).values(), default=None)
    # Steps between the same two marks count once.
    return len({bisect.bisect(starts, at) for at in optimizers}) or None


def _group(
    pieces: list[Piece],
    issues: Ranges,
    backward: dict[Any, list[Interval]],
    waits: Waits | None,
) -> Iterator[InFlight]:
    """Makes one collective of all pieces that one issue range issued."""
    found: dict[int, tuple[Event, list[Piece]]] = {}
    others: list[Piece] = []
    for piece in pieces:
        issue = issues.around(piece.issuer) if piece.issuer else None
        if issue is None:
            others.append(piece)
        else:
            found.setdefault(id(issue), (issue, []))[1].append(piece)
    yield from _of_no_issue(others, waits)
    for issue, issued in found.values():
        mark = read_mark(issue.name)
        assert mark is not None
        name = mark.unit
        if mark.kind == "other":
            name = f"{mark.operation} of {mark.unit}" if mark.unit else mark.operation
        flight = _in_flight(issued, mark.kind, name)
        on_host: dict[str, Any] = {}
        if waits is not None:
            wait = waits.of(issue)
            blocks = wait is None and issue.end >= flight.spans[-1][1]
            on_host = {"issued": issue.start, "wait": wait, "blocks": blocks}
        yield replace(
            flight,
            pass_=_pass_of(issue, mark, backward),
            engine=mark.engine,
            nbytes=flight.nbytes if mark.nbytes is None else mark.nbytes,
            **on_host,
        )


def _of_no_issue(pieces: list[Piece], waits: Waits | None) -> Iterator[InFlight]:
    """Confirmations, and collectives that no engine issued."""
    issuers = [piece.issuer for piece in pieces if piece.issuer]
    confirmations = {} if waits is None else waits.confirmations(issuers)
    for piece in pieces:
        flight = _in_flight([piece], "other", piece.operation)
        if id(piece.issuer) in confirmations:
            unit, wait = confirmations[id(piece.issuer)]
            flight = replace(
                flight,
                name=CONFIRMATION + unit,
                engine=OWN_ENGINE,
                issued=wait[0],
                wait=wait,
            )
        yield flight


def _in_flight(pieces: list[Piece], kind: Kind, name: str) -> InFlight:
    known = all(piece.nbytes is not None for piece in pieces)
    spans = [(piece.start, piece.end) for piece in pieces]
    return InFlight(
        kind=kind,
        name=name,
        # A piece that took no time at all was in flight nevertheless.
        spans=tuple(union(spans) or spans[:1]),
        nbytes=sum(piece.nbytes or 0 for piece in pieces) if known else None,
        lanes=tuple(sorted({piece.lane for piece in pieces})),
        group=next((piece.group for piece in pieces), None),
    )


def _pass_of(issue: Event, mark: Mark, backward: dict[Any, list[Interval]]) -> Pass | None:
    if mark.kind == "other":
        return None
    if mark.kind == "reduce_scatter" or covers(backward[issue.thread], issue.start):
        return "backward"
    return "forward"


def _backward(events: list[Event]) -> dict[Any, list[Interval]]:
    """When autograd evaluated a function, by thread; a backward inside a backward nests there."""
    spans: dict[Any, list[Interval]] = defaultdict(list)
    for e in events:
        if e.category == "cpu_op" and e.name.startswith("autograd::engine::evaluate_function"):
            spans[e.thread].append((e.start, e.end))
    return defaultdict(list, {thread: union(s) for thread, s in spans.items()})
