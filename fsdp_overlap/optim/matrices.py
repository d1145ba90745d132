"""The matrices that a parameter is made of, and which ranks hold them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from math import prod

Split = int | tuple[int, ...]
"""How many equal parts of a matrix are orthogonalized apart, or the rows of each part."""

Ranges = tuple[tuple[int, int, int], ...]
"""``(rank, start, stop)``, as in a :class:`~fsdp_overlap.tensor.placement.RangeShard`."""


@dataclass(frozen=True)
class Stack:
    """Matrices ``[count, rows, columns]`` that follow each other in a flattened parameter, from
    element ``start`` on."""

    start: int
    count: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, self.rows, self.columns

    def split(self, elements: int) -> Iterator[Stack]:
        """Splits into stacks of at most ``elements`` elements, but of at least one matrix."""
        size = self.rows * self.columns
        count = max(1, elements // size)
        for first in range(0, self.count, count):
            yield Stack(
                self.start + first * size,
                min(count, self.count - first),
                self.rows,
                self.columns,
            )

    @property
    def work(self) -> int:
        """What a Newton-Schulz iteration costs, up to a factor."""
        shorter, longer = sorted((self.rows, self.columns))
        return self.count * longer * shorter**2


@dataclass(frozen=True)
class CutStack:
    """A single matrix that several ranks hold pieces of. ``pieces`` lists ``(rank, first, last)``,
    in elements of the flattened parameter."""

    stack: Stack
    pieces: Ranges


@dataclass(frozen=True, eq=False)
class Division:
    """The matrices of a parameter. ``whole[rank]`` are those that the rank holds all of. ``cut``
    are those that several ranks hold parts of."""

    whole: dict[int, tuple[Stack, ...]]
    cut: tuple[CutStack, ...]


def part_rows(shape: Sequence[int], split: Split) -> tuple[int, ...]:
    """The rows of each part that a matrix is split into. ``shape`` is the shape of its parameter.

    Raises:
        ValueError: ``split`` does not fit the number of rows.
    """
    rows = shape[-2]
    if isinstance(split, int):
        if split < 1 or rows % split:
            raise ValueError(
                f"split={split} does not divide the {rows} rows of a parameter of shape "
                f"{tuple(shape)}; use a divisor, or the rows of each part"
            )
        return (rows // split,) * split
    if any(part < 1 for part in split) or sum(split) != rows:
        raise ValueError(
            f"split={split} makes {sum(split)} rows, but a parameter of shape {tuple(shape)} has "
            f"{rows}"
        )
    return tuple(split)


@cache
def divide(shape: tuple[int, ...], split: Split, ranges: Ranges) -> Division:
    """The matrices of a parameter of ``shape``, which are its last two dimensions, and the ranks
    that hold them. The same arguments give the same object, so plans can be cached by it."""
    if not prod(shape):
        return Division({}, ())
    *_, rows, columns = shape
    parts = part_rows(shape, split)
    starts = [rows_before * columns for rows_before in accumulate(parts, initial=0)]
    matrix = rows * columns
    total = prod(shape)

    def start_of(index: int) -> int:
        whole, part = divmod(index, len(parts))
        return whole * matrix + starts[part]

    def index_at(element: int) -> int:
        whole, rest = divmod(element, matrix)
        return whole * len(parts) + bisect_right(starts, rest) - 1

    def stacks(first: int, last: int) -> tuple[Stack, ...]:
        if len(set(parts)) == 1 and last > first:
            return (Stack(start_of(first), last - first, parts[0], columns),)
        found = []
        for height, run in groupby(range(first, last), lambda index: parts[index % len(parts)]):
            indices = list(run)
            found.append(Stack(start_of(indices[0]), len(indices), height, columns))
        return tuple(found)

    whole = {}
    cut = set()
    for rank, start, stop in ranges:
        first, last = index_at(start), index_at(stop)
        if start_of(first) < start:
            first += 1
        whole[rank] = stacks(first, last)
        if stop < total and start_of(last) < stop:
            cut.add(last)
    cut_stacks = (Stack(start_of(i), 1, parts[i % len(parts)], columns) for i in sorted(cut))
    return Division(whole, tuple(CutStack(one, _pieces(one, ranges)) for one in cut_stacks))


def _pieces(stack: Stack, ranges: Ranges) -> Ranges:
    clipped = ((r, max(first, stack.start), min(last, stack.stop)) for r, first, last in ranges)
    return tuple((rank, first, last) for rank, first, last in clipped if first < last)
