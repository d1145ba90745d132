"""The memory of a step: ours against FSDP2's.

Gloo ranks train one model of equal blocks, sharded by each system in turn in the same processes.
A sample is how far the resident memory of a rank peaks in forward and backward above what rested
before, less the gradient shards that stay, in units of one block's parameters: of the full
buffers, reduce inputs and copies that exist at once. Batches are tiny, so that activations do not
count. Freed blocks go back to the system at once. A sample is that of the rank with the most.
FSDP2 on a CPU gathers nothing ahead in forward unless told to, and waits for each reduction.

With `--steps`, a sample is the peak of a whole step with plain SGD, gradient shards included: of
parameters that are all stepped after backward, and of parameters that are stepped in it, each as
soon as its gradient is there, by hooks that drop the gradient.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness import options, output, peaks, processes, slow_link, turns
from harness.measurement import Measurement, Ratio
from host_overhead import build, shard_fsdp2, shard_ours

ROWS = 4
PEAK, FSDP2, FSDP2_AHEAD = "peak", "FSDP2", "FSDP2, prefetch 1"
OURS = {
    "ours, prefetch 0": 0,
    "ours, prefetch 1": 1,
    "ours in rows, prefetch 0": 0,
    "ours in rows, prefetch 1": 1,
}
STEPS = {
    f"{system}, stepped {when}": (system, when)
    for system in (*OURS, FSDP2)
    for when in ("after backward", "in backward")
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
    batch = torch.linspace(-1.0, 1.0, ROWS * width, device=device).view(ROWS, width)

    def sample() -> float:
        gc.collect()
        dist.barrier()
        with peaks.PeakMemory() if device == "cpu" else peaks.AllocatorPeak(device) as peak:
            model(batch).square().mean().backward()
        shards = sum(p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None)
        model.zero_grad(set_to_none=True)
        return (peak.nbytes - shards) / unit

    return sample


def stepped(model: nn.Module, when: str, width: int, unit: int) -> Callable[[], float]:
    """A sample: units above rest, in a whole step."""
    batch = torch.linspace(-1.0, 1.0, ROWS * width).view(ROWS, width)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD([parameter], lr=1e-9) for parameter in parameters]
    of = dict(zip(parameters, optimizers, strict=True))

    def step(parameter: torch.Tensor) -> None:
        of[parameter].step()
        of[parameter].zero_grad()

    if when == "in backward":
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(step)

    def sample() -> float:
        gc.collect()
        dist.barrier()
        with peaks.PeakMemory() as peak:
            model(batch).square().mean().backward()
            for parameter in parameters:
                if parameter.grad is not None:
                    step(parameter)
        return peak.nbytes / unit

    return sample


def step_samplers(mesh: DeviceMesh, blocks: int, width: int) -> dict[str, Callable[[], float]]:
    """Those of each way to step."""
    found = {}
    for name, (system, when) in STEPS.items():
        model = build(blocks, width)
        unit = sum(parameter.nbytes for parameter in model[0].parameters())
        if system == FSDP2:
            shard_fsdp2(model, mesh)
        else:
            shard_ours(model, mesh, OURS[system], in_rows="rows" in system)
        found[name] = stepped(model, when, width, unit)
    return found


def samplers(mesh: DeviceMesh, blocks: int, width: int) -> dict[str, Callable[[], float]]:
    """Those of each system, with a model of its own on the mesh's device."""
    found = {}
    for name in (*OURS, FSDP2, FSDP2_AHEAD):
        model = build(blocks, width).to(mesh.device_type)
        unit = sum(parameter.nbytes for parameter in model[0].parameters())
        if name in OURS:
            shard_ours(model, mesh, OURS[name], in_rows="rows" in name)
        else:
            shard_fsdp2(model, mesh)
        if name == FSDP2_AHEAD:
            gather_ahead(model)
        found[name] = weighed(model, mesh.device_type, width, unit)
    return found


def run_rank(args: argparse.Namespace) -> None:
    _, world_size = processes.join_ranks(timeout_s=args.timeout)
    mesh = init_device_mesh("cpu", (world_size,))
    make = step_samplers if args.steps else samplers
    mine = turns.alternate(make(mesh, args.blocks, args.width), args.rounds, warmup=2)
    processes.finish(processes.of_slowest_rank(mine))


def parse() -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        rate="2gbit",
        no_limit=False,
        ranks=2,
        blocks=6,
        width=1024,
        rounds=9,
        timeout=600.0,
    )
    parser.add_argument("--steps", action="store_true", help="of whole steps, see above")
    return parser.parse_args()


def measurement_of(args: argparse.Namespace, samples: dict[str, list[float]]) -> Measurement:
    about = (
        f"{args.ranks} ranks, {slow_link.in_words(args)}, {args.blocks} blocks of width "
        f"{args.width}; peak above rest{'' if args.steps else ' and gradient shards'}, "
        f"{args.rounds} rounds"
    )
    if args.steps:
        ratios = [
            Ratio.between(PEAK, f"{system}, stepped in backward", to, samples)
            for system in OURS
            for to in (f"{system}, stepped after backward", f"{FSDP2}, stepped in backward")
        ]
    else:
        ratios = [
            Ratio.between(PEAK, name, to, samples, at_most=AT_MOST.get(name))
            for name, ahead in OURS.items()
            for to in ([FSDP2, FSDP2_AHEAD] if ahead else [FSDP2])
        ]
    figures = output.figures_of(PEAK, "blocks", samples, at_most={} if args.steps else TARGETS)
    return options.measurement(args, about, figures, ratios)


def main() -> None:
    args = parse()
    if processes.is_rank():
        return run_rank(args)
    samples = slow_link.launch_on_link(args, sys.argv[1:], peaks.RETURNED)
    output.publish(measurement_of(args, samples), args.json, args.plot)


if __name__ == "__main__":
    main()
