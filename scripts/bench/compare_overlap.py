"""The overlap report of our engine and of FSDP2, side by side, from one command.

The model of `link.py` on gloo ranks over a link limited to `--rate` (needs root and `tc`);
both engines take their turn in the same processes, and are profiled one after the other. `--out`
then holds the traces of every rank and the report: overlap.html, overlap.png and overlap.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fsdp_overlap.tools.cli.report import report
from harness import link_training, processes, slow_link

OURS, FSDP2 = "fsdp_overlap", "FSDP2"


def run_rank(args: argparse.Namespace) -> None:
    rank, _ = processes.join_ranks(timeout_s=args.timeout)
    ours, _ = link_training.shard_ours(args, "flat", args.prefetch)
    theirs = link_training.shard_fsdp2(args)
    for name, model in ((OURS, ours), (FSDP2, theirs)):
        update = None
        if args.whole:
            updates = {OURS: link_training.update_ours, FSDP2: link_training.update_torchs}
            update = updates[name](model)
        step = link_training.make_step(model, rank, args.rows, update)
        step()  # the order is known from now on
        trace(step, args.steps, args.out / name / f"rank-{rank}.json.gz")
    processes.finish(None)


def trace(step: Callable[[], float], steps: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # With shapes, which tell how many bytes FSDP2's collectives move.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.barrier()
        for _ in range(steps):
            step()
        dist.barrier()
    profiler.export_chrome_trace(str(path))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/against_fsdp2"), help="folder for its files"
    )
    parser.add_argument("--rate", default="2gbit", help="of the link, in tc's words")
    parser.add_argument("--no-limit", action="store_true", help="plain loopback, needs no root")
    parser.add_argument("--prefetch", type=int, default=1, help="of our context")
    parser.add_argument(
        "--shared-group", action="store_true", help="our gathers and reductions share one group"
    )
    parser.add_argument("--rows", type=int, default=512, help="of each rank's batch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="steps to profile")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="MS", help="as in link.py")
    parser.add_argument("--whole", action="store_true", help="as in link.py")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, for the whole run")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if processes.is_rank():
        return run_rank(args)
    for old in args.out.glob("*/rank-*.json.gz"):
        old.unlink()
    slow_link.launch_on_link(args, sys.argv[1:])
    report([args.out / OURS], [args.out / FSDP2], args.out, args.steps)


if __name__ == "__main__":
    main()
