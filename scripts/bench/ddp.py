"""A step of training against DDP's, which people pick where a model fits.

A step is forward, backward, clipping by norm and AdamW. Ranks train one model in four ways:

- ours at stage 3;
- ours at stage 2, where `start_param_sync()` after the optimizer's step gathers parameters under
  what follows;
- FSDP2;
- DDP, as it is without options.

Ours clips with `fsdp_overlap.optim.clip_grad_norm_` and steps with `fsdp_overlap.optim.AdamW`, the
others with torch's, foreach and fused. DDP steps all parameters on every rank, the others a part.
Each of `--shapes` is trained on plain loopback and on a limited link. The first losses must agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_overlap import FsdpContext
from harness import link_training, options, runner, sharding, turns
from harness.runner import Results
from link import FSDP2

STAGE3, STAGE2, DDP = "ours, stage 3", "ours, stage 2", "DDP"
LOOPBACK = "loopback"
# Of ours to DDP.
TARGETS = {STAGE3: 1.10, STAGE2: 1.00, FSDP2: None}
# So many losses are compared. Later ones drift apart by rounding alone, because AdamW takes steps
# of one size whatever the gradient, so that FSDP2 and DDP differ too.
FIRST_STEPS = 3


@dataclass(frozen=True)
class Shape:
    """rows: of each rank's batch. steps: of a sample."""

    width: int
    blocks: int
    rows: int
    steps: int


SHAPES = {
    "wide": Shape(1024, 4, 128, 1),
    "middle": Shape(512, 8, 256, 2),
    "small": Shape(128, 12, 256, 8),
}


def ours(model: nn.Sequential, stage: int, batch: torch.Tensor) -> Callable[[], float]:
    ctx = FsdpContext(sharding.cpu_mesh())
    ctx.plan_layout([*model, model])
    sharding.shard_ours(model, ctx).set_zero_stage(stage)
    clip_and_step = link_training.update_ours(model, prefetch_next_forward=False)

    def update() -> None:
        clip_and_step()
        if stage < 3:
            ctx.start_param_sync()

    return link_training.make_step(model, batch, update)


def theirs(model: nn.Module, batch: torch.Tensor) -> Callable[[], float]:
    return link_training.make_step(model, batch, link_training.update_torchs(model))


def make_steps(shape: Shape) -> dict[str, Callable[[], float]]:
    """A step of each system. Collective."""
    batch = link_training.make_batch(shape.rows, shape.width)
    makers: dict[str, Callable[[nn.Sequential], Callable[[], float]]] = {
        STAGE3: lambda model: ours(model, 3, batch),
        STAGE2: lambda model: ours(model, 2, batch),
        FSDP2: lambda model: theirs(sharding.shard_fsdp2(model), batch),
        DDP: lambda model: theirs(DistributedDataParallel(model), batch),
    }
    return {
        name: make(link_training.build(shape.blocks, width=shape.width))
        for name, make in makers.items()
    }


OPTIONS = options.parser(__doc__, ranks=2, rounds=9)
OPTIONS.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
options.add_rates(OPTIONS, LOOPBACK, [LOOPBACK, "2gbit"])


def sample(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a step of one shape, by system."""
    [name] = args.shapes
    steps = make_steps(SHAPES[name])
    for _ in range(FIRST_STEPS):
        turns.same_losses({name: step() for name, step in steps.items()})
    args.steps = SHAPES[name].steps
    return turns.slowest_steps(steps, args)


def launch(args: argparse.Namespace) -> dict[str, Mapping[str, list[float]]]:
    """The samples of each shape on each link."""
    return {
        f"{shape}, {rate}: step": runner.launch_ranks(
            args, ["--shapes", shape], rate=rate, no_limit=rate == LOOPBACK
        )
        for rate in args.rates
        for shape in args.shapes
    }


def report(args: argparse.Namespace, found: dict[str, Mapping[str, list[float]]]) -> Results:
    shapes = (
        f"{name}: {SHAPES[name].blocks} blocks of 12*{SHAPES[name].width}^2, "
        f"{SHAPES[name].rows} rows a rank"
        for name in args.shapes
    )
    results = Results("; ".join(shapes))
    for quantity, samples in found.items():
        results.add(quantity, "ms", samples, *((name, DDP, most) for name, most in TARGETS.items()))
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, launch)
