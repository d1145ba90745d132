"""Reads a torch.profiler Chrome trace: when collectives were in flight and when compute ran.

The engine issues each collective inside a `record_function` range named
`fsdp_overlap::<kind>(<unit>)` and waits inside one named `fsdp_overlap::wait_<kind>(<unit>)`,
`<kind>` being `all_gather` or `reduce_scatter`. What was in flight is recorded elsewhere, and is
led back to the range that issued it:

- **CUDA**: NCCL kernels. A kernel's correlation id names the runtime call that launched it; the
  issue range around that call, on its thread, is the one.
- **CPU**: gloo writes a range `gloo:<operation>` on a thread of its own, without a link to what
  issued it. A group starts operations in the order in which they were issued, so the k-th range of
  an operation belongs to its k-th `c10d::` op. Where several groups run the same operation, or two
  start at one moment, neighbours may be taken for each other.
"""

import bisect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_overlap.profiling.events import Event, read_events
from fsdp_overlap.profiling.intervals import Interval, subtract, union

Kind = Literal["all_gather", "reduce_scatter", "other"]
Pass = Literal["forward", "backward"]

_PREFIX = "fsdp_overlap::"
_CATEGORIES = {"user_annotation", "cuda_runtime", "cuda_driver", "kernel"}
_CPU_OPS = ("aten::", "c10d::", "autograd::engine::evaluate_function")
_ISSUE = re.compile(_PREFIX + r"(all_gather|reduce_scatter)\(")
_ISSUE_OR_WAIT = re.compile(_PREFIX + r"(wait_)?(all_gather|reduce_scatter)\(")
# Where the name of the c10d op and that of its gloo range differ by more than a trailing
# underscore.
_GLOO_NAMES = {
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "reduce_scatter": "all_reduce",  # that is what gloo does inside
    "_reduce_scatter_base": "all_reduce",
}


@dataclass(frozen=True)
class InFlight:
    """One collective: when its pieces were in flight, as a union of intervals in microseconds.

    name: the unit it serves; for kind "other", the operation as the trace names it.
    pass_: the pass that issued it; None for kind "other".
    issued, wait: when the engine issued it and when the rank's compute was held up to wait for it;
    None where the trace does not say.
    """

    kind: Kind
    name: str
    pass_: Pass | None
    spans: tuple[Interval, ...]
    issued: float | None = None
    wait: Interval | None = None


@dataclass(frozen=True)
class Timeline:
    """What one rank did: its collectives by start, and its compute as a union of intervals in
    microseconds."""

    collectives: tuple[InFlight, ...]
    compute: tuple[Interval, ...]


def read_timeline(trace: str | os.PathLike[str] | dict[str, Any]) -> Timeline:
    """The timeline of one rank's Chrome trace, given as a path or as the loaded JSON object.

    With NCCL, compute is every other kernel that no issue range launched (those prepare the
    collective). On a CPU, it is every `aten::` op on a thread that gloo does not own, less the time
    in the engine's issue and wait ranges on that thread. Raises ValueError if it is no such trace.
    """
    events = [_slim(e) for e in read_events(trace) if _is_of_use(e)]
    issues = _Ranges(e for e in events if _is(e, "user_annotation") and _ISSUE.match(e["name"]))

    if any(_is_nccl(e) for e in events):
        pieces, compute = _read_cuda(events, issues)
        waits: dict[str, list[Interval]] = {}  # the host's, and it is the stream that waits
    else:
        pieces, compute = _read_cpu(events)
        waits = _waits(events)
    collectives = _group(pieces, issues, _backward(events), waits)
    return Timeline(tuple(sorted(collectives, key=lambda c: c.spans[0])), tuple(compute))


def _group(
    pieces: "list[_Piece]",
    issues: "_Ranges",
    backward: dict[Any, list[Interval]],
    waits: dict[str, list[Interval]],
) -> Iterator[InFlight]:
    """The pieces that one issue range issued are one collective."""
    found: dict[int, tuple[Event, list[Interval]]] = {}
    for name, issuer, span in pieces:
        issue = issues.around(issuer) if issuer else None
        if issue is None:
            yield InFlight("other", name, None, (span,))
        else:
            found.setdefault(id(issue), (issue, []))[1].append(span)
    for issue, spans in found.values():
        kind, unit = _unit_of(issue)
        at = _start(issue)
        in_backward = any(start <= at <= end for start, end in backward[issue["tid"]])
        pass_: Pass = "backward" if kind == "reduce_scatter" or in_backward else "forward"
        wait = next((wait for wait in waits.get(issue["name"], ()) if wait[0] >= at), None)
        yield InFlight(kind, unit, pass_, tuple(union(spans)), at, wait)


def _waits(events: list[Event]) -> dict[str, list[Interval]]:
    """Waits in order, by the name of the range that issued what they wait for."""
    waits: dict[str, list[Interval]] = defaultdict(list)
    for e in sorted(events, key=_start):
        if e["name"].startswith(_PREFIX + "wait_"):
            waits[e["name"].replace("wait_", "", 1)].append(_span(e))
    return waits


def _backward(events: list[Event]) -> dict[Any, list[Interval]]:
    """When autograd evaluated a function, by thread; a backward inside a backward nests there."""
    spans: dict[Any, list[Interval]] = defaultdict(list)
    for e in events:
        if _is(e, "cpu_op") and e["name"].startswith("autograd::engine::evaluate_function"):
            spans[e["tid"]].append(_span(e))
    return defaultdict(list, {tid: union(s) for tid, s in spans.items()})


# A piece of a collective: its operation's name, the event that issued it if the trace holds it,
# when it was in flight.
_Piece = tuple[str, Event | None, Interval]


def _read_cpu(events: list[Event]) -> tuple[list[_Piece], list[Interval]]:
    running: dict[str, list[Event]] = defaultdict(list)
    issued: dict[str, list[Event]] = defaultdict(list)
    for e in events:
        if e["name"].startswith("gloo:"):
            running[e["name"].removeprefix("gloo:")].append(e)
        elif e["name"].startswith("c10d::"):
            operation = e["name"].removeprefix("c10d::").removesuffix("_")
            issued[_GLOO_NAMES.get(operation, operation)].append(e)

    pieces: list[_Piece] = []
    for operation, ranges in running.items():
        issuers = sorted(issued[operation], key=_start)
        k = 0
        for e in sorted(ranges, key=_start):
            # A range older than the next op to match was issued before the trace began.
            issuer = issuers[k] if k < len(issuers) and _start(issuers[k]) <= _start(e) else None
            k += issuer is not None
            pieces.append((operation, issuer, _span(e)))

    gloo_threads = {e["tid"] for ranges in running.values() for e in ranges}
    ops: dict[Any, list[Interval]] = defaultdict(list)
    engine: dict[Any, list[Interval]] = defaultdict(list)
    for e in events:
        if e["tid"] in gloo_threads:
            continue
        if _is(e, "cpu_op") and e["name"].startswith("aten::"):
            ops[e["tid"]].append(_span(e))
        elif _ISSUE_OR_WAIT.match(e["name"]):
            engine[e["tid"]].append(_span(e))
    compute = [s for tid in ops for s in subtract(union(ops[tid]), union(engine[tid]))]
    return pieces, union(compute)


def _read_cuda(events: list[Event], issues: "_Ranges") -> tuple[list[_Piece], list[Interval]]:
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if (_is(e, "cuda_runtime") or _is(e, "cuda_driver")) and "correlation" in e.get("args", {})
    }
    pieces: list[_Piece] = []
    compute: list[Interval] = []
    for e in events:
        if _is_nccl(e):
            args = e.get("args", {})
            name = args.get("Collective name", e["name"].split("(")[0])
            pieces.append((name, launches.get(args.get("correlation")), _span(e)))
        elif _is(e, "kernel"):
            launch = launches.get(e.get("args", {}).get("correlation"))
            if launch is None or issues.around(launch) is None:
                compute.append(_span(e))
    return pieces, union(compute)


def _unit_of(issue: Event) -> tuple[Kind, str]:
    operation, unit = issue["name"].removeprefix(_PREFIX).removesuffix(")").split("(", 1)
    return ("all_gather" if operation == "all_gather" else "reduce_scatter"), unit


class _Ranges:
    """Finds the range around an event on the event's own thread."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_thread: dict[Any, list[Event]] = defaultdict(list)
        for e in sorted(events, key=_start):
            self._by_thread[e["tid"]].append(e)

    def around(self, event: Event) -> Event | None:
        """The range in which `event` starts. Ranges must not nest."""
        ranges = self._by_thread.get(event["tid"], [])
        k = bisect.bisect_right(ranges, _start(event), key=_start) - 1
        return ranges[k] if k >= 0 and _start(event) <= _span(ranges[k])[1] else None


def _is_of_use(event: Event) -> bool:
    if event.get("ph") != "X":
        return False
    if _is(event, "cpu_op"):
        return event["name"].startswith(_CPU_OPS)
    return event.get("cat") in _CATEGORIES or event["name"].startswith("gloo:")


def _slim(event: Event) -> Event:
    """Without what nobody asks for, which is most of a trace. Names and categories are shared."""
    kept = {key: event[key] for key in ("tid", "ts", "dur")}
    kept["name"], kept["cat"] = sys.intern(event["name"]), sys.intern(event.get("cat", ""))
    args = event.get("args", {})
    if used := {key: args[key] for key in ("correlation", "Collective name") if key in args}:
        kept["args"] = used
    return kept


def _is(event: Event, category: str) -> bool:
    return event.get("cat") == category


def _is_nccl(event: Event) -> bool:
    return _is(event, "kernel") and event["name"].startswith("nccl")


def _start(event: Event) -> float:
    return event["ts"]


def _span(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]
