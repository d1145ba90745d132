"""Which collectives should carry an all-gather and a reduce-scatter on gloo?

Times every candidate for gathering a flat buffer from equal slices, and for reducing one into
slices, from a barrier to the moment when the last rank holds its result (milliseconds, candidates
alternating within each round). The library's choice is compared with the one collective that is
made for it. Beside the time, per candidate:

- host: milliseconds until the last asynchronous call has returned, which compute has to wait for;
- cpu: milliseconds of processor time of all threads of one rank, which compute has to do without;
- extra: MiB by which the resident memory of a rank peaks above the buffers that every candidate
  is given (the full buffer and the slice), measured by the kernel in a run of its own.

The results are compared with the expected ones in every warm-up round. Needs root and `tc` for
the limited link; `--no-limit` leaves that part out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness import options, output, peaks, processes, slow_link, turns
from harness.measurement import Figure, Measurement, Ratio

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

    @property
    def others(self) -> list[int]:
        """The other ranks, nearest successor first, so that not all send to rank 0 first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]


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


def gather_list(b: Buffers) -> Finish:
    work = dist.all_gather(b.slices, b.slices[b.rank], async_op=True)
    return lambda: _wait([work])


def gather_send_receive(b: Buffers) -> Finish:
    works = [dist.irecv(b.slices[r], src=r) for r in reversed(b.others)]
    works += [dist.isend(b.slices[b.rank], dst=r) for r in b.others]
    return lambda: _wait(works)


def reduce_scatter_tensor(b: Buffers) -> Finish:
    work = reduce_scatter_single(b.shard, b.full, async_op=True)

    def finish() -> None:
        _wait([work])
        b.shard.div_(b.world_size)

    return finish


def reduce_to_each(b: Buffers) -> Finish:
    works = [dist.reduce(s, dst=r, async_op=True) for r, s in enumerate(b.slices)]

    def finish() -> None:
        _wait(works)
        torch.div(b.slices[b.rank], b.world_size, out=b.shard)

    return finish


def reduce_by_all_to_all(add_up: Callable[[torch.Tensor, torch.Tensor], object]) -> Candidate:
    """`add_up` gives the sum, or the mean, of the rows of what was received."""

    def issue(b: Buffers) -> Finish:
        received = torch.empty_like(b.full)
        work = dist.all_to_all_single(received, b.full, async_op=True)

        def finish() -> None:
            _wait([work])
            add_up(received.view(b.world_size, -1), b.shard)

        return finish

    return issue


def sum_of_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    torch.sum(rows, dim=0, out=out).div_(len(rows))


def mean_of_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    torch.mean(rows, dim=0, out=out)


def add_rows(rows: torch.Tensor | list[torch.Tensor], out: torch.Tensor) -> None:
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


def reduce_send_receive(b: Buffers) -> Finish:
    received = torch.empty(b.world_size - 1, b.shard.numel(), dtype=b.shard.dtype).unbind()
    sources = list(reversed(b.others))
    works: list[Any] = [dist.irecv(t, src=r) for t, r in zip(received, sources, strict=True)]
    sends = [dist.isend(b.slices[r], dst=r) for r in b.others]

    def finish() -> None:
        works[0].wait()
        torch.add(b.slices[b.rank], received[0], out=b.shard)
        for work, piece in zip(works[1:], received[1:], strict=True):
            work.wait()
            b.shard.add_(piece)
        b.shard.div_(b.world_size)
        _wait(sends)

    return finish


GATHERS: dict[str, Candidate] = {
    "all_gather_into_tensor": gather_into_tensor,
    "all_gather into views": gather_list,
    "broadcast per slice": gather_broadcasts,
    "isend / irecv": gather_send_receive,
}
REDUCES: dict[str, Candidate] = {
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce per slice": reduce_to_each,
    "all_to_all + sum(dim=0)": reduce_by_all_to_all(sum_of_rows),
    "all_to_all + mean(dim=0)": reduce_by_all_to_all(mean_of_rows),
    "all_to_all + add": reduce_by_all_to_all(add_rows),
    "two all_to_alls + add": reduce_two_all_to_alls,
    "isend / irecv + add": reduce_send_receive,
}
# What the library does on gloo, and the collective of torch that is made for it.
CHOSEN = {
    "gather": ("broadcast per slice", "all_gather_into_tensor"),
    "reduce": ("two all_to_alls + add", "reduce_scatter_tensor"),
}


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


def run_rank(args: argparse.Namespace) -> None:
    """Measure every candidate on this rank; rank 0 reports the slowest rank's time."""
    rank, world_size = processes.join_ranks()
    length = int(args.mib * MIB / 4) // world_size
    full = torch.empty(world_size * length)
    b = Buffers(rank, world_size, full, list(full.split(length)), torch.empty(length))
    found: Found = {}
    for kind, candidates in (("gather", GATHERS), ("reduce", REDUCES)):
        if "BENCH_MEMORY" in os.environ:
            # Twice, as the first call also builds connections and touches buffers.
            extra = {
                name: [[peak_extra(b, kind, candidate) for _ in range(2)][-1]]
                for name, candidate in candidates.items()
            }
            found[kind] = {EXTRA: extra}
        else:
            found[kind] = time_candidates(args, b, kind, candidates)
    processes.finish(found)


def time_candidates(
    args: argparse.Namespace, b: Buffers, kind: str, candidates: dict[str, Candidate]
) -> dict[str, dict[str, list[float]]]:
    """Each candidate in turn, `args.warmup` rounds with a check and `args.rounds` measured."""
    names = list(candidates)
    mine: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for index in range(args.warmup + args.rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            sample = call(b, kind, candidates[name])
            if index < args.warmup:
                check(b, kind, name)
            else:
                mine[name].append(sample)
    return {
        what: processes.of_slowest_rank({name: [s[k] for s in mine[name]] for name in names})
        for k, what in enumerate((TIME, HOST, CPU))
    }


def measure(args: argparse.Namespace, world_size: int) -> Found:
    """Time the candidates, then measure their memory, among `world_size` fresh ranks."""
    argv = [f"--mib={args.mib}", f"--rounds={args.rounds}", f"--warmup={args.warmup}"]
    timed = processes.launch_ranks(world_size, argv, args.timeout)
    # Freed memory must go back at once, or the second call would reuse what the first one left.
    memory = processes.launch_ranks(
        world_size, argv, args.timeout, {"BENCH_MEMORY": "1", **peaks.RETURNED}
    )
    return {kind: {**timed[kind], **memory[kind]} for kind in timed}


def compare(args: argparse.Namespace, found: dict[str, Found]) -> Measurement:
    """`found` in each place."""
    figures: list[Figure] = []
    ratios: list[Ratio] = []
    for place, kinds in found.items():
        for kind, measured in kinds.items():
            where = f"{kind}, {place}"
            for what, unit in UNITS.items():
                figures += output.figures_of(f"{where}: {what}", unit, measured[what])
            chosen, plain = CHOSEN[kind]
            ratios.append(Ratio.between(f"{where}: {TIME}", chosen, plain, measured[TIME]))
    about = f"{args.mib:g} MiB of float32; {args.rounds} rounds"
    return options.measurement(args, about, figures, ratios)


def parse() -> argparse.Namespace:
    parser = options.parser(
        __doc__, rate="2gbit", no_limit=False, rounds=15, warmup=2, timeout=300.0
    )
    parser.add_argument("--mib", type=float, default=25.0, help="full buffer, in MiB of fp32")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="loopback runs")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if processes.is_rank():
        return run_rank(args)
    found: dict[str, Found] = {}
    for world_size in args.ranks:
        found[f"{world_size} ranks, loopback"] = measure(args, world_size)
    if not args.no_limit:
        try:
            with slow_link.limited_link(args.rate):
                found[f"2 ranks, {args.rate} link"] = measure(args, 2)
        except slow_link.LinkError as error:
            output.fail(f"{error}; --no-limit measures loopback only")
    output.publish(compare(args, found), args.json, args.plot)


if __name__ == "__main__":
    main()
