"""Collectives in flight and compute, as each backend records them in a trace."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from fsdp_overlap.tools.profiling.events import COLLECTIVE_NAME, TraceEvent
from fsdp_overlap.tools.profiling.intervals import Interval, union
from fsdp_overlap.tools.profiling.kernel_names import collective_of, may_communicate
from fsdp_overlap.tools.profiling.ranges import ELSEWHERE, EngineRanges, Phases

# From the name of a c10d op to that of its gloo range, where they differ by more than a trailing
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
# By the dtype's name in the inputs of c10d ops and in the arguments of NCCL kernels.
_ITEM_BYTES = {
    "double": 8,
    "float": 4,
    "c10::bfloat16": 2,
    "bfloat16": 2,
    "c10::half": 2,
    "half": 2,
    "long": 8,
    "int": 4,
    "short": 2,
    "char": 1,
    "signed char": 1,
    "byte": 1,
    "unsigned char": 1,
    "bool": 1,
}


# Ops that multiply matrices, in whole or for the most part.
_GEMMS = (
    "aten::linear",
    "aten::matmul",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::convolution",
    "aten::conv",
    "aten::cudnn_convolution",
    "aten::mkldnn_convolution",
    "aten::mkldnn_rnn",
    "aten::scaled_dot_product",
    "aten::_scaled_dot_product",
    "aten::_flash_attention",
    "aten::_efficient_attention",
)
# On a CPU every op with a namespace computes, except these. Compiled code has no namespace.
_NO_COMPUTE = ("c10d", "_c10d", "autograd::", "torch::", "profiler::", "fsdp::")
# Calls of oneCCL's backend, which no range tells when they were in flight.
_ONECCL = ("oneccl_bindings_for_pytorch::", "torch_ccl::")
_COMPILED = "## Call CompiledFxGraph"


class CollectiveActivity(NamedTuple):
    """A part of a collective in flight. issuer: the event that issued it, if the trace holds it.
    The other fields are as in `Collective`."""

    operation: str
    issuer: TraceEvent | None
    start: float
    end: float
    lane: str
    group: str | None
    nbytes: int | None


class Compute(NamedTuple):
    """A stretch of compute. Times in microseconds.

    label: which pass of which unit it belongs to ("forward blocks.0"). op: what started it: on a
    CPU the outermost op; on a GPU the innermost `aten::` op around the kernel's launch, or else the
    kernel. lane: the thread or stream, on which stretches do not overlap.
    """

    start: float
    end: float
    label: str
    op: str
    lane: str


class BackendRecords(NamedTuple):
    """compute: sorted by start. gemms: the part of it that multiplies matrices. engine: when an
    engine worked. Both are unions of intervals. unknown: kernels that may be collectives, and count
    as none. other_devices: what kernels of devices took that are left out, in microseconds."""

    activities: list[CollectiveActivity]
    compute: list[Compute]
    gemms: list[Interval]
    engine: list[Interval]
    unknown: list[TraceEvent]
    other_devices: dict[str, float]


def read_cpu(events: list[TraceEvent], engine: EngineRanges, phases: Phases) -> BackendRecords:
    """Read gloo's ranges as collectives, and ops as compute."""
    activities = _read_gloo(events)
    activities += [
        CollectiveActivity(name, e, e.start, e.end, f"thread {e.thread}", None, None)
        for e in events
        if (name := _called(e)) is not None
    ]
    # A send or receive is recorded on the thread that calls it, not on one of gloo's.
    callers = {e.thread for e in events if e.name.startswith("c10d::")}
    gloo_threads = {e.thread for e in events if e.name.startswith("gloo:")} - callers
    ops: dict[Any, list[TraceEvent]] = defaultdict(list)
    for e in events:
        if _computes(e) and e.thread not in gloo_threads:
            ops[e.thread].append(e)
    compute = [
        Compute(start, end, phases.at(thread, start), op.name, f"thread {thread}")
        for thread in ops
        for op in _outermost(ops[thread])
        for start, end in engine.outside(op)
    ]
    gemms = [
        span
        for found in ops.values()
        for op in found
        if op.name.startswith(_GEMMS)
        for span in engine.outside(op)
    ]
    return BackendRecords(activities, sorted(compute), union(gemms), engine.spans(), [], {})


def _read_gloo(events: list[TraceEvent]) -> list[CollectiveActivity]:
    running: dict[str, list[TraceEvent]] = defaultdict(list)
    issued: dict[str, list[TraceEvent]] = defaultdict(list)
    for e in events:
        if e.name.startswith("gloo:"):
            running[e.name.removeprefix("gloo:")].append(e)
        elif e.name.startswith("c10d::"):
            operation = e.name.removeprefix("c10d::").removesuffix("_")
            issued[_GLOO_NAMES.get(operation, operation)].append(e)

    activities: list[CollectiveActivity] = []
    for operation, ranges in running.items():
        issuers = sorted(issued[operation], key=_start)
        k = 0
        for e in sorted(ranges, key=_start):
            # A range older than the next op to match was issued before the trace began.
            issuer = issuers[k] if k < len(issuers) and issuers[k].start <= e.start else None
            k += issuer is not None
            nbytes = _bytes_of_op(issuer) if issuer else None
            activities.append(
                CollectiveActivity(
                    operation, issuer, e.start, e.end, f"thread {e.thread}", None, nbytes
                )
            )
    return activities


def _computes(event: TraceEvent) -> bool:
    if event.category != "cpu_op" or _called(event) is not None:
        return False
    return event.name.startswith(_COMPILED) or (
        "::" in event.name and not event.name.startswith(_NO_COMPUTE)
    )


def _called(event: TraceEvent) -> str | None:
    """Return the collective that an op of a CPU runs itself; None of any other op."""
    if event.name.startswith(_ONECCL):
        return event.name.split("::", 1)[1]
    # torch's own record of a call is no time in flight.
    is_call = event.name == "record_param_comms" or event.name.startswith(("c10d::", "gloo:"))
    return None if is_call else event.args.get(COLLECTIVE_NAME)


def _outermost(ops: list[TraceEvent]) -> Iterator[TraceEvent]:
    """Return the ops of one thread that lie in no other op."""
    end = float("-inf")
    for op in sorted(ops, key=lambda op: (op.start, -op.end)):
        if op.end > end:
            yield op
            end = op.end


def _bytes_of_op(op: TraceEvent) -> int | None:
    """Return what the op moves, if its input and output are one tensor each and the trace has their
    shapes."""
    shapes, types = op.args.get("Input Dims"), op.args.get("Input type")
    if not shapes or not types or "_base" not in op.name:
        return None
    return _travels(math.prod(shapes[0]), math.prod(shapes[1]), types[0])


def _travels(one: int, other: int, dtype: str) -> int | None:
    """Return the bytes that a rank's collective moves, from how many elements the rank has before
    and after. One of the two is the rank's own part of the other."""
    size = _ITEM_BYTES.get(dtype.lower())
    return None if size is None or one == other else abs(one - other) * size


def read_cuda(events: list[TraceEvent], engine: EngineRanges, phases: Phases) -> BackendRecords:
    """Read kernels and copies of collectives, and gloo's ranges if there are any, as collectives,
    and all other kernels as compute.

    Raises:
        ValueError: collectives ran on more than one device.
    """
    launches = {
        e.args["correlation"]: e
        for e in events
        if e.category in ("cuda_runtime", "cuda_driver") and "correlation" in e.args
    }
    kernels, other_devices = _of_one_device(events)
    used = {correlation for e in kernels if (correlation := e.args.get("correlation")) in launches}
    ops = _innermost_ops(events, [launches[correlation] for correlation in used])
    activities = _read_gloo(events)
    compute: list[Compute] = []
    copies: list[Interval] = []
    unknown: list[TraceEvent] = []
    without_op: list[TraceEvent] = []
    for e in kernels:
        launch = launches.get(e.args.get("correlation"))
        lane = _stream(e)
        if name := collective_of(e):
            group, nbytes = e.args.get("Process Group Name"), _bytes_of_kernel(e)
            activities.append(CollectiveActivity(name, launch, e.start, e.end, lane, group, nbytes))
            continue
        if may_communicate(e.name):
            unknown.append(e)
        if launch is not None and engine.covers(launch):
            copies.append((e.start, e.end))
            continue
        op, label = e.name, ELSEWHERE
        if launch is not None:
            op = ops.get(launch.args["correlation"], e.name)
            label = phases.at(launch.thread, launch.start)
        compute.append(Compute(e.start, e.end, label, op, lane))
        if op == e.name and not may_communicate(e.name):
            without_op.append(e)
    gemms = union((c.start, c.end) for c in compute if c.op.startswith(_GEMMS))
    # What runs among collectives, and was started by no op of torch, may be one.
    computing = Counter(c.lane for c in compute)
    communicating = Counter(activity.lane for activity in activities)
    unknown += [e for e in without_op if communicating[_stream(e)] > computing[_stream(e)]]
    return BackendRecords(activities, sorted(compute), gemms, union(copies), unknown, other_devices)


def _of_one_device(events: list[TraceEvent]) -> tuple[list[TraceEvent], dict[str, float]]:
    """Return the kernels, and copies of collectives, of the device that has collectives, or else of
    the one with the most kernels; and what the kernels of other devices took."""
    kernels = [
        e
        for e in events
        if e.category == "kernel" or (e.category == "gpu_memcpy" and COLLECTIVE_NAME in e.args)
    ]
    counts = Counter(d for e in kernels if (d := e.args.get("device")) is not None)
    if len(counts) < 2:
        return kernels, {}
    collective = {e.args.get("device") for e in kernels if collective_of(e)} - {None}
    if len(collective) > 1:
        names = ", ".join(sorted(map(str, collective)))
        raise ValueError(
            f"collectives ran on devices {names}, and a report covers one device: run one process "
            "per device, and record a trace in each"
        )
    judged = (*collective, *(device for device, _ in counts.most_common()))[0]
    others: dict[str, float] = defaultdict(float)
    for e in kernels:
        if e.args.get("device") not in (None, judged):
            others[str(e.args["device"])] += e.end - e.start
    return [e for e in kernels if e.args.get("device") in (None, judged)], dict(others)


def _stream(kernel: TraceEvent) -> str:
    return f"stream {kernel.args.get('stream', kernel.thread)}"


def _bytes_of_kernel(kernel: TraceEvent) -> int | None:
    args = kernel.args
    try:
        return _travels(args["In msg nelems"], args["Out msg nelems"], args["dtype"])
    except KeyError:
        return None


def _innermost_ops(events: list[TraceEvent], launches: list[TraceEvent]) -> dict[Any, str]:
    """Return the innermost `aten::` op around each launch that has one, by the launch's correlation
    id."""
    ops = [e for e in events if e.category == "cpu_op" and e.name.startswith("aten::")]
    found: dict[Any, str] = {}
    under_way: dict[Any, list[TraceEvent]] = defaultdict(list)
    # Of events that start at one moment, the outer op comes first and the launch last.
    for is_launch, e in heapq.merge(
        ((False, e) for e in sorted(ops, key=lambda e: (e.start, -e.end))),
        ((True, e) for e in sorted(launches, key=_start)),
        key=lambda item: (item[1].start, item[0]),
    ):
        stack = under_way[e.thread]
        while stack and stack[-1].end < e.start:
            stack.pop()
        if not is_launch:
            stack.append(e)
        elif stack:
            found[e.args["correlation"]] = stack[-1].name
    return found


def _start(event: TraceEvent) -> float:
    return event.start
