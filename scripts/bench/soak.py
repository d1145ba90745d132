"""Thousands of steps: memory stays flat, counters are exact, ranks agree, nothing is left alive.

Gloo ranks train a small byte-level GPT, every block a unit and the root, with the library's AdamW
and one all-gather ahead, each rank on rows of its own. Every `--every` steps a step has two
microbatches, the first without reduction, and an evaluation forward follows, of the same rows on
all ranks. The exit code is 1 unless all of this holds on every rank:

- *Resident memory is flat.* The first fifth of the steps is warm-up. The rest is cut into four
  windows; no later window's median is more than 1 MiB above the first's. In 2000 steps a KiB a step
  would show. torch's flight recorder, which keeps the last 2000 collectives and so grows by some
  MiB until it has that many, is off.
- *Counters are exact.* All that `ctx.stats` counts is what `expected` computes from the number of
  steps and units.
- *At most prefetch + 2 full buffers* were alive at once, one of them the root's, and *two reduce
  inputs*, or one a unit while gradients are accumulated without reduction. *None is left* at the
  end.
- *Evaluation losses are the same on all ranks*, bit for bit, and the last is below the first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_overlap import FsdpContext, fully_shard
from fsdp_overlap.optim import AdamW
from fsdp_overlap.tools.cli.model import GPT, VOCABULARY
from harness import options, output, peaks, runner
from harness.measurement import Claim
from harness.runner import Results

PREFETCH = 1
ROWS, LENGTH = 2, 16
WARMUP, WINDOWS = 0.2, 4
MAX_RISE = 1.0  # MiB
MIB = 1 << 20
NO_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0"}


def expected(steps: int, every: int, blocks: int) -> dict[str, int]:
    """What `ctx.stats` must have counted, with a prefetch of 1 and a root that owns parameters."""
    evaluations = steps // every
    backwards = steps + evaluations  # as many steps have a second microbatch
    forwards = backwards + evaluations
    return {
        # Forward gathers all units; backward finds the root and the last block still there.
        "all_gathers": forwards * (blocks + 1) + backwards * (blocks - 1),
        # The first microbatch of two reduces nothing, and so needs no check.
        "reduce_scatters": steps * (blocks + 1),
        "order_checks": steps,
        # Only the root's gather is not ahead, but for the first forward, which knows no order. A
        # kept buffer is a hit too, but not the root's, which was in use all along.
        "prefetch_hits": (forwards - 1) * blocks + backwards * blocks,
        "prefetch_misses": forwards + blocks,
        "prefetches_unused": 0,
    }


def rise(resident: Sequence[float]) -> float:
    """How far the highest later window's median is above the first's, of a sample each step."""
    rest = resident[int(WARMUP * len(resident)) :]
    size = len(rest) // WINDOWS
    first, *later = (statistics.median(rest[k * size : (k + 1) * size]) for k in range(WINDOWS))
    return max(later) - first


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of bytes that count upwards and the byte after each, int64 `[ROWS, LENGTH]`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
    runs = (starts + torch.arange(LENGTH + 1)) % VOCABULARY
    return runs[:, :-1], runs[:, 1:]


def loss_of(model: GPT, seed: int) -> torch.Tensor:
    inputs, targets = rows(seed)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


OPTIONS = options.parser(__doc__, ranks=2, steps=2000, blocks=4, timeout=1800.0)
OPTIONS.add_argument(
    "--every", type=int, default=50, help="steps between evaluations, with two microbatches"
)


def sample(args: argparse.Namespace) -> list[Any]:
    """Train on this rank. Return what each rank found."""
    if args.steps < 2 * args.every:
        output.fail(f"--steps {args.steps}: two evaluations take at least {2 * args.every} steps")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(layers=args.blocks, width=32, heads=2)
    ctx = FsdpContext(prefetch=PREFETCH)
    for module in (*model.blocks, model):
        fully_shard(module, ctx)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    resident, losses = [], []
    for step in range(1, args.steps + 1):
        accumulates = step % args.every == 0
        if step == args.every:
            reduce_inputs_before = ctx.stats.peak_reduce_inputs
        for is_last in (False, True) if accumulates else (True,):
            model.set_requires_gradient_sync(is_last)
            # Rows of their own in every microbatch of every rank.
            loss = loss_of(model, 2 * (step * world_size + rank) + is_last)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if accumulates:
            with torch.no_grad():
                losses.append(loss_of(model, 0).item())
        resident.append(peaks.resident("VmRSS") / MIB)
        if rank == 0 and step % max(1, args.steps // 10) == 0:
            state = f"loss {loss.item():.3f}, {resident[-1]:.1f} MiB"
            print(f"step {step} of {args.steps}: {state}", flush=True)
    everyone: list[Any] = [None] * world_size
    mine = {"resident": resident, "losses": losses, "stats": asdict(ctx.stats)}
    mine["stats"]["reduce_inputs_before"] = reduce_inputs_before
    dist.all_gather_object(everyone, mine)
    return everyone


def claims_of(args: argparse.Namespace, ranks: Sequence[dict[str, Any]]) -> list[Claim]:
    """`ranks`: what each of them found."""
    rises = [rise(found["resident"]) for found in ranks]
    exact = expected(args.steps, args.every, args.blocks)
    wrong = [
        f"{name} is {found['stats'][name]} on rank {rank}, not {count}"
        for rank, found in enumerate(ranks)
        for name, count in exact.items()
        if found["stats"][name] != count
    ]

    def most(name: str) -> int:
        return max(found["stats"][name] for found in ranks)

    full, units = most("peak_full_buffers"), args.blocks + 1
    inputs, inputs_before = most("peak_reduce_inputs"), most("reduce_inputs_before")
    left, inputs_left = most("current_full_buffers"), most("current_reduce_inputs")
    losses = [found["losses"] for found in ranks]
    apart = [k for k, of_ranks in enumerate(zip(*losses, strict=True)) if len(set(of_ranks)) > 1]
    return [
        Claim(
            f"resident memory rises by at most {MAX_RISE:g} MiB after warm-up",
            max(rises) <= MAX_RISE,
            ", ".join(f"{one:+.2f} MiB on rank {rank}" for rank, one in enumerate(rises)),
        ),
        Claim(
            "counters are exact",
            not wrong,
            "; ".join(wrong) or ", ".join(f"{name} {count}" for name, count in exact.items()),
        ),
        Claim(
            f"at most {PREFETCH + 2} full buffers, 2 reduce inputs before the first accumulation "
            f"and {units} with it",
            full <= PREFETCH + 2 and inputs_before <= 2 and inputs <= units,
            f"{full}, {inputs_before} and {inputs}",
        ),
        Claim(
            "no full buffer and no reduce input is left",
            not left and not inputs_left,
            f"{left} and {inputs_left}",
        ),
        Claim(
            "evaluation losses are bit-equal on all ranks",
            not apart,
            f"evaluation {apart[0] + 1} differs" if apart else f"{len(losses[0])} evaluations",
        ),
        Claim(
            "the model learns",
            losses[0][-1] < losses[0][0],
            f"evaluation loss {losses[0][0]:.3f}, then {losses[0][-1]:.3f}",
        ),
    ]


def report(args: argparse.Namespace, ranks: Sequence[dict[str, Any]]) -> Results:
    results = Results(f"{args.steps} steps; two microbatches and an evaluation every {args.every}")
    resident = {f"ours, rank {rank}": found["resident"] for rank, found in enumerate(ranks)}
    results.add("resident memory", "MiB", resident)
    results.claims += claims_of(args, ranks)
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, partial(runner.launch_ranks, env=NO_FLIGHT_RECORDER))
