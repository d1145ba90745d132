"""The command line of benchmarks in which two ranks train `link.py`'s model on plain loopback."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from harness import link_training, output


def parse(description: str, rows: int, rounds: int) -> argparse.Namespace:
    """What the user gave, with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", type=int, default=rows, help="of each rank's batch")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="in a sample")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, for the whole run")
    output.add_outputs(parser)
    parser.set_defaults(ranks=2, no_limit=True, rate="")
    return parser.parse_args()


def circumstances(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """What was measured, in words and as settings."""
    names = ("blocks", "rows", "steps", "rounds")
    about = (
        f"torch {torch.__version__}, 2 ranks on loopback, {args.blocks} blocks of "
        f"12*{link_training.WIDTH}^2, {args.rows} rows, {args.steps} steps a sample; "
        f"{args.rounds} rounds"
    )
    return about, {"torch": torch.__version__, **{name: getattr(args, name) for name in names}}
