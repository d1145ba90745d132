"""The order of units, recorded and predicted; prefetch and delayed release of full buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fsdp_overlap.schedule.interface import (
    CommOps,
    ComputeEvent,
    ScheduledUnit,
    UnitIndex,
    UnitRefs,
    UnitStates,
)
from fsdp_overlap.schedule.stats import Stats


class ForwardOrder:
    """Records the order of units in each pass, and predicts it for later passes.

    A pass is predicted from the last one that began with the same unit: a head that runs alone,
    chunk by chunk, says nothing about the whole model. If none did, it is predicted from the last.

    Only passes that gathered something count. A pass that found all units up to date may have run
    on this rank alone, and what is predicted is enqueued, so it must be the same on every rank. See
    Note [order].
    """

    is_recorded = False
    """Whether the pass under way is to be recorded: it enqueued all-gathers, so it runs on every
    rank."""
    registered: Sequence[UnitIndex] = ()
    """The order in which modules register the units, which predicts a pass if none is recorded."""
    _last_recorded: Sequence[UnitIndex] = ()
    _predicted: Sequence[UnitIndex] = ()
    _first = -1
    _next = 0

    def __init__(self) -> None:
        self._recorded: dict[UnitIndex, Sequence[UnitIndex]] = {}
        self._running: list[UnitIndex] = []

    def begin(self, first: UnitIndex = -1) -> None:
        """Begin a new pass. ``first`` is the unit that begins it; passes are told apart by it."""
        if self.is_recorded:
            self._recorded[self._first] = self._last_recorded = self._running
        self._predicted = self._recorded.get(first, self._last_recorded or self.registered)
        self._first = first
        self._running = []
        self.is_recorded = False
        self._next = 0

    def expect(self, units: Sequence[UnitIndex]) -> None:
        """Predict the rest of the pass under way as ``units``."""
        self._predicted = units
        self._next = 0

    def visit(self, unit: UnitIndex, count: int) -> Sequence[UnitIndex]:
        """Record that ``unit`` runs now. Return the ``count`` units expected next, fewer at the end
        of the pass.

        If another unit was predicted, the prediction moves on to behind this one. If this one is
        not ahead in the prediction, that stays where it is. Runs of one unit that follow each other
        count as one, because it stays gathered between them."""
        running, predicted, following = self._running, self._predicted, self._next
        if not running or running[-1] != unit:
            running.append(unit)
            if unit in predicted[following : following + 1]:
                self._next = following = following + 1
            else:
                with suppress(ValueError):
                    self._next = following = predicted.index(unit, following) + 1
        return predicted[following : following + count]

    def expects(self, unit: UnitIndex) -> bool:
        """Return whether ``unit`` is expected next."""
        return unit in self._predicted[self._next : self._next + 1]

    def predicted(self) -> Sequence[UnitIndex]:
        """Return the units of the longest pass known, in order."""
        known = dict(self._recorded)
        if self.is_recorded:
            known[self._first] = self._running
        return max(known.values(), key=len, default=[])

    def has_recorded(self, first: UnitIndex) -> bool:
        """Return whether a pass that ``first`` begins is predicted from one that it began
        before."""
        return first in self._recorded or (self.is_recorded and self._first == first)

    def has_visited(self, unit: UnitIndex) -> bool:
        return unit in self._running


@dataclass(eq=False, slots=True)
class GraphUse:
    """Which parameters of a unit a graph may read at any time."""

    first_use: int
    """The tick of the unit's first use."""
    modules: Collection[int] = ()
    """The ids of the modules whose parameters these are, empty if they are all."""


class Prefetcher:
    """Keeps at most ``prefetch`` full buffers beside those in use. The user may ask for more. See
    Note [room] and, for how that overlaps with compute, Note [running ahead].

    A buffer that is not in use was either gathered ahead or waits for its delayed release.
    :meth:`release` delays, :meth:`flush` and :meth:`finish_pass` free, and :meth:`drop` forgets.
    Every decision follows from the order of calls alone, so that all ranks enqueue the same
    all-gathers: Note [pairing]. Units are named by index, so that none is kept alive.
    """

    _was_next_in_vain = False
    """Whether the units of :attr:`_for_next_pass` were edited again between the last step and the
    pass that followed. Then they were gathered in vain, and are not gathered ahead until a pass
    finds them as the step left them."""
    _issued = 0
    """How many all-gathers were enqueued. By it :meth:`use` knows whether it enqueued any."""
    _waits_for_event = False
    may_run_alone = False
    """Whether only this rank may run the pass under way: it began with a unit that the user keeps
    unsharded, and has gathered nothing."""

    def __init__(
        self, comm: CommOps, prefetch: int, stats: Stats, refs: UnitRefs, states: UnitStates
    ) -> None:
        self._comm = comm
        self.prefetch = prefetch
        self.stats = stats
        self._refs = refs
        self._states = states
        # Each mark is of the compute that still reads the buffer, None if no compute has used it.
        self._ahead: dict[UnitIndex, ComputeEvent] = {}
        self._delayed: dict[UnitIndex, ComputeEvent] = {}
        # As _ahead, but asked for by the user, and so kept until used or until the pass ends.
        self._asked: dict[UnitIndex, ComputeEvent] = {}
        # The units that the next pass needs first. Each with its version after the last step, and
        # whether its full buffer is there for that alone.
        self._for_next_pass: dict[UnitIndex, tuple[int, bool]] = {}
        self.in_graphs: dict[UnitIndex, GraphUse] = {}
        """Units whose full buffers a graph may read at moments that no hook sees, as one that
        ``backward(create_graph=True)`` made: Note [graphs of gradients]."""

    def use(
        self, unit: ScheduledUnit, upcoming: Sequence[UnitIndex] = (), asked: UnitRefs = ()
    ) -> bool:
        """Enqueue the all-gathers that are missing: compute needs ``unit`` now, and is expected to
        need ``upcoming`` next. Free delayed buffers after this unit's all-gather, so that it does
        not wait, and before prefetches, so that they can reuse the memory. If the user ``asked``
        for units, gather all of them instead of ``upcoming``. Return whether anything was
        enqueued."""
        issued, mine = self._issued, unit.index
        if self._for_next_pass and (asked or self._is_for_all_ranks(unit, upcoming)):
            self._take_over()
        ahead, delayed = self._ahead, self._delayed
        delayed.pop(mine, None)
        is_ahead = mine in ahead or mine in self._asked
        if is_ahead:
            ahead.pop(mine, None)
            self._asked.pop(mine, None)
        if unit.is_up_to_date:
            self.stats.prefetch_hits += is_ahead
        else:
            if len(ahead) + len(delayed) > self.prefetch:
                self._make_room()
            self._gather(unit)
            self.stats.prefetch_misses += 1
        if ahead:
            for index in [index for index in ahead if index not in upcoming]:
                self._free_unused(index)
        if delayed:
            for index in upcoming:
                if index in delayed:
                    ahead[index] = delayed.pop(index)
        if asked:
            self._ask(asked)
            return self._issued != issued
        if delayed and (upcoming or not unit.is_implicit):  # backward needs what ran before a head
            self.flush()
        if self.may_run_alone and self._issued == issued:
            return False
        for index in upcoming:
            if len(ahead) + len(self._asked) >= self.prefetch:
                break
            other = self._refs[index]()
            if other is not None and not (other.is_gathered and other.is_up_to_date):
                self._gather(other)
                ahead[index] = None
        return self._issued != issued

    def refresh(self, units: Iterable[ScheduledUnit]) -> None:
        """Enqueue the all-gathers of full buffers whose shards were edited since the last one."""
        for unit in units:
            if unit.is_gathered and not unit.is_up_to_date:
                self._gather(unit)

    def begin_next(self, units: Iterable[ScheduledUnit]) -> None:
        """Enqueue the all-gathers of those ``units`` that were edited since the last one. The next
        pass is expected to begin with them: Note [after a step]."""
        for unit in units:
            # The user may edit what rests on the host at any time, without waiting for reads.
            if unit.rests_on_host or self._states[unit.index].synced_version == unit.version:
                continue
            is_for_pass = not unit.is_gathered
            if unit.index in self._for_next_pass:  # by the step before, and no pass came
                _, is_for_pass = self._for_next_pass[unit.index]
            self._for_next_pass[unit.index] = unit.version, is_for_pass
            if not self._was_next_in_vain:
                self._gather(unit)

    def before_step(self) -> None:
        """Make compute, which is about to edit shards, wait for the all-gathers that read them for
        a pass that has not begun."""
        for index in self._for_next_pass:
            unit = self._refs[index]()
            if unit is not None:
                unit.wait()

    def release(self, unit: ScheduledUnit) -> None:
        """Free the full buffer of ``unit`` once the compute enqueued so far has read it. That is
        put off until the next all-gather has been enqueued, so that this one does not wait."""
        if self._states[unit.index].registers_unsharded:
            self.hide_unsharded(unit)
        if unit.index in self.in_graphs:
            return
        if unit.is_gathered:
            self._ahead.pop(unit.index, None)
            self._asked.pop(unit.index, None)
            self._for_next_pass.pop(unit.index, None)
            self._delayed[unit.index] = self._comm.record_compute_event()

    def hide_unsharded(self, unit: ScheduledUnit) -> None:
        """Register the sharded parameters of ``unit``, also if the user asked for the unsharded
        ones, which :meth:`Schedule.show_unsharded` registered."""
        self._states[unit.index].registers_unsharded = False
        unit.to_sharded()

    def take_out_of_graphs(self, unit: ScheduledUnit) -> None:
        """Remove ``unit`` from :attr:`in_graphs`, because its full buffer is to be freed or
        refilled. From now on autograd refuses to read the buffer for an old graph."""
        use = self.in_graphs.pop(unit.index, None)
        if use is not None:
            self._comm.forbid_old_graphs(unit, use.modules)

    def release_stale(self) -> None:
        """Release the units of :attr:`in_graphs` whose shards were edited since."""
        for index in list(self.in_graphs):
            unit = self._refs[index]()
            if unit is None:
                del self.in_graphs[index]
            elif not unit.is_up_to_date:
                self.take_out_of_graphs(unit)
                if unit.settings.reshard_after_backward:
                    self.release(unit)

    def flush(self) -> None:
        """Carry out the delayed releases."""
        for index, mark in self._delayed.items():
            self._free(index, mark)
        self._delayed.clear()

    def finish_pass(
        self, backward_follows: bool = False, keep: ScheduledUnit | None = None
    ) -> None:
        """Free every full buffer that is not in use, at the end of a pass and before the next one,
        with two exceptions, whose release stays delayed. If ``backward_follows`` it is the unit
        that ran last, if the user left that choice to the library: backward needs it first.
        ``keep`` is the unit that begins the next pass."""
        self._ahead.update(self._asked)
        self._asked.clear()
        for index in list(self._ahead):
            self._free_unused(index)
        for index, mark in list(self._delayed.items()):
            unit = self._refs[index]()
            if backward_follows and self.prefetch and unit and unit.is_kept_for_backward:
                continue
            if unit is not None and unit is keep:
                continue
            del self._delayed[index]
            self._free(index, mark, waits=not self.prefetch)

    def drop(self) -> None:
        """Forget everything. The param groups' memory is freed elsewhere."""
        self._for_next_pass.clear()
        self._was_next_in_vain = False
        self._ahead.clear()
        self._asked.clear()
        self._delayed.clear()
        for index in list(self.in_graphs):
            unit = self._refs[index]()
            if unit is not None:
                self.take_out_of_graphs(unit)
        self.in_graphs.clear()

    def wait_once_for_event(self, units: Iterable[ScheduledUnit]) -> None:
        """Note that all-gathers wait for an event, which comes after all edits of ``units`` so far.
        So those of the next pass need not wait for all compute."""
        self._note_edits(units)
        self._waits_for_event = True

    def begin_pass(self, units: Iterable[ScheduledUnit], is_on_all_ranks: bool) -> None:
        """Make the all-gathers of this pass see the edits of ``units`` made before it. If there
        are none, they need not wait for compute: Note [between passes]. ``is_on_all_ranks``:
        whether the root begins it, or ranks agreed on it."""
        self.may_run_alone = not is_on_all_ranks
        if self._waits_for_event:
            self._waits_for_event = False
        elif self._note_edits(units):
            self._comm.after_compute()

    def _note_edits(self, units: Iterable[ScheduledUnit]) -> bool:
        """Note that all-gathers from now on see every edit of ``units`` made so far. Return whether
        there are any that they did not see."""
        states, are_edited = self._states, False
        for unit in units:
            state, version = states[unit.index], unit.version
            if state.synced_version != version:
                state.synced_version = version
                are_edited = True
        return are_edited

    def _gather(self, unit: ScheduledUnit, shadow: bool = False) -> None:
        # Compute may have edited the shard, or may still read a buffer that is gathered again.
        version, state = unit.version, self._states[unit.index]
        if state.synced_version != version or unit.is_gathered:
            self._comm.after_compute()
            state.synced_version = version
            self.take_out_of_graphs(unit)  # which must not read what is refilled
        self._issued += 1
        self._comm.gather(unit, shadow=shadow)

    def _is_for_all_ranks(self, unit: ScheduledUnit, upcoming: Sequence[UnitIndex]) -> bool:
        """Return whether the pass that now comes to ``unit`` runs on every rank, as far as that is
        known. What users keep unsharded this rank may run alone: Note [order]. Then the others must
        find here what they have too."""
        if unit.index in self._for_next_pass or not unit.is_up_to_date:
            return True
        others = [other for index in upcoming if (other := self._refs[index]()) is not None]
        return not all(other.is_up_to_date for other in others)

    def _take_over(self) -> None:
        """Count what was gathered for a pass, which has begun, as gathered ahead."""
        was_gathered = not self._was_next_in_vain
        self._was_next_in_vain = False
        for index, (version, is_for_pass) in self._for_next_pass.items():
            unit = self._refs[index]()
            self._was_next_in_vain |= unit is not None and unit.version != version
            if is_for_pass and was_gathered:
                self._ahead[index] = None
        self._for_next_pass.clear()

    def _ask(self, asked: UnitRefs) -> None:
        """Gather the units that the user ``asked`` for and that are not up to date.
        See Note [explicit prefetch]."""
        others = [
            other
            for find in asked
            if (other := find()) is not None and self._refs[other.index]() is other
        ]
        for other in others:
            for waiting in (self._ahead, self._delayed):
                if other.index in waiting:
                    self._asked[other.index] = waiting.pop(other.index)
        self.flush()
        for other in others:
            if not other.is_up_to_date:
                self._asked.setdefault(other.index, None)
                self._gather(other)

    def _make_room(self) -> None:
        """Free full buffers before an all-gather that was not predicted. Those gathered ahead in
        vain go first, because a delayed release makes the comm stream wait for compute."""
        for index in list(self._ahead):
            if len(self._ahead) + len(self._delayed) <= self.prefetch:
                return
            self._free_unused(index)
        if len(self._delayed) > self.prefetch:
            self.flush()

    def _free_unused(self, index: UnitIndex) -> None:
        self.stats.prefetches_unused += 1
        self._free(index, self._ahead.pop(index))

    def _free(self, index: UnitIndex, mark: ComputeEvent, waits: bool = True) -> None:
        unit = self._refs[index]()
        if unit is not None:
            if self._states[index].registers_unsharded:  # gathered anew after an edit, ahead of use
                self.hide_unsharded(unit)
            self._comm.free(unit, mark, waits)
