"""Cuts a contiguous range of a flattened tensor into N-dimensional boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from operator import add


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
        """The same box, with its offsets counted in a larger tensor in which this tensor begins at
        ``offsets``."""
        return replace(self, offsets=tuple(map(add, self.offsets, offsets)))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The fewest boxes that cover elements ``[start, stop)`` of a flattened tensor of ``shape``.

    A range that begins and ends inside rows is the tail of a row, whole rows, and the head of a
    row: at most three boxes for a matrix, and ``2 * ndim - 1`` in general.
    """
    return list(_boxes(shape, start, stop, (), 0))


def pieces(shape: tuple[int, ...], start: int, stop: int, most: int) -> list[Box]:
    """Boxes that cover the same range as :func:`boxes`, of at most ``most`` elements each.

    The range is cut between rows, unless a row has more than ``most`` elements.
    """
    row = prod(shape[1:])
    step = max(1, most // max(1, row)) * row if row <= most else most
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
