"""Orthogonalizes matrices in batches, while others travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsdp_overlap.comm.streams import has_streams
from fsdp_overlap.optim.exchange import Exchange, Parcel
from fsdp_overlap.optim.matrices import Stack
from fsdp_overlap.optim.newton_schulz import orthogonalize
from fsdp_overlap.optim.updates import Settings, Update

# How many elements are orthogonalized at once: enough to fill an accelerator, and no more than a
# CPU's cache holds.
_ACCELERATOR_ELEMENTS = 1 << 25
_CPU_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Products:
    """On which device and in which dtype matrices are multiplied."""

    device: torch.device
    dtype: torch.dtype

    @property
    def batch_elements(self) -> int:
        return _ACCELERATOR_ELEMENTS if has_streams(self.device) else _CPU_ELEMENTS


@dataclass(frozen=True)
class Task:
    """Matrices to orthogonalize. ``read()`` returns the elements of ``stack``, flat. ``write``
    takes the orthogonal matrices, shape ``[count, rows, columns]``."""

    stack: Stack
    settings: Settings
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


def tasks_of(update: Update, stacks: Sequence[Stack], products: Products) -> Iterator[Task]:
    """Tasks for ``stacks``, which this rank holds all of. A task has no more elements than a batch,
    or is a single matrix."""
    for stack in stacks:
        for part in stack.split(products.batch_elements):
            yield Task(
                part,
                update.settings,
                partial(update.read, part.start, part.stop),
                partial(update.write, part, part.start, part.stop),
            )


def run(tasks: Iterable[Task], products: Products) -> None:
    """Does ``tasks``. Matrices of the same shape and settings share batches. A matrix and its
    transpose count as the same shape."""
    kinds: dict[object, list[Task]] = {}
    for task in tasks:
        shape = tuple(sorted((task.stack.rows, task.stack.columns)))
        kinds.setdefault((shape, task.settings.steps, task.settings.eps), []).append(task)
    for alike in kinds.values():
        for batch in _batches(alike, products.batch_elements):
            _run_batch(batch, products)


def _batches(tasks: Sequence[Task], most: int) -> Iterator[list[Task]]:
    batch: list[Task] = []
    elements = 0
    for task in tasks:
        if batch and elements + task.stack.numel > most:
            yield batch
            batch, elements = [], 0
        batch.append(task)
        elements += task.stack.numel
    yield batch


def _run_batch(batch: Sequence[Task], products: Products) -> None:
    counts = [task.stack.count for task in batch]
    shape = sum(counts), *sorted((batch[0].stack.rows, batch[0].stack.columns))
    together = torch.empty(shape, dtype=products.dtype, device=products.device)
    for task, part in zip(batch, together.split(counts), strict=True):
        _turned(part, task.stack).copy_(task.read().view(task.stack.shape))
    settings = batch[0].settings
    done = orthogonalize(together, settings.steps, settings.eps)
    for task, part in zip(batch, done.split(counts), strict=True):
        task.write(_turned(part, task.stack))


def _turned(wide: torch.Tensor, stack: Stack) -> torch.Tensor:
    """A view of ``wide``: transposed if the matrices of ``stack`` are tall."""
    return wide if stack.rows <= stack.columns else wide.mT


def run_rounds(
    updates: Sequence[Update],
    whole: Iterable[Task],
    exchanges: Iterable[Exchange],
    products: Products,
) -> None:
    """Does the tasks ``whole``, and those for the cut matrices of ``updates``, which travel by
    ``exchanges``. Collective over the group of the exchanges.

    Round *i* travels to the owners while the products of round *i* - 1 run, and travels back while
    those of round *i* + 1 run. The first round travels while the products of ``whole`` run.
    """

    def read(parcel: Parcel, first: int, last: int) -> torch.Tensor:
        return updates[parcel.parameter].read(first, last)

    def write(parcel: Parcel, first: int, last: int, values: torch.Tensor) -> None:
        updates[parcel.parameter].write(parcel.matrix.stack, first, last, values)

    coming = iter(exchanges)
    current = next(coming, None)
    before: Exchange | None = None
    if current is not None:
        current.send(read)
    run(whole, products)
    while current is not None:
        following = next(coming, None)
        if following is not None:
            following.send(read)
        _run_received(current, updates, products)
        current.send_back()
        if before is not None:
            before.finish(write)
        before, current = current, following
    if before is not None:
        before.finish(write)


def _run_received(exchange: Exchange, updates: Sequence[Update], products: Products) -> None:
    """Orthogonalizes the matrices that this rank owns in a round, and puts the results in the
    buffer that is sent back."""
    results: dict[Parcel, torch.Tensor] = {}

    def take(parcel: Parcel, values: torch.Tensor) -> None:
        results[parcel] = values.reshape(-1)

    run(
        (
            Task(
                parcel.matrix.stack,
                updates[parcel.parameter].settings,
                partial(received.view, -1),
                partial(take, parcel),
            )
            for parcel, received in exchange.receive().items()
        ),
        products,
    )
    exchange.put(results)
