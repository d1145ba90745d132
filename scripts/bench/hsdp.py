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
STEP = "step"
RANKS = 4

OPTIONS = options.parser(
    __doc__, rate="2gbit", blocks=6, rows=64, sleep=50.0, microbatches=2, rounds=7
)
OPTIONS.set_defaults(ranks=RANKS)


def train_ours(
    args: argparse.Namespace, mesh: DeviceMesh, shard_optimizer_over_replicas: bool
) -> tuple[Callable[[], float], int]:
    """A step, and the elements of this rank's first moments."""
    ctx = FsdpContext(mesh, shard_optimizer_over_replicas=shard_optimizer_over_replicas)
    model = sharding.shard_ours(link_training.build(args.blocks, args.sleep), ctx)
    return make_training(args, model, AdamW(model.parameters(), **ADAMW))


def train_fsdp2(args: argparse.Namespace, mesh: DeviceMesh) -> tuple[Callable[[], float], int]:
    """The same of FSDP2."""
    model = sharding.shard_fsdp2(link_training.build(args.blocks, args.sleep), mesh)
    return make_training(args, model, torch.optim.AdamW(model.parameters(), **ADAMW, fused=True))


def make_training(
    args: argparse.Namespace, model: Any, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[], float], int]:
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    step = link_training.make_training(model, args, model.set_requires_all_reduce, optimizer.step)
    return step, held


def sample(args: argparse.Namespace) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    trained = {
        OURS: train_ours(args, mesh, False),
        DIVIDED: train_ours(args, mesh, True),
        FSDP2: train_fsdp2(args, mesh),
    }
    steps = {name: step for name, (step, _) in trained.items()}
    for _ in range(2):
        turns.same_losses({name: step() for name, step in steps.items()})
    held = {name: [held / 1e6] for name, (_, held) in trained.items()}
    return {"samples": turns.slowest_steps(steps, args), "held": held}


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    results = Results(f"a mesh of 2 x {RANKS // 2} ranks, blocks of 12*{link_training.WIDTH}^2")
    results.add(STEP, "ms", found["samples"], (OURS, FSDP2), (DIVIDED, FSDP2), (DIVIDED, OURS))
    results.add("optimizer state of rank 0, each moment", "M elements", found["held"])
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
