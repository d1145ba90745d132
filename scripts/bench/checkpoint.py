"""Saving and loading a sharded model: throughput and memory, ours against FSDP2's.

Ranks hold one model of about 200 million float32 parameters twice, sharded by each system. Both
save with `torch.distributed.checkpoint.save` into a new folder, synced to the disk, and load in
place with `load` what they saved themselves. FSDP2 uses torch's `FileSystemWriter` and
`FileSystemReader`. Ours uses `SafeFileSystemWriter` and `SafeFileSystemReader`, which compares all
checksums before it changes anything; ours is also loaded without comparing those of tensors, and by
torch's reader, which compares none. Each reader must bring back every shard, bit by bit.

*Time* includes `state_dict()`. Loads find the files in the page cache. Saves wait for the disk, so
`--folder /dev/shm` shows what the software adds.

*Memory* is the peak of a rank's resident memory during one save or load above what it was before,
on the rank with most; files in the page cache do not count. It is measured in ranks of its own, in
which freed blocks of 64 KiB and more go back to the system at once, so that none hides in what
rested before. That slows down whoever takes large blocks, so nothing is timed there.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as fsdp2

import fsdp_overlap
from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter
from harness import link_training, options, output, runner, sharding, turns
from harness.runner import Results

SAVE_OURS, SAVE_FSDP2 = "save, ours", "save, FSDP2"
LOAD_OURS, LOAD_FSDP2 = "load, ours", "load, FSDP2"
LOAD_OURS_UNVERIFIED = "load, ours, verify=False"
LOAD_OURS_PLAIN = "load, ours by torch's reader"
COMPARED = {
    SAVE_OURS: SAVE_FSDP2,
    LOAD_OURS: LOAD_FSDP2,
    LOAD_OURS_UNVERIFIED: LOAD_FSDP2,
    LOAD_OURS_PLAIN: LOAD_FSDP2,
}


def build(blocks: int, width: int, shard: Callable[[nn.Module], Any]) -> nn.Sequential:
    """The same model on every rank and for every system, of which no two blocks are ever whole."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(blocks):
        block = link_training.Block(width=width)
        shard(block)
        model.append(block)
    shard(model)
    return model


TIME, EXTRA = "time", "extra memory a rank"
TARGETS = {(TIME, SAVE_OURS): 0.8}  # of FSDP2's, where not 1
PAGE = 4096  # bytes; of less than that memory cannot be seen to be taken

Operation = Callable[[Path], None]


def sampled(run: Operation, folders: Callable[[], Path], measure: str) -> Callable[[], float]:
    """A sample: milliseconds on this rank, or bytes that it needs above what rested before."""
    sampler = turns.timed if measure == "time" else turns.weighed

    def sample() -> float:
        folder = folders()
        return sampler(lambda: run(folder))()

    return sample


def saving(model: nn.Module, writer: type[dcp.FileSystemWriter]) -> Operation:
    def save(folder: Path) -> None:
        dcp.save(model.state_dict(), storage_writer=writer(folder))

    return save


def loading(model: nn.Module, reader: type[dcp.FileSystemReader]) -> Operation:
    def load(folder: Path) -> None:
        dcp.load(model.state_dict(), storage_reader=reader(folder))

    return load


def new_folders(parent: Path) -> Callable[[], Path]:
    """A new one in `parent` each time, the same on every rank; the one before is removed."""
    numbers = itertools.count()

    def next_folder() -> Path:
        dist.barrier()
        if dist.get_rank() == 0:
            for old in parent.glob("*"):
                shutil.rmtree(old)
        dist.barrier()
        return parent / str(next(numbers))

    return next_folder


def check(name: str, model: nn.Module, load: Operation, folder: Path) -> None:
    """Fails unless `load` brings back what was saved in `folder` and is in `model`."""
    shards = [parameter.detach().to_local() for parameter in model.parameters()]
    before = [shard.clone() for shard in shards]
    for shard in shards:
        shard.zero_()
    load(folder)
    if not all(map(torch.equal, shards, before)):
        output.fail(f"{name}: the model is not what was saved", code=1)


OPTIONS = options.parser(__doc__, ranks=2, blocks=16, width=1024, rounds=11)
options.add_folder(OPTIONS, "three checkpoints")
OPTIONS.add_argument("--measure", choices=["time", "memory"], help=argparse.SUPPRESS)


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, or bytes, of each save and load."""
    mesh = sharding.cpu_mesh()
    ctx = fsdp_overlap.FsdpContext(mesh)
    ours = build(args.blocks, args.width, lambda module: fsdp_overlap.fully_shard(module, ctx))
    theirs = build(args.blocks, args.width, lambda module: fsdp2.fully_shard(module, mesh=mesh))
    folder = Path(args.folder)
    kept = {ours: folder / "ours", theirs: folder / "FSDP2"}
    saves = {
        SAVE_OURS: (ours, saving(ours, SafeFileSystemWriter)),
        SAVE_FSDP2: (theirs, saving(theirs, dcp.FileSystemWriter)),
    }
    unverified = partial(SafeFileSystemReader, verify=False)
    loads = {
        LOAD_OURS: (ours, loading(ours, SafeFileSystemReader)),
        LOAD_FSDP2: (theirs, loading(theirs, dcp.FileSystemReader)),
        LOAD_OURS_UNVERIFIED: (ours, loading(ours, unverified)),
        LOAD_OURS_PLAIN: (ours, loading(ours, dcp.FileSystemReader)),
    }
    for model, save in saves.values():
        save(kept[model])
    for name, (model, load) in loads.items():
        check(name, model, load, kept[model])

    folders = new_folders(folder / "saved")
    samplers = {name: sampled(save, folders, args.measure) for name, (_, save) in saves.items()}
    for name, (model, load) in loads.items():
        samplers[name] = sampled(load, partial(Path, kept[model]), args.measure)
    numel = sum(parameter.numel() for parameter in ours.parameters())
    return {"numel": numel, "samples": turns.slowest(samplers, args.rounds)}


def report(args: argparse.Namespace, measured: dict[str, Any]) -> Results:
    """`measured` is what ranks reported of times and of memory."""
    numel = measured["time"]["numel"]
    times = measured["time"]["samples"]
    seconds = {name: [ms / 1e3 for ms in values] for name, values in times.items()}
    extra = megabytes(measured["memory"]["samples"])
    about = f"{numel / 1e6:.0f} million parameters in float32, in {args.folder}"
    results = Results(about, numel=numel)
    for quantity, unit, samples in ((TIME, "s", seconds), (EXTRA, "MB", extra)):
        compared = [
            (name, other, TARGETS.get((quantity, name), 1.0)) for name, other in COMPARED.items()
        ]
        results.add(quantity, unit, samples, *compared)
    return results


def megabytes(samples: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Of peaks in bytes."""
    return {
        name: [max(nbytes, PAGE) / 1e6 for nbytes in values] for name, values in samples.items()
    }


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, runner.launch_to_measure)
