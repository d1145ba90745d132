"""The time of a step against the speed of the link: ours, FSDP2's and the bound.

At each of `--rates` gloo ranks run `link.py`, which says what is measured: ours, FSDP2,
compute alone and communication alone take turns, round by round in the same processes. Rates follow
each other, so compare systems at one rate; between rates the machine may have changed.

`unlimited` is plain loopback. It is placed where its communication alone puts it: at the bytes of a
step over that time, which is how a limited link's rate counts too. The others need root and `tc`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import link
from harness import link_training, options, output, slow_link
from harness.measurement import Figure, Ratio, Sweep

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
    limited = argparse.Namespace(**vars(args), rate=rate, no_limit=rate == UNLIMITED)
    samples = slow_link.launch_on_link(limited, argv, script=Path(link.__file__))
    if rate != UNLIMITED:
        return slow_link.gbit(rate), link.with_bound(samples)
    seconds = statistics.median(samples[link.COMMUNICATION]) / 1e3
    return step_gbits(args.ranks, args.blocks) / seconds, link.with_bound(samples)


def parse() -> argparse.Namespace:
    parser = options.parser(
        __doc__, rows=512, sleep=0.0, ranks=2, blocks=8, rounds=7, steps=1, timeout=600.0
    )
    parser.add_argument(
        "--rates",
        type=lambda text: text if text == UNLIMITED else slow_link.checked_rate(text),
        nargs="+",
        default=["1gbit", "2gbit", "4gbit", "8gbit", UNLIMITED],
        help=f"of the link, in tc's words, or {UNLIMITED}",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    figures: list[Figure] = []
    ratios: list[Ratio] = []
    for rate in args.rates:
        at, samples = measure(args, rate)
        ours, step = link.OURS, link.STEP
        of_bound = {name: samples.pop(name) for name in link.ALONE}
        figures += output.figures_of(step, "ms", samples, at=at)
        figures += output.figures_of("alone", "ms", of_bound, at=at)
        ratios.append(Ratio.between(step, ours, link.FSDP2, samples, at=at))
        target = link.bound_target(of_bound)
        ratios.append(Ratio.between(step, ours, link.BOUND, samples, at=at, at_most=target))
    about = (
        f"{args.ranks} ranks, {args.blocks} blocks of "
        f"12*{link_training.WIDTH}^2, {args.rows} rows a rank; {args.rounds} rounds of "
        f"{args.steps} steps"
    )
    if args.sleep:
        about += f"; a block sleeps {args.sleep:g} ms in forward, {2 * args.sleep:g} in backward"
    sweep = Sweep("link, Gbit/s", log_y=True)
    measurement = options.measurement(args, about, figures, ratios, sweep=sweep)
    output.publish(measurement, args.json, args.plot)


if __name__ == "__main__":
    main()
