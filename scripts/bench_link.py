"""Training over a slow link: our step against FSDP2's and against what its parts take alone.

Gloo ranks on loopback, limited to `--rate` in a network namespace made for the run (needs root and
`tc`). They train one model in four ways, which take turns round by round in the same processes:

- ours and FSDP2: every block a unit, and the root; with `--layout`, ours also as `Flat()` lays it
  out, because a layout must not cost anything;
- compute alone: the model unsharded, all ranks at the same time, nothing communicated;
- communication alone: the collectives of a step of ours (each block gathered for forward, each but
  the last, which is kept, for backward, and reduced once, in the same forms), enqueued back to back
  on both groups, two reductions at a time as in a step, nothing computed.

The larger of the last two is the bound: the samples of whichever has the larger median. The target
is 1.05 of it where one of the two is at least twice the other, and 1.12 where they are nearer,
because then neither can hide what the other adds.

Here ranks and communication share the host's cores, which a bound of two separate measurements does
not know. With `--sleep` a block also sleeps, once in forward and twice as long in backward, which
takes time and no core, as a GPU's compute does: with few `--rows` that shows the schedule alone.

A step is forward, loss, backward and zero_grad. There is no optimizer: unsharded, it would update
as many times more parameters as there are ranks, and so raise the bound. A sample is the mean of
`--steps` steps, from a barrier to the end of the slowest rank, in milliseconds.

With `--optimizer` the question is another one: what it buys to gather parameters under compute. A
step is one of training then, of `--microbatches` forwards and backwards, and the systems are ours
with overlap `on` and `off`, or one of them, and FSDP2. At `--stage` 1 and 2 full buffers are kept
between steps: on, their refresh is started after the optimizer's step and runs under the next
forward; off, the step ends with it. At stage 3, off is a prefetch of 0. Muon is our optimizer, on
whole matrices, and torch's on FSDP2, with products in float32 (see `bench_muon.py`); AdamW is ours,
and torch's fused. FSDP2 comes as near to the stage as it can: at 1 and 2 it keeps parameters from
forward to backward, and from one microbatch to the next.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _bench
import bench_muon
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

import fsdp_overlap
from fsdp_overlap.cli.measurement import Measurement, Ratio
from fsdp_overlap.comm.collectives import Issued, choose
from fsdp_overlap.layout import Blocks, Flat, Layout, ParamSpec, Whole, plan_units
from fsdp_overlap.optim import AdamW, Muon
from fsdp_overlap.runtime.reductions import MAX_INPUTS

WIDTH = 512
HEADS = 8
SEQUENCE = 64
OURS, FLAT, FSDP2 = "ours", "ours, flat", "FSDP2"
ON, OFF = "ours, overlap on", "ours, overlap off"
COMPUTE, COMMUNICATION, BOUND = "compute alone", "communication alone", "bound"
ALONE = (COMPUTE, COMMUNICATION)
STEP = "step"
# Of ours to the others.
FSDP2_TARGET, FLAT_TARGET = 0.50, 1.05
UNEVEN_TARGET, EVEN_TARGET = 1.05, 1.12
LAYOUTS: dict[str, Layout] = {"flat": Flat(), "blocks": Blocks(rows=128), "whole": Whole()}


class Sleep(torch.autograd.Function):
    """What a GPU's compute is to the host's cores: time passes, once in forward and twice as much
    in backward, and they are free."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Block(nn.Module):
    """A transformer block of 12 * WIDTH^2 parameters, and two norms."""

    def __init__(self, sleep_ms: float = 0.0) -> None:
        super().__init__()
        self.sleep_ms = sleep_ms
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return Sleep.apply(x, self.sleep_ms / 1e3) if self.sleep_ms else x


def build(blocks: int, sleep_ms: float = 0.0) -> nn.Sequential:
    """The same model on every rank and for every system."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(sleep_ms) for _ in range(blocks)))


def make_batch(rank: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows // SEQUENCE, SEQUENCE, WIDTH, generator=generator)


def make_step(model: nn.Module, rank: int, rows: int) -> Callable[[], float]:
    """Forward and backward on this rank's rows; returns the loss."""
    batch = make_batch(rank, rows)

    def step() -> float:
        loss = model(batch).square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step


def shard_fsdp2(model: nn.Sequential) -> nn.Sequential:
    """Shard `model` in place as users of FSDP2 do, and return it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    return model


def shard_ours(
    model: nn.Sequential, args: argparse.Namespace, layout: str, prefetch: int
) -> tuple[nn.Sequential, fsdp_overlap.FsdpContext]:
    """Shard `model` in place; returns it and its context."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ctx = fsdp_overlap.FsdpContext(
        mesh,
        prefetch=prefetch,
        separate_groups=not args.shared_group,
        layout=LAYOUTS[layout],
    )
    ctx.plan([*model, model])
    for block in model:
        fsdp_overlap.fully_shard(block, ctx)
    fsdp_overlap.fully_shard(model, ctx)
    return model, ctx


def make_training(
    model: nn.Module,
    args: argparse.Namespace,
    begin: Callable[[bool], None],
    update: Callable[[], None],
) -> Callable[[], float]:
    """A step of training; `begin` is told before each microbatch whether it is the last, `update`
    follows them. Returns the loss of the last."""
    batch = make_batch(dist.get_rank(), args.rows)

    def step() -> float:
        for index in range(args.microbatches):
            begin(index == args.microbatches - 1)
            loss = model(batch).square().mean()
            loss.backward()
        update()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step


def train_ours(
    args: argparse.Namespace, overlap: bool
) -> tuple[Callable[[], float], fsdp_overlap.FsdpContext]:
    prefetch = 0 if args.stage == 3 and not overlap else args.prefetch
    model, ctx = shard_ours(build(args.blocks, args.sleep), args, args.layout, prefetch)
    model.set_zero_stage(args.stage)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "muon":
        optimizer = Muon(model, bench_muon.LR, adamw=bench_muon.ADAMW)
    else:
        optimizer = AdamW(model.parameters(), **bench_muon.ADAMW)

    def update() -> None:
        optimizer.step()
        if overlap:
            ctx.start_param_sync()
        else:
            ctx.finish_param_sync()

    return make_training(model, args, model.set_is_last_backward, update), ctx


def train_fsdp2(args: argparse.Namespace) -> Callable[[], float]:
    model = shard_fsdp2(build(args.blocks, args.sleep))
    assert isinstance(model, fsdp2.FSDPModule)
    if args.stage < 3:
        model.set_reshard_after_forward(False)

    def begin(is_last: bool) -> None:
        if args.stage < 3:
            model.set_reshard_after_backward(is_last)
        if args.stage == 1:
            model.set_requires_gradient_sync(is_last)

    if args.optimizer == "muon":
        update = bench_muon.torchs(model, torch.float32)
    else:
        update = torch.optim.AdamW(model.parameters(), **bench_muon.ADAMW, fused=True).step
    return make_training(model, args, begin, update)


def make_communication(
    model: nn.Sequential,
    prefetch: int,
    gather_group: dist.ProcessGroup,
    reduce_group: dist.ProcessGroup,
) -> Callable[[], float]:
    """The collectives of one step of ours, with nothing to wait for but each other."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    specs = [ParamSpec(n, tuple(p.shape), p.dtype) for n, p in model[0].named_parameters()]
    [plan] = plan_units([specs], world_size, Flat())
    collectives = choose("cpu", gather_group, plan)
    # Buffers are made beforehand and gathers share one: what it holds does not matter here.
    full, gradients = torch.zeros(plan.numel), torch.zeros(plan.numel)
    shard = torch.zeros(plan.shard_numels[rank])

    def communicate() -> float:
        uses = 2 * len(model) - (1 if prefetch else 0)
        gathers = [collectives.all_gather(full, shard, plan, gather_group) for _ in range(uses)]
        reductions: deque[Issued] = deque()
        for _ in model:
            if len(reductions) == MAX_INPUTS:
                finish(reductions.popleft())
            reductions.append(collectives.reduce_scatter(gradients, plan, reduce_group))
        for one in (*gathers, *reductions):
            finish(one)
        return 0.0

    def finish(issued: Issued) -> None:
        for work in issued.works:
            work.wait()
        issued.finish()

    return communicate


def timed(run: Callable[[], float], steps: int) -> Callable[[], float]:
    """A sample: milliseconds per step on this rank, all ranks starting together."""

    def sample() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - start) / steps * 1e3

    return sample


def check(losses: dict[str, float]) -> None:
    """A system that computes something else wins nothing."""
    low, high = min(losses.values()), max(losses.values())
    if high - low > 1e-4 * abs(high):
        _bench.fail(f"the systems compute different losses: {losses}", code=1)


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    rank, _ = _bench.join_ranks(timeout_s=args.timeout)
    plain = build(args.blocks, args.sleep)
    steps = {COMPUTE: make_step(plain, rank, args.rows)}
    if args.optimizer is None:
        sharded, ctx = shard_ours(build(args.blocks, args.sleep), args, args.layout, args.prefetch)
        steps[OURS] = make_step(sharded, rank, args.rows)
        steps[FSDP2] = make_step(shard_fsdp2(build(args.blocks, args.sleep)), rank, args.rows)
        if args.layout != "flat":
            flat, _ = shard_ours(build(args.blocks, args.sleep), args, "flat", args.prefetch)
            steps[FLAT] = make_step(flat, rank, args.rows)
    else:
        for name, overlap in ((OFF, "off"), (ON, "on")):
            if args.overlap in (overlap, "both"):
                steps[name], ctx = train_ours(args, overlap == "on")
        steps[FSDP2] = train_fsdp2(args)
    check({name: step() for name, step in steps.items()})
    if args.optimizer is None:
        gather_group = dist.new_group()
        reduce_group = gather_group if args.shared_group else dist.new_group()
        steps[COMMUNICATION] = make_communication(plain, args.prefetch, gather_group, reduce_group)
    else:
        del steps[COMPUTE]  # which trains nothing
        check({name: step() for name, step in steps.items()})

    ctx.stats.reset()
    with _bench.quiet_gc():
        mine = _bench.alternate(
            {name: timed(step, args.steps) for name, step in steps.items()}, args.rounds, 1
        )
    slowest = _bench.of_slowest_rank(mine)
    if rank == 0:
        print(f"ours in all rounds, warm-up included: {ctx.stats}\n", flush=True)
        _bench.report(slowest)
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="2gbit", help="of the link, in tc's words")
    parser.add_argument("--no-limit", action="store_true", help="plain loopback, needs no root")
    parser.add_argument("--prefetch", type=int, default=1, help="of our context")
    parser.add_argument(
        "--shared-group", action="store_true", help="our gathers and reductions share one group"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="flat", help="of our units")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], help="train, see above")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2, help="of ZeRO")
    parser.add_argument("--overlap", choices=["both", "on", "off"], default="both")
    parser.add_argument("--microbatches", type=int, default=1, help="forwards in a training step")
    parser.add_argument("--rows", type=int, default=512, help="of each rank's batch")
    parser.add_argument(
        "--sleep", type=float, default=0.0, metavar="MS", help="of a block in forward, see above"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps per sample")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, for the whole run")
    _bench.add_outputs(parser)
    args = parser.parse_args()
    if args.optimizer == "muon":
        args.layout = "whole"
    return args


def with_bound(samples: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """`samples` and the bound, which is one of them."""
    slower = max(ALONE, key=lambda name: statistics.median(samples[name]))
    return {**samples, BOUND: samples[slower]}


def bound_target(samples: Mapping[str, Sequence[float]]) -> float:
    """How far ours may be above the bound, from the samples of both."""
    both = [statistics.median(samples[name]) for name in ALONE]
    return UNEVEN_TARGET if max(both) >= 2 * min(both) else EVEN_TARGET


def ratios_of(args: argparse.Namespace, samples: Mapping[str, Sequence[float]]) -> list[Ratio]:
    """The headlines of what was asked for."""
    if args.optimizer is None:
        at_most = None if args.no_limit else FSDP2_TARGET
        ratios = [
            Ratio.between(STEP, OURS, FSDP2, samples, at_most=at_most),
            Ratio.between(STEP, OURS, BOUND, samples, at_most=bound_target(samples)),
        ]
        if FLAT in samples:
            ratios.append(Ratio.between(STEP, OURS, FLAT, samples, at_most=FLAT_TARGET))
        return ratios
    ratios = [Ratio.between(STEP, name, FSDP2, samples) for name in (ON, OFF) if name in samples]
    if args.overlap == "both":
        ratios.append(Ratio.between(STEP, ON, OFF, samples))
    return ratios


def measurement_of(args: argparse.Namespace, samples: dict[str, list[float]]) -> Measurement:
    link = "unlimited loopback" if args.no_limit else f"{args.rate} link"
    groups = "one shared group" if args.shared_group else "separate groups"
    about = (
        f"torch {torch.__version__}, {args.ranks} ranks, {link}, {args.blocks} blocks of "
        f"12*{WIDTH}^2, {args.rows} rows a rank; ours: {args.layout}, prefetch {args.prefetch}, "
        f"{groups}; {args.rounds} rounds of {args.steps} steps"
    )
    if args.sleep:
        about += f"; a block sleeps {args.sleep:g} ms in forward, {2 * args.sleep:g} in backward"
    if args.optimizer is None:
        samples = with_bound(samples)
    else:
        about += f"; {args.optimizer}, stage {args.stage}, {args.microbatches} microbatches a step"
    settings = {
        "torch": torch.__version__,
        "rate": None if args.no_limit else args.rate,
        "ranks": args.ranks,
        "blocks": args.blocks,
        "rows": args.rows,
        "sleep_ms": args.sleep,
        "layout": args.layout,
        "prefetch": args.prefetch,
        "separate_groups": not args.shared_group,
        "optimizer": args.optimizer,
        "stage": None if args.optimizer is None else args.stage,
        "microbatches": args.microbatches,
        "rounds": args.rounds,
        "steps": args.steps,
    }
    figures = _bench.figures_of(STEP, "ms", samples)
    argv = _bench.repeated_argv()
    return Measurement(about, settings, argv, figures, ratios_of(args, samples))


def main() -> None:
    args = parse()
    if _bench.is_rank():
        return run_rank(args)
    measurement = measurement_of(args, _bench.launch_on_link(args, sys.argv[1:]))
    _bench.publish(measurement, args.json, args.plot)


if __name__ == "__main__":
    main()
