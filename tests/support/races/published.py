"""Runs plain programs with releases of libraries that have published faults, and shows whether the
emulated device finds them.

    python tests/support/races/published.py [ISSUE ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import HERE, Environment, NotRun, add_cache, find_races


@dataclass(frozen=True)
class Setup:
    """What a program runs with. ``change``: a function of ``changes.py``, called before."""

    environment: Environment
    change: str = ""

    def __str__(self) -> str:
        return f"{self.environment}, {self.change}" if self.change else str(self.environment)


@dataclass(frozen=True)
class Case:
    """A published fault: the ``program`` runs into it with ``faulty``, and not with ``control``.
    ``still``: a later release that says to have mended it."""

    issue: str
    program: str
    faulty: Setup
    control: Setup
    is_found: bool = True
    still: Setup | None = None
    ranks: int = 4


TORCH_212, TORCH_213, TORCH_215 = (
    Environment(torch=release) for release in ("2.12.1", "2.13.0", "2.15.0")
)
T212, T213, T215 = map(Setup, (TORCH_212, TORCH_213, TORCH_215))
MFSDP, LATER_MFSDP = (
    Environment((f"megatron-fsdp=={release}", "einops==0.8.2", "packaging==26.4"), "2.13.0")
    for release in ("0.5.1", "0.6.1")
)
CORE = Environment(
    ("megatron-core==0.19.2", "einops==0.8.2", "packaging==26.4"),
    "2.12.1",
    "3.12",  # what its wheels are for; their Python runs on 3.11 too
)
UNHELD = Setup(TORCH_213, "hold_no_reduced_gradients")

CASES = [
    Case("pytorch#180665", "180665", UNHELD, T213),
    Case("pytorch#180665, in a release", "180665_hook", T213, T215),
    Case("pytorch#179443", "179443", UNHELD, T213),
    Case("pytorch#180666", "180666", T212, T213),
    Case("pytorch#178142", "178142", T213, T215),
    Case(
        "pytorch#181218",
        "181218",
        Setup(TORCH_213, "do_not_wait_between_pieces"),
        T213,
        is_found=False,
    ),
    Case("pytorch#177319", "177319", T212, T213, is_found=False),
    Case(
        "Megatron-LM#5222",
        "5222",
        Setup(MFSDP, "do_not_compare_shards"),
        Setup(LATER_MFSDP, "wait_for_gradient_buffers"),
        still=Setup(LATER_MFSDP, "do_not_compare_shards"),
    ),
    Case(
        "Megatron-LM#5788",
        "5788",
        Setup(MFSDP, "do_not_compare_shards"),
        Setup(LATER_MFSDP, "do_not_compare_shards"),
        is_found=False,
    ),
    Case(
        "Megatron-LM#6187",
        "6187",
        Setup(LATER_MFSDP),
        Setup(LATER_MFSDP, "allocate_gradients_where_reduced"),
    ),
    Case(
        "Megatron-LM#7398",
        "7398",
        Setup(CORE, "offload_without_transformer_engine"),
        Setup(CORE, "wait_before_reload"),
        ranks=1,
    ),
]


def findings_of(case: Case, setup: Setup, cache: Path) -> list[dict[str, Any]]:
    """Run the program of ``case``. Return what was found."""
    program = HERE / "published" / f"{case.program}.py"
    arguments = [f"--ranks={case.ranks}", program]
    found: list[dict[str, Any]] = find_races(
        setup.environment, cache, arguments, setup.change
    ).told["findings"]
    return found


def line_of(access: dict[str, Any]) -> str:
    """Return the operation and the line of the library, or else of the program."""
    lines = access["lines"]
    place = next((each for each in lines if each["of"] == "library"), lines[0])["place"]
    return f"`{access['operation']}` at {place}"


def show(case: Case, cache: Path) -> bool:
    """Print the row of ``case``. Return whether it is as expected."""
    found = findings_of(case, case.faulty, cache)
    control = findings_of(case, case.control, cache)
    still = case.still and findings_of(case, case.still, cache)
    after = f"{'not ' if control else ''}clean with {case.control}"
    if case.still:
        after += f"; {'still there' if still else 'gone'} with {case.still}"
    lines = f"{line_of(found[0]['first'])}, {line_of(found[0]['second'])}" if found else ""
    print(f"| {case.issue} | {case.faulty} | {len(found)} | {lines} | {after} |", flush=True)
    return bool(found) == case.is_found and not control


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("issues", nargs="*")
    add_cache(parser)
    given = parser.parse_args(arguments)
    wrong = []
    print("| fault | with | findings | of the first, the lines | without the fault |")
    print("|---|---|---:|---|---|")
    for case in CASES:
        if given.issues and not any(each in case.issue for each in given.issues):
            continue
        try:
            is_right = show(case, given.cache)
        except NotRun as reason:
            print(f"| {case.issue} | {case.faulty} | not run: {reason} | | |", flush=True)
            print(reason.printed, file=sys.stderr)
            is_right = False
        if not is_right:
            wrong.append(case.issue)
    if wrong:
        print(f"not as expected: {', '.join(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
