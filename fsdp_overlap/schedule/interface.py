"""The schedule's interface: the facts that it reads and the commands that it gives. Everything else
is hidden from it.

The facts come from units and from the autograd engine, and are read-only. Commands that need a comm
stream go to the comm, others to the unit or its gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

UnitIndex = int
"""Names a unit without keeping it alive. The same on every rank."""

ComputeEvent = object
"""A point in the compute enqueued so far. ``None`` where there is nothing to wait for."""


class ReshardSettings(Protocol):
    """What the user asked of a unit."""

    @property
    def reshard_after_backward(self) -> bool: ...
    @property
    def unshard_in_backward(self) -> bool: ...


class Gradients(Protocol):
    """The gradients of one param group, and the reduce input that they are collected in."""

    @property
    def count(self) -> int:
        """How many gradients there are at most."""

    @property
    def has_input(self) -> bool:
        """Whether the reduce input has memory."""

    def may_copy_in_early(self, index: int) -> bool:
        """Return whether the gradient of parameter ``index`` may be moved before its param group is
        complete."""

    def copy_in(self, indices: Sequence[int]) -> None:
        """Move the gradients of these parameters into the reduce input."""

    def copy_in_all(self) -> None:
        """Move every gradient that autograd holds into the reduce input."""


class ScheduledUnit(Protocol):
    """The facts about one unit, all of them read-only, and what it does without a comm stream.

    Facts about collectives are the same on every rank. Facts about gradients may differ. What the
    schedule remembers of a unit is in its own :class:`UnitState`.
    """

    @property
    def index(self) -> UnitIndex: ...
    @property
    def name(self) -> str: ...
    @property
    def is_root(self) -> bool: ...
    @property
    def is_conditional(self) -> bool:
        """Whether ranks may run it or not."""

    @property
    def module_ids(self) -> Iterable[int]:
        """The ids of its modules."""

    @property
    def settings(self) -> ReshardSettings: ...
    @property
    def gradients(self) -> Sequence[Gradients]:
        """One for each trainable param group. Empty if all are frozen."""

    @property
    def forward_prefetch(self) -> UnitRefs:
        """The units that the user wants gathered when this one runs in forward."""

    @property
    def backward_prefetch(self) -> UnitRefs: ...

    @property
    def has_parameters(self) -> bool: ...
    @property
    def is_gathered(self) -> bool:
        """Whether full buffers exist, or will exist once an all-gather is done."""

    @property
    def is_up_to_date(self) -> bool:
        """Whether it is gathered, and no shard was edited since."""

    @property
    def version(self) -> int:
        """Grows with every edit of the unit's shards."""

    @property
    def is_in_pieces(self) -> bool:
        """Whether its param groups may be reduced one by one, and all of their gradients are
        noticed."""

    @property
    def rests_on_host(self) -> bool:
        """Whether shards rest on the host, and all-gathers copy them from there."""

    @property
    def is_implicit(self) -> bool:
        """Whether it would be part of the unit around it, without Note [implicit units]. Where it
        runs last, as heads do, backward needs what ran before it too: Note [kept for backward]."""

    @property
    def implicit(self) -> Sequence[object]:
        """The units that have its large parameters: Note [implicit units]."""

    @property
    def keeps_parts(self) -> bool:
        """Whether parts of full buffers are kept between forward and backward."""

    @property
    def is_kept_for_backward(self) -> bool:
        """Whether it stays gathered for backward if it ran last in a forward: the user did not say
        otherwise. See Note [kept for backward]."""

    def reshards_after_forward(self) -> bool:
        """Return whether forward frees the full buffers. If the user did not say, all units do but
        the root, which backward needs first."""

    @property
    def holds_gradients(self) -> bool:
        """Whether autograd holds a gradient that no reduce input has yet."""

    @property
    def has_hooks(self) -> bool:
        """Whether users registered hooks on sharded parameters, which see gradients."""

    @property
    def accumulates(self) -> bool:
        """Whether the backward under way will accumulate into a parameter of the unit."""

    @property
    def syncs_gradients(self) -> bool:
        """Whether backward reduces gradients, or leaves them for a later one."""

    @property
    def completes_gradients(self) -> bool:
        """Whether backward also reduces them over replicas."""

    def find_in_place_edit(self) -> str | None:
        """Return an edit of unsharded parameters in place that would be lost, in words, or
        ``None``."""

    def wait(self) -> None:
        """Make compute wait for the unit's all-gathers."""

    def to_unsharded(self) -> None:
        """Register the unsharded parameters in the unit's modules."""

    def to_sharded(self) -> None:
        """Register the sharded parameters in the unit's modules."""

    def hook_gradients(self) -> None:
        """Make every gradient of the unit be noticed when it arrives."""

    def free_parts(self) -> None:
        """Free the parts of full buffers that were kept between forward and backward."""


UnitRefs = Sequence[Callable[[], ScheduledUnit | None]]
"""What gives each unit, or ``None`` if it is gone. A weak reference does."""


@dataclass(eq=False, slots=True)
class UnitState:
    """What the schedule remembers of one unit. It alone writes this."""

    synced_version: int = -1
    """The version of the shards that all-gathers see: their comm stream runs after the edits up to
    it."""
    registers_unsharded: bool = False
    """Whether its unsharded parameters stay registered until the full buffers are freed, because
    the user asked for them by ``unshard()``."""
    has_unreduced: bool = False
    """Whether backwards left gradients that are not reduced, or not over replicas. The same on
    every rank."""

    def drop(self) -> None:
        """Forget what is under way."""
        self.registers_unsharded = False
        self.has_unreduced = False


UnitStates = defaultdict[UnitIndex, UnitState]


@dataclass(eq=False)
class ForwardPass:
    """What backward needs to know of one pass. Times are ticks of the schedule's clock."""

    calls: list[ForwardRecord] = field(default_factory=list)
    """Calls that backward will come back to, in the order of their ``end``."""
    ticks: dict[UnitIndex, tuple[int, int]] = field(default_factory=dict)
    """The first start and the last end of each unit that ran, with or without gradients."""
    first_ticks: dict[UnitIndex, int] = field(default_factory=dict)
    """The first start of each unit in all passes that a backward may come back to with this one,
    which share it."""
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

    unit_index: UnitIndex
    start: int
    end: int


@dataclass(eq=False, slots=True)
class ForwardRecord:
    """One forward of a unit whose outputs require grad.

    The autograd engine runs nodes in the reverse of the order in which they were made. So when the
    gradient of this call's output arrives, backward is done with every call that started after
    ``end``. Releases and reductions rely on that. See Note [passed calls].
    """

    unit_index: UnitIndex
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


class ReductionWork(Protocol):
    """Stands for a reduce-scatter that was issued."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def abandon(self) -> None: ...


Replies = Mapping[bytes, int]
"""Each message that ranks sent, with the set of those that sent it: bit ``r`` for rank ``r``. In
the same order on all ranks."""


class CommOps(Protocol):
    """Does on comm streams what was decided. Only work handles and marks come back to the
    schedule."""

    runs_ahead: bool
    """Whether the host goes on while compute waits, as on streams."""

    def after_compute(self) -> None:
        """Make all-gathers from now on start after the compute enqueued so far."""

    def record_compute_event(self) -> ComputeEvent: ...

    def exchange(self, message: bytes) -> Replies:
        """Return the messages of all ranks. All have the same size. The host waits."""

    def gather(self, unit: ScheduledUnit, again: bool = False, shadow: bool = False) -> None:
        """Enqueue the all-gathers of the param groups that are not up to date, or of all of them
        ``again``. ``shadow``: only other ranks need them."""

    def prepare_gathers(self, unit: ScheduledUnit) -> None:
        """Enqueue what must come before all-gathers of ``unit``, if anything must."""

    def wait_for_prepared(self, raised: bool) -> None:
        """Make compute wait for all of these that nobody has waited for: it may edit shards. After
        a forward that ``raised`` they may fail, which is no other error."""

    def free(self, unit: ScheduledUnit, after: ComputeEvent, waits: bool = True) -> None:
        """Free the full buffers once the compute up to ``after`` is done. Unless the comm stream
        ``waits``, all-gathers that follow may start before that, in other memory. If compute has
        not waited for their all-gathers, it does now: they read shards, which it may edit."""

    def free_unread(self, unit: ScheduledUnit) -> None:
        """Free the full buffers of a unit that only other ranks need, and do not make compute wait
        for the all-gathers. :meth:`wait_for_unread` comes before it edits shards."""

    def wait_for_unread(self) -> None:
        """Make compute wait for the all-gathers of full buffers that were freed unread: it may edit
        shards."""

    def forbid_old_graphs(self, unit: ScheduledUnit, modules: Collection[int]) -> None:
        """Make autograd refuse the unit's parameters to every graph made so far: those of
        ``modules``, by their ids, or all if there are none."""

    def allocate_input(self, gradients: Gradients) -> None:
        """Give the reduce input memory."""

    def reduce(self, gradients: Gradients) -> ReductionWork:
        """Enqueue the reduce-scatter of the reduce input."""

    def finish(self, gradients: Gradients, work: ReductionWork) -> None:
        """Make compute wait for a reduce-scatter, give the gradient to the parameters, and free
        the reduce input. With replicas the gradient is there after :meth:`finish_backward`."""

    def abandon(self, reductions: Iterable[tuple[Gradients, ReductionWork]]) -> None:
        """Wait for reductions under way whose results nobody needs any more. Each is given as its
        gradients and its work handle."""

    def finish_backward(self) -> None:
        """Make compute wait for all reductions over replicas. Compare what the ranks issued, and
        find out which parameters have a gradient."""

    def is_profiled(self) -> bool:
        """Return whether a profiler runs. Without one, :meth:`profiler_range` marks nothing."""

    def profiler_range(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Mark what runs inside in a profiler's trace."""


class AutogradEngine(Protocol):
    """What the schedule asks of the autograd engine."""

    def is_in_backward(self) -> bool: ...
    def run_backward(self, function: Callable[[], object]) -> None:
        """Run a backward that does nothing but call ``function``."""

    def is_grad_enabled(self) -> bool: ...
    def is_for_all_leaves(self) -> bool:
        """Return whether the backward under way is for all leaves, as ``backward()`` is."""

    def keeps_graph(self) -> bool:
        """Return whether the graph of the backward under way may be walked again, as with
        ``retain_graph=True``."""

    def checkpoint(self) -> object:
        """Return what stands for the outermost activation checkpoint whose forward is under way,
        ``None`` if there is none. It is another object for each."""

    def sequence_number(self) -> int:
        """Return the number of the node that backward is in, or outside of backward, of the next
        one that forward makes. Each node has a larger one than those before it."""

    def graph_task(self) -> int:
        """Return the number of the backward under way on this thread, -1 where there is none."""

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        """Have ``function`` called when the backward under way has run."""
