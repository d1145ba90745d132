"""Backward of one context: walk back along the calls of forward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_overlap.schedule.interface import (
    AutogradEngine,
    CommOps,
    ScheduledUnit,
    UnitIndex,
    UnitRefs,
    UnitStates,
)
from fsdp_overlap.schedule.order import ForwardPass, ForwardRecord
from fsdp_overlap.schedule.prefetch import GraphUse, Prefetcher
from fsdp_overlap.schedule.recompute import RecomputeOrder
from fsdp_overlap.schedule.reducer import GradReducer


@dataclass(eq=False)
class Backward:
    """What one backward has done so far, and what it does next.

    ``serial`` counts backwards from 1. ``_open_passes`` are the passes that it may come back to.
    ``_recompute_order`` predicts which units are used next where forwards that left no call run
    again within backward, as reentrant checkpoints do. Elsewhere the calls that remain tell more.
    ``_agrees``: whether ranks agreed on the calls of forward, see Note [negotiation].
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
    _recompute_order: RecomputeOrder
    _agrees: bool
    accumulates: bool
    """Whether gradients go to parameters. In ``torch.autograd.grad()`` they do not."""
    creates_graph: bool
    """Whether its gradients may be differentiated again: ``create_graph=True``."""
    under_way: list[ForwardPass] = field(default_factory=list)
    """Passes that backward is in, each nested in the one before it. Reentrant checkpoints nest: the
    inner one is recomputed in the backward of what the outer one recomputed."""
    remaining: dict[ForwardPass, list[ForwardRecord]] = field(default_factory=dict)
    """For each pass reached, the calls that backward has yet to come back to, the next one last."""
    open_calls: list[ForwardRecord] = field(default_factory=list)
    """Calls whose backward is under way."""
    recompute: ForwardPass | None = None
    """The latest pass of forwards that ran within this backward. It comes back to them."""
    recomputing: list[tuple[ScheduledUnit, int]] = field(default_factory=list)
    """Units whose forward runs within this backward now, with the tick of that start."""
    _was_joined: bool = False
    """Whether the last calls stepped to were of one activation checkpoint."""
    lost_edit: str | None = None
    """An edit of unsharded parameters that the shards do not have, in words. It is raised as an
    error when backward ends."""

    def begin(self) -> None:
        """Begin, at the first event of this backward."""
        self._recompute_order.begin()
        in_graphs = self._prefetcher.in_graphs
        self._expect([(index, use.first_use) for index, use in in_graphs.items()])

    def advance_to(self, call: ForwardRecord) -> None:
        """Enqueue what every rank enqueues up to ``call``, also for calls that this rank skips."""
        forward_pass, under_way = call.forward_pass, self.under_way
        if not under_way or under_way[-1] is not forward_pass:
            self._enter(forward_pass)
        if forward_pass.is_recompute:
            forward_pass.graph_task = self._engine.graph_task()
        remaining = self.remaining[forward_pass]
        # The call almost always is the last one, and a long list takes long to search.
        if (not remaining or remaining[-1] is not call) and call not in remaining:
            if call not in self.open_calls:
                self._step(call, call.end)
            else:
                self._leave(call.end)
                self._reducer.passed(call.end)
            return
        while call not in self._step_back(remaining):
            pass
        if not remaining and self._has_reached_all():
            self._reducer.nothing_follows()

    def finish(self) -> None:
        """End the walk: this rank's graph reaches no more calls. Walk past the calls of forward
        that remain, as other ranks do, and release the units that are still open."""
        for forward_pass in self.remaining:
            if not forward_pass.is_recompute:
                self._walk_to_end(forward_pass)
        self._walk_newer(None)
        self.remaining.clear()
        for index in self._left_open():
            self._release_passed(index)

    def uses(self, unit: ScheduledUnit) -> bool:
        """Return whether this backward needs the full buffers of ``unit`` now."""
        return self.is_open(unit.index) or any(other is unit for other, _ in self.recomputing)

    def is_open(self, index: UnitIndex) -> bool:
        """Return whether the backward of a call of unit ``index`` is under way."""
        for call in self.open_calls:  # noqa: SIM110, asked often, and any() makes a generator first
            if call.unit == index:
                return True
        return False

    def before_recompute(self, unit: ScheduledUnit, tick: int) -> None:
        """Prepare for a forward of ``unit`` that begins within this backward. See Note
        [recomputing]."""
        self.recomputing.append((unit, tick))
        if self._agrees:
            if unit.has_parameters:
                self._advance_to_agreed(unit)
        elif not self.is_open(unit.index):
            self._advance_to_checkpoint(unit)
        # A unit may be open without its parameters, because the user said that its backward does
        # not read them. The forward does.
        if unit.has_parameters and not (self.is_open(unit.index) and unit.is_gathered):
            self._use(unit, self.under_way[-1] if self.under_way else None)
        unit.wait()

    def after_recompute(
        self, unit: ScheduledUnit, start: int, end: int, is_in_use: bool
    ) -> ForwardRecord | None:
        """End a forward of ``unit`` within this backward. Return the call to come back to,
        or ``None`` if a call of the unit is open, or it has no parameters."""
        if not unit.has_parameters or self.is_open(unit.index):
            return None
        # The release is delayed: the unit's own backward finds it gathered if it follows now.
        if unit.settings.reshard_after_backward and not is_in_use:
            self._prefetcher.release(unit)
        recompute = self.recompute
        if recompute is None or recompute in self.remaining:
            task = self._engine.graph_task()
            recompute = self.recompute = ForwardPass(is_recompute=True, outer_task=task)
        # The ticks that the unit had in the forward: it keeps its place among the other units.
        for forward_pass in self._open_passes:
            if unit.index in forward_pass.ticks:
                start, end = forward_pass.ticks[unit.index]
                if all(call.unit != unit.index for call in forward_pass.calls):
                    self._recompute_order.end_recompute()
        recompute.record(unit.index, start, end)
        return ForwardRecord(unit.index, start, end, recompute, unit.version)

    def _advance_to_agreed(self, unit: ScheduledUnit) -> None:
        """Handle that ``unit`` runs again, where ranks agreed on the calls of forward: unless this
        is for a call whose backward is under way, walk back to its next call on this rank.

        Raises:
            RuntimeError: backward has passed the unit's calls, as where another function than
                torch's checkpoints several units at once, or a reentrant checkpoint is around the
                root.
        """
        if self._is_for_open_call(unit.index):
            return
        for forward_pass in reversed(self._open_passes):
            for call in reversed(self.remaining.get(forward_pass, forward_pass.calls)):
                if call.is_own and call.unit == unit.index:
                    self.advance_to(call)
                    return
        raise RuntimeError(
            f"unit {unit.name!r} runs again in backward, and other ranks do not know of that. "
            "Where units are conditional, checkpoint several of them by "
            "torch.utils.checkpoint.checkpoint(), and the root with use_reentrant=False"
        )

    def _is_for_open_call(self, index: UnitIndex) -> bool:
        """Return whether unit ``index`` runs again for an open call. Backward is done with those
        whose nodes all come after the one that it is in now: nothing else tells the end of a
        reentrant checkpoint. In a backward within this one nodes are new, and numbered by
        thread."""
        node = self._engine.sequence_number()
        is_within = self._engine.graph_task() != self.graph_task
        return any(
            call.unit == index and (is_within or call.first_node <= node)
            for call in self.open_calls
        )

    def _advance_to_checkpoint(self, unit: ScheduledUnit) -> None:
        """Handle that ``unit`` runs again. If its forward left no call, as in a reentrant
        checkpoint, walk back to where it ran: every rank is done with the calls after that."""
        task = self._engine.graph_task()
        self._enter_nested(task)
        # What another checkpoint recomputed had a backward of its own, which is over.
        while self.under_way and self.under_way[-1].graph_task not in (task, -1):
            self._walk_to_end(self.under_way.pop())
        for forward_pass in self._open_passes:
            runs = forward_pass.without_call.get(unit.index)
            if not runs or (self.under_way and self.under_way[-1] is not forward_pass):
                continue
            if not self.under_way:
                self._enter(forward_pass)
            run, remaining = runs[-1], self.remaining[forward_pass]
            while remaining and remaining[-1].end > run.end:
                self._step_back(remaining)
            self._leave(run.end)
            self._recompute_order.begin_recompute(run, forward_pass, remaining)
            runs.pop()

    def _enter_nested(self, task: int) -> None:
        """Enter the backward of what was recomputed last, if nothing of ``task`` was reached so
        far. A checkpoint within that may run again before a call is reached, and the backward
        around it is not over."""
        known = (self.graph_task, *(under_way.graph_task for under_way in self.under_way))
        recompute = self.recompute
        if recompute is not None and recompute not in self.remaining and task not in known:
            recompute.graph_task = task
            self._enter(recompute)

    def _has_reached_all(self) -> bool:
        """Return whether backward has come back to all calls of all passes, so that it gathers
        nothing more. Where something may run again it might, and only a checkpoint's next forward
        tells."""
        return self.recompute is None and not any(
            forward_pass.without_call or self.remaining.get(forward_pass, forward_pass.calls)
            for forward_pass in self._open_passes
        )

    def _enter(self, forward_pass: ForwardPass) -> None:
        """Come back to ``forward_pass``. It is done with the passes that this one is not
        nested in."""
        under_way = self.under_way
        while under_way and not forward_pass.is_within(under_way[-1]):
            self._walk_to_end(under_way.pop())
        if not under_way or under_way[-1] is not forward_pass:
            under_way.append(forward_pass)
        if forward_pass not in self.remaining:
            self._walk_newer(forward_pass)
            self._take_up(forward_pass)
            if not forward_pass.is_recompute:
                self._recompute_order.enter(forward_pass)

    def _take_up(self, forward_pass: ForwardPass) -> None:
        """Come back to ``forward_pass`` for the first time."""
        if forward_pass.is_taken_up:  # by an earlier backward, which freed what was held then
            for call in forward_pass.calls:
                if call.gathers is not None:
                    call.gathers, call.is_issued = True, False
        forward_pass.is_taken_up = True
        self.remaining[forward_pass] = list(forward_pass.calls)
        self._expect([(call.unit, self._first_use(call)) for call in forward_pass.calls])

    def _expect(self, first_uses: Iterable[tuple[UnitIndex, int]]) -> None:
        if self.accumulates:
            self._reducer.expect(
                [
                    (unit, tick)
                    for index, tick in first_uses
                    if (unit := self._refs[index]()) is not None
                ]
            )

    def _walk_newer(self, forward_pass: ForwardPass | None) -> None:
        """Walk past the passes after ``forward_pass``, by default past all, in which some rank has
        no call, and so does not come back to them."""
        for other in reversed(self._open_passes):
            if other is forward_pass:
                return
            if other.is_for_all_ranks and other not in self.remaining:
                self._take_up(other)
                self._walk_to_end(other)

    def _walk_to_end(self, forward_pass: ForwardPass) -> None:
        remaining = self.remaining[forward_pass]
        while remaining:
            self._step_back(remaining)

    def _step_back(self, remaining: list[ForwardRecord]) -> Collection[ForwardRecord]:
        """Step to the last of the calls that remain, and with it to all that some rank ran in one
        activation checkpoint: it runs these again, the first one first, before it comes back to
        them. Return these calls."""
        call = remaining.pop()
        if self._was_joined:  # what other ranks have reduced by now
            self._reducer.passed(call.end)
        self._was_joined = call.is_joined
        self._step(call, call.end)
        if not call.is_joined:
            return (call,)
        calls = [call]
        while calls[-1].is_joined:
            calls.append(remaining.pop())
            self._step(calls[-1], call.end)
        return calls

    def _step(self, call: ForwardRecord, passed: int) -> None:
        """Step to ``call``, past all that started after the tick ``passed``."""
        unit = self._refs[call.unit]()
        if unit is None:
            return
        self._leave(passed)
        if call.is_own:
            self.open_calls.append(call)
        if not self.accumulates and not unit.syncs_gradients:
            state = self._states[call.unit]
            if state.registers_unsharded:
                state.has_unreduced = True  # see Note [delayed weight gradients]
        if call.gathers is not None:
            self._step_agreed(call, unit)
            self._reducer.passed(passed)
            return
        # Backward can read a full buffer that exists, even if the user said that it does not. Then
        # the graph that create_graph=True makes can read it too.
        if call.needs_parameters or (self.creates_graph and unit.is_gathered):
            self._use(unit, call.forward_pass)
            if self.creates_graph:
                self._keep_for_graph(call)
                unit.hook_gradients()
        self._reducer.passed(passed)

    def _step_agreed(self, call: ForwardRecord, unit: ScheduledUnit) -> None:
        """Enqueue what all ranks enqueue for ``call``, and ``prefetch`` all-gathers ahead. So
        gathers and reductions have one order, whichever of the calls are this rank's."""
        if call.needs_parameters and self.creates_graph:
            # Each rank keeps what some rank's graph reads, so that all know what is there.
            self._prefetcher.use_agreed(unit, call)
            unit.wait()
            self._keep_for_graph(call)
            if call.is_own:
                unit.hook_gradients()
        elif call.needs_parameters and call.is_own:
            self._prefetcher.use_agreed(unit, call)
        elif call.needs_parameters:
            self._prefetcher.shadow(unit, call)
        room = self._prefetcher.prefetch
        for other in reversed(self.remaining[call.forward_pass]):  # no generator: asked often
            if not room:
                return
            if not other.needs_parameters:
                continue
            room -= 1
            ahead = self._refs[other.unit]()
            if other.gathers and not other.is_issued and ahead is not None:
                self._prefetcher.gather_ahead(
                    ahead, other, is_needed=other.is_own or self.creates_graph
                )

    def _keep_for_graph(self, call: ForwardRecord) -> None:
        """Keep the unit of ``call`` for the graph that this backward makes."""
        in_graphs = self._prefetcher.in_graphs
        if call.unit not in in_graphs:
            in_graphs[call.unit] = GraphUse(self._first_use(call))
        in_graphs[call.unit].modules = ()

    def _leave(self, tick: int) -> None:
        """Leave every call that started after ``tick``: backward is done with it."""
        for call in [call for call in self.open_calls if call.start > tick]:
            self.open_calls.remove(call)
            if not self.is_open(call.unit):
                self._release_passed(call.unit)

    def _use(self, unit: ScheduledUnit, forward_pass: ForwardPass | None) -> None:
        prefetch = self._prefetcher.prefetch
        asked = unit.backward_prefetch and [
            find
            for find in unit.backward_prefetch
            if (other := find()) and other.settings.unshard_in_backward
        ]
        upcoming = self._recompute_order.upcoming(unit.index, prefetch)
        if upcoming is None:
            remaining = self.remaining[forward_pass] if forward_pass is not None else []
            following = remaining[: -prefetch - 2 : -1]
            others = [call.unit for call in following if call.needs_parameters]
            if unit.index in others:  # which runs again now, and goes back then
                others.remove(unit.index)
            upcoming = others[:prefetch]
        if self._prefetcher.use(unit, upcoming, asked):
            self._recompute_order.record()

    def _release_passed(self, index: UnitIndex) -> None:
        unit = self._refs[index]()
        if unit is None:
            return
        if self._comm.is_profiled():
            with self._comm.profiler_range("post_backward", unit.name):
                self._release(unit)
        else:
            self._release(unit)

    def _release(self, unit: ScheduledUnit, is_passed: bool = True) -> None:
        """Release ``unit``, or if no call is open but not all of them ``is_passed``, register its
        sharded parameters."""
        # In backwards 1, 2, 4, 8 ... only: the unit's next forward finds what others miss.
        if not self.serial & (self.serial - 1):
            self.lost_edit = self.lost_edit or unit.edited()
        if is_passed and unit.settings.reshard_after_backward:
            self._prefetcher.release(unit)
        state = self._states[unit.index]
        if not state.registers_unsharded or unit.syncs_gradients:  # else the user asked for them
            state.registers_unsharded = False
            unit.to_sharded()

    def _left_open(self) -> Collection[UnitIndex]:
        """Return the units that are to be released at the end."""
        return {call.unit for call in self.open_calls}

    def _first_use(self, call: ForwardRecord) -> int:
        """Return the tick at which the call's unit first ran in the forwards that this backward may
        reach."""
        first, _ = call.forward_pass.ticks[call.unit]
        for other in self._open_passes:
            if other is not call.forward_pass and call.unit in other.ticks:
                first = min(first, other.ticks[call.unit][0])
        return first
