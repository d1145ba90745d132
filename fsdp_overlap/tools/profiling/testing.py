"""Assertions about overlap, for users' own tests."""

from collections.abc import Iterator
from typing import Any

from fsdp_overlap.tools.profiling.names import Kind, Pass
from fsdp_overlap.tools.profiling.overlap import EXPOSED_AT_MOST, RankReport
from fsdp_overlap.tools.profiling.report import Report, read_report


def assert_overlapped(
    source: Any,
    *,
    all_gathers: int | None = None,
    forward_all_gathers: int | None = None,
    backward_all_gathers: int | None = None,
    reduce_scatters: int | None = None,
    exposed_at_most: float = EXPOSED_AT_MOST,
    steps: int | None = None,
) -> None:
    """Assert how many collectives, at least, ran under compute on every rank and in every pass.

    For `n` equal blocks under one context, `all_gathers=n - 1, reduce_scatters=n - 1` holds: only
    the first gather of forward and the last reduce-scatter have nothing to run under. Passes
    without such collectives, for example of microbatches that do not reduce, are left out. But at
    least as many passes as there are steps must have them.

    Args:
        source: a :class:`Report`, or one rank's trace.
        all_gathers: how many in each forward and in each backward.
        forward_all_gathers: another number for forwards.
        backward_all_gathers: another number for backwards.
        reduce_scatters: how many in each backward.
        exposed_at_most: a collective counts as under compute if compute waited for it for at most
            this share of its time in flight, and there was compute for as long as the rest
            (:meth:`Collective.is_hidden`). From 0 to less than 1. By default a half; 0.05 asks for
            nearly all of it to be hidden.
        steps: as :func:`read_report` takes it, for a trace.

    Raises:
        AssertionError: fewer did. The message lists those that did not, and how long each was
            exposed.
        ValueError: the source is no trace, nothing is asked for, or `exposed_at_most` is no share.
    """
    forward = all_gathers if forward_all_gathers is None else forward_all_gathers
    backward = all_gathers if backward_all_gathers is None else backward_all_gathers
    wanted: list[tuple[Kind, Pass, int | None]] = [
        ("all_gather", "forward", forward),
        ("all_gather", "backward", backward),
        ("reduce_scatter", "backward", reduce_scatters),
    ]
    if all(count is None for _, _, count in wanted):
        raise ValueError("say how many: all_gathers=n - 1, reduce_scatters=n - 1")
    if not 0 <= exposed_at_most < 1:  # at 1 everything would count
        raise ValueError(
            f"exposed_at_most={exposed_at_most}: give a share of a collective, from 0, which asks "
            "for all of it to be hidden, to less than 1"
        )
    report = source if isinstance(source, Report) else read_report(source, steps=steps)
    wrong = [
        line
        for rank in report.ranks
        for kind, pass_, count in wanted
        if count
        for line in _missing(rank, kind, pass_, count, exposed_at_most)
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))


def _missing(
    rank: RankReport, kind: Kind, pass_: Pass, count: int, exposed_at_most: float
) -> Iterator[str]:
    who = "" if rank.rank is None else f"rank {rank.rank}: "
    what = f"{pass_} {kind.replace('_', '-')}s"
    passes = [
        same
        for found in rank.passes
        if (same := [c for c in found if (c.kind, c.pass_) == (kind, pass_)])
    ]
    if len(passes) < rank.steps:
        yield f"{who}{len(passes)} passes have {what}, in {rank.steps} steps"
    for same in passes:
        exposed = [c for c in same if not c.is_hidden(exposed_at_most)]
        hidden = len(same) - len(exposed)
        if hidden >= count:
            continue
        at = (same[0].start - rank.window[0]) / 1e3
        yield (
            f"{who}{hidden} of {len(same)} {what} ran under compute at {at:.1f} ms, not {count}, "
            f"with at most {exposed_at_most:.0%} of each exposed:"
        )
        for c in exposed:
            yield (
                f"  {c.name}: in flight {c.duration / 1e3:.2f} ms, exposed {c.exposed / 1e3:.2f}, "
                f"compute until the wait {c.room / 1e3:.2f}"
            )
