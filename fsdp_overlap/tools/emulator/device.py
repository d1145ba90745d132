"""The emulated device: streams, events, memory, and what happens on them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from fsdp_overlap.tools.emulator.allocator import Allocator, MemoryBlock, MemPool
from fsdp_overlap.tools.emulator.conflicts import Conflict
from fsdp_overlap.tools.emulator.findings import Finding, Findings, FoundAccess, Sync, steady
from fsdp_overlap.tools.emulator.history import History
from fsdp_overlap.tools.emulator.memory import Access, ByteRange, TrackedMemory
from fsdp_overlap.tools.emulator.queues import Moment, Queue
from fsdp_overlap.tools.emulator.sites import Site, call_site
from fsdp_overlap.tools.torch_internals import without_transform

# As in torch's c10/cuda/CUDAStream.
STREAMS = 32
"""The streams that a pool of torch's has; there is a pool for each of the ``PRIORITIES``."""
PRIORITIES = 4

F = TypeVar("F", bound=Callable[..., Any])


def _locked(method: F) -> F:
    """Return ``method``, run by one thread at a time."""

    @wraps(method)
    def run(self: EmulatedDevice, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast("F", run)


class IssuedCollective(NamedTuple):
    """A collective that this rank enqueued: its ``kind``, the ``group`` whose communicator it uses,
    and the ``ranks`` of that group. Empty ``ranks`` stand for all ranks."""

    group: str
    kind: str
    ranks: tuple[int, ...] = ()


@dataclass(eq=False)
class EnqueuedCollective:
    """An asynchronous collective. Its tensors are kept until it was waited for, or the host knows
    that it is done."""

    device: EmulatedDevice
    moment: Moment
    kept: Sequence[torch.Tensor]

    def wait(self) -> None:
        """Let the current stream wait for the collective. The host goes on."""
        self.device.wait_for(self)


class OperatorCall(NamedTuple):
    """A call of one of torch's operators, and what it returned, once it has run."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any = None


class Operation(NamedTuple):
    """What is enqueued. ``call``: unless Python does it; ``group``: of a collective; ``staged``:
    those of ``reads`` that the host has read when it has enqueued the operation; ``crosses``:
    whether it copies between the host and the device."""

    name: str
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    call: OperatorCall | None = None
    group: dist.ProcessGroup | None = None
    staged: Sequence[torch.Tensor] = ()
    crosses: bool = False


class Timing(Protocol):
    """Says how long things take, in seconds."""

    def on_host(self, operation: Operation) -> float:
        """Return how long the host is busy with an operation that it runs or enqueues."""
        ...

    def end(self, operation: Operation, stream: Queue, enqueued: float, ready: float) -> float:
        """Return when ``operation`` ends on ``stream``, which is ready for it at the time
        ``ready``. The host has ``enqueued`` it by then."""
        ...


class ThreadState(threading.local):
    """What each thread has of its own: its current device, its stream, the pool that it takes
    memory from, if it does not take segments that belong to no pool, and where new tensors lie."""

    def __init__(self, stream: Queue) -> None:
        self.index = 0
        self.stream = stream
        self.pool: MemPool | None = None
        self.makes_on_device: bool | None = None
        """Whether new tensors lie on the device, if that is said: see "Where new tensors lie"
        in ``dispatch.py``."""
        self.makes_pinned = False
        self.given: tuple[Any, Any] | bool = False
        """The arguments of the call of Python that is under way. Of a node of autograd's graph,
        whether it got gradients on the device."""

    @contextmanager
    def making(self, on_device: bool, pinned: bool = False) -> Iterator[None]:
        """Let new tensors lie on the device or on the host."""
        before = self.makes_on_device, self.makes_pinned
        self.makes_on_device, self.makes_pinned = on_device, pinned
        try:
            yield
        finally:
            self.makes_on_device, self.makes_pinned = before


class EmulatedDevice:
    """An accelerator whose memory is the host's and whose operations run at once, with a record of
    when they *could* run.

    Everything that is enqueued gets a place in the order that streams and events make. Two
    operations on the same memory, one of them a write, are a finding if this order does not say
    which comes first: on a real device they may run in either order, or at the same time.

    Args:
        timing: says how long operations take. With it, ``Event.query()`` tells what is done by the
            host's time. Without it the device lags behind for ever: nothing is done that the host
            has not waited for.
        allocating: is called with the bytes of each allocation, and may raise, like a device that
            has no memory left.
        issuing: is called with the kind of each collective before it is enqueued, and may raise.
        values: whether tensors that are made on the device have elements. Without, models of any
            size take no memory, and the host reads zeros. Only ``torch.tensor()`` and
            ``torch.arange()`` of whole numbers, and what the host moves there, have some.
        keeps_integers: whether, without ``values``, small tensors of integers and booleans have
            elements whatever makes them, all others lose theirs when they are moved there and
            count as finite, and large tensors of the host get no random values.
        index: the number of the device among those of its machine. The others are not this
            process's: a thread that makes a context there is a finding.
        expandable_segments: whether the allocator's segments grow, as with torch's setting of this
            name.
        allow: lines, as ``"file.py:12"``, of which what is found is no fault. A comment
            ``# races: allow`` says the same of its line.
        device_type: what tensors, streams and meshes call it: ``"cuda"`` within
            :func:`~fsdp_overlap.tools.emulator.cuda.as_cuda`.
        is_real_time: whether the host's time is the clock's, so that operations end later by
            themselves. A thread that waits for one sleeps, and others go on. Needs a ``timing``.
    """

    def __init__(
        self,
        timing: Timing | None = None,
        allocating: Callable[[int], None] | None = None,
        issuing: Callable[[str], None] | None = None,
        values: bool = True,
        keeps_integers: bool = False,
        index: int = 0,
        expandable_segments: bool = False,
        allow: Sequence[str] = (),
        device_type: str = "emulated",
        is_real_time: bool = False,
    ) -> None:
        self.device_type = device_type
        self.timing = timing
        self.is_real_time = is_real_time
        self.allocating = allocating
        self.issuing = issuing
        self.values = values
        self.keeps_integers = keeps_integers
        self.index = index
        self.contexts = {index}
        """The devices on which this process has a context, by their numbers. Each takes memory of
        its device, and stays."""
        self.is_over = False
        """Whether nothing is to be noted any more. Threads of the program may go on."""
        self.lock = threading.RLock()
        """Guards what is noted, by whichever thread."""
        self.host = Queue(0, "the host")
        """All threads of the program: which of them comes first is not looked at."""
        self.queues = [self.host]
        self.history = History(self.queues)
        self.default = self.add_stream("the default stream")
        self.of_thread = ThreadState(self.default)
        self.program_streams = {self.default}
        """Those on which the program communicates by itself, as about activations."""
        self.allocator = Allocator(expandable_segments)
        """Has the device's memory, and counts it."""
        self.on_host = self.peak_on_host = 0
        """The bytes of the host's tensors that were made, and the most that there were at once."""
        self.pinned = 0
        """The bytes of pinned memory that were taken from the host: what torch's allocator has, in
        use or kept, and what the program has registered."""
        self._free_pinned: Counter[int] = Counter()
        """How many blocks of a size torch's allocator of pinned memory keeps."""
        self._registered: dict[int, int] = {}
        """The bytes of memory that the program has pinned, by its address."""
        self.copied_to_device = self.copied_to_host = 0
        """The bytes that copies have moved between the host and the device."""
        self._found = Findings(allow)
        self.findings = self._found.faults
        """What is wrong so far."""
        self.allowed = self._found.allowed
        """What would be wrong, on lines that may do it."""
        self.syncs: list[Sync] = []
        """When the host waited for the device."""
        self.steps = 0
        """How many steps of training are over."""
        self.issued: list[IssuedCollective] = []
        """The collectives, in the order in which the host enqueued them."""
        self.opaque: dict[str, str] = {}
        """What runs and is not seen within, such as Triton kernels, and where it was called first.
        Each is taken to read and write all tensors that it is given."""
        self.operations = 0
        self.backwards: list[tuple[float, float]] = []
        """When the host began and ended each backward."""
        self._elsewhere: dict[int, Queue] = {}
        self._group_streams: dict[str, Queue] = {}
        self._in_flight: set[EnqueuedCollective] = set()
        self._pools: list[list[Queue]] = [[] for _ in range(PRIORITIES)]
        self._turns = [0] * PRIORITIES
        self._memories: dict[int, TrackedMemory] = {}
        self._blocks: dict[TrackedMemory, MemoryBlock] = {}
        self._dead: deque[TrackedMemory] = deque()
        """Memory of storages that are gone, which is not given back yet."""

    # Threads

    @property
    def current(self) -> Queue:
        """The stream that this thread enqueues on."""
        return self.of_thread.stream

    @current.setter
    def current(self, stream: Queue) -> None:
        self.of_thread.stream = stream

    def take_thread(self) -> None:
        """Make this device the current one of this thread."""
        self.of_thread.index = self.index

    def use(self, index: int | None) -> None:
        """Use the device of this number on this thread, or its current one."""
        index = self.of_thread.index if index is None else index
        self.contexts.add(index)
        if index != self.index:
            site = call_site()
            access = FoundAccess(f"device {index}", "makes a context on", "the host", site)
            text = f"makes a context on device {index} ({site}): this one is {self.index}"
            self.report(Finding("context", text, second=access))

    # Findings

    @_locked
    def report(self, finding: Finding) -> None:
        """Add a finding, or count it again."""
        self._found.add(finding)

    @_locked
    def mark_step(self) -> None:
        """Note that a step of training is over. A wait of the host that each step has is one of
        :meth:`steady_waits`."""
        self.steps += 1

    def steady_waits(self) -> list[Finding]:
        """Return the waits of the host that recur in each of the last steps, without those of
        allowed lines."""
        return [
            wait for wait in steady(self.syncs, self.steps) if not self._found.allowance(wait.sites)
        ]

    # Order

    @_locked
    def add_stream(self, name: str = "") -> Queue:
        index, site = len(self.queues), call_site()
        if not name:
            line = site.innermost
            name = f"stream {index}" + (f" ({line.short})" if line else "")
        self.queues.append(Queue(index, name, device=self.index, made_at=site))
        return self.queues[-1]

    @_locked
    def next_stream(self, priority: int = 0, name: str = "") -> Queue:
        """Return a stream of torch's pool for ``priority``, of which lower numbers come first. A
        pool hands its streams out in turn.

        Raises:
            RuntimeError: ``priority`` is above 0.
        """
        if priority > 0:
            raise RuntimeError(f"a stream's priority is 0 or less, not {priority}")
        level = min(-priority, PRIORITIES - 1)
        pool, turn = self._pools[level], self._turns[level]
        self._turns[level] += 1
        if turn < STREAMS:
            pool.append(self.add_stream(name))
        return pool[turn % STREAMS]

    def elsewhere(self, index: int) -> Queue:
        """Return the default stream of another device, on which nothing runs."""
        return self._elsewhere.setdefault(index, Queue(-1, f"device {index}", device=index))

    @_locked
    def mark(self, stream: Queue) -> Moment:
        """Return what an event records on ``stream``: all that is enqueued there now."""
        # What the host enqueues comes after all that it has waited for.
        stream.learn(self.host.clock, 0.0)
        return Moment.of(stream)

    @_locked
    def wait(self, stream: Queue, moment: Moment) -> None:
        stream.learn(moment.clock, moment.ends)
        self.history.wait(stream, moment, call_site())

    def wait_on_host(self, operation: str, *moments: Moment, is_promised: bool = True) -> None:
        """Make the host wait for ``moments`` in ``operation``. A wait that nobody has promised
        takes time, and orders nothing."""
        if self.is_real_time:
            end = max((moment.ends for moment in moments), default=0.0)
            time.sleep(max(0.0, end - time.monotonic()))
        self._note_wait(operation, moments, is_promised)

    @_locked
    def _note_wait(self, operation: str, moments: Sequence[Moment], is_promised: bool) -> None:
        site = call_site()
        self.syncs.append(Sync(operation, site, self.steps))
        for moment in moments:
            self.host.learn(moment.clock if is_promised else {}, moment.ends)
            if is_promised:
                self.history.wait(self.host, moment, site)

    def wait_for_current(self, operation: str, is_promised: bool = True) -> None:
        """Make the host wait for the current stream."""
        self.wait_on_host(operation, self.mark(self.current), is_promised=is_promised)

    def wait_for_all(self, operation: str, is_promised: bool = True) -> None:
        """Make the host wait for all streams."""
        self.wait_on_host(operation, *map(Moment.of, self.queues[1:]), is_promised=is_promised)

    @_locked
    def is_done(self, moment: Moment) -> bool:
        """Return whether the host knows that ``moment`` is over."""
        if self.timing is not None:
            self._look_at_clock()
            return moment.ends <= self.host.ends
        return all(self.host.clock.get(queue, 0) >= tick for queue, tick in moment.clock.items())

    def _look_at_clock(self) -> None:
        if self.is_real_time:
            self.host.ends = max(self.host.ends, time.monotonic())

    # Operations

    @_locked
    def run(self, operation: Operation, on_host: bool = False) -> None:
        """Enqueue ``operation`` on the current stream, or let the host do it at once."""
        queue, timing = self.host if on_host else self.current, self.timing
        if timing is not None:
            self._look_at_clock()
            self.host.ends += timing.on_host(operation)
        site = call_site()
        self._note(operation.name, operation.staged, False, self.host, site)
        if not on_host:
            queue.learn(self.host.clock, self.host.ends)
            if timing is not None:
                queue.ends = timing.end(operation, queue, self.host.ends, queue.ends)
        self.operations += 1
        if operation.reads or operation.writes:  # else it is a mark of the profiler, or the like
            self.history.enqueue(queue, operation.name, site)
        reads = operation.reads
        if operation.staged:
            staged = {id(tensor) for tensor in operation.staged}
            reads = [tensor for tensor in reads if id(tensor) not in staged]
        self._note(operation.name, reads, False, queue, site)
        self._note(operation.name, operation.writes, True, queue, site)

    def _note(
        self, name: str, tensors: Sequence[torch.Tensor], is_write: bool, queue: Queue, site: Site
    ) -> None:
        """Note that an operation on ``queue`` reads or writes ``tensors``."""
        if not tensors:
            return
        stamp = queue.add()
        for tensor in tensors:
            memory = self.memory_of(tensor)
            access = Access(stamp, name, site, is_write, ByteRange.of(tensor))
            if access.byte_range.width:
                self.compare(access, queue, memory)
                memory.note(access)

    def compare(self, access: Access, queue: Queue, memory: TrackedMemory) -> None:
        """Report the accesses that nothing orders before ``access``, the last one of ``queue``."""
        for earlier in memory.conflicts(access, queue):
            conflict = Conflict(earlier, access, queue, self.queues)
            if not self._found.repeats(conflict.key):
                finding = self._found.add(conflict.finding(memory))
                finding.timeline = self.history.timeline(earlier.stamp, access.stamp)

    def note_opaque(self, what: str) -> None:
        """Note that something runs that is not seen within."""
        self.opaque.setdefault(what, str(call_site()))

    def stream_of(self, group: str) -> Queue:
        """Return the stream on which a group's asynchronous collectives run."""
        if group not in self._group_streams:
            stream = self.next_stream(name=f"NCCL's stream of group {group}")
            stream.group = stream.group or group
            self._group_streams[group] = stream
        return self._group_streams[group]

    def issue(
        self,
        group: dist.ProcessGroup,
        kind: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        is_async: bool = False,
    ) -> EnqueuedCollective | None:
        """Enqueue a collective of ``group`` on the current stream. An asynchronous one runs on the
        stream of its group, after what is enqueued on the current one, and is to be waited for. If
        all memory is the host's, the host runs it at once."""
        operation = Operation(kind, reads, writes, group=group)
        if not any(map(self.is_here, (*reads, *writes))):
            self.run(operation, on_host=True)
            return None
        if self.issuing is not None:
            self.issuing(kind)
        ranks = tuple(dist.get_process_group_ranks(group))
        self.issued.append(IssuedCollective(group.group_name, kind, ranks))
        if not is_async:
            self.run(operation)
            return None
        with self.on_stream_of(group.group_name) as stream:
            self.run(operation)
        return self.keep(stream, (*reads, *writes))

    @contextmanager
    def on_stream_of(self, group: str) -> Iterator[Queue]:
        """Enqueue on the stream of a group, after what is enqueued on the current one."""
        caller, stream = self.current, self.stream_of(group)
        self.wait(stream, self.mark(caller))
        self.current = stream
        try:
            yield stream
        finally:
            self.current = caller

    def keep(self, stream: Queue, tensors: Sequence[torch.Tensor]) -> EnqueuedCollective:
        """Keep the tensors of the collective that was enqueued last on ``stream``, also where the
        program drops them without a wait. Drop those of others that are done."""
        enqueued = EnqueuedCollective(self, self.mark(stream), tensors)
        if not stream.is_captured:  # else nobody may ask
            for other in [one for one in self._in_flight if self.is_done(one.moment)]:
                self._drop(other)
            self._in_flight.add(enqueued)
        return enqueued

    def wait_for(self, enqueued: EnqueuedCollective) -> None:
        """Let the current stream wait for a collective. Its tensors are kept no longer."""
        self.wait(self.current, enqueued.moment)
        self._drop(enqueued)

    def _drop(self, enqueued: EnqueuedCollective) -> None:
        self._in_flight.discard(enqueued)
        enqueued.kept = ()

    # Memory

    @_locked
    def memory_of(self, tensor: torch.Tensor) -> TrackedMemory:
        """Return the memory of ``tensor``'s storage. A storage from before the model began is the
        host's."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # it is within a transform of torch.func
            return self.memory_of(without_transform(tensor))
        found = self._memories.get(storage._cdata)
        return found or self.place(tensor, on_device=False)

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._memories

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies on the device, and not on the host."""
        return self.memory_of(tensor).is_on_device

    @_locked
    def place(self, tensor: torch.Tensor, on_device: bool, pinned: bool = False) -> TrackedMemory:
        """Note that ``tensor``'s storage is new, and whether it lies on the device."""
        storage = tensor.untyped_storage()
        memory = TrackedMemory(0, on_device, pinned)
        self._memories[storage._cdata] = memory
        weakref.finalize(storage, self._forget, storage._cdata, memory).atexit = False
        self._give(memory, storage.nbytes())
        return memory

    @_locked
    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Note the new size of ``storage``. Called before the size changes."""
        memory = self._memories.get(storage._cdata)
        if memory is None or nbytes == memory.nbytes:
            return
        memory.freed_at = call_site()
        self._take(memory)
        memory.is_freed = nbytes == 0
        self._give(memory, nbytes)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in memory of the host that the device itself can read."""
        if self.memory_of(tensor).is_pinned:
            return True
        address = tensor.untyped_storage().data_ptr() if self._registered else 0
        ranges = self._registered.items()
        return any(start <= address < start + nbytes for start, nbytes in ranges)

    @_locked
    def pin(self, address: int, nbytes: int) -> bool:
        """Note that the program pins memory of its own. Return whether it may."""
        if address in self._registered:
            return False
        self._registered[address] = nbytes
        self.pinned += nbytes
        return True

    @_locked
    def unpin(self, address: int) -> bool:
        """Note that the program no longer needs it pinned. Return whether it was."""
        nbytes = self._registered.pop(address, None)
        self.pinned -= nbytes or 0
        return nbytes is not None

    @_locked
    def count_copy(self, nbytes: int, to_device: bool) -> None:
        """Count what a copy moves between the host and the device."""
        if to_device:
            self.copied_to_device += nbytes
        else:
            self.copied_to_host += nbytes

    def note_empty(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that a program has taken memory that it will write later."""

    def address_of(self, tensor: torch.Tensor) -> int:
        """Return where ``tensor``'s storage lies on the device."""
        return self._blocks[self.memory_of(tensor)].address

    def block_of(self, storage: torch.UntypedStorage) -> MemoryBlock | None:
        """Return the block that ``storage`` has on the device; None if it has none there."""
        memory = self._memories.get(storage._cdata)
        return None if memory is None else self._blocks.get(memory)

    def check_is_there(self, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        """Check before an operation, because the host would run it on memory that is not there.

        Raises:
            RuntimeError: one of ``tensors`` lies in a storage that has been freed.
        """
        for tensor in tensors:
            memory = self._memories.get(tensor.untyped_storage()._cdata)
            if memory is not None and memory.is_freed and tensor.numel():
                site = call_site()
                text = f"{operation} uses memory that is freed ({site})"
                access = FoundAccess(operation, "uses", self.current.name, site)
                found = Finding("freed", text, second=access, freed_at=memory.freed_at)
                self.report(found)
                raise RuntimeError(str(found))

    def release_after(self, tensor: torch.Tensor, stream: Queue) -> None:
        """Keep the memory, as ``Tensor.record_stream`` does, until ``stream`` is done with it. Its
        own stream need not be waited for."""
        memory = self.memory_of(tensor)
        block = self._blocks.get(memory)
        if block is None or block.stream != stream.index:
            memory.waited_for.add(stream)

    def _give(self, memory: TrackedMemory, nbytes: int) -> None:
        self._take_from_dead()
        if memory.is_on_device and nbytes:
            if self.allocating is not None:
                self.allocating(nbytes)
            pool = self.of_thread.pool
            self._blocks[memory], last = self.allocator.malloc(nbytes, self.current, pool)
            memory.nbytes = nbytes
            memory.taken_at = call_site()
            memory.take_over(last)
        elif not memory.is_on_device:
            self.on_host += nbytes
            self.peak_on_host = max(self.peak_on_host, self.on_host)
            if memory.is_pinned and nbytes:
                self._take_pinned(_pinned_block(nbytes))
        memory.nbytes = nbytes

    def _take_pinned(self, block: int) -> None:
        """Take a block from torch's allocator of pinned memory, which keeps what is freed."""
        if self._free_pinned[block]:
            self._free_pinned[block] -= 1
        else:
            self.pinned += block

    def _take(self, memory: TrackedMemory) -> None:
        block = self._blocks.pop(memory, None)
        used = frozenset(memory.waited_for)
        moments = [self.mark(queue) for queue in used]
        left = memory.hand_over()
        if not memory.is_on_device:
            self.on_host -= memory.nbytes
            if memory.is_pinned and memory.nbytes:
                self._free_pinned[_pinned_block(memory.nbytes)] += 1
        if block is not None:
            self.allocator.free(block, left, used, lambda: all(map(self.is_done, moments)))

    def _forget(self, key: int, memory: TrackedMemory) -> None:
        """Give back the memory of a storage that is gone. The garbage collector may call this in
        the middle of another method of the same thread, such as one that looks for free memory;
        then the next allocation gives it back."""
        if self._memories.get(key) is memory:
            del self._memories[key]
        if memory.is_on_device:
            memory.freed_at = call_site()
        self._dead.append(memory)
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            with self.lock:
                self._take_from_dead()

    def _take_from_dead(self) -> None:
        while self._dead:
            self._take(self._dead.popleft())


def _pinned_block(nbytes: int) -> int:
    """Return what torch's allocator of pinned memory takes for ``nbytes``: a power of two."""
    return 1 << (nbytes - 1).bit_length()


def compare_issued(ranks: Sequence[Sequence[IssuedCollective]]) -> Finding | None:
    """Return a finding if ranks that enqueue these collectives, each in its own order, wait for
    each other; else None. Communicators that share a device must be used in one order on all ranks:
    else each waits for a kernel that cannot start."""
    done = [0] * len(ranks)
    while True:
        heads = [
            issued[count] if count < len(issued) else None
            for issued, count in zip(ranks, done, strict=True)
        ]
        members = _first_to_run(heads)
        for rank in members:
            done[rank] += 1
        if not members:
            return _order_finding(heads, done) if any(heads) else None


def _first_to_run(heads: Sequence[IssuedCollective | None]) -> Sequence[int]:
    """Return the ranks of a collective that is the next one on all of them; none if there is no
    such collective."""
    for head in heads:
        if head is not None:
            members = head.ranks or range(len(heads))
            if all(heads[rank] == head for rank in members):
                return members
    return ()


def _order_finding(heads: Sequence[IssuedCollective | None], done: Sequence[int]) -> Finding:
    waiting = "; ".join(
        f"rank {rank} with "
        + ("nothing" if head is None else f"{head.kind} on {head.group}")
        + f" ({count} before it)"
        for rank, (head, count) in enumerate(zip(heads, done, strict=True))
    )
    return Finding("order", f"ranks wait for each other: {waiting}")
