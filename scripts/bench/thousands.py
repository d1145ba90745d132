"""What a job of thousands of ranks costs one rank's host, and the first rank, ours against FSDP2's.

Llama-3 8B on the meta device, a block a unit, on a fake process group of `--world-size` ranks; each
system in a process of its own, because groups and caches stay. Of one rank:

- *shard*: `fully_shard()` of all blocks and of the root, and the resident memory that it takes;
- *start*: how much longer the first step takes than a later one, and *step*: what a later one takes
  for a unit beyond an unsharded step and the collectives alone, both of the tiny blocks of
  `host_overhead.py`, because nobody could compute the others. The collectives are most of what a
  step takes here, because a fake all-gather fills the part of every rank;
- *state dict*: `model.state_dict()`;
- *plan*: what a rank plans to save, by `torch.distributed.checkpoint`'s planner, and how many
  tensors it writes.

Of a save, without the tensors: what is *sent to the first rank* before and after ranks write,
pickled; *coordinate*, how long it works while the others wait, and its memory; *returned*, how long
a rank takes to read what `save()` returns to it.

Ours saves with `ShardedSavePlanner` and `SafeFileSystemWriter`, FSDP2 with torch's own. A sample is
one run of a process.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh

import fsdp_overlap
import host_overhead
from fsdp_overlap.checkpoint import SafeFileSystemWriter, ShardedSavePlanner
from fsdp_overlap.torch_internals import StorageInfo
from harness import options, peaks, processes, runner, sharding, turns
from harness.real_models import on_meta
from harness.runner import Results

OURS, FSDP2 = "ours", "FSDP2"
QUANTITIES = {
    "shard": "s",
    "memory of shard": "MB",
    "start": "ms",
    "step": "us",
    "state dict": "ms",
    "plan": "ms",
    "tensors of a rank": "",
    "sent to the first rank": "MB",
    "coordinate": "s",
    "returned": "ms",
    "memory of the coordinator": "GB",
}
COORDINATE_TARGET = 0.1
MODEL = "Llama-3 8B"
BLOCKS, WIDTH = 8, 32


def sharded(system: str, model: Any, mesh: DeviceMesh) -> None:
    if system == OURS:
        sharding.shard_ours(model, fsdp_overlap.FsdpContext(mesh))
    else:
        sharding.shard_fsdp2(model, mesh)


@contextmanager
def seen_from(mesh: DeviceMesh, rank: int) -> Iterator[None]:
    """This process reckons as ``rank`` does."""
    with (
        patch.object(mesh, "_coordinate_on_dim", (rank,)),
        patch.object(DeviceMesh, "get_local_rank", lambda *_: rank),
        patch.object(dist, "get_rank", lambda *_: rank),
    ):
        yield


class Saving:
    """A rank's part in a save, as far as it needs no other rank."""

    def __init__(self, system: str, state: dict[str, Any], folder: str, rank: int) -> None:
        ours = system == OURS
        self.state, self.rank = state, rank
        self.writer = (SafeFileSystemWriter if ours else FileSystemWriter)(folder)
        self.planner = ShardedSavePlanner() if ours else DefaultSavePlanner()

    def plan(self) -> SavePlan:
        self.planner.set_up_planner(self.state, self.writer.storage_meta(), self.rank == 0)
        return self.planner.create_local_plan()

    def written(self, plan: SavePlan) -> Any:
        """What the rank tells when it has written what ``plan`` says."""
        results = [
            WriteResult(
                item.index, 0, StorageInfo(f"__{self.rank}_0.distcp", number << 20, 1 << 20)
            )
            for number, item in enumerate(self.planner.finish_plan(plan).items)
        ]
        if isinstance(self.planner, ShardedSavePlanner):
            return self.planner.write_result(results)
        return results


def steps_of(system: str, mesh: DeviceMesh) -> dict[str, float]:
    """The host's time for the first step, and for a unit of later ones."""
    model, plain = host_overhead.build(BLOCKS, WIDTH), host_overhead.build(BLOCKS, WIDTH)
    unsharded, group = host_overhead.make_step(plain, WIDTH), mesh.get_group()
    shard = torch.zeros(-(-sum(p.numel() for p in plain[0].parameters()) // group.size()))
    full = torch.zeros(group.size() * len(shard))

    def alone() -> None:
        unsharded()
        for _ in range(2 * BLOCKS - 1):  # the last block is kept for backward
            group._allgather_base(full, shard).wait()
        for _ in range(BLOCKS):
            group._reduce_scatter_base(shard, full).wait()

    if system == OURS:
        host_overhead.shard_ours(model, mesh, prefetch=1)
    else:
        sharding.shard_fsdp2(model, mesh)
    step = host_overhead.timed(host_overhead.make_step(model, WIDTH))
    floor = host_overhead.timed(alone)
    floor()
    first = step()
    with turns.quiet_gc():
        samples = turns.alternate({"step": step, "floor": floor}, rounds=10, warmup=2)
    later, least = median(samples["step"]), median(samples["floor"])
    return {"start": (first - later) / 1e3, "step": (later - least) / BLOCKS}


def measure(system: str, world_size: int, blocks: int | None) -> dict[str, float]:
    processes.join_fake_ranks(world_size)
    model = on_meta(MODEL, blocks)
    mesh = sharding.cpu_mesh()
    found: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any], scale: float = 1.0) -> Any:
        gc.collect()
        start = time.perf_counter()
        result = run()
        found[name] = found.get(name, 0.0) + (time.perf_counter() - start) * scale
        return result

    with peaks.PeakMemory() as peak:
        timed("shard", lambda: sharded(system, model, mesh))
    found["memory of shard"] = peak.nbytes / 1e6
    state = {"model": timed("state dict", model.state_dict, 1e3)}
    with tempfile.TemporaryDirectory() as folder:
        first = Saving(system, state, folder, 0)
        plans = [pickle.dumps(timed("plan", first.plan, 1e3))]
        for rank in range(1, world_size):
            with seen_from(mesh, rank):
                plans.append(pickle.dumps(Saving(system, state, folder, rank).plan()))

        def answer() -> tuple[list[bytes], Metadata]:
            told = [pickle.loads(each) for each in plans]
            turns, metadata = first.planner.create_global_plan(told)
            return [
                pickle.dumps(each) for each in first.writer.prepare_global_plan(turns)
            ], metadata

        answers, metadata = timed("coordinate", answer)
        reports = []
        for rank, each in enumerate(answers):
            saving = Saving(system, state, folder, rank)
            with seen_from(mesh, rank):
                saving.plan()
                reports.append(pickle.dumps(saving.written(pickle.loads(each))))
            if rank == 0:
                found["tensors of a rank"] = len(saving.planner.plan.items)
        found["sent to the first rank"] = sum(map(len, plans + reports)) / 1e6

        def finish() -> bytes:
            first.writer.finish(metadata, [pickle.loads(each) for each in reports])
            return pickle.dumps(metadata)

        returned = timed("coordinate", finish)
        timed("returned", lambda: pickle.loads(returned), 1e3)
    found |= steps_of(system, mesh)
    found["memory of the coordinator"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


OPTIONS = options.parser(__doc__, world_size=1024, rounds=2)
OPTIONS.add_argument("--blocks", type=int, help="of the model's 32, all by default")
OPTIONS.add_argument("--system", choices=(OURS, FSDP2), help=argparse.SUPPRESS)


def main() -> None:
    args = OPTIONS.parse_args()
    if args.system is not None:
        print(json.dumps(measure(args.system, args.world_size, args.blocks)))
        return
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in QUANTITIES}
    for _ in range(args.rounds):
        for system in (OURS, FSDP2):
            command = [sys.executable, *sys.argv, "--system", system]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                samples[name].setdefault(system, []).append(value)
    results = Results(MODEL)
    for name, unit in QUANTITIES.items():
        target = COORDINATE_TARGET if name == "coordinate" else None
        results.add(name, unit, samples[name], (OURS, FSDP2, target))
    runner.publish(args, results)


if __name__ == "__main__":
    main()
