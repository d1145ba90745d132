"""An emulated device that notes what a step uses: memory, links, and the host's time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_overlap.tools.emulator import EmulatedDevice, Operation, Timing
from fsdp_overlap.tools.emulator.allocator import Allocator, MemoryBlock, MemPool
from fsdp_overlap.tools.emulator.memory import Access
from fsdp_overlap.tools.emulator.queues import Queue
from fsdp_overlap.tools.simulator.collective_time import group_of
from fsdp_overlap.tools.simulator.costs import full_of
from fsdp_overlap.tools.simulator.hardware import Fabric
from fsdp_overlap.tools.simulator.nccl_tuning import Kind

MemoryKind = Literal["parameters", "full buffers", "gradients", "optimizer", "activations", "other"]
"""Parameters are all that is made before the first step: shards, tables, data. Full buffers are
what all-gathers fill. Gradients are reduce inputs, what is copied there, and what reductions give.
Optimizer is what its steps take. Activations are all else that compute takes."""

KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
Phase = Literal["building", "training", "optimizing"]

COPIES = {"_foreach_copy_", "copy_"}
MIB = 2**20


@dataclass(eq=False)
class Allocation:
    """A piece of memory from when it is taken until it is given back."""

    nbytes: int
    stream: int
    phase: Phase
    """What the program did when it took it."""
    block: MemoryBlock | None
    """None while it takes no memory."""
    kind: MemoryKind | None = None
    """What the collectives that used it say it is."""
    copied_to: Allocation | None = None


class Usage(NamedTuple):
    """What memory holds from a time on, in seconds of the trace's clock."""

    at: float
    nbytes: dict[MemoryKind, int]


class Ledger(Allocator):
    """An allocator that remembers who held what, and when. Where it ``defers``, what operations of
    a training step return takes memory by :meth:`allocate`."""

    def __init__(self, device: EmulatedDevice, expandable: bool = False) -> None:
        super().__init__(expandable)
        self.phase: Phase = "building"
        self.defers = False
        self._device = device
        self._live: dict[int, Allocation] = {}
        """By address."""
        self._deferred = 0
        self._changes: list[tuple[float, Allocation, int]] = []
        """When, what, and by how many bytes memory grew."""
        self._reducing: set[int] = set()
        """The streams on which gradients are reduced."""
        self._gathering: set[int] = set()

    def malloc(
        self, nbytes: int, stream: Queue, pool: MemPool | None = None
    ) -> tuple[MemoryBlock, list[Access]]:
        is_of_compute = stream is self._device.default and pool is None
        if self.defers and is_of_compute and self.phase == "training":
            self._deferred += 1
            block = MemoryBlock(nbytes, stream.index, False, -self._deferred, None)
            self._live[block.address] = Allocation(nbytes, stream.index, self.phase, None)
            return block, []
        block, last = super().malloc(nbytes, stream, pool)
        held = Allocation(block.nbytes, stream.index, self.phase, block)
        self._live[block.address] = held
        self._changes.append((self._now(), held, held.nbytes))
        return block, last

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Let ``storage`` take memory, if it lies on the device and does not yet."""
        given = self._device.block_of(storage)
        held = None if given is None else self._live[given.address]
        if held is not None and held.block is None:
            held.block, _ = super().malloc(held.nbytes, self._device.default)
            held.nbytes = held.block.nbytes
            self._changes.append((self._now(), held, held.nbytes))

    def free(
        self,
        block: MemoryBlock,
        accesses: Iterable[Access],
        used: frozenset[Queue] = frozenset(),
        is_done: Callable[[], bool] = bool,
    ) -> None:
        held = self._live.pop(block.address)
        if held.block is not None:
            self._changes.append((self._now(), held, -held.nbytes))
            super().free(held.block, accesses, used, is_done)

    @property
    def position(self) -> int:
        """How many times memory was taken or given back so far."""
        return len(self._changes)

    def note(self, operation: Operation, stream: Queue) -> None:
        """Learn from an operation what memory is for."""
        if operation.group is not None:
            if stream not in self._device.program_streams:
                self._record_collective(operation, stream)
        elif operation.name in COPIES:
            reads, writes = list(self._held(operation.reads)), list(self._held(operation.writes))
            for source in reads:
                source.copied_to = writes[0] if writes else None

    def _record_collective(self, operation: Operation, stream: Queue) -> None:
        is_gather = operation.name in ("all_gather", "broadcast")
        (self._gathering if is_gather else self._reducing).add(stream.index)
        for held in self._held([*operation.reads, *operation.writes]):
            held.kind = "full buffers" if is_gather else "gradients"

    def _held(self, tensors: Sequence[torch.Tensor]) -> Iterator[Allocation]:
        for tensor in tensors:
            if tensor.numel() and self._device.is_here(tensor):
                yield self._live[self._device.address_of(tensor)]

    def _now(self) -> float:
        # The host takes memory long before compute comes to use it.
        return max(self._device.host.ends, self._device.default.ends)

    def is_activation(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor on the device holds what compute has taken memory for, and not
        parameters, gradients or optimizer states."""
        return any(self.kind_of(held) == "activations" for held in self._held([tensor]))

    def kind_of(self, held: Allocation) -> MemoryKind:
        if held.phase == "building":
            return "parameters"
        if held.phase == "optimizing":
            return "optimizer"
        if held.kind is not None:
            return held.kind
        target = held.copied_to
        if target is not None and target.kind == "gradients":
            return "gradients"
        if held.stream == self._device.default.index:
            return "activations"
        if held.stream in self._gathering:
            return "full buffers"
        return "gradients" if held.stream in self._reducing else "other"

    def peak(self, since: int) -> dict[MemoryKind, int]:
        """Return what memory holds when it holds the most, from change ``since`` on."""
        most = max(self._over(since), key=lambda usage: sum(usage.nbytes.values()))
        return most.nbytes

    def usage(self, since: int) -> list[Usage]:
        """Return what memory holds over time, from change ``since`` on. Of changes at the same time
        the last is given."""
        found: list[Usage] = []
        for usage in self._over(since):
            if found and found[-1].at == usage.at:
                found.pop()
            found.append(usage)
        return found

    def _over(self, since: int) -> Iterator[Usage]:
        now: dict[MemoryKind, int] = dict.fromkeys(KINDS, 0)
        for _, held, grown in self._changes[:since]:
            now[self.kind_of(held)] += grown
        changes = self._changes[since:]
        yield Usage(changes[0][0] if changes else self._now(), dict(now))
        for at, held, grown in changes:
            now[self.kind_of(held)] += grown
            yield Usage(at, dict(now))


def counters(usage: Iterable[Usage]) -> list[dict[str, Any]]:
    """Return counters in a Chrome trace, which viewers draw as areas."""
    return [
        {
            "ph": "C",
            "cat": "memory",
            "name": "memory, MiB",
            "pid": 0,
            "ts": 1e6 * at,
            "args": {kind: nbytes[kind] / MIB for kind in KINDS},
        }
        for at, nbytes in usage
    ]


class HostBoundStretch(NamedTuple):
    """Operations of compute in a row, each of which waited for the host to enqueue it. In seconds
    of the device's time; compute did nothing for ``waited`` of them."""

    start: float
    end: float
    waited: float


class ObservedCollective(NamedTuple):
    """A collective among ``ranks``, of ``nbytes`` in the full buffer."""

    kind: Kind
    ranks: Sequence[int]
    nbytes: int


class ObservedDevice(EmulatedDevice):
    """Tensors have no values. ``stretches`` and ``collectives`` may be cleared at any time."""

    def __init__(self, timing: Timing, expandable_segments: bool = False, **options: Any) -> None:
        super().__init__(timing=timing, values=False, **options)
        self.allocator: Ledger = Ledger(self, expandable_segments)
        self.stretches: list[HostBoundStretch] = []
        self.collectives: list[ObservedCollective] = []
        self.watchers: list[Callable[[Operation], None]] = []
        """Called with each operation that runs on the device."""
        self._is_late = False
        """Whether compute waited for the host before its last operation."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().resize(storage, nbytes)
        self.allocator.allocate(storage)

    def note_empty(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self.allocator.allocate(tensor.untyped_storage())

    def run(self, operation: Operation, on_host: bool = False) -> None:
        stream, ready = self.current, self.current.ends
        super().run(operation, on_host)
        if on_host:
            return
        self.allocator.note(operation, stream)
        for watch in self.watchers:
            watch(operation)
        if operation.group is not None:
            nbytes = sum(tensor.nbytes for tensor in full_of(operation))
            ranks = dist.get_process_group_ranks(operation.group)
            self.collectives.append(ObservedCollective(cast(Kind, operation.name), ranks, nbytes))
        if stream is self.default:
            self._record_wait(ready, self.host.ends)

    def _record_wait(self, ready: float, enqueued: float) -> None:
        was_late, self._is_late = self._is_late, enqueued > ready
        if not self._is_late:
            return
        waited = enqueued - ready
        if was_late and self.stretches:
            last = self.stretches[-1]
            self.stretches[-1] = HostBoundStretch(last.start, enqueued, last.waited + waited)
        else:
            self.stretches.append(HostBoundStretch(ready, enqueued, waited))

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Attribute what the steps of optimizers take within to them."""

        def begin(*_: Any) -> None:
            self.allocator.phase = "optimizing"

        def end(*_: Any) -> None:
            self.allocator.phase = "training"

        hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def traffic(fabric: Fabric, collectives: Iterable[ObservedCollective]) -> dict[str, float]:
    """Return the bytes that come to a rank within its node, and from other nodes.

    As by rings that pass all ranks of a node before they leave it: of what comes to a node, each of
    its ranks takes an equal part from the network, and has the rest from its neighbor. Trees and
    switches that add up send less.
    """
    found = {"within nodes": 0.0, "between nodes": 0.0}
    for kind, ranks, nbytes in collectives:
        group = group_of(fabric, ranks)
        if kind == "all_to_all":
            found["within nodes"] += nbytes * (group.a_node - 1) / group.ranks
            found["between nodes"] += nbytes * (group.ranks - group.a_node) / group.ranks
            continue
        passes = 2 if kind == "all_reduce" else 1
        carried = passes * nbytes * (group.ranks - 1) / group.ranks
        crossing = group.nodes / group.ranks if group.nodes > 1 else 0.0
        found["within nodes"] += carried * (1 - crossing)
        found["between nodes"] += carried * crossing
    return found
