"""A training step whose parameters rest on the host: stepped by a thread meanwhile, and after
backward, as FSDP2 does.

The compute of a device is sleep, so it leaves the cores alone. Blocks have one parameter each, and
their gradients are given, so the host does what it does beside a device: gather, reduce and step.
AdamW and these copies both wait for memory, which a device's copies do less; Muon, of matrices,
does not, and FSDP2 has none. A sample is of several steps, which begin and end with a thread at
work.

`bound` is the larger of two: a step without an optimizer (compute and transfers), and the
optimizer's step alone. Overlapped, a step should take at most 1.05 times that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2

from fsdp_overlap import FsdpContext, TensorAtomic, fully_shard
from fsdp_overlap.optim import AdamW, Muon, OverlapPolicy, clip_grad_norm_
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from harness import options, output, processes, turns
from harness.measurement import Measurement, Ratio

OVERLAPPED, CLIPPED = "ours, overlapped", "ours, overlapped, clipped"
AFTER, AFTER_CLIPPED = "ours, in step()", "ours, in step(), clipped"
FSDP2, FSDP2_CLIPPED = "FSDP2", "FSDP2, clipped"
COMPUTE, OPTIMIZER, BOUND = "without an optimizer", "the optimizer alone", "bound"
MAX_NORM = 1e-3


class Sleep(torch.autograd.Function):
    """Takes ``seconds`` in forward and twice as long in backward. The gradient of ``weight`` is
    ``given``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, given: Any, seconds: Any) -> torch.Tensor:
        ctx.given, ctx.seconds = given, seconds
        time.sleep(seconds)
        return x * weight.view(-1)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, ctx.given, None, None


class Block(nn.Module):
    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones_like(given))
        self.given = given
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.given, self.seconds)


def build(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(1)
    width = isqrt(args.elements)
    shape = (width, width) if args.optimizer == "muon" else (args.elements,)
    given = torch.randn(shape) * 1e-3
    return nn.Sequential(*(Block(given) for _ in range(args.blocks)))


def ours(args: argparse.Namespace) -> nn.Sequential:
    model, ctx = build(args), FsdpContext(layout=TensorAtomic())
    for block in model:
        fully_shard(block, ctx)
    fully_shard(model, ctx)
    return model


def theirs(args: argparse.Namespace) -> nn.Sequential:
    model, policy = build(args), fsdp2.CPUOffloadPolicy(pin_memory=False)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh, offload_policy=policy)
    return model


class Training:
    """A model and its optimizer, and how it is clipped."""

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None,
        clip: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self.clip = model, clip
        self.optimizer = optimizer(model.parameters()) if optimizer is not None else None
        self.x = torch.ones(1)

    def step(self) -> None:
        self.model(self.x).sum().backward()
        if self.clip is not None:
            self.clip(self.model.parameters(), MAX_NORM)
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None

    def sample(self, seconds: float, steps: int) -> float:
        """Return the milliseconds of a step in which each block computes so long in forward."""
        for block in self.model:
            block.seconds = seconds
        finish_pending_steps()
        self.step()
        milliseconds = turns.timed(self.step, steps)()
        finish_pending_steps()
        return milliseconds


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    processes.join_ranks(timeout_s=args.timeout)
    plain = partial({"adamw": AdamW, "muon": Muon}[args.optimizer], lr=1e-3)
    clipping = OverlapPolicy(max_norm=MAX_NORM)
    trainings = {
        OVERLAPPED: Training(ours(args), partial(plain, overlap=OverlapPolicy())),
        CLIPPED: Training(ours(args), partial(plain, overlap=clipping)),
        AFTER: Training(ours(args), plain),
        AFTER_CLIPPED: Training(ours(args), plain, clip_grad_norm_),
        COMPUTE: Training(ours(args), None),
    }
    if args.optimizer == "adamw":
        torchs = partial(torch.optim.AdamW, lr=1e-3, fused=True)
        trainings[FSDP2] = Training(theirs(args), torchs)
        trainings[FSDP2_CLIPPED] = Training(theirs(args), torchs, nn.utils.clip_grad_norm_)
    alone = Training(ours(args), plain)
    alone.step()
    for block in alone.model:
        block.weight.grad = torch.zeros_like(block.weight)
    assert alone.optimizer is not None
    optimize = turns.timed(alone.optimizer.step, args.steps)
    taken = sorted(optimize() for _ in range(5))[2]
    found: dict[str, dict[str, list[float]]] = {}
    with turns.quiet_gc():
        for part in args.compute:
            seconds = taken * part / 1e3 / (3 * args.blocks)
            systems = {
                name: partial(training.sample, seconds, args.steps)
                for name, training in trainings.items()
            }
            mine = turns.alternate({**systems, OPTIMIZER: optimize}, args.rounds, 1)
            found[str(part)] = samples = processes.of_slowest_rank(mine)
            samples[BOUND] = list(map(max, samples[COMPUTE], samples[OPTIMIZER]))
    for one, other in ((OVERLAPPED, AFTER), (CLIPPED, AFTER_CLIPPED), (OVERLAPPED, FSDP2)):
        if other in trainings:
            compare(trainings[one].model, trainings[other].model)
    processes.finish(found)


def compare(one: nn.Sequential, other: nn.Sequential) -> None:
    """Raise AssertionError unless the models are the same."""
    for mine, its in zip(one, other, strict=True):
        parts = [block.weight.to_local().flatten() for block in (mine, its)]
        torch.testing.assert_close(*parts)


def measurement_of(args: argparse.Namespace, result: dict[str, Any]) -> Measurement:
    about = (
        f"{args.ranks} ranks, {args.blocks} blocks of {args.elements / 1e6:g}M float32 parameters, "
        f"{args.optimizer}; {args.rounds} rounds of {args.steps} steps"
    )
    figures, ratios = [], []
    for part, samples in result.items():
        step = f"step, compute {part}"
        figures += output.figures_of(step, "ms", samples)
        ratios += [
            Ratio.between(step, OVERLAPPED, BOUND, samples, at_most=1.05),
            *(
                Ratio.between(step, one, other, samples)
                for one in (OVERLAPPED, CLIPPED)
                for other in {OVERLAPPED: (AFTER, FSDP2), CLIPPED: (AFTER_CLIPPED, FSDP2_CLIPPED)}[
                    one
                ]
                if other in samples
            ),
        ]
    return options.measurement(args, about, figures, ratios)


def main() -> None:
    parser = options.parser(__doc__, ranks=1, blocks=16, rounds=9, steps=4, timeout=1800.0)
    parser.add_argument("--elements", type=int, default=2_000_000, help="parameters of a block")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument(
        "--compute",
        type=float,
        nargs="+",
        default=[1.0, 4.0],
        help="the time of compute, as parts of the optimizer's",
    )
    args = parser.parse_args()
    if processes.is_rank():
        return run_rank(args)
    result = processes.launch_ranks(args.ranks, sys.argv[1:], args.timeout)
    output.publish(measurement_of(args, result), args.json, args.plot)


if __name__ == "__main__":
    main()
