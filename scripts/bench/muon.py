"""A step of Muon: ours on whole and on cut matrices, FSDP2 with torch's, and without sharding.

Gloo ranks on loopback, each with a copy of one model: `--blocks` blocks of 12 * width^2 parameters
in four matrices, and two norms. The matrices are stepped by Muon, the norms by AdamW, with the same
settings everywhere:

- unsharded: `torch.optim.Muon` and `torch.optim.AdamW`, on every rank all of it, at the same time;
- FSDP2: the same two on what `torch.distributed.fsdp.fully_shard` shards;
- ours: `fsdp_overlap.optim.Muon` under `Whole()`, under `Flat()`, and unsharded, which shows what
  of a difference is due to its products alone.

torch's Muon multiplies in bfloat16, which most CPUs do many times slower than float32. That is no
matter of sharding, so its products are made in `--dtype`, as ours are; `bfloat16` leaves torch's
alone.

A sample is one `step()`, from a barrier to the end of the slowest rank; gradients are there before.
Collectives are those that torch's `CommDebugMode` counts in one step. Before anything is timed,
every system must have stepped as the unsharded one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from checkpoint import Block as BlockParameters
from fsdp_overlap import Flat, FsdpContext, Whole, fully_shard
from fsdp_overlap.layout import Layout
from fsdp_overlap.optim import Muon
from harness import output, processes, turns
from harness.measurement import Measurement, Ratio
from harness.optimizers import ADAMW, LR, torchs

UNSHARDED, FSDP2, WHOLE, FLAT, ALONE = (
    "unsharded, torch's",
    "FSDP2, torch's",
    "ours, Whole()",
    "ours, Flat()",
    "ours, unsharded",
)
STEP = "step"
# Of WHOLE's time to these, at 2 ranks.
TARGETS = {UNSHARDED: 0.6, FSDP2: 0.5}


class Block(BlockParameters):
    """Multiplies by all its matrices, without attention: only gradients matter here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(torch.tanh(q) * k + v)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def build(args: argparse.Namespace) -> nn.Sequential:
    """The same model on every rank and for every system."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(args.width) for _ in range(args.blocks)))


def shard_fsdp2(model: nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh)


def shard_ours(model: nn.Sequential, layout: Layout) -> None:
    ctx = FsdpContext(layout=layout)
    ctx.plan([*model, model])
    for module in (*model, model):
        fully_shard(module, ctx)


def ours(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    return Muon(model, LR, adamw=ADAMW, ns_dtype=dtype).step


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    processes.join_ranks(timeout_s=args.timeout)
    dtype = getattr(torch, args.dtype)
    shard: dict[str, Callable[[nn.Sequential], None]] = {
        UNSHARDED: lambda model: None,
        FSDP2: shard_fsdp2,
        WHOLE: lambda model: shard_ours(model, Whole()),
        FLAT: lambda model: shard_ours(model, Flat()),
        ALONE: lambda model: None,
    }
    models = {name: build(args) for name in shard}
    steps = {}
    # The same rows on every rank, so that all gradients are those of the unsharded model.
    batch = torch.randn(64, args.width, generator=torch.Generator().manual_seed(0))
    for name, model in models.items():
        shard[name](model)
        model(batch).square().mean().backward()
        steps[name] = (torchs if name in (UNSHARDED, FSDP2) else ours)(model, dtype)
    collectives = {}
    for name, step in steps.items():
        with CommDebugMode() as issued:
            step()
        collectives[name] = issued.get_total_counts()
        check(name, models[name], models[UNSHARDED], args.dtype)

    def timed(step: Callable[[], None]) -> Callable[[], float]:
        def sample() -> float:
            dist.barrier()
            start = time.perf_counter()
            step()
            return (time.perf_counter() - start) * 1e3

        return sample

    with turns.quiet_gc():
        samplers = {name: timed(step) for name, step in steps.items()}
        mine = turns.alternate(samplers, args.rounds, 1)
    slowest = processes.of_slowest_rank(mine)
    if dist.get_rank() == 0:
        processes.report({"step_ms": slowest, "collectives": collectives})
    dist.barrier()
    dist.destroy_process_group()


def check(name: str, model: nn.Module, unsharded: nn.Module, dtype: str) -> None:
    """Fails unless both have the same parameters, after one step of each."""
    close = 1e-4 if dtype == "float32" else 2e-2
    for (fqn, mine), its in zip(model.named_parameters(), unsharded.parameters(), strict=True):
        whole = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        # A step is of the size of the learning rate.
        error = (whole - its).abs().max().item()
        if not error <= close * LR:
            output.fail(f"{name}: {fqn} is off by {error} after a step", code=1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds, for the whole run")
    output.add_outputs(parser)
    return parser.parse_args()


def measurement_of(args: argparse.Namespace, result: dict[str, Any]) -> Measurement:
    samples = result["step_ms"]
    collectives = {name: [float(count)] for name, count in result["collectives"].items()}
    about = (
        f"torch {torch.__version__}, {args.ranks} ranks, {args.blocks} blocks of "
        f"12*{args.width}^2, products in {args.dtype}; {args.rounds} rounds"
    )
    settings = {
        "torch": torch.__version__,
        "ranks": args.ranks,
        "blocks": args.blocks,
        "width": args.width,
        "dtype": args.dtype,
        "rounds": args.rounds,
    }
    figures = output.figures_of(STEP, "ms", samples)
    figures += output.figures_of("collectives a step", "", collectives, at_most={WHOLE: 0})
    ratios = [
        Ratio.between(
            STEP, WHOLE, other, samples, at_most=TARGETS[other] if args.ranks == 2 else None
        )
        for other in TARGETS
    ]
    ratios.append(Ratio.between(STEP, FLAT, FSDP2, samples))
    return Measurement(about, settings, output.repeated_argv(), figures, ratios)


def main() -> None:
    args = parse()
    if processes.is_rank():
        return run_rank(args)
    result = processes.launch_ranks(args.ranks, sys.argv[1:], args.timeout)
    output.publish(measurement_of(args, result), args.json, args.plot)


if __name__ == "__main__":
    main()
