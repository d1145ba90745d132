"""Training on a mesh (replicate, shard) over a slow link: our step against FSDP2's.

Four gloo ranks in two groups that hold copies of each other's shards, on a loopback that carries at
most `--rate` in a network namespace made for the run (needs root and `tc`). A step has two
microbatches: parameters are gathered and gradients reduced among shards in both, across replicas in
the last alone (`set_requires_all_reduce`), and AdamW's, ours on ours and torch's fused on FSDP2.
Ours runs with copies as they are and with `shard_optimizer_over_replicas`. The systems take turns
round by round in the same processes. All traffic shares one link, where machines would have a
faster one inside.

Besides what it computes, a block sleeps `--sleep` ms in forward and twice as long in backward,
which takes time and none of the host's cores, as a GPU's compute does. A sample is one step, in
milliseconds, from a barrier to the end of the slowest rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_overlap
from fsdp_overlap.optim import AdamW
from harness import link_training, options, output, processes, slow_link, turns
from harness.measurement import Ratio
from harness.optimizers import ADAMW
from link import check

OURS, DIVIDED, FSDP2 = "ours", "ours, copies divided", "FSDP2"
STEP = "step"
RANKS = 4


def train_ours(
    args: argparse.Namespace, mesh: DeviceMesh, shard_optimizer_over_replicas: bool
) -> tuple[Callable[[], float], int]:
    """A step, and the elements of this rank's first moments."""
    model = link_training.build(args.blocks, args.sleep)
    ctx = fsdp_overlap.FsdpContext(
        mesh, shard_optimizer_over_replicas=shard_optimizer_over_replicas
    )
    for block in model:
        fsdp_overlap.fully_shard(block, ctx)
    fsdp_overlap.fully_shard(model, ctx)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    optimizer = AdamW(model.parameters(), **ADAMW)
    step = link_training.make_training(model, args, model.set_requires_all_reduce, optimizer.step)
    return step, held


def train_fsdp2(args: argparse.Namespace, mesh: DeviceMesh) -> tuple[Callable[[], float], int]:
    """The same of FSDP2."""
    model = link_training.build(args.blocks, args.sleep)
    for block in model:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    assert isinstance(model, fsdp2.FSDPModule)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    step = link_training.make_training(model, args, model.set_requires_all_reduce, optimizer.step)
    return step, held


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    processes.join_ranks(timeout_s=args.timeout)
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    trained = {
        OURS: train_ours(args, mesh, False),
        DIVIDED: train_ours(args, mesh, True),
        FSDP2: train_fsdp2(args, mesh),
    }
    steps = {name: step for name, (step, _) in trained.items()}
    for _ in range(2):
        check({name: step() for name, step in steps.items()})
    with turns.quiet_gc():
        samplers = {name: turns.timed(step) for name, step in steps.items()}
        mine = turns.alternate(samplers, args.rounds, 1)
    held = {name: held for name, (_, held) in trained.items()}
    processes.finish({"samples": processes.of_slowest_rank(mine), "held": held})


def parse() -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        rate="2gbit",
        no_limit=False,
        rows=64,
        sleep=50.0,
        blocks=6,
        microbatches=2,
        rounds=7,
        timeout=600.0,
    )
    parser.set_defaults(ranks=RANKS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if processes.is_rank():
        return run_rank(args)
    found = slow_link.launch_on_link(args, sys.argv[1:])
    samples = found["samples"]
    about = (
        f"a mesh of 2 x {RANKS // 2} ranks, {slow_link.in_words(args)}, {args.blocks} "
        f"blocks of 12*{link_training.WIDTH}^2, {args.microbatches} microbatches of {args.rows} "
        f"rows, a block sleeps {args.sleep:g} ms in forward, {2 * args.sleep:g} in backward; "
        f"{args.rounds} rounds"
    )
    held = {name: [count / 1e6] for name, count in found["held"].items()}
    figures = [
        *output.figures_of(STEP, "ms", samples),
        *output.figures_of("optimizer state of rank 0, each moment", "M elements", held),
    ]
    ratios = [
        Ratio.between(STEP, OURS, FSDP2, samples),
        Ratio.between(STEP, DIVIDED, FSDP2, samples),
        Ratio.between(STEP, DIVIDED, OURS, samples),
    ]
    output.publish(options.measurement(args, about, figures, ratios), args.json, args.plot)


if __name__ == "__main__":
    main()
