"""Backwards in which units run again, as activation checkpointing has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from fsdp_overlap.schedule.interface import UnitIndex, UnitRefs
from fsdp_overlap.schedule.order import ForwardOrder, ForwardPass, ForwardRecord, NoGradForward


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
        if self._guesses and self._order is not None and run.unit not in self._order.upcoming(1):
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
        self._order.visit(unit)
        return self._order.upcoming(count)

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
        with_calls = {call.unit for call in forward_pass.calls}
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
            used += [last.unit] * last.needs_parameters
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
        used += [run.unit for run in (*forward, *again)]
    return [unit for unit, before in zip(used, [-1, *used], strict=False) if unit != before]
