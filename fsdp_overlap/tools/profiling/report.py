"""The overlap report: what each rank with a trace did, side by side."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsdp_overlap.tools.profiling.events import Progress
from fsdp_overlap.tools.profiling.names import Kind, Pass
from fsdp_overlap.tools.profiling.overlap import Collective, RankReport
from fsdp_overlap.tools.profiling.timeline import read_rank

# The rows of every table.
ROWS: tuple[tuple[str, Kind, Pass | None], ...] = (
    ("forward all-gathers", "all_gather", "forward"),
    ("backward all-gathers", "all_gather", "backward"),
    ("reduce-scatters", "reduce_scatter", None),
    ("other", "other", None),
)

# How much longer than the others a rank works by itself before it is called slow, as a part of its
# steps.
_SLOW = 0.1


@dataclass(frozen=True)
class Report:
    """Reports on ranks that ran together, sorted by rank. `ranks` is not empty."""

    ranks: tuple[RankReport, ...]

    @property
    def slowest(self) -> RankReport:
        """The rank that the others wait for: the one that waits the least itself."""
        return max(self.ranks, key=lambda rank: rank.own_time)

    @property
    def lag(self) -> float:
        """How much longer `slowest` works by itself than the median of the others, in microseconds
        over all steps; 0 for one rank."""
        others = [rank.own_time for rank in self.ranks if rank is not self.slowest]
        return self.slowest.own_time - statistics.median(others) if others else 0.0

    @property
    def has_straggler(self) -> bool:
        """Whether `slowest` lags by more than a tenth of the trace."""
        return self.lag > _SLOW * self.slowest.duration

    @cached_property
    def waits_for_ranks(self) -> tuple[float | None, ...]:
        """How long each rank's collectives were in flight before the last rank came to them: how
        much longer each took than on the rank where it was shortest. In microseconds over all
        steps; None where ranks did not run the same collectives."""
        same = self._same_collectives()
        if same is None:
            return (None,) * len(self.ranks)
        waits = [0.0] * len(self.ranks)
        for collectives in same:
            shortest = min(c.duration for c in collectives)
            for k, c in enumerate(collectives):
                waits[k] += c.duration - shortest
        return tuple(waits)

    @cached_property
    def clock_offsets(self) -> tuple[float, ...]:
        """What to subtract from each rank's times to have them on the clock of the first rank. A
        collective is taken to end on all ranks at the same moment."""
        same = self._same_collectives()
        if not same:
            return (0.0,) * len(self.ranks)
        return tuple(
            statistics.median(c[k].spans[-1][1] - c[0].spans[-1][1] for c in same)
            for k in range(len(self.ranks))
        )

    def _same_collectives(self) -> list[tuple[Collective, ...]] | None:
        by_rank = [_numbered(rank.collectives) for rank in self.ranks]
        if any(found.keys() != by_rank[0].keys() for found in by_rank):
            return None
        return [tuple(found[key] for found in by_rank) for key in by_rank[0]]


def _numbered(collectives: Sequence[Collective]) -> dict[tuple[Any, ...], Collective]:
    """Return the collectives of units, by kind, name, pass and number among those with the same
    three."""
    seen: dict[tuple[Any, ...], int] = defaultdict(int)
    found = {}
    for c in collectives:
        if c.kind == "other":
            continue
        key = c.kind, c.name, c.pass_
        found[*key, seen[key]] = c
        seen[key] += 1
    return found


def read_report(
    *sources: Any, steps: int | None = None, progress: Progress | None = None
) -> Report:
    """Return the report of one run, from the traces of one or more of its ranks. If any trace does
    not name its rank, the order of the sources numbers the ranks.

    Args:
        sources: each a path of a Chrome trace, gzipped or not, of this library or FSDP2; the loaded
            JSON object; or a finished ``torch.profiler.profile``. torch writes a profile's trace
            only once: to keep the file, call ``export_chrome_trace()`` and give its path.
        steps: how many training steps each trace holds, where the traces do not say so by
            ``profile.step()`` or steps of a torch optimizer.
        progress: is called with how many bytes of all files have been read.

    Raises:
        ValueError: a source is not such a trace, holds no collective and no compute, or two are of
            the same rank; or `steps` is not positive.
    """
    if not sources:
        raise ValueError("no trace given")
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}: a trace holds at least one")
    done = 0
    ranks = []
    for source in sources:
        read = 0

        def report_progress(now: int) -> None:
            nonlocal read
            read = now
            if progress is not None:
                progress(done + now)  # noqa: B023

        try:
            rank = read_rank(source, steps, report_progress)
        except OSError:
            raise
        except Exception as error:  # of what a broken trace may hold
            said = error if isinstance(error, ValueError) else f"not as torch writes it: {error!r}"
            raise ValueError(f"{_describe(source)}: {said}") from error
        if not isinstance(rank.rank, int | None):
            raise ValueError(f"{_describe(source)} says that its rank is {rank.rank!r}")
        done += read
        if not rank.collectives and not rank.compute:
            raise ValueError(
                f"{_describe(source)} holds no collective and no compute: was the profiler on "
                "while the model trained, with ProfilerActivity.CPU, and CUDA on a GPU?"
            )
        ranks.append(rank)
    if len(ranks) > 1 and any(rank.rank is None for rank in ranks):
        ranks = [replace(rank, rank=k) for k, rank in enumerate(ranks)]
    _check_ranks(ranks, sources)
    return Report(tuple(sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0))))


def _check_ranks(ranks: list[RankReport], sources: Sequence[Any]) -> None:
    seen: dict[int, Any] = {}
    for rank, source in zip(ranks, sources, strict=True):
        if rank.rank is None:
            continue
        if rank.rank in seen:
            raise ValueError(
                f"{_describe(source)} and {_describe(seen[rank.rank])} are both of rank "
                f"{rank.rank}: give traces of one run, one for each rank"
            )
        seen[rank.rank] = source


def _describe(source: Any) -> str:
    if isinstance(source, dict):
        return "the loaded trace"
    return "the profile" if hasattr(source, "export_chrome_trace") else str(source)
