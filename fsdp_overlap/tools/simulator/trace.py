"""Write what ran on emulated time as torch's profiler writes what ran on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.profiler import record_function

from fsdp_overlap.debug import record_ranges
from fsdp_overlap.tools.emulator import EmulatedDevice
from fsdp_overlap.tools.simulator.clock import TimedOperation

HOST_THREAD = 1
LAUNCH_SECONDS = 1e-7  # so short that a launch lies within what the host was busy with
# The functions of autograd, all in one.
BACKWARD = "autograd::engine::evaluate_function: all"


class TracedRange(NamedTuple):
    """A range of the host's time, in seconds."""

    name: str
    start: float
    end: float


@contextmanager
def marking(device: EmulatedDevice) -> Iterator[list[TracedRange]]:
    """Collect the marks that the library, FSDP2 and optimizers would leave in a profiler's trace,
    in the host's time on ``device``."""
    marks: list[TracedRange] = []
    begun: list[float] = []

    def enter(mark: record_function) -> record_function:
        begun.append(device.host.ends)
        return mark

    def leave(mark: record_function, *error: object) -> None:
        marks.append(TracedRange(mark.name, begun.pop(), device.host.ends))

    with (
        record_ranges(),
        patch.object(record_function, "__enter__", enter),
        patch.object(record_function, "__exit__", leave),
    ):
        yield marks


def trace_of(
    ran: Iterable[TimedOperation],
    marks: Iterable[TracedRange],
    backwards: Iterable[tuple[float, float]],
    world_size: int,
) -> dict[str, Any]:
    """Return a Chrome trace, which ``fsdp-overlap report`` reads as any other."""
    events = [_event("user_annotation", mark.name, mark.start, mark.end) for mark in marks]
    events += [_event("cpu_op", BACKWARD, start, end) for start, end in backwards]
    for number, each in enumerate(ran):
        launched = each.enqueued - LAUNCH_SECONDS, each.enqueued
        linked = {"correlation": number}
        events.append(_event("cpu_op", f"aten::{each.name}", *launched))
        events.append(_event("cuda_runtime", "cudaLaunchKernel", *launched, args=linked))
        name, about = each.name, dict[str, Any](linked, stream=each.stream)
        if each.group:
            name = f"ncclDevKernel_{each.name}"
            about |= {"Collective name": each.name, "Process Group Name": each.group}
            about |= {"In msg nelems": each.given, "Out msg nelems": each.got, "dtype": "Byte"}
        events.append(_event("kernel", name, each.start, each.end, each.stream, about))
    ranks = {"backend": "nccl", "rank": 0, "world_size": world_size}
    return {"traceEvents": events, "distributedInfo": ranks}


def _event(
    category: str,
    name: str,
    start: float,
    end: float,
    thread: int = HOST_THREAD,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an event of Chrome's format, whose times are in microseconds."""
    event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread}
    return event | {"ts": 1e6 * start, "dur": 1e6 * (end - start), "args": args or {}}
