"""Orthogonalizes matrices in batches, while others travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_overlap.comm.streams import has_streams
from fsdp_overlap.optim.exchange import Exchange, Owned
from fsdp_overlap.optim.matrices import Piece, Shared, Stack
from fsdp_overlap.optim.newton_schulz import orthogonalize
from fsdp_overlap.optim.updates import Part, Settings, Update, directions, move
from fsdp_overlap.tensor.boxes import boxes

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
    """Matrices to orthogonalize. Each piece of them is one that this rank holds (``own``), one that
    came from another rank (``received``), or one that another rank waits for (``sent_back``)."""

    matrices: Stack | Shared
    settings: Settings
    own: Sequence[tuple[Part, Piece]]
    received: Sequence[tuple[torch.Tensor, Piece]] = ()
    sent_back: Sequence[tuple[torch.Tensor, Piece]] = ()

    @property
    def is_tall(self) -> bool:
        return self.matrices.rows > self.matrices.columns


def tasks_of(update: Update, stacks: Sequence[Stack], products: Products) -> Iterator[Task]:
    """Tasks for ``stacks``, which this rank holds all of. A task has no more elements than a batch,
    or is a single matrix."""
    for stack in stacks:
        for each in stack.split(products.batch_elements):
            part = Part(update, each, each.start, each.stop)
            piece = Piece((), each.start, each.stop, each.start, each.columns)
            yield Task(each, update.settings, [(part, piece)])


def task_of(owned: Owned) -> Task:
    return Task(
        owned.parcel.matrices,
        owned.update.settings,
        owned.own,
        [(each.view, each.piece) for each in owned.received],
        [(each.view, each.piece) for each in owned.sent_back],
    )


def run(tasks: Iterable[Task], products: Products) -> None:
    """Does ``tasks``. Matrices of the same shape and settings share batches. A matrix and its
    transpose count as the same shape."""
    kinds: dict[object, list[Task]] = {}
    for task in tasks:
        shape = tuple(sorted((task.matrices.rows, task.matrices.columns)))
        kinds.setdefault((shape, task.settings.steps, task.settings.eps), []).append(task)
    for alike in kinds.values():
        for batch in _batches(alike, products.batch_elements):
            _run_batch(batch, products)


def _batches(tasks: Sequence[Task], most: int) -> Iterator[list[Task]]:
    batch: list[Task] = []
    elements = 0
    for task in tasks:
        if batch and elements + task.matrices.numel > most:
            yield batch
            batch, elements = [], 0
        batch.append(task)
        elements += task.matrices.numel
    yield batch


@dataclass
class Copies:
    """Copies between memory of any kind, done together: on a GPU in few launches."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.targets.append(target)
        self.sources.append(source)

    def run(self) -> None:
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


def _run_batch(batch: Sequence[Task], products: Products) -> None:
    # Tall matrices are transposed together, and so stand together.
    batch = sorted(batch, key=lambda task: task.is_tall)
    wide = sum(task.matrices.count for task in batch if not task.is_tall)
    count = sum(task.matrices.count for task in batch)
    shorter, longer = sorted((batch[0].matrices.rows, batch[0].matrices.columns))
    together = torch.empty((count, shorter, longer), dtype=products.dtype, device=products.device)
    tall = together.new_empty(count - wide, longer, shorter)
    _fill(batch, _slots(batch, together[:wide], tall))
    together[wide:] = tall.mT
    settings = batch[0].settings
    done = orthogonalize(together, settings.steps, settings.eps)
    tall.copy_(done[wide:].mT)
    _give(batch, _slots(batch, done[:wide], tall))


def _slots(batch: Sequence[Task], wide: torch.Tensor, tall: torch.Tensor) -> list[torch.Tensor]:
    """The place of each task's matrices, ``[count * rows, columns]``."""
    of_wide = [task.matrices.count for task in batch if not task.is_tall]
    of_tall = [task.matrices.count for task in batch if task.is_tall]
    slots = (*wide.split(of_wide), *tall.split(of_tall))
    return [slot.flatten(0, 1) for slot in slots]


def _fill(batch: Sequence[Task], slots: Sequence[torch.Tensor]) -> None:
    """Copies the directions of all pieces to where they belong in their matrices."""
    copies = Copies()
    own = [
        (part, piece, slot)
        for task, slot in zip(batch, slots, strict=True)
        for part, piece in task.own
    ]
    for (_, piece, slot), direction in zip(
        own, directions([part for part, _, _ in own]), strict=True
    ):
        for place, first, last in places(slot, piece):
            copies.add(place, direction[first:last].view(place.shape))
    for task, slot in zip(batch, slots, strict=True):
        for values, piece in task.received:
            for place, first, last in places(slot, piece):
                copies.add(place, values[first:last].view(place.shape))
    copies.run()


def _give(batch: Sequence[Task], slots: Sequence[torch.Tensor]) -> None:
    """Moves the parts that this rank holds, and copies what others wait for."""
    copies = Copies()
    parts, values = [], []
    for task, slot in zip(batch, slots, strict=True):
        for part, piece in task.own:
            for place, first, last in places(slot, piece):
                parts.append(part._replace(first=part.first + first, last=part.first + last))
                values.append(place.reshape(-1))
        for target, piece in task.sent_back:
            for place, first, last in places(slot, piece):
                copies.add(target[first:last].view(place.shape), place)
    move(parts, values)
    copies.run()


def places(matrices: torch.Tensor, piece: Piece) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Where ``piece`` lies in ``matrices [rows, columns]``: views, each with the elements of the
    piece that belong there."""
    first, last = piece.first - piece.start, piece.last - piece.start
    if piece.columns == matrices.shape[1]:
        begin = piece.row * piece.columns + first
        yield matrices.view(-1)[begin : begin + last - first], 0, last - first
        return
    shape = matrices.shape[0] - piece.row, piece.columns
    for box in boxes(shape, first, last):
        rows, columns = (
            slice(offset + start, offset + start + size)
            for offset, start, size in zip(
                (piece.row, piece.column), box.offsets, box.sizes, strict=True
            )
        )
        yield matrices[rows, columns], box.start - first, box.start - first + box.numel


def run_rounds(whole: Iterable[Task], exchanges: Iterable[Exchange], products: Products) -> None:
    """Does the tasks ``whole``, and those for the matrices that travel by ``exchanges``. Collective
    over the groups of the exchanges.

    Round *i* travels to the owners while the products of round *i* - 1 run, and travels back while
    those of round *i* + 1 run. The first round travels while the products of ``whole`` run.
    """
    coming = iter(exchanges)
    current = next(coming, None)
    before: Exchange | None = None
    if current is not None:
        current.send()
    run(whole, products)
    while current is not None:
        following = next(coming, None)
        if following is not None:
            following.send()
        run(map(task_of, current.receive()), Products(current.device, current.dtype))
        current.send_back()
        if before is not None:
            before.finish()
        before, current = current, following
    if before is not None:
        before.finish()
