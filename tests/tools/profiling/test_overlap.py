"""Overlap on real ranks: what is claimed of it, and faults planted for the report to find."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.profiler import ProfilerActivity, profile

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.tools.profiling import Report, assert_overlapped, diagnose, read_report
from fsdp_overlap.tools.profiling.intervals import intersect, union
from support.ranks import run_ranks

pytestmark = pytest.mark.alone

BLOCKS = 4
PIECES = {f"0 [float32, piece {number}]" for number in (1, 2)}
STEPS = 2
PAUSE = 0.1  # seconds


class Block(nn.Module):
    """With 768 rows, its compute takes several times what its collectives take on loopback."""

    def __init__(self, index: int, pause: float) -> None:
        super().__init__()
        self.up = nn.Linear(512, 1024)
        self.down = nn.Linear(1024, 512)
        self.pause = pause if index == BLOCKS - 1 else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        return x + self.down(torch.relu(self.up(x)))


@dataclass(frozen=True)
class Run:
    """How a model is trained. slow: rank 1 pauses in each forward. rows: of each rank's batch; with
    few, what is exposed is a large part of a step. profiles: the machine has other things to do, so
    a claim holds if it holds in one of them."""

    engine: str = "ours"
    prefetch: int = 1
    separate_reduce_scatter_group: bool = True
    slow: bool = False
    rows: int = 192
    profiles: int = 2


def make_step(run: Run) -> Callable[[], None]:
    torch.manual_seed(0)
    pause = PAUSE if run.slow and dist.get_rank() == 1 else 0.0
    model = nn.Sequential(*(Block(index, pause) for index in range(BLOCKS)))
    if run.engine == "FSDP2":
        for block in model:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
    else:
        ctx = FsdpContext(
            prefetch=run.prefetch, separate_reduce_scatter_group=run.separate_reduce_scatter_group
        )
        for block in model:
            fully_shard(block, ctx)
        fully_shard(model, ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(run.rows, 512)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(runs: dict[str, Run], folder: str) -> None:
    """Leaves a trace for each run, profile and rank."""
    for name, run in runs.items():
        step = make_step(run)
        step()
        for number in range(run.profiles):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
                dist.barrier()
                for _ in range(STEPS):
                    step()
                dist.barrier()
            path = Path(folder) / name / str(number)
            path.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path / f"rank-{dist.get_rank()}.json.gz"))


RUNS = {
    "healthy": Run(rows=768, profiles=3),
    "no prefetch": Run(prefetch=0),
    "slow rank": Run(slow=True),
    "shared group": Run(separate_reduce_scatter_group=False),
    "FSDP2": Run(engine="FSDP2"),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    folder = tmp_path_factory.mktemp("traces")
    run_ranks(train, 2, RUNS, str(folder), timeout=200)
    return {
        name: [read_report(*sorted(path.iterdir())) for path in sorted((folder / name).iterdir())]
        for name in RUNS
    }


def test_all_but_the_first_gather_and_the_last_reduction_run_under_compute(
    reports: dict[str, list[Report]],
) -> None:
    failures = []
    for report in reports["healthy"]:
        try:
            # Backward keeps the unit that ran last, and so gathers one less.
            assert_overlapped(
                report,
                forward_all_gathers=BLOCKS - 1,
                backward_all_gathers=BLOCKS - 1,
                reduce_scatters=BLOCKS - 1,
            )
            return
        except AssertionError as error:
            failures.append(str(error))
    pytest.fail("\n\n".join(failures))


def test_gathers_and_reductions_have_lanes_of_their_own_and_run_at_once(
    reports: dict[str, list[Report]],
) -> None:
    together = 0
    for report in reports["healthy"]:
        for rank in report.ranks:
            by_kind = {
                kind: [c for c in rank.collectives if c.kind == kind]
                for kind in ("all_gather", "reduce_scatter")
            }
            gathering, reducing = (
                {lane for c in found for lane in c.lanes} for found in by_kind.values()
            )
            assert gathering.isdisjoint(reducing)
            in_flight = [union(s for c in found for s in c.spans) for found in by_kind.values()]
            together += len(intersect(*in_flight))
    assert together


def test_every_collective_of_every_step_is_there(reports: dict[str, list[Report]]) -> None:
    # float32: half of a block travels, of the first in two pieces when it is reduced.
    size = sum(p.numel() for p in Block(0, 0.0).parameters()) // 2 * 4
    names = {str(index) for index in range(BLOCKS)}
    for name, backward, reductions in (
        ("healthy", BLOCKS - 1, names - {"0"} | PIECES),
        ("FSDP2", BLOCKS, names),
    ):
        for rank in (rank for report in reports[name] for rank in report.ranks):
            forward = rank.total("all_gather", "forward")
            assert (forward.count, forward.nbytes) == (STEPS * BLOCKS, STEPS * BLOCKS * size)
            again = rank.total("all_gather", "backward")
            assert (again.count, again.nbytes) == (STEPS * backward, STEPS * backward * size)
            reduced = rank.total("reduce_scatter")
            assert (reduced.count, reduced.nbytes) == (
                STEPS * len(reductions),
                STEPS * BLOCKS * size,
            )
            assert (rank.steps, rank.world_size) == (STEPS, 2)
            assert {c.name for c in rank.collectives if c.kind == "all_gather"} == names
            assert {c.name for c in rank.collectives if c.kind == "reduce_scatter"} == reductions


@pytest.mark.parametrize(
    ("name", "cause", "says"),
    [
        ("no prefetch", "issued late", "of 3 forward all-gathers are waited for as soon"),
        ("slow rank", "slow rank", "rank 1 is slow"),
        ("shared group", "shared group", "separate_reduce_scatter_group=True"),
        ("FSDP2", "issued late", "of 3 forward all-gathers are waited for as soon"),
    ],
)
def test_a_planted_fault_is_diagnosed(
    reports: dict[str, list[Report]], name: str, cause: str, says: str
) -> None:
    # Of all ranks, and of each by itself: where one is slow, by chance, it waits for nothing.
    views = [
        view
        for report in reports[name]
        for view in (report, *(Report((rank,)) for rank in report.ranks))
    ]
    found = [finding for view in views for finding in diagnose(view)]
    assert any(finding.cause == cause and says in finding.text for finding in found), found


@pytest.mark.parametrize("cause", ["issued late", "shared group"])
def test_a_healthy_run_has_no_such_fault(reports: dict[str, list[Report]], cause: str) -> None:
    found = [[finding.cause for finding in diagnose(report)] for report in reports["healthy"]]
    assert any(cause not in causes for causes in found)


def profile_confirmations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(index, 0.0) for index in range(BLOCKS)))
    ctx = FsdpContext()
    for block in model:
        fully_shard(block, ctx)
    fully_shard(model, ctx)
    batch = torch.randn(8, 512)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.barrier()
        model(batch).sum().backward()
        dist.all_gather([torch.zeros(2) for _ in range(2)], torch.zeros(2))
        dist.barrier()
    found = [c for c in read_report(profiler).ranks[0].collectives if c.kind == "other"]
    confirmations = [c for c in found if c.name.startswith("confirmation of ")]
    assert len(confirmations) == ctx.stats.confirmations > 0
    names = {c.name.removeprefix("confirmation of ") for c in confirmations}
    assert names == {str(index) for index in range(1, BLOCKS)} | PIECES
    others = {c.name for c in found if c not in confirmations}
    assert others <= {"order_check", "all_gather", "barrier"}
    assert "all_gather" in others


def test_confirmations_of_real_ranks_are_known_by_name() -> None:
    run_ranks(profile_confirmations, 2)


def profile_live() -> None:
    step = make_step(Run())
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(ValueError, match="leave its `with` block first"):
            read_report(profiler)
        dist.barrier()
        step()
        dist.barrier()
    (rank,) = read_report(profiler).ranks
    assert rank.total("all_gather").count == 2 * BLOCKS - 1
    with pytest.raises(ValueError, match="torch does only once"):
        read_report(profiler)


def test_a_live_profile_is_read_once() -> None:
    run_ranks(profile_live, 2)
