"""The overlap report of our engine and of FSDP2, side by side, from one command.

The model of `link.py` on gloo ranks over a link limited to `--rate` (needs root and `tc`);
both engines take their turn in the same processes, and are profiled one after the other. `--out`
then holds the traces of every rank and the report: overlap.html, overlap.png and overlap.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist

from fsdp_overlap.tools.cli.report import report
from harness import link_training, options, runner
from harness.traces import trace

OURS, FSDP2 = "fsdp_overlap", "FSDP2"

OPTIONS = options.parser(
    __doc__, rate="2gbit", ranks=2, blocks=6, rows=512, sleep=0.0, prefetch=1, steps=2
)
OPTIONS.add_argument(
    "--out", type=Path, default=Path("runs/against_fsdp2"), help="folder for its files"
)


def sample(args: argparse.Namespace) -> None:
    ours, _ = link_training.shard_ours(args, "flat", args.prefetch)
    theirs = link_training.shard_fsdp2(args)
    for name, model in ((OURS, ours), (FSDP2, theirs)):
        step = link_training.make_step(model, link_training.make_batch(args.rows))
        step()  # the order is known from now on
        trace(step, args.steps, args.out / name / f"rank-{dist.get_rank()}.json.gz")


def show(args: argparse.Namespace, _: None) -> None:
    report([args.out / OURS], [args.out / FSDP2], args.out, args.steps)


def launch(args: argparse.Namespace) -> None:
    for old in args.out.glob("*/rank-*.json.gz"):
        old.unlink()
    runner.launch_ranks(args)


if __name__ == "__main__":
    runner.main(OPTIONS, sample, show, launch)
