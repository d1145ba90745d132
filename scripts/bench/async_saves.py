"""What a training step loses to a checkpoint that is written beside it: ours against FSDP2's.

Ranks train with AdamW. `dcp.async_save()` saves parameters and moments into a new folder and
training goes on:

- ours with `ShardStager`, which reads shards where they lie until the optimizer's step, and then
  copies what is not written, up to a GiB;
- ours, and FSDP2, with torch's stager, which copies everything within the call.

A round is `async_save()` and `--steps` steps with it:

- *call*: how long `async_save()` takes;
- *slowest step beside*: of the steps.

*Memory* is how far the peak of a rank's resident memory with the save is above that of the same
steps without, measured as in `checkpoint.py`. Without `--sleep` ranks compute on the cores that the
writers need. A save of each system must load as what was there when it was called.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from checkpoint import megabytes, new_folders
from fsdp_overlap.checkpoint import SafeFileSystemWriter, ShardStager
from fsdp_overlap.optim import AdamW
from harness import link_training, options, output, peaks, runner, sharding, turns
from harness.runner import Results

OURS, OURS_TORCHS, FSDP2 = "ours, ShardStager", "ours, torch's stager", "FSDP2"
CALL, SLOWEST = "call", "slowest step beside"
EXTRA = "extra memory a rank"


@dataclass
class System:
    """A model that trains and is saved. `times` are in seconds, of all rounds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]
    writer: type[dcp.FileSystemWriter]
    stager: ShardStager | None
    new_folder: Callable[[], Path]
    group: dist.ProcessGroup
    folder: Path = Path()
    times: dict[str, list[float]] = field(default_factory=dict)

    def save(self) -> Any:
        """Begins a save in a new folder; returns its future."""
        self.folder = self.new_folder()
        saving = dcp.async_save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
            storage_writer=self.writer(self.folder),
            process_group=self.group,
            async_stager=self.stager,
        )
        return getattr(saving, "upload_completion", saving)

    def run_beside(self, steps: int) -> None:
        saving = self.save()
        for _ in range(steps):
            self.step()
        saving.result()


def build(
    args: argparse.Namespace, system: str, new_folder: Callable[[], Path], group: Any
) -> System:
    model = link_training.build(args.blocks, args.sleep, args.width)
    optimizer: torch.optim.Optimizer
    if system == FSDP2:
        sharding.shard_fsdp2(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        sharding.shard_ours(model)
        optimizer = AdamW(model.parameters())
    batch = link_training.make_batch(args.rows, args.width)
    step = link_training.make_step(model, batch, optimizer.step)
    writer = dcp.FileSystemWriter if system == FSDP2 else SafeFileSystemWriter
    stager = ShardStager() if system == OURS else None
    return System(model, optimizer, step, writer, stager, new_folder, group)


def timed(system: System, steps: int) -> Callable[[], float]:
    """A sample: the longest of a save's call and the steps beside it, in seconds."""

    def slowest(run: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        run()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def sample() -> float:
        savings: list[Any] = []
        call = slowest(lambda: savings.append(system.save()))
        beside = max(slowest(system.step) for _ in range(steps))
        savings[0].result()
        for name, seconds in ((CALL, call), (SLOWEST, beside)):
            system.times.setdefault(name, []).append(seconds)
        return max(call, beside)

    return sample


def weighed(system: System, steps: int) -> Callable[[], float]:
    """A sample: bytes that this rank needs for a save beside steps, above what steps need."""

    def sample() -> float:
        with peaks.PeakMemory() as alone:
            for _ in range(steps):
                system.step()
        with peaks.PeakMemory() as beside:
            system.run_beside(steps)
        return max(0, beside.nbytes - alone.nbytes)

    return sample


SAMPLERS = {"time": timed, "memory": weighed}


def check(name: str, system: System) -> None:
    """Fails unless a save beside two steps has what was there when it was called."""
    system.step()
    shards = [parameter.detach().to_local() for parameter in system.model.parameters()]
    expected = [shard.clone() for shard in shards]
    system.run_beside(2)
    reader = dcp.FileSystemReader(system.folder)
    dcp.load({"model": system.model.state_dict()}, storage_reader=reader)
    if not all(map(torch.equal, shards, expected)):
        output.fail(f"{name}: the checkpoint is not what was there", code=1)


OPTIONS = options.parser(
    __doc__, ranks=2, blocks=8, width=512, rows=64, sleep=15.0, steps=4, rounds=7
)
options.add_folder(OPTIONS, "one checkpoint")
OPTIONS.add_argument("--measure", choices=list(SAMPLERS), help=argparse.SUPPRESS)


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """What saves take, in time or in memory."""
    group = dist.new_group()
    folders = new_folders(Path(args.folder))
    systems = {name: build(args, name, folders, group) for name in (OURS, OURS_TORCHS, FSDP2)}
    for name, system in systems.items():
        check(name, system)
    sampler = SAMPLERS[args.measure]
    samplers = {name: sampler(system, args.steps) for name, system in systems.items()}
    samples = turns.slowest(samplers, args.rounds)
    return {"samples": samples, "times": {name: each.times for name, each in systems.items()}}


def report(args: argparse.Namespace, measured: dict[str, Any]) -> Results:
    """`measured` is what ranks reported of times and of memory."""
    results = Results(f"a checkpoint of parameters and moments in {args.folder} beside the steps")
    compared = (OURS, FSDP2, 1.0), (OURS_TORCHS, FSDP2)
    for quantity in (CALL, SLOWEST):
        times = {name: each[quantity][1:] for name, each in measured["time"]["times"].items()}
        results.add(quantity, "s", times, *compared)
    results.add(EXTRA, "MB", megabytes(measured["memory"]["samples"]), *compared)
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, runner.launch_to_measure)
