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
import torch.distributed as dist
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_overlap
from fsdp_overlap.optim import AdamW
from harness import link_training, output, processes, slow_link, turns
from harness.measurement import Measurement, Ratio
from harness.optimizers import ADAMW
from link import check, timed

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
    rank, _ = processes.join_ranks(timeout_s=args.timeout)
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
        mine = turns.alternate(
            {name: timed(step, 1) for name, step in steps.items()}, args.rounds, 1
        )
    slowest = processes.of_slowest_rank(mine)
    if rank == 0:
        held = {name: held for name, (_, held) in trained.items()}
        processes.report({"samples": slowest, "held": held})
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="2gbit", help="of the link, in tc's words")
    parser.add_argument("--no-limit", action="store_true", help="plain loopback, needs no root")
    parser.add_argument("--rows", type=int, default=64, help="of each rank's batch")
    parser.add_argument("--sleep", type=float, default=50.0, metavar="MS", help="see above")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=2, help="forwards in a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, for the whole run")
    output.add_outputs(parser)
    parser.set_defaults(ranks=RANKS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if processes.is_rank():
        return run_rank(args)
    found = slow_link.launch_on_link(args, sys.argv[1:])
    samples = found["samples"]
    link = "unlimited loopback" if args.no_limit else f"{args.rate} link"
    about = (
        f"torch {torch.__version__}, a mesh of 2 x {RANKS // 2} ranks, {link}, {args.blocks} "
        f"blocks of 12*{link_training.WIDTH}^2, {args.microbatches} microbatches of {args.rows} "
        f"rows, a block sleeps {args.sleep:g} ms in forward, {2 * args.sleep:g} in backward; "
        f"{args.rounds} rounds"
    )
    settings = {
        "torch": torch.__version__,
        "rate": None if args.no_limit else args.rate,
        "ranks": args.ranks,
        "blocks": args.blocks,
        "rows": args.rows,
        "sleep_ms": args.sleep,
        "microbatches": args.microbatches,
        "rounds": args.rounds,
    }
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
    argv = output.repeated_argv()
    output.publish(Measurement(about, settings, argv, figures, ratios), args.json, args.plot)


if __name__ == "__main__":
    main()
