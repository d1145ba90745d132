"""What it costs to record steps, by `fsdp_overlap.debug.record()`: steps of a GPT on FSDP2.

Each step has a forward, a backward and AdamW, with a sequence of so many tokens on each rank. Of
all parameters this rank's gradients, the reduced ones, the values in use and the weights after the
step are recorded, whatever the number of tokens, and outputs of all modules. A recording's first
step, which also records initial weights, is not timed; that of each step is written in the next.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.nn import functional as F

from fsdp_overlap.debug import record
from fsdp_overlap.tools.cli.model import GPT
from harness import options, runner, sharding, turns
from harness.runner import Results

PLAIN, RECORDED = "FSDP2", "FSDP2, recorded"
TARGET = 1.1


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int) -> None:
    drawn = torch.randint(256, (1, tokens + 1))
    logits = model(drawn[:, :-1]).float()
    F.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def sample(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(layers=args.blocks, width=args.width, heads=args.width // 64)
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module, mesh=sharding.cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def recorded(step: Callable[[], None]) -> float:
        with tempfile.TemporaryDirectory() as folder, record(Path(folder)):
            step()
            return turns.timed(step, args.steps)()

    found: dict[str, Any] = {"million": sum(p.numel() for p in model.parameters()) / 1e6}
    for tokens in args.tokens:
        step = partial(make_step, model, optimizer, tokens)
        systems = {PLAIN: turns.timed(step, args.steps), RECORDED: partial(recorded, step)}
        found[str(tokens)] = turns.slowest(systems, args.rounds)
    return found


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    results = Results(f"{found['million']:.0f} million parameters")
    for tokens in args.tokens:
        what = f"step, {tokens} tokens of a rank"
        results.add(what, "ms", found[str(tokens)], (RECORDED, PLAIN, TARGET))
    return results


OPTIONS = options.parser(__doc__, ranks=2, blocks=8, width=512, rounds=5, steps=2)
OPTIONS.add_argument(
    "--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="of a rank and step"
)

if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
