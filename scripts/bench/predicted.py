"""Steps on this machine, measured and predicted.

Gloo ranks on loopback train the model of `link.py`, over links of several speeds, with one option
changed at a time: ranks, link, prefetch, batch, layout, stage, microbatches, copies, and how long
compute takes that leaves the cores alone. A sample is the mean of two steps, from a barrier to the
end of the slowest rank.

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

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import hsdp
from fsdp_overlap.tools.simulator import CpuPrediction, Fabric, Profile, simulate_on_cpu
from harness import link_training, options, output, peaks, processes, slow_link, turns
from harness.measurement import Measurement

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
    shared_group: bool = False

    def program(self) -> Callable[[], float]:
        """Builds and shards the model on this rank, and returns what makes a step of it."""
        if not self.copies:
            return link_training.train_ours(self, overlap=True)[0]
        sizes = (2, self.ranks // 2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        return hsdp.train_ours(self, mesh, shard_optimizer_over_replicas=self.copies == "divided")[
            0
        ]


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


def run_rank(args: argparse.Namespace) -> None:
    """Measures cases on this rank; rank 0 reports those of the slowest."""
    rank, _ = processes.join_ranks(timeout_s=args.timeout)
    cases = [CASES[number] for number in args.cases]
    if args.memory:
        cases = [replace(case, sleep=0.0) for case in cases]
    else:
        touch_heap()
    steps = {case.name: case.program() for case in cases}
    for step in steps.values():
        step()
    with turns.quiet_gc():
        sample = (
            partial(turns.weighed, unit=MIB) if args.memory else partial(turns.timed, steps=STEPS)
        )
        mine = turns.alternate({name: sample(step) for name, step in steps.items()}, args.rounds, 1)
        if args.trace is not None:
            trace(steps[cases[0].name], args.trace if rank == 0 else None)
    processes.finish(processes.of_slowest_rank(mine))


def touch_heap() -> None:
    """Gives malloc pages that it keeps. The profiler allocates between the buffers of a step, which
    so move on in memory, and traced steps alone would wait for new pages."""
    blocks = [torch.ones(HEAP_BLOCK // 4) for _ in range(HEAP_BLOCKS)]
    del blocks


def trace(step: Callable[[], float], path: Path | None) -> None:
    """Runs steps under the profiler, on all ranks; one of them has a `path` to write to."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(TRACED_STEPS):
            step()
    if path is not None:
        profiler.export_chrome_trace(str(path))


def measure(args: argparse.Namespace, trace_file: Path) -> dict[str, list[float]]:
    """Milliseconds of each case's steps. Ranks of one link take their cases in turns."""
    samples = {}
    for ranks, rate in dict.fromkeys((case.ranks, case.rate) for case in CASES):
        numbers = [n for n, case in enumerate(CASES) if (case.ranks, case.rate) == (ranks, rate)]
        argv = _argv(args, numbers)
        if 0 in numbers:
            argv += ["--trace", str(trace_file)]
        link = argparse.Namespace(ranks=ranks, rate=rate, no_limit=False, timeout=args.timeout)
        with Console(stderr=True).status(f"{len(numbers)} cases, {ranks} ranks, {rate}"):
            samples |= slow_link.launch_on_link(link, argv, KEPT)
    return {case.name: samples[case.name] for case in CASES}


def measure_memory(args: argparse.Namespace) -> dict[str, list[float]]:
    """MiB by which each case's step rises at most, on a link without a limit and with no sleep."""
    samples = {}
    for ranks in dict.fromkeys(case.ranks for case in CASES):
        numbers = [n for n, case in enumerate(CASES) if case.ranks == ranks]
        argv = [*_argv(args, numbers), "--memory"]
        with Console(stderr=True).status(f"memory of {len(numbers)} cases, {ranks} ranks"):
            samples |= processes.launch_ranks(ranks, argv, args.timeout, peaks.RETURNED)
    return {case.name: [max(samples[case.name])] for case in CASES}


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


def measurement_of(
    args: argparse.Namespace,
    steps: dict[str, list[float]],
    memory: dict[str, list[float]],
    predicted: dict[str, tuple[float, float]],
) -> Measurement:
    figures = []
    for at, (quantity, unit, measured, targets) in enumerate(
        (("step", "ms", steps, TARGETS), ("memory", "MiB", memory, MEMORY_TARGETS))
    ):
        found = {name: both[at] for name, both in predicted.items()}
        errors = {
            name: 100 * (found[name] / statistics.median(measured[name]) - 1) for name in found
        }
        sizes = list(map(abs, errors.values()))
        figures += [
            *output.figures_of(f"{quantity}: measured", unit, measured),
            *output.figures_of(f"{quantity}: predicted", unit, _once(found)),
            *output.figures_of(f"{quantity}: error", "%", _once(errors)),
            *output.figures_of(
                f"{quantity}, all cases: error",
                "%",
                {"median": [statistics.median(sizes)], "worst": [max(sizes)]},
                at_most=targets,
            ),
        ]
    about = (
        f"{len(CASES)} cases, {args.rounds} rounds of {STEPS} steps; speed of operations from the "
        "first case alone"
    )
    return options.measurement(args, about, figures, steps=STEPS)


def _once(values: dict[str, float]) -> dict[str, list[float]]:
    return {name: [value] for name, value in values.items()}


def _argv(args: argparse.Namespace, numbers: list[int]) -> list[str]:
    return ["--rounds", str(args.rounds), "--cases", *map(str, numbers)]


def main() -> None:
    parser = options.parser(__doc__, rounds=5, timeout=600.0)
    parser.add_argument("--cases", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if processes.is_rank():
        return run_rank(args)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trace_file = Path(folder) / "trace.json"
        steps = measure(args, trace_file)
        measured = Profile.read(trace_file)
    memory = measure_memory(args)
    predicted = {}
    for case in CASES:
        with Console(stderr=True).status(f"predicting {case.name}"):
            predicted[case.name] = predict(case, measured)
    output.publish(measurement_of(args, steps, memory, predicted), args.json, args.plot)


if __name__ == "__main__":
    main()
