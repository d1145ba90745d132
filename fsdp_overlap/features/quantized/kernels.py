"""Quantized all-gathers and reductions by Triton kernels: one launch encodes all runs of a param
group, and one decodes or sums what all ranks sent.

Where blocks are of different widths, or some elements are not quantized, it is a launch for each
kind. Imported only where Triton is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from triton import next_power_of_2

from fsdp_overlap.comm.collectives import RangeCollectives, own_range
from fsdp_overlap.features.quantized.codes import LARGEST, encode
from fsdp_overlap.features.quantized.collectives import (
    QuantizedFormat,
    QuantizedGather,
    QuantizedReduction,
    own_rows,
)
from fsdp_overlap.features.quantized.plan import QuantizedPlan, QuantizedRun, UnquantizedRange
from fsdp_overlap.features.quantized.triton_kernels import (
    FIELDS,
    decode_blocks,
    encode_blocks,
    measure_blocks,
)
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import ParamGroupPlan

_TILE = 4096
"""The elements that a program of a kernel works on."""
_ALIGN = 16
_WIDEST = 4 * _TILE
"""The largest block that a program encodes by itself. Others are read twice."""

# Dtypes whose elements kernels take as integers.
_AS_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


class PlacedRun(NamedTuple):
    """Where a run lies: its first value, code and scale, each in elements, and its blocks."""

    value: int
    code: int
    scale: int
    shape: tuple[int, int, int, int]

    @classmethod
    def of(cls, run: QuantizedRun, value: int = 0, code: int = 0, scale: int = 0) -> PlacedRun:
        """Return a run of a segment whose values, codes and scales begin there."""
        return cls(value + run.start, code + run.start, scale + run.scale, run.shape)

    @classmethod
    def kept(cls, place: UnquantizedRange, value: int = 0, code: int = 0) -> PlacedRun:
        return cls(value + place.start, code + place.at, 0, (1, 1, 1, place.numel))

    def unscaled(self) -> PlacedRun:
        """Return the same elements, as one block."""
        rows, height, blocks, width = self.shape
        return self._replace(scale=0, shape=(1, 1, 1, rows * height * blocks * width))


@dataclass(frozen=True)
class _Launch:
    """What a kernel gets: its tiles, and where the runs lie. ``whole``: blocks lie in one tile."""

    runs: torch.Tensor
    tiles: torch.Tensor
    blocks: int
    columns: int
    whole: bool
    align: int

    @classmethod
    def of(
        cls, runs: Sequence[PlacedRun], columns: int, whole: bool, device: torch.device
    ) -> _Launch:
        segments_of_tile = max(1, _TILE // columns)
        rows, counts, blocks, first = [], [], 0, 0
        for run in runs:
            of_blocks, height, in_row, width = run.shape
            segments, across = of_blocks * height * in_row, -(-width // columns)
            numbers = (run.value, run.code, run.scale, blocks, height, in_row, width)
            rows.append((*numbers, segments, across, first))
            counts.append(-(-segments // segments_of_tile) * across)
            blocks, first = blocks + of_blocks * in_row, first + counts[-1]
        assert len(rows[0]) == FIELDS
        with torch.inference_mode(False):
            table = torch.tensor(rows, dtype=torch.int64, device="cpu")
            number = torch.arange(len(rows), dtype=torch.int32, device="cpu")
            tiles = number.repeat_interleave(torch.tensor(counts, device="cpu"))
        is_aligned = not any((run.value | run.code | run.shape[-1]) % _ALIGN for run in runs)
        align = _ALIGN if is_aligned else 1
        return cls(table.to(device), tiles.to(device), blocks, columns, whole, align)

    def __call__(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        kernel[(len(self.tiles),)](
            *arguments,
            ALIGN=self.align,
            SEGMENTS=max(1, _TILE // self.columns),
            COLUMNS=self.columns,
            **constants,
            num_warps=max(4, self.columns // 1024),
            enable_fp_fusion=False,  # else sums are rounded otherwise than on a CPU
        )


class RunTable:
    """Encodes and decodes ``runs``. ``codes`` and ``scales`` are dtypes; without ``scales`` codes
    are numbers. Tables on the device are made once, at the first use."""

    def __init__(
        self, runs: Sequence[PlacedRun], codes: torch.dtype, scales: torch.dtype | None = None
    ) -> None:
        self._runs = runs if scales is not None else [run.unscaled() for run in runs]
        self._codes = codes
        self._scales = scales
        self._largest = LARGEST.get(codes, 0.0)
        self._kinds = {"CODES": _name(codes), "SCALES": "" if scales is None else _name(scales)}
        self._encoding: list[_Launch] | None = None
        self._decoding: list[_Launch] | None = None

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill ``codes`` and ``scales``."""
        if self._encoding is None:
            self._encoding = list(self._launches(values.device, in_one=_WIDEST))
        sources, targets, of_blocks = map(_plain, (values, codes, scales))
        kind = _name(values.dtype)
        for launch in self._encoding:
            most = of_blocks
            if not launch.whole and self._scales is not None:
                most = torch.zeros(launch.blocks, dtype=torch.int32, device=values.device)
                launch(measure_blocks, sources, most, launch.tiles, launch.runs, VALUES=kind)
            launch(
                *(encode_blocks, sources, targets, of_blocks, most, launch.tiles, launch.runs),
                **self._kinds,
                VALUES=kind,
                LARGEST=self._largest,
                WHOLE=launch.whole,
            )

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
        """Fill ``values``."""
        self._decode(codes, scales, values, values)

    def add_up(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        own: torch.Tensor,
        rank: int,
        total: torch.Tensor,
    ) -> None:
        """Fill ``total`` with the sum over the rows of ``codes`` and ``scales``, which are ranks.
        ``own`` counts in place of the row of ``rank``."""
        self._decode(codes, scales, own, total, rank)

    def _decode(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        own: torch.Tensor,
        values: torch.Tensor,
        rank: int = -1,
    ) -> None:
        if self._decoding is None:
            self._decoding = list(self._launches(values.device))
        ranks = len(codes) if rank >= 0 else 0
        numbers = (rank, codes.stride(0), scales.stride(0))
        tensors = tuple(map(_plain, (codes, scales, own, values)))
        for launch in self._decoding:
            launch(
                *(decode_blocks, *tensors, launch.tiles, launch.runs, *numbers),
                **self._kinds,
                VALUES=_name(values.dtype),
                RANKS=ranks,
            )

    def _launches(self, device: torch.device, in_one: int = 0) -> Iterator[_Launch]:
        """Yield a launch for all runs whose tiles are alike. A block of one row and at most
        ``in_one`` columns lies in one tile."""

        def tile_of(run: PlacedRun) -> tuple[int, bool]:
            _, height, _, width = run.shape
            whole = height == 1 and width <= in_one
            return min(next_power_of_2(width), in_one if whole else _TILE), whole

        for (columns, whole), runs in groupby(sorted(self._runs, key=tile_of), key=tile_of):
            yield _Launch.of(list(runs), columns, whole, device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_AS_INTEGERS.get(tensor.dtype, tensor.dtype))


class Tables(NamedTuple):
    """The runs of a buffer of segments, and what it has of elements that are not quantized."""

    coded: RunTable
    kept: RunTable

    @classmethod
    def of(
        cls, wire: QuantizedFormat, runs: list[PlacedRun], kept: list[PlacedRun], dtype: torch.dtype
    ) -> Tables:
        return cls(RunTable(runs, wire.codes, wire.scales), RunTable(kept, dtype))


class KernelFormat(QuantizedFormat):
    """As :class:`QuantizedFormat`, by kernels."""

    def encode_own(self, shard: torch.Tensor, segment: torch.Tensor, dtype: torch.dtype) -> None:
        segment.zero_()
        codes, scales, kept = self.parts_of(segment, dtype)
        tables = self._tables(dtype)
        tables.coded.encode(shard, codes, scales)
        tables.kept.encode(shard, kept, kept)

    def add_up(
        self, segments: torch.Tensor, mine: torch.Tensor, rank: int, total: torch.Tensor
    ) -> None:
        codes, scales, kept = self.parts_of(segments, mine.dtype)
        tables = self._tables(mine.dtype)
        tables.coded.add_up(codes, scales, mine, rank, total)
        tables.kept.add_up(kept, kept, mine, rank, total)

    @cached_property
    def _known(self) -> dict[torch.dtype, Tables]:
        return {}

    def _tables(self, dtype: torch.dtype) -> Tables:
        """Return those of this rank's segment. ``dtype`` is that of what is not quantized."""
        if dtype not in self._known:
            runs, kept = map(PlacedRun.of, self.own.runs), map(PlacedRun.kept, self.own.kept)
            self._known[dtype] = Tables.of(self, list(runs), list(kept), dtype)
        return self._known[dtype]


class _AllSegments:
    """Encodes and decodes the segments of all ranks, of a param group that is laid out by
    ``plan``."""

    def __init__(self, wire: QuantizedFormat, plan: ParamGroupPlan | RowsPlan) -> None:
        self._wire = wire
        runs, kept = [], []
        for rank in range(plan.world_size):
            places = (
                _of_rows(wire, plan, rank)
                if isinstance(plan, RowsPlan)
                else _of_ranges(wire.plan, rank)
            )
            runs += places[0]
            kept += places[1]
        self._runs, self._kept = runs, kept
        self._tables: dict[torch.dtype, Tables] = {}

    def encode(self, values: torch.Tensor, segments: torch.Tensor) -> None:
        tables, (codes, scales, kept) = self._views(segments, values.dtype)
        tables.coded.encode(values, codes, scales)
        tables.kept.encode(values, kept, kept)

    def decode(self, segments: torch.Tensor, values: torch.Tensor) -> None:
        tables, (codes, scales, kept) = self._views(segments, values.dtype)
        tables.coded.decode(codes, scales, values)
        tables.kept.decode(kept, kept, values)

    def _views(
        self, segments: torch.Tensor, dtype: torch.dtype
    ) -> tuple[Tables, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the tables, and all bytes as codes, as scales, and as what is not quantized."""
        wire = self._wire
        if dtype not in self._tables:
            self._tables[dtype] = Tables.of(wire, self._runs, self._kept, dtype)
        scales = segments if wire.scales is None else segments.view(wire.scales)
        return self._tables[dtype], (segments.view(wire.codes), scales, segments.view(dtype))


def _starts(plan: QuantizedPlan, rank: int, start: int) -> tuple[int, int, int]:
    """Return where codes, scales and what is not quantized begin in the segment of ``rank`` that
    begins at byte ``start``, each in elements."""
    sizes = plan.parts[rank]
    scales, kept = start + sum(sizes[:2]), start + sum(sizes[:4])
    return (
        start // plan.code_bytes,
        scales // max(1, plan.scale_bytes),
        kept // plan.kept_bytes,
    )


def _of_ranges(plan: QuantizedPlan, rank: int) -> tuple[list[PlacedRun], list[PlacedRun]]:
    """Return where the runs of ``rank`` lie, and what it sends unquantized."""
    segment, value = plan.segment(rank), plan.plan.shard_starts[rank]
    code, scale, kept = _starts(plan, rank, plan.packed.shard_starts[rank])
    return (
        [PlacedRun.of(run, value, code, scale) for run in segment.runs],
        [PlacedRun.kept(place, value, kept) for place in segment.kept],
    )


def _of_rows(
    wire: QuantizedFormat, plan: RowsPlan, rank: int
) -> tuple[list[PlacedRun], list[PlacedRun]]:
    """As :func:`_of_ranges`. All segments are alike, and a shard's chunks lie apart."""
    code, scale, kept = _starts(wire.plan, 0, rank * wire.plan.packed.numel)

    def value(index: int) -> int:
        return plan.offsets[index] + rank * plan.chunks[index] - plan.starts[index]

    return (
        [PlacedRun.of(run, value(run.index), code, scale) for run in wire.own.runs],
        [PlacedRun.kept(place, value(place.index), kept) for place in wire.own.kept],
    )


class KernelGather(QuantizedGather):
    """Gathers a param group in few bits."""

    def __init__(
        self, wire: QuantizedFormat, plan: ParamGroupPlan | RowsPlan, others: RangeCollectives
    ) -> None:
        sizes = wire.plan.packed.shard_numels * (plan.world_size // wire.plan.packed.world_size)
        super().__init__(wire, ParamGroupPlan((), (), sizes), others)
        self._all = _AllSegments(wire, plan)

    def _decode(self, gathered: torch.Tensor, full: torch.Tensor) -> None:
        self._all.decode(gathered, full)


class KernelReduction(QuantizedReduction):
    """Reduces a param group in few bits."""

    def __init__(self, wire: QuantizedFormat, plan: ParamGroupPlan | RowsPlan) -> None:
        sizes = wire.plan.packed.shard_numels * (plan.world_size // wire.plan.packed.world_size)
        super().__init__(wire, sizes)
        self._plan = plan
        self._all = _AllSegments(wire, plan)

    def _encode(
        self, gradients: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sent = torch.zeros(sum(self._sizes), dtype=torch.uint8, device=gradients.device)
        self._all.encode(gradients, sent)
        if isinstance(self._plan, RowsPlan):
            return sent, own_rows(gradients, self._plan, group)
        return sent, own_range(gradients, self._plan, group)


@cache
def works_on(device: torch.device) -> bool:
    """Return whether the kernels run on ``device``, and encode and decode there as torch does on a
    CPU. Else warn once: for example, Triton needs a compiler of C."""
    values = torch.arange(-150.0, 150.0, device="cpu").mul_(0.37).view(5, 60)
    codes = torch.empty(5, 60, dtype=torch.float8_e4m3fn, device="cpu")
    scales = torch.empty(5, 1, dtype=torch.float32, device="cpu")
    encode(values[:, None, None], codes[:, None, None], scales)
    table = RunTable([PlacedRun(0, 0, 0, (5, 1, 1, 60))], codes.dtype, scales.dtype)
    found = [torch.zeros_like(each, device=device) for each in (values, codes, scales)]
    try:
        table.encode(values.to(device), found[1], found[2])
        table.decode(found[1], found[2], found[0])
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    else:
        expected = (codes.float() * scales, codes, scales)
        pairs = zip(found, expected, strict=True)
        if all(torch.equal(here.cpu().float(), there.float()) for here, there in pairs):
            return True
        why = "they compute other numbers than torch does"
    warnings.warn(
        f"Triton's kernels do not work on {device}, so what travels in few bits is computed by "
        f"torch's operations, of which there are many: {why}",
        stacklevel=2,
    )
    return False
