"""An all-gather and a reduce-scatter on gloo: the library's, which `choose()` gives, and torch's.

Each must give the expected result before it is timed. `--no-limit` leaves the limited link out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import choose
from harness import options, runner, turns
from harness.link_training import finish, plan_of
from harness.runner import Results

# torch 2.13 renames both and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

GATHER, REDUCE = "gather", "reduce"
COMPARED = {
    GATHER: ("broadcast per slice", "all_gather_into_tensor"),
    REDUCE: ("two all_to_alls + add", "reduce_scatter_tensor"),
}
"""The library's, and torch's."""

Run = Callable[[], torch.Tensor]
"""Run a collective; return what it gave."""


def runs_of(full: torch.Tensor, shard: torch.Tensor) -> dict[str, dict[str, Run]]:
    """Each way to gather ``shard`` into ``full``, and to reduce ``full`` to a mean."""
    group = dist.group.WORLD
    assert group is not None
    ours = choose(group, "cpu", plan_of(full.numel(), full.dtype, group.size()))
    reduced = torch.empty_like(shard)

    def gather() -> torch.Tensor:
        all_gather_single(full, shard)
        return full

    def reduce() -> torch.Tensor:
        reduce_scatter_single(reduced, full)
        return reduced.div_(group.size())

    runs: dict[str, tuple[Run, Run]] = {
        GATHER: (lambda: finish(ours.all_gather(full, shard, group)), gather),
        REDUCE: (lambda: finish(ours.reduce_scatter(full, group)), reduce),
    }
    return {kind: dict(zip(COMPARED[kind], both, strict=True)) for kind, both in runs.items()}


def check(kind: str, runs: Mapping[str, Run], full: torch.Tensor, shard: torch.Tensor) -> None:
    """Raise unless each run gives the right result. All values are small whole numbers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, run in runs.items():
        if kind == GATHER:
            full.fill_(-1.0)
            shard.fill_(rank)
            expected = torch.arange(world_size).repeat_interleave(len(shard)).float()
        else:
            for number, piece in enumerate(full.chunk(world_size), 1):
                piece.fill_((rank + 1) * number)
            expected = torch.full_like(shard, (rank + 1) * (world_size + 1) / 2)
        torch.testing.assert_close(run(), expected, msg=f"{name} is wrong")


OPTIONS = options.parser(__doc__, rate="2gbit", rounds=15, warmup=2, timeout=300.0)
OPTIONS.add_argument("--mib", type=float, default=25.0, help="full buffer, in MiB of fp32")
OPTIONS.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="loopback runs")


def sample(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each way, by kind."""
    length = int(args.mib * 2**20 / 4) // dist.get_world_size()
    full, shard = torch.empty(dist.get_world_size() * length), torch.empty(length)
    found = {}
    for kind, runs in runs_of(full, shard).items():
        check(kind, runs, full, shard)
        samplers = {name: turns.timed(run) for name, run in runs.items()}
        found[kind] = turns.slowest(samplers, args.rounds, args.warmup)
    return found


def launch(args: argparse.Namespace) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The samples of each place."""
    launched = partial(runner.launch_ranks, args)
    found = {
        f"{ranks} ranks, loopback": launched(ranks=ranks, no_limit=True) for ranks in args.ranks
    }
    if not args.no_limit:
        found[f"2 ranks, {args.rate} link"] = launched(ranks=2)
    return found


def report(
    args: argparse.Namespace, found: dict[str, dict[str, dict[str, list[float]]]]
) -> Results:
    results = Results(f"{args.mib:g} MiB of float32")
    for place, kinds in found.items():
        for kind, samples in kinds.items():
            results.add(f"{kind}, {place}: time", "ms", samples, COMPARED[kind])
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, launch)
