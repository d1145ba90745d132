"""An all-gather and a reduce-scatter on gloo, as the library issues them and by torch's own.

Times each way to gather a flat buffer from equal slices, and to reduce one into slices, from a
barrier to the moment when the last rank holds its result (milliseconds, ways alternating within
each round). To try another, add it to CANDIDATES. Beside the time, of each:

- host: milliseconds until the last asynchronous call has returned, which compute has to wait for;
- cpu: milliseconds of processor time of all threads of one rank, which compute has to do without;
- extra: MiB by which the resident memory of a rank peaks above the buffers that every candidate
  is given (the full buffer and the slice), measured by the kernel in a run of its own.

The results are compared with the expected ones in every warm-up round. `--no-limit` leaves the
limited link out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness import options, peaks, processes, runner, turns
from harness.runner import Results

MIB = 2**20
TIME, HOST, CPU, EXTRA = "time", "host", "cpu", "extra"
UNITS = {TIME: "ms", HOST: "ms", CPU: "ms", EXTRA: "MiB"}


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


# ------------------------------------------------------------- measuring


def prepare(b: Buffers, kind: str) -> None:
    """Set the input of one call; afterwards `check` knows what must come out."""
    if kind == "gather":
        b.full.fill_(-1.0)
        b.slices[b.rank].fill_(float(b.rank + 1))
    else:
        for r, piece in enumerate(b.slices):
            piece.fill_(float((b.rank + 1) * (r + 1)))
        b.shard.fill_(-1.0)


def check(b: Buffers, kind: str, name: str) -> None:
    """Raise where a candidate left anything but the right result behind."""
    if kind == "gather":
        wrong = [r for r, s in enumerate(b.slices) if not bool((s == float(r + 1)).all())]
        if wrong:
            raise AssertionError(f"{name}: the slices of ranks {wrong} are wrong")
    else:
        mean = (b.rank + 1) * (b.world_size + 1) / 2
        if not torch.allclose(b.shard, torch.full_like(b.shard, mean)):
            raise AssertionError(f"{name}: expected {mean}, got {b.shard[:4].tolist()}")


def call(b: Buffers, kind: str, candidate: Candidate) -> tuple[float, float, float]:
    """One call; returns (total, host, cpu) in milliseconds on this rank."""
    prepare(b, kind)
    dist.barrier()
    cpu = time.process_time()
    start = time.perf_counter()
    finish = candidate(b)
    enqueued = time.perf_counter()
    finish()
    end = time.perf_counter()
    cpu = time.process_time() - cpu
    return (end - start) * 1e3, (enqueued - start) * 1e3, cpu * 1e3


def peak_extra(b: Buffers, kind: str, candidate: Candidate) -> float:
    """MiB by which this rank's resident memory peaks above where it stood before the call."""
    prepare(b, kind)
    b.shard.fill_(0.0)
    return turns.weighed(lambda: candidate(b)(), MIB)()


# Samples of each candidate, by what was measured, by kind: gather or reduce.
Found = dict[str, dict[str, dict[str, list[float]]]]


OPTIONS = options.parser(__doc__, rate="2gbit", rounds=15, warmup=2, timeout=300.0)
OPTIONS.add_argument("--mib", type=float, default=25.0, help="full buffer, in MiB of fp32")
OPTIONS.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="loopback runs")
OPTIONS.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)


def sample(args: argparse.Namespace) -> Found:
    """What each candidate takes, on the slowest rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    length = int(args.mib * MIB / 4) // world_size
    full = torch.empty(world_size * length)
    b = Buffers(rank, world_size, full, list(full.split(length)), torch.empty(length))
    found: Found = {}
    for kind, candidates in CANDIDATES.items():
        if args.memory:
            # Twice, as the first call also builds connections and touches buffers.
            extra = {
                name: [[peak_extra(b, kind, candidate) for _ in range(2)][-1]]
                for name, candidate in candidates.items()
            }
            found[kind] = {EXTRA: extra}
        else:
            found[kind] = time_candidates(args, b, kind, candidates)
    return found


def time_candidates(
    args: argparse.Namespace, b: Buffers, kind: str, candidates: dict[str, Candidate]
) -> dict[str, dict[str, list[float]]]:
    """Each candidate in turn, `args.warmup` rounds with a check and `args.rounds` measured."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in candidates}

    def sampler(name: str, candidate: Candidate) -> Callable[[], float]:
        def sample() -> float:
            taken[name].append(call(b, kind, candidate))
            if len(taken[name]) <= args.warmup:
                check(b, kind, name)
            return taken[name][-1][0]

        return sample

    samplers = {name: sampler(name, candidate) for name, candidate in candidates.items()}
    turns.alternate(samplers, args.rounds, args.warmup)
    return {
        what: processes.of_slowest_rank(
            {name: [one[k] for one in each[args.warmup :]] for name, each in taken.items()}
        )
        for k, what in enumerate((TIME, HOST, CPU))
    }


def launch(args: argparse.Namespace) -> dict[str, Found]:
    """Time the candidates, then measure their memory among fresh ranks, in each place."""
    places = {f"{ranks} ranks, loopback": (ranks, True) for ranks in args.ranks}
    if not args.no_limit:
        places[f"2 ranks, {args.rate} link"] = 2, False
    found = {}
    for place, (ranks, no_limit) in places.items():
        timed = runner.launch_ranks(args, ranks=ranks, no_limit=no_limit)
        # Freed memory must go back at once, or the second call would reuse what the first one left.
        memory = runner.launch_ranks(
            args, ["--memory"], peaks.RETURNED, ranks=ranks, no_limit=no_limit
        )
        found[place] = {kind: {**timed[kind], **memory[kind]} for kind in timed}
    return found


def report(args: argparse.Namespace, found: dict[str, Found]) -> Results:
    results = Results(f"{args.mib:g} MiB of float32")
    for place, kinds in found.items():
        for kind, measured in kinds.items():
            for what, unit in UNITS.items():
                compared = [(CHOSEN[kind], next(iter(CANDIDATES[kind])))] if what == TIME else []
                results.add(f"{kind}, {place}: {what}", unit, measured[what], *compared)
    return results


if __name__ == "__main__":
    runner.main(OPTIONS, sample, report, launch)
