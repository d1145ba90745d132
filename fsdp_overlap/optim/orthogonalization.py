"""Orthogonalize matrices in batches, while the exchange of others runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_overlap.comm.comm_streams import CommStream, has_streams
from fsdp_overlap.optim.exchange import Exchange, OwnerAssignment, Part
from fsdp_overlap.optim.matrices import MatrixBatch, MatrixChunk, split_by_numel
from fsdp_overlap.optim.newton_schulz import orthogonalize
from fsdp_overlap.optim.updates import Task, Update, UpdateSlice, momentum_directions, move
from fsdp_overlap.tensor.boxes import boxes

# How many elements are orthogonalized at once: enough to fill an accelerator, and no more than a
# CPU's cache holds.
_ACCELERATOR_ELEMENTS = 1 << 25
_CPU_ELEMENTS = 1 << 18

Copy = tuple[torch.Tensor, torch.Tensor]
"""A target and its source."""


@dataclass(frozen=True)
class MatmulOptions:
    """The device and dtype of matrix products."""

    device: torch.device
    dtype: torch.dtype

    @property
    def batch_elements(self) -> int:
        return _ACCELERATOR_ELEMENTS if has_streams(self.device) else _CPU_ELEMENTS


def tasks_of(
    update: Update, batches: Sequence[MatrixBatch], options: MatmulOptions
) -> Iterator[Task]:
    """Yield tasks for ``batches``, of which this rank holds all elements. A task has no more
    elements than are orthogonalized at once, or is a single matrix."""
    for batch in batches:
        for part in batch.split(max(1, options.batch_elements // (batch.rows * batch.columns))):
            own = UpdateSlice(update, part, part.start, part.stop)
            chunk = MatrixChunk((), part.start, part.stop, part.start, part.columns)
            yield Task(part, update.settings, [(own, chunk)])


def run(tasks: Iterable[Task], options: MatmulOptions) -> None:
    """Run ``tasks``. Matrices of the same shape and settings share batches. A matrix and its
    transpose count as the same shape."""
    kinds: dict[object, list[Task]] = {}
    for task in tasks:
        shape = tuple(sorted((task.matrices.rows, task.matrices.columns)))
        kinds.setdefault((shape, task.settings.steps, task.settings.eps), []).append(task)
    for same_kind in kinds.values():
        for batch in split_by_numel(
            same_kind, options.batch_elements, lambda task: task.matrices.numel
        ):
            _run_batch(batch, options)


def _run_batch(batch: Sequence[Task], options: MatmulOptions) -> None:
    # Tall matrices come last, so that they are transposed together.
    batch = sorted(batch, key=lambda task: task.is_tall)
    wide = sum(task.matrices.count for task in batch if not task.is_tall)
    count = sum(task.matrices.count for task in batch)
    shorter, longer = sorted((batch[0].matrices.rows, batch[0].matrices.columns))
    together = torch.empty((count, shorter, longer), dtype=options.dtype, device=options.device)
    tall = together.new_empty(count - wide, longer, shorter)
    _copy_in(batch, _matrices_of(batch, together[:wide], tall))
    together[wide:] = tall.mT
    settings = batch[0].settings
    done = orthogonalize(together, settings.steps, settings.eps)
    tall.copy_(done[wide:].mT)
    _copy_out(batch, _matrices_of(batch, done[:wide], tall))


def _matrices_of(
    batch: Sequence[Task], wide: torch.Tensor, tall: torch.Tensor
) -> list[torch.Tensor]:
    """Return the matrices of each task, ``[count * rows, columns]``."""
    of_wide = [task.matrices.count for task in batch if not task.is_tall]
    of_tall = [task.matrices.count for task in batch if task.is_tall]
    return [part.flatten(0, 1) for part in (*wide.split(of_wide), *tall.split(of_tall))]


def _copy_in(batch: Sequence[Task], matrices: Sequence[torch.Tensor]) -> None:
    """Copy the directions of all chunks into ``matrices``, those of each task."""
    own = [item for task in batch for item in task.own]
    directions = iter(momentum_directions([part for part, _ in own]))
    copies: list[Copy] = []
    for task, target in zip(batch, matrices, strict=True):
        chunks = [(next(directions), chunk) for _, chunk in task.own]
        for values, chunk in (*chunks, *task.received):
            for place, first, last in chunk_views(target, chunk):
                copies.append((place, values[first:last].view(place.shape)))
    copy_all(copies)


def _copy_out(batch: Sequence[Task], matrices: Sequence[torch.Tensor]) -> None:
    """Update the slices that this rank holds, and copy the results for which others wait."""
    copies: list[Copy] = []
    slices, values = [], []
    for task, source in zip(batch, matrices, strict=True):
        for part, chunk in task.own:
            for place, first, last in chunk_views(source, chunk):
                slices.append(part._replace(first=part.first + first, last=part.first + last))
                values.append(place.reshape(-1))
        for target, chunk in task.results:
            for place, first, last in chunk_views(source, chunk):
                copies.append((target[first:last].view(place.shape), place))
    move(slices, values)
    copy_all(copies)


def copy_all(copies: Sequence[Copy]) -> None:
    """Make all copies together: on a GPU in few launches."""
    if copies:
        targets, sources = zip(*copies, strict=True)
        torch._foreach_copy_(targets, sources)


def chunk_views(
    matrices: torch.Tensor, chunk: MatrixChunk
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield where ``chunk`` lies in ``matrices [rows, columns]``: views, each with the elements of
    the chunk that belong there."""
    first, last = chunk.first - chunk.start, chunk.last - chunk.start
    if chunk.columns == matrices.shape[1]:
        begin = chunk.row * chunk.columns + first
        yield matrices.view(-1)[begin : begin + last - first], 0, last - first
        return
    shape = matrices.shape[0] - chunk.row, chunk.columns
    for box in boxes(shape, first, last):
        row, column = chunk.row + box.offsets[0], chunk.column + box.offsets[1]
        view = matrices[row : row + box.sizes[0], column : column + box.sizes[1]]
        yield view, box.start - first, box.start - first + box.numel


class DirectionExchange(Exchange):
    """Gives owners the directions of matrices, and the holders of their parts the results."""

    label = "Muon"

    def __init__(
        self,
        updates: Sequence[Update],
        options: MatmulOptions,
        assignments: tuple[OwnerAssignment, ...],
        group: dist.ProcessGroup,
        comm_stream: CommStream,
    ) -> None:
        super().__init__(assignments, group, comm_stream, options.dtype, options.device)
        self._updates = updates
        """By their index in the assignments."""
        self._options = options

    def _pack(self, chunks: Sequence[Part]) -> None:
        if slices := [self._slice(one, chunk) for one, chunk, _ in chunks]:
            directions = momentum_directions(slices)
            copy_all([(view[0], each) for (*_, view), each in zip(chunks, directions, strict=True)])

    def _step(self, received: Sequence[Part], results: Sequence[Part]) -> None:
        tasks = {
            one: Task(one.matrices, self._updates[one.parameter].settings) for one in self._owned
        }
        for one, chunk in self._own_chunks():
            tasks[one].own.append((self._slice(one, chunk), chunk))
        for one, chunk, view in received:
            tasks[one].received.append((view[0], chunk))
        for one, chunk, view in results:
            tasks[one].results.append((view[0], chunk))
        run(tasks.values(), self._options)

    def _unpack(self, chunks: Sequence[Part]) -> None:
        slices = [self._slice(one, chunk) for one, chunk, _ in chunks]
        move(slices, [view[0] for *_, view in chunks])

    def _slice(self, one: OwnerAssignment, chunk: MatrixChunk) -> UpdateSlice:
        return UpdateSlice(self._updates[one.parameter], one.matrices, chunk.first, chunk.last)
