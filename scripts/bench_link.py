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
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _bench
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

import fsdp_overlap
from fsdp_overlap.comm.collectives import choose
from fsdp_overlap.layout import Blocks, Flat, Layout, ParamSpec, Whole, plan_units

WIDTH = 512
HEADS = 8
ROWS = 512
SEQUENCE = 64
OURS, FLAT, FSDP2 = "ours", "ours, flat", "FSDP2"
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


def make_step(model: nn.Module, rank: int) -> Callable[[], float]:
    """A training step on this rank's ROWS rows, without optimizer; returns the loss."""
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(ROWS // SEQUENCE, SEQUENCE, WIDTH, generator=generator)

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
    model: nn.Sequential, args: argparse.Namespace, layout: str
) -> tuple[nn.Sequential, fsdp_overlap.FsdpContext]:
    """Shard `model` in place; returns it and its context."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ctx = fsdp_overlap.FsdpContext(
        mesh,
        prefetch=args.prefetch,
        separate_groups=not args.shared_group,
        layout=LAYOUTS[layout],
    )
    ctx.plan([*model, model])
    for block in model:
        fsdp_overlap.fully_shard(block, ctx)
    fsdp_overlap.fully_shard(model, ctx)
    return model, ctx


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


def run_rank(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 reports the slowest rank's times."""
    rank, world_size = _bench.join_ranks(timeout_s=args.timeout)
    sharded, ctx = shard_ours(build(args.blocks), args, args.layout)
    plain = build(args.blocks)
    steps = {
        OURS: make_step(sharded, rank),
        FSDP2: make_step(shard_fsdp2(build(args.blocks)), rank),
        COMPUTE: make_step(plain, rank),
    }
    if args.layout != "flat":
        flat, _ = shard_ours(build(args.blocks), args, "flat")
        steps[FLAT] = make_step(flat, rank)
    # A system that computes something else wins nothing.
    losses = {name: step() for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4 * abs(losses[COMPUTE]):
        _bench.fail(f"the systems compute different losses: {losses}", code=1)
    gather_group = dist.new_group()
    reduce_group = gather_group if args.shared_group else dist.new_group()
    steps[COMMUNICATION] = make_communication(plain, gather_group, reduce_group)

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
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps per sample")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, for the whole run")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    return parser.parse_args()


def show(args: argparse.Namespace, samples: dict[str, list[float]]) -> None:
    """Print the table and the ratios, and write the JSON report."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    bound = max(median[COMPUTE], median[COMMUNICATION])
    link = "unlimited loopback" if args.no_limit else f"{args.rate} link"
    groups = "one shared group" if args.shared_group else "separate groups"
    print(
        f"torch {torch.__version__}, {args.ranks} ranks, {link}, {args.blocks} blocks of "
        f"12*{WIDTH}^2, {ROWS} rows a rank; ours: {args.layout}, prefetch {args.prefetch}, "
        f"{groups}; median of {args.rounds} rounds of {args.steps} steps\n"
    )
    rows = []
    for name, values in samples.items():
        low, high = _bench.spread(values)
        rows.append([name, f"{median[name]:.0f}", f"{low:.0f}-{high:.0f}"])
    rows.append(["bound", f"{bound:.0f}", ""])
    print(_bench.markdown_table(["", "ms/step", "p10-p90"], rows))
    to_fsdp2, to_bound = median[OURS] / median[FSDP2], median[OURS] / bound
    print(f"\nours / FSDP2: {to_fsdp2:.3f} (target: at most 0.55)")
    print(f"ours / bound: {to_bound:.3f} (target: at most 1.20)")
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
            "step_ms": {name: _bench.summary(values) for name, values in samples.items()},
            "bound_ms": bound,
            "ours_to_fsdp2": to_fsdp2,
            "ours_to_bound": to_bound,
        },
    )


def main() -> None:
    args = parse()
    if _bench.is_rank():
        return run_rank(args)
    if args.no_limit:
        samples = _bench.launch_ranks(args.ranks, sys.argv[1:], args.timeout)
    else:
        try:
            with _bench.limited_link(args.rate):
                samples = _bench.launch_ranks(args.ranks, sys.argv[1:], args.timeout)
        except _bench.LinkError as error:
            _bench.fail(f"{error}; --no-limit runs on plain loopback")
    show(args, samples)


if __name__ == "__main__":
    main()
