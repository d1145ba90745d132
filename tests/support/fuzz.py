"""Random programs: what users do to a sharded model, in any order, beside an unsharded twin.

What must hold (``fuzz_run``) is checked after each operation. To add one, add its class beside the
others (``fuzz_training``, ``fuzz_states``, ``fuzz_errors``) and how it is drawn to ``OPERATIONS``.
One that differs by rank, as an error on one of them, must leave all ranks alike when it ends.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner

from fsdp_overlap import BlockAtomic, Flat, PerTensor
from fsdp_overlap import TensorAtomic as WholeMatrices
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.tools.emulator import (
    EmulatedDevice,
    IssuedCollective,
    compare_issued,
    nccl_like,
    running,
)
from support.fuzz_errors import PLACES, EditTooSoon, Fail, FailAlone, Reset, Stray
from support.fuzz_run import Run
from support.fuzz_setup import EXPERT_PARALLELISM, OPTIMIZERS, PLAIN, TENSOR_PARALLELISM, Setup
from support.fuzz_states import EDITS, Copy, Edit, Load, Rebuild, Save
from support.fuzz_training import (
    MODES,
    AllReduce,
    Backward,
    Clip,
    Evaluate,
    Forward,
    Freeze,
    Last,
    Nothing,
    Operation,
    ParamSync,
    Penalize,
    Prefetch,
    Reshard,
    ReshardAfter,
    Stage,
    Step,
    Sync,
    Train,
    Unshard,
    ZeroGrad,
)
from support.random_models import Node, around_one, trees
from support.ranks import run_ranks

LAYOUTS: tuple[LayoutRule, ...] = (Flat(), WholeMatrices(), BlockAtomic(rows=2), PerTensor())


@dataclass(frozen=True)
class Program:
    setup: Setup
    world_size: int
    operations: tuple[Operation, ...]


class Seen(NamedTuple):
    """By one of the ranks: how many operations of each kind did something, and on the emulated
    device what was found and which collectives were issued."""

    done: Counter[str]
    findings: list[str] = []  # noqa: RUF012
    issued: list[IssuedCollective] = []  # noqa: RUF012


def run_program(program: Program) -> Seen:
    """Return on one of the ranks."""
    if program.setup.device != "emulated":
        return Seen(_run(program))
    with running(EmulatedDevice()) as device:
        done = _run(program)
    return Seen(done, list(map(str, device.findings)), device.issued)


def _run(program: Program) -> Counter[str]:
    for expected in ("None of the inputs have requires_grad=True", "Full backward hook is firing"):
        warnings.filterwarnings("ignore", expected)
    done: Counter[str] = Counter()
    run = Run(program.setup)
    try:
        for position, operation in enumerate(program.operations):
            try:
                done[type(operation).__name__] += operation.run(run)
                run.check()
            except Exception as error:
                error.add_note(f"operation {position}: {operation}")
                raise
    finally:
        run.close()
    return done + run.seen


def run_on_ranks(program: Program) -> Counter[str]:
    backend = nccl_like.BACKEND if program.setup.device == "emulated" else "gloo"
    ranks = run_ranks(run_program, program.world_size, program, timeout=40, backend=backend)
    findings = list(dict.fromkeys(found for seen in ranks for found in seen.findings))
    assert not findings, "\n".join(findings)
    different = compare_issued([seen.issued for seen in ranks])
    assert different is None, str(different)
    return ranks[0].done


# ---- what is drawn ----

SMALL = st.integers(0, 30)
HOW = st.sampled_from(["whole", "sharded", "dcp", "safe"])

OPERATIONS: dict[type[Operation], st.SearchStrategy[Any]] = {
    Train: st.just(Train()),
    Forward: st.just(Forward()),
    Backward: st.builds(Backward, newest=st.booleans(), retain=st.booleans()),
    Step: st.just(Step()),
    ZeroGrad: st.builds(ZeroGrad, set_to_none=st.booleans()),
    Evaluate: st.builds(Evaluate, mode=st.sampled_from(sorted(MODES))),
    Clip: st.builds(Clip, most=st.sampled_from([1e-3, 1.0, 1e9]), ours=st.booleans()),
    Sync: st.builds(Sync, enable=st.booleans(), unit=st.none() | SMALL),
    AllReduce: st.builds(AllReduce, enable=st.booleans()),
    Last: st.builds(Last, is_last=st.booleans()),
    Stage: st.builds(Stage, stage=st.integers(1, 3)),
    ReshardAfter: st.builds(ReshardAfter, forward=st.booleans(), enable=st.booleans(), unit=SMALL),
    Unshard: st.builds(Unshard, unit=SMALL, is_async=st.booleans()),
    Reshard: st.builds(Reshard, unit=SMALL),
    Penalize: st.builds(Penalize, unit=SMALL),
    ParamSync: st.builds(
        ParamSync,
        verb=st.sampled_from(["start_param_sync", "finish_param_sync", "release_unsharded"]),
    ),
    Prefetch: st.builds(
        Prefetch,
        forward=st.booleans(),
        unit=SMALL,
        others=st.lists(SMALL, max_size=3, unique=True).map(tuple),
    ),
    Freeze: st.builds(Freeze, module=SMALL, requires_grad=st.booleans()),
    Edit: st.builds(Edit, module=SMALL, how=st.sampled_from(sorted(EDITS))),
    Save: st.builds(Save, how=HOW),
    Load: st.just(Load()),
    Rebuild: st.builds(
        Rebuild,
        units=st.sampled_from(["same", "all", "none", "others"]),
        layout=st.sampled_from(LAYOUTS),
        prefetch=st.integers(0, 2),
        on_meta=st.booleans(),
        how=HOW,
    ),
    Copy: st.builds(Copy, switch=st.booleans()),
    Reset: st.just(Reset()),
    Fail: st.builds(
        Fail,
        module=SMALL,
        where=st.sampled_from(["forward", *sorted(PLACES), "backward", "backward", "backward"]),
        evaluates=st.sampled_from([False, False, False, True]),
        then=st.sampled_from(["reset", "forward", "evaluation", "backward"]),
    ),
    FailAlone: st.builds(
        FailAlone,
        module=SMALL,
        where=st.sampled_from(["forward", *sorted(PLACES)]),
        rank=SMALL,
    ),
    Stray: st.builds(
        Stray, rank=SMALL, microbatches=st.sampled_from([0, 2]), evaluates=st.booleans()
    ),
    EditTooSoon: st.just(EditTooSoon()),
}

OFTEN = (Train, Train, Train, Forward, Backward, Backward, Step, Sync, Last, Stage, Freeze, Fail)
STRATEGIES = {Nothing: st.just(Nothing()), **OPERATIONS}


def meshes(world_size: int) -> st.SearchStrategy[tuple[tuple[int, ...] | None, bool]]:
    """Return and whether copies are divided."""
    plain = st.just((None, False))
    if world_size == 1:
        return plain
    divisors = [copies for copies in range(1, world_size + 1) if world_size % copies == 0]
    copies = st.sampled_from([(copies, world_size // copies) for copies in divisors])
    return plain | st.tuples(copies, st.booleans())


def layouts_for(shard_optimizer_over_replicas: bool) -> list[LayoutRule]:
    """Copy cannot divide rows."""
    return [
        layout
        for layout in LAYOUTS
        if not (shard_optimizer_over_replicas and isinstance(layout, PerTensor))
    ]


CONFIRMS = "needs the confirmations of a CPU"
WAITS = "other ranks wait in collectives of the model's own, where nobody tells them"

# What programs for a device leave out, and those whose model is divided; and why.
LEFT_OUT: dict[str, dict[type[Operation], str]] = {
    "cpu": {},
    "emulated": {FailAlone: CONFIRMS, Stray: CONFIRMS},
    PLAIN: {},
    TENSOR_PARALLELISM: {FailAlone: WAITS, Stray: WAITS},
    EXPERT_PARALLELISM: {
        FailAlone: WAITS,
        Stray: WAITS,
        Penalize: "experts divide by all ranks, and get this gradient from those that have them",
    },
}


def kinds_in(device: str, division: str) -> list[type[Operation]]:
    """Return the operations that such a program may have."""
    left_out = LEFT_OUT[device] | LEFT_OUT[division]
    return [kind for kind in OPERATIONS if kind not in left_out]


@st.composite
def programs(draw: st.DrawFn, device: str) -> Program:
    world_size = draw(st.integers(1, 4))
    # They use functional collectives, which need a process group of C++.
    is_divided = world_size % 2 == 0 and device == "cpu"
    divisions = (PLAIN, TENSOR_PARALLELISM, EXPERT_PARALLELISM) if is_divided else (PLAIN,)
    division = draw(st.sampled_from(divisions))
    tensor_ranks = expert_ranks = 1
    if division == TENSOR_PARALLELISM:
        tensor_ranks = 2
        node = draw(around_one("linear", multiple=tensor_ranks))
    elif division == EXPERT_PARALLELISM:
        expert_ranks = draw(st.sampled_from(sorted({2, world_size})))
        node = draw(around_one("experts"))
    else:
        node = draw(trees())
    mesh, shard_optimizer_over_replicas = draw(meshes(world_size // tensor_ranks))
    prefetch = draw(st.integers(0, 2))
    setup = Setup(
        node=node,
        prefetch=prefetch,
        layout=draw(st.sampled_from(layouts_for(shard_optimizer_over_replicas))),
        ends=draw(st.booleans()),
        mesh=mesh,
        shard_optimizer_over_replicas=shard_optimizer_over_replicas,
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        device=device,
        tensor_ranks=tensor_ranks,
        expert_ranks=expert_ranks,
        in_pieces=prefetch != 1,
        casts=draw(st.booleans()),
    )
    # What others build upon is drawn more often than what ends it; nothing, the simplest, is what
    # the other operations of a failing program become.
    copies = [AllReduce] * 4 if mesh is not None and mesh[0] > 1 else []
    kinds = st.sampled_from([Nothing, *kinds_in(device, division), *OFTEN, *OFTEN, *copies])
    drawn = [draw(kinds.flatmap(STRATEGIES.__getitem__)) for _ in range(draw(st.integers(8, 28)))]
    return Program(setup, world_size, tuple(each for each in drawn if each != Nothing()))


def try_programs(
    examples: int,
    number: int,
    look: Callable[[Program], None],
    phases: Sequence[Phase],
    device: str = "cpu",
) -> None:
    """``look`` at as many programs for ``device``, the same ones for the same ``number``."""
    decorated = given(programs(device))(look)
    decorated = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )(seed(number)(decorated))
    # By default, five in six are one before with a part of it repeated, and so little is tried.
    with mock.patch.object(ConjectureRunner, "generate_mutations_from"):
        decorated()


KINDS = (*OPERATIONS, Program, Setup, Node, Flat, WholeMatrices, BlockAtomic, PerTensor)
NAMES = {kind.__name__: kind for kind in KINDS}
"""For a program as it is printed."""
