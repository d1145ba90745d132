"""The memory of a step: ours against FSDP2's.

A sample is how far the resident memory of a rank peaks in forward and backward above what rested
before, less the gradient shards that stay, in units of one block's parameters: of the full
buffers, reduce inputs and copies that exist at once. Batches are tiny, so that activations do not
count. Freed blocks go back to the system at once. A sample is that of the rank with the most.
FSDP2 on a CPU gathers nothing ahead in forward unless told to, and waits for each reduction.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness import options, peaks, processes, runner, sharding, turns
from harness.runner import Results
from host_overhead import build, make_batch, shard_ours

PEAK, FSDP2, FSDP2_AHEAD = "peak", "FSDP2", "FSDP2, prefetch 1"
OURS = {
    "ours, prefetch 0": 0,
    "ours, prefetch 1": 1,
    "ours in rows, prefetch 0": 0,
    "ours in rows, prefetch 1": 1,
}
AT_MOST = {"ours in rows, prefetch 0": 1.0}  # of FSDP2's, which gathers nothing ahead on a CPU
TARGETS = {"ours, prefetch 0": 3.1, "ours, prefetch 1": 4.0}  # blocks


def gather_ahead(model: nn.Sequential) -> None:
    """Has FSDP2 gather each block under the one before it, in forward too and on a CPU too."""
    for block, following in pairwise(model):
        block.set_modules_to_forward_prefetch([following])
    for block in model:
        block._set_unshard_async_op(True)  # else a CPU waits for each gather at once


def weighed(model: nn.Module, device: str, width: int, unit: int) -> Callable[[], float]:
    """A sample: units above rest and gradient shards."""
    batch = make_batch(width).to(device)

    def sample() -> float:
        gc.collect()
        dist.barrier()
        with peaks.PeakMemory() if device == "cpu" else peaks.AllocatorPeak(device) as peak:
            model(batch).square().mean().backward()
        shards = sum(p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None)
        model.zero_grad(set_to_none=True)
        return (peak.nbytes - shards) / unit

    return sample


def samplers(mesh: DeviceMesh, blocks: int, width: int) -> dict[str, Callable[[], float]]:
    """Those of each system, with a model of its own on the mesh's device."""
    found = {}
    for name in (*OURS, FSDP2, FSDP2_AHEAD):
        model = build(blocks, width).to(mesh.device_type)
        unit = sum(parameter.nbytes for parameter in model[0].parameters())
        if name in OURS:
            shard_ours(model, mesh, OURS[name], in_rows="rows" in name)
        else:
            sharding.shard_fsdp2(model, mesh)
        if name == FSDP2_AHEAD:
            gather_ahead(model)
        found[name] = weighed(model, mesh.device_type, width, unit)
    return found


OPTIONS = options.parser(__doc__, rate="2gbit", ranks=2, blocks=6, width=1024, rounds=9)


def sample(args: argparse.Namespace) -> dict[str, list[float]]:
    systems = samplers(sharding.cpu_mesh(), args.blocks, args.width)
    return processes.of_slowest_rank(turns.alternate(systems, args.rounds, warmup=2))


def report(args: argparse.Namespace, samples: dict[str, list[float]]) -> Results:
    compared = [
        (name, to, AT_MOST.get(name))
        for name, ahead in OURS.items()
        for to in ([FSDP2, FSDP2_AHEAD] if ahead else [FSDP2])
    ]
    results = Results("peak above rest and gradient shards")
    results.add(PEAK, "blocks", samples, *compared, at_most=TARGETS)
    return results


if __name__ == "__main__":
    launch = partial(runner.launch_ranks, env=peaks.RETURNED)
    runner.main(OPTIONS, sample, report, launch)
