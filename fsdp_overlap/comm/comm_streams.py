"""Comm streams: ordered queues on which communication runs beside compute.

On a device with streams it is a stream of the device, and compute waits for events without blocking
the host. On a CPU it is a queue of asynchronous work, and compute waits by blocking.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fsdp_overlap.comm.watchdog import Watchdog, watchdogs
from fsdp_overlap.tensor.flat_buffer import Buffer
from fsdp_overlap.torch_internals import profiler_enabled

# ---- Streams of devices ----


@cache
def has_streams(device: torch.device) -> bool:
    """Return whether compute on ``device`` is enqueued on streams, so that the host runs ahead of
    it."""
    # torch.cpu has classes of these names too, which do nothing.
    return device.type not in ("cpu", "meta") and hasattr(streams_of(device), "Stream")


def streams_of(device: torch.device) -> Any:
    """Return the module with ``device``'s streams and events, such as ``torch.cuda`` for a GPU."""
    return torch.get_device_module(device)


def current_device(device_type: str) -> torch.device:
    """Return the device of this type that is computed on now, with its index if the type has
    streams."""
    device = torch.device(device_type)
    if has_streams(device):
        return torch.device(device_type, streams_of(device).current_device())
    return device


def mark_enqueued(device: torch.device) -> Any:
    """Return an event after all that this thread has enqueued on its current stream of ``device``,
    which other threads can wait for. None if the device has no streams: there all of it is done.

    A host that waits for it sleeps: by default CUDA's spins, which takes a core from what steps
    shards on the host."""
    if not has_streams(device):
        return None
    streams = streams_of(device)
    event = streams.Event(**_sleeping(streams.Event))
    return streams.current_stream(device).record_event(event)


@cache
def _sleeping(event: Any) -> dict[str, bool]:
    """Return the options of events of class ``event`` on which the host waits asleep."""
    try:
        event(blocking=True)
    except TypeError:  # torch.xpu's have no such option in torch 2.11
        return {}
    return {"blocking": True}


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph, such as a CUDA graph, captures the current stream."""
    if not has_streams(device):
        return False
    ask = getattr(streams_of(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


# ---- What comm streams run ----

ComputeEvent = Any
"""A point in the compute enqueued so far, as :meth:`CommStream.record_compute_event` gives it."""


@dataclass(eq=False, slots=True)  # one is made for each collective, twice as fast as a NamedTuple
class PendingCollective:
    """A collective on its way: ``finish()`` gives its result once all ``works`` are done.

    ``works`` has one for each collective of the backend. One handle for several, which waits for
    the group alone, was seen to return before all outputs were written.
    """

    works: Sequence[dist.Work]
    finish: Callable[[], torch.Tensor]
    group: dist.ProcessGroup | None = None
    """The group that the works run on. ``None`` if there are none."""


Issue = Callable[[], PendingCollective]
"""Issues a collective."""
Accept = Callable[[torch.Tensor], None]
"""Takes the result of a collective."""
CollectiveOp = tuple[Issue, Accept | None, int]
"""What :meth:`CommStream.enqueue` runs and gives the result to, and how many bytes travel then."""

REPLAY = "replay of a CUDA graph"
"""What is launched instead of collectives where these are in a graph."""

# How long a rank waits before it polls. Long compared to a step, short compared to the patience of
# people.
FIRST_POLL = timedelta(seconds=1)

# How many collectives a comm stream remembers that have not ended.
MAX_LAUNCHED = 1024

# How many buffers a comm stream may have freed while compute still reads them. A host that is many
# passes ahead would take new memory for each.
MAX_KEPT_BACK = 4


_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def profiler_range(kind: str, label: str, nbytes: int = 0) -> AbstractContextManager[Any]:
    """Mark what runs inside as ``fsdp_overlap::<kind>(<label>)`` in a running profiler's trace. See
    Note [profiler ranges].

    ``profiling/names.py`` reads the names. ``nbytes`` is how many bytes the collective issued
    inside brings to this rank or takes from it. If it is not zero, the name ends in it, as in
    `` 4096 B``.
    """
    if not profiler_enabled():
        return _NO_RANGE
    size = f" {nbytes} B" if nbytes else ""
    return record_function(f"fsdp_overlap::{kind}({label}){size}")


class WorkHandle(Protocol):
    """What a comm stream hands back for enqueued work."""

    def wait(self) -> None:
        """Make the caller's compute wait. Safe to call twice.

        Raises:
            RuntimeError: the collective failed or timed out; names it and its unit.
        """
        ...

    def wait_on_host(self) -> None:
        """Block the host until the work is done."""
        ...

    def done(self) -> bool:
        """Return whether :meth:`wait_on_host` would return without waiting."""
        ...

    def abandon(self) -> None:
        """Give up the result, instead of :meth:`wait`, also if the work fails. Afterwards compute
        may edit what the work reads, and what the work writes to may be freed in the comm stream's
        order."""
        ...


class CommStream(ABC):
    """A queue of communication. What it need not do on a CPU does nothing here.

    ``label`` names the unit in errors and traces, ``kind`` names the collective.
    """

    runs_ahead = False
    """Whether the host goes on before what it enqueues has begun."""

    def after_compute(self) -> None:
        """Start what is enqueued from now on after the compute enqueued so far."""

    def after_event(self, event: torch.Event) -> None:
        """Start what is enqueued from now on after ``event``."""

    @abstractmethod
    def after_work(self, work: WorkHandle) -> None:
        """Start what is enqueued from now on after ``work``, which is of another stream."""

    def after_replay(self) -> None:
        """Start what is enqueued from now on after a graph that was just enqueued as compute, which
        waits for what was enqueued here so far."""

    def before_compute(self) -> None:
        """Start compute enqueued from now on after what was enqueued here so far."""

    def record_compute_event(self) -> ComputeEvent:
        """Return a mark of the compute enqueued so far."""
        return None

    @abstractmethod
    def allocate(self, label: str, buffer: Buffer) -> None:
        """Give ``buffer`` storage, in the comm stream's order."""

    @abstractmethod
    def enqueue(
        self, kind: str, label: str, issue: Issue, accept: Accept | None = None, nbytes: int = 0
    ) -> WorkHandle:
        """Run ``issue`` and give its result to ``accept``, in the comm stream's order: at once on a
        device, whose stream orders them, and where it is waited for on a CPU. So errors of
        ``accept`` come from here or from there. ``nbytes`` is how many bytes travel to or from this
        rank, 0 if they were not counted."""

    @abstractmethod
    def free(self, label: str, buffer: Buffer, after: ComputeEvent, waits: bool = True) -> None:
        """Free what this comm stream allocated, once the compute up to ``after`` is done (None: at
        once). Unless the comm stream ``waits``, what is enqueued from now on may start before that,
        in other memory."""


class HostWorkHandle:
    """Asynchronous work of a CPU backend."""

    __slots__ = ("_accept", "_pending", "kind", "label")

    def __init__(
        self, kind: str, label: str, pending: PendingCollective, accept: Accept | None
    ) -> None:
        self.kind = kind
        self.label = label
        self._pending: PendingCollective | None = pending
        self._accept = accept

    def wait(self) -> None:
        pending = self._pending
        if pending is None:
            return
        if pending.works:
            self._wait_for(pending)
        self._pending = None
        result = pending.finish()
        if self._accept is not None:
            self._accept(result)

    def _wait_for(self, pending: PendingCollective) -> None:
        with profiler_range("wait_" + self.kind, self.label):
            found = None if pending.group is None else watchdogs.get(pending.group)
            watchdog = None if found is None else found()
            failure: RuntimeError | None = None
            # All are waited for, also after one has failed: the others may still read or write
            # what is freed next.
            for work in pending.works:
                try:
                    _wait(work, watchdog)
                except RuntimeError as error:
                    failure = failure or error
            if failure is not None:
                raise RuntimeError(self._describe(pending, watchdog, failure)) from failure

    def _describe(
        self, pending: PendingCollective, watchdog: Watchdog | None, failure: RuntimeError
    ) -> str:
        what = f"{self.kind} of unit {self.label!r}" if self.label else self.kind
        where = ""
        if pending.group is not None:
            ranks = dist.get_process_group_ranks(pending.group)
            where = f" among ranks {ranks} (group {pending.group.group_name!r})"
        why = str(failure) if watchdog is None else watchdog.explain(failure)
        return f"{what}{where} failed: {why}"

    def wait_on_host(self) -> None:
        self.wait()

    def done(self) -> bool:
        return self._pending is None or all(work.is_completed() for work in self._pending.works)

    def abandon(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and pending.works:
            with suppress(RuntimeError):  # the watchdog has it for those who need a result
                self._wait_for(pending)


def _wait(work: dist.Work, watchdog: Watchdog | None) -> None:
    """Block the host until ``work`` is done. Meanwhile poll ``watchdog``, if there is one, at
    intervals that double.

    Raises:
        RuntimeError: ``work`` failed or timed out, or ``watchdog`` knows that it will.
    """
    if watchdog is None:
        work.wait()
    else:
        _wait_and_poll(work, watchdog)


def _wait_and_poll(work: dist.Work, watchdog: Watchdog) -> None:
    patience = FIRST_POLL
    while True:
        try:
            work.wait(patience)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it failed; otherwise it was done in the meantime
                return
        watchdog.poll()
        patience *= 2


class HostCommStream(CommStream):
    """A queue of asynchronous work on a CPU. Work handles are waited for one by one: nothing else
    knows what is under way. There are no graphs."""

    def after_work(self, work: WorkHandle) -> None:
        work.wait()

    def allocate(self, label: str, buffer: Buffer) -> None:
        buffer.allocate()

    def enqueue(
        self, kind: str, label: str, issue: Issue, accept: Accept | None = None, nbytes: int = 0
    ) -> WorkHandle:
        if not profiler_enabled():
            return HostWorkHandle(kind, label, issue(), accept)
        with profiler_range(kind, label, nbytes):
            return HostWorkHandle(kind, label, issue(), accept)

    def free(self, label: str, buffer: Buffer, after: ComputeEvent, waits: bool = True) -> None:
        buffer.free()


class DeviceWorkHandle:
    """Work on a comm stream's stream, up to an event."""

    def __init__(self, event: torch.Event, device_module: Any) -> None:
        self._event = event
        self._device_module = device_module

    def wait(self) -> None:
        self._device_module.current_stream().wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return self._event.query()

    def abandon(self) -> None:
        self.wait()


class LaunchedCollective(NamedTuple):
    """A collective on a comm stream's stream, or a replay before what comes there next: the events
    that the stream waited for before it, and the one behind it."""

    kind: str
    label: str
    waits: Sequence[torch.Event]
    end: torch.Event


class DeviceCommStream(CommStream):
    """A stream of a device that has them."""

    runs_ahead = True
    max_kept_back = MAX_KEPT_BACK
    work_handle: type[DeviceWorkHandle] = DeviceWorkHandle
    """What is made for each enqueued work."""

    def __init__(self, device: torch.device) -> None:
        self._device_module = streams_of(device)
        # High priority, so that a collective's few blocks are placed before those of waiting GEMMs.
        self.stream = self._device_module.Stream(device, priority=-1)
        self.kept_back: list[torch.Event] = []
        """Marks of compute that memory was kept back for. Those that are past are dropped."""
        self.launched: deque[LaunchedCollective] = deque(maxlen=MAX_LAUNCHED)
        """For the desync monitor, which drops those that have ended."""
        self.count = 0
        """How many were ever launched."""
        self.preceding: list[torch.Event] = []
        """What the stream waits for before the next collective."""

    def after_compute(self) -> None:
        self.after_event(self._device_module.current_stream().record_event())

    def after_event(self, event: torch.Event) -> None:
        self.stream.wait_event(event)
        self.preceding.append(event)

    def after_work(self, work: WorkHandle) -> None:
        with self._device_module.stream(self.stream):
            work.wait()

    def after_replay(self) -> None:
        self.after_compute()
        end = self.preceding[-1]
        self.preceding = [end]  # the others precede the replay
        self.count += 1
        self.launched.append(LaunchedCollective(REPLAY, "", (), end))

    def before_compute(self) -> None:
        self._device_module.current_stream().wait_stream(self.stream)

    def record_compute_event(self) -> ComputeEvent:
        return self._device_module.current_stream().record_event()

    def allocate(self, label: str, buffer: Buffer) -> None:
        with self._device_module.stream(self.stream):
            buffer.allocate()

    def enqueue(
        self, kind: str, label: str, issue: Issue, accept: Accept | None = None, nbytes: int = 0
    ) -> WorkHandle:
        with profiler_range(kind, label, nbytes), self._device_module.stream(self.stream):
            result = issue().finish()
            if accept is not None:
                accept(result)
            end = self.stream.record_event()
        preceding, self.preceding = self.preceding, []
        self.count += 1
        self.launched.append(LaunchedCollective(kind, label, preceding, end))
        return self.work_handle(end, self._device_module)

    def free(self, label: str, buffer: Buffer, after: ComputeEvent, waits: bool = True) -> None:
        late = waits or buffer.keeps_storage or buffer.memory is not None or self._keeps_enough()
        if after is not None and late:
            # Memory goes back to the stream that it was allocated on, so no record_stream() is
            # needed.
            self.after_event(after)
        elif after is not None:
            # The allocator keeps the memory back until compute is done: Note [between passes].
            compute = self._device_module.current_stream()
            compute.wait_event(after)
            buffer.record_stream(compute)
            self.kept_back.append(after)
        buffer.free()

    def _keeps_enough(self) -> bool:
        self.kept_back = [mark for mark in self.kept_back if not mark.query()]
        return len(self.kept_back) >= self.max_kept_back


def make_comm_stream(device: torch.device) -> CommStream:
    """Return a new comm stream for compute on ``device``."""
    return DeviceCommStream(device) if has_streams(device) else HostCommStream()
