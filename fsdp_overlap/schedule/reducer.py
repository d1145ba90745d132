"""Order of reduce-scatters: the reverse of forward, with few reduce inputs at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from fsdp_overlap.schedule.interface import (
    CommOps,
    Gradients,
    ReductionWork,
    ScheduledUnit,
    UnitStates,
)

# How many units have reduce inputs at once at most: one travels while the next is filled. Those
# held by backwards without synchronization do not count. With prefetch=0, for the least memory, it
# is one.
MAX_INPUTS = 2


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

    def __init__(self, comm: CommOps, max_inputs: int, states: UnitStates) -> None:
        self._comm = comm
        self._states = states
        self.max_inputs = max_inputs
        self._pending: list[PendingReduction] = []
        self._by_unit: dict[ScheduledUnit, PendingReduction] = {}
        self._in_flight: deque[tuple[ScheduledUnit, Gradients, ReductionWork]] = deque()
        self._reading: set[Gradients] = set()
        """Those of :attr:`_in_flight`: a reduce-scatter reads their reduce inputs."""
        self._filling: dict[Gradients, ScheduledUnit] = {}
        self._goes_ahead = False
        """Whether the last unit's param groups are reduced as they become complete."""

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
            if unit.is_waiting or (has_unreduced and unit.completes_gradients):
                self._reduce(unit)

    def wait(self) -> None:
        """Make compute wait for all reductions that were issued."""
        while self._in_flight:
            self._wait_for_oldest()
        self._comm.finish_all_reduces()

    @property
    def is_under_way(self) -> bool:
        return bool(self._in_flight)

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
            self._reading.add(gradients)
            self._in_flight.append((unit, gradients, self._comm.reduce(gradients)))

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
        busy = {unit, *self._filling.values()}
        for other, _, _ in self._in_flight:  # a generator would be called for each, and often
            busy.add(other)
        return len(busy) <= self.max_inputs

    def _wait_for_oldest(self) -> None:
        _, gradients, work = self._in_flight[0]
        self._comm.finish(gradients, work)  # calls users' hooks, which may raise
        self._in_flight.popleft()
        self._reading.discard(gradients)


def _last_first(unit: ScheduledUnit) -> Sequence[Gradients]:
    """Return the param groups of ``unit``, those first whose gradients are expected first."""
    return unit.gradients[::-1]
