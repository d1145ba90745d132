"""The log of steps: it names the rank that the others wait for, in a job that runs."""

from __future__ import annotations

import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from fsdp_overlap import FsdpContext, fully_shard, meters
from fsdp_overlap.comm import step_clocks
from fsdp_overlap.comm.step_clocks import HostClock, StreamClock, Times
from fsdp_overlap.modelled import (
    ModelledDevice,
    Operation,
    Stream,
    active,
    fake_ranks,
    running,
    stream,
)
from fsdp_overlap.modelled.queues import Queue
from fsdp_overlap.optim import clip_grad_norm_
from fsdp_overlap.profiling import (
    SlowRank,
    StepLog,
    StepTimes,
    read_report,
    slow_ranks,
    step_log,
)
from fsdp_overlap.profiling.step_log import Stragglers
from support.modelled import Program
from support.modelled_twins import Trained
from support.nccl_like import BACKEND
from support.ranks import run_ranks
from support.twins import COPIES, Twins, impatient
from support.zoo import Model, shard_layers

# ---- the rule, by made-up times ----


def test_a_lag_is_to_the_median_of_the_others() -> None:
    draws = random.Random(0)
    for _ in range(500):
        own = [float(draws.randint(0, 5)) for _ in range(draws.randint(2, 9))]
        others = [own[:k] + own[k + 1 :] for k in range(len(own))]
        expected = [mine - statistics.median(rest) for mine, rest in zip(own, others, strict=True)]
        assert slow_ranks.lags(own) == expected
    assert slow_ranks.lags([3.0]) == [0.0]


def named(*steps: list[float], idle: float = 0.0) -> list[list[int]]:
    """Who is named in each of these steps, of which each rank works so long by itself. The slowest
    sets the time of a step."""
    stragglers = Stragglers(range(len(steps[0])), ["here"] * len(steps[0]))
    told = []
    for own in steps:
        times = [Times(max(own), max(own) - mine, idle * mine) for mine in own]
        told.append([slow.rank for slow in stragglers.of(times)])
    return told


def test_a_rank_is_named_from_the_fourth_step_in_which_it_is_slow() -> None:
    assert named(*[[1.0, 1.2, 1.0]] * 6) == [[], [], [], [1], [1], [1]]


def test_a_tenth_of_a_step_is_not_slow_yet() -> None:
    assert not any(named(*[[1.0, 1.1, 1.0]] * 9))


def test_all_slow_ranks_of_a_host_are_named() -> None:
    assert named(*[[1.0] * 4 + [2.0] * 4] * 5)[-1] == [4, 5, 6, 7]


def test_ranks_that_take_turns_are_named_in_their_turns() -> None:
    told = named(*[[2.0, 1.0], [1.0, 2.0]] * 6)
    assert told[8:] == [[0], [1], [0], [1]]


def test_a_hiccup_now_and_then_names_nobody() -> None:
    quiet, hiccup = [1.0] * 3, [1.0, 9.0, 1.0]
    assert not any(named(*[hiccup, quiet, quiet] * 8))


def test_ranks_alike_are_not_named_though_every_step_differs() -> None:
    draws = random.Random(1)
    steps = [[draws.gauss(1.0, 0.03) for _ in range(64)] for _ in range(200)]
    assert not any(named(*steps))


def test_what_a_slow_rank_does_alone_is_compute_or_not() -> None:
    def of(idle: float) -> bool:
        stragglers = Stragglers([0, 1], ["a", "b"])
        [slow] = [stragglers.of([Times(3, 2, 0.1), Times(3, 0, idle)]) for _ in range(4)][-1]
        return slow.computes

    assert of(idle=0.2)
    assert not of(idle=1.9)


def test_a_line_names_ranks_by_host() -> None:
    slow = [SlowRank(k, "node-b", 0.2 + k / 1e3, True) for k in (4, 5)]
    line = str(StepTimes(7, 1.0, 0.25, (*slow, SlowRank(9, "node-c", 0.3, False))))
    assert line == (
        "step 7: 1000 ms, 250 ms of it waiting for communication; rank 9 (node-c) is slow: it "
        "works 300 ms longer by itself than the others; look for what it does alone that is no "
        "compute, such as reading data; ranks 4, 5 (node-b) are slow: they work 205 ms longer by "
        "themselves than the others; look for compute that it does alone, or a slower device"
    )
    many = tuple(SlowRank(k, f"node-{k}", 0.2, True) for k in range(100))
    assert str(StepTimes(7, 1.0, 0.25, many)).endswith("; 97 more ranks are slow")


# ---- on ranks ----


class Block(nn.Module):
    def __init__(self, busy: Callable[[], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.busy = busy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.busy()
        return self.linear(x)  # type: ignore[no-any-return]


def sleep() -> None:
    time.sleep(0.03)


def multiply() -> None:
    one = torch.ones(256, 256)
    end = time.thread_time() + 0.03
    while time.thread_time() < end:
        one @ one


def nothing() -> None:
    pass


def train(log: StepLog, model: nn.Module, steps: int) -> list[StepTimes]:
    told = []
    for _ in range(steps):
        model(torch.ones(4, 32)).mean().backward()
        model.zero_grad()
        told += log.step()
    return told + log.finish()


def _one_is_slow() -> dict[str, list[StepTimes]]:
    found = {}
    for busy in (sleep, multiply):
        model = nn.Sequential(*(Block(busy if dist.get_rank() == 1 else nothing) for _ in "abc"))
        ctx = FsdpContext()
        for block in model:
            fully_shard(block, ctx)
        log = StepLog(ctx, steps_done=100)
        found[busy.__name__] = train(log, model, 10)
        del log
        assert not meters.present  # so that nobody measures any more
    return found


def test_a_rank_that_sleeps_and_one_that_computes_are_named_in_a_job_that_runs() -> None:
    ranks = run_ranks(_one_is_slow, 2)
    for name, computes in (("sleep", False), ("multiply", True)):
        told = ranks[0][name]
        assert told == ranks[1][name]
        assert [times.step for times in told] == [*range(101, 111)]
        [slow] = {slow.rank for times in told for slow in times.slow}
        assert slow == 1
        why = [slow.computes == computes for times in told for slow in times.slow]
        assert sum(why) > len(why) / 2
        # The other rank waits for most of a step.
        assert statistics.median(times.waited / times.seconds for times in told) > 0.25


class MadeUp(HostClock):
    """A clock of steps in which rank 3 works twice as long as the others."""

    def measured(self, waits: bool) -> Iterator[Times]:
        slow = dist.get_rank() == 3
        return (Times(2.0, 0.0 if slow else 1.0, 0.5) for _ in super().measured(waits))


def _made_up() -> list[str]:
    twins = Twins(Model, shard_layers, **COPIES)
    twins.train(2)
    with patch.object(step_log, "make_clock", lambda device: MadeUp()):
        log = StepLog(twins.ctx)
    told = []
    for batch in twins.batches(6):
        twins.backward(*batch)
        twins.step()
        told += log.step()
    told += log.finish()
    return [str(times) for times in told]


def test_ranks_with_copies_are_in_one_log_and_alike_ones_are_not_named() -> None:
    ranks = run_ranks(_made_up, 4)
    for told in ranks:
        assert len(told) == 6
        assert not [line for line in told[:3] if "slow" in line]
        assert all("; rank 3 (" in line and "ranks" not in line for line in told[3:])
        assert told[0] == "step 1: 2000 ms, 1000 ms of it waiting for communication"


def _leaves_out(whole: bool) -> list[str]:
    """Rank 1 leaves all steps out, or one."""
    with impatient():
        twins = Twins(Model, shard_layers)
        log = StepLog(twins.ctx)
        said = []
        try:
            for number, batch in enumerate(twins.batches(16)):
                twins.backward(*batch)
                twins.step()
                if twins.rank == 0 or not (whole or number == 2):
                    log.step()
            raise AssertionError("nobody noticed")
        except RuntimeError as error:
            said.append(str(error))
        twins.ctx.reset()
        twins.optimizer.zero_grad()
        told = []
        for _ in range(4):
            twins.model(twins.mine(next(twins.batches(1))[0])).mean().backward()
            twins.optimizer.zero_grad()
            told += log.step()
        told += log.finish()
        # The first call after the reset brings the ranks together again.
        assert len(told) == 3
        return said


def test_a_rank_that_leaves_the_log_out_is_named_and_training_goes_on() -> None:
    told = r"^StepLog among ranks \[0, 1\] .* failed: rank 1 went on without StepLog.step\(\)"
    said = run_ranks(_leaves_out, 2, True)
    assert re.search(told, said[0][0]), said
    assert "rank 0" in said[1][0], said


def test_ranks_that_end_their_steps_at_other_points_are_told() -> None:
    told = (
        r"number 3 came after 3 backwards on rank 0 and after 4 on rank 1: call it once a step, on"
    )
    said = run_ranks(_leaves_out, 2, False)
    assert any(re.search(told, rank[0]) for rank in said), said


class _WithExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, has_tokens: bool) -> torch.Tensor:
        x = self.first(x)
        return self.expert(x) if has_tokens else x


def _without_tokens() -> int:
    """In one step the expert of two ranks, which lies over a mesh of its own, gets no tokens."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "shard"))
    model, context = _WithExpert(), FsdpContext(init_device_mesh("cpu", (4,)))
    fully_shard(model.expert, context, mesh=grid["shard"])
    fully_shard(model, context)
    log = StepLog(context)
    told = []
    for step in range(4):
        model(torch.ones(2, 4), step != 1 or dist.get_rank() > 1).sum().backward()
        model.zero_grad()
        told += log.step()
    return len(told + log.finish())


def test_an_expert_without_tokens_is_no_step_at_another_point() -> None:
    assert run_ranks(_without_tokens, 4) == [4] * 4


def test_what_another_thread_waits_for_holds_up_no_compute() -> None:
    clock = HostClock()
    with patch.object(meters, "present", [clock]):
        begun = threading.Event()
        done = threading.Event()

        def wait() -> None:
            with meters.waiting():
                begun.set()
                assert done.wait(30)

        thread = threading.Thread(target=wait)
        thread.start()
        assert begun.wait(30)
        done.set()
        thread.join()
    clock.step()
    [times] = clock.measured(True)
    assert times.waited == 0


def _profiled() -> list[str]:
    twins = Twins(Model, shard_layers)
    log = StepLog(twins.ctx)
    batches = list(twins.batches(4))

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        twins.losses(*batch)[0].backward()
        log.step()

    step(batches[0])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.barrier()
        for batch in batches[1:]:
            step(batch)
        dist.barrier()
    return [c.name for c in read_report(profiler).ranks[0].collectives if c.kind == "other"]


def test_a_report_does_not_count_the_messages_of_a_log() -> None:
    names = run_ranks(_profiled, 2)[0]
    assert "order_check" in names
    assert not [name for name in names if "all_gather" in name or "StepLog" in name]


def test_without_units_there_is_nothing_to_measure() -> None:
    with fake_ranks(2, backend="fake"), pytest.raises(ValueError, match="call fully_shard"):
        StepLog(FsdpContext())


# ---- where the host runs ahead ----


class Seconds:
    """Compute and collectives take so long each. The host takes none of it."""

    def __init__(self, compute: float = 0.0, collective: float = 0.0) -> None:
        self._compute = compute
        self._collective = collective

    def on_host(self, operation: Operation) -> float:
        return 0.0

    def end(self, operation: Operation, queue: Queue, enqueued: float, ready: float) -> float:
        is_compute = queue is active().default and operation.group is None
        lasts = self._collective if operation.group is not None else self._compute * is_compute
        return max(ready, enqueued) + lasts


def logged(steps: int = 4, between: float = 0.0) -> list[Times]:
    """What the clock of a log measures on the modelled device, after the first two steps."""
    program = Program(optimizer=None)
    clock = StreamClock(program.ctx.device)
    meters.present.append(clock)
    try:
        for _ in range(steps):
            active().host.ends = max(active().host.ends, active().default.ends) + between
            program.backward()
            program.model.zero_grad()
            clock.step()
    finally:
        meters.present.remove(clock)
    active().host.ends = float("inf")  # all is done by now
    return list(clock.measured(False))[2:]


@pytest.fixture
def nobody() -> Iterator[None]:
    with fake_ranks(4):
        yield


@pytest.mark.usefixtures("nobody")
def test_waits_of_a_stream_and_what_is_idle_before_them_are_told_apart() -> None:
    with running(ModelledDevice(timing=Seconds(collective=1.0))):
        for times in logged():
            assert times.total > 1
            assert times.waited == pytest.approx(times.total)
            assert times.idle == 0
    with running(ModelledDevice(timing=Seconds(compute=1.0))):
        for times in logged():
            assert times.total > 10
            assert times.waited == 0
            assert times.idle < times.total / 4  # what a step computes before its first wait
    with running(ModelledDevice(timing=Seconds(collective=1.0))):
        for times in logged(between=50.0):
            assert times.idle == 50
            assert times.waited == pytest.approx(times.total - 50)


@pytest.mark.usefixtures("nobody")
def test_a_lane_that_waits_for_another_is_no_wait_of_compute() -> None:
    with running(ModelledDevice(timing=Seconds())):
        clock = StreamClock(torch.device("modelled"))
        assert clock.begin() is not None
        with stream(Stream()):
            assert clock.begin() is None


def steady(logs: bool, timing: Seconds | None) -> tuple[list[str], list[str]]:
    """Where the host waits in steps like those before, with a log or without, and what is wrong."""
    with running(ModelledDevice(timing=timing)) as device:
        program = Program()
        log = StepLog(program.ctx) if logs else None
        told = []
        for number in range(6):
            batch = program.batch()
            if number == 3:
                device.syncs.clear()
            program.backward(batch)
            clip_grad_norm_(program.model.parameters(), 1.0)
            program.step()
            device.host.ends += 0.2  # the device is about a step behind
            if log is not None:
                told += log.step()
        assert len(told) >= 3 * logs or timing is None
        seen = list(map(str, device.syncs)), list(map(str, device.findings))
        assert log is None or len(told + log.finish()) == 6
        return seen


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("timing", [None, Seconds(1e-3, 1e-3)], ids=["all is late", "timed"])
def test_a_steady_step_with_a_log_waits_for_the_device_as_one_without(
    timing: Seconds | None,
) -> None:
    waits_of_host, findings = steady(True, timing)
    assert findings == []
    assert waits_of_host == steady(False, timing)[0]
    assert timing or waits_of_host == []


@pytest.mark.usefixtures("nobody")
def test_a_log_that_reads_its_events_too_early_would_be_a_wait() -> None:
    class Early(StreamClock):
        def measured(self, waits: bool) -> Iterator[Times]:
            for _, _, end in self._ended:
                end.synchronize()
            return super().measured(waits)

    with patch.object(step_clocks, "StreamClock", Early):
        waits_of_host, _ = steady(True, None)
    assert any("in measured" in wait for wait in waits_of_host)


def _on_streams() -> tuple[list[str], list[str], list[int]]:
    pace = 3.0 if dist.get_rank() == 1 else 1.0
    with running(ModelledDevice(timing=Seconds(pace, 0.1))) as device:
        twins = Trained(Model, shard_layers)
        log = StepLog(twins.ctx)

        def train(steps: int) -> list[StepTimes]:
            told = []
            for batch in twins.batches(steps):
                twins.backward(*batch)
                twins.step()
                told += log.step()
            return told + log.finish()

        told = [str(times) for times in train(8)]
        twins.ctx.reset()
        after = [times.step for times in train(3)]
        return told, list(map(str, device.findings)), after


def test_ranks_with_streams_name_the_slow_one() -> None:
    for told, findings, after in run_ranks(_on_streams, 2, backend=BACKEND):
        assert after == [10, 11]  # a reset ends the group, and the next step makes another
        assert findings == []
        assert len(told) == 8
        assert "; rank 1 (" in told[-1]
        assert told[-1].endswith("look for compute that it does alone, or a slower device")
