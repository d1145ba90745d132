"""The overlap summary of small hand-made traces, in exact numbers."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_overlap.profiling import OverlapSummary, events, render_overlap, summarize_overlap
from fsdp_overlap.profiling.intervals import intersect, measure, subtract, union

MAIN, GLOO_A, GLOO_B = 1, 2, 3


def event(name: str, start: float, end: float, tid: int = MAIN, **more: Any) -> dict[str, Any]:
    category = "cpu_op" if name.startswith(("aten", "c10d", "autograd")) else "user_annotation"
    fields = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid}
    return fields | {"ts": start, "dur": end - start} | more


def summarize(*events: dict[str, Any]) -> OverlapSummary:
    return summarize_overlap({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]})


def gather(unit: str, start: float) -> list[dict[str, Any]]:
    """An issue range of ten microseconds with a broadcast for each of two ranks."""
    return [
        event(f"fsdp_overlap::all_gather({unit})", start, start + 10),
        event("c10d::broadcast_", start + 1, start + 3),
        event("c10d::broadcast_", start + 5, start + 7),
    ]


def test_pieces_of_one_issue_are_one_collective() -> None:
    summary = summarize(
        *gather("blocks.0", 0),
        event("gloo:broadcast", 4, 54, GLOO_A),
        event("gloo:broadcast", 8, 104, GLOO_B),
        event("aten::mm", 20, 100),
    )
    (collective,) = summary.collectives
    assert (collective.kind, collective.name, collective.pass_) == (
        "all_gather",
        "blocks.0",
        "forward",
    )
    assert (collective.start, collective.duration) == (4, 100)
    assert (collective.overlapped, collective.exposed) == (80, 20)
    assert collective.ran_under_compute
    assert summary.exposed == 20


def test_pieces_go_to_units_in_order_of_issue() -> None:
    summary = summarize(
        *gather("a", 0),
        *gather("b", 20),
        # On two threads, out of order in the file.
        event("gloo:broadcast", 45, 60, GLOO_A),
        event("gloo:broadcast", 40, 50, GLOO_B),
        event("gloo:broadcast", 8, 20, GLOO_B),
        event("gloo:broadcast", 4, 45, GLOO_A),
    )
    assert [(c.name, c.start, c.duration) for c in summary.collectives] == [
        ("a", 4, 41),
        ("b", 40, 20),
    ]


def test_waiting_is_not_compute() -> None:
    summary = summarize(
        *gather("a", 0),
        event("gloo:broadcast", 10, 110, GLOO_A),
        event("gloo:broadcast", 10, 110, GLOO_B),
        event("aten::mm", 10, 50),
        event("fsdp_overlap::wait_all_gather(a)", 50, 110),
        event("aten::add_", 100, 108),  # what the wait itself computes
    )
    assert summary.collectives[0].overlapped == 40
    assert not summary.collectives[0].ran_under_compute
    assert summary.exposed == 60


def test_half_of_the_time_in_flight_is_enough() -> None:
    events = [*gather("a", 0), event("gloo:broadcast", 10, 110, GLOO_A)]
    assert summarize(*events, event("aten::mm", 10, 60)).collectives[0].ran_under_compute
    assert not summarize(*events, event("aten::mm", 10, 59)).collectives[0].ran_under_compute


def test_what_prepares_a_collective_is_not_compute() -> None:
    summary = summarize(
        *gather("a", 0),
        event("aten::copy_", 1, 5),
        event("gloo:broadcast", 2, 14, GLOO_A),
        event("gloo:broadcast", 6, 16, GLOO_B),
        event("aten::mm", 13, 40),
    )
    assert summary.collectives[0].overlapped == 3


def test_time_spent_waiting_for_another_is_that_others() -> None:
    summary = summarize(
        *gather("a", 0),
        event("gloo:broadcast", 10, 110, GLOO_A),
        event("gloo:broadcast", 10, 110, GLOO_B),
        *gather("b", 20),
        event("gloo:broadcast", 30, 60, GLOO_A),
        event("gloo:broadcast", 30, 60, GLOO_B),
        event("fsdp_overlap::wait_all_gather(a)", 40, 110),
        event("aten::mm", 110, 200),
        event("fsdp_overlap::wait_all_gather(b)", 200, 201),
    )
    a, b = summary.collectives
    assert (a.exposed, a.room, a.ran_under_compute) == (70, 0, False)
    assert (b.exposed, b.room, b.ran_under_compute) == (0, 90, True)
    assert summary.exposed == 70


def test_what_had_no_compute_before_its_wait_did_not_run_under_compute() -> None:
    # Both are over before they are all issued, because the other rank came first.
    summary = summarize(
        *gather("root", 0),
        event("gloo:broadcast", 2, 9, GLOO_A),
        event("gloo:broadcast", 6, 10, GLOO_B),
        event("fsdp_overlap::wait_all_gather(root)", 11, 12),
        *gather("a", 20),
        event("gloo:broadcast", 22, 29, GLOO_A),
        event("gloo:broadcast", 26, 30, GLOO_B),
        event("aten::mm", 30, 80),
        event("fsdp_overlap::wait_all_gather(a)", 80, 81),
    )
    root, a = summary.collectives
    assert (root.exposed, root.room, root.ran_under_compute) == (0, 0, False)
    assert (a.exposed, a.room, a.ran_under_compute) == (0, 50, True)


def test_work_on_the_backends_threads_is_not_compute() -> None:
    summary = summarize(
        *gather("a", 0),
        event("gloo:broadcast", 10, 110, GLOO_A),
        event("aten::copy_", 20, 100, GLOO_A),
    )
    assert summary.collectives[0].overlapped == 0


def test_a_gather_issued_under_autograd_is_of_the_backward_pass() -> None:
    summary = summarize(
        *gather("a", 0),
        event("gloo:broadcast", 4, 14, GLOO_A),
        event("gloo:broadcast", 8, 14, GLOO_B),
        event("autograd::engine::evaluate_function: MmBackward0", 90, 200),
        event("autograd::engine::evaluate_function: Inner", 92, 95),  # a backward inside a backward
        *gather("b", 100),
        event("gloo:broadcast", 104, 114, GLOO_A),
        event("gloo:broadcast", 108, 114, GLOO_B),
        event("fsdp_overlap::reduce_scatter(b)", 210, 220),  # the callback after the last function
        event("c10d::alltoall_base_", 212, 214),
        event("gloo:all_to_all", 215, 240, GLOO_A),
    )
    assert [(c.kind, c.name, c.pass_) for c in summary.collectives] == [
        ("all_gather", "a", "forward"),
        ("all_gather", "b", "backward"),
        ("reduce_scatter", "b", "backward"),
    ]


def test_what_no_unit_issued_is_other() -> None:
    summary = summarize(
        event("gloo:broadcast", 1, 5, GLOO_A),  # issued before the trace began
        *gather("a", 6),
        event("gloo:broadcast", 8, 20, GLOO_A),
        event("gloo:broadcast", 12, 20, GLOO_B),
        event("c10d::allreduce_", 30, 31),
        event("gloo:all_reduce", 32, 40, GLOO_A),
    )
    assert [(c.kind, c.name, c.duration) for c in summary.collectives] == [
        ("other", "broadcast", 4),
        ("all_gather", "a", 12),
        ("other", "all_reduce", 8),
    ]
    assert summary.collectives[0].pass_ is None


def test_nccl_kernels_belong_to_the_range_that_launched_them() -> None:
    def launch(start: float, correlation: int) -> dict[str, Any]:
        args = {"correlation": correlation}
        return event("cudaLaunchKernelExC", start, start + 1, cat="cuda_runtime", args=args)

    def kernel(
        name: str, start: float, end: float, correlation: int, **args: Any
    ) -> dict[str, Any]:
        args = {"correlation": correlation, **args}
        return event(name, start, end, tid=7, cat="kernel", args=args)

    summary = summarize(
        event("fsdp_overlap::all_gather(a)", 0, 10),
        # The profiler repeats ranges on the GPU's clock; those issued nothing.
        event("fsdp_overlap::all_gather(a)", 100, 200, tid=7, cat="gpu_user_annotation"),
        launch(2, 11),
        kernel("copy_kernel", 90, 100, 11),  # prepares the gather: no compute
        launch(4, 12),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 95, 195, 12),
        launch(20, 13),
        kernel("ampere_sgemm", 120, 300, 13),
        launch(30, 14),
        kernel("ncclDevKernel_AllReduce", 310, 320, 14, **{"Collective name": "allreduce"}),
    )
    gathered, other = summary.collectives
    assert (gathered.name, gathered.duration, gathered.overlapped) == ("a", 100, 75)
    assert (other.kind, other.name, other.overlapped) == ("other", "allreduce", 0)
    assert summary.exposed == 35


def test_totals_and_table() -> None:
    summary = summarize(
        *gather("a", 0),
        *gather("b", 20),
        event("gloo:broadcast", 1000, 2000, GLOO_A),
        event("gloo:broadcast", 1000, 2000, GLOO_B),
        event("gloo:broadcast", 1500, 3500, GLOO_A),
        event("gloo:broadcast", 1500, 3500, GLOO_B),
        event("aten::mm", 1500, 3500),
    )
    total = summary.total("all_gather", "forward")
    assert (total.count, total.under_compute, total.duration, total.exposed) == (2, 2, 3000, 500)
    assert summary.total("all_gather", "backward").count == 0
    assert render_overlap(summary).splitlines() == [
        "collective      pass      ran  under compute  in flight ms  exposed ms",
        "all-gather      forward     2              2           3.0         0.5",
        "all-gather      backward    0              0           0.0         0.0",
        "reduce-scatter  backward    0              0           0.0         0.0",
        "other                       0              0           0.0         0.0",
        "exposed communication time: 0.5 ms",
    ]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("opened", [open, gzip.open])
def test_files_are_read_in_chunks(
    tmp_path: Path, opened: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_CHUNK", chunk)
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"name": "[]"}],
        "traceEvents": [
            {"ph": "M", "name": "process_name", "args": {"labels": ["x", "y"]}},
            *gather('a \\ "é"', 0),
            event("gloo:broadcast", 4, 54, GLOO_A),
        ],
        "traceName": "after",
    }
    path = tmp_path / "trace"
    with opened(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file, indent=chunk % 3, ensure_ascii=False)
    (collective,) = summarize_overlap(path).collectives
    assert (collective.name, collective.duration) == ('a \\ "é"', 50)
    assert summarize_overlap(path) == summarize_overlap(trace)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"traceEvents": 1}', '{"traceEvents": [{"ph": "X", "na', '{"traceEvents": [}]}'],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="not a Chrome trace"):
        summarize_overlap(path)


def test_interval_sets() -> None:
    a = union([(5, 9), (0, 2), (1, 3), (4, 4), (9, 10)])
    assert a == [(0, 3), (5, 10)]
    assert intersect(a, [(2, 6), (8, 20)]) == [(2, 3), (5, 6), (8, 10)]
    assert subtract(a, [(1, 2), (4, 6), (7, 8), (9, 12)]) == [(0, 1), (2, 3), (6, 7), (8, 9)]
    assert subtract([(0, 10), (12, 14)], [(5, 13)]) == [(0, 5), (13, 14)]
    assert measure(a) == 8
