"""Events of forward and backward, and the gathers, releases and reductions that follow from each.

In the forward of unit *i*, its all-gather is enqueued first, unless that was done ahead. Then
delayed releases are carried out. Then the next all-gather in the predicted order is enqueued. Then
compute waits for the all-gather of *i*. Backward does the same along the reverse of what ran, and
issues reduce-scatters as param groups become complete.

All of it follows from the order of calls, never from what is ready first on one rank, so that all
ranks enqueue the same collectives. Where a rank's backward skips a call that others reach, the
call's all-gather is enqueued all the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import count, islice

from fsdp_overlap.schedule.backward import MAX_OPEN_PASSES, Backward, GradReducer
from fsdp_overlap.schedule.finalization import (
    UNFINISHED,
    BackwardFinalizer,
    GradientReductionHandle,
)
from fsdp_overlap.schedule.interface import (
    AutogradEngine,
    CommOps,
    ForwardPass,
    ForwardRecord,
    Gradients,
    NoGradForward,
    ScheduledUnit,
    UnitIndex,
    UnitRefs,
    UnitState,
    UnitStates,
)
from fsdp_overlap.schedule.prefetch import ForwardOrder, Prefetcher
from fsdp_overlap.schedule.recompute import RecomputeOrder, RecomputingBackward
from fsdp_overlap.schedule.stats import Stats

EDITED = (
    "parameters of unit {!r} were modified between its forward and its backward; run backward "
    "before optimizer.step() and before editing weights"
)


class Schedule:
    """Decides at each event of one context's forwards and backwards what is issued.

    ``refs`` find the units, and ``units`` lists those that exist. ``sync_requires_grad`` finds out
    which param groups get gradients: the user may freeze parameters between forward and backward.
    ``prepares``: whether something must come before all-gathers.
    """

    prefetcher_class = Prefetcher
    _recompute_order: RecomputeOrder | None = None
    """The order of backwards in which units run again. ``None`` until one might."""
    _is_pass_over = True
    _backward: Backward | None = None
    backwards = 0
    """How many backwards have begun."""

    def __init__(
        self,
        comm: CommOps,
        engine: AutogradEngine,
        stats: Stats,
        refs: UnitRefs,
        units: Callable[[], Sequence[ScheduledUnit]],
        prefetch: int,
        prepares: bool,
        sync_requires_grad: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm = comm
        self._engine = engine
        self._graph_task = engine.graph_task  # asked in every event
        self._refs = refs
        self._units = units
        self._states: UnitStates = defaultdict(UnitState)
        self.prefetcher = self.prefetcher_class(comm, prefetch, stats, refs, self._states)
        self.reducer = GradReducer(comm, self._states)
        self.finalizer = BackwardFinalizer(self.prefetcher, self.reducer, comm, engine, units)
        self.order = ForwardOrder()
        self._prepares = prepares
        self._sync_requires_grad = sync_requires_grad
        self._tick = count(1).__next__
        self._running: list[tuple[ScheduledUnit, int]] = []
        self._pass = ForwardPass()
        self._by_hand: set[UnitIndex] = set()
        """Units that the user has unsharded. See Note [unsharded by hand]."""
        self._open_passes: deque[ForwardPass] = deque(maxlen=MAX_OPEN_PASSES)
        self._first_ticks: dict[UnitIndex, int] = {}
        """The :attr:`ForwardPass.first_ticks` of these, and of those that were forgotten."""

    @classmethod
    def take_in(cls, schedule: Schedule, unit: ScheduledUnit) -> None:
        """Prepare ``schedule`` for ``unit``, which asks for a schedule of this class. One that was
        made for others becomes one, and is then slower than one that was made so."""

    # Ranks that run different units, in a schedule for that

    @property
    def is_uneven(self) -> bool:
        """Whether ranks may run different units."""
        return False

    def shadow(self) -> None:
        """Take part in what other ranks run, until they have run a backward or an evaluation.
        Return at once if no rank runs anything."""

    def wait_for_all(self) -> None:
        """Take part in what other ranks run, until all wait for each other."""

    def expect_same(self) -> None:
        """Expect all ranks to run the same from now on. Call it on all at once, between passes."""

    # Forward

    def before_forward(self, unit: ScheduledUnit) -> None:
        """Prepare ``unit``, whose forward is about to run. Afterwards compute may use its full
        buffers. The caller registers the unsharded parameters, as :meth:`before_backward` does
        itself."""
        if self._graph_task() != -1:  # activation checkpointing runs it again
            self._recomputing_backward().before_recompute(unit, self._tick())
            return
        if self._backward is not None:
            raise RuntimeError(UNFINISHED.format("forward"))
        if not self._running and self._starts_pass(unit):
            self._begin_pass(unit)
        self._running.append((unit, self._tick()))
        if unit.has_parameters:
            upcoming = self.order.visit(unit.index, self.prefetcher.prefetch)
            if self.prefetcher.use(unit, upcoming, unit.forward_prefetch):
                self.order.is_recorded = True
                self.prefetcher.may_run_alone = False
            unit.wait()

    def _prepare_pass(self, first: ScheduledUnit | None) -> None:
        """Bring full buffers to rest before a pass that may begin. ``first`` is the unit that
        begins it, ``None`` if ranks agreed on that."""
        if self.finalizer.pending is not None:
            self.finalizer.check_done("forward")
        self.prefetcher.finish_pass(keep=first)
        if self.prefetcher.in_graphs:
            self.prefetcher.release_stale()
        self.prefetcher.begin_pass(self._units(), first is None or first.is_root)

    def after_forward(
        self, unit: ScheduledUnit, module: int, raised: bool = False
    ) -> ForwardRecord | None:
        """End a forward of ``unit``, which has run, or ``raised``. ``module`` is the id of the
        module that ran, for schedules of units of several. Return its call, or ``None`` if backward
        will not need the unit's full buffers for it. If gradients will flow back through the call,
        the caller gives it to :meth:`add_call`, and later to :meth:`before_backward`."""
        if self._backward is not None and self._graph_task() != -1:
            return self._after_recompute(unit, self._backward)
        running = self._running
        if not running or running[-1][0] is not unit:
            return None  # before_forward raised
        _, start = running.pop()
        end = self._tick()
        ticks = self._pass.ticks
        first, _ = ticks.get(unit.index, (start, end))
        ticks[unit.index] = first, end = min(first, start), end
        first_ticks = self._pass.first_ticks
        first_ticks[unit.index] = min(first_ticks.get(unit.index, first), first)
        if not self.is_in_use(unit):
            if not self._states[unit.index].registers_unsharded:
                unit.to_sharded()
            if raised or unit.reshards_after_forward():
                self.prefetcher.release(unit)
        if not running:
            self._end_outermost(unit, raised)
        if not unit.has_parameters:
            return None
        if not self._engine.is_grad_enabled():
            self._ran_without_gradients(unit, start, end)
            return None
        return ForwardRecord(unit.index, start, end, self._pass, unit.version)

    def _ran_without_gradients(self, unit: ScheduledUnit, start: int, end: int) -> bool:
        """Note a forward of ``unit``. Return whether backward may run it again, as it was in a pass
        with gradients."""
        if not self._open_passes or self._open_passes[-1] is not self._pass:
            return False
        run = NoGradForward(unit.index, start, end)
        self._pass.without_call.setdefault(unit.index, []).append(run)
        self._recompute_order = self._recompute_order or RecomputeOrder(self._refs)
        return True

    def _recomputing_backward(self) -> RecomputingBackward:
        """Return the backward under way, in which a unit runs again."""
        if self._recompute_order is None:
            self._recompute_order = RecomputeOrder(self._refs)
        backward = self._backward or self._begin_backward()
        if not isinstance(backward, RecomputingBackward):
            backward = self._backward = self._with_recompute(backward)
        return backward

    def _after_recompute(self, unit: ScheduledUnit, backward: Backward) -> ForwardRecord | None:
        """End a forward of ``unit`` within ``backward``."""
        if not isinstance(backward, RecomputingBackward):
            return None  # before_forward raised
        running = backward.recomputing
        if not running or running[-1][0] is not unit:
            return None
        _, start = running.pop()
        end = self._tick()
        is_in_use = self.is_in_use(unit)
        if not is_in_use and not self._states[unit.index].registers_unsharded:
            unit.to_sharded()
        return backward.after_recompute(unit, start, end, is_in_use)

    def _end_outermost(self, unit: ScheduledUnit, raised: bool) -> None:
        """End a forward of ``unit`` that no other is around."""
        if self._prepares:
            self._comm.wait_for_prepared(raised)  # for units that did not run
        if unit.is_root:
            self._is_pass_over = True
            self._end_pass(raised)

    def _end_pass(self, raised: bool) -> None:
        self.prefetcher.finish_pass(self._engine.is_grad_enabled() and not raised)

    def is_in_use(self, unit: ScheduledUnit) -> bool:
        """Return whether a forward or backward of ``unit`` is under way. A module may call itself,
        and backward may run a forward again."""
        for other, _ in self._running:  # a loop, as in Unit.is_up_to_date
            if other is unit:
                return True
        backward = self._backward
        return backward is not None and backward.uses(unit)

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of some unit is under way. Forwards within backward do not count."""
        return bool(self._running)

    @property
    def running_units(self) -> list[ScheduledUnit]:
        """The units whose forwards have begun and not ended. They stay after a
        ``KeyboardInterrupt``, of which torch tells no hook, until :meth:`end_interrupted`."""
        return [unit for unit, _ in self._running]

    def end_interrupted(self) -> None:
        """End all forwards that have begun, as if they had raised."""
        while self._running:
            self.after_forward(self._running[-1][0], 0, raised=True)

    @property
    def has_broken_backward(self) -> bool:
        """Whether a backward raised or was interrupted, and is under way no more."""
        return self._backward is not None and not self._engine.is_in_backward()

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has run that a backward may come back to."""
        return self._backward is not None or any(past.calls for past in self._open_passes)

    def has_recorded(self, first: ScheduledUnit, with_backward: bool) -> bool:
        """Return whether the pass that ``first`` is about to begin, and its backward, have run
        before."""
        return self.order.has_recorded(first.index) and (self.backwards > 0 or not with_backward)

    def under_way(self) -> str | None:
        """Return what has begun and is not complete, in words. ``None`` between steps."""
        if self._running:
            return "a forward under way"
        if self.awaits_backward:
            return "a forward whose backward has not run"
        if self.finalizer.is_under_way:
            return "a backward that is not finalized"
        if any(unit.holds_gradients or self.has_unreduced(unit) for unit in self._units()):
            return "a backward whose gradients are not reduced"
        return None

    def has_unreduced(self, unit: ScheduledUnit) -> bool:
        """Return whether backwards left gradients of ``unit`` that are not reduced."""
        return self._states[unit.index].has_unreduced

    def add_call(self, call: ForwardRecord) -> None:
        """Note that backward will come back to ``call``."""
        call.forward_pass.calls.append(call)

    def _starts_pass(self, unit: ScheduledUnit) -> bool:
        # If no unit encloses the others, a pass has no visible end. A second run of a unit, or a
        # backward in between, shows that it is over.
        return unit.is_root or self._is_pass_over or self.order.has_visited(unit.index)

    def _begin_pass(self, first: ScheduledUnit) -> None:
        self._is_pass_over = False
        self._prepare_pass(first)
        if self._prepares:
            # All at once: their memory is kept anyway, and so they are ready when they are read.
            for unit in self.predicted_units():
                self._comm.prepare_gathers(unit)
        self.order.begin(first.index)
        self._pass = ForwardPass()
        if self._engine.is_grad_enabled():
            self._open_passes.append(self._pass)
            self._pass.first_ticks = self._first_ticks

    # Backward

    def before_backward(self, call: ForwardRecord) -> bool:
        """Begin the backward of ``call``: the gradient of an output is there, or something is read
        that autograd saved in it. Return whether this backward comes to it only now.

        Raises:
            RuntimeError: the unit's parameters were edited since its forward, or an earlier
                backward did not finish.
        """
        backward = self._backward or self._begin_backward()
        if call.backward == backward.serial:
            return False
        # A backward within this one belongs to it only if a forward ran within this one before.
        if self._graph_task() != backward.graph_task and not backward.may_nest():
            raise RuntimeError(UNFINISHED.format("backward"))
        call.backward = backward.serial
        backward.creates_graph |= self._engine.is_grad_enabled()
        unit = self._refs[call.unit_index]()
        if unit is None:
            return False
        if unit.version != call.version:
            raise RuntimeError(EDITED.format(unit.name))
        come = self._come_back_in_range if self._comm.is_profiled() else self._come_back_to
        come(call, unit, backward)
        return True

    def _come_back_in_range(
        self, call: ForwardRecord, unit: ScheduledUnit, backward: Backward
    ) -> None:
        with self._comm.profiler_range("pre_backward", unit.name):
            self._come_back_to(call, unit, backward)

    def _come_back_to(self, call: ForwardRecord, unit: ScheduledUnit, backward: Backward) -> None:
        backward.advance_to(call)
        if call.needs_parameters:
            unit.wait()
            # Activation checkpointing inside the unit runs its modules again, without the unit's
            # hooks.
            unit.to_unsharded()

    def gradient_arrived(self, unit: ScheduledUnit, gradients: Gradients, index: int) -> None:
        """Handle that autograd accumulated into the unsharded parameter ``index`` of a param
        group."""
        backward = self._backward or self._begin_backward()
        if self._graph_task() != backward.graph_task:
            # A reentrant checkpoint within the unit. Each accumulates what it finds by itself.
            self.reducer.more_may_arrive()
        self.reducer.arrived(unit, gradients, index)

    def _begin_backward(self) -> Backward:
        if self.finalizer.pending is not None:
            self.finalizer.check_done("backward")
        self._engine.at_end_of_backward(self._end_backward)
        self._sync_requires_grad()
        self._backward = backward = self._make_backward(self._accumulates())
        self.backwards = backward.serial
        backward.begin()
        return backward

    def _accumulates(self) -> bool:
        """Return whether the backward that begins accumulates gradients into parameters. All ranks
        call ``backward()``. What its graph reaches may differ, so that does not count. See Note
        [gradients of inputs]."""
        return self._engine.is_for_all_leaves() or any(unit.accumulates for unit in self._units())

    def _make_backward(self, accumulates: bool) -> Backward:
        backward = Backward(
            self.backwards + 1,
            self._graph_task(),
            self.prefetcher,
            self.reducer,
            self._comm,
            self._engine,
            self._refs,
            self._states,
            self._open_passes,
            accumulates,
        )
        return backward if self._recompute_order is None else self._with_recompute(backward)

    def _with_recompute(self, backward: Backward) -> RecomputingBackward:
        """Return a backward that goes on where ``backward`` is, and in which units may run
        again."""
        assert self._recompute_order is not None
        return RecomputingBackward(**vars(backward), _recompute_order=self._recompute_order)

    def _end_backward(self) -> None:
        if self._backward is not None:
            finish = self._finish_in_range if self._comm.is_profiled() else self._finish
            finish(self._backward)

    def _finish_in_range(self, backward: Backward) -> None:
        with self._comm.profiler_range("root_post_backward_callback", ""):
            self._finish(backward)

    def _finish(self, backward: Backward) -> None:
        try:
            self._finish_walk(backward)
            self.prefetcher.finish_pass()
            for unit in self._units():
                if unit.keeps_parts:
                    unit.free_parts()  # where backward did not come back to it
            self.reducer.issue_rest(self._units())
            if self.finalizer.is_manual:
                self.finalizer.is_due = True
            else:
                self.reducer.wait()
                self._comm.finish_backward()
            # Not after an error: gradients are missing then, and the next forward says what to do.
            self._backward = None
            if backward.lost_edit is not None:
                raise RuntimeError(backward.lost_edit)
        finally:
            if self._recompute_order is not None:
                self._recompute_order.end()
            self._is_pass_over = True
            self._open_passes.clear()
            # With retain_graph=True later backwards may come back to these passes and to others.
            # Hooks then see whole gradients all the same, for less overlap.
            if not (self._engine.keeps_graph() and any(unit.has_hooks for unit in self._units())):
                self._first_ticks = {}

    def _finish_walk(self, backward: Backward) -> Collection[ForwardPass]:
        """End the walk of ``backward``. Return the passes that it came back to."""
        reached = set(backward.remaining)
        backward.finish()
        if self._by_hand and backward.accumulates:
            self._end_unshards(backward, reached)
        return reached

    def _end_unshards(self, backward: Backward, reached: Collection[ForwardPass]) -> None:
        """Register the sharded parameters of the units of :attr:`_by_hand` whose gradients are
        reduced now, also where this backward passed their forwards by. Release those that no graph
        is left to read. ``reached``: the passes that it came back to."""
        may_be_read = (
            not reached
            or any(past.calls and past not in reached for past in self._open_passes)
            or self._engine.keeps_graph()
        )
        for index in list(self._by_hand):
            unit = self._refs[index]()
            if unit is None or not unit.is_gathered:
                self._by_hand.remove(index)
                continue
            if not unit.syncs_gradients:
                continue
            if any(other is unit for other, _ in self._running):
                # Its forward registers the sharded ones at its end.
                self._states[index].registers_unsharded = False
                continue
            self.prefetcher.hide_unsharded(unit)
            backward.lost_edit = backward.lost_edit or unit.find_in_place_edit()
            if may_be_read:
                continue
            self._by_hand.remove(index)
            if unit.settings.reshard_after_backward:
                self.prefetcher.release(unit)

    def finalize_backward(self) -> GradientReductionHandle:
        """Complete the gradients of backwards under manual finalization."""
        self._check_not_broken("finalize_backward()")
        return self.finalizer.finalize()

    def complete_gradients(self) -> None:
        """Complete the gradients of backwards without synchronization, also if finalization is not
        manual."""
        self._check_not_broken("reduction")
        self.finalizer.complete()

    def _check_not_broken(self, what: str) -> None:
        if self.has_broken_backward:
            raise RuntimeError(UNFINISHED.format(what))

    # Between passes

    def start_param_sync(self) -> None:
        """Gather stale full buffers again, in the order in which forward will use them. Where full
        buffers are not kept, gather the units that forward needs first."""
        self.begin_next_pass()
        self.prefetcher.refresh(unit for unit in self.predicted_units() if not self.is_in_use(unit))

    def begin_next_pass(self) -> None:
        """Gather the units that the next pass needs first, if they were edited since."""
        if not self._running and not self._engine.is_in_backward():
            self.prefetcher.begin_next(self.next_units())

    def next_units(self) -> list[ScheduledUnit]:
        """Return the units with which the next pass is expected to begin, as many as may be
        gathered ahead of use. What implicit units within it leave to a unit is too little."""
        known = (self._refs[index]() for index in self.order.predicted())
        large = (unit for unit in known if unit is not None and not unit.implicit)
        return list(islice(large, self.prefetcher.prefetch))

    def predicted_units(self) -> list[ScheduledUnit]:
        """Return all units, in the order in which the next forward is expected to run them."""
        predicted = [self._refs[index]() for index in self.order.predicted()]
        return [unit for unit in dict.fromkeys([*predicted, *self._units()]) if unit is not None]

    def release_unsharded(self) -> None:
        """Free every full buffer that is not in use."""
        for unit in self._units():
            if not self.is_in_use(unit):
                self.prefetcher.hide_unsharded(unit)
                self.prefetcher.take_out_of_graphs(unit)
                self.prefetcher.release(unit)
                unit.free_parts()
        self.prefetcher.flush()

    # On the user's command

    def unshard(self, unit: ScheduledUnit) -> None:
        """Gather ``unit``, unless it is up to date."""
        self.prefetcher.use(unit)

    def show_unsharded(self, unit: ScheduledUnit) -> None:
        """Make compute wait for ``unit``, and register its unsharded parameters until its full
        buffers are freed."""
        unit.wait()
        unit.to_unsharded()
        self._states[unit.index].registers_unsharded = True
        self._by_hand.add(unit.index)

    def reshard(self, unit: ScheduledUnit) -> None:
        """Free the full buffers of ``unit`` now, also if a graph may read them."""
        self.prefetcher.hide_unsharded(unit)
        if unit.is_gathered:
            self.prefetcher.take_out_of_graphs(unit)
            self.prefetcher.release(unit)
            self.prefetcher.flush()

    # Reset

    def drop(self) -> None:
        """Forget what is under way, and the recorded order, which may differ from rank to rank. See
        Note [errors]."""
        self.order = ForwardOrder()
        self._recompute_order = None
        self.prefetcher.drop()
        self.reducer.drop()
        self.finalizer.drop()
        self._running.clear()
        self._backward = None
        self._is_pass_over = True
        self._by_hand.clear()
        self._open_passes.clear()
        self._first_ticks = {}
        for state in self._states.values():
            state.drop()
