"""A step of an ordinary optimizer of matrices: under LayerWise, layer-wise, and unsharded.

The model, gradients and samples are those of `muon.py`. The optimizer is torch's Muon, or SOAP of
pytorch-optimizer; AdamW steps the norms.

- unsharded: on every rank all of it, at the same time. So does DDP step;
- layer-wise: the same optimizer on whole matrices that are dealt to ranks, which send each other
  what they stepped, as Megatron's layer-wise optimizer does;
- LayerWise under `TensorAtomic()`, which sends nothing: what others need they gather in the next
  forward, under compute; and under `Flat()`, which cuts matrices, so that they move in each step;
- for Muon, our own under `Flat()`, which sends less of each matrix, and steps others meanwhile.

A step of W ranks should take 1/W of the unsharded one's time, within 1.1 times that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_optimizer import SOAP
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import muon
from checkpoint import Block
from fsdp_overlap import Flat, TensorAtomic
from fsdp_overlap.optim import AdamW, LayerWise, Muon
from harness import options, output, processes, slow_link, turns
from harness.layer_wise import layer_wise
from harness.measurement import Measurement, Ratio
from harness.optimizers import ADAMW, LR

UNSHARDED, DEALT = "unsharded", "layer-wise"
WHOLE, FLAT = "LayerWise, TensorAtomic()", "LayerWise, Flat()"
MUON = "Muon, Flat()"
STEP = "step"
MATRICES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "muon": partial(torch.optim.Muon, lr=LR),
    "soap": partial(SOAP, lr=LR),
}


def plain(name: str, model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Make the optimizers of an unsharded model. Return their step."""
    parameters = list(model.parameters())
    steps = [
        MATRICES[name]([p for p in parameters if p.dim() == 2]).step,
        torch.optim.AdamW([p for p in parameters if p.dim() != 2], **ADAMW, fused=True).step,
    ]

    def step() -> None:
        for each in steps:
            each()

    return step


def ours(name: str, model: nn.Module) -> Callable[[], None]:
    return LayerWise(model, MATRICES[name], partial(AdamW, **ADAMW)).step


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    processes.join_ranks(timeout_s=args.timeout)
    models = {name: muon.build(args, Block) for name in (UNSHARDED, DEALT, WHOLE, FLAT)}
    muon.shard(models[WHOLE], TensorAtomic())
    muon.shard(models[FLAT], Flat())
    optimize = partial(plain, args.optimizer)
    steps = {
        UNSHARDED: optimize(models[UNSHARDED], torch.bfloat16),
        DEALT: layer_wise(models[DEALT], torch.bfloat16, optimize),
        WHOLE: ours(args.optimizer, models[WHOLE]),
        FLAT: ours(args.optimizer, models[FLAT]),
    }
    if args.optimizer == "muon":
        models[MUON] = muon.build(args, Block)
        muon.shard(models[MUON], Flat())
        steps[MUON] = Muon(models[MUON], lr=LR, adamw=ADAMW).step
    collectives = {}
    for name, step in steps.items():
        for _ in range(2):  # SOAP only looks at the gradient in its first
            muon.give_gradients(models[name])
            with CommDebugMode() as issued:
                step()
        collectives[name] = issued.get_total_counts()
        muon.check(name, models[name], models[UNSHARDED], "bfloat16")
    with turns.quiet_gc():
        clock = time.process_time if args.processor_time else time.perf_counter
        samplers = {name: turns.timed(step, clock=clock) for name, step in steps.items()}
        mine = turns.alternate(samplers, args.rounds, 1)
    processes.finish({"step_ms": processes.of_slowest_rank(mine), "collectives": collectives})


def measurement_of(args: argparse.Namespace, result: dict[str, Any]) -> Measurement:
    samples = result["step_ms"]
    collectives = {name: [float(count)] for name, count in result["collectives"].items()}
    about = (
        f"{args.optimizer}, {args.ranks} ranks, {slow_link.in_words(args)}, "
        f"{args.blocks} blocks of "
        f"12*{args.width}^2; {args.rounds} rounds"
        f"{', processor time' if args.processor_time else ''}"
    )
    figures = output.figures_of(STEP, "ms", samples)
    figures += output.figures_of("collectives a step", "", collectives, at_most={WHOLE: 0})
    ratios = [
        Ratio.between(STEP, WHOLE, UNSHARDED, samples, at_most=1.1 / args.ranks),
        Ratio.between(STEP, WHOLE, DEALT, samples),
        Ratio.between(STEP, FLAT, UNSHARDED, samples),
        Ratio.between(STEP, FLAT, DEALT, samples),
    ]
    if MUON in samples:
        ratios.append(Ratio.between(STEP, FLAT, MUON, samples))
    return options.measurement(args, about, figures, ratios)


def main() -> None:
    parser = options.parser(
        __doc__,
        rate="2gbit",
        no_limit=False,
        ranks=2,
        blocks=8,
        width=512,
        rounds=5,
        timeout=1800.0,
    )
    parser.add_argument("--optimizer", choices=MATRICES, default="soap")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure the time of the processor, for more ranks than there are cores",
    )
    args = parser.parse_args()
    if processes.is_rank():
        return run_rank(args)
    result = slow_link.launch_on_link(args, sys.argv[1:])
    output.publish(measurement_of(args, result), args.json, args.plot)


if __name__ == "__main__":
    main()
