"""Training on a mesh (replicate, shard) over a slow link: our step against FSDP2's.

Four ranks in two groups that hold copies of each other's shards. A step has two microbatches:
parameters are gathered and gradients reduced among shards in both, across replicas in the last
alone (`set_requires_all_reduce`), and AdamW's, ours on ours and torch's fused on FSDP2. Ours runs
with copies as they are and with `shard_optimizer_over_replicas`. All traffic shares one link, where
machines would have a faster one inside.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_overlap import FsdpContext
from fsdp_overlap.optim import AdamW
from harness import link_training, options, runner, sharding, turns
from harness.optimizers import ADAMW
from harness.runner import Results

OURS, DIVIDED, FSDP2 = "ours", "ours, copies divided", "FSDP2"
RANKS = 4

OPTIONS = options.parser(
    __doc__, rate="2gbit", blocks=6, rows=64, sleep=50.0, microbatches=2, rounds=7
)
OPTIONS.set_defaults(ranks=RANKS)


def train_ours(
    args: argparse.Namespace, mesh: DeviceMesh, shard_optimizer_over_replicas: bool
) -> Callable[[], float]:
    """A step."""
    ctx = FsdpContext(mesh, shard_optimizer_over_replicas=shard_optimizer_over_replicas)
    model = sharding.shard_ours(link_training.build(args.blocks, args.sleep), ctx)
    return make_step(args, model, AdamW(model.parameters(), **ADAMW))


def make_step(
    args: argparse.Namespace, model: Any, optimizer: torch.optim.Optimizer
) -> Callable[[], float]:
    batch, begin = link_training.make_batch(args.rows), model.set_requires_all_reduce
    return link_training.make_step(model, batch, optimizer.step, args.microbatches, begin)


def sample(args: argparse.Namespace) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    theirs = sharding.shard_fsdp2(link_training.build(args.blocks, args.sleep), mesh)
    adamw = torch.optim.AdamW(theirs.parameters(), **ADAMW, fused=True)
    steps = {
        OURS: train_ours(args, mesh, False),
        DIVIDED: train_ours(args, mesh, True),
        FSDP2: make_step(args, theirs, adamw),
    }
    for _ in range(2):
        turns.same_losses({name: step() for name, step in steps.items()})
    return turns.slowest_steps(steps, args)


def report(args: argparse.Namespace, samples: dict[str, list[float]]) -> Results:
    results = Results(f"a mesh of 2 x {RANKS // 2} ranks, blocks of 12*{link_training.WIDTH}^2")
    results.add("step", "ms", samples, (OURS, FSDP2), (DIVIDED, FSDP2), (DIVIDED, OURS))
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
