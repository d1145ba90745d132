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
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pytorch_optimizer import SOAP
from torch import nn

import muon
from fsdp_overlap import Flat, TensorAtomic
from fsdp_overlap.optim import AdamW, LayerWise, Muon
from harness import options, runner, turns
from harness.layer_wise import layer_wise
from harness.optimizers import ADAMW, LR, MUON, OfMatrices, torchs
from harness.runner import Results
from muon import COLLECTIVES, STEP

UNSHARDED, DEALT = "unsharded", "layer-wise"
WHOLE, FLAT = "LayerWise, TensorAtomic()", "LayerWise, Flat()"
OWN = "Muon, Flat()"
MATRICES: dict[str, OfMatrices] = {"muon": MUON, "soap": partial(SOAP, lr=LR)}


def ours(name: str, model: nn.Module) -> Callable[[], None]:
    return LayerWise(model, MATRICES[name], partial(AdamW, **ADAMW)).step


OPTIONS = options.parser(
    __doc__, rate="2gbit", ranks=2, blocks=8, width=512, rounds=5, timeout=1800.0
)
OPTIONS.add_argument("--optimizer", choices=MATRICES, default="soap")
OPTIONS.add_argument(
    "--processor-time",
    action="store_true",
    help="measure the time of the processor, for more ranks than there are cores",
)


def sample(args: argparse.Namespace) -> dict[str, Any]:
    models = {name: muon.build(args) for name in (UNSHARDED, DEALT, WHOLE, FLAT, OWN)}
    for name, layout in {WHOLE: TensorAtomic(), FLAT: Flat(), OWN: Flat()}.items():
        muon.shard(models[name], layout)
    optimize = partial(torchs, of_matrices=MATRICES[args.optimizer])
    steps = {
        UNSHARDED: optimize(models[UNSHARDED]),
        DEALT: layer_wise(models[DEALT], optimize),
        WHOLE: ours(args.optimizer, models[WHOLE]),
        FLAT: ours(args.optimizer, models[FLAT]),
    }
    if args.optimizer == "muon":
        steps[OWN] = Muon(models[OWN], lr=LR, adamw=ADAMW).step
    collectives = {}
    for name, step in steps.items():
        for _ in range(2):  # SOAP only looks at the gradient in its first
            collectives[name] = muon.collectives_in(step, models[name])
        muon.check(name, models[name], models[UNSHARDED])
    clock = time.process_time if args.processor_time else time.perf_counter
    samplers = {name: turns.timed(step, clock=clock) for name, step in steps.items()}
    return {STEP: turns.slowest(samplers, args.rounds), COLLECTIVES: collectives}


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    results = Results(args.optimizer + ", processor time" * args.processor_time)
    results.add(
        STEP,
        "ms",
        found[STEP],
        (WHOLE, UNSHARDED, 1.1 / args.ranks),
        (WHOLE, DEALT),
        (FLAT, UNSHARDED),
        (FLAT, DEALT),
        (FLAT, OWN),
    )
    results.add(COLLECTIVES, "", found[COLLECTIVES], at_most={WHOLE: 0})
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
