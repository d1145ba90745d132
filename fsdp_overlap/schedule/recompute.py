"""Backwards in which units run again, as activation checkpointing has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from fsdp_overlap.schedule.backward import Backward
from fsdp_overlap.schedule.interface import (
    ForwardPass,
    ForwardRecord,
    NoGradForward,
    ScheduledUnit,
    UnitIndex,
    UnitRefs,
)
from fsdp_overlap.schedule.prefetch import ForwardOrder


@dataclass(eq=False)
class RecomputedPass(ForwardPass):
    """Forwards that ran within a backward."""

    outer_task: int = -1
    """The engine's number of the backward that recomputed it."""
    graph_task: int = -1
    """The engine's number of the backward that goes through what was recomputed. With a reentrant
    checkpoint it is another backward, within the outer one."""

    def is_within(self, other: ForwardPass) -> bool:
        """Return whether this pass is nested in ``other``: backward comes back to ``other``
        afterwards."""
        return not isinstance(other, RecomputedPass) or self.outer_task == other.graph_task


@dataclass(eq=False, kw_only=True)
class RecomputingBackward(Backward):
    """A backward in which units may run again. See Note [recomputing].

    Reentrant checkpoints nest in :attr:`under_way`: the inner one is recomputed in the backward of
    what the outer one recomputed. ``_recompute_order`` predicts which units are used next where
    forwards that left no call run again. Elsewhere the calls that remain tell more.
    """

    _recompute_order: RecomputeOrder
    recompute: RecomputedPass | None = None
    """The latest pass of forwards that ran within this backward. It comes back to them."""
    recomputing: list[tuple[ScheduledUnit, int]] = field(default_factory=list)
    """Units whose forward runs within this backward now, with the tick of that start."""

    def begin(self) -> None:
        self._recompute_order.begin()
        super().begin()

    def advance_to(self, call: ForwardRecord) -> None:
        if isinstance(call.forward_pass, RecomputedPass):
            call.forward_pass.graph_task = self._engine.graph_task()
        super().advance_to(call)

    def _walk_rest(self) -> None:
        for forward_pass in [*self.remaining]:
            if isinstance(forward_pass, RecomputedPass):
                del self.remaining[forward_pass]
        super()._walk_rest()

    def uses(self, unit: ScheduledUnit) -> bool:
        return super().uses(unit) or any(other is unit for other, _ in self.recomputing)

    def may_nest(self) -> bool:
        return self.recompute is not None

    def before_recompute(self, unit: ScheduledUnit, tick: int) -> None:
        """Prepare for a forward of ``unit`` that begins within this backward. See Note
        [recomputing]."""
        self.recomputing.append((unit, tick))
        self._advance_to_forward(unit)
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
            recompute = self.recompute = RecomputedPass(outer_task=task)
        # The ticks that the unit had in the forward: it keeps its place among the other units.
        for forward_pass in self._open_passes:
            if unit.index in forward_pass.ticks:
                start, end = forward_pass.ticks[unit.index]
                if all(call.unit_index != unit.index for call in forward_pass.calls):
                    self._recompute_order.end_recompute()
        recompute.record(unit.index, start, end)
        return ForwardRecord(unit.index, start, end, recompute, unit.version)

    def _advance_to_forward(self, unit: ScheduledUnit) -> None:
        """Walk back to where ``unit`` ran, which is about to run again."""
        if not self.is_open(unit.index):
            self._advance_to_checkpoint(unit)

    def _advance_to_checkpoint(self, unit: ScheduledUnit) -> None:
        """Handle that ``unit`` runs again. If its forward left no call, as in a reentrant
        checkpoint, walk back to where it ran: every rank is done with the calls after that."""
        task = self._engine.graph_task()
        self._enter_nested(task)
        # What another checkpoint recomputed had a backward of its own, which is over.
        while self.under_way and _task_of(self.under_way[-1]) not in (task, -1):
            self._walk_to_end(self.under_way.pop())
        for forward_pass in self._open_passes:
            runs = forward_pass.without_call.get(unit.index)
            if not runs or (self.under_way and self.under_way[-1] is not forward_pass):
                continue
            if not self.under_way:
                self._enter(forward_pass)
            run, remaining = runs[-1], self.remaining[forward_pass]
            while remaining and remaining[-1].end > run.end:
                self._step(remaining.pop())
            self._leave(run.end)
            self._recompute_order.begin_recompute(run, forward_pass, remaining)
            runs.pop()

    def _enter_nested(self, task: int) -> None:
        """Enter the backward of what was recomputed last, if nothing of ``task`` was reached so
        far. A checkpoint within that may run again before a call is reached, and the backward
        around it is not over."""
        known = (self.graph_task, *map(_task_of, self.under_way))
        recompute = self.recompute
        if recompute is not None and recompute not in self.remaining and task not in known:
            recompute.graph_task = task
            self._enter(recompute)

    def _has_reached_all(self) -> bool:
        """Return whether backward has come back to all calls of all passes. Where something may run
        again it might, and only a checkpoint's next forward tells."""
        return (
            self.recompute is None
            and not any(forward_pass.without_call for forward_pass in self._open_passes)
            and super()._has_reached_all()
        )

    def _enter(self, forward_pass: ForwardPass) -> None:
        """Come back to ``forward_pass``. It is done with the passes that this one is not
        nested in."""
        under_way = self.under_way
        while under_way and under_way[-1] is not forward_pass:
            if isinstance(forward_pass, RecomputedPass) and forward_pass.is_within(under_way[-1]):
                break
            self._walk_to_end(under_way.pop())
        if not under_way or under_way[-1] is not forward_pass:
            under_way.append(forward_pass)
        if forward_pass not in self.remaining:
            self._take_up(forward_pass)
            if not isinstance(forward_pass, RecomputedPass):
                self._recompute_order.enter(forward_pass)

    def _use(
        self,
        unit: ScheduledUnit,
        forward_pass: ForwardPass | None,
        upcoming: Sequence[UnitIndex] | None = None,
    ) -> bool:
        upcoming = self._recompute_order.upcoming(unit.index, self._prefetcher.prefetch)
        issued = super()._use(unit, forward_pass, upcoming)
        if issued:
            self._recompute_order.record()
        return issued


def _task_of(forward_pass: ForwardPass) -> int:
    """Return the engine's number of the backward that goes through ``forward_pass`` alone, -1 if
    others do, too."""
    return forward_pass.graph_task if isinstance(forward_pass, RecomputedPass) else -1


class RecomputeOrder:
    """Predicts backwards in which units run again whose forwards left no calls: see Note
    [recomputing]. Other backwards are not predicted here, because the calls that remain tell more.
    """

    def __init__(self, refs: UnitRefs) -> None:
        self._refs = refs
        self._recorded: ForwardOrder | None = None
        """The order of backwards, once units ran again in one."""
        self._order: ForwardOrder | None = None
        """The same, or what is guessed for the first backward. ``None`` where calls tell more."""
        self._guesses = True
        """Whether no backward was recorded. Guesses that were wrong then are not made again."""
        self._has_recomputed = False

    def begin(self) -> None:
        """Begin a backward."""
        self._order = self._recorded
        self._has_recomputed = False
        if self._order is not None:
            self._order.begin()

    def end(self) -> None:
        """End the backward. It is recorded if it enqueued something, and so ran on every rank."""
        if self._order is not None and self._order.is_recorded:
            self._guesses = False
            if self._has_recomputed:
                self._recorded = self._order

    def enter(self, forward_pass: ForwardPass) -> None:
        """Come back to ``forward_pass``."""
        if self._guesses:
            self._guess(forward_pass, forward_pass.calls, 1)  # most checkpoints are of one unit

    def begin_recompute(
        self, run: NoGradForward, forward_pass: ForwardPass, remaining: Sequence[ForwardRecord]
    ) -> None:
        """Handle that ``run`` is about to run again. Those after it that have not are of the same
        checkpoint, and the next checkpoint is guessed to be of as many. ``remaining`` are the calls
        of the pass that backward has yet to come back to."""
        if self._guesses and self._order is not None and not self._order.expects(run.unit_index):
            runs = self._to_recompute(forward_pass)
            self._guess(forward_pass, remaining, sum(other.start >= run.start for other in runs))

    def end_recompute(self) -> None:
        """Record that a unit has run again whose forwards left no call."""
        self._has_recomputed = True
        self._order = self._order or ForwardOrder()

    def upcoming(self, unit: UnitIndex, count: int) -> Sequence[UnitIndex] | None:
        """Handle that backward uses ``unit`` now. Return the ``count`` units that it is expected to
        use next, ``None`` where the calls that remain tell more."""
        if self._order is None:
            return None
        return self._order.visit(unit, count)

    def record(self) -> None:
        """Record the backward, which enqueues something."""
        if self._order is not None:
            self._order.is_recorded = True

    def _guess(
        self, forward_pass: ForwardPass, calls: Iterable[ForwardRecord], together: int
    ) -> None:
        runs = self._to_recompute(forward_pass)
        if runs:
            self._order = self._order or ForwardOrder()
            self._order.expect(order_in_backward(calls, runs, together))

    def _to_recompute(self, forward_pass: ForwardPass) -> list[NoGradForward]:
        """Return the forwards of ``forward_pass`` without gradients that a checkpoint may run
        again. Those of what is frozen, as a teacher is, or of what has calls, are none of them."""
        with_calls = {call.unit_index for call in forward_pass.calls}
        return [
            run
            for index, runs in forward_pass.without_call.items()
            if index not in with_calls and (unit := self._refs[index]()) and unit.gradients
            for run in runs
        ]


def order_in_backward(
    calls: Iterable[ForwardRecord], runs: Iterable[NoGradForward], together: int
) -> list[UnitIndex]:
    """Return the units that a backward uses, one after the other, if it comes back to ``calls`` and
    each checkpoint runs so many of ``runs`` ``together`` again, and what is within them."""
    used: list[UnitIndex] = []
    ran: list[ForwardRecord | NoGradForward] = sorted((*calls, *runs), key=attrgetter("end"))
    while ran:
        last = ran.pop()
        if isinstance(last, ForwardRecord):
            used += [last.unit_index] * last.needs_parameters
            continue
        again: list[ForwardRecord | NoGradForward] = [last]  # the latest end first
        start = last.start
        while ran and (
            ran[-1].start > start
            or (len(again) < together and not isinstance(ran[-1], ForwardRecord))
        ):
            again.append(ran.pop())
            start = min(start, again[-1].start)
        forward = sorted(again, key=attrgetter("start"))
        used += [run.unit_index for run in (*forward, *again)]
    return [unit for unit, before in zip(used, [-1, *used], strict=False) if unit != before]
