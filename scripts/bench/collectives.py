"""An all-gather and a reduce-scatter on gloo, as the library issues them and by torch's own.

Times each way to gather a flat buffer from equal slices, and to reduce one into slices. To try
another, add it to CANDIDATES. Each must give the expected result before it is timed. `--no-limit`
leaves the limited link out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness import options, runner, turns
from harness.runner import Results


@dataclass(frozen=True)
class Buffers:
    """What every candidate is given.

    `full` is [world_size * n] and `slices[r]` its [n] range of rank r; `shard` is an [n] tensor
    outside of it. A gather finds this rank's values in `slices[rank]` and fills the others; a
    reduce leaves the mean over ranks of `slices[rank]` in `shard`.
    """

    rank: int
    world_size: int
    full: torch.Tensor
    slices: list[torch.Tensor]
    shard: torch.Tensor


# A candidate enqueues its communication and returns what finishes it.
Finish = Callable[[], None]
Candidate = Callable[[Buffers], Finish]


# torch 2.13 renames both and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_into_tensor(b: Buffers) -> Finish:
    work = all_gather_single(b.full, b.slices[b.rank], async_op=True)
    return lambda: _wait([work])


def gather_broadcasts(b: Buffers) -> Finish:
    works = [dist.broadcast(s, src=r, async_op=True) for r, s in enumerate(b.slices)]
    return lambda: _wait(works)


def reduce_scatter_tensor(b: Buffers) -> Finish:
    work = reduce_scatter_single(b.shard, b.full, async_op=True)

    def finish() -> None:
        _wait([work])
        b.shard.div_(b.world_size)

    return finish


def add_rows(rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    first, second, *rest = rows
    torch.add(first, second, out=out)
    for row in rest:
        out.add_(row)
    out.div_(len(rows))


def reduce_two_all_to_alls(b: Buffers) -> Finish:
    before, own = b.rank, b.shard.numel()
    after = b.world_size - before - 1
    received = torch.empty(b.world_size - 1, own, dtype=b.shard.dtype)
    works = []
    for target, source, arrive, leave in (
        (
            received[before:],
            b.full[: before * own],
            [0] * (before + 1) + [own] * after,
            [own] * before + [0] * (after + 1),
        ),
        (
            received[:before],
            b.full[(before + 1) * own :],
            [own] * before + [0] * (after + 1),
            [0] * (before + 1) + [own] * after,
        ),
    ):
        work = dist.all_to_all_single(target.flatten(), source, arrive, leave, async_op=True)
        works.append(work)

    def finish() -> None:
        _wait(works)
        add_rows([*received[:before], b.slices[b.rank], *received[before:]], b.shard)

    return finish


CANDIDATES: dict[str, dict[str, Candidate]] = {
    "gather": {
        "all_gather_into_tensor": gather_into_tensor,
        "broadcast per slice": gather_broadcasts,
    },
    "reduce": {
        "reduce_scatter_tensor": reduce_scatter_tensor,
        "two all_to_alls + add": reduce_two_all_to_alls,
    },
}
"""Of each kind, the collective of torch that is made for it first."""
CHOSEN = {"gather": "broadcast per slice", "reduce": "two all_to_alls + add"}


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def check(b: Buffers, kind: str, name: str, candidate: Candidate) -> None:
    """Raise unless a candidate gives the right result. All values are small whole numbers."""
    if kind == "gather":
        b.full.fill_(-1.0)
        b.slices[b.rank].fill_(b.rank)
        found, expected = b.slices, range(b.world_size)
    else:
        for rank, piece in enumerate(b.slices):
            piece.fill_((b.rank + 1) * (rank + 1))
        found, expected = [b.shard.fill_(-1.0)], [(b.rank + 1) * (b.world_size + 1) / 2]
    candidate(b)()
    for values, value in zip(found, expected, strict=True):
        torch.testing.assert_close(values, torch.full_like(values, value), msg=f"{name} is wrong")


OPTIONS = options.parser(__doc__, rate="2gbit", rounds=15, warmup=2, timeout=300.0)
OPTIONS.add_argument("--mib", type=float, default=25.0, help="full buffer, in MiB of fp32")
OPTIONS.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="loopback runs")


def sample(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each candidate, by kind."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    length = int(args.mib * 2**20 / 4) // world_size
    full = torch.empty(world_size * length)
    b = Buffers(rank, world_size, full, list(full.split(length)), torch.empty(length))
    found = {}
    for kind, candidates in CANDIDATES.items():
        for name, candidate in candidates.items():
            check(b, kind, name, candidate)
        samplers = {
            name: turns.timed(lambda candidate=candidate: candidate(b)())
            for name, candidate in candidates.items()
        }
        found[kind] = turns.slowest(samplers, args.rounds, args.warmup)
    return found


def launch(args: argparse.Namespace) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The samples of each place."""
    places = {f"{ranks} ranks, loopback": (ranks, True) for ranks in args.ranks}
    if not args.no_limit:
        places[f"2 ranks, {args.rate} link"] = 2, False
    return {
        place: runner.launch_ranks(args, ranks=ranks, no_limit=no_limit)
        for place, (ranks, no_limit) in places.items()
    }


def report(
    args: argparse.Namespace, found: dict[str, dict[str, dict[str, list[float]]]]
) -> Results:
    results = Results(f"{args.mib:g} MiB of float32")
    for place, kinds in found.items():
        for kind, samples in kinds.items():
            compared = CHOSEN[kind], next(iter(CANDIDATES[kind]))
            results.add(f"{kind}, {place}: time", "ms", samples, compared)
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, launch)
