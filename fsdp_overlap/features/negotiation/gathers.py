"""All-gathers that ranks agreed on: Note [negotiation]."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fsdp_overlap.schedule.interface import ForwardPass, ForwardRecord, ScheduledUnit, UnitIndex
from fsdp_overlap.schedule.prefetch import Prefetcher


@dataclass(eq=False)
class NegotiatedPass(ForwardPass):
    """A pass that ranks agreed on."""

    is_taken_up: bool = False
    """Whether a backward has come back to it."""
    is_for_all_ranks: bool = False
    """Whether some rank has no call in it, so that all ranks walk past its calls."""


@dataclass(eq=False, slots=True)
class AgreedGather:
    """One all-gather of a pass that ranks agreed on, so all issue it. Apart from ``unit`` and
    ``gathers`` all of it is this rank's own."""

    unit_index: UnitIndex
    gathers: bool
    """Whether it is issued. It is not if all ranks hold the unit since before the pass."""
    is_issued: bool = False
    is_used: bool = False
    """Whether this rank runs the unit."""
    end: int = 0
    """How many all-gathers of the pass came before the end of this rank's forward."""
    records: list[OwnCall] = field(default_factory=list)
    """The forwards of this rank."""
    may_recompute: bool = False
    """Whether this rank ran it without gradients, as reentrant checkpoints do."""
    checkpoint: int = 0
    """The number of the activation checkpoint in which this rank ran it, 0 if there was none."""
    first_node: int = 0
    """No node of that checkpoint, or of this forward, has a smaller number. Those of checkpoints
    before it have."""


@dataclass(eq=False, slots=True, kw_only=True)
class AgreedCall(ForwardRecord):
    """What stands for the calls of all ranks that one all-gather of forward was for."""

    gathers: bool = True
    """Whether all ranks gather its unit when backward comes to it."""
    is_issued: bool = False
    """Whether that all-gather was issued ahead."""
    is_own: bool
    """Whether this rank ran the forward."""
    first_node: int
    """As of :class:`AgreedGather`."""
    is_joined: bool = False
    """Whether some rank ran it in one activation checkpoint with the call that backward comes to
    next."""


@dataclass(eq=False, slots=True, kw_only=True)
class OwnCall(ForwardRecord):
    """A call of this rank."""

    gather: AgreedGather
    """What gathered its unit."""
    agreed: AgreedCall | None = None
    """What stands for it once ranks agreed on the calls of its pass."""


class NegotiatedPrefetcher(Prefetcher):
    """Keeps full buffers where ranks agree on all-gathers."""

    def begin_negotiating(self) -> None:
        """Begin to be one, of another :class:`~fsdp_overlap.schedule.prefetch.Prefetcher`."""
        self._gathered_again: Counter[UnitIndex] = Counter()
        """How often units that were there were gathered again, for uses that are to come."""

    def use_agreed(self, unit: ScheduledUnit, gather: AgreedGather | AgreedCall) -> None:
        """Enqueue ``gather``, if that was not done ahead: compute needs ``unit`` now. Then free
        delayed buffers."""
        self._ahead.pop(unit.index, None)
        self._delayed.pop(unit.index, None)
        if gather.gathers and not gather.is_issued:
            self._flush_for_room()
            self._gather_agreed(unit, gather)
            self.stats.prefetch_misses += 1
        else:
            self.stats.prefetch_hits += gather.is_issued
        if self._delayed:
            self.flush()

    def gather_ahead(
        self,
        unit: ScheduledUnit,
        gather: AgreedGather | AgreedCall,
        is_needed: bool,
    ) -> None:
        """Enqueue ``gather`` ahead of its turn, and keep the full buffer if it ``is_needed``."""
        index = unit.index
        self._flush_for_room()
        if unit.is_gathered:
            self._gather_agreed(unit, gather, not is_needed)
            if is_needed and index in self._delayed:
                self._ahead[index] = self._delayed.pop(index)
            elif is_needed:
                self._gathered_again[index] += 1
            return
        self._gather_agreed(unit, gather, not is_needed)
        if is_needed:
            self._ahead[index] = None
        else:
            self._comm.free_unread(unit)

    def shadow(self, unit: ScheduledUnit, gather: AgreedGather | AgreedCall) -> None:
        """Take part in an all-gather that this rank does not need."""
        if gather.gathers and not gather.is_issued:
            self.gather_ahead(unit, gather, is_needed=False)

    def drop_ahead(self, index: UnitIndex) -> None:
        """Free a unit that was gathered ahead, and that this rank does not run."""
        if index in self._ahead:
            self._free_unused(index)

    def keep(self, index: UnitIndex) -> None:
        """Keep a unit whose release is delayed: ranks agreed that backward finds it gathered."""
        if index in self._delayed:
            self._ahead[index] = self._delayed.pop(index)

    def _flush_for_room(self) -> None:
        if len(self._ahead) + len(self._delayed) > self.prefetch:
            self.flush()

    def _gather_agreed(
        self, unit: ScheduledUnit, gather: AgreedGather | AgreedCall, shadow: bool = False
    ) -> None:
        gather.is_issued = True
        if unit.is_up_to_date:  # others need it, and compute may read it here
            self._comm.after_compute()
            self._issued += 1
            self._comm.gather(unit, again=True, shadow=shadow)
            unit.wait()
        else:
            self._gather(unit, shadow)

    def release(self, unit: ScheduledUnit) -> None:
        index = unit.index
        if not self._gathered_again.get(index) or index in self.in_graphs:
            super().release(unit)
            return
        if self._states[index].registers_unsharded:
            self.hide_unsharded(unit)
        self._gathered_again[index] -= 1
        self._ahead[index] = self._comm.record_compute_event()

    def finish_pass(
        self, backward_follows: bool = False, keep: ScheduledUnit | None = None
    ) -> None:
        self._gathered_again.clear()
        super().finish_pass(backward_follows, keep)
        self._comm.wait_for_unread()

    def drop(self) -> None:
        self._gathered_again.clear()
        super().drop()
