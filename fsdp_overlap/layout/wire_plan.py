"""How a bucket lies while it travels in few bits: codes, their scales, and what keeps its dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from fsdp_overlap.layout.bucket_plan import BucketPlan
from fsdp_overlap.layout.rows_plan import RowsPlan
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
    if columns % width:
        raise ValueError(
            f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} has rows of {columns} elements, "
            f"which are no multiple of the {width} that share a scale: use block=(1, None), a "
            f"width that divides {columns}, or name the parameter in keep=(...)"
        )
    return height, width


def grain_of(spec: ParamSpec, size: BlockSize) -> int:
    """The number of elements between places where a cut divides no block."""
    height, width = size
    return width if height == 1 else height * spec.shape[-1]


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of parameter ``index`` in a flat buffer, which are whole blocks of one
    size.

    From ``start`` on they have ``shape``: rows of blocks, rows of a block, blocks in a row, columns
    of a block. Their scales are those from ``scale`` on.
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
class Place:
    """The elements ``[start, stop)`` of a flat buffer, which are of parameter ``index``."""

    index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """What a rank sends: the codes and scales of ``runs``, and what is ``kept`` in its dtype.
    ``parts``: see :attr:`WirePlan.parts`."""

    runs: tuple[Run, ...]
    kept: tuple[Place, ...]
    parts: tuple[int, ...]


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

    def segment(self, rank: int) -> Segment:
        """What a rank sends. Starts are counted from that of its shard, scales from 0."""
        places = self._places()[rank]
        return Segment(tuple(self._runs_in(places)), tuple(self._kept_in(places)), self.parts[rank])

    @cached_property
    def all_runs(self) -> list[Run]:
        """The blocks in the flat buffer. Scales are counted over all ranks."""
        return self._runs_in(self._all_places)

    @cached_property
    def all_kept(self) -> list[Place]:
        """Where in the flat buffer the elements lie that keep their dtype."""
        return self._kept_in(self._all_places)

    @cached_property
    def parts(self) -> list[tuple[int, ...]]:
        """What each rank's segment consists of, in bytes: codes, a gap, scales, a gap, what keeps
        its dtype, and a gap."""
        found = []
        for codes, places in zip(self.plan.shard_numels, self._places(), strict=True):
            scales = sum(run.scales for run in self._runs_in(places))
            kept = sum(place.numel for place in self._kept_in(places))
            numels = codes, scales * self.scale_bytes, kept * self.kept_bytes
            found.append([size for numel in numels for size in (numel, -numel % ALIGN_BYTES)])
        if self.plan.is_equal:
            most = max(map(sum, found))
            for part in found:
                part[-1] += most - sum(part)
        return [tuple(part) for part in found]

    @property
    def scales(self) -> int:
        """How many scales there are, on all ranks together."""
        return sum(run.scales for run in self.all_runs)

    @cached_property
    def packed(self) -> BucketPlan:
        """The plan of the buffer of bytes in which segments follow each other."""
        return BucketPlan((), (), tuple(map(sum, self.parts)))

    def _places(self) -> list[list[Place]]:
        """What each rank has of parameters, in its shard."""
        plan = self.plan
        found: list[list[Place]] = [[] for _ in range(plan.world_size)]
        for index, (spec, offset) in enumerate(zip(plan.specs, plan.offsets, strict=True)):
            for rank, start, stop in plan.ranges(spec.fqn):
                before = offset - plan.shard_starts[rank]
                found[rank].append(Place(index, before + start, before + stop))
        return found

    @cached_property
    def _all_places(self) -> list[Place]:
        plan = self.plan
        return [
            Place(index, offset, offset + spec.numel)
            for index, (spec, offset) in enumerate(zip(plan.specs, plan.offsets, strict=True))
        ]

    def _kept_in(self, places: Sequence[Place]) -> list[Place]:
        return [place for place in places if self.blocks[place.index] is None]

    def _runs_in(self, places: Sequence[Place]) -> list[Run]:
        found: list[Run] = []
        scale = 0
        for place in places:
            size, columns = self.blocks[place.index], self.plan.specs[place.index].shape[-1:]
            start = place.start
            for shape in _shapes(place.numel, size, *columns) if size is not None else ():
                found.append(Run(place.index, start, shape, scale))
                start, scale = start + found[-1].numel, scale + found[-1].scales
        return found


def one_rank(plan: RowsPlan, blocks: Sequence[BlockSize | None]) -> BucketPlan:
    """Where the chunks of any one rank lie in its shard.

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
                "another layout than Rows()"
            )
        height = 1 if size is None else size[0]
        if plan.world_size > 1 and prod(specs[-1].shape[:-1]) % height:
            raise ValueError(
                f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} is cut into chunks of {rows} "
                f"along dimension 0, and {height} of its rows share a scale: use block=(1, None), "
                "another layout than Rows(), or name the parameter in keep=(...)"
            )
    return BucketPlan(tuple(specs), plan.starts, plan.shard_numels[:1])


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


def _shapes(numel: int, size: BlockSize, columns: int) -> list[tuple[int, int, int, int]]:
    """How blocks lie in ``numel`` elements of a matrix: those of full height, and those of the
    last rows."""
    height, width = size
    if height == 1:
        return [(numel // width, 1, 1, width)] if numel else []
    full, left = divmod(numel // columns, height)
    shapes = (full, height, columns // width, width), (1, left, columns // width, width)
    return [shape for shape in shapes if prod(shape)]
