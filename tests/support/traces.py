"""Small Chrome traces made by hand, as torch.profiler writes them on a CPU with gloo."""

from __future__ import annotations

from typing import Any

from fsdp_overlap.tools.profiling import RankReport, Report, read_report

MAIN, GLOO_A, GLOO_B = 1, 2, 3
Event = dict[str, Any]


def event(name: str, start: float, end: float, tid: int = MAIN, **more: Any) -> Event:
    category = "cpu_op" if name.startswith(("aten", "c10d", "autograd")) else "user_annotation"
    fields = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid}
    return fields | {"ts": start, "dur": end - start} | more


def gather(unit: str, start: float) -> list[Event]:
    """Return an issue range of ten microseconds with a broadcast for each of two ranks."""
    return [
        event(f"fsdp_overlap::all_gather({unit})", start, start + 10),
        event("c10d::broadcast_", start + 1, start + 3),
        event("c10d::broadcast_", start + 5, start + 7),
    ]


def trace_of(*events: Event, rank: int | None = None) -> dict[str, Any]:
    trace: dict[str, Any] = {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}
    if rank is not None:
        trace["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": 2}
    return trace


def read(*events: Event) -> RankReport:
    return read_report(trace_of(*events)).ranks[0]


class Step:
    """One training step of `units` equal units, played by the rules of the schedule; times in
    microseconds. `pause`: without compute, in the forward of the last unit."""

    def __init__(
        self,
        units: int = 4,
        compute: float = 1000,
        all_gather: float = 400,
        reduce_scatter: float = 400,
        prefetch: int = 1,
        shared: bool = False,
        pause: float = 0,
    ) -> None:
        self.events: list[Event] = []
        self._durations = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}
        self._threads = {"all_gather": GLOO_A, "reduce_scatter": GLOO_A if shared else GLOO_B}
        self._free = {GLOO_A: 0.0, GLOO_B: 0.0}
        self._ends: dict[tuple[str, int], float] = {}
        self._now = 0.0
        for unit in range(units):
            self._use(unit, range(unit + 1, min(unit + 1 + prefetch, units)), "forward")
            self._compute(compute)
            self._now += pause if unit == units - 1 else 0
            self._mark("post_forward", unit)
        self._ends.clear()
        begin = self._now
        for unit in reversed(range(units)):
            # The last is still whole.
            self._ends.setdefault(("all_gather", units - 1), 0.0)
            self._use(unit, range(unit - 1, max(unit - 1 - prefetch, -1), -1), "backward")
            if unit < units - 1:
                self._mark("post_backward", unit + 1)
                self._issue("reduce_scatter", unit + 1)
            self._compute(2 * compute)
        self._issue("reduce_scatter", 0)
        for unit in reversed(range(units)):
            self._wait("reduce_scatter", unit)
        self._add("autograd::engine::evaluate_function: MmBackward0", begin, self._now)
        self._add("Optimizer.step#AdamW.step", self._now, self._now + 101)
        self._compute(100)

    def _add(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.events.append(event(name, start, end, thread))

    def _mark(self, role: str, unit: int) -> None:
        self._now += 1
        self._add(f"fsdp_overlap::{role}(blocks.{unit})", self._now, self._now + 1)
        self._now += 1

    def _compute(self, time: float) -> None:
        self._add("aten::mm", self._now, self._now + time)
        self._now += time

    def _use(self, unit: int, ahead: range, pass_: str) -> None:
        self._mark(f"pre_{pass_}", unit)
        for other in (unit, *ahead):
            if ("all_gather", other) not in self._ends:
                self._issue("all_gather", other)
        self._wait("all_gather", unit)

    def _issue(self, kind: str, unit: int) -> None:
        op, ran = (
            ("c10d::broadcast_", "gloo:broadcast")
            if kind == "all_gather"
            else ("c10d::alltoall_base_", "gloo:all_to_all")
        )
        now, thread = self._now, self._threads[kind]
        self._add(f"fsdp_overlap::{kind}(blocks.{unit}) 4000 B", now, now + 2)
        self._add(op, now + 0.5, now + 1)
        start = max(now + 1, self._free[thread])
        self._free[thread] = self._ends[kind, unit] = start + self._durations[kind]
        self._add(ran, start, self._free[thread], thread)
        self._now += 2

    def _wait(self, kind: str, unit: int) -> None:
        end = max(self._now, self._ends.pop((kind, unit))) + 1
        self._add(f"fsdp_overlap::wait_{kind}(blocks.{unit})", self._now, end)
        self._now = end


def report_of(*steps: Step) -> Report:
    """Return of ranks that each took one step."""
    return read_report(*(trace_of(*step.events, rank=rank) for rank, step in enumerate(steps)))
