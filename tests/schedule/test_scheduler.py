"""What decides, explored: every small program on every small tree of units."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_overlap.features.module_lists import ListSchedule
from fsdp_overlap.features.negotiation.schedule import NegotiatedSchedule, negotiate
from fsdp_overlap.schedule.backward import Backward, GradReducer
from fsdp_overlap.schedule.prefetch import Prefetcher
from fsdp_overlap.schedule.recompute import RecomputingBackward
from fsdp_overlap.schedule.scheduler import Schedule
from support.pages import ROOT
from support.schedule_model import (
    Action,
    Forward,
    Options,
    Rank,
    Seen,
    Wrong,
    count_calls,
    explore,
    subsets,
)

TREES = {
    1: [Forward(0)],
    2: [
        Forward(0, (Forward(1),)),
        Forward(0, (Forward(1), Forward(1))),
        Forward(0),
    ],
    3: [
        Forward(0, (Forward(1), Forward(2))),
        Forward(0, (Forward(2), Forward(1))),
        Forward(0, (Forward(1), Forward(2), Forward(1))),
        Forward(0, (Forward(1, (Forward(2),)),)),
        Forward(0, (Forward(1),)),
    ],
}
"""By the number of units: the forwards that a pass may make."""

OPTIONS = [
    Options(prefetch, after_forward, after_backward)
    for prefetch in (0, 1, 2)
    for after_forward, after_backward in ((None, True), (True, True), (False, True), (False, False))
] + [
    Options(1, runs_ahead=True),
    Options(1, is_registered=True),
    Options(1, has_implicit=True),
    Options(2, True, has_implicit=True),
]


def checkpointed(run: Forward) -> Iterator[Forward]:
    """As it is, and with the forwards of one unit within it run again in backward."""
    yield run
    for unit in dict.fromkeys(inner.unit for inner in run.inner if not inner.inner):
        for kind in ("reentrant", "recomputed"):
            changed = (
                inner._replace(checkpoint=kind) if inner.unit == unit else inner
                for inner in run.inner
            )
            yield run._replace(inner=tuple(changed))


def actions(units: int) -> list[Action]:
    """All that a program of so many units may do at once: one rank's backward reaches all calls,
    the other's any of them."""
    found = [Action("step"), Action("step", starts_sync=True)]
    for run in TREES[units]:
        found += [Action("evaluate", run), Action("forward alone", run)]
        for again in checkpointed(run):
            for skipped in subsets(count_calls(again)):
                for kind in ("train", "accumulate"):
                    found.append(Action(kind, again, (frozenset(), skipped)))
    return found


def programs(units: int, length: int) -> Iterator[tuple[Action, ...]]:
    """All of so many actions that end with one that reduces."""
    every = actions(units)
    last = [action for action in every if action.kind == "train"]
    yield from product(*[every] * (length - 1), last)


def explore_all(units: int, length: int) -> tuple[int, int]:
    """Every program of so many actions on so many units. Returns the numbers of programs and of
    events that ranks saw in them."""
    count = events = 0
    seen: Seen = {}
    for options, program in product(OPTIONS, programs(units, length)):
        count += 1
        try:
            events += explore(units, options, program, seen=seen)
        except Exception as error:
            error.add_note(f"{options}, {program}")
            raise
    return count, events


def test_every_small_program_is_right() -> None:
    found = [explore_all(units, length) for units, length in ((1, 3), (2, 2), (3, 1))]
    count, events = (sum(each) for each in zip(*found, strict=True))
    text = (ROOT / "docs" / "design.md").read_text()
    assert f"{count:,} programs, in which the ranks see {events:,} events" in " ".join(text.split())


IN_A_CHECKPOINT = ("reentrant", "same", "twice", "within")
KINDS = ("", *IN_A_CHECKPOINT, "recomputed", "without gradients")


def of_kinds(count: int) -> Iterator[Forward]:
    """So many units beside each other, with checkpoints of all kinds."""
    for kinds in product(KINDS, repeat=count):
        if all(
            before in IN_A_CHECKPOINT
            for before, kind in zip(("", *kinds), kinds, strict=False)
            if kind in ("same", "within")
        ):
            yield Forward(
                0,
                tuple(Forward(index + 1, checkpoint=kind) for index, kind in enumerate(kinds)),
            )


@pytest.mark.slow
def test_checkpoints_of_all_kinds_beside_each_other_are_right() -> None:
    """They take one unit more than every small program has."""
    seen: Seen = {}
    for run in of_kinds(3):
        for options, skipped in product(OPTIONS, subsets(count_calls(run))):
            explore(4, options, [Action("train", run, (frozenset(), skipped))] * 2, seen=seen)


def explore_a_unit_in_a_checkpoint() -> None:
    """With others before and after it, and with checkpoints of all kinds within."""
    for run, options in product(of_kinds(2), OPTIONS):
        unit = Forward(3, run.inner, "same")
        around = Forward(
            0, (Forward(4, checkpoint="reentrant"), unit, Forward(5, checkpoint="same"))
        )
        explore(6, options, [Action("train", around)] * 2)


def test_a_unit_in_a_checkpoint_with_checkpoints_within_it_is_right() -> None:
    explore_a_unit_in_a_checkpoint()


def test_a_backward_whose_first_event_is_a_forward_is_found_if_taken_for_another() -> None:
    with (
        patch.object(RecomputingBackward, "_enter_nested", nothing),
        pytest.raises(Wrong, match=r"in use|used"),
    ):
        explore_a_unit_in_a_checkpoint()


def explore_after_a_step() -> None:
    """A pass is known, a step gathers what the next one needs first, and anything follows."""
    step = Action("step", starts_sync=True)
    seen: Seen = {}
    for units, options in product((2, 3), OPTIONS):
        every = actions(units)
        for known, following in product(TREES[units][:2], every):
            train = Action("train", known)
            explore(units, options, [train, step, following, train], seen=seen)


@pytest.mark.slow
def test_gathers_after_a_step_are_right_whatever_follows() -> None:
    explore_after_a_step()


def every_unit(schedule: Schedule) -> list[Any]:
    return list(schedule._units())


@pytest.mark.parametrize(
    ("owner", "method", "instead"),
    [
        (Schedule, "next_units", every_unit),
        (Prefetcher, "_take_over", lambda _: None),
    ],
)
def test_what_is_wrong_after_a_step_is_found(
    owner: type, method: str, instead: Callable[..., Any]
) -> None:
    found = pytest.raises(Wrong, match=r"gathered beside|not released")
    with patch.object(owner, method, instead), found:
        explore_after_a_step()


def explore_in_pieces() -> None:
    """Units of two param groups, which may be reduced one by one at the end of a backward."""
    seen: Seen = {}
    for options, units in product(OPTIONS, (1, 2, 3)):
        for action in actions(units):
            if action.kind == "train":
                explore(units, options._replace(pieces=2), [action] * 2, seen=seen)


def test_units_in_pieces_are_right() -> None:
    explore_in_pieces()


def test_the_last_unit_is_reduced_piece_by_piece_as_gradients_arrive() -> None:
    alone = Rank(3, Options(pieces=2))
    alone.act(Action("train", Forward(0, (Forward(1), Forward(2)))), frozenset())
    reduced = [each[1:] for each in alone.collectives if each[0] == "reduce"]
    assert reduced == [(2, 1), (2, 0), (1, 1), (1, 0), (0, 1), (0, 0)]
    assert alone.reduced_in_backward == reduced[:4]  # what the root has waits for the end


def test_pieces_that_do_not_wait_for_the_last_gather_are_found() -> None:
    with (
        patch.object(RecomputingBackward, "_has_reached_all", forever),
        pytest.raises(Wrong, match="ranks issue"),
    ):
        explore_in_pieces()


READING = [
    Forward(0, (Forward(1), Forward(2, (Forward(1),)))),
    Forward(0, (Forward(2, (Forward(1),)), Forward(1))),
    Forward(0, (Forward(1, (Forward(1), Forward(2))),)),
    Forward(0, (Forward(1, (Forward(2), Forward(1), Forward(2))),)),
]
"""Unit 1 owns what unit 2, or the root, reads: it runs around all that runs within them."""


def explore_reading() -> None:
    seen: Seen = {}
    for run, has_empty_root, options in product(READING, (False, True), OPTIONS):
        options = options._replace(has_empty_root=has_empty_root)
        for again in checkpointed(run):
            for skipped in subsets(count_calls(again) - has_empty_root):
                train = Action("train", again, (frozenset(), skipped))
                for before in (train, train._replace(kind="accumulate"), Action("evaluate", run)):
                    explore(4, options, [before, train, Action("step"), train], seen=seen)


def test_units_that_others_read_are_right() -> None:
    explore_reading()
    deep = Forward(0, (Forward(1), Forward(2, (Forward(1, (Forward(3),)),)), Forward(3)))
    for options in OPTIONS:
        explore(4, options, [Action("train", deep), Action("step")] * 3)


def test_an_owner_that_is_freed_while_others_read_it_is_found() -> None:
    found = pytest.raises(Wrong, match=r"freed while it is used|used and not there")
    with patch.object(Schedule, "is_in_use", lambda *_: False), found:
        explore_reading()


def test_checkpoints_around_units_within_each_other_are_right() -> None:
    groups = product(("reentrant",), *[("reentrant", "same")] * 2)
    for kinds in (*groups, ("recomputed",) * 3, ("recomputed", "", "reentrant")):
        outer = [
            Forward(
                3 * at + 1,
                (Forward(3 * at + 2), Forward(3 * at + 3), Forward(3 * at + 2)),
                kind,
            )
            for at, kind in enumerate(kinds)
        ]
        for options in OPTIONS:
            explore(10, options, [Action("train", Forward(0, tuple(outer)))] * 2)


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize(("size", "late"), [(1, 0), (2, 1), (3, 1), (4, 1)])
def test_a_backward_learns_from_the_first_checkpoint_around_how_many_units_others_are(
    size: int, late: int, prefetch: int
) -> None:
    """It expects one, as most are."""
    kinds = ["reentrant", *["same"] * (size - 1)] * 3
    rank = Rank(len(kinds) + 1, Options(prefetch))
    run = Forward(0, tuple(Forward(index + 1, checkpoint=kind) for index, kind in enumerate(kinds)))
    for _ in range(2):
        rank.act(Action("train", run), frozenset())
        rank.act(Action("step"), frozenset())
    (first, in_vain), second = rank.backwards
    assert first <= late
    assert in_vain <= prefetch * late
    assert second == (0, 0)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_units_within_checkpointed_ones_are_gathered_ahead_and_once(prefetch: int) -> None:
    """As experts within a block, of which both run again before the experts go back."""
    blocks = [Forward(unit, (Forward(unit + 1),), "recomputed") for unit in (1, 3, 5, 7)]
    rank = Rank(9, Options(prefetch))
    rank.act(Action("train", Forward(0, tuple(blocks))), frozenset())
    assert rank.backwards == [(0, 0)]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_runs_without_gradients_and_never_again_is_gathered_in_vain_once(
    is_frozen: bool,
) -> None:
    """And never if it is frozen."""
    rank = Rank(4, Options())
    kinds = ("", "without gradients", "")
    run = Forward(0, tuple(Forward(index + 1, checkpoint=kind) for index, kind in enumerate(kinds)))
    if is_frozen:
        rank.units[2].gradients = []
    for _ in range(2):
        rank.act(Action("train", run), frozenset())
    assert [in_vain for _, in_vain in rank.backwards] == [0 if is_frozen else 1, 0]


def nothing(*_: object, **__: object) -> None:
    pass


def forever(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("owner", "method", "instead", "message"),
    [
        (Backward, "_walk_to_end", nothing, "ranks issue"),
        (RecomputingBackward, "_advance_to_checkpoint", nothing, "ranks issue|gathered beside"),
        (Backward, "_leave", nothing, "gathered beside"),
        (Prefetcher, "flush", nothing, "gathered beside"),
        (Prefetcher, "finish_pass", nothing, "not released|gathered beside"),
        (Prefetcher, "_make_room", nothing, "gathered beside"),
        (GradReducer, "_has_room", forever, "reduce inputs"),
        (GradReducer, "issue_rest", nothing, "ranks issue|is left|is not freed"),
    ],
)
def test_what_decides_wrongly_is_found(
    owner: type, method: str, instead: Callable[..., Any], message: str
) -> None:
    with patch.object(owner, method, instead), pytest.raises(Wrong, match=message):
        explore_all(3, 1)


def was_uneven(options: Options) -> Rank:
    rank = Rank(3, options)
    negotiate(rank.schedule)
    rank.schedule.expect_same()
    return rank


VARIANTS: dict[str, Callable[[Options], Rank]] = {
    "lists": lambda options: Rank(3, options, ListSchedule),
    "negotiated": lambda options: Rank(3, options, NegotiatedSchedule),
    "was uneven": was_uneven,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_issue_the_same_where_nothing_needs_them(variant: str) -> None:
    for options, program in product(OPTIONS, programs(3, 1)):
        ranks = [Rank(3, options), VARIANTS[variant](options)]
        for rank in ranks:
            for action in (*program, *program):
                rank.act(action, action.skips[1] if action.skips else frozenset())
        assert ranks[1].collectives == ranks[0].collectives, program


def test_deciding_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import fsdp_overlap.features.negotiation.schedule"
    )
    # The package's own __init__ imports torch, and is left out.
    alone = "import types, sys; p = types.ModuleType('fsdp_overlap'); p.__path__ = [sys.argv[1]]; "
    command = [sys.executable, "-c", f"{alone}sys.modules['fsdp_overlap'] = p; {program}"]
    package = str(ROOT / "fsdp_overlap")
    done = subprocess.run([*command, package], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
