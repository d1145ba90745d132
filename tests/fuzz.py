"""Random programs: sequences of all that users do to a sharded model, as data.

Each operation does the same to the model and to its unsharded twin, on every rank, and says whether
it did anything: one that makes no sense where it stands, as a backward without a loss, is skipped,
so that every part of a program is a program, and what fails is shrunk quickly. What must hold is
checked after each. To add an operation, add its class and a strategy to ``OPERATIONS``.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz_run import PLACES, PlannedError, Run, Setup, failing
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner
from ranks import run_ranks
from test_random_models import Node, Whole, trees
from twins import loss_of, same
from zoo import ROWS

from fsdp_overlap import Blocks, Flat, ShardedTensor, distribute_tensor
from fsdp_overlap import Whole as WholeMatrices
from fsdp_overlap.checkpoint import SafeFileSystemReader, SafeFileSystemWriter
from fsdp_overlap.layout import LayoutRule
from fsdp_overlap.optim import clip_grad_norm_
from fsdp_overlap.runtime.unit import unit_of

LAYOUTS = (Flat(), WholeMatrices(), Blocks(rows=2))
UNFINISHED = "last backward did not finish"
REFUSED = "Fail, and the next call says so"
SEEN = {"Fail in forward", "Fail in backward", REFUSED}
EDITED = "were modified between its forward"
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Operation:
    def run(self, run: Run) -> bool:
        """Returns whether anything was done."""
        raise NotImplementedError


@dataclass(frozen=True)
class Nothing(Operation):
    def run(self, run: Run) -> bool:
        return False


@dataclass(frozen=True)
class Train(Operation):
    """A microbatch."""

    def run(self, run: Run) -> bool:
        return Forward().run(run) and Backward(newest=True, retain=False).run(run)


@dataclass(frozen=True)
class Forward(Operation):
    def run(self, run: Run) -> bool:
        losses = run.forward()
        if losses[0].requires_grad:
            run.open.append(losses)
        return losses[0].requires_grad


@dataclass(frozen=True)
class Backward(Operation):
    newest: bool
    retain: bool

    def run(self, run: Run) -> bool:
        if not run.open:
            return False
        losses = run.open.pop(-1 if self.newest else 0)
        if self.retain:
            run.open.append(losses)
        run.backward_of(losses, self.retain)
        return True


@dataclass(frozen=True)
class Penalize(Operation):
    """A loss of the weights themselves, unsharded by hand."""

    unit: int

    def run(self, run: Run) -> bool:
        unit = run.unit(self.unit)
        mine = [i for i, owner in enumerate(run.owners) if owner is unit]
        if not any(run.whole[i].requires_grad for i in mine):
            return False
        was_at_rest = run.at_rest
        run.module_of(unit).unshard()
        registered = dict(run.model.named_parameters())
        weights = [registered[run.names[i]] for i in mine]
        twin_weights = [run.whole[i] for i in mine]
        loss, twin_loss = (sum(w.square().sum() for w in of) for of in (weights, twin_weights))
        run.backward_of((loss, twin_loss))  # type: ignore[arg-type]
        run.module_of(unit).reshard()
        run.at_rest = was_at_rest and not run.keeps
        return True


@dataclass(frozen=True)
class Evaluate(Operation):
    mode: str

    def run(self, run: Run) -> bool:
        with MODES[self.mode]():
            run.evaluate()
        return True


@dataclass(frozen=True)
class Step(Operation):
    def run(self, run: Run) -> bool:
        run.optimizer.step()
        run.twin_optimizer.step()
        run.edited()
        return True


@dataclass(frozen=True)
class ZeroGrad(Operation):
    set_to_none: bool

    def run(self, run: Run) -> bool:
        run.zero_grad(self.set_to_none)
        return True


@dataclass(frozen=True)
class Clip(Operation):
    most: float
    ours: bool

    def run(self, run: Run) -> bool:
        clip: Any = clip_grad_norm_ if self.ours else torch.nn.utils.clip_grad_norm_
        norm = clip(run.sharded, self.most)
        expected = torch.nn.utils.clip_grad_norm_(run.whole, self.most)
        same(norm.to(expected.dtype), expected, "norm of gradients")
        return any(parameter.grad is not None for parameter in run.whole)


@dataclass(frozen=True)
class Sync(Operation):
    """``set_requires_gradient_sync`` of one unit, or of all."""

    enable: bool
    unit: int | None

    def run(self, run: Run) -> bool:
        unit = None if self.unit is None else run.unit(self.unit)
        module = run.model if unit is None else run.module_of(unit)
        module.set_requires_gradient_sync(self.enable, recurse=unit is None)
        run.tell(unit, synchronizes=self.enable, across_copies=self.enable or not run.has_copies)
        return True


@dataclass(frozen=True)
class AllReduce(Operation):
    """``set_requires_all_reduce``, where there are copies."""

    enable: bool

    def run(self, run: Run) -> bool:
        run.model.set_requires_all_reduce(self.enable)
        run.tell(None, across_copies=self.enable or not run.has_copies)
        return run.has_copies


@dataclass(frozen=True)
class Last(Operation):
    """``set_is_last_backward``."""

    is_last: bool

    def run(self, run: Run) -> bool:
        run.model.set_is_last_backward(self.is_last)
        run.tell(None, is_last=self.is_last)
        return True


@dataclass(frozen=True)
class Stage(Operation):
    stage: int

    def run(self, run: Run) -> bool:
        run.model.set_zero_stage(self.stage)
        run.tell(None, last_only=self.stage == 1)
        return True


@dataclass(frozen=True)
class ReshardAfter(Operation):
    forward: bool
    enable: bool
    unit: int

    def run(self, run: Run) -> bool:
        module = run.module_of(run.unit(self.unit))
        if self.forward:
            module.set_reshard_after_forward(self.enable, recurse=False)
        else:
            module.set_reshard_after_backward(self.enable, recurse=False)
        return True


@dataclass(frozen=True)
class Unshard(Operation):
    unit: int
    is_async: bool

    def run(self, run: Run) -> bool:
        unit = run.unit(self.unit)
        handle = run.module_of(unit).unshard(async_op=self.is_async)
        if handle is not None:
            handle.wait()
        registered = dict(run.model.named_parameters())
        for name, owner, whole in zip(run.names, run.owners, run.whole, strict=True):
            if owner is unit:
                assert not isinstance(registered[name], ShardedTensor)
                same(registered[name].detach(), whole.detach(), name)
        run.at_rest, run.by_hand = False, True
        return unit in run.owners


@dataclass(frozen=True)
class Reshard(Operation):
    unit: int

    def run(self, run: Run) -> bool:
        run.module_of(run.unit(self.unit)).reshard()
        return run.by_hand or not run.at_rest


@dataclass(frozen=True)
class ParamSync(Operation):
    """``"start_param_sync"`` and the like."""

    verb: str

    def run(self, run: Run) -> bool:
        getattr(run.ctx, self.verb)()
        if self.verb == "release_unsharded":
            run.at_rest, run.by_hand = True, False
        return True


@dataclass(frozen=True)
class Prefetch(Operation):
    """``set_modules_to_forward_prefetch`` and ``..._backward_prefetch``."""

    forward: bool
    unit: int
    others: tuple[int, ...]

    def run(self, run: Run) -> bool:
        module = run.module_of(run.unit(self.unit))
        others = [run.module_of(run.unit(other)) for other in self.others]
        if self.forward:
            module.set_modules_to_forward_prefetch(others)
        else:
            module.set_modules_to_backward_prefetch(others)
        return True


@dataclass(frozen=True)
class Freeze(Operation):
    """Or train again, all parameters of some module."""

    module: int
    requires_grad: bool

    def run(self, run: Run) -> bool:
        chosen = [] if run.open else run.under(self.module)
        for index in chosen:
            run.sharded[index].requires_grad_(self.requires_grad)
            run.whole[index].requires_grad_(self.requires_grad)
        return bool(chosen)


EDITS: dict[str, Callable[[Any], None]] = {
    "mul_": lambda p: p.mul_(1.25),
    "data": lambda p: p.data.add_(0.125),
    "rows": lambda p: p[: max(1, len(p) // 2)].neg_(),
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).double().view(p.shape)),
    "foreach": lambda p: torch._foreach_mul_([p], 0.75),
    "to_local": lambda p: getattr(p, "to_local", lambda: p)().add_(0.25),
}


@dataclass(frozen=True)
class Edit(Operation):
    module: int
    how: str

    def run(self, run: Run) -> bool:
        chosen = run.under(self.module)
        with torch.no_grad():
            for index in chosen:
                EDITS[self.how](run.sharded[index])
                EDITS[self.how](run.whole[index])
        run.edited()
        return bool(chosen)


@dataclass(frozen=True)
class Save(Operation):
    """``how``: whole tensors, sharded ones, or by DCP to a folder, which may be ``"safe"``."""

    how: str

    def run(self, run: Run) -> bool:
        state: Any = run.model.state_dict()
        if self.how == "whole":
            state = {name: tensor.full_tensor() for name, tensor in state.items()}
        elif self.how == "sharded":
            state = copy.deepcopy(state)
        else:
            folder = run.folder()
            writer = {"safe": SafeFileSystemWriter, "dcp": dcp.FileSystemWriter}[self.how]
            dcp.save({"model": state}, storage_writer=writer(folder))
            state = folder
        run.shown()
        run.saved = self.how, state, copy.deepcopy(run.twin.state_dict())
        return True


@dataclass(frozen=True)
class Load(Operation):
    """What was saved last, also by a model of other units."""

    def run(self, run: Run) -> bool:
        if run.saved is None:
            return False
        how, state, expected = run.saved
        if how in ("dcp", "safe"):
            reader: Any = {"safe": SafeFileSystemReader, "dcp": dcp.FileSystemReader}[how]
            dcp.load({"model": run.model.state_dict()}, storage_reader=reader(state))
        else:
            run.model.load_state_dict(state)
        run.twin.load_state_dict(expected)
        run.shown()
        run.edited()
        return True


@dataclass(frozen=True)
class Rebuild(Operation):
    """A fresh model of other units, layout and prefetch, which loads all that the old one has but
    its gradients."""

    units: str
    layout: LayoutRule
    prefetch: int
    on_meta: bool
    how: str

    def run(self, run: Run) -> bool:
        setup = run.setup
        setup = replace(
            setup,
            node=with_units(setup.node, self.units),
            layout=self.layout,
            prefetch=self.prefetch,
            ends=setup.ends != (self.units == "others"),
        )
        with torch.device("meta" if self.on_meta else "cpu"):
            model = Whole(setup.node).double()
        for parameter, old in zip(model.parameters(), run.sharded, strict=True):
            parameter.requires_grad_(old.requires_grad)
        setup.shard(model, setup.context())
        if self.on_meta:
            model.to_empty(device="cpu")
        previous = run.saved
        Save(self.how).run(run)
        old = run.optimizer
        optimizer = setup.optimizer(model)
        optimizer.load_state_dict(moved(old, optimizer))
        run.setup = setup
        run.adopt(model, optimizer)
        Load().run(run)
        run.saved = previous or run.saved
        run.twin_optimizer.zero_grad()
        return True


def with_units(node: Node, which: str) -> Node:
    unit = {"all": True, "none": False, "others": not node.unit, "same": node.unit}[which]
    return replace(
        node, unit=unit, children=tuple(with_units(child, which) for child in node.children)
    )


def moved(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of ``old``, laid out as the parameters of ``new``."""
    state = old.state_dict()
    targets = new.param_groups[0]["params"]
    placed: dict[Any, Any] = {}
    for index, values in state["state"].items():
        placed[index] = {
            key: distribute_tensor(
                value.full_tensor(), targets[index].device_mesh, targets[index].placements
            )
            if isinstance(value, ShardedTensor)
            else value
            for key, value in values.items()
        }
    return {**state, "state": placed}


@dataclass(frozen=True)
class Copy(Operation):
    """``deepcopy`` of the model and its optimizer; ``switch`` to the copy, or look at it only."""

    switch: bool

    def run(self, run: Run) -> bool:
        model, optimizer = copy.deepcopy((run.model, run.optimizer))
        if self.switch:
            old, told = run.model.modules(), run.told
            run.adopt(model, optimizer)
            for module, copied in zip(old, model.modules(), strict=True):
                if (unit := unit_of(copied)) is not None:
                    run.told[unit] = told[unit_of(module)]
        else:
            with torch.no_grad():
                run.evaluate(model)
        return True


@dataclass(frozen=True)
class Reset(Operation):
    """At any time."""

    def run(self, run: Run) -> bool:
        run.ctx.reset()
        run.forget()
        return True


@dataclass(frozen=True)
class Fail(Operation):
    """A microbatch or an evaluation in which a module raises, in the same place on every rank, if
    it gets there. ``then``: what follows at once where backward raised; without a ``"reset"`` it
    must say what happened."""

    module: int
    where: str
    evaluates: bool
    then: str

    def run(self, run: Run) -> bool:
        modules = list(run.model.modules())
        index = self.module % len(modules)
        twin_module = list(run.twin.modules())[index]
        tokens, targets = next(run.data)
        rows = range(0, len(tokens), ROWS)

        def twin_loss() -> Any:
            return sum(
                loss_of(run.twin(tokens[i : i + ROWS]), targets[i : i + ROWS]) for i in rows
            ) / len(rows)

        def loss() -> Any:
            return loss_of(run.model(run.mine(tokens)), run.mine(targets))

        with torch.set_grad_enabled(not self.evaluates):
            with failing(twin_module, self.where):
                twin_failed, gradients = attempt(twin_loss, run.gradients_of)
            with failing(modules[index], self.where):
                failed, _ = attempt(loss, torch.Tensor.backward)
        assert failed == twin_failed
        if failed is not None:
            run.seen[f"Fail in {failed}"] += 1
        if failed == "backward":
            self.recover(run)
            run.zero_grad()
        elif failed == "forward":
            # Of the root's own hooks, ours have run before: all is as after a forward.
            ended = not index and self.where in ("hook", "first hook") and not self.evaluates
            run.at_rest = run.at_rest and not run.keeps and not ended
        else:
            run.by_hand = False
            if gradients is not None:
                run.add(gradients)
            awaits = not self.evaluates and gradients is None
            run.at_rest = not (run.open or run.keeps or awaits)
        return failed is not None

    def recover(self, run: Run) -> None:
        refused = None
        try:
            if self.then == "forward":
                run.forward()
            elif self.then == "evaluation":
                Evaluate("no_grad").run(run)
            elif self.then == "backward" and run.open:
                Backward(newest=True, retain=False).run(run)
        except RuntimeError as error:
            refused = str(error)
        # Where no unit's backward had begun, nothing is unfinished, and all was right.
        assert refused is None or UNFINISHED in refused
        run.seen[REFUSED] += refused is not None
        run.ctx.reset()
        run.forget()


def attempt(loss: Callable[[], Any], backward: Callable[[Any], Any]) -> tuple[str | None, Any]:
    """Where it raised, and what backward returned."""
    try:
        found = loss()
    except PlannedError:
        return "forward", None
    if not found.requires_grad:
        return None, None
    try:
        return None, backward(found)
    except PlannedError:
        return "backward", None


@dataclass(frozen=True)
class FailAlone(Operation):
    """A microbatch in which a module raises on one rank, whose error ends what others wait for."""

    module: int
    where: str
    rank: int

    def run(self, run: Run) -> bool:
        modules = list(run.model.modules())
        fails = run.rank == self.rank % run.world
        place = failing(modules[self.module % len(modules)], self.where)
        run.alone(place if fails else nullcontext(), 2)
        return run.world > 1


@dataclass(frozen=True)
class Stray(Operation):
    """One rank runs another number of microbatches than the others. ``evaluates``: or
    evaluations."""

    rank: int
    microbatches: int
    evaluates: bool

    def run(self, run: Run) -> bool:
        strays = run.rank == self.rank % run.world
        with torch.set_grad_enabled(not (strays and self.evaluates)):
            run.alone(nullcontext(), self.microbatches if strays else 1)
        return run.world > 1


@dataclass(frozen=True)
class EditTooSoon(Operation):
    """Weights are edited between forward and backward, which must say so."""

    def run(self, run: Run) -> bool:
        loss, _ = run.forward()
        if not loss.requires_grad:
            return False
        Edit(0, "mul_").run(run)
        with pytest.raises(RuntimeError, match=EDITED):
            loss.backward()
        run.ctx.reset()
        run.forget()
        run.zero_grad()
        return True


@dataclass(frozen=True)
class Program:
    setup: Setup
    world_size: int
    operations: tuple[Operation, ...]


def run_program(program: Program) -> Counter[str]:
    """On one of the ranks. Returns how many operations of each kind did something."""
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
    return run_ranks(run_program, program.world_size, program, timeout=40)[0]


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
    """And whether copies are divided."""
    plain = st.just((None, False))
    if world_size == 1:
        return plain
    copies = st.sampled_from([(world_size, 1), (1, world_size)])
    return plain | st.tuples(copies, st.booleans())


@st.composite
def programs(draw: st.DrawFn) -> Program:
    world_size = draw(st.integers(1, 3))
    mesh, divide_copies = draw(meshes(world_size))
    setup = Setup(
        node=draw(trees()),
        prefetch=draw(st.integers(0, 2)),
        layout=draw(st.sampled_from(LAYOUTS)),
        ends=draw(st.booleans()),
        mesh=mesh,
        divide_copies=divide_copies,
        own_optimizer=draw(st.booleans()),
    )
    # What others build upon is drawn more often than what ends it; nothing, the simplest, is what
    # the other operations of a failing program become.
    copies = [AllReduce] * 4 if mesh is not None and mesh[0] > 1 else []
    kinds = st.sampled_from([Nothing, *OPERATIONS, *OFTEN, *OFTEN, *copies])
    drawn = [draw(kinds.flatmap(STRATEGIES.__getitem__)) for _ in range(draw(st.integers(8, 28)))]
    return Program(setup, world_size, tuple(each for each in drawn if each != Nothing()))


def try_programs(
    examples: int, number: int, look: Callable[[Program], None], phases: Sequence[Phase]
) -> None:
    """``look`` at as many programs, the same ones for the same ``number``."""
    decorated = given(programs())(look)
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


NAMES = {**globals(), "Whole": WholeMatrices}
"""For a program as it is printed."""
