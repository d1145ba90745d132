"""Diagnoses of exposed communication, in plain words."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from fsdp_overlap.tools.profiling.intervals import measure, union
from fsdp_overlap.tools.profiling.names import CHECK, CONFIRMATION, Kind, Pass
from fsdp_overlap.tools.profiling.overlap import Collective, RankReport
from fsdp_overlap.tools.profiling.report import Report

Cause = Literal[
    "slow rank",
    "shared group",
    "issued late",
    "short compute",
    "edge",
    "more communication than compute",
    "not of a unit",
    "idle",
    "small causes",
    "hidden",
    "unknown kernels",
    "other devices",
    "left out",
]

# A cause that costs a smaller part of a step is not reported.
_WORTH = 0.02
# A collective with less room than this part of its duration cannot have been hidden.
_NO_ROOM = 0.1
_IDLE = 0.15
_MOST = 5  # names that a finding lists
# What collectives that serve no single unit are for, by the beginnings of their names.
_COPIES = "what travels between replicas, once in a step"
_REASONS = {
    CHECK: "the check of the order at the end of backward, where ranks meet",
    CONFIRMATION: "confirmations: where a step does something else than the one before, ranks "
    "first agree that all of them do; a step like the one before has none, so profile one that is",
    "all_to_all of Muon": "Muon's exchange of cut matrices, which the layout TensorAtomic() does "
    "without",
    "all_reduce of ": _COPIES,
    "copies_": _COPIES,
}
_NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


@dataclass(frozen=True)
class Diagnosis:
    """Something that costs time, or may.

    Args:
        cause: of what kind it is.
        cost: how many microseconds of a step it costs, at most.
        text: what was found, how much it costs, and what to do.
    """

    cause: Cause
    cost: float
    text: str


def diagnose(report: Report) -> list[Diagnosis]:
    """Return the findings about the rank that the others wait for, the costliest first, and then
    what no rank's report counts."""
    rank = report.slowest
    found = [*_slow_rank(report), *_exposed(rank), *_limits(rank)]
    # A shared group is reported even where it costs nothing yet.
    if all(finding.cost * rank.steps <= _WORTH * rank.duration for finding in found):
        found.append(_nothing(rank))
    return sorted(found, key=lambda finding: -finding.cost) + list(_not_counted(report))


def _not_counted(report: Report) -> Iterator[Diagnosis]:
    if kernels := _longest(report, "unknown_kernels"):
        yield Diagnosis(
            "unknown kernels",
            sum(kernels.values()),
            "these kernels may be collectives, judging by their names or streams, but count as "
            f"compute, under which other collectives count as hidden: {_list(kernels)} a step",
        )
    if devices := _longest(report, "other_devices"):
        yield Diagnosis(
            "other devices",
            0.0,
            "the report covers one device; kernels of other devices are left out: "
            f"{_list({f'device {name}': time for name, time in devices.items()})} a step",
        )
    if left_out := sum(rank.left_out for rank in report.ranks):
        yield Diagnosis(
            "left out",
            0.0,
            f"left out: {left_out} event{'s' * (left_out > 1)} with a duration that is negative or "
            "longer than a day, as events have that had not ended when the profiler stopped",
        )


def _longest(report: Report, field: str) -> dict[str, float]:
    """Return what each of a field's names took in a step, on the rank where it took the longest, in
    microseconds, the longest first."""
    times: dict[str, float] = {}
    for rank in report.ranks:
        for name, time in getattr(rank, field):
            times[name] = max(time / rank.steps, times.get(name, 0.0))
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _list(times: dict[str, float]) -> str:
    shown = [f"{name} {_ms(time)}" for name, time in list(times.items())[:_MOST]]
    more = len(times) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _slow_rank(report: Report) -> Iterator[Diagnosis]:
    if not report.has_straggler:
        return
    rank = report.slowest
    others = "the other" if len(report.ranks) == 2 else "the others"
    more_compute = rank.compute_time - min(each.compute_time for each in report.ranks)
    if more_compute > report.lag / 2:
        busy = "compute that it does alone, or a slower device"
    else:
        busy = "what it does alone that is no compute, such as reading data"
    lag = report.lag / rank.steps
    yield Diagnosis(
        "slow rank",
        lag,
        f"rank {rank.rank} is slow: it works {_ms(lag)} a step longer than {others}, and the "
        f"difference is spent waiting in collectives; look for {busy}",
    )


def _exposed(rank: RankReport) -> Iterator[Diagnosis]:
    worth = _WORTH * rank.duration
    of_units = [c for c in rank.collectives if c.kind != "other"]
    edges = _edges(rank)
    inner = [c for c in of_units if id(c) not in edges]
    waiting = [c for c in inner if c.pass_ == "backward" and not _is_late(c)]
    if shared := _shared_group(waiting):
        yield Diagnosis(
            "shared group",
            _cost(waiting, rank),
            f"all-gathers and reduce-scatters share {shared}, where they run one after the other; "
            f"in backward {_ms(_cost(waiting, rank))} a step are exposed beside compute; give each "
            "kind a group of its own (separate_reduce_scatter_group=True, the default of "
            "FsdpContext; FSDP2 has set_separate_reduce_scatter_group() from torch 2.13 on)",
        )
        inner = [c for c in inner if c.pass_ == "forward" or _is_late(c)]
    for pass_ in ("forward", "backward"):
        for kind in ("all_gather", "reduce_scatter"):
            same = [c for c in inner if c.kind == kind and c.pass_ == pass_]
            yield from _of_kind(kind, pass_, same, rank, worth)
    at_edges = [c for c in of_units if id(c) in edges]
    if _sum(at_edges) > worth:
        yield _at_edges(at_edges, rank)
    others = [c for c in rank.collectives if c.kind == "other"]
    if _sum(others) > worth:
        cost = _ms(_cost(others, rank))
        yield Diagnosis(
            "not of a unit",
            _cost(others, rank),
            f"collectives of no unit are exposed {cost} a step, most of it {_most_of(others)}",
        )


def _most_of(others: list[Collective]) -> str:
    """Return the sort of collective that is exposed the longest in total, in words."""
    exposed: dict[str, float] = defaultdict(float)
    for c in others:
        known = (words for prefix, words in _REASONS.items() if c.name.startswith(prefix))
        exposed[next(known, f"{c.name}: see who calls it")] += c.exposed
    return max(exposed, key=lambda words: exposed[words])


def _of_kind(
    kind: Kind, pass_: Pass, same: list[Collective], rank: RankReport, worth: float
) -> Iterator[Diagnosis]:
    late = [c for c in same if _is_late(c)]
    if len(late) > len(same) / 2 and _sum(late) > worth:
        what = f"{_each(late, rank)} of {_each(same, rank)} {pass_} {_NAMES[kind]}s"
        yield Diagnosis(
            "issued late",
            _cost(late, rank),
            f"{what} are waited for as soon as they are issued, with no compute in between: "
            f"{_ms(_cost(late, rank))} a step are exposed; {_issue_ahead(late, kind, pass_)}",
        )
        same = [c for c in same if not _is_late(c)]
    if _sum(same) <= worth:
        return
    worst = max(same, key=lambda c: c.exposed)
    some = [c for c in same if c.name == worst.name]
    duration, exposed = sum(c.duration for c in some) / len(some), _sum(some) / len(some)
    room = sum(c.room for c in some) / len(some)
    more = "" if len({c.name for c in same}) == 1 else f"; with others {_ms(_cost(same, rank))}"
    why = (
        f"the compute between its issue and the wait for it takes {_ms(room)}; compute more "
        "between collectives (a larger batch), merge small units"
        + (", raise prefetch" if kind == "all_gather" else "")
        if room < duration
        else "there is compute enough beside it, but it comes late, behind others in its lane"
    )
    yield Diagnosis(
        "short compute",
        _cost(same, rank),
        f"the {_name(worst)} in {pass_} is exposed {exposed / duration:.0%} "
        f"({_ms(_cost(some, rank))} a step{more}): it takes {_ms(duration)}, and {why}; or send "
        "fewer bytes (bfloat16)",
    )


def _issue_ahead(late: list[Collective], kind: Kind, pass_: Pass) -> str:
    if sum(c.blocks for c in late) > len(late) / 2:
        return (
            "the call that issues them does not return before they are done, as with FSDP2 on a "
            "CPU, so that nothing can hide them"
        )
    if kind == "reduce_scatter":
        return "merge units that are too small to hide one"
    if late[0].engine == "FSDP":
        return f"gather ahead with set_modules_to_{pass_}_prefetch()"
    return (
        "gather ahead with FsdpContext(prefetch=1); what activation checkpointing recomputes in "
        "backward is not gathered ahead"
        if pass_ == "backward"
        else "gather ahead with FsdpContext(prefetch=1)"
    )


def _at_edges(at_edges: list[Collective], rank: RankReport) -> Diagnosis:
    cost = _cost(at_edges, rank)
    if len({c.name for c in rank.collectives if c.kind != "other"}) == 1:
        text = (
            f"the model is one unit, {at_edges[0].name}, so that nothing computes beside its "
            f"collectives: {_ms(cost)} a step are exposed; call fully_shard() on its blocks first"
        )
    else:
        worst = max(at_edges, key=lambda c: c.exposed)
        text = (
            "the first all-gathers of a pass and the last reduce-scatters have nothing to run "
            f"under: {_ms(cost)} a step, most of it for the {_name(worst)}; make the first and the "
            "last unit small"
        )
    return Diagnosis("edge", cost, text)


def _limits(rank: RankReport) -> Iterator[Diagnosis]:
    excess = rank.communication_time - rank.compute_time
    if excess > _WORTH * rank.duration and rank.compute_time:
        yield Diagnosis(
            "more communication than compute",
            excess / rank.steps,
            f"communication takes {_ms(rank.communication_time / rank.steps)} a step and compute "
            f"{_ms(rank.compute_time / rank.steps)}: {_ms(excess / rank.steps)} cannot hide "
            "whatever the schedule; compute more between collectives (a larger batch, "
            "accumulation without synchronization), or send fewer bytes (bfloat16)",
        )
    if rank.idle_time > _IDLE * rank.duration:
        yield Diagnosis(
            "idle",
            rank.idle_time / rank.steps,
            f"for {_ms(rank.idle_time / rank.steps)} a step there is neither compute nor a wait "
            "for communication: the host is busy with something else, such as Python or data",
        )


def _nothing(rank: RankReport) -> Diagnosis:
    """Return what to report where no cause costs enough to be reported."""
    cost = rank.exposed_time / rank.steps
    part = rank.exposed_time / rank.duration if rank.duration else 0.0
    if not rank.collectives:
        return Diagnosis("hidden", 0.0, "nothing travels: the trace holds no collective")
    if part > _WORTH:
        return Diagnosis(
            "small causes",
            cost,
            f"{part:.1%} of a step is exposed, and no cause by itself costs {_WORTH:.0%}",
        )
    return Diagnosis(
        "hidden", cost, f"communication is hidden: what is exposed takes {part:.1%} of a step"
    )


def _edges(rank: RankReport) -> set[int]:
    """Return the ids of gathers before the compute of their pass, and of reduce-scatters after
    it."""
    edges = set()
    for same in rank.passes:
        start, end = same[0].start, max(c.spans[-1][1] for c in same)
        # Half of what an average unit computes: as little counts as no compute.
        little = rank.computed(start, end) / len({c.name for c in same}) / 2
        for c in same:
            gap = (start, c.start) if c.kind == "all_gather" else (c.start, end)
            if _is_late(c) and rank.computed(*gap) <= little:
                edges.add(id(c))
    return edges


def _is_late(c: Collective) -> bool:
    return c.room < _NO_ROOM * c.duration


def _shared_group(of_units: Iterable[Collective]) -> str | None:
    """Return the process group that both kinds run in, in words; None if they run in two."""
    groups: dict[str, set[str | None]] = {"all_gather": set(), "reduce_scatter": set()}
    lanes: dict[str, set[str]] = {"all_gather": set(), "reduce_scatter": set()}
    for c in of_units:
        groups[c.kind].add(c.group)
        lanes[c.kind].update(c.lanes)
    if both := (groups["all_gather"] & groups["reduce_scatter"]) - {None}:
        return f"the process group {both.pop()}"
    if any(groups.values()) and None not in groups["all_gather"]:
        return None
    return "one process group" if lanes["all_gather"] & lanes["reduce_scatter"] else None


def _sum(collectives: Iterable[Collective]) -> float:
    return sum(c.exposed for c in collectives)


def _cost(collectives: Iterable[Collective], rank: RankReport) -> float:
    return measure(union(span for c in collectives for span in c.exposed_spans)) / rank.steps


def _each(collectives: list[Collective], rank: RankReport) -> str:
    return f"{len(collectives) / rank.steps:g}"


def _name(c: Collective) -> str:
    return f"{_NAMES[c.kind]} of {c.name}"


def _ms(microseconds: float) -> str:
    milliseconds = microseconds / 1e3
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"
