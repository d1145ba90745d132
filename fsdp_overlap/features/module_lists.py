"""Schedules of units of several modules: Note [several modules]."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_overlap.schedule.backward import MAX_OPEN_PASSES, Backward
from fsdp_overlap.schedule.interface import ForwardPass, ForwardRecord, ScheduledUnit, UnitIndex
from fsdp_overlap.schedule.prefetch import GraphUse
from fsdp_overlap.schedule.recompute import RecomputeOrder, RecomputingBackward
from fsdp_overlap.schedule.scheduler import Schedule


def become_list_schedule(schedule: Schedule) -> ListSchedule:
    """Make ``schedule`` a :class:`ListSchedule`, unless it is one. It stays the same object,
    because hooks of graphs refer to it."""
    if not isinstance(schedule, ListSchedule):
        schedule.__class__ = ListSchedule
        assert isinstance(schedule, ListSchedule)
        schedule.begin_lists()
    return schedule


class ListSchedule(Schedule):
    """A schedule for units of several modules too.

    Such a unit is in use from the first of its modules that runs until each has run.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begin_lists()

    @classmethod
    def take_in(cls, schedule: Schedule, unit: ScheduledUnit) -> None:
        schedule = become_list_schedule(schedule)
        if len([*unit.module_ids]) > 1:
            schedule.lists.setdefault(unit.index, set())

    def begin_lists(self) -> None:
        """Begin to be one, of another schedule or a new one."""
        self.lists: dict[UnitIndex, set[int]] = {}
        """Units of several modules, each with the ids of those that have yet to run in the forward
        under way."""
        self._unfinished: list[ScheduledUnit] = []
        """Those that stay gathered, because not all of their modules have run in the forward under
        way."""
        self._read_by_others: dict[UnitIndex, deque[ForwardPass]] = {}
        """Those of which a module did not run in these passes, so that others may have read its
        parameters. They stay gathered until a backward has come back to each of the passes."""

    def after_forward(
        self, unit: ScheduledUnit, module: int, raised: bool = False
    ) -> ForwardRecord | None:
        pending = self.lists.get(unit.index)
        if pending is not None and self._ends_forward_of(unit):
            self._module_ended(unit, module, pending, raised)
        return super().after_forward(unit, module, raised)

    def _ends_forward_of(self, unit: ScheduledUnit) -> bool:
        """Return whether a forward of ``unit`` outside of a backward is the last of those under
        way, and not one before which an error was raised."""
        if self._backward is not None and self._graph_task() != -1:
            return False
        return bool(self._running) and self._running[-1][0] is unit

    def _module_ended(
        self, unit: ScheduledUnit, module: int, pending: set[int], raised: bool
    ) -> None:
        """Handle that a forward of ``unit`` has run, the last of those under way, or ``raised``."""
        if module in unit.module_ids:  # and not one that reads its parameters
            if not pending:
                pending.update(unit.module_ids)
            pending.discard(module)
            if unit in self._unfinished:
                self._unfinished.remove(unit)
        mine = self._running.pop()
        if not self.is_in_use(unit):
            if pending and self._running and not raised:
                self._unfinished.append(unit)
            else:
                pending.clear()
        self._running.append(mine)

    def is_in_use(self, unit: ScheduledUnit) -> bool:
        """Return whether a forward or backward of ``unit`` is under way, or some of its modules
        have yet to run."""
        return unit in self._unfinished or super().is_in_use(unit)

    def _end_outermost(self, unit: ScheduledUnit, raised: bool) -> None:
        if self._unfinished:
            self._end_unfinished(raised)
        super()._end_outermost(unit, raised)

    def _end_unfinished(self, raised: bool) -> None:
        """End the forwards of units that wait for more of their modules. The outermost unit has
        run, so these modules will not run in this pass. Other modules may have read their
        parameters, and no call tells when backward reads them again. So if there is a graph, the
        units stay gathered."""
        is_kept = not raised and self._may_be_read_unseen()
        for unit in self._unfinished:
            pending = self.lists[unit.index]
            skipped = {*pending}
            pending.clear()
            if not self._states[unit.index].registers_unsharded:
                unit.to_sharded()
            if is_kept:
                self._keep_for_others(unit, skipped)
            elif raised or unit.reshards_after_forward():
                self.prefetcher.release(unit)
        self._unfinished.clear()

    def _may_be_read_unseen(self) -> bool:
        """Return whether a graph of the pass under way may read parameters without a call."""
        return self._engine.is_grad_enabled() or bool(self._pass.calls)

    def _keep_for_others(self, unit: ScheduledUnit, skipped: set[int]) -> None:
        """Keep ``unit`` gathered until backward has come back to this pass, because others may have
        read what the modules ``skipped`` have."""
        index, in_graphs = unit.index, self.prefetcher.in_graphs
        if index not in in_graphs:
            in_graphs[index] = GraphUse(self._pass.ticks[index][0], skipped)
            self._read_by_others.pop(index, None)
        elif in_graphs[index].modules:  # else a graph may read all
            in_graphs[index].modules = {*in_graphs[index].modules, *skipped}
        passes = self._read_by_others.setdefault(index, deque(maxlen=MAX_OPEN_PASSES))
        passes.append(self._pass)

    def _make_backward(self, accumulates: bool) -> Backward:
        self._recompute_order = self._recompute_order or RecomputeOrder(self._refs)
        return super()._make_backward(accumulates)

    def _with_recompute(self, backward: Backward) -> RecomputingBackward:
        return ListBackward(
            **vars(super()._with_recompute(backward)),
            lists=self.lists.keys(),
            read_by_others=self._read_by_others,
        )

    def _finish_walk(self, backward: Backward) -> Collection[ForwardPass]:
        reached = super()._finish_walk(backward)
        if self._read_by_others and not self._engine.keeps_graph():
            self._release_read_by_others(reached)
        return reached

    def _release_read_by_others(self, reached: Collection[ForwardPass]) -> None:
        """Release the units of :attr:`_read_by_others` that no graph is left to read, after a
        backward that came back to the passes ``reached`` and does not keep its graph."""
        for index, passes in list(self._read_by_others.items()):
            for forward_pass in [*passes]:
                if forward_pass in reached or not forward_pass.calls:
                    passes.remove(forward_pass)
            if passes:
                continue
            del self._read_by_others[index]
            unit = self._refs[index]()
            if unit is None or not unit.settings.reshard_after_backward:
                continue
            use = self.prefetcher.in_graphs.get(index)
            if use is None or use.modules:
                self.prefetcher.take_out_of_graphs(unit)
                self.prefetcher.release(unit)

    def drop(self) -> None:
        super().drop()
        for pending in self.lists.values():
            pending.clear()
        self._unfinished.clear()
        self._read_by_others.clear()


@dataclass(eq=False, kw_only=True)
class ListBackward(RecomputingBackward):
    """A backward of a :class:`ListSchedule`. Units may run again in it."""

    lists: Collection[UnitIndex]
    """Units of several modules."""
    read_by_others: Mapping[UnitIndex, Collection[ForwardPass]]
    """Those of which a module did not run, and the passes in which."""
    unfinished: set[UnitIndex] = field(default_factory=set)
    """Those that stay gathered, because some of their calls remain."""
    registered: set[UnitIndex] = field(default_factory=set)
    """Those whose unsharded parameters are registered until this backward ends, because the code of
    others that read them may run again: see Note [recomputing]."""

    def uses(self, unit: ScheduledUnit) -> bool:
        return unit.index in self.registered or super().uses(unit)

    def _take_up(self, forward_pass: ForwardPass) -> None:
        super()._take_up(forward_pass)
        for index, passes in self.read_by_others.items():
            unit = self._refs[index]()
            if unit is not None and index in self._prefetcher.in_graphs and forward_pass in passes:
                unit.to_unsharded()
                self.registered.add(index)

    def _release(self, unit: ScheduledUnit, is_passed: bool = True) -> None:
        if unit.index in self.lists and self._comes_back_to(unit.index):
            self.unfinished.add(unit.index)
            is_passed = False
        super()._release(unit, is_passed)
        if unit.index in self.registered:
            unit.to_unsharded()

    def _comes_back_to(self, unit: UnitIndex) -> bool:
        """Return whether a call of ``unit`` is yet to be reached."""
        return any(call.unit_index == unit for calls in self.remaining.values() for call in calls)

    def finish(self) -> None:
        super().finish()
        left = self.unfinished | self.registered
        self.registered.clear()
        for index in left:
            unit = self._refs[index]()
            if unit is not None:
                self._release(unit)
