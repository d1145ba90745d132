"""The options that benchmarks have in common, and the measurement that is made with them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness import output, peaks, processes, slow_link
from harness.measurement import Claim, Figure, Measurement, Ratio, Sweep

_OPTIONS: dict[str, dict[str, Any]] = {
    "rate": {"type": slow_link.checked_rate, "help": "of the link: 2gbit, 500mbit, ..."},
    "no_limit": {"action": "store_true", "help": "plain loopback, needs no root"},
    "rows": {"type": int, "help": "of each rank's batch"},
    "sleep": {"type": float, "metavar": "MS", "help": "of a block in forward, twice in backward"},
    "ranks": {"type": int},
    "world_size": {"type": int, "help": "of the fake process group"},
    "blocks": {"type": int},
    "width": {"type": int, "help": "of a block of 12 * width^2 parameters"},
    "prefetch": {"type": int, "help": "of our context"},
    "microbatches": {"type": int, "help": "forwards in a step"},
    "steps": {"type": int, "help": "steps per sample"},
    "rounds": {"type": int},
    "warmup": {"type": int, "help": "rounds thrown away"},
    "timeout": {"type": float, "help": "seconds, for the whole run"},
}
_NO_SETTINGS = {"json", "plot", "timeout", "no_limit", "memory", "measure", "profile", "calls"}


def parser(documentation: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of the outputs and of those options that have a default here."""
    made = argparse.ArgumentParser(description=documentation.splitlines()[0])
    for name, default in defaults.items():
        made.add_argument(f"--{name.replace('_', '-')}", default=default, **_OPTIONS[name])
    output.add_outputs(made)
    return made


def add_folder(parser: argparse.ArgumentParser, takes: str) -> None:
    parser.add_argument(
        "--folder",
        default=tempfile.gettempdir(),
        help=f"where to save, in a folder that is removed at the end; takes {takes}",
    )


def launch_in_folder(
    args: argparse.Namespace, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Any:
    """Run this script as ranks that save in a new folder of `--folder`, and return what they
    report."""
    with tempfile.TemporaryDirectory(prefix="fsdp_overlap_bench_", dir=args.folder) as folder:
        argv = [*sys.argv[1:], f"--folder={folder}", *arguments]
        return processes.launch_ranks(args.ranks, argv, args.timeout, env)


def launch_to_measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what ranks report of times and, in ranks of their own in which freed memory goes back
    to the system, of memory. Each knows what to measure by `--measure`."""
    return {
        what: launch_in_folder(args, [f"--measure={what}"], env)
        for what, env in (("time", None), ("memory", peaks.RETURNED))
    }


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured with; ``rate`` is None if the link had no limit."""
    settings = {name: value for name, value in vars(args).items() if name not in _NO_SETTINGS}
    if getattr(args, "no_limit", False):
        settings["rate"] = None
    return {"torch": torch.__version__, **settings}


def measurement(
    args: argparse.Namespace,
    about: str,
    figures: Sequence[Figure],
    ratios: Sequence[Ratio] = (),
    claims: Sequence[Claim] = (),
    sweep: Sweep | None = None,
    **more: Any,
) -> Measurement:
    """Return what was measured, with the options and ``more`` as its settings."""
    return Measurement(
        f"torch {torch.__version__}, {about}",
        settings_of(args) | more,
        output.repeated_argv(),
        list(figures),
        list(ratios),
        list(claims),
        sweep,
    )
