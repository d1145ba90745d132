"""What decides, explored: every small program on every small tree of units."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_overlap.deciding.backward import Backward
from fsdp_overlap.deciding.gathers import Gathers
from fsdp_overlap.deciding.reductions import Reductions
from support.deciding_model import Action, Options, Run, Wrong, count_calls, explore, subsets

TREES = {
    1: [Run(0)],
    2: [Run(0, (Run(1),)), Run(0, (Run(1), Run(1))), Run(0)],
    3: [
        Run(0, (Run(1), Run(2))),
        Run(0, (Run(2), Run(1))),
        Run(0, (Run(1), Run(2), Run(1))),
        Run(0, (Run(1, (Run(2),)),)),
        Run(0, (Run(1),)),
    ],
}
"""By the number of units: the forwards that a pass may make."""

OPTIONS = [
    Options(prefetch, after_forward, after_backward)
    for prefetch in (0, 1, 2)
    for after_forward, after_backward in ((None, True), (True, True), (False, True), (False, False))
]


def checkpointed(run: Run) -> Iterator[Run]:
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
    found = [Action("step")]
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
    for options, program in product(OPTIONS, programs(units, length)):
        count += 1
        try:
            events += explore(units, options, program)
        except Exception as error:
            error.add_note(f"{options}, {program}")
            raise
    return count, events


def test_every_small_program_is_right() -> None:
    found = [explore_all(units, length) for units, length in ((1, 3), (2, 2), (3, 1))]
    count, events = (sum(each) for each in zip(*found, strict=True))
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    assert f"{count:,} programs, in which the ranks see {events:,} events" in " ".join(text.split())


def test_checkpoints_of_all_kinds_beside_each_other_are_right() -> None:
    """They take one unit more than every small program has."""
    for kinds in product(("", "reentrant", "recomputed"), repeat=3):
        run = Run(0, tuple(Run(index + 1, checkpoint=kind) for index, kind in enumerate(kinds)))
        for options, skipped in product(OPTIONS, subsets(count_calls(run))):
            explore(4, options, [Action("train", run, (frozenset(), skipped))] * 2)


def nothing(*_: object, **__: object) -> None:
    pass


def forever(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("owner", "method", "instead", "message"),
    [
        (Backward, "_walk_to_end", nothing, "ranks issue"),
        (Backward, "_advance_to_checkpoint", nothing, "ranks issue|gathered beside"),
        (Backward, "_leave", nothing, "gathered beside"),
        (Gathers, "flush", nothing, "gathered beside"),
        (Gathers, "finish_pass", nothing, "not released|gathered beside"),
        (Gathers, "_make_room", nothing, "gathered beside"),
        (Reductions, "_has_room", forever, "reduce inputs"),
        (Reductions, "issue_rest", nothing, "ranks issue|is left|is not freed"),
    ],
)
def test_what_decides_wrongly_is_found(
    owner: type, method: str, instead: Callable[..., Any], message: str
) -> None:
    with patch.object(owner, method, instead), pytest.raises(Wrong, match=message):
        explore_all(3, 1)


def test_deciding_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import fsdp_overlap.deciding.schedule"
    # The package's own __init__ imports torch, and is left out.
    alone = "import types, sys; p = types.ModuleType('fsdp_overlap'); p.__path__ = [sys.argv[1]]; "
    command = [sys.executable, "-c", f"{alone}sys.modules['fsdp_overlap'] = p; {program}"]
    package = str(Path(__file__).parent.parent / "fsdp_overlap")
    done = subprocess.run([*command, package], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
