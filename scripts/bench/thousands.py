"""What a job of thousands of ranks costs one rank's host, and the first rank, ours against FSDP2's.

Llama-3 8B on the meta device, a block a unit, on a fake process group of `--world-size` ranks; each
system in a process of its own, because groups and caches stay. Of one rank:

- *shard*: `fully_shard()` of all blocks and of the root;
- *state dict*: `model.state_dict()`;
- *plan*: what a rank plans to save, by `torch.distributed.checkpoint`'s planner, and how many
  tensors it writes.

Of the first rank, which puts all ranks' plans together before anything is saved:

- *plans together*: the size of all plans, pickled as they are sent to it;
- *coordinate*: the time to put them together, and the memory of a process that does. Plans of other
  ranks are made in the same process, one after the other, outside of that time.

A sample is one run of a process.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_overlap
from harness import output
from harness.measurement import Measurement, Ratio
from harness.real_models import units_of

OURS, FSDP2 = "ours", "FSDP2"
QUANTITIES = {
    "shard": "s",
    "state dict": "ms",
    "plan": "ms",
    "tensors of a rank": "",
    "plans together": "MB",
    "coordinate": "s",
    "memory of the coordinator": "GB",
}
COORDINATE_TARGET = 0.1
MODEL = "Llama-3 8B"


class Unit(nn.Module):
    """Parameters of these shapes; nobody computes here."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.empty(shape)))

    def forward(self) -> None:
        raise NotImplementedError


def build(blocks: int | None) -> nn.Module:
    *inner, root = units_of(MODEL)
    with torch.device("meta"):
        model = Unit([spec.shape for spec in root])
        shapes = [[spec.shape for spec in block] for block in inner[:blocks]]
        model.blocks = nn.ModuleList(map(Unit, shapes))
    return model


def sharded(system: str, model: Any, mesh: DeviceMesh) -> None:
    ctx = fsdp_overlap.FsdpContext(mesh)
    shard: Callable[[nn.Module], object] = (
        partial(fsdp_overlap.fully_shard, ctx=ctx)
        if system == OURS
        else partial(fsdp2.fully_shard, mesh=mesh)
    )
    for block in model.blocks:
        shard(block)
    shard(model)


def plan_of(state: dict[str, Any], mesh: DeviceMesh, rank: int) -> SavePlan:
    """What ``rank`` plans to save, reckoned on this one."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=rank == 0)
    with (
        patch.object(mesh, "_coordinate_on_dim", (rank,)),
        patch.object(DeviceMesh, "get_local_rank", lambda *_: rank),
        patch.object(dist, "get_rank", lambda *_: rank),
    ):
        return planner.create_local_plan()


def measure(system: str, world_size: int, blocks: int | None) -> dict[str, float]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    model = build(blocks)
    mesh = init_device_mesh("cpu", (world_size,))
    found: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any], scale: float = 1.0) -> Any:
        gc.collect()
        start = time.perf_counter()
        result = run()
        found[name] = (time.perf_counter() - start) * scale
        return result

    timed("shard", lambda: sharded(system, model, mesh))
    state = timed("state dict", model.state_dict, 1e3)
    plan = timed("plan", lambda: plan_of(state, mesh, 0), 1e3)
    found["tensors of a rank"] = len(plan.items)
    plans = [plan_of(state, mesh, rank) for rank in range(world_size)]
    found["plans together"] = sum(len(pickle.dumps(each)) for each in plans) / 1e6
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    timed("coordinate", lambda: planner.create_global_plan(plans))
    found["memory of the coordinator"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=1024, help="of the fake process group")
    parser.add_argument("--blocks", type=int, help="of the model's 32, all by default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--system", choices=(OURS, FSDP2), help=argparse.SUPPRESS)
    output.add_outputs(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
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
    about = (
        f"torch {torch.__version__}, {MODEL} on a fake group of {args.world_size} ranks; "
        f"{args.rounds} rounds"
    )
    settings = {
        "torch": torch.__version__,
        "world_size": args.world_size,
        "blocks": args.blocks,
        "rounds": args.rounds,
    }
    figures = [
        figure
        for name, unit in QUANTITIES.items()
        for figure in output.figures_of(name, unit, samples[name])
    ]
    ratios = [
        Ratio.between(
            name,
            OURS,
            FSDP2,
            samples[name],
            at_most=COORDINATE_TARGET if name == "coordinate" else None,
        )
        for name in QUANTITIES
    ]
    argv = output.repeated_argv()
    output.publish(Measurement(about, settings, argv, figures, ratios), args.json, args.plot)


if __name__ == "__main__":
    main()
