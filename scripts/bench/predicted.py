"""Steps on this machine, measured and predicted.

Ranks train the model of `link.py`, with one option changed at a time: ranks, link, prefetch, batch,
layout, stage, microbatches, copies, and how long compute takes that leaves the cores alone.

The first case runs under torch's profiler too. What operations took there is all that the
predictions know of this machine's speed, beside the number of its cores and the speed of the link
as it was asked for. They run the library's own comm streams for CPUs, with collectives that move
nothing.

Memory is how far a step rises above rest, of the rank that rises most, in a run where freed memory
goes back to the system. It is predicted by the bytes of the tensors that exist at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

import hsdp
from fsdp_overlap.tools.simulator import CpuPrediction, Fabric, Profile, simulate_on_cpu
from harness import link_training, options, peaks, runner, slow_link, turns
from harness.runner import Results
from harness.traces import trace

MIB = 2**20
STEPS = 2
TRACED_STEPS = 3
# Freed memory stays with the process, as a device's does: else each buffer is made of new pages,
# and what these take differs from run to run. 32 MiB is the most that glibc takes here.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
HEAP_BLOCK, HEAP_BLOCKS = 24 * MIB, 48  # a traced step uses up some 250 MiB
TARGETS = {"median": 3.0, "worst": 8.0}
MEMORY_TARGETS = {"worst": 5.0}
UNLIMITED = "16gbit"  # about what loopback carries here without a limit


@dataclass(frozen=True)
class Case:
    """One measured step. The names are those of the options of `link.py`."""

    name: str
    ranks: int = 2
    rate: str = "2gbit"
    blocks: int = 8
    rows: int = 64
    sleep: float = 40.0
    prefetch: int = 1
    layout: str = "flat"
    stage: int = 3
    microbatches: int = 1
    copies: str = ""
    optimizer: str = "adamw"

    def program(self) -> Callable[[], float]:
        """Builds and shards the model on this rank, and returns what makes a step of it."""
        if not self.copies:
            return link_training.train_ours(self, overlap=True)[0]
        sizes = (2, self.ranks // 2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        return hsdp.train_ours(self, mesh, self.copies == "divided")


CASES = (
    Case("2 ranks, 2 Gbit/s, 1 unit ahead"),
    Case("no unit ahead", prefetch=0),
    Case("2 units ahead", prefetch=2),
    Case("1 Gbit/s", rate="1gbit"),
    Case("4 Gbit/s", rate="4gbit"),
    Case("4 Gbit/s, no unit ahead", rate="4gbit", prefetch=0),
    Case("compute of a quarter", sleep=10.0),
    Case("compute of four times", sleep=160.0),
    Case("batch of 4 times", rows=256),
    Case("each tensor by itself", layout="per-tensor"),
    Case("whole matrices", layout="tensor-atomic"),
    Case("stage 2, 2 microbatches", stage=2, microbatches=2),
    Case("stage 1, 2 microbatches", stage=1, microbatches=2),
    Case("stage 3, 3 microbatches", microbatches=3),
    Case("4 ranks", ranks=4, sleep=100.0),
    Case("4 ranks, 4 Gbit/s, no unit ahead", ranks=4, rate="4gbit", sleep=50.0, prefetch=0),
    Case("4 ranks, 2 copies", ranks=4, sleep=50.0, blocks=6, microbatches=2, copies="whole"),
    Case("the same, divided", ranks=4, sleep=50.0, blocks=6, microbatches=2, copies="divided"),
)


OPTIONS = options.parser(__doc__, rounds=5, timeout=600.0)
OPTIONS.add_argument("--cases", type=int, nargs="*", help=argparse.SUPPRESS)
OPTIONS.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
OPTIONS.add_argument("--trace", type=Path, help=argparse.SUPPRESS)


def sample(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds, or MiB, of the chosen cases."""
    cases = [CASES[number] for number in args.cases]
    if args.memory:
        cases = [replace(case, sleep=0.0) for case in cases]
    else:
        touch_heap()
    steps = {case.name: case.program() for case in cases}
    for step in steps.values():
        step()
    sampler = partial(turns.weighed, unit=MIB) if args.memory else partial(turns.timed, steps=STEPS)
    samples = turns.slowest({name: sampler(step) for name, step in steps.items()}, args.rounds)
    if args.trace is not None:
        path = args.trace if dist.get_rank() == 0 else None
        trace(steps[cases[0].name], TRACED_STEPS, path)
    return samples


def touch_heap() -> None:
    """Gives malloc pages that it keeps. The profiler allocates between the buffers of a step, which
    so move on in memory, and traced steps alone would wait for new pages."""
    blocks = [torch.ones(HEAP_BLOCK // 4) for _ in range(HEAP_BLOCKS)]
    del blocks


def launch(args: argparse.Namespace) -> tuple[dict[str, Any], ...]:
    """Milliseconds of each case's steps, MiB by which each rises at most, and what is predicted of
    both."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trace_file = Path(folder) / "trace.json"
        steps = measure(args, ["--trace", str(trace_file)], KEPT)
        measured = Profile.read(trace_file)
    highest = measure(args, ["--memory"], peaks.RETURNED)
    memory = {name: [max(samples)] for name, samples in highest.items()}
    predicted = {}
    for case in CASES:
        with Console(stderr=True).status(f"predicting {case.name}"):
            predicted[case.name] = predict(case, measured)
    return steps, memory, predicted


def measure(
    args: argparse.Namespace, arguments: list[str], env: dict[str, str]
) -> dict[str, list[float]]:
    """The samples of each case. Ranks of one link take their cases in turns; memory is measured on
    a link without a limit."""
    of_memory = "--memory" in arguments
    samples: dict[str, list[float]] = {}
    for ranks, rate in dict.fromkeys(
        (case.ranks, UNLIMITED if of_memory else case.rate) for case in CASES
    ):
        numbers = [
            number
            for number, case in enumerate(CASES)
            if case.ranks == ranks and rate in (case.rate, UNLIMITED)
        ]
        chosen = ["--cases", *map(str, numbers), *(arguments if of_memory or 0 in numbers else [])]
        with Console(stderr=True).status(f"{len(numbers)} cases, {ranks} ranks, {rate}"):
            samples |= runner.launch_ranks(
                args, chosen, env, ranks=ranks, rate=rate, no_limit=of_memory
            )
    return {case.name: samples[case.name] for case in CASES}


def predict(case: Case, measured: Profile) -> tuple[float, float]:
    """Milliseconds of a step, and the MiB by which it rises where memory is measured."""
    seconds = _predicted(case, measured).seconds
    unlimited = replace(case, sleep=0.0, rate=UNLIMITED)
    return seconds * 1e3, _predicted(unlimited, measured).memory / MIB


def _predicted(case: Case, measured: Profile) -> CpuPrediction:
    fabric = Fabric.read("loopback_2g")
    link = replace(fabric.within, bandwidth=slow_link.gbit(case.rate) * 1e9 / 8)
    return simulate_on_cpu(
        case.program,
        case.ranks,
        measured,
        replace(fabric, within=link),
        cores=len(os.sched_getaffinity(0)),
        steps=STEPS,
    )


def report(args: argparse.Namespace, found: tuple[dict[str, Any], ...]) -> Results:
    *both, predicted = found
    results = Results(
        f"{len(CASES)} cases, {STEPS} steps a sample; speed of operations from the first alone",
        steps=STEPS,
    )
    of_each = zip(("step", "memory"), ("ms", "MiB"), both, (TARGETS, MEMORY_TARGETS), strict=True)
    for at, (quantity, unit, measured, targets) in enumerate(of_each):
        said = {name: [each[at]] for name, each in predicted.items()}
        errors = {
            name: [100 * (each / statistics.median(measured[name]) - 1)]
            for name, [each] in said.items()
        }
        sizes = [abs(each) for [each] in errors.values()]
        results.add(f"{quantity}: measured", unit, measured)
        results.add(f"{quantity}: predicted", unit, said)
        results.add(f"{quantity}: error", "%", errors)
        all_cases = {"median": [statistics.median(sizes)], "worst": [max(sizes)]}
        results.add(f"{quantity}, all cases: error", "%", all_cases, at_most=targets)
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, launch)
