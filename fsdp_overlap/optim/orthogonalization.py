"""Which matrices are orthogonalized together, and what travels meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from fsdp_overlap.optim.exchange import CutMatrix, Exchange
from fsdp_overlap.optim.matrices import Stack
from fsdp_overlap.optim.newton_schulz import Polynomial, orthogonalize

# What is orthogonalized at once: enough to fill a GPU, little beside a shard.
_BATCH_ELEMENTS = 1 << 25


class Matrices(Protocol):
    """Matrices of a parameter, of which this rank holds elements ``first`` to ``last``, flat."""

    steps: tuple[Polynomial, ...]
    eps: float

    def read(self, first: int, last: int) -> torch.Tensor:
        """What is to be orthogonalized."""
        ...

    def write(self, stack: Stack, first: int, last: int, values: torch.Tensor) -> None:
        """Takes a part of what is orthogonal now, of the matrices ``stack``."""
        ...


@dataclass(frozen=True)
class Task:
    """``read()`` gives ``stack``, flat or not, ``write`` takes the orthogonal matrices ``[count,
    rows, columns]``."""

    stack: Stack
    steps: tuple[Polynomial, ...]
    eps: float
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


def tasks_of(matrices: Matrices, stacks: Sequence[Stack]) -> Iterator[Task]:
    """For what a rank holds all of, no more at once than makes a batch."""
    for stack in stacks:
        for part in stack.split(_BATCH_ELEMENTS):
            yield Task(
                part,
                matrices.steps,
                matrices.eps,
                partial(matrices.read, part.start, part.stop),
                partial(matrices.write, part, part.start, part.stop),
            )


def run(tasks: Iterable[Task], dtype: torch.dtype) -> None:
    """Does ``tasks``, those of the same shape in batches; a matrix and the transpose of another are
    of the same shape."""
    kinds: dict[object, list[Task]] = {}
    for task in tasks:
        shape = tuple(sorted((task.stack.rows, task.stack.columns)))
        kinds.setdefault((shape, task.steps, task.eps), []).append(task)
    for alike in kinds.values():
        for batch in _batches(alike):
            _run_batch(batch, dtype)


def _batches(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    batch: list[Task] = []
    elements = 0
    for task in tasks:
        size = task.stack.stop - task.stack.start
        if batch and elements + size > _BATCH_ELEMENTS:
            yield batch
            batch, elements = [], 0
        batch.append(task)
        elements += size
    yield batch


def _run_batch(batch: Sequence[Task], dtype: torch.dtype) -> None:
    counts = [task.stack.count for task in batch]
    values = [task.read() for task in batch]
    first = batch[0].stack
    shorter, longer = sorted((first.rows, first.columns))
    together = torch.empty(sum(counts), shorter, longer, dtype=dtype, device=values[0].device)
    for task, value, part in zip(batch, values, together.split(counts), strict=True):
        _along(task.stack, part).copy_(value.view(task.stack.shape))
    done = orthogonalize(together, batch[0].steps, batch[0].eps)
    for task, part in zip(batch, done.split(counts), strict=True):
        task.write(_along(task.stack, part))


def _along(stack: Stack, part: torch.Tensor) -> torch.Tensor:
    """``part`` of a batch, whose matrices are wide, as ``stack`` has them."""
    return part if stack.rows <= stack.columns else part.mT


def run_rounds(
    matrices: Sequence[Matrices],
    whole: Iterable[Task],
    exchanges: Iterable[Exchange],
    dtype: torch.dtype,
) -> None:
    """Does the tasks ``whole`` and those of ``exchanges``, whose cut matrices are of ``matrices``
    by number: while one is on its way, the products of another run. Collective."""

    def read(cut: CutMatrix, first: int, last: int) -> torch.Tensor:
        return matrices[cut.parameter].read(first, last)

    def write(cut: CutMatrix, first: int, last: int, values: torch.Tensor) -> None:
        matrices[cut.parameter].write(cut.stack, first, last, values)

    coming = iter(exchanges)
    current = next(coming, None)
    going: Exchange | None = None
    if current is not None:
        current.send(read)
    run(whole, dtype)
    while current is not None:
        following = next(coming, None)
        if following is not None:
            following.send(read)
        run(
            (
                Task(
                    cut.stack,
                    matrices[cut.parameter].steps,
                    matrices[cut.parameter].eps,
                    partial(torch.clone, received),
                    partial(current.put, cut),
                )
                for cut, received in zip(current.mine, current.receive(), strict=True)
            ),
            dtype,
        )
        current.send_back()
        if going is not None:
            going.finish(write)
        current, going = following, current
    if going is not None:
        going.finish(write)
