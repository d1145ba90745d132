"""Published weights into a sharded model: ours against FSDP2's ways.

Ten safetensors files with an index, of a model of float32 (`--dtype bfloat16`: of bfloat16, loaded
into float32). *Ours* is `load_weights()`. FSDP2's are `set_model_state_dict()` of full tensors that
rank 0 reads and sends (`broadcast_from_rank0`), or that each rank reads, and DCP's
`HuggingFaceStorageReader`. All must give the same weights.

Files are in the page cache; with `--cold` they are dropped from it before each load. *Read* is
what a rank had from the disk then. *Memory* is the peak of a rank's resident memory above what
rested before, on the rank with most, in ranks of its own; pages of files that are mapped, as by
the safetensors package, count while they are resident.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp_overlap.weights import load_weights
from fsdp_overlap.weights.safetensors_format import INDEX
from harness import options, output, runner, sharding, turns
from harness.runner import Results

OURS, RANK_0, EACH, DCP = (
    "ours",
    "FSDP2, rank 0 reads and sends",
    "FSDP2, each rank reads all",
    "FSDP2, HuggingFaceStorageReader",
)
TIME, EXTRA, READ = "time", "extra memory a rank", "read from the disk by a rank"
FILES, TARGET = 10, 0.5


def write(args: argparse.Namespace) -> None:
    """The files, by rank 0."""
    folder, dtype = Path(args.folder), getattr(torch, args.dtype)
    if dist.get_rank() == 0 and not (folder / INDEX).exists():
        weights = {
            name: value.detach()
            for name, value in sharding.matrices(args.width, args.blocks).named_parameters()
        }
        names = list(weights)
        index = {}
        for number in range(FILES):
            its = names[number * len(names) // FILES : (number + 1) * len(names) // FILES]
            file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
            save_file({name: weights[name].to(dtype).contiguous() for name in its}, folder / file)
            index |= dict.fromkeys(its, file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        os.sync()
    dist.barrier()


def loaders(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Each loads all weights. Checks what each has loaded."""
    ours, theirs = (
        sharding.shard_ours(sharding.matrices(args.width, args.blocks)),
        sharding.shard_fsdp2(sharding.matrices(args.width, args.blocks)),
    )
    files = sorted(Path(args.folder).glob("*.safetensors"))

    def whole() -> dict[str, torch.Tensor]:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def rank_0() -> None:
        state = whole() if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(theirs, state, options=options)

    def each() -> None:
        set_model_state_dict(theirs, whole(), options=StateDictOptions(full_state_dict=True))

    def by_dcp() -> None:
        dcp.load(theirs.state_dict(), storage_reader=HuggingFaceStorageReader(args.folder))

    loads = {
        OURS: (ours, lambda: load_weights(ours, args.folder)),
        RANK_0: (theirs, rank_0),
        EACH: (theirs, each),
        DCP: (theirs, by_dcp),
    }
    for name, (model, load) in loads.items():
        shards = [parameter.detach().to_local() for parameter in model.parameters()]
        before = [shard.to(getattr(torch, args.dtype)).to(shard.dtype) for shard in shards]
        for shard in shards:
            shard.zero_()
        load()
        if not all(map(torch.equal, shards, before)):
            output.fail(f"{name}: the weights are not those of the files", code=1)
    return {name: load for name, (_, load) in loads.items()}


def dropped(args: argparse.Namespace, load: Callable[[], object]) -> Callable[[], float]:
    """A sample: ``load``, once the page cache has dropped the files, and the MB from the disk."""

    def sample() -> float:
        drop(args)
        before = read_bytes()
        load()
        return (read_bytes() - before) / 1e6

    return sample


def drop(args: argparse.Namespace) -> None:
    dist.barrier()
    for file in Path(args.folder).glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    dist.barrier()


def read_bytes() -> int:
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


OPTIONS = options.parser(__doc__, ranks=2, blocks=40, width=1024, rounds=7)
options.add_folder(OPTIONS, "the files")
OPTIONS.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
OPTIONS.add_argument("--cold", action="store_true", help="from the disk, not the page cache")
OPTIONS.add_argument("--measure", choices=["time", "memory"], help=argparse.SUPPRESS)


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, or the highest peaks in MB, and the MB from the disk."""
    write(args)
    loads = loaders(args)
    if args.measure == "memory":
        peaks = turns.slowest({n: turns.weighed(f, 1e6) for n, f in loads.items()}, 2)
        read = {}
        if args.cold:
            read = turns.slowest({name: dropped(args, load) for name, load in loads.items()}, 2)
        return {"samples": peaks, "read": read}

    def timed(load: Callable[[], object]) -> Callable[[], float]:
        once = turns.timed(load)

        def sample() -> float:
            if args.cold:
                drop(args)
            return once()

        return sample

    samplers = {name: timed(load) for name, load in loads.items()}
    return {"samples": turns.slowest(samplers, args.rounds)}


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    itemsize = getattr(torch, args.dtype).itemsize
    size = 12 * args.width**2 * args.blocks * itemsize / 1e6
    cache = "from the disk" if args.cold else "in the page cache"
    results = Results(f"{size:.0f} MB of {args.dtype} in {FILES} files, {cache}")
    samples = {
        name: [ms / 1e3 for ms in values] for name, values in found["time"]["samples"].items()
    }
    targets = [(OURS, other, TARGET) for other in (RANK_0, EACH, DCP)]
    results.add(TIME, "s", samples, *targets)
    results.add(EXTRA, "MB", found["memory"]["samples"], at_most={OURS: 64 * 1.048576})
    if read := found["memory"]["read"]:
        results.add(READ, "MB", read, at_most={OURS: 1.05 * size / args.ranks})
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, runner.launch_to_measure)
