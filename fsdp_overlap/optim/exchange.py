"""Gather each matrix that ranks share on an owner rank, and scatter the result.

Owners are balanced by work. Matrices may be exchanged in rounds, so that one round is communicated
while the products of another run. Replicated chunks are sent once; results go to all replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import all_to_all
from fsdp_overlap.comm.comm_streams import CommStream, has_streams
from fsdp_overlap.optim.matrices import (
    MatrixBatch,
    MatrixChunk,
    MatrixPartition,
    SharedMatrices,
    flops_of,
    split_by_numel,
)

# The elements that an owner gets in a round: enough for an efficient message, and few enough for
# several rounds. Matrices that are assigned together may have more. An accelerator's rounds fill it
# with products, which hide longer messages.
ROUND_ELEMENTS = 1 << 21
ACCELERATOR_ROUND_ELEMENTS = 1 << 24


def round_elements(device: torch.device) -> int:
    """Return the elements that an owner gets in a round. It depends on the type of ``device``
    alone, so that all ranks of a mesh plan the same rounds."""
    return ACCELERATOR_ROUND_ELEMENTS if has_streams(device) else ROUND_ELEMENTS


@dataclass(frozen=True, eq=False)
class OwnerAssignment:
    """Shared matrices, and the rank that owns them. ``parameter`` is the index of their parameter,
    and ``replica`` the replica of each chunk that is sent to the owner."""

    parameter: int
    matrices: SharedMatrices
    owner: int
    replica: int

    def sender(self, chunk: MatrixChunk) -> int:
        return chunk.ranks[self.replica % len(chunk.ranks)]


Part = tuple[OwnerAssignment, MatrixChunk, torch.Tensor]
"""A chunk of assigned matrices, and its values."""


@lru_cache(maxsize=64)
def plan_rounds(
    partitions: tuple[MatrixPartition, ...],
    world_size: int,
    round_elements: int,
    cost: Callable[[MatrixBatch | SharedMatrices], float] = flops_of,
) -> tuple[tuple[OwnerAssignment, ...], ...]:
    """Assign all shared matrices to owners, and return the assignments of each round.

    The matrices with the most work, which is their ``cost``, come first. Each goes to the rank with
    the least work, unshared matrices included. Among equal ranks, the one that holds most of the
    matrix gets it. If some ranks hold all of it, it goes to one of these.
    """
    loads = [0.0] * world_size
    for partition in partitions:
        for rank, batches in partition.unshared.items():
            loads[rank] += sum(map(cost, batches))
    shared = [
        (index, matrices)
        for index, partition in enumerate(partitions)
        for matrices in partition.shared
    ]
    owned: list[list[OwnerAssignment]] = [[] for _ in loads]
    for index, matrices in sorted(shared, key=lambda item: -cost(item[1])):
        held: dict[int, int] = {}
        for chunk in matrices.chunks:
            for rank in chunk.ranks:
                held[rank] = held.get(rank, 0) + chunk.last - chunk.first
        is_uncut = len(matrices.chunks) == 1
        owner = min(
            held if is_uncut else range(world_size),
            key=lambda rank: (loads[rank], -held.get(rank, 0), rank),
        )
        loads[owner] += cost(matrices)
        replica = partitions[index].replicas[owner]
        owned[owner].append(OwnerAssignment(index, matrices, owner, replica))
    by_owner = [
        split_by_numel(assignments, round_elements, lambda assignment: assignment.matrices.numel)
        for assignments in owned
    ]
    return tuple(
        tuple(assignment for members in of_owners for assignment in members)
        for of_owners in zip_longest(*by_owner, fillvalue=[])
    )


@dataclass(frozen=True, eq=False)
class BufferPlan:
    """The chunks in a send or receive buffer, in order, and the number of elements that go to, or
    come from, each rank."""

    sizes: list[int]
    chunks: list[tuple[OwnerAssignment, MatrixChunk]]

    @classmethod
    def of(
        cls, chunks: Iterable[tuple[int, OwnerAssignment, MatrixChunk]], world_size: int
    ) -> BufferPlan:
        """Return the plan for ``chunks``, each with the other rank, by which they are ordered."""
        ordered = sorted(chunks, key=lambda item: item[0])
        sizes = [0] * world_size
        for rank, _, chunk in ordered:
            sizes[rank] += chunk.last - chunk.first
        return cls(sizes, [(assignment, chunk) for _, assignment, chunk in ordered])


class GatherScatterPlan(NamedTuple):
    """What one rank sends to owners and receives as an owner, and the results that it sends and
    receives."""

    gather_send: BufferPlan
    gather_recv: BufferPlan
    scatter_send: BufferPlan
    scatter_recv: BufferPlan


@lru_cache(maxsize=256)
def gather_scatter_plan(
    assignments: tuple[OwnerAssignment, ...], rank: int, world_size: int
) -> GatherScatterPlan:
    """Return the plan of ``rank`` for a round. It is the same in every step."""
    gather_send, gather_recv, scatter_send, scatter_recv = [], [], [], []
    for assignment in assignments:
        owner = assignment.owner
        for chunk in assignment.matrices.chunks:
            sender = assignment.sender(chunk)
            if owner not in chunk.ranks:
                if owner == rank:
                    gather_recv.append((sender, assignment, chunk))
                elif sender == rank:
                    gather_send.append((owner, assignment, chunk))
            if owner == rank:
                others = (holder for holder in chunk.ranks if holder != rank)
                scatter_send += [(holder, assignment, chunk) for holder in others]
            elif rank in chunk.ranks:
                scatter_recv.append((owner, assignment, chunk))
    plans = gather_send, gather_recv, scatter_send, scatter_recv
    return GatherScatterPlan(*(BufferPlan.of(chunks, world_size) for chunks in plans))


class MessageBuffer:
    """The memory of one send or receive, and the chunks in it, each with its view ``[values per
    element, elements]``."""

    def __init__(
        self, plan: BufferPlan, values: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sizes = [size * values for size in plan.sizes]
        self.flat = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        numels = [(chunk.last - chunk.first) * values for _, chunk in plan.chunks]
        views = [part.view(values, -1) for part in self.flat.split(numels)]
        self.chunks = [(*key, view) for key, view in zip(plan.chunks, views, strict=True)]


class Exchange(ABC):
    """One round on one rank. Call :meth:`start`, :meth:`run` and :meth:`finish`, in this order.
    Collective over ``group``.

    Matrices are sent in ``dtype``, between ranks' memory on ``device``.
    """

    label: ClassVar[str]
    """What traces and errors name."""
    values_per_element: ClassVar[int] = 1
    """How many values of each element owners are sent."""

    def __init__(
        self,
        assignments: tuple[OwnerAssignment, ...],
        group: dist.ProcessGroup,
        comm_stream: CommStream,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rank = group.rank()
        self._owned = [one for one in assignments if one.owner == self._rank]
        self._plan = gather_scatter_plan(assignments, self._rank, group.size())
        self._group = group
        self._comm_stream = comm_stream
        self._dtype = dtype
        self._device = device
        self._sent: MessageBuffer | None = None
        """What the comm stream reads."""

    @abstractmethod
    def _pack(self, chunks: Sequence[Part]) -> None:
        """Fill ``chunks``, which owners lack."""

    @abstractmethod
    def _step(self, received: Sequence[Part], results: Sequence[Part]) -> None:
        """Step the matrices that this rank owns. ``received`` are the chunks of them that it does
        not hold. Fill ``results``, the chunks that others hold."""

    @abstractmethod
    def _unpack(self, chunks: Sequence[Part]) -> None:
        """Take the results of the owners for this rank's ``chunks``."""

    def start(self) -> None:
        """Send to the owners the chunks that they lack."""
        send = self._buffer(self._plan.gather_send, self.values_per_element)
        self._received = self._buffer(self._plan.gather_recv, self.values_per_element)
        self._pack(send.chunks)
        self._enqueue(send)

    def run(self) -> None:
        """Wait for the matrices that this rank owns and step them. Send the results to all ranks
        that hold a chunk."""
        self._work.wait()
        results = self._buffer(self._plan.scatter_send, 1)
        self._step(self._received.chunks, results.chunks)
        self._received = self._buffer(self._plan.scatter_recv, 1)
        self._enqueue(results)

    def finish(self) -> None:
        """Wait for the results of the owners."""
        self._work.wait()
        self._unpack(self._received.chunks)

    def _own_chunks(self) -> Iterator[tuple[OwnerAssignment, MatrixChunk]]:
        """Yield the chunks that this rank holds of the matrices that it owns."""
        for one in self._owned:
            for chunk in one.matrices.chunks:
                if self._rank in chunk.ranks:
                    yield one, chunk

    def _buffer(self, plan: BufferPlan, values: int) -> MessageBuffer:
        return MessageBuffer(plan, values, self._dtype, self._device)

    def _enqueue(self, source: MessageBuffer) -> None:
        self._sent = source  # keeps the memory until the comm stream has read it
        target = self._received
        self._comm_stream.after_compute()
        self._work = self._comm_stream.enqueue(
            "all_to_all",
            self.label,
            lambda: all_to_all(target.flat, source.flat, target.sizes, source.sizes, self._group),
        )


def run_rounds(exchanges: Iterable[Exchange], run_unshared: Callable[[], None]) -> None:
    """Run ``exchanges``. Collective over their groups.

    Round *i* is gathered on its owners while round *i* - 1 runs, and scattered back while round
    *i* + 1 runs. The first round is gathered while ``run_unshared`` runs, and rounds are made when
    they start.
    """
    rounds = iter(exchanges)
    current = next(rounds, None)
    previous: Exchange | None = None
    if current is not None:
        current.start()
    run_unshared()
    while current is not None:
        following = next(rounds, None)
        if following is not None:
            following.start()
        current.run()
        if previous is not None:
            previous.finish()
        previous, current = current, following
    if previous is not None:
        previous.finish()
