"""Muon's communication: gathers each shared matrix on an owner rank, and scatters the result.

Owners are balanced by work. Matrices are exchanged in rounds, so that one round is communicated
while the products of another run. Replicated chunks are sent once; results go to all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import all_to_all
from fsdp_overlap.comm.comm_streams import CommStream
from fsdp_overlap.optim.matrices import (
    MatrixBatch,
    MatrixChunk,
    MatrixPartition,
    SharedMatrices,
    flops_of,
    split_by_numel,
)
from fsdp_overlap.optim.updates import Task, Update, UpdateSlice, momentum_directions, move

# The elements that an owner gets in a round: enough for an efficient message, and few enough for
# several rounds. A single matrix may have more.
ROUND_ELEMENTS = 1 << 21


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
    """The memory of one send or receive, and the chunks in it, each with its view."""

    def __init__(self, plan: BufferPlan, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = plan.sizes
        self.flat = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        views = self.flat.split([chunk.last - chunk.first for _, chunk in plan.chunks])
        self.chunks = [(*key, view) for key, view in zip(plan.chunks, views, strict=True)]


class Exchange:
    """One round on one rank. Call, in this order, :meth:`start_gather`, :meth:`finish_gather`,
    :meth:`start_scatter` and :meth:`finish_scatter`. Collective over ``group``. Matrices are sent
    in ``dtype``, between ranks' memory on ``device``."""

    def __init__(
        self,
        assignments: tuple[OwnerAssignment, ...],
        updates: Sequence[Update],
        group: dist.ProcessGroup,
        comm_stream: CommStream,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rank = group.rank()
        self._owned = [one for one in assignments if one.owner == self._rank]
        self._plan = gather_scatter_plan(assignments, self._rank, group.size())
        self._updates = updates
        self._group = group
        self._comm_stream = comm_stream
        self._dtype = dtype
        self._device = device
        self._sent: MessageBuffer | None = None
        """What the comm stream reads."""

    def start_gather(self) -> None:
        """Send to the owners the chunks that they lack."""
        send = self._buffer(self._plan.gather_send)
        self._recv = self._buffer(self._plan.gather_recv)
        if slices := [self._slice(assignment, chunk) for assignment, chunk, _ in send.chunks]:
            views = [view for *_, view in send.chunks]
            torch._foreach_copy_(views, momentum_directions(slices))
        self._enqueue(self._recv, send)

    def finish_gather(self) -> list[Task]:
        """Wait for the matrices that this rank owns. Their results must be in the tasks' tensors
        before :meth:`start_scatter`."""
        self._work.wait()
        self._results = self._buffer(self._plan.scatter_send)
        tasks = {}
        for assignment in self._owned:
            update = self._updates[assignment.parameter]
            tasks[assignment] = task = Task(assignment.matrices, update.settings)
            for chunk in assignment.matrices.chunks:
                if self._rank in chunk.ranks:
                    task.own.append((self._slice(assignment, chunk), chunk))
        for assignment, chunk, view in self._recv.chunks:
            tasks[assignment].received.append((view, chunk))
        for assignment, chunk, view in self._results.chunks:
            tasks[assignment].results.append((view, chunk))
        return list(tasks.values())

    def start_scatter(self) -> None:
        """Send the results to all ranks that hold a chunk."""
        self._recv = self._buffer(self._plan.scatter_recv)
        self._enqueue(self._recv, self._results)

    def finish_scatter(self) -> None:
        """Wait for the results of the owners, and update this rank's parameters."""
        self._work.wait()
        chunks = self._recv.chunks
        move(
            [self._slice(assignment, chunk) for assignment, chunk, _ in chunks],
            [view for *_, view in chunks],
        )

    def _slice(self, assignment: OwnerAssignment, chunk: MatrixChunk) -> UpdateSlice:
        update = self._updates[assignment.parameter]
        return UpdateSlice(update, assignment.matrices, chunk.first, chunk.last)

    def _buffer(self, plan: BufferPlan) -> MessageBuffer:
        return MessageBuffer(plan, self._dtype, self._device)

    def _enqueue(self, target: MessageBuffer, source: MessageBuffer) -> None:
        self._sent = source  # keeps the memory until the comm stream has read it
        self._comm_stream.after_compute()
        self._work = self._comm_stream.enqueue(
            "all_to_all",
            "Muon",
            lambda: all_to_all(target.flat, source.flat, target.sizes, source.sizes, self._group),
        )
