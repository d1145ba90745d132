"""The figures of reports as tables, for a terminal and for a page."""

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_overlap.tools.profiling.overlap import Collective, RankReport, Total
from fsdp_overlap.tools.profiling.report import ROWS, Report

UNKNOWN = "-"
_KIND_NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "other": "other"}


@dataclass(frozen=True)
class ReportTable:
    """labels: how many columns, from the left, are words; the others are figures."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1


def ranks_table(reports: Mapping[str, Report]) -> ReportTable:
    """Return where a step's time goes, a column for each rank."""
    ranks = [
        (name, rank, waits)
        for name, report in reports.items()
        for rank, waits in zip(report.ranks, report.waits_for_ranks, strict=True)
    ]
    header = ("ms a step", *(_column(name, rank, len(reports) > 1) for name, rank, _ in ranks))
    rows = (
        ("step", *(_ms(r.duration, r) for _, r, _ in ranks)),
        ("compute", *(_ms(r.compute_time, r) for _, r, _ in ranks)),
        ("  of it in GEMMs", *(_ms(r.gemm_time, r) for _, r, _ in ranks)),
        ("communication", *(_ms(r.communication_time, r) for _, r, _ in ranks)),
        ("  of it exposed", *(_ms(r.exposed_time, r) for _, r, _ in ranks)),
        ("  waiting for a rank", *(_ms(waits, r) for _, r, waits in ranks)),
        ("issuing collectives", *(_ms(r.engine_time, r) for _, r, _ in ranks)),
        ("none of these", *(_ms(r.idle_time, r) for _, r, _ in ranks)),
        ("bound", *(_ms(r.bound, r) for _, r, _ in ranks)),
        ("step / bound", *(_ratio(r.duration, r.bound) for _, r, _ in ranks)),
    )
    return ReportTable(header, rows)


def kinds_table(reports: Mapping[str, Report]) -> ReportTable:
    """Return how many collectives of each kind there were, how large, and how much of them was
    hidden, on the slowest rank of each report."""
    several = len(reports) > 1
    header = (
        "in a step",
        "of",
        "under compute",
        "MB",
        "hidden",
        "in flight ms",
        "exposed ms",
        "GB/s",
    )
    rows = []
    for label, kind, pass_ in ROWS:
        totals = [
            (_column(name, report.slowest, several), report.slowest)
            for name, report in reports.items()
        ]
        for who, rank in totals:
            if (total := rank.total(kind, pass_)).count:
                rows.append((label, who, *_cells(rank, total)))
                label = ""  # once, in the first row of its kind
    return ReportTable(header, tuple(rows), labels=2)


def collectives_table(rank: RankReport, most: int) -> ReportTable:
    """Return the collectives of one rank that were exposed the longest, at most `most` of them."""
    header = (
        "collective",
        "pass",
        "at ms",
        "MB",
        "in flight ms",
        "exposed ms",
        "exposed",
        "held up",
        "ran under",
        "lane",
    )
    worst = sorted(rank.collectives, key=lambda c: -c.exposed)[:most]
    return ReportTable(header, tuple(_row(c, rank) for c in worst), labels=2)


def describe(c: Collective) -> str:
    """Return what the collective is: "all-gather of blocks.0"."""
    return c.name if c.kind == "other" else f"{_KIND_NAMES[c.kind]} of {c.name}"


def describe_under(c: Collective) -> str:
    """Return what the collective ran under: "backward blocks.1 8.5 ms"."""
    return ", ".join(f"{label} {time / 1e3:.1f} ms" for label, time in c.under) or "nothing"


def _row(c: Collective, rank: RankReport) -> tuple[str, ...]:
    return (
        describe(c),
        c.pass_ or "",
        f"{(c.start - rank.window[0]) / 1e3:.1f}",
        UNKNOWN if c.nbytes is None else f"{c.nbytes / 1e6:.2f}",
        f"{c.duration / 1e3:.2f}",
        f"{c.exposed / 1e3:.2f}",
        _part(c.exposed, c.duration),
        c.held_up or "",
        describe_under(c),
        ", ".join(c.lanes),
    )


def _cells(rank: RankReport, total: Total) -> tuple[str, ...]:
    speed = total.bandwidth
    return (
        f"{total.under_compute / rank.steps:g} of {total.count / rank.steps:g}",
        UNKNOWN if total.nbytes is None else f"{total.nbytes / rank.steps / 1e6:.2f}",
        UNKNOWN if total.hidden is None else f"{total.hidden:.0%}",
        _ms(total.duration, rank),
        _ms(total.exposed, rank),
        UNKNOWN if speed is None else f"{speed / 1e9:.2f}",
    )


def _column(name: str, rank: RankReport, several: bool) -> str:
    who = "rank" if rank.rank is None else f"rank {rank.rank}"
    return f"{name} {who}" if several else who


def _ms(microseconds: float | None, rank: RankReport) -> str:
    return UNKNOWN if microseconds is None else f"{microseconds / rank.steps / 1e3:.1f}"


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else UNKNOWN


def _part(a: float, b: float) -> str:
    return f"{a / b:.0%}" if b else UNKNOWN
