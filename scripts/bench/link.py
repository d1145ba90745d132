"""Training over a slow link: our step against FSDP2's and against what its parts take alone.

Gloo ranks on loopback, limited to `--rate` in a network namespace made for the run (needs root and
`tc`). They train one model in five ways, which take turns round by round in the same processes:

- ours and FSDP2: every block a unit, and the root; with `--layout`, ours also as `Flat()` lays it
  out, because a layout must not cost anything;
- FSDP2 with our collectives, which it waits for as it does for its own;
- compute alone: the model unsharded, all ranks at the same time, nothing communicated;
- communication alone: the collectives of a step of ours (each block gathered for forward, each but
  the last, which is kept, for backward, and reduced once, in the same forms), enqueued back to back
  on both groups, two reductions at a time as in a step, nothing computed.

On gloo FSDP2 hides nothing, and its collectives send more and copy more than ours. So ours gains by
both: what FSDP2 gains with our collectives is theirs, and what ours gains beyond that is overlap,
and the host's work, of which ours has less.

The larger of the last two is the bound: the samples of whichever has the larger median. The target
is 1.02 of it where one of the two is at least twice the other, and 1.04 where they are nearer,
because then neither can hide what the other adds.

Here ranks and communication share the host's cores, which a bound of two separate measurements does
not know. With `--sleep` a block also sleeps, once in forward and twice as long in backward, which
takes time and no core, as a GPU's compute does: with few `--rows` that shows the schedule alone. It
sleeps after each of its layers, in proportion to their parameters.

A step is forward, loss, backward and zero_grad. With `--whole` it also clips gradients by their
norm and steps AdamW: ours by ours, which also gathers for the next forward
(`prefetch_next_forward=True`), FSDP2 by torch's, foreach and fused. Compute alone does that with
as many elements as a rank has of the sharded model, a tensor for each block. A sample is the mean
of `--steps` steps, from a barrier to the end of the slowest rank, in milliseconds.

With `--optimizer` the question is another one: what it buys to gather parameters under compute. A
step is one of training then, of `--microbatches` forwards and backwards, and the systems are ours
with overlap `on` and `off`, or one of them, and FSDP2. At `--stage` 1 and 2 full buffers are kept
between steps: on, their refresh is started after the optimizer's step and runs under the next
forward; off, the step ends with it. At stage 3, off is a prefetch of 0. The target is a gain of 15%
where communication is heavy, on links of 2 Gbit/s and less, and no loss on faster ones.

Muon is our optimizer, on whole matrices, and torch's on FSDP2, with products in float32 (see
`muon.py`); AdamW is ours, and torch's fused. FSDP2 comes as near to the stage as it can: at 1
and 2 it keeps parameters from forward to backward, and from one microbatch to the next.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from harness import link_training, options, output, processes, slow_link, turns
from harness.measurement import Measurement, Ratio

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


def check(losses: dict[str, float]) -> None:
    """A system that computes something else wins nothing."""
    low, high = min(losses.values()), max(losses.values())
    if high - low > 1e-4 * abs(high):
        output.fail(f"the systems compute different losses: {losses}", code=1)


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    rank, _ = processes.join_ranks(timeout_s=args.timeout)
    plain = link_training.build(args.blocks, args.sleep)

    def make_step(name: str, model: nn.Module) -> Callable[[], float]:
        update = UPDATES[name](model) if args.whole else None
        return link_training.make_step(model, rank, args.rows, update)

    steps = {COMPUTE: make_step(COMPUTE, plain)}
    if args.optimizer is None:
        sharded, ctx = link_training.shard_ours(args, args.layout, args.prefetch)
        steps[OURS] = make_step(OURS, sharded)
        for name in (FSDP2, FSDP2_OURS):
            model = link_training.shard_fsdp2(args, with_our_collectives=name == FSDP2_OURS)
            steps[name] = make_step(name, model)
        if args.layout != "flat":
            flat, _ = link_training.shard_ours(args, "flat", args.prefetch)
            steps[FLAT] = make_step(FLAT, flat)
    else:
        for name, overlap in ((OFF, "off"), (ON, "on")):
            if args.overlap in (overlap, "both"):
                steps[name], ctx = link_training.train_ours(args, overlap == "on")
        steps[FSDP2] = link_training.train_fsdp2(args)
    check({name: step() for name, step in steps.items()})
    if args.optimizer is None:
        groups = dist.new_group(), dist.new_group()
        if args.shared_group:
            groups = groups[0], groups[0]
        steps[COMMUNICATION] = link_training.make_communication(plain, args.prefetch, *groups)
    else:
        del steps[COMPUTE]  # which trains nothing
        check({name: step() for name, step in steps.items()})

    ctx.stats.reset()
    with turns.quiet_gc():
        mine = turns.alternate(
            {name: turns.timed(step, args.steps) for name, step in steps.items()}, args.rounds, 1
        )
    slowest = processes.of_slowest_rank(mine)
    if rank == 0:
        print(f"ours in all rounds, warm-up included: {ctx.stats}\n", flush=True)
    processes.finish(slowest)


def parse() -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        rate="2gbit",
        no_limit=False,
        prefetch=1,
        microbatches=1,
        rows=512,
        sleep=0.0,
        ranks=2,
        blocks=8,
        rounds=7,
        steps=2,
        timeout=600.0,
    )
    parser.add_argument(
        "--shared-group", action="store_true", help="our gathers and reductions share one group"
    )
    parser.add_argument(
        "--layout", choices=link_training.LAYOUTS, default="flat", help="of our units"
    )
    parser.add_argument("--whole", action="store_true", help="steps clip and update, see above")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], help="train, see above")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2, help="of ZeRO")
    parser.add_argument("--overlap", choices=["both", "on", "off"], default="both")
    args = parser.parse_args()
    if args.optimizer == "muon":
        args.layout = "tensor-atomic"
    return args


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


def ratios_of(args: argparse.Namespace, samples: Mapping[str, Sequence[float]]) -> list[Ratio]:
    """The headlines of what was asked for."""
    if args.optimizer is None:
        at_most = None if args.no_limit else fsdp2_target(args, samples)
        ratios = [
            Ratio.between(STEP, OURS, FSDP2, samples, at_most=at_most),
            Ratio.between(STEP, FSDP2_OURS, FSDP2, samples),
            Ratio.between(STEP, OURS, FSDP2_OURS, samples),
            Ratio.between(STEP, OURS, BOUND, samples, at_most=bound_target(samples)),
        ]
        if FLAT in samples:
            ratios.append(Ratio.between(STEP, OURS, FLAT, samples, at_most=FLAT_TARGET))
        return ratios
    ratios = [Ratio.between(STEP, name, FSDP2, samples) for name in (ON, OFF) if name in samples]
    if args.overlap == "both":
        is_heavy = not args.no_limit and slow_link.gbit(args.rate) <= HEAVY_GBIT
        at_most = HEAVY_TARGET if is_heavy else NO_LOSS
        ratios.append(Ratio.between(STEP, ON, OFF, samples, at_most=at_most))
    return ratios


def measurement_of(args: argparse.Namespace, samples: dict[str, list[float]]) -> Measurement:
    groups = "one shared group" if args.shared_group else "separate groups"
    about = (
        f"{args.ranks} ranks, {slow_link.in_words(args)}, {args.blocks} blocks of "
        f"12*{link_training.WIDTH}^2, {args.rows} rows a rank; ours: {args.layout}, prefetch "
        f"{args.prefetch}, {groups}; {args.rounds} rounds of {args.steps} steps"
    )
    if args.sleep:
        about += f"; a block sleeps {args.sleep:g} ms in forward, {2 * args.sleep:g} in backward"
    if args.whole:
        about += "; steps clip gradients and update"
    if args.optimizer is None:
        samples = with_bound(samples)
    else:
        about += f"; {args.optimizer}, stage {args.stage}, {args.microbatches} microbatches a step"
    figures = output.figures_of(STEP, "ms", samples)
    return options.measurement(args, about, figures, ratios_of(args, samples))


def main() -> None:
    args = parse()
    if processes.is_rank():
        return run_rank(args)
    measurement = measurement_of(args, slow_link.launch_on_link(args, sys.argv[1:]))
    output.publish(measurement, args.json, args.plot)


if __name__ == "__main__":
    main()
