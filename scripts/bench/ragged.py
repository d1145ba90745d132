"""What a gather and a reduction of ragged shards cost the host, at many ranks of which few hold
something: calls of those ranks alone, and torch's lists, which have a call for each rank.

The shards are those of one of 16 blocks of nine parameters whose matrices stay whole. The group
returns at once from each call, so its own time comes on top: torch's NCCL group makes a work, two
events and an entry in its flight recorder for each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import RaggedTensorCollectives, choose
from fsdp_overlap.layout import ParamGroupPlan, ParamSpec, TensorAtomic, plan_units
from fsdp_overlap.tools.emulator import fake_ranks
from fsdp_overlap.tools.emulator.ranks import FakeProcessGroup
from fsdp_overlap.tools.emulator.works import FinishedWork
from fsdp_overlap.tools.simulator.simulate import BACKEND
from harness import options, runner, turns
from harness.measurement import Sweep
from harness.runner import Results

SHAPES = [(512, 512)] * 4 + [(512, 1536)] * 3 + [(512,)] * 2
AT_MOST_MS = 0.3
CALLS = ("allgather", "reduce_scatter", "broadcast", "reduce")
OPTIONS = options.parser(__doc__, rounds=30, warmup=3)
OPTIONS.add_argument("--ranks", type=int, nargs="+", default=[64, 1024], help="sizes of groups")


def planned(ranks: int) -> ParamGroupPlan:
    block = [ParamSpec(str(i), shape, torch.float32) for i, shape in enumerate(SHAPES)]
    return plan_units([block] * 16, ranks, TensorAtomic())[8]


def timed(call: Callable[[], object], times: int = 20) -> Callable[[], float]:
    def sample() -> float:
        start = time.process_time()
        for _ in range(times):
            call()
        return (time.process_time() - start) / times * 1e3

    return sample


def measure(args: argparse.Namespace, ranks: int, results: Results) -> None:
    plan = planned(ranks)
    owners = sum(map(bool, plan.shard_numels))
    results.add("calls", "", {"owners": [owners], "list": [ranks]}, at=ranks)
    at_once = dict.fromkeys((*CALLS, "_start_coalescing", "_end_coalescing"), _at_once)
    with fake_ranks(ranks, BACKEND), patch.multiple(FakeProcessGroup, **at_once):
        group = dist.group.WORLD
        assert group is not None
        systems = {"owners": choose(group, "cuda", plan), "list": RaggedTensorCollectives(plan)}
        full, shard = torch.zeros(plan.numel), torch.zeros(plan.shard_numels[0])
        for quantity, calls in {
            "gather": {k: lambda s=s: s.all_gather(full, shard, group) for k, s in systems.items()},
            "reduction": {k: lambda s=s: s.reduce_scatter(full, group) for k, s in systems.items()},
        }.items():
            samplers = {name: timed(call) for name, call in calls.items()}
            with turns.quiet_gc():
                samples = turns.alternate(samplers, args.rounds, args.warmup)
            most = {"owners": AT_MOST_MS}
            results.add(quantity, "ms", samples, ("owners", "list"), at=ranks, at_most=most)


def _at_once(*_: object) -> FinishedWork:
    return FinishedWork()


def main() -> None:
    args = OPTIONS.parse_args()
    torch.set_num_threads(1)
    results = Results("9 parameters, 16 blocks", Sweep("ranks"))
    for ranks in args.ranks:
        measure(args, ranks, results)
    runner.publish(args, results)


if __name__ == "__main__":
    main()
