"""What a log of steps costs: a step with `StepLog` against one without.

Two gloo ranks on plain loopback train `link.py`'s model, and take turns round by round in the same
processes. Times are of the processor, whatever else the machine runs: those of all threads, for the
mean of `--steps` steps of forward and backward, and of the rank that took more; and those of the
log's own call in the thread that trains.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

import fsdp_overlap
from fsdp_overlap import meters
from fsdp_overlap.profiling import StepLog
from harness import link_training, loopback, output, processes, slow_link, turns
from harness.measurement import Measurement, Ratio

LOGGED, PLAIN = "with a log", "without"
STEP, CALL = "processor time of a step", "processor time of a call of step()"


def timed(run: Callable[[], float], steps: int) -> Callable[[], float]:
    """A sample: milliseconds of the processor a step, all ranks starting together."""

    def sample() -> float:
        dist.barrier()
        start = time.process_time()
        for _ in range(steps):
            run()
        return (time.process_time() - start) / steps * 1e3

    return sample


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    rank, _ = processes.join_ranks(timeout_s=args.timeout)
    model = link_training.build(args.blocks)
    ctx = fsdp_overlap.FsdpContext()
    for block in model:
        fsdp_overlap.fully_shard(block, ctx)
    fsdp_overlap.fully_shard(model, ctx)
    run = link_training.make_step(model, rank, args.rows)
    log = StepLog(ctx)
    present = meters.present[:]
    calls: list[float] = []

    def logged() -> float:
        meters.present[:] = present
        loss = run()
        start = time.thread_time()
        log.step()
        calls.append((time.thread_time() - start) * 1e6)
        return loss

    def plain() -> float:
        meters.present.clear()
        return run()

    for step in (logged, plain):
        step()
    calls.clear()
    with turns.quiet_gc():
        steps = {LOGGED: timed(logged, args.steps), PLAIN: timed(plain, args.steps)}
        found = processes.of_slowest_rank(turns.alternate(steps, args.rounds, 1))
    meters.present[:] = present
    if rank == 0:
        processes.report({"steps": found, "calls": calls})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = loopback.parse(__doc__.splitlines()[0], rows=64, rounds=31)
    if processes.is_rank():
        return run_rank(args)
    found = slow_link.launch_on_link(args, sys.argv[1:])
    about, settings = loopback.circumstances(args)
    figures = output.figures_of(STEP, "ms", found["steps"])
    figures += output.figures_of(CALL, "us", {LOGGED: found["calls"]})
    ratios = [Ratio.between(STEP, LOGGED, PLAIN, found["steps"])]
    argv = output.repeated_argv()
    output.publish(Measurement(about, settings, argv, figures, ratios), args.json, args.plot)


if __name__ == "__main__":
    main()
