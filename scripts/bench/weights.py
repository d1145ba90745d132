"""Weights out of a sharded model, over a slow link: ours against FSDP2 and the link alone.

*export*, on two ranks: all ranks get all weights, one after the other. Ours is `export_weights()`;
FSDP2's are `full_tensor()` of each parameter, and torch's full state dict. The link alone is
reckoned: the bytes that must travel, at its rate. Memory is the peak of a rank's resident memory
above what rested before, in ranks of its own, where freed blocks go back to the system at once.

*reshard*, on four: two ranks train, and each of the other two wants half of every matrix, by rows
or columns, as tensor parallelism does. Ours is `WeightResharder`. What it is compared with puts
weights of FSDP2 together on the ranks that train, and sends them whole to the others, each of
which takes its part. The bytes that must move are those of the whole model.

*--files*, on four: weights are written into a folder as safetensors, until they are on the disk.
Ours is `save_weights()`, of which each rank writes a part. In the two others the first rank writes
what it has gathered, from `export_weights()` or from FSDP2's full state dict.

*--plan*, on one rank of a fake process group: what the first export of Llama-3 8B, with a block a
unit, takes a rank's host beside collectives and copies. All systems must give the same weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fsdp_overlap
from fsdp_overlap.weights import WeightResharder, exchange, export, export_weights, save_weights
from fsdp_overlap.weights.plan_cache import plan_cache_of
from harness import options, peaks, processes, runner, sharding, slow_link, turns
from harness.real_models import on_meta
from harness.runner import Results

OURS, EACH, STATE, LINK = "ours", "FSDP2, full_tensor()", "FSDP2, state dict", "the link alone"
ALONE = "written by one rank"
GATHERED = "FSDP2, gathered and sent whole"
MODEL = "Llama-3 8B"
TIME, EXTRA, MOVED = "time", "extra memory a rank", "bytes moved"
TIME_TARGET, BYTES_TARGET = 1.15, 1.25


def sharded(args: argparse.Namespace, mesh: DeviceMesh, ours: bool) -> nn.Sequential:
    model = sharding.matrices(args.width, args.blocks)
    if ours:
        return sharding.shard_ours(model, fsdp_overlap.FsdpContext(mesh))
    return sharding.shard_fsdp2(model, mesh)


# Weights on all ranks


def exporters(args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Each gives all weights and returns the sum of their first elements."""
    mesh = DeviceMesh("cpu", [0, 1])
    mine, others = sharded(args, mesh, True), sharded(args, mesh, False)

    def ours() -> float:
        return sum(float(weight.view(-1)[0]) for _, weight in export_weights(mine))

    def each() -> float:
        return sum(float(p.detach().full_tensor().view(-1)[0]) for p in others.parameters())

    def state() -> float:
        whole = get_model_state_dict(others, options=StateDictOptions(full_state_dict=True))
        return sum(float(weight.view(-1)[0]) for weight in whole.values())

    sums = {ours(), each(), state()}
    assert len(sums) == 1, sums
    return {OURS: ours, EACH: each, STATE: state}


# Weights on other ranks


def movers(args: argparse.Namespace) -> tuple[dict[str, Callable[[], object]], WeightResharder]:
    training, inference = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    trains = dist.get_rank() < 2
    shapes = {
        name: weight.shape
        for name, weight in sharding.matrices(args.width, args.blocks).state_dict().items()
    }
    targets = [
        {
            name: torch.empty(shape).chunk(2, number % 2)[0].clone()
            for number, (name, shape) in enumerate(shapes.items())
        }
        for _ in range(2)
    ]
    placed = {
        name: DTensor.from_local(target, inference, [Shard(number % 2)], run_check=False)
        for number, (name, target) in enumerate(targets[0].items())
    }
    mine = sharded(args, training, True) if trains else None
    others = sharded(args, training, False) if trains else None
    resharding = WeightResharder(mine, None if trains else placed)
    parameters = {} if others is None else dict(others.named_parameters())

    def gathered() -> None:
        for number, (name, shape) in enumerate(shapes.items()):
            whole = parameters[name].full_tensor() if trains else torch.empty(shape)
            if dist.get_rank() == 0:
                for rank in (2, 3):
                    dist.send(whole, rank)
            elif not trains:
                dist.recv(whole, 0)
                held = whole.chunk(2, number % 2)[inference.get_local_rank()]
                targets[1][name].copy_(held)

    resharding.run()
    gathered()
    if not trains:
        assert all(torch.equal(targets[0][name], targets[1][name]) for name in shapes)
    return {OURS: resharding.run, GATHERED: gathered}, resharding


# Weights in files


def writers(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Each writes all weights, and removes the files."""
    mesh = sharding.cpu_mesh()
    mine, others = sharded(args, mesh, True), sharded(args, mesh, False)
    folder, is_first = Path(args.files) / "weights", dist.get_rank() == 0

    def ours() -> None:
        save_weights(mine, folder)

    def alone() -> None:
        write(dict(export_weights(mine, ranks=[0])))

    def state() -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        write(get_model_state_dict(others, options=options))

    def write(weights: dict[str, torch.Tensor]) -> None:
        if is_first:
            folder.mkdir()
            save_file(weights, folder / "model.safetensors")
            with (folder / "model.safetensors").open("rb") as file:
                os.fsync(file.fileno())

    def removed(run: Callable[[], None]) -> None:
        run()
        dist.barrier()
        if is_first:
            shutil.rmtree(folder)

    return {
        name: partial(removed, run)
        for name, run in {OURS: ours, ALONE: alone, STATE: state}.items()
    }


# Planning


def plan(args: argparse.Namespace) -> None:
    processes.join_fake_ranks(args.plan)
    ctx = fsdp_overlap.FsdpContext(sharding.cpu_mesh())
    model = on_meta(MODEL)
    for block in (*model.children(), model):
        fsdp_overlap.fully_shard(block, ctx)
    taken = []
    with (
        patch.object(exchange, "gather_objects", lambda mine, *_: [mine] * args.plan),
        patch.object(export, "renamed", lambda own, _: own),  # refuses weights on the meta device
        turns.quiet_gc(),
    ):
        export_weights(model)  # makes the group
        for _ in range(args.rounds):
            plan_cache_of(ctx).clear()
            start = time.perf_counter()
            export_weights(model)
            taken.append((time.perf_counter() - start) * 1e3)
    weights = len(list(model.parameters()))
    results = Results(f"the first export of {weights} weights of {MODEL} on {args.plan} fake ranks")
    results.add(TIME, "ms", {OURS: taken})
    of_plan = {name: vars(args)[name] for name in ("plan", "rounds", "json")}
    runner.publish(argparse.Namespace(**of_plan), results)


OPTIONS = options.parser(__doc__, rate="2gbit", blocks=8, width=1024, rounds=7)
OPTIONS.add_argument("--reshard", action="store_true", help="to other ranks, instead of to all")
OPTIONS.add_argument("--files", help="into files in this folder, instead of to all")
OPTIONS.add_argument("--plan", type=int, help="only plan, on a fake group of so many ranks")
OPTIONS.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, or the highest peaks in MB."""
    moved = [0]
    if args.reshard:
        systems, resharding = movers(args)
        total = torch.tensor([resharding.received_bytes])
        dist.all_reduce(total)
        moved = total.tolist()
    else:
        systems = writers(args) if args.files else dict(exporters(args))
    sampler = partial(turns.weighed, unit=1e6) if args.memory else turns.timed
    samplers = {name: sampler(run) for name, run in systems.items()}
    return {"samples": turns.slowest(samplers, args.rounds), "moved": moved[0]}


def launch(args: argparse.Namespace) -> dict[str, Any]:
    args.ranks = 4 if args.reshard or args.files else 2
    args.no_limit |= args.files is not None
    found = runner.launch_ranks(args)
    if not (args.reshard or args.files):
        few = ["--memory", f"--rounds={min(args.rounds, 3)}"]
        found[EXTRA] = runner.launch_ranks(args, few, peaks.RETURNED)["samples"]
    return found


def report(args: argparse.Namespace, found: dict[str, Any]) -> Results:
    samples, size = found["samples"], 12 * args.width**2 * 4 * args.blocks / 1e6
    if not args.no_limit:
        samples[LINK] = [size * 8 / slow_link.gbit(args.rate)] * args.rounds
    results = Results(f"float32 ({size:.0f} MB)")
    others = [(OURS, other) for other in (EACH, STATE, GATHERED, ALONE)]
    if args.files:
        others.reverse()
    results.add(TIME, "ms", samples, (OURS, LINK, TIME_TARGET), *others)
    if args.reshard:
        moved = {OURS: [found["moved"] / 1e6], GATHERED: [3 * size], "must": [size]}
        results.add(MOVED, "MB", moved, (OURS, "must", BYTES_TARGET))
    elif not args.files:
        peak = found[EXTRA]
        peak["a unit"] = [size / args.blocks] * len(peak[OURS])
        results.add(EXTRA, "MB", peak, (OURS, "a unit", 1.0), (OURS, STATE))
    return results


if __name__ == "__main__":
    if (args := OPTIONS.parse_args()).plan:
        plan(args)
    else:
        runner.main(OPTIONS, sample, report, launch)
