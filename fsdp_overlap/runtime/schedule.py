"""When a unit is gathered, released and reduced: the events of forward and backward.

In forward, unit *i*: its all-gather is enqueued unless that was done ahead; then delayed releases
are carried out; then the next all-gather in the predicted order is enqueued; then compute waits. In
backward the same along the reverse of what ran, and reduce-scatters as buckets become complete.

All of it follows from the order of calls, never from what is ready first on one rank, so that all
ranks enqueue the same collectives. Where a rank's backward skips a call that others reach, the
call's all-gather is enqueued all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from fsdp_overlap.comm.spans import span
from fsdp_overlap.runtime.engine import is_for_all_leaves, is_in_backward
from fsdp_overlap.runtime.finalization import Finalization
from fsdp_overlap.runtime.gathers import Gathers
from fsdp_overlap.runtime.gradients import BucketGradients
from fsdp_overlap.runtime.order import Backward, Call, ForwardOrder, ForwardPass, UnitIndex
from fsdp_overlap.runtime.reductions import Reductions
from fsdp_overlap.runtime.untraced import untraced

if TYPE_CHECKING:
    from fsdp_overlap.runtime.unit import Unit

# Forwards with gradients that no backward has followed yet. Older ones are forgotten, so that a
# program that never calls backward does not grow; a backward that reaches one adds it again.
MAX_OPEN_PASSES = 64

UNFINISHED = (
    "the last backward did not finish (did it raise?); call ctx.reset() on every rank before the "
    "next {}"
)


class Schedule:
    """The events of one context. ``unit_at`` finds a unit by its index, ``None`` if it is gone."""

    def __init__(
        self,
        gathers: Gathers,
        reductions: Reductions,
        unit_at: Callable[[UnitIndex], Unit | None],
        units: Callable[[], list[Unit]],
        finish_backward: Callable[[], None],
        divides_copies: bool,
    ) -> None:
        self.gathers = gathers
        self.reductions = reductions
        self.order = ForwardOrder()
        # Of backwards that run units again which left no call, as reentrant checkpoints do: calls
        # that backward has yet to come back to, where all units have them, tell more.
        self._backward_order: ForwardOrder | None = None
        self._unit_at = unit_at
        self._units = units
        self.finalization = Finalization(gathers, reductions, units, finish_backward)
        self._divides_copies = divides_copies
        self._clock = 0
        self._running: list[tuple[Unit, int]] = []
        self._pass = ForwardPass()
        self._is_pass_over = True
        self._unfinished: list[Unit] = []
        """Units of several modules that wait, whole, for those that have not run in this pass."""
        self._open_passes: deque[ForwardPass] = deque(maxlen=MAX_OPEN_PASSES)
        self._backward: Backward | None = None
        self._backwards = 0

    # Forward

    def before_forward(self, unit: Unit) -> None:
        """``unit``'s forward is about to run: compute may use its full buffers afterwards."""
        if is_in_backward():
            self._before_recompute(unit)
            return
        if self._backward is not None:
            raise RuntimeError(UNFINISHED.format("forward"))
        if not self._running and self._starts_pass(unit):
            self._begin_pass(unit)
        self._running.append((unit, self._tick()))
        if unit.buckets:
            self.order.visit(unit.index)
            upcoming = self.order.upcoming(self.gathers.prefetch)
            if self.gathers.use(unit, upcoming, unit.forward_prefetch):
                self.order.teach()
            unit.wait()

    def after_forward(self, unit: Unit, raised: bool = False) -> Call | None:
        """``unit``'s forward has run, or ``raised``. Returns the call to announce in
        :meth:`before_backward` if gradients will flow back through it; ``None`` where its buffers
        need no second use."""
        running = self._running
        backward = self._backward if is_in_backward() else None
        if backward is not None:
            running = backward.recomputing
        if not running or running[-1][0] is not unit:
            return None  # before_forward raised
        _, start = running.pop()
        end = self._tick()
        if backward is not None:
            return self._after_recompute(unit, backward, start, end)
        self._pass.note(unit.index, start, end)
        if (raised or unit.reshards_after_forward()) and not self.is_in_use(unit):
            if not unit.to_run:
                self.gathers.release(unit)
            elif running and not raised:
                self._unfinished.append(unit)
            else:
                unit.to_run.clear()
                self.gathers.release(unit)
        if self._unfinished and not running:
            self._release_unfinished()
        if unit.is_root and not running:
            self._is_pass_over = True
            self.gathers.finish_pass(before_backward=torch.is_grad_enabled() and not raised)
        if not unit.buckets or not torch.is_grad_enabled():
            return None
        return Call(unit.index, start, end, self._pass, unit.version)

    def is_in_use(self, unit: Unit) -> bool:
        """Whether a forward or backward of ``unit`` is under way: a module may call itself, and
        backward may run a forward again."""
        backward = self._backward
        if backward is not None and (
            self._is_open(unit, backward) or _is_among(unit, backward.recomputing)
        ):
            return True
        return _is_among(unit, self._running)

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of some unit is under way, other than within backward."""
        return bool(self._running)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has run that a backward may come back to."""
        return self._backward is not None or any(past.calls for past in self._open_passes)

    def add_call(self, call: Call) -> None:
        """Backward will come back to ``call``."""
        call.forward_pass.calls.append(call)

    def _release_unfinished(self) -> None:
        """The outermost unit has run: what it did not use of lists of modules is not awaited."""
        for unit in dict.fromkeys(self._unfinished):
            unit.to_run.clear()
            self.gathers.release(unit)
        self._unfinished.clear()

    def _starts_pass(self, unit: Unit) -> bool:
        # Where no unit encloses the others a pass has no visible end: a second run of a unit, or a
        # backward in between, tells.
        return unit.is_root or self._is_pass_over or self.order.has_visited(unit.index)

    def _begin_pass(self, first: Unit) -> None:
        self.finalization.check_done("forward")
        self._is_pass_over = False
        self.gathers.finish_pass(before=first)
        self.gathers.release_stale()
        self.gathers.begin_pass(self._units())
        if self._divides_copies:
            # All at once: they take no memory that is not there, and are ready when they are read.
            for unit in self._predicted_units():
                unit.put_together()
        self.order.begin(first.index)
        self._pass = ForwardPass()
        if torch.is_grad_enabled():
            self._open_passes.append(self._pass)

    # Backward

    def before_backward(self, call: Call) -> None:
        """The gradient of an output of ``call`` is there: its backward is about to run.

        Raises:
            RuntimeError: the unit's parameters were edited since its forward, or an earlier
                backward did not finish.
        """
        backward = self._backward or self._begin_backward()
        if call.backward == backward.serial:
            return
        # Backwards within a backward belong to it only where a forward ran within it before.
        if torch._C._current_graph_task_id() != backward.graph_task and backward.recompute is None:
            raise RuntimeError(UNFINISHED.format("backward"))
        call.backward = backward.serial
        backward.creates_graph = torch.is_grad_enabled()
        unit = self._unit_at(call.unit)
        if unit is None:
            return
        if unit.version != call.version:
            raise RuntimeError(
                f"parameters of unit {unit.name!r} were modified between its forward and its "
                "backward; run backward before optimizer.step() and before editing weights"
            )
        with span("pre_backward", unit.name):
            self._advance_to(call, backward)
            if not call.needs_parameters:
                return
            unit.wait()
            # Activation checkpointing inside the unit runs its modules again, without the unit's
            # hooks.
            unit.use_unsharded()

    def gradient_arrived(self, unit: Unit, gradients: BucketGradients, index: int) -> None:
        """Autograd accumulated into the unsharded parameter ``index`` of a bucket."""
        if self._backward is None:
            self._begin_backward()
        self.reductions.arrived(unit, gradients, index)

    def _begin_backward(self) -> Backward:
        self.finalization.begin_backward()
        Variable._execution_engine.queue_callback(self._end_backward)
        self._backwards += 1
        self._backward = backward = Backward(self._backwards, torch._C._current_graph_task_id())
        # Of backward(), which all ranks call, and not of what it reaches, which may differ.
        backward.accumulates = is_for_all_leaves() or any(
            unit.accumulates for unit in self._units()
        )
        self._expect(self.gathers.kept.items(), backward)
        if self._backward_order is not None:
            self._backward_order.begin()
        return backward

    def _advance_to(self, call: Call, backward: Backward) -> None:
        """Enqueues what every rank enqueues up to ``call``, also for calls skipped on this rank."""
        forward_pass, under_way = call.forward_pass, backward.under_way
        if not under_way or under_way[-1] is not forward_pass:
            while under_way and not forward_pass.is_within(under_way[-1]):
                self._walk_to_end(under_way.pop(), backward)
            if not under_way or under_way[-1] is not forward_pass:
                under_way.append(forward_pass)
            if forward_pass not in backward.remaining:
                self._reach_pass(forward_pass, backward)
        if forward_pass.is_recompute:
            forward_pass.graph_task = torch._C._current_graph_task_id()
        remaining = backward.remaining[forward_pass]
        # Almost always it is the last, and a long list takes long to search.
        if (not remaining or remaining[-1] is not call) and call not in remaining:
            self._step(call, backward)
            return
        while True:
            reached = remaining.pop()
            self._step(reached, backward)
            if reached is call:
                return

    def _reach_pass(self, forward_pass: ForwardPass, backward: Backward) -> None:
        backward.remaining[forward_pass] = list(forward_pass.calls)
        first_uses = ((call.unit, self._first_use(call)) for call in forward_pass.calls)
        self._expect(first_uses, backward)

    def _expect(self, first_uses: Iterable[tuple[UnitIndex, int]], backward: Backward) -> None:
        if backward.accumulates:
            self.reductions.expect(
                (unit, tick)
                for index, tick in first_uses
                if (unit := self._unit_at(index)) is not None
            )

    def _walk_to_end(self, forward_pass: ForwardPass, backward: Backward) -> None:
        remaining = backward.remaining[forward_pass]
        while remaining:
            self._step(remaining.pop(), backward)

    def _step(self, call: Call, backward: Backward) -> None:
        unit = self._unit_at(call.unit)
        if unit is None:
            return
        self._leave(call.end, backward)
        backward.open_calls.append(call)
        # What is whole may be read though nobody needs it, and then also by the graph that is made.
        if call.needs_parameters or (backward.creates_graph and unit.is_gathered):
            self._use_in_backward(unit, call.forward_pass, backward)
            if backward.creates_graph:
                self.gathers.kept.setdefault(unit.index, self._first_use(call))
                unit.watch_gradients()
        self.reductions.passed(call.end)

    def _leave(self, tick: int, backward: Backward) -> None:
        """Backward is done with every call that started after ``tick``."""
        for call in [call for call in backward.open_calls if call.start > tick]:
            backward.open_calls.remove(call)
            if all(other.unit != call.unit for other in backward.open_calls):
                self._release_passed(call.unit, backward)

    def _use_in_backward(
        self, unit: Unit, forward_pass: ForwardPass | None, backward: Backward
    ) -> None:
        prefetch = self.gathers.prefetch
        asked = unit.backward_prefetch and [
            ref
            for ref in unit.backward_prefetch
            if (other := ref()) and other.settings.unshard_in_backward
        ]
        if self._backward_order is not None:
            self._backward_order.visit(unit.index)
            if self.gathers.use(unit, self._backward_order.upcoming(prefetch), asked):
                self._backward_order.teach()
            return
        remaining = backward.remaining[forward_pass] if forward_pass is not None else []
        following = remaining[: -prefetch - 1 : -1]
        upcoming = [call.unit for call in following if call.needs_parameters]
        self.gathers.use(unit, upcoming, asked)

    def _release_passed(self, index: UnitIndex, backward: Backward) -> None:
        unit = self._unit_at(index)
        if unit is None:
            return
        with span("post_backward", unit.name):
            # In backwards 1, 2, 4, 8 ...: the unit's next forward finds what later ones miss.
            if not backward.serial & (backward.serial - 1):
                backward.lost = backward.lost or unit.edited()
            unit.use_sharded()
            if unit.is_list and backward.comes_back_to(index):
                backward.unfinished.add(index)
            elif unit.settings.reshard_after_backward:
                self.gathers.release(unit)

    @untraced
    def _end_backward(self) -> None:
        backward = self._backward
        if backward is None:
            return
        try:
            for forward_pass in backward.remaining:
                if not forward_pass.is_recompute:
                    self._walk_to_end(forward_pass, backward)
            backward.remaining.clear()
            for index in {*(call.unit for call in backward.open_calls), *backward.unfinished}:
                self._release_passed(index, backward)
            self.gathers.finish_pass()
            for unit in self._units():
                if unit.part_size is not None:
                    unit.drop_parts()  # of those that backward did not come back to
            self.finalization.end_backward()
            if backward.lost is not None:
                raise RuntimeError(backward.lost)
        finally:
            self._backward = None
            self._is_pass_over = True
            self._open_passes.clear()

    def _first_use(self, call: Call) -> int:
        """The tick at which the call's unit first ran in the forwards that this backward may
        reach."""
        first = call.start
        for forward_pass in (*self._open_passes, call.forward_pass):
            span = forward_pass.spans.get(call.unit)
            if span is not None and span[0] < first:
                first = span[0]
        return first

    # Forward inside backward: activation checkpointing

    def _before_recompute(self, unit: Unit) -> None:
        backward = self._backward or self._begin_backward()
        backward.recomputing.append((unit, self._tick()))
        # One that is open without parameters, because backward would not need them, does now.
        if unit.buckets and not (self._is_open(unit, backward) and unit.is_gathered):
            self._use_in_backward(unit, None, backward)
        unit.wait()

    def _after_recompute(self, unit: Unit, backward: Backward, start: int, end: int) -> Call | None:
        if not unit.buckets or self._is_open(unit, backward):
            return None  # recomputed for the backward under way, which has its own call
        # Its own backward, if it follows at once, then finds it whole.
        if unit.settings.reshard_after_backward and not self.is_in_use(unit):
            self.gathers.release(unit)
        recompute = backward.recompute
        if recompute is None or recompute in backward.remaining:
            task = torch._C._current_graph_task_id()
            recompute = backward.recompute = ForwardPass(is_recompute=True, outer_task=task)
        # Where the unit stood in the forward, so that it keeps its place among the other units.
        for forward_pass in self._open_passes:
            if unit.index in forward_pass.spans:
                start, end = forward_pass.spans[unit.index]
                if all(call.unit != unit.index for call in forward_pass.calls):
                    self._backward_order = self._backward_order or ForwardOrder()
        recompute.note(unit.index, start, end)
        return Call(unit.index, start, end, recompute, unit.version)

    def _is_open(self, unit: Unit, backward: Backward) -> bool:
        return any(call.unit == unit.index for call in backward.open_calls)

    # Between passes

    def start_param_sync(self) -> None:
        """Gathers stale full buffers again, in the order in which forward will use them."""
        self.gathers.refresh(unit for unit in self._predicted_units() if not self.is_in_use(unit))

    def _predicted_units(self) -> list[Unit]:
        """All units, in the order in which the next forward is expected to run them."""
        predicted = [self._unit_at(index) for index in self.order.predicted()]
        return [unit for unit in dict.fromkeys([*predicted, *self._units()]) if unit is not None]

    def finish_param_sync(self) -> None:
        """The same, and makes compute wait for all of them."""
        self.start_param_sync()
        for unit in self._units():
            unit.wait()

    def release_unsharded(self) -> None:
        """Frees every full buffer that is not in use."""
        for unit in self._units():
            if not self.is_in_use(unit):
                unit.use_sharded()
                self.gathers.unkeep(unit)
                self.gathers.release(unit)
                unit.drop_parts()
        self.gathers.flush()

    # All

    def drop(self) -> None:
        """Forgets what is under way, and the order, of which ranks may have recorded different
        ones."""
        self.order = ForwardOrder()
        self._backward_order = None
        self.gathers.drop()
        self.reductions.drop()
        self.finalization.drop()
        self._running.clear()
        self._backward = None
        self._is_pass_over = True
        self._unfinished.clear()
        self._open_passes.clear()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _is_among(unit: Unit, running: Sequence[tuple[Unit, int]]) -> bool:
    for other, _ in running:  # noqa: SIM110, as in Unit.is_whole
        if other is unit:
            return True
    return False
