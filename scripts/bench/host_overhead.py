"""What sharding costs the host: the time it adds to an unsharded step, ours against FSDP2's.

Copies of one model of many tiny blocks (14 parameters of width 32 each, so that next to nothing but
the host's work is left) take steps in turn in one process: unsharded, sharded by FSDP2, sharded by
ours, also in rows as FSDP2 shards. A fake process group of 8 ranks stands for the network: its
collectives return at once.

Times are of the processor, which in one thread that never waits is the host's work, whatever else
the machine runs. Overhead per unit = (sharded step - unsharded step of that round) / blocks, in
microseconds. With several numbers of `--blocks`, one after the other, it shows whether a unit costs
the same in a deep model.

`--copies 2` shards over a mesh of two dimensions, with copies along the first. `--mixed` computes
in bfloat16, the unsharded step too, and reduces in float32. Neither has a target.

`--calls` counts instead how many Python functions of ours and of `torch.distributed` a step calls
for a unit. That has no noise, and can be said of lanes that are streams too: there on an emulated
device, whose own functions do not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import cache
from types import FrameType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_overlap
from fsdp_overlap.tools.emulator import EmulatedDevice, fake_ranks, running
from fsdp_overlap.tools.emulator.threads import DeviceThread
from harness import options, processes, runner, sharding, turns
from harness.measurement import Sweep
from harness.runner import Results

ROWS = 4
TARGETS = {"ours": 0.12, "ours, in rows": 0.35}  # of FSDP2's overhead
OVERHEAD = "overhead a unit"
CALLS = "calls of Python functions a unit"
# torch's own policy: both systems take it.
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = fsdp2.MixedPrecisionPolicy()


class Block(nn.Module):
    """14 parameters: two norms and four projections with bias, two MLP matrices without."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.o(self.q(h) * self.k(h) + self.v(h))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def build(blocks: int, width: int) -> nn.Sequential:
    """The same model every time, all weights equal.

    A fake all-gather fills every rank's slice with the caller's own. With equal weights that gives
    the true model whatever the layout, so that all systems compute on the same numbers.
    """
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.02)
    return model


def shard_ours(
    model: nn.Sequential,
    mesh: DeviceMesh,
    prefetch: int,
    *,
    in_rows: bool = False,
    policy: fsdp2.MixedPrecisionPolicy = FULL,
) -> None:
    layout = fsdp_overlap.PerTensor() if in_rows else fsdp_overlap.Flat()
    ctx = fsdp_overlap.FsdpContext(mesh, prefetch=prefetch, layout=layout)
    sharding.shard_ours(model, ctx, mp_policy=policy)


def make_batch(width: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, ROWS * width).view(ROWS, width)


def make_step(
    model: nn.Module, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Callable[[], torch.Tensor]:
    """A training step without optimizer; returns the loss."""
    batch = make_batch(width).to(device, dtype)

    def step() -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss

    return step


def timed(step: Callable[[], object]) -> Callable[[], float]:
    """A sample: microseconds of the processor."""

    def sample() -> float:
        start = time.process_time()
        step()
        return (time.process_time() - start) * 1e6

    return sample


OPTIONS = options.parser(__doc__, world_size=8, width=32, prefetch=1, rounds=100, warmup=10)
OPTIONS.add_argument("--blocks", type=int, nargs="+", default=[32], help="one model for each")
OPTIONS.add_argument("--copies", type=int, default=1, help="ranks that hold each shard")
OPTIONS.add_argument("--mixed", action="store_true", help="compute in bfloat16")
OPTIONS.add_argument("--calls", action="store_true", help="count calls of functions instead")


def make_steps(args: argparse.Namespace, blocks: int) -> dict[str, Callable[[], torch.Tensor]]:
    """A training step of each system."""
    mesh, policy = make_mesh(args, "cpu"), MIXED if args.mixed else FULL
    models = {name: build(blocks, args.width) for name in ("unsharded", "FSDP2", *TARGETS)}
    sharding.shard_fsdp2(models["FSDP2"], mesh, mp_policy=policy)
    for name in TARGETS:
        shard_ours(models[name], mesh, args.prefetch, in_rows=name != "ours", policy=policy)
    models["unsharded"].to(policy.param_dtype)
    steps = {name: make_step(model, args.width) for name, model in models.items()}
    if args.mixed:  # the others cast what they are given
        steps["unsharded"] = make_step(models["unsharded"], args.width, torch.bfloat16)
    return steps


def make_mesh(args: argparse.Namespace, device: str) -> DeviceMesh:
    """One dimension, or two if there are copies."""
    if args.copies == 1:
        return init_device_mesh(device, (args.world_size,))
    dims = args.copies, args.world_size // args.copies
    return init_device_mesh(device, dims, mesh_dim_names=("replicate", "shard"))


def measure(args: argparse.Namespace, blocks: int) -> dict[str, list[float]]:
    """Microseconds per step of each system, by round."""
    steps = make_steps(args, blocks)
    losses = {name: step().item() for name, step in steps.items()}
    turns.same_losses(losses, tolerance=1e-2 if args.mixed else 1e-5)
    with turns.quiet_gc():
        samplers = {name: timed(step) for name, step in steps.items()}
        return turns.alternate(samplers, args.rounds, args.warmup)


def overheads(args: argparse.Namespace, blocks: int, at: int | None, results: Results) -> None:
    """Add those of one number of blocks."""
    samples = measure(args, blocks)
    overhead = {
        name: [
            (sharded - plain) / blocks
            for sharded, plain in zip(values, samples["unsharded"], strict=True)
        ]
        for name, values in samples.items()
        if name != "unsharded"
    }
    has_targets = args.copies == 1 and not args.mixed
    steps = {name: [us / 1e3 for us in values] for name, values in samples.items()}
    results.add("step", "ms", steps, at=at)
    targets = [(name, "FSDP2", most if has_targets else None) for name, most in TARGETS.items()]
    results.add(OVERHEAD, "us", overhead, *targets, at=at)


def calls(args: argparse.Namespace, blocks: int, at: int | None, results: Results) -> None:
    """Add calls of Python functions in a step, on host lanes and on lanes that are streams."""
    found = {
        f"{name}, host lanes": counted(step, args.warmup, blocks)
        for name, step in make_steps(args, blocks).items()
        if name in ("FSDP2", "ours")
    }
    policy = MIXED if args.mixed else FULL
    # Backward too, because calls of this thread alone are counted.
    on_this_thread = patch.object(DeviceThread, "run", lambda _, call: call())
    with fake_ranks(args.world_size), running(EmulatedDevice()), on_this_thread:
        for name in ("FSDP2", "ours"):
            model, mesh = build(blocks, args.width).to("emulated"), make_mesh(args, "emulated")
            if name == "ours":
                shard_ours(model, mesh, args.prefetch, policy=policy)
            else:
                sharding.shard_fsdp2(model, mesh, mp_policy=policy)
            step = make_step(model, args.width, device="emulated")
            found[f"{name}, stream lanes"] = counted(step, args.warmup, blocks)
    processes.join_fake_ranks(args.world_size)  # again, in place of those of the model
    samples = {name: [value] for name, value in found.items()}
    compared = [(f"ours, {on}", f"FSDP2, {on}") for on in ("host lanes", "stream lanes")]
    results.add(CALLS, "", samples, *compared, at=at)


def counted(step: Callable[[], object], warmup: int, blocks: int) -> float:
    """The calls of a steady step for each unit."""
    for _ in range(warmup):
        step()
    found = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and is_systems(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found / blocks


@cache
def is_systems(file: str) -> bool:
    """Whether a file is of a system that shards, and not of the device that it runs on."""
    is_ours = "/fsdp_overlap/" in file and "/fsdp_overlap/tools/emulator/" not in file
    return is_ours or "/torch/distributed/" in file


def main() -> None:
    args = OPTIONS.parse_args()
    processes.join_fake_ranks(args.world_size)
    is_swept = len(args.blocks) > 1
    results = Results(
        f"14 parameters a block, {args.copies} copies{', bfloat16' if args.mixed else ''}",
        Sweep("blocks") if is_swept else None,
    )
    for blocks in args.blocks:
        add = calls if args.calls else overheads
        add(args, blocks, blocks if is_swept else None, results)
    runner.publish(args, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
