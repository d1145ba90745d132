"""Assertions about overlap, for users' own tests."""

from typing import Any

from fsdp_overlap.profiling.names import Kind, Pass
from fsdp_overlap.profiling.overlap import RankReport
from fsdp_overlap.profiling.report import Report, read_report


def assert_overlapped(
    source: Any,
    *,
    all_gathers: int = 0,
    forward_all_gathers: int | None = None,
    backward_all_gathers: int | None = None,
    reduce_scatters: int = 0,
    steps: int | None = None,
) -> None:
    """Asserts that at least so many collectives ran under compute in every step and rank.

    For `n` equal blocks under one context, `all_gathers=n - 1, reduce_scatters=n - 1` holds: only
    the first gather of a pass and the last reduce-scatter have nothing to run under. What counts
    as under compute says `Collective.ran_under_compute`.

    source: a `Report`, or what `read_report` takes for one rank, with `steps`.
    all_gathers: in forward, and as many in backward, where `forward_all_gathers` and
    `backward_all_gathers` say nothing else.

    Raises:
        AssertionError: fewer did; lists those that did not, and what they were exposed for.
        ValueError: the source is no trace.
    """
    report = source if isinstance(source, Report) else read_report(source, steps=steps)
    wanted: list[tuple[Kind, Pass, int]] = [
        ("all_gather", "forward", _either(forward_all_gathers, all_gathers)),
        ("all_gather", "backward", _either(backward_all_gathers, all_gathers)),
        ("reduce_scatter", "backward", reduce_scatters),
    ]
    wrong = [
        line
        for rank in report.ranks
        for kind, pass_, count in wanted
        for line in _missing(rank, kind, pass_, count)
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))


def _either(one: int | None, other: int) -> int:
    return other if one is None else one


def _missing(rank: RankReport, kind: Kind, pass_: Pass, count: int) -> list[str]:
    total = rank.total(kind, pass_)
    if total.under_compute >= count * rank.steps:
        return []
    who = "" if rank.rank is None else f"rank {rank.rank}: "
    what = f"{pass_} {kind.replace('_', '-')}s"
    lines = [
        f"{who}{total.under_compute} {what} of {total.count} ran under compute in {rank.steps} "
        f"steps, not {count * rank.steps}:"
    ]
    for c in rank.collectives:
        if (c.kind, c.pass_) == (kind, pass_) and not c.ran_under_compute:
            lines.append(
                f"  {c.name} at {(c.start - rank.window[0]) / 1e3:.1f} ms: in flight "
                f"{c.duration / 1e3:.1f} ms, exposed {c.exposed / 1e3:.1f}, compute until the wait "
                f"{c.room / 1e3:.1f}"
            )
    return lines
