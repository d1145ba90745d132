"""Training with parameters and gradients sent in few bits, over a slow link.

Shards are in float32, and compute in bfloat16: ours with gathers in bfloat16, in 8 bits, and with
reductions in 8 bits too, and FSDP2 with gathers in bfloat16. Without 8 bits, gradients are reduced
in bfloat16. Quantizing takes the cores, where a GPU would do it in a few thousandths of that time.
So one system more sends the same bytes and leaves the quantizing out: it computes nothing of use,
and shows what fewer bytes alone gain.

Bytes are those that the kernel counts on the interface during the samples, of all ranks together:
what their collectives sent, and TCP's headers. The exit code is 1 unless they are what `ctx.stats`
counts of collectives, to within a hundredth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from fsdp_overlap import FsdpContext, MixedPrecisionPolicy, QuantizedCommPolicy
from fsdp_overlap.features.quantized import collectives as quantized
from fsdp_overlap.features.quantized.collectives import QuantizedFormat
from harness import link_training, options, output, runner, sharding, turns
from harness.runner import Results

FSDP2, BF16 = "FSDP2, bfloat16", "ours, bfloat16"
ONLY_BYTES = "ours, all in int8, quantizing left out"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POLICIES = {
    BF16: None,
    "ours, gathers in float8": QuantizedCommPolicy(E4M3),
    "ours, gathers in int8": QuantizedCommPolicy(torch.int8),
    "ours, all in float8": QuantizedCommPolicy(E4M3, E5M2),
    "ours, all in int8": QuantizedCommPolicy(torch.int8, torch.int8),
    ONLY_BYTES: QuantizedCommPolicy(torch.int8, torch.int8),
}
QUANTIZING = (
    (QuantizedFormat, "encode_run"),
    (QuantizedFormat, "add_up"),
    (quantized, "decode_into"),
    (quantized, "multiply"),
)
STEP, SENT, COUNTED = "step", "sent", "counted by the library"
STEP_TARGET, SENT_TARGET = 0.62, 0.51
PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
INTERFACE, SENT_BYTES = "lo", 8  # the column in the kernel's table


def shard(args: argparse.Namespace, name: str) -> tuple[torch.nn.Module, FsdpContext | None]:
    model = link_training.build(args.blocks, args.sleep)
    if name == FSDP2:
        return sharding.shard_fsdp2(model, mp_policy=PRECISION), None
    ctx = FsdpContext(sharding.cpu_mesh())
    policies = {"mp_policy": PRECISION, "comm_policy": POLICIES[name]}
    return sharding.shard_ours(model, ctx, **policies), ctx


def without_quantizing(step: Callable[[], float]) -> Callable[[], float]:
    """``step``, but what travels is neither written before nor read afterwards."""

    def run() -> float:
        with ExitStack() as replaced:
            for owner, name in QUANTIZING:
                replaced.enter_context(mock.patch.object(owner, name))
            return step()

    return run


def bytes_sent() -> int:
    """What has left this network namespace, also by other processes."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == INTERFACE:
            return int(columns.split()[SENT_BYTES])
    raise RuntimeError(f"no interface {INTERFACE}")


def bytes_counted(ctx: FsdpContext | None) -> int:
    """What collectives have sent so far, of all ranks together. FSDP2 counts nothing."""
    if ctx is None:
        return 0
    to = dist.get_world_size() - 1  # each range goes to, or comes from, all other ranks
    return to * (ctx.stats.all_gather_bytes + ctx.stats.reduce_scatter_bytes)


def timed(run: Callable[[], float], steps: int, sent: list[float]) -> Callable[[], float]:
    """A sample: milliseconds per step on this rank. Adds the megabytes of a step to ``sent``."""

    def sample() -> float:
        dist.barrier()
        before, start = bytes_sent(), time.perf_counter()
        for _ in range(steps):
            run()
        elapsed = time.perf_counter() - start
        dist.barrier()
        sent.append((bytes_sent() - before) / steps / 1e6)
        return elapsed / steps * 1e3

    return sample


OPTIONS = options.parser(
    __doc__, rate="2gbit", ranks=2, blocks=8, rows=4, sleep=12.0, rounds=5, steps=2
)


def sample(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    sent: dict[str, list[float]] = {name: [] for name in (FSDP2, *POLICIES)}
    samplers = {}
    losses, counted = {}, {}
    for name, megabytes in sent.items():
        model, ctx = shard(args, name)
        step = link_training.make_step(model, link_training.make_batch(args.rows))
        losses[name] = step()
        if name == ONLY_BYTES:
            step = without_quantizing(step)
        step()  # the first one gathers more, for want of an order
        before = bytes_counted(ctx)
        step()
        counted[name] = [(bytes_counted(ctx) - before) / 1e6]
        samplers[name] = timed(step, args.steps, megabytes)
    turns.same_losses(losses, tolerance=0.05)
    slowest = turns.slowest(samplers, args.rounds)
    warm = {name: values[-args.rounds :] for name, values in sent.items()}
    del counted[FSDP2]
    return {STEP: slowest, SENT: warm, COUNTED: counted}


def report(args: argparse.Namespace, samples: dict[str, dict[str, list[float]]]) -> Results:
    apart = {
        name: abs(statistics.median(samples[SENT][name]) / megabytes - 1)
        for name, [megabytes] in samples[COUNTED].items()
    }
    if max(apart.values()) > 0.01:
        output.fail(f"the library counts other bytes than the network: {apart}", code=1)
    quantized = [name for name, policy in POLICIES.items() if policy is not None]
    results = Results(f"blocks of 12*{link_training.WIDTH}^2")
    plain = (BF16, FSDP2)
    for quantity, unit, most, more in (
        (STEP, "ms", STEP_TARGET, [plain]),
        (SENT, "MB", SENT_TARGET, []),
    ):
        against = [(name, BF16, most if "all" in name else None) for name in quantized]
        results.add(quantity, unit, samples[quantity], *more, *against)
    results.add(COUNTED, "MB", samples[COUNTED])
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report)
