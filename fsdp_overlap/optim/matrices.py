"""The matrices of a parameter, and which ranks hold them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import TypeVar

from fsdp_overlap.tensor.tiles import Tile

T = TypeVar("T")

Split = int | tuple[int, ...]
"""The parts of a matrix that are orthogonalized separately: how many equal ones, or the rows of
each."""


@dataclass(frozen=True)
class ShardRange:
    """The elements ``[start, stop)`` of a flattened tile that one rank holds of a parameter."""

    tile: Tile
    start: int
    stop: int


@dataclass(frozen=True)
class MatrixBatch:
    """Contiguous matrices ``[count, rows, columns]`` from element ``start`` of a flattened tile."""

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

    def split(self, count: int) -> Iterator[MatrixBatch]:
        """Yield batches of ``count`` matrices each. The last one may have fewer."""
        for first in range(0, self.count, count):
            start = self.start + first * self.rows * self.columns
            yield MatrixBatch(start, min(count, self.count - first), self.rows, self.columns)


@dataclass(frozen=True)
class MatrixChunk:
    """Elements ``[first, last)`` of a flattened tile, which belong to a shared matrix.

    Each of ``ranks`` holds all of them. The tile's part of the matrix begins at element ``start``
    of the flattened tile, has ``columns`` columns, and lies at ``row`` and ``column`` of the
    matrix.
    """

    ranks: tuple[int, ...]
    first: int
    last: int
    start: int
    columns: int
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class SharedMatrices:
    """Matrices ``[count, rows, columns]`` that one rank orthogonalizes for several: one matrix in
    chunks, or a batch that each of several ranks holds."""

    count: int
    rows: int
    columns: int
    chunks: tuple[MatrixChunk, ...]

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.columns


def flops_of(matrices: MatrixBatch | SharedMatrices) -> int:
    """Return the cost of a Newton-Schulz iteration, up to a factor."""
    shorter, longer = sorted((matrices.rows, matrices.columns))
    return matrices.count * longer * shorter**2


def split_by_numel(
    items: Iterable[T], max_numel: int, numel_of: Callable[[T], int]
) -> Iterator[list[T]]:
    """Yield ``items`` in lists of at most ``max_numel`` elements, or of a single item."""
    members: list[T] = []
    numel = 0
    for item in items:
        if members and numel + numel_of(item) > max_numel:
            yield members
            members, numel = [], 0
        members.append(item)
        numel += numel_of(item)
    if members:
        yield members


@dataclass(frozen=True, eq=False)
class MatrixPartition:
    """The matrices of a parameter: ``unshared[rank]``, of which that rank alone holds all elements,
    and ``shared``, all others. Ranks that hold the same elements are numbered:
    ``replicas[rank]``."""

    unshared: dict[int, tuple[MatrixBatch, ...]]
    shared: tuple[SharedMatrices, ...]
    replicas: tuple[int, ...]
    tile: Tile | None = None
    """The tile that has all the matrices uncut. ``None`` if tiles cut them."""


def matrix_number(shape: Sequence[int], split: Split, tile: Tile, start: int) -> int:
    """Return the number of a matrix among all those of a parameter of ``shape``, wherever they lie.
    ``start`` is the matrix's first element in the flattened ``tile``, which cuts no matrix."""
    before, first = divmod(start, tile.shape[-2] * tile.shape[-1])
    index, stride = 0, 1
    for size, part, offset in zip(
        shape[-3::-1], tile.shape[-3::-1], tile.offsets[-3::-1], strict=True
    ):
        before, place = divmod(before, part)
        index += (place + offset) * stride
        stride *= size
    rows = [*accumulate(part_rows(shape, split), initial=0)]
    return index * (len(rows) - 1) + rows.index(first // tile.shape[-1] + tile.offsets[-2])


def part_rows(shape: Sequence[int], split: Split) -> tuple[int, ...]:
    """Return the rows of each part of a matrix. ``shape`` is that of its parameter.

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


def uncut_part_rows(shape: Sequence[int], split: Split, tile: Tile) -> tuple[int, ...] | None:
    """Return the rows of each part of a matrix in ``tile``. ``None`` if the tile cuts a part."""
    if not tile.numel:
        return ()
    parts = part_rows(shape, split)
    starts = [*accumulate(parts, initial=0)]
    first, last = tile.offsets[-2], tile.offsets[-2] + tile.shape[-2]
    if tile.shape[-1] != shape[-1] or first not in starts or last not in starts:
        return None
    return parts[starts.index(first) : starts.index(last)]


@cache
def partition_matrices(
    shape: tuple[int, ...], split: Split, ranges: tuple[ShardRange, ...]
) -> MatrixPartition:
    """Return which ranks hold which matrices of a parameter of ``shape``, which are its last two
    dimensions. ``ranges`` has what each rank holds. The same arguments give the same object, so
    plans can be cached by it."""
    ranks_of: dict[ShardRange, list[int]] = {}
    for rank, shard in enumerate(ranges):
        ranks_of.setdefault(shard, []).append(rank)
    replicas = tuple(ranks_of[shard].index(rank) for rank, shard in enumerate(ranges))
    held = {shard: tuple(ranks) for shard, ranks in ranks_of.items() if shard.start < shard.stop}
    tiles = list(dict.fromkeys(shard.tile for shard in held))
    if not tiles:
        return MatrixPartition({}, (), replicas)
    if len(tiles) == 1 and (parts := uncut_part_rows(shape, split, tiles[0])) is not None:
        return _partition_tile(tiles[0], parts, held, replicas)
    return MatrixPartition({}, tuple(_across_tiles(shape, split, tiles, held)), replicas)


def _partition_tile(
    tile: Tile,
    parts: tuple[int, ...],
    held: dict[ShardRange, tuple[int, ...]],
    replicas: tuple[int, ...],
) -> MatrixPartition:
    """Return the partition of a tile that cuts no matrix part. ``parts`` are their rows."""
    *_, rows, columns = tile.shape
    starts = [rows_before * columns for rows_before in accumulate(parts, initial=0)]
    matrix = rows * columns

    def start_of(index: int) -> int:
        before, part = divmod(index, len(parts))
        return before * matrix + starts[part]

    def index_at(element: int) -> int:
        before, rest = divmod(element, matrix)
        return before * len(parts) + bisect_right(starts, rest) - 1

    def batches(first: int, last: int) -> Iterator[MatrixBatch]:
        if len(set(parts)) == 1 and last > first:
            yield MatrixBatch(start_of(first), last - first, parts[0], columns)
            return
        for height, run in groupby(range(first, last), lambda index: parts[index % len(parts)]):
            indices = list(run)
            yield MatrixBatch(start_of(indices[0]), len(indices), height, columns)

    unshared: dict[int, tuple[MatrixBatch, ...]] = {}
    shared: list[SharedMatrices] = []
    cut = set()
    for shard, ranks in held.items():
        first, last = index_at(shard.start), index_at(shard.stop)
        if start_of(first) < shard.start:
            cut.add(first)
            first += 1
        if shard.stop < tile.numel and start_of(last) < shard.stop:
            cut.add(last)
        if len(ranks) == 1:
            unshared[ranks[0]] = tuple(batches(first, last))
            continue
        for batch in batches(first, last):  # each of the ranks orthogonalizes a part of it
            for part in batch.split(-(-batch.count // len(ranks))):
                chunk = MatrixChunk(ranks, part.start, part.stop, part.start, columns)
                shared.append(SharedMatrices(*part.shape, (chunk,)))
    for index in sorted(cut):
        start, height = start_of(index), parts[index % len(parts)]
        stop = start + height * columns
        chunks = tuple(
            MatrixChunk(ranks, max(shard.start, start), min(shard.stop, stop), start, columns)
            for shard, ranks in held.items()
            if shard.start < stop and start < shard.stop
        )
        shared.append(SharedMatrices(1, height, columns, chunks))
    return MatrixPartition(unshared, tuple(shared), replicas, tile)


def _across_tiles(
    shape: tuple[int, ...],
    split: Split,
    tiles: Sequence[Tile],
    held: dict[ShardRange, tuple[int, ...]],
) -> Iterator[SharedMatrices]:
    """Yield the matrices that ``tiles`` cut, all of which have parts of the same matrices."""
    starts = [*accumulate(part_rows(shape, split), initial=0)]
    for index in range(prod(tiles[0].shape[:-2])):
        for top, bottom in pairwise(starts):
            chunks = []
            for tile in tiles:
                above, columns = tile.offsets[-2], tile.shape[-1]
                first_row = max(top, above)
                last_row = max(first_row, min(bottom, above + tile.shape[-2]))
                start = (index * tile.shape[-2] + first_row - above) * columns
                stop = start + (last_row - first_row) * columns
                for shard, ranks in held.items():
                    first, last = max(shard.start, start), min(shard.stop, stop)
                    if shard.tile == tile and first < last:
                        place = first_row - top, tile.offsets[-1]
                        chunks.append(MatrixChunk(ranks, first, last, start, columns, *place))
            yield SharedMatrices(1, bottom - top, shape[-1], tuple(chunks))
