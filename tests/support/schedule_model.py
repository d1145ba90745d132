"""Ranks without tensors: what decides runs, and what it has done is looked at.

A program is a list of actions. Each rank runs it on a tree of units, and may skip other calls in
backward. The transfers of a rank write down its collectives, and raise where a buffer is freed
while it is used, used while it is not there, or where more exist than should.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any, NamedTuple

from fsdp_overlap.features.negotiation.gathers import AgreedCall
from fsdp_overlap.schedule.backward import MAX_INPUTS
from fsdp_overlap.schedule.interface import ForwardRecord, Replies
from fsdp_overlap.schedule.scheduler import Schedule
from fsdp_overlap.schedule.stats import Stats

LARGE, SMALL = 0, 1
"""The two parameters of each unit. The gradient of the first may leave early."""

WITHOUT_GRADIENTS = ("reentrant", "same", "twice", "within", "without gradients")


class Options(NamedTuple):
    """Of all units of a model."""

    prefetch: int = 1
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    pieces: int = 1
    """How many param groups each unit has."""
    has_empty_root: bool = False
    """Whether all parameters are other units'."""
    runs_ahead: bool = False
    is_registered: bool = False
    """Whether the first pass is predicted."""
    has_implicit: bool = False
    """Whether the last unit is an implicit one of the root, as heads are."""

    @property
    def reshards(self) -> bool:
        """Whether the user wants nothing to be kept."""
        return self.reshard_after_forward is not False and self.reshard_after_backward


class Forward(NamedTuple):
    """One forward of a unit, and of those within it."""

    unit: int
    inner: tuple[Forward, ...] = ()
    checkpoint: str = ""
    """How its forward runs again in backward: "reentrant", "recomputed", in the "same" reentrant
    checkpoint as the run before it, in one of its own "within" that, in one of its own in a
    new one ("twice"), "recomputed with" the run before it, or not at all. "without gradients" it is
    never gone back to."""


class Action(NamedTuple):
    """What a program does at once: a forward by a ``kind`` of its own, or a step."""

    kind: str
    run: Forward | None = None
    skips: tuple[frozenset[int], ...] = ()
    """For each rank, which calls its backward does not reach, counted in forward's order."""
    starts_sync: bool = False
    """Whether a step is followed by the gathers of the next forward."""


class Wrong(AssertionError):
    """What no decision may lead to."""


@dataclass(eq=False)
class Gradients:
    unit: Unit
    piece: int
    count = 2
    is_read: bool = False
    """Whether a reduce-scatter reads the reduce input."""
    has_input: bool = False
    arrived: set[int] = field(default_factory=set)
    """Which gradients autograd holds."""

    def may_copy_in_early(self, index: int) -> bool:
        return index == LARGE

    def copy_in(self, indices: Sequence[int]) -> None:
        if self.is_read or not self.has_input:
            raise Wrong(f"a gradient of {self.unit.name} goes to an input that travels")
        self.arrived.difference_update(indices)

    def copy_in_all(self) -> None:
        self.copy_in((LARGE, SMALL))


@dataclass(eq=False)
class Settings:
    reshard_after_backward: bool
    unshard_in_backward: bool = True


class Unit:
    rests_on_host = is_conditional = False
    keeps_parts = has_hooks = False
    has_parameters = accumulates = True
    forward_prefetch: Sequence[Callable[[], Any]] = ()
    backward_prefetch: Sequence[Callable[[], Any]] = ()

    def __init__(self, index: int, count: int, rank: Rank) -> None:
        self.index, self.name, self._rank = index, f"unit {index}", rank
        self.is_root = index == 0
        self.is_implicit = rank.options.has_implicit and index == count - 1 > 0
        self.implicit = [index] if rank.options.has_implicit and self.is_root else []
        self.settings = Settings(rank.options.reshard_after_backward)
        self.gradients = [Gradients(self, piece) for piece in range(rank.options.pieces)]
        self.is_in_pieces = rank.options.pieces > 1
        if self.is_root and rank.options.has_empty_root:
            self.has_parameters, self.gradients = False, []
        self.version = 0
        self.gathered_version: int | None = None
        self.is_ready = False
        """Whether compute has waited for the all-gather."""
        self.last_use = -1
        self.in_use = 0

    @property
    def is_gathered(self) -> bool:
        return self.gathered_version is not None

    @property
    def is_up_to_date(self) -> bool:
        return self.gathered_version == self.version

    @property
    def is_kept_for_backward(self) -> bool:
        return self._rank.options.reshard_after_forward is None

    def reshards_after_forward(self) -> bool:
        asked = self._rank.options.reshard_after_forward
        if asked is not None:
            return asked
        return not (self.is_root and self._rank.engine.is_grad_enabled())

    @property
    def holds_gradients(self) -> bool:
        return any(each.arrived for each in self.gradients)

    @property
    def syncs_gradients(self) -> bool:
        return self._rank.syncs

    completes_gradients = syncs_gradients

    def find_in_place_edit(self) -> str | None:
        return None

    def wait(self) -> None:
        self.is_ready = self.is_gathered

    def to_unsharded(self) -> None:
        if self.has_parameters and not self.is_gathered:
            raise Wrong(f"{self.name} is to be used and not there")

    def to_sharded(self) -> None:
        pass

    def hook_gradients(self) -> None:
        pass

    def free_parts(self) -> None:
        pass


class AutogradEngine:
    def __init__(self) -> None:
        self.tasks: list[int] = []
        self.grad = True
        self.at_end: list[Callable[[], None]] = []
        self.around: list[Forward] | None = None
        """What ran in the outermost checkpoint under way."""
        self.nodes = 0
        """How many nodes forward has made."""
        self.node = 0
        """That which backward is in."""
        self._count = 0

    def begin(self) -> None:
        self._count += 1
        self.tasks.append(self._count)

    def is_in_backward(self) -> bool:
        return bool(self.tasks)

    def is_grad_enabled(self) -> bool:
        return self.grad

    def is_for_all_leaves(self) -> bool:
        return True

    def keeps_graph(self) -> bool:
        return False

    def sequence_number(self) -> int:
        return self.node if self.tasks else self.nodes

    def checkpoint(self) -> object:
        return self.around

    def graph_task(self) -> int:
        return self.tasks[-1] if self.tasks else -1

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        self.at_end.append(function)

    def run_backward(self, function: Callable[[], object]) -> None:
        self.begin()
        self.grad = False
        function()
        self.end()

    def end(self) -> None:
        for at_end in self.at_end:
            at_end()
        self.at_end.clear()
        self.tasks.pop()
        self.grad = True


@dataclass(eq=False)
class Done:
    """A forward of a unit that backward comes back to."""

    run: Forward
    start: int
    end: int
    call: ForwardRecord | None
    """``None`` of a reentrant checkpoint, which runs it again."""
    same: tuple[Forward, ...] = ()
    """What runs again after it, in the same checkpoint."""
    node: int = 0
    recomputed: list[Forward] = field(default_factory=list)
    """What runs again before backward comes to it, if that has not run again yet."""


class ReductionWork:
    def done(self) -> bool:
        return False  # as where the host runs ahead


class Rank:
    """One rank of a model: its units, its schedule, and as its transfers what they do."""

    def __init__(
        self, units: int, options: Options, schedule_class: type[Schedule] = Schedule
    ) -> None:
        self.options = options
        self.engine = AutogradEngine()
        self.syncs = True
        self.runs_again = False
        """Whether reentrant checkpoints are among what runs."""
        self.last_around: list[Forward] = []
        """What ran in the last checkpoint."""
        self.shadowed = 0
        """How many units may be gathered for other ranks."""
        self.clock = 0
        self.current: Unit | None = None
        self.skipped = 0
        """How many calls the backward under way does not reach on this rank."""
        self.is_ending = False
        self.collectives: list[tuple[str | int, ...]] = []
        self.reduced_in_backward: list[tuple[int, int]] = []
        """What was reduced before backward ended: units and their pieces."""
        self.held = 0
        """How many units hold the gradients of backwards without synchronization."""
        self.events = 0
        self.unread: set[int] = set()
        """Units that were freed, and for whose all-gathers, which read shards, compute has yet to
        wait."""
        self.backwards: list[tuple[int, int]] = []
        """For each backward, how many units were gathered late, and how many in vain."""
        self.stats = Stats()
        self.runs_ahead = options.runs_ahead
        self.units = [Unit(index, units, self) for index in range(units)]
        self.schedule = schedule_class(
            self,
            self.engine,
            self.stats,
            [lambda unit=unit: unit for unit in self.units],
            lambda: self.units,
            options.prefetch,
            prepares=False,
        )
        if options.is_registered:
            self.schedule.order.registered = [
                unit.index for unit in self.units if unit.has_parameters
            ]
        self.schedule.reducer.max_inputs = MAX_INPUTS if options.prefetch else 1

    @property
    def inputs(self) -> int:
        """How many units have reduce inputs."""
        return sum(any(each.has_input for each in unit.gradients) for unit in self.units)

    # What schedules have done

    def after_compute(self) -> None:
        pass

    def record_compute_event(self) -> int:
        return self.clock

    def exchange(self, message: bytes) -> Replies:
        raise NotImplementedError

    def gather(self, unit: Unit, again: bool = False, shadow: bool = False) -> None:
        if unit.is_up_to_date and not again:
            raise Wrong(f"{unit.name} is gathered twice")
        if unit.is_gathered and unit.in_use and not again:
            raise Wrong(f"{unit.name} is gathered again while it is used")
        self.collectives.append(("gather", unit.index))
        unit.gathered_version, unit.is_ready = unit.version, False
        self._check_memory()

    def prepare_gathers(self, unit: Unit) -> None:
        pass

    def wait_for_prepared(self, raised: bool) -> None:
        pass

    def free(self, unit: Unit, after: int | None, waits: bool = True) -> None:
        if unit.in_use:
            raise Wrong(f"{unit.name} is freed while it is used")
        if unit.last_use > (-1 if after is None else after):
            raise Wrong(f"{unit.name} is freed before compute is done with it")
        unit.gathered_version, unit.is_ready, unit.last_use = None, False, -1

    def free_unread(self, unit: Unit) -> None:
        if unit.is_gathered and not unit.is_ready:
            self.unread.add(unit.index)
        self.free(unit, None)

    def wait_for_unread(self) -> None:
        self.unread.clear()

    def forbid_old_graphs(self, unit: Unit, modules: Collection[int]) -> None:
        pass

    def allocate_input(self, gradients: Gradients) -> None:
        gradients.has_input = True
        # What runs again in backward is not expected while the unit around it fills its own.
        most = self.schedule.reducer.max_inputs + self.runs_again + self.held
        if self.syncs and self.inputs > most:
            raise Wrong(f"{self.inputs} units have reduce inputs")

    def reduce(self, gradients: Gradients) -> ReductionWork:
        self.collectives.append(("reduce", gradients.unit.index, gradients.piece))
        if not self.is_ending:
            self.reduced_in_backward.append((gradients.unit.index, gradients.piece))
        gradients.is_read = True
        return ReductionWork()

    def finish(self, gradients: Gradients, work: ReductionWork) -> None:
        gradients.has_input = gradients.is_read = False

    def abandon(self, reductions: Any) -> None:
        pass

    def finish_backward(self) -> None:
        pass

    def is_profiled(self) -> bool:
        return False

    def profiler_range(self, kind: str, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    # What programs do

    def act(self, action: Action, skips: frozenset[int]) -> None:
        self._act(action, skips)
        self._check_unread()

    def _check_unread(self) -> None:
        if self.unread:
            raise Wrong(f"shards of {sorted(self.unread)} may be edited while a gather reads them")

    def _act(self, action: Action, skips: frozenset[int]) -> None:
        if action.kind == "step":
            for unit in self.units:
                unit.version += 1
            if action.starts_sync:
                self.schedule.start_param_sync()
            return
        if action.run is None:
            self.syncs = action.kind != "accumulate"
            self.schedule.shadow()
            self.held = self.inputs
            return
        self.engine.grad = action.kind != "evaluate"
        done = self._forward(action.run)
        self._check_unread()
        self.engine.grad = True
        if action.kind in ("train", "accumulate"):
            self.syncs = action.kind == "train"
            calls = [each for each in done if each.call is not None]
            skipped = [calls[index] for index in skips]
            self.skipped = len(skipped)
            self.runs_again = any(each.call is None for each in done)
            misses, unused = self.stats.prefetch_misses, self.stats.prefetches_unused
            self._backward([each for each in done if each not in skipped])
            misses = self.stats.prefetch_misses - misses
            self.backwards.append((misses, self.stats.prefetches_unused - unused))
            self._check_rest(done)
            self.held = self.inputs

    def _forward(self, run: Forward) -> list[Done]:
        unit, start = self.units[run.unit], self.clock
        grad, around = self.engine.grad, self.engine.around
        if run.checkpoint in WITHOUT_GRADIENTS:
            self.engine.grad = False
        if run.checkpoint not in ("", "without gradients") and around is None:
            if run.checkpoint in ("reentrant", "recomputed", "twice"):
                self.last_around = []
            self.engine.around = self.last_around
        again: list[Forward] = []
        if run.checkpoint.startswith("recomputed"):
            again = self.last_around if around is None else []
            again.append(run)
        node = self.engine.nodes
        if run.checkpoint in ("reentrant", "twice") and grad:
            self.engine.nodes += 1
        self._event(unit)
        self.schedule.before_forward(unit)
        unit.to_unsharded()
        self._use(unit)
        unit.in_use += 1
        done: list[Done] = []
        for inner in run.inner:
            done += self._forward(inner)
            if inner.checkpoint in ("same", "within") and self.engine.grad:
                done[-1] = replace(done[-1], end=self.clock, same=(*done[-1].same, inner))
        self._use(unit)
        unit.in_use -= 1
        call = self.schedule.after_forward(unit, id(unit))
        if not self.engine.grad:  # its output has no graph, which hooks look for
            call = None
        self.engine.grad, self.engine.around = grad, around
        if call is not None:
            self.schedule.add_call(call)
        if call is not None or (run.checkpoint in ("reentrant", "twice") and grad):
            if call is not None:
                node = self.engine.nodes
                self.engine.nodes += 1
            done.append(Done(run, start, self.clock, call, node=node, recomputed=again))
        return done

    def _backward(self, reached: list[Done]) -> None:
        self.engine.begin()
        self.engine.grad = False
        self._walk_back(reached)
        self.is_ending = True
        self.engine.end()
        self.is_ending = False

    def _walk_back(self, reached: list[Done]) -> None:
        reached.reverse()
        last = {each.run.unit: each for each in reached}
        under_way: list[Done] = []
        for each in reached:
            while under_way and under_way[-1].start >= each.end:
                self._leave(under_way.pop(), last)
            unit = self.units[each.run.unit]
            self.engine.node = each.node
            if each.call is None:
                self._run_again(each.run, *each.same)
                continue
            self._event(unit)
            self.schedule.before_backward(each.call)
            self._use(unit)
            unit.in_use += 1
            under_way.append(each)
            if last[each.run.unit] is each:
                self._arrive(unit, LARGE)
            self.engine.grad = True
            while each.recomputed:
                self._recompute(each.recomputed.pop(0))
            self.engine.grad = False
        while under_way:
            self._leave(under_way.pop(), last)

    def _recompute(self, run: Forward) -> None:
        """A forward within the backward of the same call, or of one around it."""
        unit = self.units[run.unit]
        self.schedule.before_forward(unit)
        self._use(unit)
        unit.in_use += 1
        for inner in run.inner:
            self._event(self.units[inner.unit])
            self._recompute(inner)
        self._use(unit)
        unit.in_use -= 1
        call = self.schedule.after_forward(unit, id(unit))
        if call is not None:  # what this makes, backward does not come to
            self.schedule.add_call(call)

    def _run_again(self, *runs: Forward) -> None:
        """A reentrant checkpoint: forwards, and a backward of their own, within a backward."""
        self.engine.grad = True
        done = []
        for run in runs:
            inner = "reentrant" if run.checkpoint in ("twice", "within") else ""
            done += self._forward(run._replace(checkpoint=inner))
        self.engine.grad = False
        self.engine.begin()
        self._walk_back(done)
        self.engine.tasks.pop()

    def _leave(self, done: Done, last: dict[int, Done]) -> None:
        unit = self.units[done.run.unit]
        self._use(unit)
        unit.in_use -= 1
        if last[done.run.unit] is done:
            self._arrive(unit, SMALL)

    def _arrive(self, unit: Unit, parameter: int) -> None:
        """A gradient arrives: of the first param group, and before it all of the others."""
        first, *others = unit.gradients
        for gradients in others if parameter == LARGE else ():
            for each in (LARGE, SMALL):
                self._arrive_in(gradients, each)
        self._arrive_in(first, parameter)

    def _arrive_in(self, gradients: Gradients, parameter: int) -> None:
        gradients.arrived.add(parameter)
        unit = gradients.unit
        if parameter == LARGE or unit.is_in_pieces:  # otherwise the large one alone is watched
            self.events += 1
            self.schedule.gradient_arrived(unit, gradients, parameter)

    def _event(self, unit: Unit) -> None:
        """``unit`` is about to be used."""
        self.events += 1
        self.current = unit

    def _use(self, unit: Unit) -> None:
        """Compute reads the unit's parameters."""
        if unit.has_parameters and not (unit.is_up_to_date and unit.is_ready):
            raise Wrong(f"{unit.name} is used and not whole")
        self.clock += 1
        unit.last_use = self.clock

    def _check_memory(self) -> None:
        """At most ``prefetch`` full buffers exist beside those in use and those that are kept. In
        backward the calls count too that this rank skips and others reach, at its end the outermost
        one, and a reentrant checkpoint's unit until backward is done with its first forward."""
        if not self.options.reshards or self._has_joined_calls():
            return
        beside = [
            unit
            for unit in self.units
            if unit.is_gathered and not unit.in_use and unit is not self.current
        ]
        if self.options.reshard_after_forward is None:
            beside = [unit for unit in beside if not (unit.is_root or unit.is_implicit)]
        more = self.shadowed
        if self.engine.is_in_backward():
            more += self.skipped + self.is_ending + self.runs_again
        if len(beside) > self.options.prefetch + more:
            names = ", ".join(unit.name for unit in beside)
            raise Wrong(f"{names} are gathered beside those in use")

    def _has_joined_calls(self) -> bool:
        """Return whether backward comes to several units at once, as in a checkpoint around them,
        where ranks agreed on what runs."""
        return any(
            isinstance(call, AgreedCall) and call.is_joined
            for each in self.schedule._open_passes
            for call in each.calls
        )

    def _check_rest(self, done: Sequence[Done]) -> None:
        """After a backward."""
        ran = {each.run.unit for each in done}
        for unit in self.units:
            is_kept = unit.index not in ran and self.options.reshard_after_forward is False
            if unit.is_gathered and self.options.reshard_after_backward and not is_kept:
                raise Wrong(f"{unit.name} is not released")
            if unit.holds_gradients:
                raise Wrong(f"a gradient of {unit.name} is left")
            if self.syncs and any(each.has_input for each in unit.gradients):
                raise Wrong(f"the reduce input of {unit.name} is not freed")


def subsets(count: int) -> Iterator[frozenset[int]]:
    """Return of so many calls, those that a rank may skip: never all."""
    every = chain.from_iterable(combinations(range(count), size) for size in range(count))
    return map(frozenset, every)


def count_calls(run: Forward) -> int:
    """Return how many calls backward comes back to."""
    if run.checkpoint in WITHOUT_GRADIENTS:
        return 0
    return sum(map(count_calls, run.inner)) + 1


Seen = dict[tuple[Any, ...], tuple[list[tuple[str | int, ...]], int]]
"""By what a rank runs, the collectives that it issued and how many events it saw."""


def explore(
    units: int,
    options: Options,
    program: Sequence[Action],
    ranks: int = 2,
    seen: Seen | None = None,
) -> int:
    """Run ``program`` on so many ranks. Return how many events they saw. Of many programs, most
    differ only in what one rank skips: what the others do is looked up in ``seen``.

    Raises:
        Wrong: they issued different collectives, or one of them did what may not be.
    """
    found = [_run_alone(units, options, program, rank, seen) for rank in range(ranks)]
    (first, _), *others = found
    for other, _ in others:
        if other != first:
            raise Wrong(f"ranks issue {first} and {other}")
    return sum(events for _, events in found)


def _run_alone(
    units: int, options: Options, program: Sequence[Action], rank: int, seen: Seen | None
) -> tuple[list[tuple[str | int, ...]], int]:
    skips = [action.skips[rank] if action.skips else frozenset() for action in program]
    is_shared = seen is not None and not any(skips)
    key = (units, options, *[(each.kind, each.run, each.starts_sync) for each in program])
    if seen is not None and is_shared and key in seen:
        return seen[key]
    alone = Rank(units, options)
    for action, skipped in zip(program, skips, strict=True):
        alone.act(action, skipped)
    if seen is not None and is_shared:
        seen[key] = alone.collectives, alone.events
    return alone.collectives, alone.events
