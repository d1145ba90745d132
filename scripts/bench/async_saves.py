"""What a training step loses to a checkpoint that is written beside it: ours against FSDP2's.

Ranks train with AdamW. `dcp.async_save()` saves parameters and moments into a new folder and
training goes on:

- ours with `ShardStager`, which reads shards where they lie until the optimizer's step, and then
  copies what is not written, up to `--copied` MiB;
- ours, and FSDP2, with torch's stager, which copies everything within the call.

A round is `--steps` steps without a save, and `async_save()` and as many steps with it:

- *step, no save*: the mean of the first;
- *call*: how long `async_save()` takes;
- *slowest step beside*: of the second;
- *lost*: the call and all steps beside it, less as many steps without a save. If the save takes
  longer than these, the wait for it is lost too.

*Memory* is how far the peak of a rank's resident memory with the save is above that of the steps
without, measured as in `checkpoint.py`. Without `--sleep` ranks compute on the cores that the
writers need. A save of each system must load as what was there when it was called.
"""

from __future__ import annotations

import argparse
import statistics
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
STEP, CALL, SLOWEST, LOST = "step, no save", "call", "slowest step beside", "lost"
EXTRA = "extra memory a rank"


@dataclass
class System:
    """A model that trains and is saved. `times` are in seconds, of all rounds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]
    writer: type[dcp.FileSystemWriter]
    stager: ShardStager | None
    new_folder: Callable[[], Path]
    group: dist.ProcessGroup
    folder: Path = Path()
    times: dict[str, list[float]] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self) -> Any:
        """Begins a save; returns its future."""
        saving = dcp.async_save(
            self.state(),
            storage_writer=self.writer(self.folder),
            process_group=self.group,
            async_stager=self.stager,
        )
        return getattr(saving, "upload_completion", saving)

    def run_beside(self, steps: int) -> None:
        self.folder = self.new_folder()
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
    batch = link_training.make_batch(dist.get_rank(), args.rows, args.width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    writer = dcp.FileSystemWriter if system == FSDP2 else SafeFileSystemWriter
    stager = ShardStager(args.copied << 20) if system == OURS else None
    return System(model, optimizer, step, writer, stager, new_folder, group)


def timed(system: System, steps: int) -> Callable[[], float]:
    """A sample: what a save takes from training, in seconds."""

    def slowest(run: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        run()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def sample() -> float:
        alone = [slowest(system.step) for _ in range(steps)]
        savings: list[Any] = []
        system.folder = system.new_folder()
        call = slowest(lambda: savings.append(system.save()))
        beside = [slowest(system.step) for _ in range(steps)]
        rest = slowest(savings[0].result)
        lost = call + sum(beside) + rest - sum(alone)
        found = {STEP: statistics.mean(alone), CALL: call, SLOWEST: max(beside), LOST: lost}
        for name, seconds in found.items():
            system.times.setdefault(name, []).append(seconds)
        return lost

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
OPTIONS.add_argument("--copied", type=int, default=1024, metavar="MIB", help="of ShardStager")
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
    stager = systems[OURS].stager
    assert stager is not None
    return {
        "nbytes": 12 * sum(each.numel() for each in systems[OURS].model.parameters()),
        "samples": samples,
        "times": {name: system.times for name, system in systems.items()},
        "copied": stager.peak_copied_bytes,
    }


def report(args: argparse.Namespace, measured: dict[str, Any]) -> Results:
    """`measured` is what ranks reported of times and of memory."""
    seconds = measured["time"]
    results = Results(
        f"a checkpoint of {seconds['nbytes'] / 1e6:.0f} MB in {args.folder} beside the steps, at "
        f"most {args.copied} MiB copied, {seconds['copied'] / 1e6:.0f} MB were",
        nbytes=seconds["nbytes"],
    )
    compared = (OURS, FSDP2, 1.0), (OURS_TORCHS, FSDP2)
    for quantity in (STEP, CALL, SLOWEST, LOST):
        times = {name: found[quantity][1:] for name, found in seconds["times"].items()}
        # What is lost may be nothing, so it has no ratio.
        results.add(quantity, "s", times, *(compared if quantity in (CALL, SLOWEST) else ()))
    results.add(EXTRA, "MB", megabytes(measured["memory"]["samples"]), *compared)
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, runner.launch_to_measure)
