"""What hand-made traces say, in exact numbers."""

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_overlap.tools.profiling import events, read_report
from fsdp_overlap.tools.profiling.intervals import clip, covers, intersect, measure, subtract, union
from support.traces import GLOO_A, GLOO_B, Step, event, gather, read, trace_of


def test_pieces_of_one_issue_are_one_collective() -> None:
    report = read(
        *gather("blocks.0", 0),
        event("gloo:broadcast", 4, 54, GLOO_A),
        event("gloo:broadcast", 8, 104, GLOO_B),
        event("aten::mm", 20, 100),
    )
    (collective,) = report.collectives
    assert (collective.kind, collective.name, collective.pass_) == (
        "all_gather",
        "blocks.0",
        "forward",
    )
    assert (collective.start, collective.duration) == (4, 100)
    assert (collective.overlapped, collective.exposed) == (80, 20)
    assert collective.ran_under_compute
    assert report.exposed_time == 20


def test_pieces_go_to_units_in_order_of_issue() -> None:
    report = read(
        *gather("a", 0),
        *gather("b", 20),
        # On two threads, out of order in the file.
        event("gloo:broadcast", 45, 60, GLOO_A),
        event("gloo:broadcast", 40, 50, GLOO_B),
        event("gloo:broadcast", 8, 20, GLOO_B),
        event("gloo:broadcast", 4, 45, GLOO_A),
    )
    assert [(c.name, c.start, c.duration) for c in report.collectives] == [
        ("a", 4, 41),
        ("b", 40, 20),
    ]


def test_waiting_is_not_compute() -> None:
    report = read(
        *gather("a", 0),
        event("gloo:broadcast", 10, 110, GLOO_A),
        event("gloo:broadcast", 10, 110, GLOO_B),
        event("aten::mm", 10, 50),
        event("fsdp_overlap::wait_all_gather(a)", 50, 110),
        event("aten::add_", 100, 108),  # what the wait itself computes
    )
    assert report.collectives[0].overlapped == 40
    assert not report.collectives[0].ran_under_compute
    assert report.exposed_time == 60


def test_half_of_the_time_in_flight_is_enough() -> None:
    events = [*gather("a", 0), event("gloo:broadcast", 10, 110, GLOO_A)]
    assert read(*events, event("aten::mm", 10, 60)).collectives[0].ran_under_compute
    assert not read(*events, event("aten::mm", 10, 59)).collectives[0].ran_under_compute


def test_what_prepares_a_collective_is_not_compute() -> None:
    report = read(
        *gather("a", 0),
        event("aten::copy_", 1, 5),
        event("gloo:broadcast", 2, 14, GLOO_A),
        event("gloo:broadcast", 6, 16, GLOO_B),
        event("aten::mm", 13, 40),
    )
    assert report.collectives[0].overlapped == 3


def test_time_spent_waiting_for_another_is_that_others() -> None:
    report = read(
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
    a, b = report.collectives
    assert (a.exposed, a.room, a.ran_under_compute) == (70, 0, False)
    assert (b.exposed, b.room, b.ran_under_compute) == (0, 90, True)
    assert report.exposed_time == 70


def test_what_had_no_compute_before_its_wait_did_not_run_under_compute() -> None:
    # Both are over before they are all issued, because the other rank came first.
    report = read(
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
    root, a = report.collectives
    assert (root.exposed, root.room, root.ran_under_compute) == (0, 0, False)
    assert (a.exposed, a.room, a.ran_under_compute) == (0, 50, True)


def test_work_on_the_backends_threads_is_not_compute() -> None:
    report = read(
        *gather("a", 0),
        event("gloo:broadcast", 10, 110, GLOO_A),
        event("aten::copy_", 20, 100, GLOO_A),
    )
    assert report.collectives[0].overlapped == 0


def test_a_gather_issued_under_autograd_is_of_the_backward_pass() -> None:
    report = read(
        *gather("a", 0),
        event("gloo:broadcast", 4, 14, GLOO_A),
        event("gloo:broadcast", 8, 14, GLOO_B),
        event("autograd::engine::evaluate_function: MmBackward0", 90, 200),
        event("autograd::engine::evaluate_function: Inner", 92, 95),  # a backward inside a backward
        *gather("b", 100),
        event("gloo:broadcast", 104, 114, GLOO_A),
        event("gloo:broadcast", 108, 114, GLOO_B),
        event("fsdp_overlap::root_post_backward_callback()", 205, 290),  # after the last function
        event("fsdp_overlap::reduce_scatter(b)", 210, 220),
        event("c10d::alltoall_base_", 212, 214),
        event("gloo:all_to_all", 215, 240, GLOO_A),
        *gather("c (shadow)", 250),
        event("gloo:broadcast", 254, 264, GLOO_A),
        event("gloo:broadcast", 258, 264, GLOO_B),
    )
    assert [(c.kind, c.name, c.pass_) for c in report.collectives] == [
        ("all_gather", "a", "forward"),
        ("all_gather", "b", "backward"),
        ("reduce_scatter", "b", "backward"),
        ("all_gather", "c (shadow)", "backward"),
    ]


def test_a_receive_on_the_training_thread_does_not_hide_its_compute() -> None:
    report = read(
        event("c10d::recv_", 0, 1),
        event("gloo:recv", 1, 5),  # on the thread that called it
        event("aten::mm", 10, 30),
    )
    assert report.compute_time == 20


def test_compiled_and_custom_ops_compute_and_the_engines_do_not() -> None:
    report = read(
        event("## Call CompiledFxGraph 0 ##", 0, 10, cat="cpu_op"),
        event("mylib::op", 10, 30, cat="cpu_op"),
        event("fsdp::chunk_cat", 30, 40, cat="cpu_op"),
        event("torch::autograd::AccumulateGrad", 40, 50, cat="cpu_op"),
        event("FSDP::all_gather_copy_out (a)", 50, 60),
        event("aten::split_with_sizes_copy", 51, 59),
        event("aten::einsum", 60, 80),
        event("aten::bmm", 62, 78),
    )
    assert (report.compute_time, report.gemm_time) == (50, 16)


def test_two_units_of_one_name_are_waited_for_in_turn() -> None:
    report = read(
        *gather("blocks.0", 0),  # of one model
        event("gloo:broadcast", 4, 50, GLOO_A),
        event("gloo:broadcast", 8, 50, GLOO_A),
        *gather("blocks.0", 20),  # of another
        event("gloo:broadcast", 50, 90, GLOO_A),
        event("gloo:broadcast", 51, 90, GLOO_A),
        event("fsdp_overlap::wait_all_gather(blocks.0)", 40, 50),
        event("aten::mm", 50, 100),
        event("fsdp_overlap::wait_all_gather(blocks.0)", 100, 101),
    )
    assert [c.exposed for c in report.collectives] == [10, 0]


def test_barriers_around_what_is_profiled_do_not_count() -> None:
    report = read(
        event("c10d::barrier", 0, 1),
        event("gloo:barrier", 1, 500, GLOO_A),
        *(e | {"ts": e["ts"] + 1000} for e in Step().events),
        event("c10d::barrier", 50_000, 50_001),
        event("gloo:barrier", 50_001, 60_000, GLOO_A),
    )
    assert all(c.name != "barrier" for c in report.collectives)
    assert report.window[0] == 1001
    assert report.duration < 20_000


def test_checkpointing_runs_forward_again_as_a_part_of_backward() -> None:
    report = read(
        event("autograd::engine::evaluate_function: CheckpointBackward", 0, 100),
        event("fsdp_overlap::pre_backward(a)", 1, 2),
        event("fsdp_overlap::pre_forward(a)", 10, 11),
        event("aten::mm", 20, 30),
        event("fsdp_overlap::post_forward(a)", 31, 32),
        event("aten::mm", 40, 50),
        event("fsdp_overlap::post_backward(a)", 60, 61),
        event("aten::mm", 70, 80),
    )
    labels = [c.label for c in report.compute]
    assert labels == ["backward a", "backward a", "outside units"]


def test_what_no_unit_issued_is_other() -> None:
    report = read(
        event("gloo:broadcast", 1, 5, GLOO_A),  # issued before the trace began
        *gather("a", 6),
        event("gloo:broadcast", 8, 20, GLOO_A),
        event("gloo:broadcast", 12, 20, GLOO_B),
        event("c10d::allreduce_", 30, 31),
        event("gloo:all_reduce", 32, 40, GLOO_A),
        event("fsdp_overlap::order_check()", 41, 44),
        event("c10d::allreduce_", 42, 43),
        event("gloo:all_reduce", 43, 46, GLOO_A),
        event("aten::mm", 46, 47),
    )
    assert [(c.kind, c.name, c.duration, c.pass_) for c in report.collectives] == [
        ("all_gather", "a", 12, "forward"),
        ("other", "all_reduce", 8, None),
        ("other", "order_check", 3, None),
    ]


def test_nccl_kernels_belong_to_the_range_that_launched_them() -> None:
    report = read(
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
    gathered, other = report.collectives
    assert (gathered.name, gathered.duration, gathered.overlapped) == ("a", 100, 75)
    assert (other.kind, other.name, other.overlapped) == ("other", "allreduce", 0)
    assert report.exposed_time == 35


def test_passes_are_those_of_the_host_also_where_a_gpu_is_behind() -> None:
    def issued(kind: str, unit: str, at: float, correlation: int) -> list[dict[str, Any]]:
        return [event(f"fsdp_overlap::{kind}({unit})", at, at + 10), launch(at + 1, correlation)]

    reduced = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
    report = read(
        *issued("all_gather", "a", 0, 1),
        *issued("reduce_scatter", "b", 20, 2),
        *issued("reduce_scatter", "a", 40, 3),
        *issued("all_gather", "a", 60, 4),  # waits for no compute, so it may be the first
        *issued("all_gather", "b", 80, 5),
        kernel("ncclDevKernel_AllGather_RING_LL", 100, 150, 1),
        kernel(reduced, 200, 300, 2),
        kernel("ncclDevKernel_AllGather_RING_LL", 210, 310, 4),
        kernel(reduced, 300, 400, 3),
        kernel("ncclDevKernel_AllGather_RING_LL", 310, 410, 5),
    )
    passes = [[(c.kind, c.name) for c in each] for each in report.passes]
    assert passes == [
        [("all_gather", "a")],
        [("reduce_scatter", "b"), ("reduce_scatter", "a")],
        [("all_gather", "a"), ("all_gather", "b")],
    ]


def launch(start: float, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation}
    return event("cudaLaunchKernelExC", start, start + 1, cat="cuda_runtime", args=args)


def kernel(name: str, start: float, end: float, correlation: int, **args: Any) -> dict[str, Any]:
    args = {"correlation": correlation, "stream": 7, **args}
    return event(name, start, end, tid=7, cat="kernel", args=args)


def test_kernels_are_of_the_op_that_launched_them_whatever_they_are_called() -> None:
    report = read(
        event("fsdp_overlap::pre_forward(a)", 0, 2),
        event("aten::linear", 5, 20),
        event("aten::addmm", 6, 19),
        launch(10, 1),
        event("fsdp_overlap::post_forward(a)", 25, 26),
        event("aten::add", 30, 40),
        launch(35, 2),
        kernel("nvjet_tst_128x256", 100, 150, 1),
        kernel("a_gemm_by_name_alone", 150, 160, 2),
        kernel("triton_fused", 160, 170, 3),  # launched by nobody known
    )
    assert [(c.label, c.op) for c in report.compute] == [
        ("forward a", "aten::addmm"),
        ("outside units", "aten::add"),
        ("outside units", "triton_fused"),
    ]
    assert (report.gemm_time, report.compute_time) == (50, 70)


def test_a_host_that_runs_ahead_gives_no_room() -> None:
    report = read(
        event("fsdp_overlap::all_gather(a)", 0, 10),
        launch(2, 1),
        event("fsdp_overlap::pre_forward(b)", 20, 21),
        launch(25, 2),
        kernel("compute_of_the_step_before", 30, 500, 2),
        kernel("ncclDevKernel_AllGather_RING_LL", 500, 600, 1),
    )
    (gathered,) = report.collectives
    assert (gathered.room, gathered.exposed, gathered.ran_under_compute) == (0, 100, False)


def test_gloo_beside_kernels_is_seen() -> None:
    report = read(*gather("a", 0), event("gloo:broadcast", 4, 54, GLOO_A), kernel("k", 10, 20, 9))
    assert [(c.name, c.overlapped) for c in report.collectives] == [("a", 10)]


def test_nccl_kernels_say_their_bytes_stream_and_group() -> None:
    def gather(correlation: int, **args: Any) -> dict[str, Any]:
        return kernel("ncclDevKernel_AllGather_RING_LL", 90, 190, correlation, **args)

    sizes = {"In msg nelems": 1000, "Out msg nelems": 8000, "dtype": "BFloat16"}
    report = read(
        event("FSDP::all_gather (a)", 0, 10),
        launch(4, 1),
        gather(1, **sizes, **{"Process Group Name": "0"}),
        event("FSDP::post_backward_reduce (a)", 20, 30),
        launch(24, 2),
        gather(2),
    )
    known, unknown = report.collectives
    assert (known.nbytes, known.lanes, known.group) == (14000, ("stream 7",), "0")
    assert known.bandwidth == pytest.approx(14000 / 100e-6)
    assert (unknown.nbytes, unknown.group, unknown.bandwidth) == (None, None, None)


def test_totals() -> None:
    report = read(
        event("fsdp_overlap::all_gather(a) 3000 B", 0, 10),
        event("c10d::broadcast_", 1, 3),
        event("fsdp_overlap::all_gather(b) 5000 B", 20, 30),
        event("c10d::broadcast_", 21, 23),
        event("gloo:broadcast", 1000, 2000, GLOO_A),
        event("gloo:broadcast", 1500, 3500, GLOO_A),
        event("aten::mm", 1500, 3500),
    )
    total = report.total("all_gather", "forward")
    assert (total.count, total.under_compute, total.duration, total.exposed) == (2, 2, 3000, 500)
    assert total.hidden == pytest.approx(5 / 6)
    assert (total.nbytes, total.bandwidth) == (8000, pytest.approx(8000 / 3e-3))
    assert report.total("all_gather", "backward").count == 0
    assert report.total("all_gather", "backward").hidden is None
    assert (report.compute_time, report.gemm_time, report.communication_time) == (2000, 2000, 2500)
    assert (report.window, report.bound) == ((0, 3500), 2500)


def test_a_step_is_read_as_it_was_played() -> None:
    report = read(*Step(units=3, compute=1000, all_gather=400, reduce_scatter=400).events)
    found = [(c.kind, c.pass_, c.name, c.exposed > 0) for c in report.collectives]
    assert found == [
        ("all_gather", "forward", "blocks.0", True),
        ("all_gather", "forward", "blocks.1", False),
        ("all_gather", "forward", "blocks.2", False),
        ("all_gather", "backward", "blocks.1", False),
        ("all_gather", "backward", "blocks.0", False),
        ("reduce_scatter", "backward", "blocks.2", False),
        ("reduce_scatter", "backward", "blocks.1", False),
        ("reduce_scatter", "backward", "blocks.0", True),
    ]
    by_unit = {(c.kind, c.pass_, c.name): c for c in report.collectives}
    hidden = by_unit["all_gather", "forward", "blocks.2"]
    assert [label for label, _ in hidden.under] == ["forward blocks.1"]
    assert (hidden.held_up, hidden.nbytes, hidden.lanes) == (None, 4000, ("thread 2",))
    first, last = report.collectives[0], report.collectives[-1]
    assert (first.under, first.held_up) == ((), "forward blocks.0")
    assert (last.held_up, last.lanes) == ("optimizer", ("thread 3",))
    assert report.compute_by_op() == [("aten::mm", 3 * 3000 + 100)]
    assert (report.steps, report.compute_time) == (1, 9100)
    assert report.exposed_time == pytest.approx(first.exposed + last.exposed)


def test_fsdp2_is_read_by_its_own_names() -> None:
    shapes = {
        "Input Dims": [[4104], [2052], [], [], []],
        "Input type": ["c10::BFloat16", "c10::BFloat16", "", "Scalar", "Scalar"],
    }
    report = read(
        event("FSDP::pre_forward", 0, 100),
        event("FSDP::all_gather", 10, 90),
        event("c10d::_allgather_base_", 20, 25, args=shapes),
        event("gloo:all_gather", 30, 80, GLOO_A),
        event("aten::mm", 110, 150),
        event("FSDP::backward_prefetch for layers.0", 200, 260),
        event("FSDP::all_gather (layers.0)", 201, 259),
        event("c10d::_allgather_base_", 210, 211),
        event("gloo:all_gather", 220, 250, GLOO_A),
        event("FSDP::pre_backward (layers.0)", 260, 262),
        event("aten::mm", 262, 300),
        event("FSDP::post_backward_reshard (layers.0)", 300, 301),
        event("FSDP::post_backward_reduce (layers.0)", 301, 360),
        event("c10d::_reduce_scatter_base_", 302, 303),
        event("gloo:all_reduce", 304, 350, GLOO_A),
    )
    assert [(c.kind, c.name, c.nbytes, c.exposed) for c in report.collectives] == [
        ("all_gather", "(root)", 4104, 50),
        ("all_gather", "layers.0", None, 30),
        ("reduce_scatter", "layers.0", None, 46),
    ]
    assert [c.label for c in report.compute] == ["forward (root)", "backward layers.0"]


def test_steps_are_those_of_the_profiler_or_the_optimizer() -> None:
    step = [*gather("a", 0), event("gloo:broadcast", 4, 14, GLOO_A), event("aten::mm", 20, 30)]
    step += [event("fsdp_overlap::pre_forward(a)", 70, 71)]
    optimizers = [event("Optimizer.step#AdamW.step", t, t + 3) for t in (40, 44, 100, 104)]
    optimizers += [event("Optimizer.step#Muon.step", t, t + 1) for t in (48, 108)]
    assert read(*step).steps == 1
    assert read(*step, *optimizers).steps == 2
    steps = [event("ProfilerStep#7", 0, 110), event("ProfilerStep#8", 110, 112)]  # the last, empty
    assert read(*step, *optimizers, *steps).steps == 1
    assert read_report(trace_of(*step, *optimizers), steps=4).ranks[0].steps == 4


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
        "distributedInfo": {"rank": 3, "world_size": 4},
    }
    path = tmp_path / "trace"
    with opened(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file, indent=chunk % 3, ensure_ascii=False)
    seen: list[int] = []
    (collective,) = read_report(path, progress=seen.append).ranks[0].collectives
    assert read_report(path).ranks[0].rank == 3
    assert (collective.name, collective.duration) == ('a \\ "é"', 50)
    assert read_report(path) == read_report(trace)
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        "3",
        "{}",
        '{"x": "' + "long" * 1000,
        '{"x": [1], "traceEvents": 1}',
        '{"traceEvents": 1}',
        '{"traceEvents": [{"ph": "X", "na',
        '{"traceEvents": [}]}',
        '{"traceEvents": []',
        '{"traceEvents": [{"a": 1}]}',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path}: not a Chrome trace"):
        read_report(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("key", "value"),
    [("ts", "1"), ("ts", math.nan), ("dur", "1"), ("dur", None), ("name", 3), ("ph", None)],
)
def test_a_broken_event_is_shown(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "trace.json"
    event = {"cat": "kernel", "name": "k" * 100, "ts": 1, "dur": 1}
    good, bad = ({"ph": "X", **event}, {"ph": "X", **event, key: value})
    if value is None:
        del bad[key]
        bad["ts"] = None
    lines = [json.dumps(good)] * 20000 + [json.dumps(bad), json.dumps(good)]
    path.write_text('{"traceEvents": [\n' + ",\n".join(lines) + "]}")
    shown = re.escape(str(bad)[:100])
    with pytest.raises(
        ValueError, match=f"{path}: not a Chrome trace: cannot read the event {shown}"
    ):
        read_report(path)
    path.write_text(path.read_text().replace(lines[20000], lines[20000].replace(":", "")))
    with pytest.raises(ValueError, match=f"{path}: not a Chrome trace: .*line 20002 column"):
        read_report(path)


@pytest.mark.parametrize(
    "values",
    [
        {"distributedInfo": 3},
        {"distributedInfo": {"rank": "0"}},
        {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "tid": []}]},
    ],
)
def test_a_trace_that_torch_would_not_write_is_named(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**trace_of(*Step().events), **values}))
    with pytest.raises(ValueError, match=f"^{path}(:| says)"):
        read_report(path)


@pytest.mark.parametrize(
    "broken",
    [
        3,
        None,
        {"name": "k"},
        {"ph": "X", "ts": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "1"},
    ],
)
def test_an_event_that_is_none_is_shown(broken: Any) -> None:
    with pytest.raises(ValueError, match="not a Chrome trace: cannot read the event"):
        read_report({"traceEvents": [broken]})


def test_interval_sets() -> None:
    a = union([(5, 9), (0, 2), (1, 3), (4, 4), (9, 10)])
    assert a == [(0, 3), (5, 10)]
    assert intersect(a, [(2, 6), (8, 20)]) == [(2, 3), (5, 6), (8, 10)]
    assert subtract(a, [(1, 2), (4, 6), (7, 8), (9, 12)]) == [(0, 1), (2, 3), (6, 7), (8, 9)]
    assert subtract([(0, 10), (12, 14)], [(5, 13)]) == [(0, 5), (13, 14)]
    assert measure(a) == 8
    assert [covers(a, time) for time in (-1, 0, 2, 3, 4, 5, 11)] == [
        False,
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    assert clip(a, 2, 6) == [(2, 3), (5, 6)]
    assert clip(a, 3, 5) == clip(a, 12, 13) == clip(a, 6, 5) == []
