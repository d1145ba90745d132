"""Systems that are measured in turns."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from harness import peaks, processes
from harness.output import fail


def alternate(
    systems: Mapping[str, Callable[[], float]], rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Measure every system once per round, so that drift of the machine hits all of them alike.

    Each callable runs once and returns its sample; the first `warmup` rounds are thrown away. The
    order is rotated from round to round, so that nobody always runs after the same neighbour, and
    garbage of one is collected before the next begins, so that nobody pays for it.
    """
    names = list(systems)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            sample = systems[name]()
            if index >= warmup:
                samples[name].append(sample)
    return samples


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Keep the cyclic collector out of the timings: it would hit whichever system runs then.

    What lives now is left out of explicit collections inside, which makes those cheap.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def slowest(
    samplers: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """`alternate` with the cyclic collector off; of each round the sample of the rank with the
    largest. Collective."""
    with quiet_gc():
        return processes.of_slowest_rank(alternate(samplers, rounds, warmup))


def slowest_steps(
    steps: Mapping[str, Callable[[], object]], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Milliseconds of each step, as the options `rounds` and, if it is there, `steps` say."""
    each = getattr(args, "steps", 1)
    return slowest({name: timed(step, each) for name, step in steps.items()}, args.rounds)


def same_losses(losses: Mapping[str, float], tolerance: float = 1e-4) -> None:
    """End the program unless all systems compute the same: one that computes something else wins
    nothing."""
    low, high = min(losses.values()), max(losses.values())
    if high - low > tolerance * abs(high):
        fail(f"the systems compute different losses: {dict(losses)}", code=1)


def timed(
    run: Callable[[], object], steps: int = 1, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """A sample: milliseconds per step on this rank, all ranks starting together. `clock` may be
    `time.process_time` where ranks have to share cores."""

    def sample() -> float:
        dist.barrier()
        start = clock()
        for _ in range(steps):
            run()
        return (clock() - start) / steps * 1e3

    return sample


def weighed(run: Callable[[], object], unit: float = 1.0) -> Callable[[], float]:
    """A sample: how many times `unit` bytes this rank needs above what rested before."""

    def sample() -> float:
        dist.barrier()
        with peaks.PeakMemory() as peak:
            run()
        return peak.nbytes / unit

    return sample
