"""Cut a contiguous range of a flattened tensor into N-dimensional boxes, as checkpoints do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from operator import add

import torch


@dataclass(frozen=True)
class Box:
    """A box of a tensor whose elements are contiguous in the flattened tensor.

    ``offsets`` and ``sizes`` have one entry per dimension. ``start`` is where the box begins in the
    flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def moved(self, offsets: tuple[int, ...]) -> Box:
        """Return the same box, with its offsets counted in a larger tensor in which this tensor
        begins at ``offsets``."""
        return replace(self, offsets=tuple(map(add, self.offsets, offsets)))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the fewest boxes that cover elements ``[start, stop)`` of a flattened tensor.

    A range that begins and ends inside rows is the tail of a row, whole rows, and the head of a
    row: at most three boxes for a matrix, and ``2 * ndim - 1`` in general.
    """
    return list(_boxes(shape, start, stop, (), 0))


def bounded_boxes(shape: tuple[int, ...], start: int, stop: int, max_numel: int) -> list[Box]:
    """Return boxes that cover the same range as :func:`boxes`, of at most ``max_numel`` elements.

    The range is cut between rows, unless a row has more than ``max_numel`` elements.
    """
    row = prod(shape[1:])
    step = max(1, max_numel // max(1, row)) * row if row <= max_numel else max_numel
    cuts = [start, *range((start // step + 1) * step, stop, step), stop] if step else [start, stop]
    return [box for first, last in pairwise(cuts) for box in boxes(shape, first, last)]


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, outer: tuple[int, ...], base: int
) -> Iterator[Box]:
    if start >= stop:
        return
    if len(shape) <= 1:
        ones = (1,) * len(outer)
        if shape:
            yield Box((*outer, start), (*ones, stop - start), base + start)
        else:
            yield Box(outer, ones, base)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        top = start // row
        inner = (*outer, top)
        yield from _boxes(shape[1:], start - top * row, stop - top * row, inner, base + top * row)
        return
    if start < first * row:
        inner = (*outer, first - 1)
        skipped = (first - 1) * row
        yield from _boxes(shape[1:], start - skipped, row, inner, base + skipped)
    if first < last:
        offsets = (*outer, first, *(0,) * (len(shape) - 1))
        sizes = (*(1,) * len(outer), last - first, *shape[1:])
        yield Box(offsets, sizes, base + first * row)
    yield from _boxes(shape[1:], 0, stop - last * row, (*outer, last), base + last * row)


def with_own_storage(values: torch.Tensor) -> torch.Tensor:
    """Return a view of ``values``, which are contiguous, that fills a storage of its own.

    Writers copy a tensor that fills only a part of its storage, and keep all such copies until the
    file is done.
    """
    if values.device.type != "cpu":  # writers copy it to the host anyway
        return values
    start = values.storage_offset() * values.element_size()
    part = values.untyped_storage()[start : start + values.nbytes]
    whole = torch.empty(0, dtype=values.dtype)
    return whole.set_(part, 0, values.size(), values.stride())
