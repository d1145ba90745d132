"""Sketches: a digest of a tensor's bits, its norm, and random projections of its values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod, sqrt
from typing import NamedTuple

import torch

from fsdp_overlap.comm.comm_streams import has_streams
from fsdp_overlap.weights.chunks import Chunk, full_chunk

PROJECTIONS = 16
_COLUMNS = 1024
_HOST_ROWS = 128
"""So that a part's products stay in a core's cache."""
_DEVICE_ROWS = 1 << 14
_KNOWN_ROWS = 1 << 17
_BATCH = 128
"""How many tensors' columns are summed at once, each of which has 16 KiB until then."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGESTS = 1 << 64


@dataclass(frozen=True)
class Sketch:
    """What is kept of a tensor, or of a part of one. The sketch of a tensor is the sum of those of
    its parts, however it is cut, so tensors that are sharded in different ways can be compared.

    Attributes:
        digest: differs if a bit differs. It is exact, and depends on the dtype.
        squares: the sum of squares, in about single precision.
        projections: sums of the values by random signs. The mean square of the differences of
            those of two tensors estimates the squared norm of their difference, within a third.
    """

    digest: int
    squares: float
    projections: tuple[float, ...]

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return sqrt(self.squares) if self.squares == self.squares else float("nan")

    def __add__(self, other: Sketch) -> Sketch:
        return Sketch(
            (self.digest + other.digest) % _DIGESTS,
            self.squares + other.squares,
            tuple(a + b for a, b in zip(self.projections, other.projections, strict=True)),
        )

    def distance(self, other: Sketch, scale: float = 1.0) -> float:
        """Return an estimate of the norm of ``scale`` times this tensor less the ``other``."""
        both = zip(self.projections, other.projections, strict=True)
        return sqrt(sum((scale * a - b) ** 2 for a, b in both) / PROJECTIONS)


class SketchBuffer:
    """Computes sketches on the device of the tensors, and brings many to the host at once."""

    def __init__(self) -> None:
        self._count = 0
        self._factors: dict[torch.device, _Factors] = {}
        self._sums: dict[torch.device, list[_Sums]] = {}
        self._packed: list[tuple[list[int], torch.Tensor]] = []

    def add(self, values: torch.Tensor, shape: Sequence[int], chunk: Chunk) -> int:
        """Begin the sketch of ``values``, which are the ``chunk`` of a tensor of ``shape``. Return
        its index in what :meth:`finish` returns."""
        sums = self._sums.setdefault(values.device, [])
        factors = self._factors_on(values.device)
        with torch.autocast(values.device.type, enabled=False):  # which would round the sums
            found = _sums_of_columns(values.detach(), shape, chunk, factors)
        sums.append(_Sums(self._count, *found))
        if len(sums) == _BATCH:
            self._pack(values.device)
        self._count += 1
        return self._count - 1

    def finish(self) -> list[Sketch]:
        """Return the sketches that were begun, and forget them. Waits for the device."""
        for device in list(self._sums):
            self._pack(device)
        sketches: dict[int, Sketch] = {}
        for indices, packed in self._packed:
            rows = packed.cpu()
            digests, values = rows[:, 0].tolist(), rows[:, 1:].contiguous().view(torch.float64)
            for index, digest, (squares, *projections) in zip(
                indices, digests, values.tolist(), strict=True
            ):
                sketches[index] = Sketch(digest % _DIGESTS, squares, tuple(projections))
        self._packed.clear()
        self._count = 0
        return [sketches[index] for index in range(len(sketches))]

    def _factors_on(self, device: torch.device) -> _Factors:
        """Return the factors on a device, to which they are copied once: that waits for it."""
        if device not in self._factors:
            self._factors[device] = _Factors(*(each.to(device) for each in _factors()))
        return self._factors[device]

    @torch.no_grad()
    def _pack(self, device: torch.device) -> None:
        """Sum the columns of many tensors: to digest, sum of squares and projections as int64, the
        latter two as the bits of float64."""
        sums = self._sums.pop(device)
        factors = self._factors_on(device)
        digests = torch.stack([each.digests for each in sums]) * factors.columns
        squares = torch.stack([each.squares for each in sums])[:, None]
        projections = torch.stack([each.values for each in sums]) @ factors.column_signs
        values = torch.cat((squares, projections), 1).view(torch.int64)
        self._packed.append(
            ([each.number for each in sums], torch.cat((digests.sum(1)[:, None], values), 1))
        )


class _Factors(NamedTuple):
    """Factors of bits, odd, and signs of values: of the first rows, which most tensors have no more
    of, and of columns, which have a sign in each projection."""

    rows: torch.Tensor
    row_signs: torch.Tensor
    columns: torch.Tensor
    column_signs: torch.Tensor

    def of_rows(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if first + count > _KNOWN_ROWS:
            return _row_factors(torch.arange(first, first + count, device=self.rows.device))
        return self.rows[first : first + count], self.row_signs[first : first + count]


class _Sums(NamedTuple):
    """The sums of a tensor's columns, on its device."""

    number: int
    digests: torch.Tensor
    values: torch.Tensor
    squares: torch.Tensor


def sketch_of(values: torch.Tensor) -> Sketch:
    """Return the sketch of a full tensor."""
    buffer = SketchBuffer()
    buffer.add(values, values.shape, full_chunk(values.shape))
    return buffer.finish()[0]


@torch.no_grad()
def _sums_of_columns(
    values: torch.Tensor, shape: Sequence[int], chunk: Chunk, factors: _Factors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums of bits and of values in each column, and the sum of squares. The element at
    position ``p`` of the flattened tensor has the factors of row ``p // _COLUMNS`` and of column
    ``p % _COLUMNS``."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
        shape, chunk = (*shape, 2), Chunk((*chunk.offsets, 0), (*chunk.sizes, 2))
    device = values.device
    digests = torch.zeros(_COLUMNS, dtype=torch.int64, device=device)
    sums = torch.zeros(_COLUMNS, dtype=torch.float64, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    first = chunk.first_position(shape)
    flat = values.reshape(-1)
    if first is None:
        positions = _positions(shape, chunk, device)
        for part, at in zip(flat.split(1 << 20), positions.split(1 << 20), strict=True):
            odd, signs = _row_factors(at // _COLUMNS)
            bits, numbers = _bits(part), _numbers(part)
            digests.index_add_(0, at % _COLUMNS, _products(bits, odd).long())
            sums.index_add_(0, at % _COLUMNS, (numbers * signs).double())
            squares += numbers.square().sum(dtype=torch.float64)
    else:
        for part, row, column in _rows(flat, first):
            rows, width = part.shape
            odd, signs = factors.of_rows(row, rows)
            bits, numbers = _bits(part), _numbers(part)
            among = slice(column, column + width)
            digests[among] += _products(bits, odd[:, None]).sum(0, dtype=torch.int64)
            sums[among] += signs.to(numbers.dtype) @ numbers
            squares += numbers.reshape(-1).dot(numbers.reshape(-1))
    return digests, sums, squares


def _rows(flat: torch.Tensor, first: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield parts of ``flat``, whose first element is at position ``first``, as matrices, each with
    its first row and its first column."""
    at = 0
    most = _COLUMNS * (_DEVICE_ROWS if has_streams(flat.device) else _HOST_ROWS)
    while at < flat.numel():
        row, column = divmod(first + at, _COLUMNS)
        left = flat.numel() - at
        if column or left < _COLUMNS:
            size = min(left, _COLUMNS - column)
            yield flat[at : at + size][None], row, column
        else:
            size = min(left - left % _COLUMNS, most)
            yield flat[at : at + size].view(-1, _COLUMNS), row, 0
        at += size


def _bits(values: torch.Tensor) -> torch.Tensor:
    bits = values.view(_BITS[values.element_size()])
    return bits if bits.element_size() >= 4 else bits.int()


def _products(bits: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    # Signs are in the upper half alone, where two that change would cancel out.
    products = bits >> 4 * bits.element_size()
    products += bits
    products *= odd.to(bits.dtype)
    return products


def _numbers(values: torch.Tensor) -> torch.Tensor:
    is_wide = values.dtype in (torch.float64, torch.int64)
    return values.to(torch.float64 if is_wide else torch.float32)


def _hashed(numbers: torch.Tensor) -> torch.Tensor:
    """Return 63 random bits for each number, the same on every device and version."""
    for factor in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        numbers = numbers * factor
        numbers = numbers ^ ((numbers >> 29) & 0x7FFFFFFFF)
    return numbers & 0x7FFFFFFFFFFFFFFF


def _row_factors(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an odd factor and a sign of each row."""
    hashed = _hashed(rows + 1)
    return (hashed & 0x7FFFFFFF) | 1, (1 - 2 * ((hashed >> 40) & 1)).float()


@cache
def _factors() -> _Factors:
    """Return the factors on the host."""
    columns = torch.arange(_COLUMNS)
    grid = columns[:, None] * PROJECTIONS + torch.arange(PROJECTIONS) + (1 << 41)
    signs = 1 - 2 * ((_hashed(grid) >> 40) & 1)
    rows = _row_factors(torch.arange(_KNOWN_ROWS))
    return _Factors(*rows, _hashed(columns + (1 << 40)) | 1, signs.double())


def _positions(shape: Sequence[int], chunk: Chunk, device: torch.device) -> torch.Tensor:
    positions = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, size) in enumerate(zip(*chunk, strict=True)):
        along = torch.arange(offset, offset + size, device=device) * prod(shape[dim + 1 :])
        positions = positions[..., None] + along
    return positions.reshape(-1)
