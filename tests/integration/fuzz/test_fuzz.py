"""A small, fixed number of the random programs that ``scripts/fuzz.py`` tries."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import Phase

from fsdp_overlap import Flat
from support.fuzz import OPERATIONS, Program, run_on_ranks, try_programs
from support.fuzz_errors import SEEN, Stray
from support.fuzz_setup import EXPERT_PARALLELISM, OPTIMIZERS, TENSOR_PARALLELISM, Setup
from support.fuzz_states import Edit
from support.fuzz_training import AllReduce, ParamSync, Step, Train
from support.random_models import Node


@pytest.mark.slow
def test_random_programs_do_what_they_do_without_sharding() -> None:
    """And every kind of operation was among them, and did something; so was every optimizer, and
    tensor parallelism and expert parallelism."""
    done: Counter[str] = Counter()
    try_programs(30, 3, lambda program: done.update(run_on_ranks(program)), [Phase.generate])
    wanted = {kind.__name__ for kind in OPERATIONS} | SEEN
    wanted |= {TENSOR_PARALLELISM, EXPERT_PARALLELISM, *OPTIMIZERS}
    assert not wanted - {name for name, count in done.items() if count}


@pytest.mark.slow
def test_random_programs_on_a_device_with_streams_are_right_and_ordered() -> None:
    done: Counter[str] = Counter()

    def look(program: Program) -> None:
        done.update(run_on_ranks(program))

    try_programs(5, 3, look, [Phase.generate], device="emulated")
    assert done.total() > 30


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
