"""Where a bucket lies while it travels in few bits: codes, their scales, and what keeps its
dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fsdp_overlap.layout.bucket_plan import BucketPlan
from fsdp_overlap.layout.spec import ParamSpec

ALIGN_BYTES = 16

Block = tuple[int | None, int | None]
"""How many rows and columns of a matrix share a scale. ``None``: all."""

BlockSize = tuple[int, int]


def block_in(spec: ParamSpec, block: Block) -> BlockSize:
    """The rows and columns of a block of a parameter, whose last dimension has its columns, and all
    others its rows. The last block may have fewer rows.

    Raises:
        ValueError: its columns cannot be divided into such blocks.
    """
    rows, columns = prod(spec.shape[:-1]), spec.shape[-1]
    height = rows if block[0] is None else min(block[0], rows)
    width = columns if block[1] is None else block[1]
    if width and columns % width:
        raise ValueError(
            f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} has rows of {columns} elements, "
            f"which are no multiple of the {width} that share a scale: use block=(1, None), a "
            f"width that divides {columns}, or name the parameter in keep=(...)"
        )
    return max(1, height), max(1, width)


def grain_of(spec: ParamSpec, size: BlockSize) -> int:
    """The number of elements between places where a cut divides no block."""
    height, width = size
    return width if height == 1 else height * spec.shape[-1]


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of a flat buffer that are whole blocks of one size.

    From ``start`` on they have ``shape``: rows of blocks, rows of a block, blocks in a row, columns
    of a block. Their scales are those from ``scale`` on.
    """

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
class WirePlan:
    """What each rank sends of a bucket that is laid out by ``plan``.

    A rank's segment has a byte for each element of its shard, the scales of its blocks, and the
    elements of parameters that have no block (``None`` in ``blocks``), in their own dtype. A scale
    takes ``scale_bytes``, such an element ``kept_bytes``. Segments are equal if shards are.

    Raises:
        ValueError: a block lies on two ranks.
    """

    plan: BucketPlan
    blocks: tuple[BlockSize | None, ...]
    scale_bytes: int
    kept_bytes: int

    def __post_init__(self) -> None:
        for spec, size in zip(self.plan.specs, self.blocks, strict=True):
            check_cuts(self.plan, spec, size)

    def runs(self, rank: int) -> list[Run]:
        """The blocks in a rank's shard. Starts are counted from the shard's, scales from 0."""
        found: list[Run] = []
        for index, first, start, stop in self._pieces[rank]:
            size = self.blocks[index]
            if size is not None:
                found += _runs(first, stop - start, self.plan.specs[index], size, _scales(found))
        return found

    @cached_property
    def all_runs(self) -> list[Run]:
        """The blocks in the flat buffer. Scales are counted over all ranks."""
        found: list[Run] = []
        for spec, offset, size in zip(self.plan.specs, self.plan.offsets, self.blocks, strict=True):
            if size is not None:
                found += _runs(offset, spec.numel, spec, size, _scales(found))
        return found

    def kept(self, rank: int) -> list[tuple[int, int]]:
        """Where in a rank's shard the elements lie that keep their dtype: ``(start, stop)``."""
        return [
            (first, first + stop - start)
            for index, first, start, stop in self._pieces[rank]
            if self.blocks[index] is None
        ]

    @cached_property
    def all_kept(self) -> list[tuple[int, int]]:
        """Where in the flat buffer the parameters lie that keep their dtype."""
        return [
            (offset, offset + spec.numel)
            for spec, offset, size in zip(
                self.plan.specs, self.plan.offsets, self.blocks, strict=True
            )
            if size is None
        ]

    @cached_property
    def scale_counts(self) -> tuple[int, ...]:
        """How many scales each rank has."""
        return tuple(_scales(self.runs(rank)) for rank in range(self.plan.world_size))

    @cached_property
    def kept_counts(self) -> tuple[int, ...]:
        """How many elements of each rank keep their dtype."""
        return tuple(
            sum(stop - start for start, stop in self.kept(rank))
            for rank in range(self.plan.world_size)
        )

    @cached_property
    def parts(self) -> list[tuple[int, ...]]:
        """What each rank's segment consists of, in bytes: codes, a gap, scales, a gap, what keeps
        its dtype, and a gap."""
        found = []
        for rank, codes in enumerate(self.plan.shard_numels):
            numels = (
                codes,
                self.scale_counts[rank] * self.scale_bytes,
                self.kept_counts[rank] * self.kept_bytes,
            )
            found.append([size for numel in numels for size in (numel, -numel % ALIGN_BYTES)])
        if self.plan.is_equal:
            most = max(map(sum, found))
            for part in found:
                part[-1] += most - sum(part)
        return [tuple(part) for part in found]

    @cached_property
    def packed(self) -> BucketPlan:
        """The plan of the buffer of bytes in which segments follow each other."""
        return BucketPlan((), (), tuple(map(sum, self.parts)))

    @cached_property
    def _pieces(self) -> list[list[tuple[int, int, int, int]]]:
        """For each rank what it has of parameters: their number, where it begins in the shard, and
        which elements ``[start, stop)`` it is."""
        plan = self.plan
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in range(plan.world_size)]
        for index, (spec, offset) in enumerate(zip(plan.specs, plan.offsets, strict=True)):
            for rank, start, stop in plan.ranges(spec.fqn):
                first = offset + start - plan.shard_starts[rank]
                found[rank].append((index, first, start, stop))
        return found


def check_cuts(plan: BucketPlan, spec: ParamSpec, size: BlockSize | None) -> None:
    """Checks that ``plan`` cuts a parameter between its blocks.

    Raises:
        ValueError: it cuts one.
    """
    grain = 1 if size is None else grain_of(spec, size)
    for _, _, stop in plan.ranges(spec.fqn):
        if stop % grain and stop != spec.numel:
            raise ValueError(
                f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} is cut at element {stop}, "
                f"inside of the {grain} elements that share scales: choose a layout that cuts at "
                "multiples of them, such as Blocks(rows=...), or Whole(), which cuts no matrix but "
                "embeddings; or name the parameter in keep=(...)"
            )


def _runs(start: int, numel: int, spec: ParamSpec, size: BlockSize, scale: int) -> list[Run]:
    height, width = size
    if height == 1:
        return [Run(start, (numel // width, 1, 1, width), scale)] if numel else []
    columns = spec.shape[-1]
    found = []
    full, left = divmod(numel // columns, height)
    for shape in ((full, height, columns // width, width), (1, left, columns // width, width)):
        if prod(shape):
            found.append(Run(start, shape, scale))
            start, scale = start + found[-1].numel, scale + found[-1].scales
    return found


def _scales(runs: Sequence[Run]) -> int:
    return runs[-1].scale + runs[-1].scales if runs else 0
