"""Ranks that run different units, explored: programs of ranks that exchange messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, permutations, product
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_overlap.features.negotiation.gathers import NegotiatedPrefetcher
from fsdp_overlap.features.negotiation.messages import Negotiation
from fsdp_overlap.features.negotiation.schedule import NegotiatedBackward
from support.negotiating import Ranks, Step, each_its_own
from support.schedule_model import Action, AutogradEngine, Forward, Options, Rank

UNITS = 6
CONDITIONAL = (1, 2, 3, 5)
LEAF, TOWER, SHARED = Forward(1), Forward(2, (Forward(3), Forward(5))), Forward(4)
OPTIONS = [
    Options(prefetch, after_forward, after_backward)
    for prefetch in (0, 1, 2)
    for after_forward, after_backward in ((None, True), (True, True), (False, True), (False, False))
]


def orders() -> Iterator[tuple[Forward, ...]]:
    """What a rank may run within the root: some of the conditional units, around the shared one."""
    for count in range(3):
        for chosen in permutations((LEAF, TOWER), count):
            for at in range(count + 1):
                yield (*chosen[:at], SHARED, *chosen[at:])
    yield (LEAF, LEAF, SHARED)
    yield (TOWER, SHARED, TOWER)
    yield (Forward(3), SHARED)


def explore(count: int, options: Options, program: Sequence[Step]) -> Ranks:
    ranks = Ranks(count, UNITS, options, CONDITIONAL)
    try:
        ranks.run(program)
    except Exception as error:
        error.add_note(f"{options}, {program}")
        raise
    return ranks


def checkpointed(run: Forward, kinds: Mapping[int, str]) -> Forward:
    """Return ``run`` with units that run again in backward, of the ``kinds`` by unit."""
    if run.inner and not kinds.get(run.unit):
        return run._replace(inner=tuple(checkpointed(each, kinds) for each in run.inner))
    return run._replace(checkpoint=kinds.get(run.unit, ""))


def explore_all(count: int, has_empty_root: bool) -> int:
    """Explore each combination of what ranks may run, with two ranks under all options, and with
    kinds of checkpoints and actions in turns."""
    turns = cycle(product(("", "recomputed", "reentrant"), ("train", "accumulate", "evaluate")))
    every_option = cycle(OPTIONS)
    programs = 0
    for runs in product([None, *(Forward(0, inner) for inner in orders())], repeat=count):
        for options in OPTIONS if count == 2 else [next(every_option)]:
            checkpoint, kind = next(turns)
            kinds = dict.fromkeys(range(checkpoint == "reentrant", UNITS), checkpoint)
            these = [run and checkpointed(run, kinds) for run in runs]
            options = options._replace(has_empty_root=has_empty_root)
            explore(count, options, [each_its_own(*these, kind=kind), each_its_own(*these)])
            programs += 1
    return programs


FURTHER = {"recomputed": ("recomputed with",), "reentrant": ("same", "within"), "twice": ("same",)}
"""What a run may be in the checkpoint that began with the run before it, by that one's kind."""


def joined(generator: random.Random, runs: Sequence[Forward]) -> list[Forward]:
    """Return ``runs``, of which some share a checkpoint with the one before."""
    found: list[Forward] = []
    first = ""
    for run in runs:
        if first and generator.random() < 0.3:
            found.append(Forward(run.unit, run.inner, generator.choice(FURTHER[first])))
        else:
            found.append(run)
            first = run.checkpoint
    return found


def random_program(generator: random.Random, count: int) -> list[Step]:
    """Several actions, in which units run again in backward, and what runs differs."""
    choose = generator.choice
    kinds = {unit: choose(("", "recomputed", "reentrant", "twice")) for unit in range(1, UNITS)}

    def forward() -> Forward:
        parts = [LEAF, TOWER, Forward(2), Forward(3), Forward(5), Forward(2, (Forward(5),))]
        runs = [choose(parts) for _ in range(generator.randint(0, 3))]
        runs.insert(generator.randint(0, len(runs)), SHARED)
        runs = [checkpointed(run, kinds) for run in runs]
        return Forward(0, tuple(joined(generator, runs)))

    def some() -> Forward | None:
        return forward() if generator.random() < 0.85 else None

    program = []
    for _ in range(generator.randint(1, 3)):
        kind = choose(("train", "train", "accumulate", "evaluate", "step"))
        if kind == "step":
            program.append(Step((Action("step"),) * count))
        else:
            program.append(each_its_own(*(some() for _ in range(count)), kind=kind))
    last = choose(("train", "train", "evaluate"))
    return [*program, each_its_own(*(some() for _ in range(count)), kind=last)]


def explore_random(programs: int, seed: int = 0) -> None:
    generator = random.Random(seed)
    for _ in range(programs):
        count = generator.choice((2, 2, 3))
        options = generator.choice(OPTIONS)._replace(has_empty_root=generator.random() < 0.5)
        explore(count, options, random_program(generator, count))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_empty_root", [False, True])
def test_two_ranks_that_run_anything_issue_the_same(has_empty_root: bool) -> None:
    assert explore_all(2, has_empty_root) == 15**2 * len(OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("has_empty_root", [False, True])
def test_three_ranks_that_run_anything_issue_the_same(has_empty_root: bool) -> None:
    assert explore_all(3, has_empty_root) == 15**3


@pytest.mark.slow
def test_programs_with_checkpoints_accumulation_and_evaluation_are_right() -> None:
    explore_random(2500)


def test_what_ranks_always_run_alike_takes_two_messages_a_step() -> None:
    """One at the begin of a pass, and one at that of its backward."""
    ranks = Ranks(2, UNITS, Options(), CONDITIONAL)
    run = Forward(0, (TOWER, SHARED, LEAF))
    step = each_its_own(run, run)
    ranks.run([step] * 2)
    before = ranks.ranks[0].messages
    again = Ranks(2, UNITS, Options(), CONDITIONAL)
    again.run([step] * 4)
    assert again.ranks[0].messages - before == 2 * 2


def test_what_ranks_expect_is_gathered_ahead() -> None:
    """All but what a message comes before, whether a rank runs the tower or not."""
    runs = Forward(0, (TOWER, SHARED)), Forward(0, (SHARED,))
    ranks = explore(2, Options(), [each_its_own(*runs)] * 3)
    for rank in ranks.ranks:
        rank.stats.reset()
    ranks.run([each_its_own(*runs)])
    first, second = (rank.stats.prefetch_misses for rank in ranks.ranks)
    assert first == 2  # the root and the tower
    assert second == 2  # the root, and what follows that it shadowed


def test_a_unit_that_no_rank_runs_is_neither_gathered_nor_reduced() -> None:
    run = Forward(0, (TOWER, SHARED))
    ranks = explore(2, Options(), [each_its_own(run, Forward(0, (SHARED,)))] * 2)
    assert ranks.issued("reduce") == {0, 2, 3, 4, 5}
    assert ranks.issued("gather") == {0, 2, 3, 4, 5}


def test_a_unit_that_is_not_conditional_must_run_on_all_ranks() -> None:
    program = [each_its_own(Forward(0, (SHARED, LEAF)), Forward(0, (LEAF,)))]
    with pytest.raises(RuntimeError, match=r"unit 4' on ranks \[0\]; a backward on ranks \[1\]"):
        explore(2, Options(), program)


def nothing(*_: object, **__: object) -> None:
    pass


def not_shadowed(self: NegotiatedPrefetcher, unit: Any, gather: Any) -> None:
    gather.is_issued = True


def to_the_call_alone(self: NegotiatedBackward, call: Any) -> None:
    self._enter(call.forward_pass)
    self._step_alone(call, call.end)


@pytest.mark.parametrize(
    ("owner", "method", "instead", "message"),
    [
        (NegotiatedPrefetcher, "shadow", not_shadowed, "ranks issue"),
        (NegotiatedPrefetcher, "keep", nothing, "not there|not whole|ranks issue"),
        (NegotiatedPrefetcher, "_flush_for_room", nothing, "gathered beside"),
        (
            NegotiatedBackward,
            "advance_to",
            to_the_call_alone,
            "ranks issue|gathered beside|while it is used",
        ),
        (Negotiation, "end_pass", nothing, "waits for a message"),
        (Negotiation, "_shadow_rest", nothing, "."),
        (
            AutogradEngine,
            "run_backward",
            nothing,
            "ranks issue|waits for|different sizes",
        ),
        (Rank, "wait_for_unread", nothing, "while a gather reads them"),
        (AutogradEngine, "checkpoint", nothing, "runs again in backward, and other ranks"),
    ],
)
def test_what_decides_wrongly_is_found(
    owner: type, method: str, instead: Callable[..., Any], message: str
) -> None:
    with patch.object(owner, method, instead), pytest.raises(Exception, match=message):
        explore_random(3000)
