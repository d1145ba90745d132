"""Random programs, a few and always the same ones.

``--tries 200 --seed 1`` tries more, and makes one that fails smaller. Its last lines have the
program for ``--program``, which tries this one alone.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase

from fsdp_overlap import Flat
from support.fuzz import NAMES, OPERATIONS, Program, run_on_ranks, try_programs
from support.fuzz_errors import SEEN, Stray
from support.fuzz_setup import EXPERT_PARALLELISM, OPTIMIZERS, TENSOR_PARALLELISM, Setup
from support.fuzz_states import Edit
from support.fuzz_training import AllReduce, ParamSync, Step, Train
from support.random_models import Node
from support.tries import Tries


@pytest.mark.slow
def test_random_programs_do_what_they_do_without_sharding(tries: Tries) -> None:
    """And every kind of operation was among them, and did something; so was every optimizer, and
    tensor parallelism and expert parallelism."""
    done = try_random(tries, 30, "cpu")
    wanted = {kind.__name__ for kind in OPERATIONS} | SEEN
    wanted |= {TENSOR_PARALLELISM, EXPERT_PARALLELISM, *OPTIMIZERS}
    assert tries.are_given or not wanted - {name for name, count in done.items() if count}


@pytest.mark.slow
def test_random_programs_on_a_device_with_streams_are_right_and_ordered(tries: Tries) -> None:
    done = try_random(tries, 5, "emulated")
    assert tries.are_given or done.total() > 30


def try_random(tries: Tries, default: int, device: str) -> Counter[str]:
    """Return what was done, by kind."""
    done: Counter[str] = Counter()
    count, number = tries.or_else(default, 3)

    def look(program: Program) -> None:
        try:
            done.update(run_on_ranks(program))
        except AssertionError as error:
            error.add_note(f"this program alone: --program {shlex.quote(repr(program))}")
            raise

    if tries.program is not None:
        look(eval(tries.program, NAMES))
        return done
    # To make a program smaller takes many more.
    phases = [Phase.generate, Phase.shrink] if tries.are_given else [Phase.generate]
    try_programs(count, number, look, phases, device)
    operations = sum(done[kind.__name__] for kind in OPERATIONS)
    tries.note(
        f"seed {number}, torch {torch.__version__}: {count} programs, {operations} operations\n"
        + ", ".join(f"{name} {times}" for name, times in sorted(done.items()))
    )
    return done


def test_a_program_can_be_given_as_it_is_printed() -> None:
    def look(program: Program) -> None:
        assert eval(repr(program), NAMES) == program

    try_programs(50, 0, look, [Phase.generate])


def test_a_rank_that_strays_is_found_by_its_copies_too() -> None:
    """Which have nothing else to do with it in that backward than the check of the order."""
    setup = Setup(node=Node(kind="nothing"), prefetch=0, layout=Flat(), mesh=(2, 2))
    strays = Stray(rank=2, microbatches=0, evaluates=False)
    run_on_ranks(Program(setup, 4, (AllReduce(enable=False), Train(), Train(), Train(), strays)))


def test_an_edit_after_what_gathers_ahead_is_no_difference() -> None:
    """It may race with these gathers, which are not used then."""
    setup = Setup(Node("norm"), prefetch=1, layout=Flat(), optimizer="AdamW", device="emulated")
    edit = Edit(module=0, how="mul_")
    run_on_ranks(Program(setup, 1, (Train(), Step(), edit, Train())))
    setup = replace(setup, optimizer="AdamW of torch")
    starts = ParamSync("start_param_sync")
    run_on_ranks(Program(setup, 1, (Train(), Step(), starts, edit, starts, Step(), Train())))
