"""Training over a slow link: our step against FSDP2's and against what its parts take alone.

Ranks train one model as ours (with `--layout` also as `Flat()` lays it out), FSDP2, and FSDP2 with
our collectives, which it waits for as for its own: what it gains with them is theirs, and what ours
gains beyond that is overlap, and the host's work. Besides: compute alone, unsharded on all ranks at
the same time; and communication alone, the collectives of a step of ours enqueued back to back on
both groups, two reductions at a time.

The larger of the last two medians is the bound. The target is 1.02 of it where one of the two is at
least twice the other, and 1.04 where they are nearer, because then neither can hide what the other
adds. Ranks and communication share the host's cores, which such a bound does not know; `--sleep`
with few `--rows` shows the schedule alone.

With `--whole` a step also clips gradients by their norm and steps AdamW: ours by ours, which also
gathers for the next forward, FSDP2 by torch's, foreach and fused; compute alone with as many
elements as a rank has, a tensor for each block.

With `--optimizer` a step is one of training, of `--microbatches` forwards and backwards: ours with
overlap on and off, and FSDP2, which comes as near to `--stage` as it can. Off, the refresh of full
buffers ends the step (stages 1 and 2), or nothing is prefetched (stage 3).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from harness import link_training, options, runner, slow_link, turns
from harness.runner import Results

OURS, FLAT = "ours", "ours, flat"
FSDP2, FSDP2_OURS = "FSDP2", "FSDP2, our collectives"
ON, OFF = "ours, overlap on", "ours, overlap off"
COMPUTE, COMMUNICATION, BOUND = "compute alone", "communication alone", "bound"
ALONE = (COMPUTE, COMMUNICATION)
STEP = "step"
# What follows backward in a whole step.
UPDATES = {
    COMPUTE: link_training.update_alone,
    OURS: link_training.update_ours,
    FLAT: link_training.update_ours,
    FSDP2: link_training.update_torchs,
    FSDP2_OURS: link_training.update_torchs,
}
# Of ours to the others.
FSDP2_TARGET, WHOLE_TARGET, FLAT_TARGET = 0.50, 0.44, 1.05
UNEVEN_TARGET, EVEN_TARGET = 1.02, 1.04
EQUAL = 1.25  # how far apart compute and communication may be that count as equal
# Of training with overlap to training without: 15% more steps where communication is heavy.
HEAVY_TARGET, NO_LOSS = 0.87, 1.0
HEAVY_GBIT = 2.0

OPTIONS = options.parser(
    __doc__,
    rate="2gbit",
    ranks=2,
    blocks=8,
    rows=512,
    sleep=0.0,
    prefetch=1,
    microbatches=1,
    rounds=7,
    steps=2,
)
OPTIONS.add_argument(
    "--layout", choices=link_training.LAYOUTS, default="flat", help="of our units, but for Muon"
)
OPTIONS.add_argument("--whole", action="store_true", help="steps clip and update, see above")
OPTIONS.add_argument("--optimizer", choices=["adamw", "muon"], help="train, see above")
OPTIONS.add_argument("--stage", type=int, choices=[1, 2, 3], default=2, help="of ZeRO")


def sample(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a step of each system."""
    plain = link_training.build(args.blocks, args.sleep)
    batch = link_training.make_batch(args.rows)

    def make_step(name: str, model: nn.Module) -> Callable[[], float]:
        update = UPDATES[name](model) if args.whole else lambda: None
        return link_training.make_step(model, batch, update)

    steps = {COMPUTE: make_step(COMPUTE, plain)}
    if args.optimizer is None:
        sharded, ctx = link_training.shard_ours(args, args.layout, args.prefetch)
        steps[OURS] = make_step(OURS, sharded)
        for name in (FSDP2, FSDP2_OURS):
            model = link_training.shard_fsdp2(args, with_our_collectives=name == FSDP2_OURS)
            steps[name] = make_step(name, model)
        if args.layout != "flat":
            steps[FLAT] = make_step(FLAT, link_training.shard_ours(args, "flat", args.prefetch)[0])
    else:
        for name in (OFF, ON):
            steps[name], ctx = link_training.train_ours(args, name == ON)
        steps[FSDP2] = link_training.train_fsdp2(args)
    turns.same_losses({name: step() for name, step in steps.items()})
    if args.optimizer is None:
        groups = dist.new_group(), dist.new_group()
        steps[COMMUNICATION] = link_training.make_communication(plain, args.prefetch, *groups)
    else:
        del steps[COMPUTE]  # which trains nothing
        turns.same_losses({name: step() for name, step in steps.items()})
    ctx.stats.reset()
    slowest = turns.slowest_steps(steps, args)
    if dist.get_rank() == 0:
        print(f"ours in all rounds, warm-up included: {ctx.stats}\n", flush=True)
    return slowest


def with_bound(samples: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """`samples` and the bound, which is one of them."""
    slower = max(ALONE, key=lambda name: statistics.median(samples[name]))
    return {**samples, BOUND: samples[slower]}


def bound_target(samples: Mapping[str, Sequence[float]]) -> float:
    """How far ours may be above the bound, from the samples of both."""
    both = [statistics.median(samples[name]) for name in ALONE]
    return UNEVEN_TARGET if max(both) >= 2 * min(both) else EVEN_TARGET


def fsdp2_target(args: argparse.Namespace, samples: Mapping[str, Sequence[float]]) -> float | None:
    """Of ours to FSDP2's. Whole steps have one where compute and communication are equal."""
    if not args.whole:
        return FSDP2_TARGET
    both = [statistics.median(samples[name]) for name in ALONE]
    return WHOLE_TARGET if max(both) < EQUAL * min(both) else None


def compared(args: argparse.Namespace, samples: Mapping[str, Sequence[float]]) -> list[Any]:
    """The headlines of what was asked for."""
    if args.optimizer is None:
        return [
            (OURS, FSDP2, None if args.no_limit else fsdp2_target(args, samples)),
            (FSDP2_OURS, FSDP2),
            (OURS, FSDP2_OURS),
            (OURS, BOUND, bound_target(samples)),
            (OURS, FLAT, FLAT_TARGET),
        ]
    is_heavy = not args.no_limit and slow_link.gbit(args.rate) <= HEAVY_GBIT
    return [(ON, FSDP2), (OFF, FSDP2), (ON, OFF, HEAVY_TARGET if is_heavy else NO_LOSS)]


def report(args: argparse.Namespace, samples: dict[str, list[float]]) -> Results:
    about = f"blocks of 12*{link_training.WIDTH}^2"
    if args.optimizer is None:
        samples = with_bound(samples)
        about += f", {args.layout}; steps clip and update" if args.whole else f", {args.layout}"
    else:
        about += f"; {args.optimizer}, stage {args.stage}"
    results = Results(about)
    results.add(STEP, "ms", samples, *compared(args, samples))
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
