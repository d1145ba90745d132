"""Backward of one context: the walk back along the calls of forward, and the order of
reduce-scatters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from fsdp_overlap.schedule.interface import (
    AutogradEngine,
    CommOps,
    ForwardPass,
    ForwardRecord,
    Gradients,
    ReductionWork,
    ScheduledUnit,
    UnitIndex,
    UnitRefs,
    UnitStates,
)
from fsdp_overlap.schedule.prefetch import GraphUse, Prefetcher
from fsdp_overlap.schedule.stats import CHECKED_COUNTS

# ---- Reduce-scatters: the reverse of forward, with few reduce inputs at a time ----

# How many units have reduce inputs at once at most: one travels while the next is filled. Those
# held by backwards without synchronization do not count. With prefetch=0, for the least memory, it
# is one.
MAX_INPUTS = 2


# How many passes with gradients are remembered until a backward follows. Older ones are forgotten,
# so that a program that never calls backward does not grow. A backward that reaches an older one
# takes it up again.
MAX_OPEN_PASSES = 64


@dataclass(eq=False, slots=True)
class PendingReduction:
    """A unit's place in the order of reductions. ``first_use`` is the tick of the forward at which
    the unit first ran, the latest of which comes first. ``arrived``: of each param group that is
    reduced by itself, which gradients are there. ``reduced``: how many param groups went ahead of
    the turn."""

    unit: ScheduledUnit
    first_use: int
    place: tuple[int, int]
    arrived: dict[Gradients, set[int]] = field(default_factory=dict)
    reduced: int = 0


_place = attrgetter("place")


class GradReducer:
    """The reduce-scatters of one backward.

    Ranks' collectives pair up by order, and which gradient is ready first may differ from rank to
    rank. So each unit waits for its turn, and a unit that gets no gradient on this rank is reduced
    with zeros in its turn. See Note [reduce order].
    """

    _goes_ahead = False
    """Whether the last unit's param groups are reduced as they become complete."""

    max_inputs = MAX_INPUTS

    def __init__(self, comm: CommOps, states: UnitStates) -> None:
        self._comm = comm
        self._states = states
        self._pending: list[PendingReduction] = []
        self._by_unit: dict[ScheduledUnit, PendingReduction] = {}
        self._in_flight: deque[tuple[ScheduledUnit, Gradients, ReductionWork]] = deque()
        self._reading: set[Gradients] = set()
        """Those of :attr:`_in_flight`: a reduce-scatter reads their reduce inputs."""
        self._filling: dict[Gradients, ScheduledUnit] = {}

    def expect(self, first_uses: Iterable[tuple[ScheduledUnit, int]]) -> None:
        """Expect these units to take part in this backward, on every rank."""
        for unit, first_use in first_uses:
            if unit.gradients and unit not in self._by_unit:
                turn = PendingReduction(unit, first_use, (-first_use, unit.index))
                self._by_unit[unit] = turn
                self._pending.append(turn)
        self._pending.sort(key=_place)

    def nothing_follows(self) -> None:
        """Note that nothing more is gathered in this backward, on any rank. So the order in which
        param groups of the last unit are reduced among gathers no longer depends on when they are
        complete: they need not wait for each other. See Note [pieces]."""
        self._goes_ahead = True

    def more_may_arrive(self) -> None:
        """Let nothing go ahead of its turn from now on, because gradients that are there may get
        more in this backward."""
        self._goes_ahead = False

    def arrived(self, unit: ScheduledUnit, gradients: Gradients, index: int) -> None:
        """Handle the gradient of parameter ``index``, which autograd delivered."""
        turn = self._by_unit.get(unit)
        if turn is None or (turn.reduced and gradients in _last_first(unit)[: turn.reduced]):
            return  # It is late. :meth:`issue_rest` finds it where autograd holds it.
        if gradients.may_copy_in_early(index) and self._may_fill(turn, gradients):
            gradients.copy_in([index])
        if unit.is_in_pieces:
            turn.arrived.setdefault(gradients, set()).add(index)
            if self._goes_ahead and turn is self._pending[0] and unit.syncs_gradients:
                self._reduce_complete(turn)

    def passed(self, tick: int) -> None:
        """Reduce every unit first used after ``tick``, which backward is done with."""
        pending = self._pending
        while pending and pending[0].first_use > tick:
            turn = pending.pop(0)
            del self._by_unit[turn.unit]
            self._reduce(turn.unit, turn.reduced)

    def issue_rest(self, units: Iterable[ScheduledUnit]) -> None:
        """Reduce what is left, with zeros if there is no gradient."""
        self._goes_ahead = False
        self.passed(-1)
        for unit in units:
            # Left are gradients that arrived after the unit was reduced (reentrant checkpointing of
            # a module that runs several times), gradients of parameters that were used outside
            # their unit's forward, and units that ran only in backwards without synchronization,
            # or without reduction over replicas.
            has_unreduced = self._states[unit.index].has_unreduced
            if unit.holds_gradients or (has_unreduced and unit.completes_gradients):
                self._reduce(unit)

    def wait(self) -> None:
        """Make compute wait for all reductions among shards that were issued."""
        while self._in_flight:
            self._wait_for_oldest()

    def drop(self) -> None:
        """Forget everything under way."""
        self._comm.abandon((gradients, work) for _, gradients, work in self._in_flight)
        self._in_flight.clear()
        self._reading.clear()
        self._filling.clear()
        self._pending.clear()
        self._by_unit.clear()
        self._goes_ahead = False

    def _reduce_complete(self, turn: PendingReduction) -> None:
        """Reduce the param groups of ``turn`` whose gradients are all there, up to the first of
        which some are not: the order is the same on every rank."""
        for gradients in _last_first(turn.unit)[turn.reduced :]:
            if len(turn.arrived.get(gradients, ())) < gradients.count:
                return
            self._reduce_param_group(turn.unit, gradients, syncs=True)
            turn.reduced += 1

    def _reduce(self, unit: ScheduledUnit, done: int = 0) -> None:
        """Reduce all param groups of ``unit`` but the first ``done``."""
        completes = unit.completes_gradients
        syncs = completes or unit.syncs_gradients
        self._states[unit.index].has_unreduced = not completes
        for gradients in unit.gradients[::-1][done:]:  # those first that are expected first
            self._reduce_param_group(unit, gradients, syncs)

    def _reduce_param_group(self, unit: ScheduledUnit, gradients: Gradients, syncs: bool) -> None:
        is_new = self._ensure_input(unit, gradients)
        gradients.copy_in_all()
        if syncs:
            while not is_new and self._in_flight and not self._has_room(unit):
                self._wait_for_oldest()
            self._filling.pop(gradients, None)
            work = self._comm.reduce(gradients)  # on a device it calls users' hooks
            self._reading.add(gradients)
            self._in_flight.append((unit, gradients, work))

    def _may_fill(self, turn: PendingReduction, gradients: Gradients) -> bool:
        """Return whether a gradient may go to the reduce input before its param group is complete.
        Give the input memory if so. Compute waits for the oldest reduction now if it has to:
        otherwise autograd would hold more and more gradients until the param group is complete.
        Only where that blocks the host, and another input may exist, the answer is no instead."""
        if gradients in self._reading:
            return False
        if gradients.has_input:
            return True
        while self._in_flight and self._in_flight[0][2].done():
            self._wait_for_oldest()
        unit = turn.unit
        if self.max_inputs > 1 and not self._comm.runs_ahead:
            has_room = self._has_room(unit)
        else:
            has_room = all(other is unit for other in self._filling.values())
        if turn is not self._pending[0] or not has_room:
            return False
        self._ensure_input(unit, gradients)
        if unit.syncs_gradients:
            self._filling[gradients] = unit
        return True

    def _ensure_input(self, unit: ScheduledUnit, gradients: Gradients) -> bool:
        """Give the reduce input memory, once no reduction reads it, and there is room. Return
        whether it had none."""
        while gradients in self._reading:  # with an earlier gradient
            self._wait_for_oldest()
        if gradients.has_input:
            return False
        while self._in_flight and not self._has_room(unit):
            self._wait_for_oldest()
        self._comm.allocate_input(gradients)
        return True

    def _has_room(self, unit: ScheduledUnit) -> bool:
        """Return whether a param group of ``unit`` may have a reduce input. Those of one unit count
        as one."""
        # A generator would be called for each, and often.
        busy = {unit, *self._filling.values(), *map(itemgetter(0), self._in_flight)}
        return len(busy) <= self.max_inputs

    def _wait_for_oldest(self) -> None:
        _, gradients, work = self._in_flight[0]
        self._comm.finish(gradients, work)  # calls users' hooks, which may raise
        self._in_flight.popleft()
        self._reading.discard(gradients)


def _last_first(unit: ScheduledUnit) -> Sequence[Gradients]:
    """Return the param groups of ``unit``, those first whose gradients are expected first."""
    return unit.gradients[::-1]


# ---- The walk back ----


def _read_in_backward(units: UnitRefs) -> UnitRefs:
    """Return those of ``units`` that backward gathers."""
    return [find for find in units if (other := find()) and other.settings.unshard_in_backward]


@dataclass(eq=False)
class Backward:
    """What one backward has done so far, and what it does next.

    ``serial`` counts backwards from 1. ``_open_passes`` are the passes that it may come back to.
    """

    serial: int
    graph_task: int
    _prefetcher: Prefetcher
    _reducer: GradReducer
    _comm: CommOps
    _engine: AutogradEngine
    _refs: UnitRefs
    _states: UnitStates
    _open_passes: Sequence[ForwardPass]
    accumulates: bool
    """Whether gradients go to parameters. In ``torch.autograd.grad()`` they do not."""
    creates_graph: bool = False
    """Whether its gradients may be differentiated again: ``create_graph=True``."""
    under_way: list[ForwardPass] = field(default_factory=list)
    """The pass that backward is in, with those that are nested in it where units run again."""
    remaining: dict[ForwardPass, list[ForwardRecord]] = field(default_factory=dict)
    """For each pass reached, the calls that backward has yet to come back to, the next one last."""
    open_calls: list[ForwardRecord] = field(default_factory=list)
    """Calls whose backward is under way."""
    lost_edit: str | None = None
    """An edit of unsharded parameters that the shards do not have, in words. It is raised as an
    error when backward ends."""

    def begin(self) -> None:
        """Begin, at the first event of this backward."""
        in_graphs = self._prefetcher.in_graphs
        self._expect([(index, use.first_use) for index, use in in_graphs.items()])

    def advance_to(self, call: ForwardRecord) -> None:
        """Enqueue what every rank enqueues up to ``call``, also for calls that this rank skips."""
        forward_pass, under_way = call.forward_pass, self.under_way
        if not under_way or under_way[-1] is not forward_pass:
            self._enter(forward_pass)
        remaining = self.remaining[forward_pass]
        # The call almost always is the last one, and a long list takes long to search.
        if remaining and remaining[-1] is call:
            self._step(remaining.pop())
        elif call in remaining:
            self._walk_to(remaining.index(call), remaining)
        else:
            self._come_again_to(call)
            return
        if not remaining and self._has_reached_all():
            self._reducer.nothing_follows()

    def finish(self) -> None:
        """End the walk: this rank's graph reaches no more calls. Walk past the calls of forward
        that remain, as other ranks do, and release the units that are still open."""
        self._walk_rest()
        self.remaining.clear()
        self._leave(-1)

    def uses(self, unit: ScheduledUnit) -> bool:
        """Return whether this backward needs the full buffers of ``unit`` now."""
        return self.is_open(unit.index)

    def may_nest(self) -> bool:
        """Return whether another backward within this one belongs to it."""
        return False

    def is_open(self, index: UnitIndex) -> bool:
        """Return whether the backward of a call of unit ``index`` is under way."""
        for call in self.open_calls:  # noqa: SIM110, asked often, and any() makes a generator first
            if call.unit_index == index:
                return True
        return False

    def _has_reached_all(self) -> bool:
        """Return whether backward has come back to all calls of all passes, so that it gathers
        nothing more."""
        passes = self._open_passes
        return (
            len(passes) < MAX_OPEN_PASSES  # else some may be forgotten
            and all(reached in passes for reached in self.remaining)  # else a graph was retained
            and not any(self.remaining.get(each, each.calls) for each in passes)
        )

    def _enter(self, forward_pass: ForwardPass) -> None:
        """Come back to ``forward_pass``. It is done with the one before."""
        if self.under_way:
            self._walk_to_end(self.under_way.pop())
        self.under_way.append(forward_pass)
        if forward_pass not in self.remaining:
            self._take_up(forward_pass)

    def _take_up(self, forward_pass: ForwardPass) -> None:
        """Come back to ``forward_pass`` for the first time."""
        self.remaining[forward_pass] = calls = list(forward_pass.calls)
        first_uses = self._first_uses(forward_pass)
        self._expect([(call.unit_index, first_uses[call.unit_index]) for call in calls])

    def _expect(self, first_uses: Iterable[tuple[UnitIndex, int]]) -> None:
        if self.accumulates:
            units = [(self._refs[index](), tick) for index, tick in first_uses]
            self._reducer.expect([(unit, tick) for unit, tick in units if unit is not None])

    def _come_again_to(self, call: ForwardRecord) -> None:
        """Handle the gradient of another output of ``call``, or one that the walk has passed."""
        if call not in self.open_calls:
            self._step(call)
        else:
            self._leave(call.end)
            self._reducer.passed(call.end)

    def _walk_to(self, place: int, remaining: list[ForwardRecord]) -> None:
        while len(remaining) > place:
            self._step(remaining.pop())

    def _walk_rest(self) -> None:
        for forward_pass in self.remaining:
            self._walk_to_end(forward_pass)

    def _walk_to_end(self, forward_pass: ForwardPass) -> None:
        remaining = self.remaining[forward_pass]
        while remaining:
            self._step(remaining.pop())

    def _step(self, call: ForwardRecord) -> None:
        """Step to ``call``, past all that started after its end."""
        unit = self._refs[call.unit_index]()
        if unit is None:
            return
        end = call.end
        self._leave(end)
        self.open_calls.append(call)
        if not self.accumulates:
            self._mark_unreduced(unit)
        # Backward can read a full buffer that exists, even if the user said that it does not. Then
        # the graph that create_graph=True makes can read it too.
        if call.needs_parameters or (self.creates_graph and unit.is_gathered):
            self._use(unit, call.forward_pass)
            if self.creates_graph:
                self._keep_for_graph(call)
                unit.hook_gradients()
        self._reducer.passed(end)

    def _mark_unreduced(self, unit: ScheduledUnit) -> None:
        """Mark ``unit``, of which a backward for inputs alone passes a call, for reduction: Note
        [delayed weight gradients]."""
        state = self._states[unit.index]
        if state.registers_unsharded and not unit.syncs_gradients:
            state.has_unreduced = True

    def _keep_for_graph(self, call: ForwardRecord) -> None:
        """Keep the unit of ``call`` for the graph that this backward makes."""
        index, in_graphs = call.unit_index, self._prefetcher.in_graphs
        if index not in in_graphs:
            in_graphs[index] = GraphUse(self._first_uses(call.forward_pass)[index])
        in_graphs[index].modules = ()

    def _leave(self, tick: int) -> None:
        """Leave every call that started after ``tick``: backward is done with it."""
        for call in [*self.open_calls]:
            if call.start <= tick:
                continue
            self.open_calls.remove(call)
            unit = self._refs[call.unit_index]()
            if unit is None or self.is_open(call.unit_index):
                continue
            release = self._release_in_range if self._comm.is_profiled() else self._release
            release(unit)

    def _release_in_range(self, unit: ScheduledUnit) -> None:
        with self._comm.profiler_range("post_backward", unit.name):
            self._release(unit)

    def _use(
        self,
        unit: ScheduledUnit,
        forward_pass: ForwardPass | None,
        upcoming: Sequence[UnitIndex] | None = None,
    ) -> bool:
        """Gather ``unit``, and what is used next: ``upcoming``, by default what ``forward_pass``
        comes back to. Return whether anything was enqueued."""
        asked = unit.backward_prefetch and _read_in_backward(unit.backward_prefetch)
        if upcoming is None:
            prefetch = self._prefetcher.prefetch
            remaining = self.remaining[forward_pass] if forward_pass is not None else []
            following, upcoming = remaining[: -prefetch - 2 : -1], []
            for call in following:
                if call.needs_parameters:
                    upcoming.append(call.unit_index)
                    other = self._refs[call.unit_index]()
                    prefetch += other is not None and other.is_implicit and other.is_up_to_date
            if unit.index in upcoming:  # an earlier call of it, until which it stays
                upcoming.remove(unit.index)
            del upcoming[prefetch:]
        return self._prefetcher.use(unit, upcoming, asked)

    def _release(self, unit: ScheduledUnit, is_passed: bool = True) -> None:
        """Release ``unit``, or if no call is open but not all of them ``is_passed``, register its
        sharded parameters."""
        # In some backwards only: the unit's next forward finds what others miss.
        if self.serial in CHECKED_COUNTS:
            self.lost_edit = self.lost_edit or unit.find_in_place_edit()
        if is_passed and unit.settings.reshard_after_backward:
            self._prefetcher.release(unit)
        state = self._states[unit.index]
        if not state.registers_unsharded or unit.syncs_gradients:  # else the user asked for them
            state.registers_unsharded = False
            unit.to_sharded()

    def _first_uses(self, forward_pass: ForwardPass) -> Mapping[UnitIndex, int]:
        """Return for each unit of ``forward_pass`` the tick at which it first ran in the forwards
        that this backward may reach."""
        own = forward_pass.first_ticks
        shared = self._open_passes[-1].first_ticks if self._open_passes else own
        return {
            index: min(first, own.get(index, first), shared.get(index, first))
            for index, (first, _) in forward_pass.ticks.items()
        }
