"""What it costs that ranks check that they run the same units: a step with the checks against one
without, which is what a user cannot have.

Both systems are ours; of one, nothing is noted, confirmed or compared. There a step is also
measured that runs its blocks in another order each time, the same on both ranks, so that nothing
can be expected and most all-gathers are confirmed: the dearest that the checks can be.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_overlap import FsdpContext
from fsdp_overlap.comm.comm_streams import CommStream
from fsdp_overlap.desync.order_check import OrderCheck
from harness import link_training, options, runner, sharding, turns
from harness.runner import Results

CHECKED, UNCHECKED = "checked", "unchecked"
STEP, SHUFFLED = "step", "step in an order that nobody expects"
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


def prepare(args: argparse.Namespace, checked: bool, shuffled: bool) -> Callable[[], float]:
    """A step."""
    model = link_training.build(args.blocks)
    blocks = list(model)
    ctx = FsdpContext()
    sharding.shard_ours(model, ctx)
    if not checked:
        for mesh_info in ctx.mesh_infos:
            unchecked = Unchecked(mesh_info.device, str, is_read_at_once=True)
            unchecked.has_gradient = mesh_info.order_check.has_gradient
            mesh_info.__dict__["order_check"] = unchecked
    run = link_training.make_step(model, link_training.make_batch(args.rows))
    order = random.Random(0)  # the same on both ranks

    def step() -> float:
        if shuffled:
            order.shuffle(blocks)
            model._modules.update((str(index), block) for index, block in enumerate(blocks))
        return run()

    return step


OPTIONS = options.parser(__doc__, ranks=2, blocks=8, rows=256, steps=2, rounds=15)


def sample(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    found = {}
    for quantity, shuffled in ((STEP, False), (SHUFFLED, True)):
        steps = {name: prepare(args, name == CHECKED, shuffled) for name in (CHECKED, UNCHECKED)}
        for _ in range(2):
            turns.same_losses({name: step() for name, step in steps.items()})
        found[quantity] = turns.slowest_steps(steps, args)
    return found


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    results = Results(f"blocks of 12*{link_training.WIDTH}^2")
    results.add(STEP, "ms", found[STEP], (CHECKED, UNCHECKED, TARGET))
    results.add(SHUFFLED, "ms", found[SHUFFLED], (CHECKED, UNCHECKED))
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
