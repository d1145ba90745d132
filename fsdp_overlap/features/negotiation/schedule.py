"""Schedules of ranks that may run different units: Note [negotiation]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from fsdp_overlap.features.module_lists import ListBackward, ListSchedule, become_list_schedule
from fsdp_overlap.features.negotiation.gathers import (
    AgreedCall,
    AgreedGather,
    NegotiatedPass,
    NegotiatedPrefetcher,
    OwnCall,
)
from fsdp_overlap.features.negotiation.messages import BACKWARD, REST, SHADOW, Negotiation
from fsdp_overlap.schedule.backward import Backward
from fsdp_overlap.schedule.interface import ForwardPass, ForwardRecord, ScheduledUnit, UnitIndex
from fsdp_overlap.schedule.recompute import RecomputingBackward
from fsdp_overlap.schedule.scheduler import Schedule


def negotiate(schedule: Schedule) -> None:
    """Make ``schedule`` a :class:`NegotiatedSchedule`, which agrees with other ranks on what is
    gathered, from the next pass on. The schedule stays the same object, because hooks of graphs
    refer to it, and stays one for good, because such graphs may be walked again later."""
    if not isinstance(schedule, NegotiatedSchedule):
        become_list_schedule(schedule)
        schedule.__class__ = NegotiatedSchedule
        schedule.prefetcher.__class__ = NegotiatedPrefetcher
        assert isinstance(schedule, NegotiatedSchedule)
        schedule.begin_negotiating()
    schedule.negotiate()


class NegotiatedSchedule(ListSchedule):
    """A schedule of ranks that may run different units.

    Units may be lists of modules, and may run again in backward, so it has what is for these.
    """

    prefetcher: NegotiatedPrefetcher
    prefetcher_class = NegotiatedPrefetcher

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.begin_negotiating()

    def begin_negotiating(self) -> None:
        """Begin to be one, of another schedule or a new one."""
        self.prefetcher.begin_negotiating()
        self._negotiation: Negotiation | None = None
        """``None`` while all ranks run the same."""
        self._gathers: dict[UnitIndex, AgreedGather] = {}
        """For each unit, the last all-gather that ranks agreed on and this one used."""
        self._is_fresh = False
        """Whether no unit with parameters has run since the outermost forward began."""
        self._has_grad = False
        """Whether gradients were enabled then. A reentrant checkpoint within it disables them."""
        self._is_shadowing = False
        """Whether the backward that begins is one of other ranks, as all know."""

    def negotiate(self) -> None:
        """Agree with other ranks from the next pass on."""
        if self._negotiation is None:
            self._negotiation = Negotiation(
                self._comm,
                self.prefetcher,
                self._refs,
                self._prepare_pass,
                self._begin_agreed_pass,
                self._engine,
            )

    @property
    def is_uneven(self) -> bool:
        return self._negotiation is not None

    def expect_same(self) -> None:
        self._negotiation = None
        self._gathers.clear()
        self._open_passes.clear()

    def shadow(self) -> None:
        self._shadow(SHADOW)

    def wait_for_all(self) -> None:
        while self._shadow(REST) != REST:
            pass

    def _shadow(self, need: int) -> int:
        assert self._negotiation is not None
        chosen = self._negotiation.shadow(need)
        self._comm.wait_for_prepared(False)
        if chosen == BACKWARD:
            self._engine.run_backward(self._begin_shadowed_backward)
        else:
            self.prefetcher.finish_pass()
        return chosen

    # Forward

    def before_forward(self, unit: ScheduledUnit) -> None:
        # Within a backward, or after one that did not finish, all ranks do the same.
        if self._negotiation is None or self._backward is not None or self._graph_task() != -1:
            super().before_forward(unit)
            return
        if not self._running:
            self._is_fresh, self._has_grad = True, self._engine.is_grad_enabled()
        if unit.has_parameters and not self.is_in_use(unit):
            self._gathers[unit.index] = self._negotiation.request(
                unit, self._is_fresh, self._has_grad
            )
            self._is_fresh = False
        self._running.append((unit, self._tick()))
        unit.wait()

    def _begin_agreed_pass(self, has_grad: bool) -> NegotiatedPass:
        """Begin a pass, on all ranks. ``has_grad``: whether some rank makes a graph in it."""
        self._pass = forward_pass = NegotiatedPass()
        if has_grad:
            self._open_passes.append(forward_pass)
        if self._prepares:
            for unit in self._units():
                self._comm.prepare_gathers(unit)
        return forward_pass

    def after_forward(
        self, unit: ScheduledUnit, module: int, raised: bool = False
    ) -> ForwardRecord | None:
        gather = self._gathers.get(unit.index)
        if self._backward is not None and self._graph_task() != -1:
            gather = None  # backward comes back to another call
        elif (
            gather is not None
            and self._negotiation is not None
            and self._running
            and self._running[-1][0] is unit
        ):
            gather.end = self._negotiation.position
        call = super().after_forward(unit, module, raised)
        if call is None or gather is None:
            return call
        return OwnCall(
            call.unit_index, call.start, call.end, call.forward_pass, call.version, gather=gather
        )

    def add_call(self, call: ForwardRecord) -> None:
        super().add_call(call)
        if isinstance(call, OwnCall):
            call.gather.records.append(call)

    def _ran_without_gradients(self, unit: ScheduledUnit, start: int, end: int) -> bool:
        may_recompute = super()._ran_without_gradients(unit, start, end)
        if unit.index in self._gathers:
            self._gathers[unit.index].may_recompute |= may_recompute
        return may_recompute

    def _end_outermost(self, unit: ScheduledUnit, raised: bool) -> None:
        super()._end_outermost(unit, raised)
        if not unit.is_root:  # else the end of the pass waits
            self._comm.wait_for_unread()

    def _end_pass(self, raised: bool) -> None:
        # Else a backward tells other ranks, or an error.
        if self._negotiation is not None and not (raised or self._engine.is_grad_enabled()):
            self._negotiation.end_pass()
        super()._end_pass(raised)

    def _may_be_read_unseen(self) -> bool:
        # Other ranks would not know of that, and such reads raise.
        return self._negotiation is None and super()._may_be_read_unseen()

    # Backward

    def before_backward(self, call: ForwardRecord) -> bool:
        if self._backward is None:
            self._begin_backward()
        if isinstance(call, OwnCall) and call.agreed is not None:
            call = call.agreed
        return super().before_backward(call)

    def _begin_shadowed_backward(self) -> None:
        self._is_shadowing = True
        try:
            self._begin_backward()
        finally:
            self._is_shadowing = False

    def _accumulates(self) -> bool:
        return self._is_shadowing or super()._accumulates()

    def _make_backward(self, accumulates: bool) -> Backward:
        if self._negotiation is None:
            return super()._make_backward(accumulates)
        agreed = self._negotiation.begin_backward(
            self._tick(), None if self._is_shadowing else accumulates
        )
        self._tick = count(agreed.last_tick + 1).__next__
        self._open_passes.clear()
        self._open_passes.extend(agreed.passes)
        backward = super()._make_backward(agreed.accumulates)
        assert isinstance(backward, NegotiatedBackward)
        backward.agrees, backward.creates_graph = True, agreed.creates_graph
        return backward

    def _with_recompute(self, backward: Backward) -> RecomputingBackward:
        return NegotiatedBackward(**vars(super()._with_recompute(backward)))

    def drop(self) -> None:
        super().drop()
        self._gathers.clear()
        if self._negotiation is not None:
            self._negotiation = None
            self.negotiate()  # anew, because what was recorded may differ from rank to rank


@dataclass(eq=False, kw_only=True)
class NegotiatedBackward(ListBackward):
    """A backward of a :class:`NegotiatedSchedule`."""

    _prefetcher: NegotiatedPrefetcher
    agrees: bool = False
    """Whether ranks agreed on the calls of forward."""
    _was_joined: bool = False
    """Whether the last calls stepped to were of one activation checkpoint."""

    def _advance_to_forward(self, unit: ScheduledUnit) -> None:
        if not self.agrees:
            super()._advance_to_forward(unit)
        elif unit.has_parameters:
            self._advance_to_agreed(unit)

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
                if call.unit_index == unit.index and isinstance(call, AgreedCall) and call.is_own:
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
            call.unit_index == index
            and (is_within or not isinstance(call, AgreedCall) or call.first_node <= node)
            for call in self.open_calls
        )

    def _first_uses(self, forward_pass: ForwardPass) -> Mapping[UnitIndex, int]:
        if not self.agrees:
            return super()._first_uses(forward_pass)
        # Passes that ranks agreed on share no first_ticks.
        first_uses = {index: first for index, (first, _) in forward_pass.ticks.items()}
        for other in self._open_passes:
            for index in other.ticks.keys() & first_uses:
                first_uses[index] = min(first_uses[index], other.ticks[index][0])
        return first_uses

    def _take_up(self, forward_pass: ForwardPass) -> None:
        self._walk_newer(forward_pass)
        self._take_up_alone(forward_pass)

    def _take_up_alone(self, forward_pass: ForwardPass) -> None:
        if isinstance(forward_pass, NegotiatedPass):
            if forward_pass.is_taken_up:  # by an earlier backward, which freed what was held then
                for call in forward_pass.calls:
                    if isinstance(call, AgreedCall):
                        call.gathers, call.is_issued = True, False
            forward_pass.is_taken_up = True
        super()._take_up(forward_pass)

    def _walk_newer(self, forward_pass: ForwardPass | None) -> None:
        """Walk past the passes after ``forward_pass``, by default past all, in which some rank has
        no call, and so does not come back to them."""
        for other in reversed(self._open_passes):
            if other is forward_pass:
                return
            is_for_all = isinstance(other, NegotiatedPass) and other.is_for_all_ranks
            if is_for_all and other not in self.remaining:
                self._take_up_alone(other)
                self._walk_to_end(other)

    def _walk_rest(self) -> None:
        super()._walk_rest()
        self._walk_newer(None)

    def _step(self, call: ForwardRecord) -> None:
        """Step to ``call``, and with it to all that some rank ran in one activation checkpoint: it
        runs these again, the first one first, before it comes back to them."""
        if self._was_joined:  # what other ranks have reduced by now
            self._reducer.passed(call.end)
        last = call
        self._was_joined = is_joined = isinstance(last, AgreedCall) and last.is_joined
        self._step_alone(call, call.end)
        while is_joined:
            last = self.remaining[call.forward_pass].pop()
            is_joined = isinstance(last, AgreedCall) and last.is_joined
            self._step_alone(last, call.end)

    def _come_again_to(self, call: ForwardRecord) -> None:
        if call in self.open_calls:
            super()._come_again_to(call)
        else:
            self._step_alone(call, call.end)

    def _step_alone(self, call: ForwardRecord, passed: int) -> None:
        """Step to ``call``, past all that started after the tick ``passed``."""
        if not isinstance(call, AgreedCall):
            super()._step(call)
            return
        unit = self._refs[call.unit_index]()
        if unit is None:
            return
        self._leave(passed)
        if call.is_own:
            self.open_calls.append(call)
        if not self.accumulates:
            self._mark_unreduced(unit)
        self._step_agreed(call, unit)
        self._reducer.passed(passed)

    def _step_agreed(self, call: AgreedCall, unit: ScheduledUnit) -> None:
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
            if not other.needs_parameters or not isinstance(other, AgreedCall):
                continue
            room -= 1
            ahead = self._refs[other.unit_index]()
            if other.gathers and not other.is_issued and ahead is not None:
                self._prefetcher.gather_ahead(
                    ahead, other, is_needed=other.is_own or self.creates_graph
                )
