"""Runs a benchmark: parses its options, launches its ranks and publishes what they sampled.

A benchmark is a script of its documentation, its options, `sample`, which runs on each rank, and
`report`, which makes figures of the samples. Where a benchmark says nothing else:

- Ranks talk by gloo over loopback. With `--rate` it is limited, in a network namespace made for the
  run, which needs root and `tc`.
- Systems take turns, round by round in the same processes. A sample is the mean of `--steps` steps,
  from a barrier to the end of the slowest rank, in milliseconds. A step is forward, loss, backward
  and zero_grad.
- Every block of a model is a unit, and so is the root.
- With `--sleep` a block also sleeps so many milliseconds in forward, after each of its layers in
  proportion to their parameters, and twice as long in backward. That takes time and no core, as a
  GPU's compute does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness import options, output, peaks, processes, slow_link
from harness.measurement import Claim, Figure, Measurement, Ratio, Spread, Sweep


class Results:
    """The figures of a benchmark, and what is compared and claimed."""

    def __init__(self, about: str = "", sweep: Sweep | None = None, **settings: Any) -> None:
        """``about`` and ``settings``: what was measured with, beside the options."""
        self.about, self.sweep, self.settings = about, sweep, settings
        self.figures: list[Figure] = []
        self.ratios: list[Ratio] = []
        self.claims: list[Claim] = []

    def add(
        self,
        quantity: str,
        unit: str,
        samples: Mapping[str, Sequence[float]],
        *compared: tuple[str, str] | tuple[str, str, float | None],
        at: float | None = None,
        at_most: Mapping[str, float] | None = None,
    ) -> None:
        """Add the figure of each system in ``samples``, with its target in ``at_most``, and a ratio
        for each pair of ``compared`` that has samples; a third item is its target."""
        for system, values in samples.items():
            most = (at_most or {}).get(system)
            self.figures.append(Figure(quantity, system, unit, Spread.of(values), at, most))
        for of, to, *target in compared:
            if of in samples and to in samples:
                most = target[0] if target else None
                self.ratios.append(Ratio.between(quantity, of, to, samples, at=at, at_most=most))

    def measurement(self, args: argparse.Namespace) -> Measurement:
        parts = [f"torch {torch.__version__}", options.in_words(args), self.about]
        return Measurement(
            ", ".join(filter(None, parts)),
            options.settings_of(args) | self.settings,
            output.repeated_argv(),
            self.figures,
            self.ratios,
            self.claims,
            self.sweep,
        )


def main(
    parser: argparse.ArgumentParser,
    sample: Callable[[argparse.Namespace], Any],
    report: Callable[[argparse.Namespace, Any], Results | None],
    launch: Callable[[argparse.Namespace], Any] | None = None,
) -> None:
    """Run the benchmark of this script. `sample` is called on each rank, which is one of a gloo
    group by then; what it returns on rank 0, anything that JSON can hold, goes to `report`, which
    returns what to publish. `launch` starts the ranks where the options do not say how."""
    args = parser.parse_args()
    if processes.is_rank():
        processes.join_ranks(timeout_s=args.timeout)
        processes.finish(sample(args))
    else:
        found = launch_ranks(args) if launch is None else launch(args)
        if (results := report(args, found)) is not None:
            publish(args, results)


def publish(args: argparse.Namespace, results: Results) -> None:
    output.publish(results.measurement(args), args.json)


def launch_ranks(
    args: argparse.Namespace,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    script: Path | None = None,
    **changed: Any,
) -> Any:
    """Run this script, or another, as ranks, and return what they report. They get this one's
    arguments, or another's ``arguments`` alone, and are on a link if there is the option ``rate``.
    ``changed``: options that differ for the launch."""
    args = argparse.Namespace(**vars(args) | changed)
    argv = [*([] if script else sys.argv[1:]), *arguments]
    if hasattr(args, "rate"):
        return slow_link.launch_on_link(args, argv, env, script)
    return processes.launch_ranks(args.ranks, argv, args.timeout, env, script)


def launch_in_folder(
    args: argparse.Namespace, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Any:
    """Run this script as ranks that save in a new folder of `--folder`, and return what they
    report."""
    with tempfile.TemporaryDirectory(prefix="fsdp_overlap_bench_", dir=args.folder) as folder:
        return launch_ranks(args, [f"--folder={folder}", *arguments], env)


def launch_to_measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what ranks report of times and, in ranks of their own in which freed memory goes back
    to the system, of memory. Each knows what to measure by `--measure`."""
    return {
        what: launch_in_folder(args, [f"--measure={what}"], env)
        for what, env in (("time", None), ("memory", peaks.RETURNED))
    }
