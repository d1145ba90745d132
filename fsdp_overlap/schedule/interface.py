"""What the schedule knows, and what it can command. Everything else is hidden from it.

The facts come from units and from the autograd engine. The commands go to the transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

UnitIndex = int
"""Names a unit without keeping it alive. The same on every rank."""

Mark = Any
"""A point in the compute enqueued so far."""


class Settings(Protocol):
    """What the user asked of a unit."""

    @property
    def reshard_after_backward(self) -> bool: ...
    @property
    def unshard_in_backward(self) -> bool: ...


class Gradients(Protocol):
    """The gradients of one bucket, and the reduce input that they are collected in."""

    is_in_flight: bool
    """Whether a reduce-scatter reads the reduce input. :class:`Reductions` sets it."""

    count: int
    """How many gradients there are at most."""

    @property
    def has_input(self) -> bool:
        """Whether the reduce input has memory."""
        ...

    def leaves_early(self, index: int) -> bool:
        """Whether the gradient of parameter ``index`` may be moved before its bucket is
        complete."""
        ...


class Unit(Protocol):
    """The facts about one unit.

    Facts about collectives are the same on every rank. Facts about gradients may differ.
    """

    index: UnitIndex
    name: str
    is_root: bool
    is_list: bool
    """Whether it has several modules."""
    to_run: set[int]
    """In a unit of several modules, the ids of those that have yet to run in the forward under
    way."""
    left_out: set[int]
    """The ids of those that did not run in a pass, so that others may have read their parameters
    for a graph. Empty if a graph may read the parameters of all."""
    shows_unsharded: bool
    """Whether its unsharded parameters stay registered until the full buffers are freed."""
    seen_version: int
    """The version of the shards that all-gathers are known to see. :class:`Gathers` sets it."""
    has_unreduced: bool
    """Whether earlier backwards left gradients to reduce. :class:`Reductions` sets it."""

    @property
    def settings(self) -> Settings: ...
    @property
    def gradients(self) -> Sequence[Any]:
        """A :class:`Gradients` for each trainable bucket. Empty if all are frozen."""
        ...

    @property
    def forward_prefetch(self) -> Sequence[Callable[[], Any]]:
        """The units that the user wants gathered when this one runs in forward. Each is a function
        that gives the unit, or ``None`` if it is gone."""
        ...

    @property
    def backward_prefetch(self) -> Sequence[Callable[[], Any]]: ...

    @property
    def has_parameters(self) -> bool: ...
    @property
    def is_gathered(self) -> bool:
        """Whether full buffers exist, or will exist once an all-gather is done."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether it is gathered, and no shard was edited since."""
        ...

    @property
    def version(self) -> int:
        """Grows with every edit of the unit's shards."""
        ...

    is_in_pieces: bool
    """Whether its buckets may be reduced one by one, and all of their gradients are noticed."""
    is_offloaded: bool
    """Whether shards rest on the host, and all-gathers copy them from there."""

    @property
    def keeps_part(self) -> bool:
        """Whether a part of the full buffer is kept between forward and backward."""
        ...

    @property
    def is_kept_for_backward(self) -> bool:
        """Whether it stays gathered for backward if it ran last in a forward."""
        ...

    def reshards_after_forward(self) -> bool: ...

    @property
    def is_waiting(self) -> bool:
        """Whether autograd holds a gradient that no reduce input has yet."""
        ...

    @property
    def accumulates(self) -> bool:
        """Whether the backward under way will accumulate into a parameter of the unit."""
        ...

    @property
    def syncs_gradients(self) -> bool:
        """Whether backward reduces gradients, or leaves them for a later one."""
        ...

    @property
    def completes_gradients(self) -> bool:
        """Whether backward also reduces them across copies."""
        ...

    def edited(self) -> str | None:
        """An edit of unsharded parameters in place that would be lost, in words, or ``None``."""
        ...


UnitRefs = Sequence[Callable[[], Unit | None]]
"""For each index, what gives the unit, or ``None`` if it is gone. A weak reference does."""


class Ticket(Protocol):
    """Stands for a reduce-scatter that was issued."""

    def done(self) -> bool: ...


class Transfers(Protocol):
    """Does what was decided. Only tickets and marks come back to the schedule."""

    def after_compute(self) -> None:
        """All-gathers from now on start after the compute enqueued so far."""
        ...

    def after_event(self, event: Any) -> None:
        """All-gathers from now on start after ``event``."""
        ...

    def mark_compute(self) -> Mark: ...

    def gather(self, unit: Any) -> None:
        """Enqueues the all-gathers of the buckets that are not whole."""
        ...

    def put_together(self, unit: Any) -> None:
        """Enqueues the collectives that put divided shards together."""
        ...

    def finish_putting_together(self, raised: bool) -> None:
        """Makes compute wait for all of these that nobody has waited for: it may edit shards. After
        a forward that ``raised`` they may fail, which is no other error."""
        ...

    def wait(self, unit: Any) -> None:
        """Makes compute wait for the unit's all-gathers."""
        ...

    def free(self, unit: Any, after: Mark, waits: bool = True) -> None:
        """Frees the full buffers once the compute up to ``after`` is done. Unless the lane
        ``waits``, all-gathers that follow may start before that, in other memory."""
        ...

    def drop_parts(self, unit: Any) -> None:
        """Frees the parts of full buffers that were kept between forward and backward."""
        ...

    def forbid_old_graphs(self, unit: Any) -> None:
        """Makes autograd refuse the unit's parameters to every graph made so far."""
        ...

    def to_unsharded(self, unit: Any) -> None:
        """Registers the unsharded parameters in the unit's modules."""
        ...

    def to_sharded(self, unit: Any) -> None:
        """Registers the sharded parameters in the unit's modules."""
        ...

    def hook_gradients(self, unit: Any) -> None:
        """Makes sure that every gradient of the unit is noticed when it arrives."""
        ...

    def allocate_input(self, gradients: Any) -> None:
        """Gives the reduce input memory."""
        ...

    def absorb(self, gradients: Any, index: int) -> None:
        """Moves the gradient of parameter ``index`` into the reduce input."""
        ...

    def absorb_all(self, gradients: Any) -> None:
        """Moves every gradient that autograd holds into the reduce input."""
        ...

    def reduce(self, gradients: Any) -> Ticket:
        """Enqueues the reduce-scatter of the reduce input."""
        ...

    def finish(self, gradients: Any, ticket: Any) -> None:
        """Makes compute wait for a reduce-scatter, gives the gradient to the parameters, and frees
        the reduce input. On a mesh with copies the gradient is there after :meth:`finish_sums`."""
        ...

    def finish_sums(self) -> None:
        """Makes compute wait for all reductions across copies."""
        ...

    def abandon(self, reductions: Iterable[tuple[Any, Any]]) -> None:
        """Waits for reductions under way whose results nobody needs any more. Each is given as its
        gradients and its ticket."""
        ...

    def finish_backward(self) -> None:
        """Compares what the ranks issued, and settles which parameters have a gradient."""
        ...

    def is_profiled(self) -> bool:
        """Whether a profiler runs. Without one, :meth:`span` marks nothing."""
        ...

    def span(self, kind: str, name: str) -> AbstractContextManager[Any]:
        """Marks what runs inside in a profiler's trace."""
        ...


class Engine(Protocol):
    """What the autograd engine tells."""

    def is_in_backward(self) -> bool: ...
    def is_grad_enabled(self) -> bool: ...
    def is_for_all_leaves(self) -> bool:
        """Whether the backward under way is for all leaves, as ``backward()`` is."""
        ...

    def keeps_graph(self) -> bool:
        """Whether the graph of the backward under way may be walked again, as with
        ``retain_graph=True``."""
        ...

    def graph_task(self) -> int:
        """The number of the backward under way on this thread, -1 where there is none."""
        ...

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        """Has ``function`` called when the backward under way has run."""
        ...
