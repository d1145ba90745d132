"""Training over a slow link: our step against FSDP2's and against what physics allows.

Gloo ranks on loopback, limited to `--rate` in a network namespace made for the run (needs root and
`tc`). They train one model in four ways, which take turns round by round in the same processes:

- ours and FSDP2: every block a unit, and the root; with `--layout`, ours also as `Flat()` lays it
  out, because a layout must not cost anything;
- compute alone: the model unsharded, all ranks at the same time, nothing communicated;
- communication alone: the collectives of a step of ours (each block gathered twice and reduced
  once, in the same forms), all enqueued back to back on both groups, nothing computed.

No step can be shorter than the larger of the last two, the bound. A step is forward, loss, backward
and zero_grad. There is no optimizer: unsharded, it would update as many times more parameters as
there are ranks, and so raise the bound. A sample is the mean of `--steps` steps, from a barrier to
the end of the slowest rank, in milliseconds; figures are medians over rounds.

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
from collections.abc import Callable
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
from fsdp_overlap.comm.collectives import choose
from fsdp_overlap.layout import Blocks, Flat, Layout, ParamSpec, Whole, plan_units
from fsdp_overlap.optim import AdamW, Muon

WIDTH = 512
HEADS = 8
SEQUENCE = 64
OURS, FLAT, FSDP2 = "ours", "ours, flat", "FSDP2"
ON, OFF = "ours, overlap on", "ours, overlap off"
COMPUTE, COMMUNICATION = "compute alone", "communication alone"
LAYOUTS: dict[str, Layout] = {"flat": Flat(), "blocks": Blocks(rows=128), "whole": Whole()}


class Block(nn.Module):
    """A transformer block of 12 * WIDTH^2 parameters, and two norms."""

    def __init__(self) -> None:
        super().__init__()
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
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build(blocks: int) -> nn.Sequential:
    """The same model on every rank and for every system."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


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
    model, ctx = shard_ours(build(args.blocks), args, args.layout, prefetch)
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
    model = shard_fsdp2(build(args.blocks))
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
    model: nn.Sequential, gather_group: dist.ProcessGroup, reduce_group: dist.ProcessGroup
) -> Callable[[], float]:
    """The collectives of one step of ours, enqueued at once and then waited for in order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    specs = [ParamSpec(n, tuple(p.shape), p.dtype) for n, p in model[0].named_parameters()]
    [plan] = plan_units([specs], world_size, Flat())
    collectives = choose("cpu", gather_group, plan)
    # Buffers are made beforehand and gathers share one: what it holds does not matter here.
    full, gradients = torch.zeros(plan.numel), torch.zeros(plan.numel)
    shard = torch.zeros(plan.shard_numels[rank])

    def communicate() -> float:
        blocks = range(len(model))
        issued = [collectives.all_gather(full, shard, plan, gather_group) for _ in blocks]
        for _ in blocks:
            issued.append(collectives.all_gather(full, shard, plan, gather_group))
            issued.append(collectives.reduce_scatter_mean(gradients, plan, reduce_group))
        for one in issued:
            for work in one.works:
                work.wait()
            one.finish()
        return 0.0

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
    rank, world_size = _bench.join_ranks(timeout_s=args.timeout)
    plain = build(args.blocks)
    steps = {COMPUTE: make_step(plain, rank, args.rows)}
    if args.optimizer is None:
        sharded, ctx = shard_ours(build(args.blocks), args, args.layout, args.prefetch)
        steps[OURS] = make_step(sharded, rank, args.rows)
        steps[FSDP2] = make_step(shard_fsdp2(build(args.blocks)), rank, args.rows)
        if args.layout != "flat":
            flat, _ = shard_ours(build(args.blocks), args, "flat", args.prefetch)
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
        steps[COMMUNICATION] = make_communication(plain, gather_group, reduce_group)
    else:
        del steps[COMPUTE]  # which trains nothing
        check({name: step() for name, step in steps.items()})

    ctx.stats.reset()
    with _bench.quiet_gc():
        mine = _bench.alternate(
            {name: timed(step, args.steps) for name, step in steps.items()}, args.rounds, 1
        )
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        print(f"ours in all rounds, warm-up included: {ctx.stats}\n", flush=True)
        _bench.report(
            {
                name: [max(ranks) for ranks in zip(*(e[name] for e in everyone), strict=True)]
                for name in mine
            }
        )
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
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps per sample")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, for the whole run")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    if args.optimizer == "muon":
        args.layout = "whole"
    return args


def show(args: argparse.Namespace, samples: dict[str, list[float]]) -> None:
    """Print the table and the ratios, and write the JSON report."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    link = "unlimited loopback" if args.no_limit else f"{args.rate} link"
    groups = "one shared group" if args.shared_group else "separate groups"
    print(
        f"torch {torch.__version__}, {args.ranks} ranks, {link}, {args.blocks} blocks of "
        f"12*{WIDTH}^2, {args.rows} rows a rank; ours: {args.layout}, prefetch {args.prefetch}, "
        f"{groups}; median of {args.rounds} rounds of {args.steps} steps"
    )
    if args.optimizer is not None:
        print(f"{args.optimizer}, stage {args.stage}, {args.microbatches} microbatches a step")
    print()
    rows = []
    for name, values in samples.items():
        low, high = _bench.spread(values)
        rows.append([name, f"{median[name]:.0f}", f"{low:.0f}-{high:.0f}"])
    if args.optimizer is None:
        bound = max(median[COMPUTE], median[COMMUNICATION])
        rows.append(["bound", f"{bound:.0f}", ""])
    print(_bench.markdown_table(["", "ms/step", "p10-p90"], rows) + "\n")
    ours = OURS if args.optimizer is None else OFF if args.overlap == "off" else ON
    figures = {"ours_to_fsdp2": median[ours] / median[FSDP2]}
    print(f"{ours} / FSDP2: {figures['ours_to_fsdp2']:.3f} (target: at most 0.55)")
    if args.optimizer is None:
        figures |= {"bound_ms": bound, "ours_to_bound": median[OURS] / bound}
        print(f"ours / bound: {figures['ours_to_bound']:.3f} (target: at most 1.20)")
    elif args.overlap == "both":
        figures["overlap_gain"] = median[OFF] / median[ON] - 1
        print(f"steps per second, overlap on against off: {figures['overlap_gain']:+.1%}")
    if FLAT in median:
        ratio = median[OURS] / median[FLAT]
        print(f"ours, {args.layout} / ours, flat: {ratio:.3f} (target: at most 1.05)")
    _bench.write_json(
        args.json,
        {
            "layout": args.layout,
            "torch": torch.__version__,
            "rate": None if args.no_limit else args.rate,
            "ranks": args.ranks,
            "blocks": args.blocks,
            "prefetch": args.prefetch,
            "separate_groups": not args.shared_group,
            "steps": args.steps,
            "rows": args.rows,
            "optimizer": args.optimizer,
            "stage": args.stage,
            "microbatches": args.microbatches,
            "step_ms": {name: _bench.summary(values) for name, values in samples.items()},
            **figures,
        },
    )


def main() -> None:
    args = parse()
    if _bench.is_rank():
        return run_rank(args)
    show(args, _bench.launch_on_link(args, sys.argv[1:]))


if __name__ == "__main__":
    main()
