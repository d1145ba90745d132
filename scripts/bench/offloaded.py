"""A training step whose parameters rest on the host: stepped by a thread meanwhile, and after
backward, as FSDP2 does.

The device is a clock: compute and copies of gradients to the host end later, each in the order in
which they were enqueued, and use no core. The host runs ahead, as beside a GPU, and waits where it
needs what the device has made. Blocks have one parameter each, and their gradients are given, so
the host does what it does beside a device: gather, reduce and step.
AdamW and these copies both wait for memory, which a device's copies do less; Muon, of matrices,
does not, nor does torch's Muon under LayerWise, and FSDP2 has none. A sample is of several steps,
which begin and end with a thread at work.

With `--param-dtype bfloat16` shards travel to the device, too, at the same rate in the other
direction: from their copies in bfloat16, or in float32, to be cast there.

`bound` is the larger of two: a step without an optimizer (compute and transfers), and the
optimizer's step alone. Overlapped, a step should take at most 1.05 times that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import isqrt
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed import fsdp as fsdp2

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, TensorAtomic, _fully_shard
from fsdp_overlap.comm.collectives import LocalCollectives
from fsdp_overlap.comm.comm_streams import PendingCollective
from fsdp_overlap.comm.host_copies import D2HCopy
from fsdp_overlap.features.offload import HostStorage
from fsdp_overlap.optim import AdamW, LayerWise, Muon, OverlapPolicy, clip_grad_norm_
from fsdp_overlap.optim.overlapped_steps import GradientBuffers
from fsdp_overlap.tensor.pending_steps import finish_pending_steps
from harness import options, runner, sharding, turns
from harness.runner import Results

OVERLAPPED, CLIPPED = "ours, overlapped", "ours, overlapped, clipped"
OVERLAPPED_CAST, AFTER_CAST = (
    f"{OVERLAPPED}, cast on the device",
    "ours, in step(), cast on the device",
)
AFTER, AFTER_CLIPPED = "ours, in step()", "ours, in step(), clipped"
FSDP2, FSDP2_CLIPPED = "FSDP2", "FSDP2, clipped"
COMPUTE, OPTIMIZER, BOUND = "without an optimizer", "the optimizer alone", "bound"
MAX_NORM = 1e-3


class Event:
    """The end of a copy to the host."""

    def __init__(self, end: float) -> None:
        self.end = end

    def query(self) -> bool:
        return time.monotonic() >= self.end

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.end - time.monotonic()))


class Device:
    """Three streams: of compute, of copies to the host and of copies to the device."""

    def __init__(self) -> None:
        self._computed = self._copied = self._fetched = 0.0
        self._fetches: dict[int, float] = {}
        """When what was gathered into memory of an address is there."""
        self.bytes_per_second = 0.0

    def compute(self, seconds: float, weight: torch.Tensor) -> None:
        there = self._fetches.get(weight.untyped_storage().data_ptr(), 0.0)
        self._computed = max(self._computed, time.monotonic(), there) + seconds

    def fetch(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy ``shard`` to where ``full`` is."""
        self._fetched = max(self._fetched, time.monotonic()) + shard.nbytes / self.bytes_per_second
        self._fetches[full.untyped_storage().data_ptr()] = self._fetched

    def copy(self, nbytes: int) -> Event:
        """Copy what was computed last."""
        ready = max(self._copied, self._computed, time.monotonic())
        self._copied = ready + nbytes / self.bytes_per_second
        return Event(self._copied)


DEVICE = Device()
_copy_at_once = GradientBuffers.copy


def _copy(buffers: GradientBuffers, param_group: Any, mean: torch.Tensor) -> Any:
    copy, give_back = _copy_at_once(buffers, param_group, mean)
    return D2HCopy(copy.host, DEVICE.copy(mean.nbytes)), give_back  # type: ignore[arg-type]


GradientBuffers.copy = _copy  # type: ignore[method-assign]


def _fetch(
    collectives: LocalCollectives, full: torch.Tensor, shard: torch.Tensor, group: object
) -> PendingCollective:
    DEVICE.fetch(full, shard)
    return PendingCollective((), lambda: full)


def _cast_on_device(storage: HostStorage, param_group: Any) -> None:
    return None


class Sleep(torch.autograd.Function):
    """Takes the device ``seconds`` in forward and twice as long in backward. The gradient of
    ``weight`` is ``given``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, given: Any, seconds: Any) -> torch.Tensor:
        ctx.given, ctx.seconds, ctx.weight = given, seconds, weight
        DEVICE.compute(seconds, weight)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        DEVICE.compute(2 * ctx.seconds, ctx.weight)
        return gradient, ctx.given, None, None


class Block(nn.Module):
    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(given.shape))
        self.given = given
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.given, self.seconds)


def build(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(1)
    width = isqrt(args.elements)
    shape = (args.elements,) if args.optimizer == "adamw" else (width, width)
    given = (torch.randn(shape) * 1e-3).to(getattr(torch, args.param_dtype))
    return nn.Sequential(*(Block(given) for _ in range(args.blocks)))


def ours(args: argparse.Namespace) -> nn.Sequential:
    ctx = FsdpContext(layout=TensorAtomic())
    if args.param_dtype == "float32":
        return sharding.shard_ours(build(args), ctx)
    storage, dtype = HostStorage(pin_memory=False), getattr(torch, args.param_dtype)
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    with patch.object(_fully_shard, "_storage_on", return_value=storage):
        return sharding.shard_ours(build(args), ctx, mp_policy=policy)


def theirs(args: argparse.Namespace) -> nn.Sequential:
    policy = fsdp2.CPUOffloadPolicy(pin_memory=False)
    return sharding.shard_fsdp2(build(args), offload_policy=policy)


def layer_wise(parameters: Any, lr: float, **options: Any) -> LayerWise:
    """torch's Muon under LayerWise."""
    return LayerWise(parameters, partial(torch.optim.Muon, lr=lr), **options)


class Training:
    """A model and its optimizer, and how it is clipped. Unless it ``runs_ahead``, the host waits
    at the end of backward until all gradients are there. ``casts_on_device``: whether shards travel
    in float32."""

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None,
        clip: Callable[..., Any] | None = None,
        runs_ahead: bool = False,
        casts_on_device: bool = False,
    ) -> None:
        self.casts_on_device = casts_on_device
        self.model, self.clip, self.runs_ahead = model, clip, runs_ahead
        self.optimizer = optimizer(model.parameters()) if optimizer is not None else None
        self.x = torch.ones(1)

    def step(self) -> None:
        self.model(self.x).sum().backward()
        if not self.runs_ahead:
            DEVICE.copy(4 * self.model[0].given.numel()).synchronize()
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
        with ExitStack() as stack:
            if self.casts_on_device:
                stack.enter_context(patch.object(HostStorage, "compute_copy", _cast_on_device))
            finish_pending_steps()
            self.step()
            milliseconds = turns.timed(self.step, steps)()
            finish_pending_steps()
        return milliseconds


OPTIONS = options.parser(__doc__, ranks=1, blocks=16, rounds=9, steps=4, timeout=1800.0)
OPTIONS.add_argument("--elements", type=int, default=2_000_000, help="parameters of a block")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": AdamW,
    "muon": Muon,
    "layer-wise": layer_wise,
}
OPTIONS.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
OPTIONS.add_argument(
    "--link",
    type=float,
    default=25.0,
    help="GB/s of copies in one direction; what PCIe 4.0 moves, if not given",
)
OPTIONS.add_argument("--param-dtype", choices=("float32", "bfloat16"), default="float32")
OPTIONS.add_argument(
    "--compute",
    type=float,
    nargs="+",
    default=[1.0, 4.0],
    help="the time of compute, as parts of the optimizer's",
)


def sample(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    plain = partial(OPTIMIZERS[args.optimizer], lr=1e-3)
    DEVICE.bytes_per_second = 1e9 * args.link
    is_cast = args.param_dtype != "float32"
    if is_cast:
        LocalCollectives.all_gather = _fetch  # type: ignore[assignment]
    clipping = OverlapPolicy(max_norm=MAX_NORM)
    trainings = {
        OVERLAPPED: Training(ours(args), partial(plain, overlap=OverlapPolicy()), runs_ahead=True),
        CLIPPED: Training(ours(args), partial(plain, overlap=clipping)),
        AFTER: Training(ours(args), plain),
        AFTER_CLIPPED: Training(ours(args), plain, clip_grad_norm_),
        COMPUTE: Training(ours(args), None),
    }
    if is_cast:
        overlapped = partial(plain, overlap=OverlapPolicy())
        trainings |= {
            OVERLAPPED_CAST: Training(ours(args), overlapped, None, True, casts_on_device=True),
            AFTER_CAST: Training(ours(args), plain, casts_on_device=True),
        }
    elif args.optimizer == "adamw":
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
    for part in args.compute:
        seconds = taken * part / 1e3 / (3 * args.blocks)
        systems = {
            name: partial(training.sample, seconds, args.steps)
            for name, training in trainings.items()
        }
        samples = turns.slowest({**systems, OPTIMIZER: optimize}, args.rounds)
        samples[BOUND] = list(map(max, samples[COMPUTE], samples[OPTIMIZER]))
        found[str(part)] = samples
    for one, other in (
        (OVERLAPPED, OVERLAPPED_CAST),
        (OVERLAPPED, AFTER),
        (CLIPPED, AFTER_CLIPPED),
        (OVERLAPPED, FSDP2),
    ):
        if other in trainings:
            compare(trainings[one].model, trainings[other].model)
    return found


def compare(one: nn.Sequential, other: nn.Sequential) -> None:
    """Raise AssertionError unless the models are the same."""
    for mine, its in zip(one, other, strict=True):
        parts = [block.weight.to_local().flatten() for block in (mine, its)]
        torch.testing.assert_close(*parts)


def report(args: argparse.Namespace, found: dict[str, dict[str, list[float]]]) -> Results:
    results = Results(f"{args.elements / 1e6:g}M float32 parameters each, {args.optimizer}")
    for part, samples in found.items():
        results.add(
            f"step, compute {part}",
            "ms",
            samples,
            (OVERLAPPED, BOUND, 1.05),
            (OVERLAPPED, AFTER),
            (OVERLAPPED, OVERLAPPED_CAST),
            (AFTER, AFTER_CAST),
            (OVERLAPPED, FSDP2),
            (CLIPPED, AFTER_CLIPPED),
            (CLIPPED, FSDP2_CLIPPED),
        )
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
