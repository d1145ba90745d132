"""The time of a step against the speed of the link: ours, FSDP2's and the bound.

At each of `--rates` ranks run `link.py`. Rates follow each other, so compare systems at one rate;
between rates the machine may have changed. `unlimited` is plain loopback. It is placed where its
communication alone puts it: at the bytes of a step over that time, which is how a limited link's
rate counts too.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import link
from harness import link_training, options, runner, slow_link
from harness.measurement import Sweep
from harness.runner import Results

UNLIMITED = "unlimited"


def step_gbits(ranks: int, blocks: int) -> float:
    """Gbit that a step of ours sends through the one queue of loopback: of each block two gathers,
    one of the last, and a reduction, in each of which every rank's range goes to, or comes from,
    every other."""
    block = sum(parameter.nbytes for parameter in link_training.Block().parameters())
    return (3 * blocks - 1) * block * (ranks - 1) * 8 / 1e9


def measure(args: argparse.Namespace, rate: str) -> tuple[float, dict[str, list[float]]]:
    """Where on the sweep the rate is, in Gbit/s, and milliseconds by system and round."""
    names = ("ranks", "blocks", "rows", "sleep", "rounds", "steps", "timeout")
    argv = [f"--{name}={getattr(args, name)}" for name in names]
    samples = runner.launch_ranks(
        args, argv, script=Path(link.__file__), rate=rate, no_limit=rate == UNLIMITED
    )
    if rate != UNLIMITED:
        return slow_link.gbit(rate), link.with_bound(samples)
    seconds = statistics.median(samples[link.COMMUNICATION]) / 1e3
    return step_gbits(args.ranks, args.blocks) / seconds, link.with_bound(samples)


OPTIONS = options.parser(__doc__, ranks=2, blocks=8, rows=512, sleep=0.0, rounds=7, steps=1)
options.add_rates(OPTIONS, UNLIMITED, ["1gbit", "2gbit", "4gbit", "8gbit", UNLIMITED])


def main() -> None:
    args = OPTIONS.parse_args()
    sweep = Sweep("link, Gbit/s", log_y=True)
    results = Results(f"blocks of 12*{link_training.WIDTH}^2", sweep)
    for rate in args.rates:
        at, samples = measure(args, rate)
        of_bound = {name: samples.pop(name) for name in link.ALONE}
        target = link.bound_target(of_bound)
        against = (link.OURS, link.FSDP2), (link.OURS, link.BOUND, target)
        results.add(link.STEP, "ms", samples, *against, at=at)
        results.add("alone", "ms", of_bound, at=at)
    runner.publish(args, results)


if __name__ == "__main__":
    main()
