"""How a param group lies while it travels in few bits: codes, their scales, and what keeps its
dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from fsdp_overlap.layout.param_group_plan import ParamGroupPlan
from fsdp_overlap.layout.rows_plan import RowsPlan
from fsdp_overlap.layout.spec import ParamSpec

ALIGN_BYTES = 16

Block = tuple[int | None, int | None]
"""How many rows and columns of a matrix share a scale. ``None``: all."""

BlockSize = tuple[int, int]


def block_in(spec: ParamSpec, block: Block) -> BlockSize:
    """Return the rows and columns of a block of a parameter, whose last dimension has its columns,
    and all others its rows. The last block may have fewer rows.

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
    """Return the number of elements between places where a cut divides no block."""
    height, width = size
    return width if height == 1 else height * spec.shape[-1]


@dataclass(frozen=True)
class QuantizedRun:
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
class UnquantizedRange:
    """The ``numel`` elements from ``start`` on in a flat buffer, of parameter ``index``, which
    travel in full. In that part of a rank's segment they are the elements from ``at`` on."""

    index: int
    start: int
    numel: int
    at: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Segment:
    """What a rank sends: the codes and scales of ``runs``, and what is ``kept`` in its dtype.
    ``parts``: see :attr:`QuantizedPlan.parts`."""

    runs: tuple[QuantizedRun, ...]
    kept: tuple[UnquantizedRange, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True)
class QuantizedPlan:
    """What each rank sends of a param group that is laid out by ``plan``.

    A rank's segment has a code for each element of its shard, the scales of its blocks, and the
    elements of parameters that have no block (``None`` in ``blocks``), in their own dtype. A code
    takes ``code_bytes``, a scale ``scale_bytes``, which is 0 if there are none, and such an element
    ``kept_bytes``. If shards are equal, segments are, and so are the places of their parts.

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
            check_cuts(self.plan, spec, size)

    def segment(self, rank: int) -> Segment:
        """Return what a rank sends. Starts are counted from that of its shard, scales from 0."""
        places = self._places[rank]
        return Segment(tuple(self._runs_in(places)), tuple(self._kept_in(places)), self.parts[rank])

    @cached_property
    def all_runs(self) -> list[QuantizedRun]:
        """The blocks in the flat buffer. Scales are counted over all ranks."""
        plan = self.plan
        places = zip(plan.specs, plan.offsets, strict=True)
        return self._runs_in(
            [(index, offset, spec.numel) for index, (spec, offset) in enumerate(places)]
        )

    @cached_property
    def kept_of_ranks(self) -> list[tuple[int, UnquantizedRange]]:
        """What each rank sends in full: its number, and what. Starts are those in the flat
        buffer."""
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
        """What each rank's segment consists of, in bytes: codes, a gap, scales, a gap, what keeps
        its dtype, and a gap."""
        kept = [sum(each.numel for each in self._kept_in(places)) for places in self._places]
        numels = list(zip(self.plan.shard_numels, self.scales_of_ranks, kept, strict=True))
        if self.plan.is_equal:
            numels = [tuple(map(max, zip(*numels, strict=True)))] * len(numels)
        widths = self.code_bytes, self.scale_bytes, self.kept_bytes
        sizes = [[n * width for n, width in zip(each, widths, strict=True)] for each in numels]
        return [
            tuple(part for size in each for part in (size, -size % ALIGN_BYTES)) for each in sizes
        ]

    @cached_property
    def packed(self) -> ParamGroupPlan:
        """The plan of the buffer of bytes in which segments follow each other."""
        return ParamGroupPlan((), (), tuple(map(sum, self.parts)))

    @cached_property
    def _places(self) -> list[list[tuple[int, int, int]]]:
        """What each rank has of parameters: which one, where in its shard, and how many
        elements."""
        plan = self.plan
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.world_size)]
        for index, (spec, offset) in enumerate(zip(plan.specs, plan.offsets, strict=True)):
            for rank, start, stop in plan.ranges(spec.fqn):
                found[rank].append((index, offset - plan.shard_starts[rank] + start, stop - start))
        return found

    def _kept_in(self, places: Sequence[tuple[int, int, int]]) -> list[UnquantizedRange]:
        kept = [place for place in places if self.blocks[place[0]] is None]
        before = accumulate((numel for _, _, numel in kept), initial=0)
        return [UnquantizedRange(*place, at) for place, at in zip(kept, before, strict=False)]

    def _runs_in(self, places: Sequence[tuple[int, int, int]]) -> list[QuantizedRun]:
        found: list[QuantizedRun] = []
        scale = 0
        for index, start, numel in places:
            size, columns = self.blocks[index], self.plan.specs[index].shape[-1:]
            for shape in _shapes(numel, size, *columns) if size is not None else ():
                found.append(QuantizedRun(index, start, shape, scale))
                start, scale = start + found[-1].numel, scale + found[-1].scales
        return found


def one_rank(plan: RowsPlan, blocks: Sequence[BlockSize | None]) -> ParamGroupPlan:
    """Return where the chunks of any one rank lie in its shard.

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


def check_cuts(plan: ParamGroupPlan, spec: ParamSpec, size: BlockSize | None) -> None:
    """Check that ``plan`` cuts a parameter between its blocks.

    Raises:
        ValueError: it cuts one.
    """
    step = 1 if size is None else block_numel(spec, size)
    for _, _, stop in plan.ranges(spec.fqn):
        if stop % step and stop != spec.numel:
            raise ValueError(
                f"parameter {spec.fqn!r} of shape {tuple(spec.shape)} is cut at element {stop}, "
                f"inside of the {step} elements that share scales: choose a layout that cuts at "
                "multiples of them, such as BlockAtomic(rows=...), or TensorAtomic(), which cuts "
                "no matrix but embeddings; or name the parameter in keep=(...)"
            )


def _shapes(numel: int, size: BlockSize, columns: int) -> list[tuple[int, int, int, int]]:
    """Return how blocks lie in ``numel`` elements of a matrix: those of full height, and those of
    the last rows."""
    height, width = size
    if height == 1:
        return [(numel // width, 1, 1, width)] if numel else []
    full, left = divmod(numel // columns, height)
    shapes = (full, height, columns // width, width), (1, left, columns // width, width)
    return [shape for shape in shapes if prod(shape)]
