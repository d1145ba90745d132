"""The layout of a param group in quantized communication: codes, scales and unquantized
parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout.plan import ParamGroupPlan, ParamSpec

ALIGN_BYTES = 16

Block = tuple[int | None, int | None]
"""The rows and columns of a matrix that share a scale. ``None``: all."""

BlockSize = tuple[int, int]


def block_in(spec: ParamSpec, block: Block) -> BlockSize:
    """Return the rows and columns of a block of a parameter, seen as a matrix of its last dimension
    by all others. The last block may have fewer rows.

    Raises:
        ValueError: its columns cannot be divided into such blocks.
    """
    rows, columns = prod(spec.shape[:-1]), spec.shape[-1]
    height = rows if block[0] is None else min(block[0], rows)
    width = columns if block[1] is None else block[1]
    if columns % width:
        raise ValueError(
            f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} has rows of {columns} elements, "
            f"which are no multiple of the {width} that share a scale: use block=(1, None), a "
            f"width that divides {columns}, or name the parameter in keep=(...)"
        )
    return height, width


def block_numel(spec: ParamSpec, size: BlockSize) -> int:
    """Return the number of elements between cuts that divide no block."""
    height, width = size
    return width if height == 1 else height * spec.shape[-1]


@dataclass(frozen=True)
class QuantizedRun:
    """Contiguous elements of parameter ``index`` in a flat buffer: complete blocks of one size.

    They begin at ``start`` and have ``shape``: rows of blocks, rows of a block, blocks in a row,
    columns of a block. ``scale`` is the index of their first scale.
    """

    index: int
    start: int
    shape: tuple[int, int, int, int]
    scale: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def scales(self) -> int:
        """How many scales it has."""
        return self.shape[0] * self.shape[2]


@dataclass(frozen=True)
class UnquantizedRange:
    """The ``numel`` elements of parameter ``index`` from ``start`` on in a flat buffer, which are
    sent unquantized. ``at`` is their place among a rank's unquantized elements."""

    index: int
    start: int
    numel: int
    at: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Segment:
    """What a rank sends: the codes and scales of ``runs``, and ``kept``, the unquantized ranges.
    ``parts``: see :attr:`QuantizedPlan.parts`."""

    runs: tuple[QuantizedRun, ...]
    kept: tuple[UnquantizedRange, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True)
class QuantizedPlan:
    """What each rank sends of a param group that is laid out by ``plan``.

    A rank's segment has a code for each element of its shard, the scales of its blocks, and the
    elements of unquantized parameters (``None`` in ``blocks``). A code takes ``code_bytes``, a
    scale ``scale_bytes`` (0: there are none), and an unquantized element ``kept_bytes``. If shards
    are equal, so are segments, and their parts begin at the same places.

    Raises:
        ValueError: a block lies on two ranks.
    """

    plan: ParamGroupPlan
    blocks: tuple[BlockSize | None, ...]
    code_bytes: int
    scale_bytes: int
    kept_bytes: int

    def __post_init__(self) -> None:
        for spec, size in zip(self.plan.specs, self.blocks, strict=True):
            step = 1 if size is None else block_numel(spec, size)
            for _, _, stop in self.plan.ranges(spec.fqn):
                if stop % step and stop != spec.numel:
                    raise ValueError(
                        f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} is cut at element "
                        f"{stop}, inside of the {step} elements that share scales: choose a layout "
                        "that cuts at multiples of them, such as BlockAtomic(rows=...), or "
                        "TensorAtomic(), which cuts no matrix but embeddings; or name the "
                        "parameter in keep=(...)"
                    )

    def segment(self, rank: int) -> Segment:
        """Return what a rank sends. Starts count from its shard's, scales from 0."""
        places = self._places[rank]
        return Segment(tuple(self._runs_in(places)), tuple(self._kept_in(places)), self.parts[rank])

    @cached_property
    def all_runs(self) -> list[QuantizedRun]:
        """The blocks in the flat buffer. Scales count over all ranks."""
        plan = self.plan
        places = zip(plan.specs, plan.offsets, strict=True)
        return self._runs_in(
            [(index, offset, spec.numel) for index, (spec, offset) in enumerate(places)]
        )

    @cached_property
    def kept_of_ranks(self) -> list[tuple[int, UnquantizedRange]]:
        """Each rank and what it sends unquantized. Starts are those in the flat buffer."""
        starts = self.plan.shard_starts
        return [
            (rank, replace(kept, start=starts[rank] + kept.start))
            for rank, places in enumerate(self._places)
            for kept in self._kept_in(places)
        ]

    @cached_property
    def scales_of_ranks(self) -> list[int]:
        """How many scales each rank sends."""
        if not self.scale_bytes:
            return [0] * self.plan.world_size
        return [sum(run.scales for run in self._runs_in(places)) for places in self._places]

    @cached_property
    def parts(self) -> list[tuple[int, ...]]:
        """The parts of each rank's segment, in bytes: codes, a gap, scales, a gap, unquantized
        elements, and a gap."""
        kept = [sum(part.numel for part in self._kept_in(places)) for places in self._places]
        counts = list(zip(self.plan.shard_numels, self.scales_of_ranks, kept, strict=True))
        if self.plan.is_equal:
            counts = [tuple(map(max, zip(*counts, strict=True)))] * len(counts)
        widths = self.code_bytes, self.scale_bytes, self.kept_bytes
        segments = []
        for numels in counts:
            sizes = [numel * width for numel, width in zip(numels, widths, strict=True)]
            segments.append(tuple(part for size in sizes for part in (size, -size % ALIGN_BYTES)))
        return segments

    @cached_property
    def packed(self) -> ParamGroupPlan:
        """The plan of a buffer of bytes with all segments, one after the other."""
        return ParamGroupPlan((), (), tuple(map(sum, self.parts)))

    @cached_property
    def _places(self) -> list[list[tuple[int, int, int]]]:
        """The parameters in each rank's shard: ``(index, start in the shard, numel)``."""
        plan = self.plan
        places: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.world_size)]
        for index, (spec, offset) in enumerate(zip(plan.specs, plan.offsets, strict=True)):
            for rank, start, stop in plan.ranges(spec.fqn):
                places[rank].append((index, offset - plan.shard_starts[rank] + start, stop - start))
        return places

    def _kept_in(self, places: Sequence[tuple[int, int, int]]) -> list[UnquantizedRange]:
        kept = [place for place in places if self.blocks[place[0]] is None]
        before = accumulate((numel for _, _, numel in kept), initial=0)
        return [UnquantizedRange(*place, at) for place, at in zip(kept, before, strict=False)]

    def _runs_in(self, places: Sequence[tuple[int, int, int]]) -> list[QuantizedRun]:
        runs: list[QuantizedRun] = []
        scale = 0
        for index, start, numel in places:
            size, columns = self.blocks[index], self.plan.specs[index].shape[-1:]
            for shape in _shapes(numel, size, *columns) if size is not None else ():
                runs.append(QuantizedRun(index, start, shape, scale))
                start, scale = start + runs[-1].numel, scale + runs[-1].scales
        return runs


def shard_plan(plan: RowsPlan, blocks: Sequence[BlockSize | None]) -> ParamGroupPlan:
    """Return the plan of one rank's shard. It is the same on all ranks.

    Raises:
        ValueError: a chunk begins or ends within a block.
    """
    specs: list[ParamSpec] = []
    for spec, size in zip(plan.specs, blocks, strict=True):
        rows = plan.rows(spec)
        specs.append(replace(spec, shape=(rows, *spec.shape[1:])))
        if spec.cut_dim:
            raise ValueError(
                f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} is cut along dimension "
                f"{spec.cut_dim}, and what travels in few bits is cut into rows: use Shard(0), or "
                "another layout than PerTensor()"
            )
        height = 1 if size is None else size[0]
        if plan.world_size > 1 and prod(specs[-1].shape[:-1]) % height:
            raise ValueError(
                f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} is cut into chunks of {rows} "
                f"along dimension 0, and {height} of its rows share a scale: use block=(1, None), "
                "another layout than PerTensor(), or name the parameter in keep=(...)"
            )
    return ParamGroupPlan(tuple(specs), plan.starts, plan.shard_numels[:1])


def _shapes(numel: int, size: BlockSize, columns: int) -> list[tuple[int, int, int, int]]:
    """Return the shapes of the blocks in ``numel`` elements of a matrix: of those of full height,
    and of those of the last rows."""
    height, width = size
    if height == 1:
        return [(numel // width, 1, 1, width)] if numel else []
    full, left = divmod(numel // columns, height)
    shapes = (full, height, columns // width, width), (1, left, columns // width, width)
    return [shape for shape in shapes if prod(shape)]
