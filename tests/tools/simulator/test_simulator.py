"""Training steps on emulated time: links, slowdowns, and what a whole step takes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fsdp_overlap.tools.emulator import Operation, fake_ranks
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.simulator.clock import Clock, LinkSchedule
from support.timed_program import LAYER_BYTES, UNITS, WIDTH, Seconds, predict


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=12))
def test_a_link_serves_one_moment_once_and_never_idles_before_who_is_ready(
    transfers: list[tuple[int, int]],
) -> None:
    link, used = LinkSchedule(), set[int]()
    for ready, seconds in transfers:
        moments = [at for at in range(200) if at >= ready and at not in used][:seconds]
        assert link.reserve(ready, seconds) == moments[-1] + 1
        used.update(moments)
    assert sum(end - start for start, end in link.busy) == len(used)
    ends = [0.0, *(end for _, end in link.busy)]
    assert all(start >= end for end, (start, _) in zip(ends, link.busy, strict=False))


@pytest.mark.parametrize(
    ("start", "seconds", "end"),
    [
        (0.0, 1.0, 1.0),  # before the first
        (0.0, 3.0, 3.5),  # half of a second's work less in the first
        (2.0, 1.0, 3.5),  # all of it within
        (3.0, 3.0, 6.625),  # what is left of the first, a pause, and the second
        (9.0, 2.0, 11.0),  # after the last
    ],
)
def test_compute_is_slower_while_a_collective_is_under_way(
    start: float, seconds: float, end: float
) -> None:
    one, other = LinkSchedule(), LinkSchedule()
    one.reserve(2.0, 1.5)
    other.reserve(2.5, 1.0)
    other.reserve(5.25, 3.0)
    costs = Seconds(seconds, slowdown=0.5)
    clock = Clock(costs, links={"one": one, "other": other})
    operation = Operation("mm", [], [])
    assert clock.end(operation, Queue(1, ""), 0.0, start) == pytest.approx(end)


def run_on(clock: Clock, stream: Queue, *names: str) -> None:
    """Enqueues products and gathers at time 0."""
    full = torch.empty(LAYER_BYTES, dtype=torch.int8)
    with fake_ranks(8):
        for name in names:
            group = dist.group.WORLD if name == "all_gather" else None
            operation = Operation(name, [], [full], group=group)
            stream.ends = clock.end(operation, stream, 0.0, stream.ends)


@pytest.mark.parametrize("is_compute_first", [False, True])
def test_what_is_enqueued_first_makes_no_difference_to_slowdown(is_compute_first: bool) -> None:
    """In the first 3 seconds 2 seconds of compute are done."""
    clock, compute, gathers = Clock(Seconds(1.0, 3.0, slowdown=0.5)), Queue(1, ""), Queue(2, "")
    if is_compute_first:
        run_on(clock, compute, *["mm"] * 4)
    run_on(clock, gathers, "all_gather")
    if not is_compute_first:
        run_on(clock, compute, *["mm"] * 4)
    assert gathers.ends == 3.0
    assert compute.ends == pytest.approx(5.0)
    assert max(each.end for each in clock.ran if each.name == "mm") == compute.ends


def test_a_pause_takes_up_what_compute_before_it_is_late() -> None:
    clock, compute = Clock(Seconds(4.0, 3.0, slowdown=0.5)), Queue(1, "")
    run_on(clock, compute, "mm")
    compute.ends += 0.5  # of the second that it will be late
    run_on(clock, compute, "mm")
    run_on(clock, Queue(2, ""), "all_gather")
    assert [each.end for each in clock.ran] == pytest.approx([5.0, 9.0, 3.0])
    assert compute.ends == pytest.approx(9.0)


# Products: one in forward, two in backward, but for the first layer's, whose input needs none.
PRODUCTS = 3 * UNITS - 1


def test_a_step_is_compute_and_what_has_nothing_to_run_under() -> None:
    """The first gather, and the reduction of the last, which begins when the first layer's backward
    is done."""
    found = predict(compute=1.0, gather=0.25, reduce=0.5)
    assert found.seconds == pytest.approx(PRODUCTS + 0.25 + 0.5)
    report = found.report
    assert report.compute_time == pytest.approx(1e6 * PRODUCTS)
    assert report.exposed_time == pytest.approx(1e6 * 0.75)


def test_the_next_microbatch_is_gathered_under_the_backward_before_it() -> None:
    """Nothing was edited between the two, so only the first gather of the step is exposed."""
    found = predict(compute=1.0, gather=0.25, reduce=0.5, microbatches=3)
    assert found.seconds == pytest.approx(3 * PRODUCTS + 0.25 + 0.5)


@pytest.mark.slow
def test_a_host_that_is_many_passes_ahead_takes_no_memory_for_each() -> None:
    few, many = (predict(1.0, 0.25, 0.5, microbatches=count).reserved for count in (3, 150))
    assert few == many


def test_a_step_goes_at_the_pace_of_the_slowest_device_and_collectives_do_not() -> None:
    found = predict(compute=1.0, gather=0.25, reduce=0.5, slowest=1.5)
    assert found.seconds == pytest.approx(1.5 * PRODUCTS + 0.25 + 0.5)


def test_where_communication_is_longer_it_decides() -> None:
    """Gathers and reductions share the link, which never rests. In backward the last layer is
    still whole."""
    found = predict(compute=1.0, gather=4.0, reduce=4.0)
    traffic = UNITS * 4.0 + (UNITS - 1) * 4.0 + UNITS * 4.0
    assert found.seconds == pytest.approx(traffic)


def test_a_slow_host_decides_where_it_is_slower_than_the_device() -> None:
    fast, slow = (predict(1e-6, 1e-6, 1e-6, host).seconds for host in (1e-9, 1e-3))
    assert fast == pytest.approx(PRODUCTS * 1e-6, rel=0.5)
    assert slow > 40 * 1e-3


def test_the_trace_has_what_the_context_counts() -> None:
    collectives = predict(1.0, 0.25, 0.5, host=1e-6).report.collectives
    kinds = [each.kind for each in collectives if each.kind != "other"]
    assert kinds.count("all_gather") == 2 * UNITS - 1
    assert kinds.count("reduce_scatter") == UNITS
    names = {each.name for each in collectives if each.kind == "all_gather"}
    assert names == {str(number) for number in range(UNITS)}


def test_the_trace_says_which_unit_computes_and_in_which_pass() -> None:
    report = predict(1.0, 0.25, 0.5, host=1e-6).report
    products = [part.label for part in report.compute if part.end - part.start > 0.5e6]
    forward = [f"forward {number}" for number in range(UNITS)]
    backward = [f"backward {number}" for number in reversed(range(1, UNITS))]
    assert list(dict.fromkeys(products)) == [*forward, *backward, "backward 0"]


def test_memory_is_what_tensors_take() -> None:
    """Parameters, gradients and two moments of this rank, at most three full layers, a reduce input
    or two, and activations."""
    found = predict(1.0, 0.25, 0.5)
    at_rest = 3 * UNITS * LAYER_BYTES // 8
    assert (
        at_rest + 2 * LAYER_BYTES < found.memory < at_rest + 8 * LAYER_BYTES + 16 * 4 * WIDTH * 20
    )
    assert found.reserved >= found.memory
