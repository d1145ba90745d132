"""CUDA graphs of the emulated device: operations that are captured, and replayed in their order.

A capture enqueues nothing. Here it runs its operations all the same, because the program has to
know what they return, and undoes them when it ends: memory of the program, the state of the random
generator and the order of operations are then as they were. What breaks a rule of CUDA raises, with
the name of CUDA's error, and ends the capture.

A replay runs the operations on the memory that they had, ordered by what was captured alone. So it
finds races within the replayed step, and with what the program enqueues before and after.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from fsdp_overlap.tools.emulator import torch_module
from fsdp_overlap.tools.emulator.allocator import MemoryBlock, MemPool
from fsdp_overlap.tools.emulator.device import EmulatedDevice, IssuedCollective, Operation
from fsdp_overlap.tools.emulator.dispatch import tensors_in, unseen
from fsdp_overlap.tools.emulator.findings import Finding, FoundAccess
from fsdp_overlap.tools.emulator.memory import Access, ByteRange, TrackedMemory
from fsdp_overlap.tools.emulator.queues import Clock, Moment, Queue, Stamp
from fsdp_overlap.tools.emulator.sites import Site, call_site
from fsdp_overlap.tools.emulator.torch_module import Stream, active, synchronize
from fsdp_overlap.torch_internals import tree_map_only


class CapturedMoment:
    """What an event records during a capture. Outside of it nothing can be told of the event."""

    def __init__(self, moment: Moment, capture: Capture) -> None:
        self.captured = moment
        self.capture = capture

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "cudaErrorCapturedEvent: an event is used that was recorded in a capture "
            f"({call_site()})"
        )

    @property
    def clock(self) -> Clock:
        self._refuse()

    @property
    def ends(self) -> float:
        self._refuse()


@dataclass(eq=False)
class Slot:
    """Memory that a graph uses: that of one storage, from one allocation to the next."""

    storage: weakref.ref[torch.UntypedStorage]
    memory: TrackedMemory
    block: MemoryBlock | None
    nbytes: int
    is_of_pool: bool
    """Whether it was taken from the graph's pool, which nobody else gets."""
    held: torch.UntypedStorage | None = None
    """The storage, if the program has it when the capture ends."""
    own: torch.UntypedStorage | None = None
    """In place of a storage of the pool that is gone."""
    own_memory: TrackedMemory = field(default_factory=lambda: TrackedMemory(0, True))

    def is_there(self, device: EmulatedDevice) -> bool:
        """Return whether the storage still has the memory that it had in the capture."""
        return self.storage() is not None and device._blocks.get(self.memory) is self.block

    def resolve(self, device: EmulatedDevice) -> tuple[torch.UntypedStorage, TrackedMemory] | None:
        """Return the storage to replay on, and whose accesses to compare with. ``None`` if it was
        not of the graph's pool, and was freed."""
        storage = self.storage()
        if storage is not None and self.is_there(device):
            return storage, self.memory
        if not self.is_of_pool:
            return None
        if self.own is None:
            self.own = torch.UntypedStorage(self.nbytes)
            _fill_with_nan(self.own)
        return self.own, self.own_memory


@dataclass(frozen=True)
class View:
    """A tensor in a slot."""

    slot: Slot
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storage, self.offset, self.shape, self.strides)


@dataclass(frozen=True, eq=False)
class Node:
    """A captured operation on ``queue``. ``clock`` counts, for each captured stream, the operations
    of the capture that come before it, and itself."""

    queue: Queue
    clock: dict[Queue, int]
    name: str
    site: Site
    accesses: Sequence[tuple[Slot, ByteRange, bool]]
    """The bytes, and whether they are written."""
    call: tuple[Callable[..., Any], Any, Any, Sequence[View | None]] | None
    """What to call with which arguments, in which views stand for tensors, and for each tensor that
    it returns where that is copied to."""
    issued: IssuedCollective | None
    with_grad: bool
    """Whether gradients were enabled: some kernels ask."""


class Capture:
    """A capture under way."""

    def __init__(self, device: EmulatedDevice, pool: MemPool, mode: str) -> None:
        self.device = device
        self.pool = pool
        self.mode = mode
        self.thread = threading.get_ident()
        self.origin = device.current
        self.nodes: list[Node] = []
        self.slots: dict[tuple[TrackedMemory, int], Slot] = {}
        self.starts: dict[Queue, int] = {}
        """The streams that take part, and their ticks when they joined."""
        self.failure = ""
        self.collective: tuple[Callable[..., Any], Any, Any] | None = None
        self._generations: dict[TrackedMemory, int] = {}
        self._clocks: dict[Queue, tuple[Clock, float]] = {}
        self._accesses: dict[TrackedMemory, list[Access]] = {}
        self._bytes: list[tuple[Slot, torch.Tensor]] = []
        self._random = torch.get_rng_state()
        self._issued = len(device.issued)
        self._patches = ExitStack()
        self._patches.enter_context(patch.object(device.allocator, "may_ask", False))
        self._join(self.origin)
        for name in ("run", "mark", "wait", "wait_on_host", "is_done", "check_is_there", "_give"):
            original = getattr(device, name)
            instead = partial(getattr(self, name.lstrip("_")), original)
            self._patches.enter_context(patch.object(device, name, instead))

    def _join(self, queue: Queue) -> None:
        self.starts[queue] = queue.clock.get(queue.index, 0)
        self._clocks[queue] = dict(queue.clock), queue.ends
        queue.is_captured = True

    def _fail(self, error: str, why: str) -> NoReturn:
        self.failure = f"{error}: {why} ({call_site()})"
        raise RuntimeError(self.failure)

    # In place of the device's methods, each of which comes first

    def run(self, run: Any, operation: Operation, on_host: bool = False) -> None:
        queue = self.device.current
        if on_host or queue not in self.starts:
            run(operation, on_host)
            return
        self._save((*operation.reads, *operation.writes))
        run(operation)
        clock = {
            other: tick - start
            for other, start in self.starts.items()
            if (tick := queue.clock.get(other.index, 0)) > start
        }
        accesses = [
            (self.slot_of(tensor), ByteRange.of(tensor), is_write)
            for tensors, is_write in ((operation.reads, False), (operation.writes, True))
            for tensor in tensors
            if tensor.numel() and not self._is_number(tensor)
        ]
        issued = self.device.issued[-1] if operation.group is not None else None
        call, has_grad = self._call_of(operation), torch.is_grad_enabled()
        node = Node(queue, clock, operation.name, call_site(), accesses, call, issued, has_grad)
        self.nodes.append(node)

    def mark(self, mark: Any, queue: Queue) -> Any:
        moment = mark(queue)
        return CapturedMoment(moment, self) if queue in self.starts else moment

    def wait(self, wait: Any, queue: Queue, moment: Any) -> None:
        if isinstance(moment, CapturedMoment) and moment.capture is self:
            if queue is self.device.default:
                self._fail(
                    "cudaErrorStreamCaptureImplicit",
                    "the default stream, which cannot be captured, waits for an event of the "
                    "capture",
                )
            if queue not in self.starts:
                self._join(queue)
            queue.learn(moment.captured.clock, 0.0)
            self.device.history.wait(queue, moment.captured, call_site())
            queue.add()  # so that it has to join the origin again
        elif queue in self.starts:
            self._fail(
                "cudaErrorStreamCaptureIsolation",
                f"{queue.name}, which is captured, waits for an event from outside of the capture",
            )
        else:
            wait(queue, moment)

    def wait_on_host(
        self, wait_on_host: Any, operation: str, *moments: Any, is_promised: bool = True
    ) -> None:
        self._refuse(f"waits in {operation}", moments)
        wait_on_host(operation, *moments, is_promised=is_promised)

    def is_done(self, is_done: Any, moment: Any) -> bool:
        self._refuse("asks whether an event is over", [moment])
        return bool(is_done(moment))

    def _refuse(self, what: str, moments: Sequence[Any] = ()) -> None:
        """Fail if this thread may not do ``what``, which CUDA calls potentially unsafe: while a
        thread captures in the mode "global" no thread may, in "thread_local" this one may not. Of
        the captured streams nobody may ask anything."""
        is_mine = threading.get_ident() == self.thread or self.device.current in self.starts
        captured = [queue.index for queue in self.starts]
        asks = any(isinstance(m, CapturedMoment) or m.source in captured for m in moments)
        if asks or self.mode == "global" or (is_mine and self.mode == "thread_local"):
            error = "Unsupported" if is_mine else "Unsafe"
            self._fail(
                f"cudaErrorStreamCapture{error}", f"{'the host' if is_mine else 'a thread'} {what}"
            )

    def check_is_there(self, check: Any, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        check(operation, tensors)
        if self.device.current in self.starts:
            self._save(tensors)

    def give(self, give: Any, memory: TrackedMemory, nbytes: int) -> None:
        device = self.device
        takes = nbytes and (memory.is_on_device or memory.is_pinned)
        if takes and threading.get_ident() != self.thread and device.current not in self.starts:
            self._refuse("allocates memory")
        self._generations[memory] = self._generations.get(memory, 0) + 1
        # torch's allocator asks whether the stream is captured at this very moment.
        of_thread, before = device.of_thread, device.of_thread.pool
        if device.current in self.starts:
            of_thread.pool = self.pool
        try:
            give(memory, nbytes)
        finally:
            of_thread.pool = before

    # What it notes

    def slot_of(self, tensor: torch.Tensor) -> Slot:
        memory = self.device.memory_of(tensor)
        key = memory, self._generations.get(memory, 0)
        if key not in self.slots:
            storage, block = tensor.untyped_storage(), self.device._blocks.get(memory)
            of_pool = block is not None and block.pool is self.pool and key[1] > 0
            self.slots[key] = Slot(weakref.ref(storage), memory, block, storage.nbytes(), of_pool)
        return self.slots[key]

    def _save(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep what lies in memory from outside of the pool, to put it back."""
        for tensor in tensors:
            is_new = (memory := self.device.memory_of(tensor)) not in self._accesses
            slot = self.slot_of(tensor)
            if is_new and not slot.is_of_pool:
                self._accesses[memory] = list(memory.accesses)
                with unseen():
                    self._bytes.append((slot, _bytes_of(tensor.untyped_storage()).clone()))

    def _is_number(self, tensor: torch.Tensor) -> bool:
        """Return whether the host reads ``tensor`` when it enqueues an operation on it."""
        return not (tensor.dim() or self.device.is_here(tensor))

    def _view(self, tensor: torch.Tensor) -> Any:
        if self._is_number(tensor):
            with unseen():
                return tensor.detach().clone()
        slot, offset = self.slot_of(tensor), int(tensor.storage_offset())
        return View(slot, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    def _call_of(self, operation: Operation) -> Any:
        if operation.call is not None:
            func, args, kwargs, output = operation.call
            given = {id(each.untyped_storage()) for each in tensors_in([*args, *kwargs.values()])}
            outputs = [
                None if id(each.untyped_storage()) in given else self._view(each)
                for each in tensors_in(output)
            ]
        elif self.collective is not None:
            (func, args, kwargs), outputs = self.collective, []
            self.collective = None
        else:
            return None
        return func, *tree_map_only(torch.Tensor, self._view, (args, kwargs)), outputs

    # Its end

    def end(self) -> None:
        """Undo what was run.

        Raises:
            RuntimeError: a rule was broken, or a stream has not joined the one that began.
        """
        origin = self.origin
        left = [
            queue.name
            for queue in self.starts
            if queue is not origin
            and origin.clock.get(queue.index, 0) < queue.clock.get(queue.index, 0)
        ]
        self._patches.close()
        self._undo()
        if self.failure:
            raise RuntimeError(f"cudaErrorStreamCaptureInvalidated: after {self.failure}")
        if left:
            raise RuntimeError(
                f"cudaErrorStreamCaptureUnjoined: {', '.join(left)} took part in the capture, and "
                f"{origin.name}, which began it, does not wait for all that was enqueued there"
            )

    def _undo(self) -> None:
        for queue, (clock, ends) in self._clocks.items():
            queue.clock, queue.ends, queue.is_captured = clock, ends, False
        for memory, accesses in self._accesses.items():
            memory.accesses = accesses
        for slot, before in self._bytes:
            storage = slot.storage()
            if storage is not None and slot.is_there(self.device):
                with unseen():
                    _bytes_of(storage).copy_(before)
        for slot in self.slots.values():
            if slot.is_of_pool and slot.is_there(self.device):
                slot.held = slot.storage()
                slot.memory.accesses.clear()
                assert slot.held is not None
                _fill_with_nan(slot.held)
        self.device.allocator.forget_accesses(self.pool)
        torch.set_rng_state(self._random)
        del self.device.issued[self._issued :]


class CUDAGraph:
    """Works like ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._pool: MemPool | None = None
        self._branches: dict[Queue, Queue] = {}
        self._counts: dict[Queue, int] = {}
        self._prepared: tuple[list[int], list[Callable[[], None] | None]] | None = None

    def capture_begin(
        self, pool: MemPool | None = None, capture_error_mode: str = "global", **options: Any
    ) -> None:
        """Begin to capture what is enqueued on the current stream.

        Raises:
            RuntimeError: it is the default stream, or another capture is under way.
            NotImplementedError: the device has no values, or keeps time.
        """
        device = active()
        if device.timing is not None or not device.values:
            raise NotImplementedError("graphs on an emulated device without values or with timing")
        if device.current is device.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if _under_way(device) is not None:
            raise RuntimeError("a capture is under way")
        self._pool = pool or MemPool()
        self._capture = _captures[device] = Capture(device, self._pool, capture_error_mode)

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            RuntimeError: it broke a rule of CUDA.
        """
        device, capture = active(), self._capture
        assert capture is not None
        del _captures[device]
        try:
            capture.end()
        except RuntimeError:
            self._capture = None
            raise
        for queue in capture.starts:
            branch = Queue(len(device.queues), f"{queue.name} in a graph", is_of_graph=True)
            device.queues.append(branch)
            self._branches[queue] = branch
            counts = (node.clock.get(queue, 0) for node in capture.nodes)
            self._counts[queue] = max(counts, default=0)

    def replay(self) -> None:
        """Enqueue what was captured, as one, on the current stream.

        Raises:
            RuntimeError: it was not captured, or uses memory that was freed.
        """
        device, capture = active(), self._capture
        if capture is None or _under_way(device) is not None:
            raise RuntimeError("replay() of a graph that was not captured, or within a capture")
        used = dict.fromkeys(each[0] for node in capture.nodes for each in node.accesses)
        resolved = {slot: self._resolve(device, slot) for slot in used}
        launch = device.current
        launch.learn(device.host.clock, 0.0)
        self._find_replay_beside(device, launch)
        bases = {
            queue: branch.clock.get(branch.index, 0) for queue, branch in self._branches.items()
        }
        # A graph does not run beside itself.
        last = {self._branches[queue].index: tick for queue, tick in bases.items()}
        before = {**launch.clock, **last}
        for node, run in zip(capture.nodes, self._prepare(capture, resolved), strict=True):
            self._order(device, node, before, bases, resolved)
            if run is not None:
                with unseen(), torch.no_grad(), patch.object(device, "issue", lambda *_: None):
                    run()
        for queue, branch in self._branches.items():
            branch.clock = {branch.index: bases[queue] + self._counts[queue]}
            launch.learn(branch.clock, 0.0)
            _replayed[self.pool()][branch.index] = branch.clock[branch.index]

    def _find_replay_beside(self, device: EmulatedDevice, launch: Queue) -> None:
        """Compare with the last replays of other graphs that share the pool, and so memory."""
        mine = {branch.index for branch in self._branches.values()}
        for index, tick in _replayed.setdefault(self.pool(), {}).items():
            if index not in mine and not launch.knows(Stamp(index, tick)):
                site, name = call_site(), device.queues[index].name
                text = (
                    f"a graph is replayed ({site}) that shares its pool with another one; nothing "
                    f"orders it after the replay of that, on {name}"
                )
                access = FoundAccess("replay", "uses", launch.name, site)
                missing = f"{launch.name} has to wait for {name} before {site.place}"
                device.report(Finding("reuse", text, second=access, missing=missing))
                return

    def _resolve(
        self, device: EmulatedDevice, slot: Slot
    ) -> tuple[torch.UntypedStorage, TrackedMemory]:
        assert self._capture is not None
        found = slot.resolve(device)
        if found is None:
            nodes = self._capture.nodes
            user = next(node for node in nodes if any(slot is each[0] for each in node.accesses))
            text = (
                f"{user.name} ({user.site}) is replayed on memory from outside the graph's pool "
                "that was freed"
            )
            access = FoundAccess(user.name, "uses", device.current.name, user.site)
            device.report(Finding("freed", text, second=access, freed_at=slot.memory.freed_at))
            raise RuntimeError(text)
        return found

    def _order(
        self,
        device: EmulatedDevice,
        node: Node,
        before: Clock,
        bases: dict[Queue, int],
        resolved: dict[Slot, tuple[torch.UntypedStorage, TrackedMemory]],
    ) -> None:
        """Compare the accesses of ``node`` with those that are not ordered before it."""
        branch = self._branches[node.queue]
        known = {self._branches[queue].index: bases[queue] + n for queue, n in node.clock.items()}
        branch.clock = {**before, **known}
        stamp = Stamp(branch.index, known[branch.index])
        device.operations += 1
        device.history.enqueue(branch, node.name, node.site)
        if node.issued is not None:
            device.issued.append(node.issued)
        for slot, byte_range, is_write in node.accesses:
            memory = resolved[slot][1]
            access = Access(stamp, node.name, node.site, is_write, byte_range)
            device.compare(access, branch, memory)
            memory.note(access)

    def _prepare(
        self, capture: Capture, resolved: dict[Slot, tuple[torch.UntypedStorage, TrackedMemory]]
    ) -> list[Callable[[], None] | None]:
        """Return what to call for each node, on the memory that slots have now."""
        key = [id(storage) for storage, _ in resolved.values()]
        if self._prepared is None or self._prepared[0] != key:

            def tensor(view: View) -> torch.Tensor:
                if view.slot in resolved:
                    return view.of(resolved[view.slot][0])
                return torch.empty(view.shape, dtype=view.dtype)  # it has no elements

            with unseen():
                calls = [_bound(node, tensor) for node in capture.nodes]
            self._prepared = key, calls
        return self._prepared[1]

    def reset(self) -> None:
        """Forget what was captured."""
        self._capture = self._prepared = None

    def pool(self) -> MemPool:
        """Return the pool that it takes memory from."""
        assert self._pool is not None
        return self._pool


def _bound(node: Node, tensor: Callable[[View], torch.Tensor]) -> Callable[[], None] | None:
    if node.call is None:
        return None
    func, args, kwargs, outputs = node.call
    args, kwargs = tree_map_only(View, tensor, (args, kwargs))
    targets = [None if view is None else tensor(view) for view in outputs]

    def run() -> None:
        with torch.set_grad_enabled(node.with_grad):
            output = func(*args, **kwargs)
        if hasattr(output, "wait"):  # a collective
            output.wait()
            return
        for made, target in zip(tensors_in(output), targets, strict=True):
            if target is not None:
                target.copy_(made)

    return run


@contextmanager
def graph(
    cuda_graph: CUDAGraph,
    pool: MemPool | None = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
    **annotations: object,
) -> Iterator[None]:
    """Work like ``torch.cuda.graph``. Annotations of kernels are ignored."""
    synchronize()
    torch_module.empty_cache()
    with torch_module.stream(stream or Stream()):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def graph_pool_handle() -> MemPool:
    """Return a pool that several graphs can share."""
    return MemPool()


def is_current_stream_capturing() -> bool:
    """Return whether what is enqueued on the current stream is captured."""
    return active().current.is_captured


@contextmanager
def collective(call: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
    """Replay the next collective that is captured within by ``call(*args, **kwargs)``. For
    groups of real ranks."""
    capture = _under_way(active())
    if capture is not None:
        capture.collective = call, args, kwargs
    try:
        yield
    finally:
        if capture is not None:
            capture.collective = None


# The last replays of the graphs that share a pool.
_replayed: weakref.WeakKeyDictionary[MemPool, Clock] = weakref.WeakKeyDictionary()

_captures: weakref.WeakKeyDictionary[EmulatedDevice, Capture] = weakref.WeakKeyDictionary()


def _under_way(device: EmulatedDevice) -> Capture | None:
    return _captures.get(device)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _fill_with_nan(storage: torch.UntypedStorage) -> None:
    """Set all bits, as in memory that nobody has written."""
    with unseen():
        _bytes_of(storage).fill_(255)


# torch and this library ask the device's module for them.
for _name in ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"):
    setattr(torch_module, _name, globals()[_name])
