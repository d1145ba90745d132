"""The matrices that a parameter is made of, and which ranks hold them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise
from math import prod

from fsdp_overlap.tensor.placement import Tile

Split = int | tuple[int, ...]
"""How many equal parts of a matrix are orthogonalized apart, or the rows of each part."""


@dataclass(frozen=True)
class Holding:
    """Elements ``[start, stop)`` of a flattened tile: what one rank holds of a parameter."""

    tile: Tile
    start: int
    stop: int


@dataclass(frozen=True)
class Stack:
    """Matrices ``[count, rows, columns]``. They follow each other in a flattened tile, from element
    ``start`` on."""

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
        """Stacks of at most ``elements`` elements each, but of at least one matrix."""
        return self.in_counts(max(1, elements // (self.rows * self.columns)))

    def in_counts(self, count: int) -> Iterator[Stack]:
        """Stacks of ``count`` matrices each. The last one may have fewer."""
        for first in range(0, self.count, count):
            start = self.start + first * self.rows * self.columns
            yield Stack(start, min(count, self.count - first), self.rows, self.columns)


@dataclass(frozen=True)
class Piece:
    """Elements ``[first, last)`` of a flattened tile, of a matrix that several ranks share.

    Each of ``holders`` has all of them. The tile's part of the matrix begins at element ``start``
    of the flattened tile, has ``columns`` columns, and lies in the matrix at ``row`` and
    ``column``.
    """

    holders: tuple[int, ...]
    first: int
    last: int
    start: int
    columns: int
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class Shared:
    """Matrices ``[count, rows, columns]`` that one rank orthogonalizes for several: one matrix in
    pieces, or a stack of which each holder has a copy."""

    count: int
    rows: int
    columns: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.columns


def work_of(matrices: Stack | Shared) -> int:
    """What a Newton-Schulz iteration costs, up to a factor."""
    shorter, longer = sorted((matrices.rows, matrices.columns))
    return matrices.count * longer * shorter**2


@dataclass(frozen=True, eq=False)
class Division:
    """The matrices of a parameter. ``whole[rank]`` are those that this rank alone holds, and holds
    all of. ``shared`` are all others. Ranks that hold the same are numbered: ``copies[rank]``."""

    whole: dict[int, tuple[Stack, ...]]
    shared: tuple[Shared, ...]
    copies: tuple[int, ...]


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


def whole_parts(shape: Sequence[int], split: Split, tile: Tile) -> tuple[int, ...] | None:
    """The rows of each part that ``tile`` has of a matrix; ``None`` if it cuts one."""
    if not tile.numel:
        return ()
    parts = part_rows(shape, split)
    starts = [*accumulate(parts, initial=0)]
    first, last = tile.offsets[-2], tile.offsets[-2] + tile.shape[-2]
    if tile.shape[-1] != shape[-1] or first not in starts or last not in starts:
        return None
    return parts[starts.index(first) : starts.index(last)]


@cache
def divide(shape: tuple[int, ...], split: Split, holdings: tuple[Holding, ...]) -> Division:
    """The matrices of a parameter of ``shape``, which are its last two dimensions, and the ranks
    that hold them. ``holdings`` has an entry for each rank. The same arguments give the same
    object, so plans can be cached by it."""
    by_part: dict[Holding, list[int]] = {}
    for rank, holding in enumerate(holdings):
        by_part.setdefault(holding, []).append(rank)
    copies = tuple(by_part[holding].index(rank) for rank, holding in enumerate(holdings))
    held = {part: tuple(ranks) for part, ranks in by_part.items() if part.start < part.stop}
    tiles = list(dict.fromkeys(part.tile for part in held))
    if not tiles:
        return Division({}, (), copies)
    if len(tiles) == 1 and (parts := whole_parts(shape, split, tiles[0])) is not None:
        return _divide_tile(tiles[0].shape, parts, held, copies)
    return Division({}, tuple(_put_together(shape, split, tiles, held)), copies)


def _divide_tile(
    shape: tuple[int, ...],
    parts: tuple[int, ...],
    held: dict[Holding, tuple[int, ...]],
    copies: tuple[int, ...],
) -> Division:
    """Divides a tile of whole matrices, each of which has ``parts``."""
    *_, rows, columns = shape
    starts = [rows_before * columns for rows_before in accumulate(parts, initial=0)]
    matrix = rows * columns

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

    whole: dict[int, tuple[Stack, ...]] = {}
    shared: list[Shared] = []
    cut = set()
    for part, holders in held.items():
        first, last = index_at(part.start), index_at(part.stop)
        if start_of(first) < part.start:
            cut.add(first)
            first += 1
        if part.stop < prod(shape) and start_of(last) < part.stop:
            cut.add(last)
        if len(holders) == 1:
            whole[holders[0]] = stacks(first, last)
            continue
        for stack in stacks(first, last):  # for each holder a part of it
            for each in stack.in_counts(-(-stack.count // len(holders))):
                piece = Piece(holders, each.start, each.stop, each.start, columns)
                shared.append(Shared(*each.shape, (piece,)))
    for index in sorted(cut):
        start, height = start_of(index), parts[index % len(parts)]
        stop = start + height * columns
        pieces = tuple(
            Piece(holders, max(part.start, start), min(part.stop, stop), start, columns)
            for part, holders in held.items()
            if part.start < stop and start < part.stop
        )
        shared.append(Shared(1, height, columns, pieces))
    return Division(whole, tuple(shared), copies)


def _put_together(
    shape: tuple[int, ...],
    split: Split,
    tiles: Sequence[Tile],
    held: dict[Holding, tuple[int, ...]],
) -> Iterator[Shared]:
    """Puts matrices together from tiles that cut them. All tiles have the same matrices."""
    starts = [*accumulate(part_rows(shape, split), initial=0)]
    holdings = {tile: [part for part in held if part.tile == tile] for tile in tiles}
    for index in range(prod(tiles[0].shape[:-2])):
        for top, bottom in pairwise(starts):
            pieces = []
            for tile in tiles:
                above, columns = tile.offsets[-2], tile.shape[-1]
                first_row = max(top, above)
                last_row = max(first_row, min(bottom, above + tile.shape[-2]))
                start = (index * tile.shape[-2] + first_row - above) * columns
                stop = start + (last_row - first_row) * columns
                pieces += [
                    Piece(
                        held[part],
                        max(part.start, start),
                        min(part.stop, stop),
                        start,
                        columns,
                        first_row - top,
                        tile.offsets[-1],
                    )
                    for part in holdings[tile]
                    if max(part.start, start) < min(part.stop, stop)
                ]
            yield Shared(1, bottom - top, shape[-1], tuple(pieces))
