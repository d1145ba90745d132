"""What one rank did, from its torch.profiler trace: collectives in flight, and compute.

Engines mark in a trace what they issue, what they wait for, and where a unit's forward and backward
begin and end (see `names.py`). What was in flight is recorded elsewhere, and is led back to the
range that issued it:

- **CUDA**: NCCL kernels. A kernel's correlation id names the runtime call that launched it; the
  issue range around that call, on its thread, is the one.
- **CPU**: gloo writes a range `gloo:<operation>` on a thread of its own, without a link to what
  issued it. A group starts operations in the order in which they were issued, so the k-th range of
  an operation belongs to its k-th `c10d::` op. Where several groups run the same operation, or two
  start at one moment, neighbours may be taken for each other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_overlap.profiling.events import Event, Progress, read_trace
from fsdp_overlap.profiling.intervals import Interval, clip, covers, union
from fsdp_overlap.profiling.names import (
    OPTIMIZER_STEP,
    PREFIXES,
    PROFILER_STEP,
    Kind,
    Mark,
    Pass,
    read_mark,
)
from fsdp_overlap.profiling.pieces import Compute, Piece, read_cuda, read_gloo
from fsdp_overlap.profiling.ranges import Phases, Ranges, Waits

_DEVICE = {"cuda_runtime", "cuda_driver", "kernel"}
_CPU_OPS = ("aten::", "c10d::", "autograd::engine::evaluate_function")
_ANNOTATIONS = (*PREFIXES, OPTIMIZER_STEP, PROFILER_STEP)


@dataclass(frozen=True)
class InFlight:
    """One collective. Times in microseconds on the trace's clock.

    name: the unit it serves; for kind "other", the operation as the trace names it.
    pass_: the pass that issued it; None for kind "other".
    spans: when its pieces were in flight, as a union of intervals.
    issued, wait: when the engine issued it and when the rank's compute was held up to wait for it;
    None where the trace does not say.
    nbytes: what traveled to this rank (all-gather) or from it; None where the trace does not say.
    lanes: the streams, or with gloo the threads, that it ran on.
    group: its process group; None where the trace does not say.
    """

    kind: Kind
    name: str
    pass_: Pass | None
    spans: tuple[Interval, ...]
    issued: float | None = None
    wait: Interval | None = None
    nbytes: int | None = None
    lanes: tuple[str, ...] = ()
    group: str | None = None


@dataclass(frozen=True)
class Timeline:
    """What one rank did: its collectives and its compute, each by start.

    engine: when it prepared or finished collectives, as a union of intervals.
    window: from the first to the last of what is of interest. steps: how many it holds, None where
    the trace does not say. rank, world_size: None where the trace does not say.
    """

    collectives: tuple[InFlight, ...]
    compute: tuple[Compute, ...]
    engine: tuple[Interval, ...]
    window: Interval
    steps: int | None
    rank: int | None
    world_size: int | None


def read_timeline(source: Any, progress: Progress | None = None) -> Timeline:
    """The timeline of one rank, from whatever `read_trace` reads.

    On a GPU, compute is every kernel but NCCL's that no issue range launched (those prepare the
    collective). On a CPU, it is every `aten::` op on a thread that gloo does not own, less the time
    in the engine's issue and wait ranges on that thread. Raises ValueError if it is no such trace.
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
    phases = Phases(marked, [e for e in steps if e.name.startswith(OPTIMIZER_STEP)])
    if any(e.category == "kernel" for e in events):
        pieces, compute, engine = read_cuda(events, issues, phases)
        waits = Waits(())  # the host's, and it is the stream that waits
    else:
        ranges = [event for event, mark in marked if mark.role in ("issue", "wait")]
        pieces, compute, engine = read_gloo(events, ranges, phases)
        waits = Waits(marked)
    found = sorted(_group(pieces, issues, _backward(events), waits), key=lambda c: c.spans[0])
    start, end = window = _window([event for event, _ in marked] + steps, found, compute)
    distributed = trace.about.get("distributedInfo", {})
    return Timeline(
        collectives=tuple(c for c in found if start <= c.spans[0][0] and c.spans[-1][1] <= end),
        compute=tuple(c for c in compute if start <= c.start and c.end <= end),
        engine=tuple(clip(engine, start, end)),
        window=window,
        steps=_count_steps(steps),
        rank=distributed.get("rank"),
        world_size=distributed.get("world_size"),
    )


def _is_of_use(category: str, name: str) -> bool:
    if category == "cpu_op":
        return name.startswith(_CPU_OPS)
    if category == "user_annotation" and name.startswith(_ANNOTATIONS):
        return True
    return category in _DEVICE or name.startswith("gloo:")


def _window(marked: list[Event], found: list[InFlight], compute: list[Compute]) -> Interval:
    """From the first mark to the end of what the host started, which on a GPU is later than its
    marks; without the barriers that programs put around."""
    spans = [span for c in found if c.name != "barrier" for span in c.spans]
    spans += [(c.start, c.end) for c in compute]
    spans = spans or [span for c in found for span in c.spans] or [(0.0, 0.0)]
    start = min((e.start for e in marked), default=min(start for start, _ in spans))
    return start, max(end for _, end in spans)


def _count_steps(steps: list[Event]) -> int | None:
    """By the profiler's steps, else by the optimizer's, of which a step may have several kinds."""
    told = sum(e.name.startswith(PROFILER_STEP) for e in steps)
    return told or max(Counter(e.name for e in steps).values(), default=None)


def _group(
    pieces: list[Piece], issues: Ranges, backward: dict[Any, list[Interval]], waits: Waits
) -> Iterator[InFlight]:
    """The pieces that one issue range issued are one collective."""
    found: dict[int, tuple[Event, list[Piece]]] = {}
    for piece in pieces:
        issue = issues.around(piece.issuer) if piece.issuer else None
        if issue is None:
            yield _in_flight([piece], "other", piece.operation, None)
        else:
            found.setdefault(id(issue), (issue, []))[1].append(piece)
    for issue, issued in found.values():
        mark = read_mark(issue.name)
        assert mark is not None
        name, pass_ = mark.unit, _pass_of(issue, mark, backward)
        if mark.kind == "other":
            name = f"{mark.operation} of {mark.unit}" if mark.unit else mark.operation
        yield _in_flight(
            issued, mark.kind, name, pass_, issue.start, waits.of(issue, mark), mark.nbytes
        )


def _in_flight(
    pieces: list[Piece],
    kind: Kind,
    name: str,
    pass_: Pass | None,
    issued: float | None = None,
    wait: Interval | None = None,
    nbytes: int | None = None,
) -> InFlight:
    if nbytes is None and all(piece.nbytes is not None for piece in pieces):
        nbytes = sum(piece.nbytes or 0 for piece in pieces)
    spans = [(piece.start, piece.end) for piece in pieces]
    return InFlight(
        kind=kind,
        name=name,
        pass_=pass_,
        # One that took no time at all was in flight nevertheless.
        spans=tuple(union(spans) or spans[:1]),
        issued=issued,
        wait=wait,
        nbytes=nbytes,
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
        if e.category == "cpu_op" and e.name.startswith("autograd::"):
            spans[e.thread].append((e.start, e.end))
    return defaultdict(list, {thread: union(s) for thread, s in spans.items()})
