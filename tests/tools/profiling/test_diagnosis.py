"""What the report finds in traces made by hand, each with one fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_overlap.tools.profiling import Diagnosis, Report, assert_overlapped, diagnose, read_report
from fsdp_overlap.tools.profiling.drawing import draw
from fsdp_overlap.tools.profiling.json_report import write_json
from support.traces import GLOO_A, Step, event, read, report_of, trace_of


def later(step: Step, time: float) -> list[dict[str, Any]]:
    return [{**e, "ts": e["ts"] + time} for e in step.events]


def causes(report: Report) -> list[str]:
    return [finding.cause for finding in diagnose(report)]


def find(report: Report, cause: str) -> Diagnosis:
    (found,) = [finding for finding in diagnose(report) if finding.cause == cause]
    return found


def test_nothing_is_wrong_with_a_step_that_hides_all() -> None:
    report = report_of(Step(units=8, all_gather=40, reduce_scatter=40))
    assert causes(report) == ["hidden"]
    assert_overlapped(report, all_gathers=7, backward_all_gathers=6, reduce_scatters=7)


def test_what_only_the_ends_expose_is_said_of_them() -> None:
    report = report_of(Step(units=8, all_gather=800, reduce_scatter=800))
    finding = find(report, "edge")
    assert causes(report) == ["edge"]
    # All of the first gather, and of the last reduce-scatter.
    assert finding.cost == pytest.approx(1600, rel=0.02)
    assert "of blocks.0" in finding.text


def test_without_prefetch_gathers_are_issued_late() -> None:
    report = report_of(Step(prefetch=0))
    late = [finding for finding in diagnose(report) if finding.cause == "issued late"]
    # Without the first of forward, which nothing could hide, and the last of it, which is kept.
    assert any("3 of 3 forward all-gathers" in finding.text for finding in late)
    assert any("2 of 2 backward all-gathers" in finding.text for finding in late)
    assert all("FsdpContext(prefetch=1)" in finding.text for finding in late)
    assert sum(finding.cost for finding in late) == pytest.approx(5 * 400, rel=0.02)


def test_a_shared_group_is_found() -> None:
    apart, shared = (
        report_of(Step(all_gather=1500, reduce_scatter=1900, shared=shared))
        for shared in (False, True)
    )
    assert "shared group" not in causes(apart)
    finding = find(shared, "shared group")
    assert "separate_reduce_scatter_group=True" in finding.text
    assert finding.cost > 1000
    assert shared.ranks[0].exposed_time > apart.ranks[0].exposed_time + 1000


def test_a_shared_group_is_said_where_it_costs_nothing_yet() -> None:
    report = report_of(Step(units=8, all_gather=40, reduce_scatter=40, shared=True))
    assert sorted(causes(report)) == ["hidden", "shared group"]
    assert "0.00 ms a step are exposed" in find(report, "shared group").text


def test_compute_that_is_too_short_is_named() -> None:
    report = report_of(Step(units=6, compute=1000, all_gather=200, reduce_scatter=3000))
    finding = find(report, "short compute")
    assert "reduce-scatter of blocks." in finding.text
    assert "in backward is exposed" in finding.text
    assert "merge small units" in finding.text


def test_more_communication_than_compute_is_said() -> None:
    report = report_of(Step(all_gather=4000, reduce_scatter=8000))
    finding = find(report, "more communication than compute")
    rank = report.ranks[0]
    assert finding.cost == rank.communication_time - rank.compute_time > 0
    assert rank.bound == rank.communication_time


@pytest.mark.parametrize("computes", [True, False])
def test_a_slow_rank_is_named(computes: bool) -> None:
    # The last gather of the fast rank, and its reduce-scatters, are in flight until the slow rank
    # comes to them.
    slow = Step(compute=2000) if computes else Step(pause=8000)
    fast = Step(reduce_scatter=400 + 12000 / 4, all_gather=400 if computes else 500)
    report = report_of(fast, slow)
    finding = find(report, "slow rank")
    assert report.slowest.rank == 1
    assert finding.text.startswith("rank 1 is slow: ")
    assert ("compute that it does alone" in finding.text) == computes
    mine, others = report.waits_for_ranks[1], report.waits_for_ranks[0]
    assert mine is not None
    assert others is not None
    assert mine < others


def test_ranks_alike_have_no_straggler() -> None:
    report = report_of(Step(), Step(compute=1020))
    assert "slow rank" not in causes(report)


def test_a_lag_is_to_the_median_of_the_others() -> None:
    ranks = [Step(compute=each) for each in (1000, 2000, 2100, 3000)]
    report = report_of(*ranks)
    own = [rank.own_time for rank in report.ranks]
    assert report.lag == own[3] - own[1]
    assert report.has_straggler
    assert report_of(*ranks[:1]).lag == 0


def test_ranks_are_put_on_one_clock() -> None:
    late = trace_of(*later(Step(), 5e6), rank=1)
    report = read_report(trace_of(*Step().events, rank=0), late)
    drawn = [(bar.start, bar.end, bar.what) for bar in draw({"": report}).bars]
    half = len(drawn) // 2
    assert drawn[:half] == [
        (pytest.approx(start), pytest.approx(end), what) for start, end, what in drawn[half:]
    ]
    assert report.clock_offsets == (0, pytest.approx(5e6))
    assert report.waits_for_ranks == (pytest.approx(0), pytest.approx(0))


def test_ranks_that_ran_other_collectives_are_not_compared() -> None:
    report = report_of(Step(units=3), Step(units=4))
    assert report.waits_for_ranks == (None, None)
    assert report.clock_offsets == (0, 0)


def test_a_host_that_does_neither_is_said() -> None:
    assert "idle" in causes(report_of(Step(pause=20_000)))
    assert "idle" not in causes(report_of(Step(pause=100)))


def test_collectives_that_no_unit_issued_are_said() -> None:
    more = [event("c10d::allreduce_", 13000, 13001), event("gloo:all_reduce", 13002, 19000, GLOO_A)]
    report = read_report(trace_of(*Step().events, *more))
    assert "all_reduce: see who calls it" in find(report, "not of a unit").text


def test_confirmations_are_known_by_name() -> None:
    # Each is an all-gather that is marked by the wait for it alone; then one of the user's own.
    more = []
    for unit, start in ((1, 13000), (2, 13500)):
        more += [
            event("c10d::allgather_", start, start + 1),
            event("gloo:all_gather", start + 2, start + 400, GLOO_A),
            event(f"fsdp_overlap::wait_order_check(blocks.{unit})", start + 3, start + 401),
        ]
    more += [
        event("c10d::allgather_", 14000, 14001),
        event("gloo:all_gather", 14002, 14100, GLOO_A),
    ]
    report = read_report(trace_of(*Step().events, *more))
    found = [c for c in report.ranks[0].collectives if c.kind == "other"]
    assert [c.name for c in found] == [
        "confirmation of blocks.1",
        "confirmation of blocks.2",
        "all_gather",
    ]
    assert [c.engine for c in found] == ["fsdp_overlap", "fsdp_overlap", None]
    assert found[0].exposed == 397  # from the wait on
    text = find(report, "not of a unit").text
    assert "most of it confirmations: where a step does something else" in text


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("order_check()", "the check of the order at the end of backward"),
        ("all_reduce(blocks.1)", "what travels between replicas"),
        ("copies_reduce_scatter(blocks.1)", "what travels between replicas"),
        ("all_to_all(Muon)", "Muon's exchange of cut matrices"),
    ],
)
def test_the_librarys_own_collectives_are_known_by_name(mark: str, says: str) -> None:
    more = [
        event(f"fsdp_overlap::{mark}", 13000, 13004),
        event("c10d::allreduce_", 13001, 13002),
        event("gloo:all_reduce", 13003, 14000, GLOO_A),
        event(f"fsdp_overlap::wait_{mark}", 13005, 14001),
    ]
    report = read_report(trace_of(*Step().events, *more))
    assert f"most of it {says}" in find(report, "not of a unit").text


def test_the_assertion_says_what_did_not_run_under_compute() -> None:
    report = report_of(Step(units=4, prefetch=0))
    with pytest.raises(AssertionError) as raised:
        assert_overlapped(report, all_gathers=2, reduce_scatters=3)
    message = str(raised.value)
    assert "rank 0: 0 of 4 forward all-gathers ran under compute at 0.0 ms, not 2, " in message
    assert "with at most 50% of each exposed:" in message
    assert "  blocks.3: in flight 0.40 ms, exposed 0.40, compute until the wait 0.00" in message
    assert "reduce-scatters" not in message
    assert_overlapped(report, reduce_scatters=3)


def test_the_assertion_is_about_every_pass() -> None:
    healthy, bad = Step(units=3), later(Step(units=3, prefetch=0), 50_000)
    both = read_report(trace_of(*healthy.events, *bad))
    assert both.ranks[0].steps == 2
    assert_overlapped(both, reduce_scatters=2)
    with pytest.raises(AssertionError, match="0 of 3 forward all-gathers ran under compute at 50"):
        assert_overlapped(both, forward_all_gathers=1)
    with pytest.raises(AssertionError, match="2 passes have backward reduce-scatters, in 3 steps"):
        assert_overlapped(trace_of(*healthy.events, *bad), reduce_scatters=1, steps=3)


def test_the_assertion_takes_how_much_of_a_collective_may_be_exposed() -> None:
    # 1.6 ms under 1 ms of compute in forward, and under 2 ms in backward.
    report = report_of(Step(units=4, all_gather=1600))
    exposed = {c.name: c.exposed / c.duration for c in report.ranks[0].collectives[1:4]}
    assert all(0.35 < share < 0.40 for share in exposed.values()), exposed
    assert_overlapped(report, forward_all_gathers=3)
    assert_overlapped(report, forward_all_gathers=3, exposed_at_most=0.40)
    with pytest.raises(AssertionError, match=r"0 of 4 forward .* with at most 35% of each exposed"):
        assert_overlapped(report, forward_all_gathers=3, exposed_at_most=0.35)
    # Twice the compute leaves nothing exposed.
    assert_overlapped(report, backward_all_gathers=3, exposed_at_most=0.01)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"exposed_at_most=.*: give a share"):
            assert_overlapped(report, all_gathers=1, exposed_at_most=share)


def test_an_assertion_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="say how many"):
        assert_overlapped(report_of(Step()))


def test_traces_of_one_rank_cannot_stand_for_two() -> None:
    trace = trace_of(*Step().events, rank=1)
    with pytest.raises(ValueError, match="both of rank 1: give traces of one run"):
        read_report(trace, trace)


def test_a_trace_without_training_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no collective and no compute"):
        read_report(trace_of())
    with pytest.raises(ValueError, match="no trace given"):
        read_report()
    with pytest.raises(ValueError, match="steps=-1: a trace holds at least one"):
        read_report(trace_of(*Step().events), steps=-1)


def test_collectives_that_were_called_and_never_seen_are_no_overlap() -> None:
    blind = [e for e in Step().events if not e["name"].startswith("gloo:")]
    with pytest.raises(ValueError, match=r"none in flight: profile with ProfilerActivity\.CUDA"):
        read_report(trace_of(*blind))


def test_a_model_of_one_unit_is_told_to_shard_its_blocks() -> None:
    assert "call fully_shard() on its blocks" in find(report_of(Step(units=1)), "edge").text


def test_each_evaluation_has_a_first_gather() -> None:
    events = Step(units=4).events
    backward = min(e["ts"] for e in events if "_backward(" in e["name"])
    forward = [e for e in events if e["ts"] + e["dur"] <= backward]
    passes = [{**e, "ts": e["ts"] + 1e5 * k} for k in range(4) for e in forward]
    report = read_report(trace_of(*passes))
    assert [len(found) for found in report.ranks[0].passes] == [4, 4, 4, 4]
    assert "issued late" not in causes(report)


def test_long_gathers_are_late_all_the_same() -> None:
    report = report_of(Step(units=8, compute=100, all_gather=20_000, prefetch=0))
    assert any("7 of 7 forward all-gathers" in finding.text for finding in diagnose(report))


def test_collectives_of_one_lane_are_told_to_queue() -> None:
    report = report_of(Step(units=12, compute=1000, all_gather=100, reduce_scatter=2600))
    text = find(report, "short compute").text
    assert "behind others in its lane" in text
    assert "prefetch" not in text


def test_traces_without_ranks_are_numbered() -> None:
    report = read_report(trace_of(*Step().events), trace_of(*Step(pause=8000).events))
    assert [rank.rank for rank in report.ranks] == [0, 1]


def test_the_record_holds_every_collective(tmp_path: Path) -> None:
    report = report_of(Step(), Step(compute=1010))
    write_json({"mine": report}, tmp_path / "overlap.json")
    written = json.loads((tmp_path / "overlap.json").read_text())["runs"]["mine"]
    assert [finding["text"] for finding in written["findings"]] == [
        finding.text for finding in diagnose(report)
    ]
    for rank, found in zip(report.ranks, written["ranks"], strict=True):
        assert found["rank"] == rank.rank
        assert found["per_step"]["exposed"] == rank.exposed_time
        assert found["totals"]["reduce-scatters"]["count"] == 4
        collectives = found["collectives"]
        assert [c["name"] for c in collectives] == [c.name for c in rank.collectives]
        assert sum(c["exposed"] for c in collectives) == sum(c.exposed for c in rank.collectives)
        assert all(c["nbytes"] == 4000 for c in collectives)


def test_one_rank_alone_needs_no_number() -> None:
    assert read(*Step().events).rank is None
    assert causes(read_report(trace_of(*Step(prefetch=0).events)))[0] == "issued late"
