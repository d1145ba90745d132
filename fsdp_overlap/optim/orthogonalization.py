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

# What is orthogonalized at once, by device: what fills a GPU, what a CPU's cache holds.
_BATCH_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 18}


@dataclass(frozen=True)
class Products:
    """Where and in which dtype matrices are multiplied."""

    device: torch.device
    dtype: torch.dtype

    @property
    def batch_elements(self) -> int:
        return _BATCH_ELEMENTS.get(self.device.type, _BATCH_ELEMENTS["cuda"])


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


def tasks_of(matrices: Matrices, stacks: Sequence[Stack], products: Products) -> Iterator[Task]:
    """For what a rank holds all of, no more at once than makes a batch."""
    for stack in stacks:
        for part in stack.split(products.batch_elements):
            yield Task(
                part,
                matrices.steps,
                matrices.eps,
                partial(matrices.read, part.start, part.stop),
                partial(matrices.write, part, part.start, part.stop),
            )


def run(tasks: Iterable[Task], products: Products) -> None:
    """Does ``tasks``, those of the same shape in batches; a matrix and the transpose of another are
    of the same shape."""
    kinds: dict[object, list[Task]] = {}
    for task in tasks:
        shape = tuple(sorted((task.stack.rows, task.stack.columns)))
        kinds.setdefault((shape, task.steps, task.eps), []).append(task)
    for alike in kinds.values():
        for batch in _batches(alike, products.batch_elements):
            _run_batch(batch, products)


def _batches(tasks: Sequence[Task], most: int) -> Iterator[list[Task]]:
    batch: list[Task] = []
    elements = 0
    for task in tasks:
        size = task.stack.stop - task.stack.start
        if batch and elements + size > most:
            yield batch
            batch, elements = [], 0
        batch.append(task)
        elements += size
    yield batch


def _run_batch(batch: Sequence[Task], products: Products) -> None:
    counts = [task.stack.count for task in batch]
    shape = sum(counts), *sorted((batch[0].stack.rows, batch[0].stack.columns))
    together = torch.empty(shape, dtype=products.dtype, device=products.device)
    for task, part in zip(batch, together.split(counts), strict=True):
        _along(task.stack, part).copy_(task.read().view(task.stack.shape))
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
    products: Products,
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
    run(whole, products)
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
            products,
        )
        current.send_back()
        if going is not None:
            going.finish(write)
        current, going = following, current
    if going is not None:
        going.finish(write)
