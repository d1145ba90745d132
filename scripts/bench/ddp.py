"""A step of training against DDP's, which people pick where a model fits.

A step is forward, backward, clipping by norm and AdamW. Gloo ranks train one model in four ways,
which take turns round by round in the same processes:

- ours at stage 3;
- ours at stage 2, where `start_param_sync()` after the optimizer's step gathers parameters under
  what follows;
- FSDP2, every block a unit;
- DDP, as it is without options.

Ours clips with `fsdp_overlap.optim.clip_grad_norm_` and steps with `fsdp_overlap.optim.AdamW`, the
others with torch's, foreach and fused. DDP steps all parameters on every rank, the others a part.

Each of `--shapes` is trained on plain loopback and on a link of `--rate`, limited in a network
namespace made for the run (needs root and `tc`). A sample is the mean of as many steps as the shape
says, from a barrier to the end of the slowest rank, in milliseconds. The first losses must agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import fsdp_overlap
from fsdp_overlap import optim
from harness import link_training, options, output, processes, slow_link, turns
from harness.measurement import Figure, Ratio
from harness.optimizers import ADAMW
from link import FSDP2, check

STAGE3, STAGE2, DDP = "ours, stage 3", "ours, stage 2", "DDP"
LOOPBACK = "loopback"
MAX_NORM = 1.0
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


def make_step(
    model: nn.Module,
    batch: torch.Tensor,
    clip: Callable[[list[nn.Parameter]], object],
    optimizer: torch.optim.Optimizer,
    after: Callable[[], None] = lambda: None,
) -> Callable[[], float]:
    """A step of training, which returns the loss."""
    parameters = list(model.parameters())

    def step() -> float:
        loss = model(batch).square().mean()
        loss.backward()
        clip(parameters)
        optimizer.step()
        after()
        optimizer.zero_grad()
        return loss.item()

    return step


def ours(shape: Shape, stage: int, batch: torch.Tensor) -> Callable[[], float]:
    model = link_training.build(shape.blocks, width=shape.width)
    ctx = fsdp_overlap.FsdpContext(init_device_mesh("cpu", (dist.get_world_size(),)))
    ctx.plan_layout([*model, model])
    for block in model:
        fsdp_overlap.fully_shard(block, ctx)
    cast(fsdp_overlap.FsdpModule, fsdp_overlap.fully_shard(model, ctx)).set_zero_stage(stage)
    optimizer = optim.AdamW(model.parameters(), **ADAMW)
    after = ctx.start_param_sync if stage < 3 else lambda: None
    return make_step(
        model, batch, lambda each: optim.clip_grad_norm_(each, MAX_NORM), optimizer, after
    )


def theirs(model: nn.Module, batch: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    return make_step(
        model, batch, lambda each: clip_grad_norm_(each, MAX_NORM, foreach=True), optimizer
    )


def make_fsdp2(shape: Shape) -> nn.Module:
    model = link_training.build(shape.blocks, width=shape.width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh)
    return model


def make_steps(shape: Shape, names: list[str]) -> dict[str, Callable[[], float]]:
    """A step of each system. Collective."""
    batch = link_training.make_batch(dist.get_rank(), shape.rows, shape.width)
    plain = link_training.build(shape.blocks, width=shape.width)
    makers: dict[str, Callable[[], Callable[[], float]]] = {
        STAGE3: lambda: ours(shape, 3, batch),
        STAGE2: lambda: ours(shape, 2, batch),
        FSDP2: lambda: theirs(make_fsdp2(shape), batch),
        DDP: lambda: theirs(DistributedDataParallel(plain), batch),
    }
    return {name: make() for name, make in makers.items() if name in names}


def run_rank(args: argparse.Namespace) -> None:
    """Measures one shape on this rank; rank 0 reports the slowest rank's times."""
    processes.join_ranks(timeout_s=args.timeout)
    [name] = args.shapes
    steps = make_steps(SHAPES[name], args.systems)
    for _ in range(FIRST_STEPS):
        check({name: step() for name, step in steps.items()})
    each = {system: turns.timed(step, SHAPES[name].steps) for system, step in steps.items()}
    with turns.quiet_gc():
        mine = turns.alternate(each, args.rounds, 1)
    processes.finish(processes.of_slowest_rank(mine))


def measure(args: argparse.Namespace, shape: str, rate: str) -> Mapping[str, list[float]]:
    """Milliseconds of a step by system and round."""
    argv = [f"--rounds={args.rounds}", f"--timeout={args.timeout}", "--shapes", shape]
    argv += ["--systems", *args.systems]
    limited = argparse.Namespace(**{**vars(args), "rate": rate}, no_limit=rate == LOOPBACK)
    samples: Mapping[str, list[float]] = slow_link.launch_on_link(limited, argv)
    return samples


def parse() -> argparse.Namespace:
    parser = options.parser(__doc__, ranks=2, rounds=9, timeout=600.0)
    systems = [STAGE3, STAGE2, FSDP2, DDP]
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--systems", choices=systems, nargs="+", default=systems)
    parser.add_argument(
        "--rates",
        type=lambda text: text if text == LOOPBACK else slow_link.checked_rate(text),
        nargs="+",
        default=[LOOPBACK, "2gbit"],
        help=f"of the link, in tc's words, or {LOOPBACK}, which needs no root",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    if processes.is_rank():
        return run_rank(args)
    figures: list[Figure] = []
    ratios: list[Ratio] = []
    for rate in args.rates:
        for shape in args.shapes:
            samples = measure(args, shape, rate)
            quantity = f"{shape}, {rate}: step"
            figures += output.figures_of(quantity, "ms", samples)
            ratios += (
                Ratio.between(quantity, name, DDP, samples, at_most=TARGETS[name])
                for name in samples
                if DDP in samples and name != DDP
            )
    shapes = "; ".join(
        f"{name}: {SHAPES[name].blocks} blocks of 12*{SHAPES[name].width}^2, "
        f"{SHAPES[name].rows} rows a rank"
        for name in args.shapes
    )
    about = f"{args.ranks} ranks, {args.rounds} rounds; {shapes}"
    output.publish(options.measurement(args, about, figures, ratios), args.json, args.plot)


if __name__ == "__main__":
    main()
