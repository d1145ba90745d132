"""What the memory of an emulated device holds over time: parameters, full buffers and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from fsdp_overlap.emulator import EmulatedDevice, Operation
from fsdp_overlap.emulator.allocator import Allocator, Block, MemPool
from fsdp_overlap.emulator.memory import Access
from fsdp_overlap.emulator.queues import Queue

Kind = Literal["parameters", "full buffers", "gradients", "optimizer", "activations", "other"]
"""Parameters are all that is made before the first step: shards, tables, data. Full buffers are
what all-gathers fill. Gradients are reduce inputs, what is copied there, and what reductions give.
Optimizer is what its steps take. Activations are all else that compute takes."""

KINDS: tuple[Kind, ...] = get_args(Kind)
Phase = Literal["building", "training", "optimizing"]

COPIES = {"_foreach_copy_", "copy_"}
MIB = 2**20


@dataclass(eq=False)
class Held:
    """A piece of memory from when it is taken until it is given back."""

    nbytes: int
    stream: int
    phase: Phase
    """What the program did when it took it."""
    kind: Kind | None = None
    """What the collectives that used it say it is."""
    copied_to: Held | None = None


class Usage(NamedTuple):
    """What memory holds from a time on, in seconds of the trace's clock."""

    at: float
    nbytes: dict[Kind, int]


class Ledger(Allocator):
    """An allocator that remembers who held what, and when."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.phase: Phase = "building"
        self._device = device
        self._live: dict[int, Held] = {}
        """By address."""
        self._changes: list[tuple[float, Held, int]] = []
        """When, what, and by how many bytes memory grew."""
        self._reducing: set[int] = set()
        """The streams on which gradients are reduced."""
        self._gathering: set[int] = set()

    def take(
        self, nbytes: int, stream: Queue, pool: MemPool | None = None
    ) -> tuple[Block, list[Access]]:
        block, last = super().take(nbytes, stream, pool)
        held = self._live[block.address] = Held(block.nbytes, stream.index, self.phase)
        self._changes.append((self._now(), held, held.nbytes))
        return block, last

    def give_back(
        self,
        block: Block,
        accesses: Iterable[Access],
        used: frozenset[Queue] = frozenset(),
        is_done: Callable[[], bool] = bool,
    ) -> None:
        held = self._live.pop(block.address)
        self._changes.append((self._now(), held, -held.nbytes))
        super().give_back(block, accesses, used, is_done)

    @property
    def position(self) -> int:
        """Counts changes so far."""
        return len(self._changes)

    def note(self, operation: Operation, stream: Queue) -> None:
        """Learns from an operation what memory is for."""
        if operation.group is not None:
            if stream not in self._device.program_streams:
                self._note_collective(operation, stream)
        elif operation.name in COPIES:
            reads, writes = list(self._held(operation.reads)), list(self._held(operation.writes))
            for source in reads:
                source.copied_to = writes[0] if writes else None

    def _note_collective(self, operation: Operation, stream: Queue) -> None:
        is_gather = operation.name in ("all_gather", "broadcast")
        (self._gathering if is_gather else self._reducing).add(stream.index)
        for held in self._held([*operation.reads, *operation.writes]):
            held.kind = "full buffers" if is_gather else "gradients"

    def _held(self, tensors: Sequence[torch.Tensor]) -> Iterator[Held]:
        for tensor in tensors:
            if tensor.numel() and self._device.is_here(tensor):
                yield self._live[self._device.address_of(tensor)]

    def _now(self) -> float:
        # The host takes memory long before compute comes to use it.
        return max(self._device.host.ends, self._device.default.ends)

    def kind_of(self, held: Held) -> Kind:
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

    def peak(self, since: int) -> dict[Kind, int]:
        """What memory holds when it holds the most, from change ``since`` on."""
        most = max(self._over(since), key=lambda usage: sum(usage.nbytes.values()))
        return most.nbytes

    def usage(self, since: int) -> list[Usage]:
        """What memory holds over time, from change ``since`` on. Of changes at the same time the
        last is given."""
        found: list[Usage] = []
        for usage in self._over(since):
            if found and found[-1].at == usage.at:
                found.pop()
            found.append(usage)
        return found

    def _over(self, since: int) -> Iterator[Usage]:
        now: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        for _, held, grown in self._changes[:since]:
            now[self.kind_of(held)] += grown
        changes = self._changes[since:]
        yield Usage(changes[0][0] if changes else self._now(), dict(now))
        for at, held, grown in changes:
            now[self.kind_of(held)] += grown
            yield Usage(at, dict(now))


def counters(usage: Iterable[Usage]) -> list[dict[str, Any]]:
    """Counters in a Chrome trace, which viewers draw as areas."""
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
