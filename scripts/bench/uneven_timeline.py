"""Draws docs/uneven.png: steps of two ranks of which one alone runs a conditional tower.

Gloo ranks over a link limited to `--rate` (needs root and `tc`) train three blocks, before which
rank 0 runs three more that make a tower. The last of three steps is drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.tools.profiling import read_report
from fsdp_overlap.tools.profiling.plot import write_png
from harness import options, runner
from harness.traces import trace

WIDTH, ROWS, BLOCKS = 1024, 512, 3


def build() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS))
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.text = build(), build()

    def forward(self, x: torch.Tensor, has_image: bool) -> torch.Tensor:
        return self.text(self.tower(x) if has_image else x)


OPTIONS = options.parser(__doc__, rate="2gbit", ranks=2)
OPTIONS.add_argument("--out", type=Path, default=Path("runs/uneven"), help="folder of traces")


def sample(args: argparse.Namespace) -> None:
    model, rank = Model(), dist.get_rank()
    ctx = FsdpContext(sync_module_states=True)
    for block in (*model.tower, *model.text):
        fully_shard(block, ctx)
    fully_shard(model.tower, ctx, conditional=True)
    fully_shard(model, ctx)
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x, has_image=rank == 0).square().mean().backward()
        model.zero_grad()

    for _ in range(2):  # what follows what is known from now on
        step()
    trace(step, 1, args.out / f"rank-{rank}.json.gz")


def draw(args: argparse.Namespace, _: None) -> None:
    report = read_report(*sorted(args.out.glob("rank-*.json.gz")), steps=1)
    write_png({"": report}, Path("docs/uneven.png"))


if __name__ == "__main__":
    runner.main(OPTIONS, sample, draw)
