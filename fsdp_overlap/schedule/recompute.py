"""What a backward uses next where reentrant checkpoints run units again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp_overlap.schedule.interface import UnitIndex, UnitRefs
from fsdp_overlap.schedule.order import Call, ForwardOrder, ForwardPass, Run


class Reruns:
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
        """Whether no backward has counted. Guesses that were wrong then are not made again."""
        self._has_rerun = False

    def begin(self) -> None:
        """A backward begins."""
        self._order = self._recorded
        self._has_rerun = False
        if self._order is not None:
            self._order.begin()

    def end(self) -> None:
        """The backward is over. It counts if it enqueued something, and so ran on every rank."""
        if self._order is not None and self._order.teaches:
            self._guesses = False
            if self._has_rerun:
                self._recorded = self._order

    def enter(self, forward_pass: ForwardPass) -> None:
        """Backward comes back to ``forward_pass``."""
        if self._guesses:
            self._guess(forward_pass, forward_pass.calls, 1)  # most checkpoints are of one unit

    def begin_rerun(self, run: Run, forward_pass: ForwardPass, remaining: Sequence[Call]) -> None:
        """``run`` is about to run again. Those after it that have not are of the same checkpoint,
        and the next checkpoint is guessed to be of as many. ``remaining`` are the calls of the pass
        that backward has yet to come back to."""
        if self._guesses and self._order is not None and run.unit not in self._order.upcoming(1):
            runs = self._to_run_again(forward_pass)
            self._guess(forward_pass, remaining, sum(other.start >= run.start for other in runs))

    def end_rerun(self) -> None:
        """A unit has run again whose forwards left no call."""
        self._has_rerun = True
        self._order = self._order or ForwardOrder()

    def upcoming(self, unit: UnitIndex, count: int) -> Sequence[UnitIndex] | None:
        """Backward uses ``unit`` now, and is expected to use these next. ``None`` where the calls
        that remain tell more."""
        if self._order is None:
            return None
        self._order.visit(unit)
        return self._order.upcoming(count)

    def teach(self) -> None:
        """The backward enqueues something."""
        if self._order is not None:
            self._order.teach()

    def _guess(self, forward_pass: ForwardPass, calls: Iterable[Call], together: int) -> None:
        runs = self._to_run_again(forward_pass)
        if runs:
            self._order = self._order or ForwardOrder()
            self._order.expect(order_in_backward(calls, runs, together))

    def _to_run_again(self, forward_pass: ForwardPass) -> list[Run]:
        """The forwards of ``forward_pass`` without gradients that a checkpoint may run again. Those
        of what is frozen, as a teacher is, or of what has calls, are none of them."""
        with_calls = {call.unit for call in forward_pass.calls}
        return [
            run
            for index, runs in forward_pass.without_call.items()
            if index not in with_calls and (unit := self._refs[index]()) and unit.gradients
            for run in runs
        ]


def order_in_backward(calls: Iterable[Call], runs: Iterable[Run], together: int) -> list[UnitIndex]:
    """The units that a backward uses, one after the other, if it comes back to ``calls`` and each
    checkpoint runs so many of ``runs`` ``together`` again, and what is within them."""
    used: list[UnitIndex] = []
    ran: list[Call | Run] = sorted((*calls, *runs), key=lambda each: each.end)
    while ran:
        last = ran.pop()
        if isinstance(last, Call):
            used += [last.unit] * last.needs_parameters
            continue
        again: list[Call | Run] = [last]  # the latest end first
        start = last.start
        while ran and (
            ran[-1].start > start or (len(again) < together and not isinstance(ran[-1], Call))
        ):
            again.append(ran.pop())
            start = min(start, again[-1].start)
        forward = sorted(again, key=lambda each: each.start)
        used += [each.unit for each in (*forward, *again)]
    return [unit for unit, before in zip(used, [-1, *used], strict=False) if unit != before]
