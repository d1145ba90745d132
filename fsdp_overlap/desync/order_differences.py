"""Differences between the collectives that ranks issued, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_overlap.desync.order_check import (
    FAILED_ELSEWHERE,
    KINDS,
    N_KINDS,
    NEW_UNIT,
    NOTHING,
    Interval,
)


def first_difference(
    histories: Mapping[int, Sequence[Interval]],
) -> tuple[int, dict[int, int]] | None:
    """Return where ``histories``, by rank, first differ: the position since a check, and the codes
    there of the ranks that have come that far. ``None`` if they do not differ."""
    for number in sorted({part.number for history in histories.values() for part in history}):
        parts = {
            rank: part
            for rank, history in histories.items()
            for part in history
            if part.number == number
        }
        first = max(part.first for part in parts.values())
        last = max(part.first + len(part.codes) for part in parts.values())
        for position in range(first, last):
            codes = {
                rank: code
                for rank, part in parts.items()
                if (code := part.at(position)) is not None
            }
            if len(set(codes.values())) > 1:
                return position, codes
    return None


def describe_difference(
    position: int,
    codes: Mapping[int, int],
    units: Mapping[int, Sequence[str]],
    exchanged: bool,
) -> str:
    """Return what ranks issued at ``position`` since the last check. ``codes`` are those of the
    collectives and ``units`` the labels of all param groups, both by rank. ``exchanged`` is whether
    the collectives have exchanged data."""
    names = {rank: _describe(code, units[rank]) for rank, code in sorted(codes.items())}
    if len(set(names.values())) == 1:
        places = ", ".join(
            f"{codes[rank] // N_KINDS + 1} of {len(units[rank])} on rank {rank}" for rank in names
        )
        return (
            "ranks have different units, or made them in another order: at "
            f"{names.popitem()[1]}, which is unit {places}. Every rank must build the same model "
            "and shard it in the same order"
        )
    issued = "; ".join(f"rank {rank}: {what}" for rank, what in names.items())
    harm = ""
    if exchanged:
        harm = (
            ". Their data was exchanged between the wrong units, so gradients and parameters are "
            "wrong"
        )
    return (
        f"ranks ran different units: collective {position} since the last backward was "
        f"{issued}{harm}: every rank must run the same units in the same order. Look for a forward "
        "or backward that only some ranks run, such as an evaluation under `if rank == 0`, or a "
        "branch on data. To allow it, use fully_shard(conditional=True) or ctx.uneven()"
    )


def _describe(code: int, units: Sequence[str]) -> str:
    if code == FAILED_ELSEWHERE:
        return "an error: on another mesh of this rank, ranks ran different units"
    if code == NOTHING:
        return "nothing, its backward ended"
    if code == NEW_UNIT:
        return "a new unit, given to fully_shard()"
    index, kind = divmod(code, N_KINDS)
    return f"{KINDS[kind]} of unit {units[index]!r}"
