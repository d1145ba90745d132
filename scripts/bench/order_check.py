"""What it costs that ranks check that they run the same units: a step with the checks against one
without, which is what a user cannot have.

Two gloo ranks on plain loopback train `link.py`'s model. Both systems are ours and take turns
round by round in the same processes; of one, nothing is noted, confirmed or compared. There a step
is also measured that runs its blocks in another order each time, the same on both ranks, so that
nothing can be expected and most all-gathers are confirmed: the dearest that the checks can be.

A sample is the mean of `--steps` steps of forward and backward, in milliseconds, from a barrier to
the end of the slowest rank.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import fsdp_overlap
from fsdp_overlap.comm.comm_streams import CommStream
from fsdp_overlap.desync.order_check import OrderCheck
from harness import link_training, options, output, processes, turns
from harness.measurement import Ratio
from link import check

CHECKED, UNCHECKED = "checked", "unchecked"
STEP, SHUFFLED = "step", "step in an order that nobody expects"
CONFIRMED = "confirmations in a step"
TARGET = 1.01


class Unchecked(OrderCheck):
    """Of ranks that are taken to agree, also on which parameters have a gradient."""

    def record(self, code: int, param_group: Any, dtype: torch.dtype) -> None:
        pass

    def send(
        self, comm_stream: CommStream, groups: Sequence[dist.ProcessGroup], has_gradient: bytearray
    ) -> None:
        self.flags = bytes(has_gradient)

    def read(self) -> bytes:
        return self.flags


def prepare(
    args: argparse.Namespace, rank: int, checked: bool, shuffled: bool
) -> tuple[Callable[[], float], Callable[[], float]]:
    """A step, and how many confirmations the last one took."""
    model = link_training.build(args.blocks)
    blocks = list(model)
    ctx = fsdp_overlap.FsdpContext()
    for block in blocks:
        fsdp_overlap.fully_shard(block, ctx)
    fsdp_overlap.fully_shard(model, ctx)
    if not checked:
        for mesh_info in ctx.mesh_infos:
            mesh_info.__dict__["order_check"] = Unchecked(
                mesh_info.device, False, list, str, ctx.stats.count_confirmation
            )
    run = link_training.make_step(model, rank, args.rows)
    order = random.Random(0)  # the same on both ranks
    before = 0

    def step() -> float:
        nonlocal before
        before = ctx.stats.confirmations
        if shuffled:
            order.shuffle(blocks)
            model._modules.update((str(index), block) for index, block in enumerate(blocks))
        return run()

    return step, lambda: ctx.stats.confirmations - before


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    rank, _ = processes.join_ranks(timeout_s=args.timeout)
    found: dict[str, dict[str, list[float]]] = {}
    confirmed = {}
    for quantity, shuffled in ((STEP, False), (SHUFFLED, True)):
        prepared = {
            name: prepare(args, rank, name == CHECKED, shuffled) for name in (CHECKED, UNCHECKED)
        }
        for _ in range(2):
            check({name: step() for name, (step, _) in prepared.items()})
        steps = {name: turns.timed(step, args.steps) for name, (step, _) in prepared.items()}
        with turns.quiet_gc():
            mine = turns.alternate(steps, args.rounds, 1)
        found[quantity] = processes.of_slowest_rank(mine)
        confirmed[quantity] = [float(prepared[CHECKED][1]())]
    processes.finish({"samples": found, "confirmed": confirmed})


def main() -> None:
    parser = options.parser(__doc__, ranks=2, rows=256, blocks=8, steps=2, rounds=15, timeout=600.0)
    args = parser.parse_args()
    if processes.is_rank():
        return run_rank(args)
    found = processes.launch_ranks(args.ranks, sys.argv[1:], args.timeout)
    samples = found["samples"]
    about = (
        f"{args.ranks} ranks on loopback, {args.blocks} blocks of 12*{link_training.WIDTH}^2, "
        f"{args.rows} rows, {args.steps} steps a sample; {args.rounds} rounds"
    )
    figures = [
        figure
        for quantity, of_each in samples.items()
        for figure in output.figures_of(quantity, "ms", of_each)
    ]
    figures += output.figures_of(CONFIRMED, "", found["confirmed"])
    ratios = [
        Ratio.between(STEP, CHECKED, UNCHECKED, samples[STEP], at_most=TARGET),
        Ratio.between(SHUFFLED, CHECKED, UNCHECKED, samples[SHUFFLED]),
    ]
    output.publish(options.measurement(args, about, figures, ratios), args.json, args.plot)


if __name__ == "__main__":
    main()
