"""Which matrices are orthogonalized together, and what travels meanwhile."""

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

# What is orthogonalized at once: what fills an accelerator, and what a CPU's cache holds.
_ACCELERATOR_ELEMENTS = 1 << 25
_CPU_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Products:
    """Where and in which dtype matrices are multiplied."""

    device: torch.device
    dtype: torch.dtype

    @property
    def batch_elements(self) -> int:
        return _ACCELERATOR_ELEMENTS if has_streams(self.device) else _CPU_ELEMENTS


@dataclass(frozen=True)
class Task:
    """``read()`` gives ``stack``, flat, ``write`` takes the orthogonal matrices ``[count, rows,
    columns]``."""

    stack: Stack
    settings: Settings
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]


def tasks_of(update: Update, stacks: Sequence[Stack], products: Products) -> Iterator[Task]:
    """For what a rank holds all of, no more at once than makes a batch."""
    for stack in stacks:
        for part in stack.split(products.batch_elements):
            yield Task(
                part,
                update.settings,
                partial(update.read, part.start, part.stop),
                partial(update.write, part, part.start, part.stop),
            )


def run(tasks: Iterable[Task], products: Products) -> None:
    """Does ``tasks``, those of the same shape in batches; a matrix and the transpose of another are
    of the same shape."""
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
    """``wide`` matrices as ``stack`` has them, which may be tall."""
    return wide if stack.rows <= stack.columns else wide.mT


def run_rounds(
    updates: Sequence[Update],
    whole: Iterable[Task],
    exchanges: Iterable[Exchange],
    products: Products,
) -> None:
    """Does the tasks ``whole``, and the cut matrices of ``updates`` that travel by ``exchanges``.

    Round *i* is on its way to the owners under the products of round *i* - 1, or of what is whole,
    and on its way back under those of round *i* + 1. Collective.
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
    """The matrices that this rank owns in a round."""
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
