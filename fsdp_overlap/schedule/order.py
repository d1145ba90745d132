"""The order in which units run: recorded, replayed as a prediction, and walked back in backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_overlap.schedule.interface import UnitIndex


class ForwardOrder:
    """Records the order of units in each pass, and predicts it for later passes.

    A pass is predicted from the last one that began with the same unit: a head that runs alone,
    chunk by chunk, says nothing about the whole model. If none did, it is predicted from the last.

    Only passes that gathered something count. A pass that found all units unsharded may have run on
    this rank alone, and what is predicted is enqueued, so it must be the same on every rank. See
    Note [order].
    """

    def __init__(self) -> None:
        self._recorded: dict[UnitIndex, Sequence[UnitIndex]] = {}
        self._last_recorded: Sequence[UnitIndex] = []
        self._predicted: Sequence[UnitIndex] = []
        self._first = -1
        self._running: list[UnitIndex] = []
        self.is_recorded = False
        """Whether the pass under way is to be recorded: it enqueued all-gathers, so it runs on
        every rank."""
        self._next = 0

    def begin(self, first: UnitIndex = -1) -> None:
        """Begin a new pass. ``first`` is the unit that begins it; passes are told apart by it."""
        if self.is_recorded:
            self._recorded[self._first] = self._last_recorded = self._running
        self._predicted = self._recorded.get(first, self._last_recorded)
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


@dataclass(eq=False)
class ForwardPass:
    """What backward needs to know of one pass. Times are ticks of the schedule's clock."""

    calls: list[ForwardRecord] = field(default_factory=list)
    """Calls that backward will come back to, in the order of their ``end``."""
    ticks: dict[UnitIndex, tuple[int, int]] = field(default_factory=dict)
    """The first start and the last end of each unit that ran, with or without gradients."""
    without_call: dict[UnitIndex, list[NoGradForward]] = field(default_factory=dict)
    """For each unit, its forwards without gradients: a reentrant checkpoint may run these
    again."""

    def record(self, unit: UnitIndex, start: int, end: int) -> None:
        if unit in self.ticks:
            first, last = self.ticks[unit]
            start, end = min(first, start), max(last, end)
        self.ticks[unit] = start, end


class NoGradForward(NamedTuple):
    """One forward of a unit without gradients."""

    unit: UnitIndex
    start: int
    end: int


@dataclass(eq=False, slots=True)
class ForwardRecord:
    """One forward of a unit whose outputs require grad.

    The autograd engine runs nodes in the reverse of the order in which they were made. So when the
    gradient of this call's output arrives, backward is done with every call that started after
    ``end``. Releases and reductions rely on that. See Note [passed calls].
    """

    unit: UnitIndex
    start: int
    end: int
    forward_pass: ForwardPass
    version: int
    """The version of the shards that the forward computed with."""
    needs_parameters: bool = True
    """Whether its backward reads parameters. If the user said that it does not, reading one is an
    error."""
    backward: int = 0
    """Serial number of the last backward that reached this call."""
