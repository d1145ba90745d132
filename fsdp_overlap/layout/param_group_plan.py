"""The plan of a param group: where its parameters lie, and which rank holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol, Self

from fsdp_overlap.layout.spec import ParamSpec

_PICTURE_COLUMNS = 64


def align(numel: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``numel``."""
    return -(-numel // alignment) * alignment


class Plan(Protocol):
    """Where the parameters of a param group lie in its flat buffer, and what each rank holds. All
    numbers are in elements. The same plan has the same ``repr()`` on every rank."""

    @property
    def specs(self) -> tuple[ParamSpec, ...]: ...
    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat buffer."""
        ...

    @property
    def shard_numels(self) -> tuple[int, ...]:
        """The size of each rank's shard."""
        ...

    @property
    def numel(self) -> int:
        """The size of the flat buffer, with padding."""
        ...

    @property
    def world_size(self) -> int: ...
    @property
    def is_equal(self) -> bool:
        """Whether all shards have the same size."""
        ...

    @property
    def padding(self) -> int:
        """How many elements of the flat buffer belong to no parameter."""
        ...

    @property
    def packed(self) -> ParamGroupPlan:
        """The plan of a buffer of all shards, one after the other, as collectives see them."""
        ...

    def places(self, rank: int) -> list[tuple[int, int]]:
        """Return where in the shard of ``rank`` each parameter begins, and how many elements it has
        there."""
        ...

    def merged(self, world_size: int) -> ParamGroupPlan:
        """Return the same flat buffer in ranges on fewer ranks.

        Raises:
            ValueError: ``world_size`` does not divide the number of ranks.
        """
        ...

    def with_specs(self, specs: tuple[ParamSpec, ...]) -> Self:
        """Return the same plan of parameters of the same sizes."""
        ...


@dataclass(frozen=True)
class ParamGroupPlan:
    """Where each parameter of a param group lies in its flat buffer, and which rank holds which
    range.

    All numbers are in elements. Rank ``r`` holds ``[shard_starts[r], shard_starts[r] +
    shard_numels[r])``. Parameters are in the order of their offsets. ``block_sizes[i]`` is the
    number of elements between allowed cuts of ``specs[i]``; without ``block_sizes`` it is 1 for
    all.

    ``print(plan)`` draws the plan.

    Raises:
        ValueError: parameters overlap or lie outside the buffer, or one is cut where it must not
            be.
    """

    specs: tuple[ParamSpec, ...]
    offsets: tuple[int, ...]
    shard_numels: tuple[int, ...]
    block_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            if offset < end:
                raise ValueError(f"{spec.fqn} starts at {offset}, inside the parameter before it")
            end = offset + spec.numel
        if end > self.numel:
            raise ValueError(f"the shards hold {self.numel} elements, the parameters end at {end}")
        if not self.block_sizes:
            object.__setattr__(self, "block_sizes", (1,) * len(self.specs))
        for spec, block_size in zip(self.specs, self.block_sizes, strict=True):
            for _, _, stop in self._ranges[spec.fqn]:
                if stop % block_size and stop != spec.numel:
                    raise ValueError(
                        f"{spec.fqn} of shape {spec.shape} is cut at element {stop}, but its "
                        f"layout allows cuts at multiples of {block_size} only"
                    )

    @property
    def world_size(self) -> int:
        return len(self.shard_numels)

    @cached_property
    def numel(self) -> int:
        """The size of the flat buffer, with padding."""
        return sum(self.shard_numels)

    @cached_property
    def shard_starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.shard_numels[:-1]))

    @cached_property
    def is_equal(self) -> bool:
        """Whether all shards have the same size."""
        return len(set(self.shard_numels)) == 1

    @property
    def packed(self) -> ParamGroupPlan:
        return self

    def with_specs(self, specs: tuple[ParamSpec, ...]) -> ParamGroupPlan:
        return replace(self, specs=specs)

    def merged(self, world_size: int) -> ParamGroupPlan:
        """Return the same flat buffer on fewer ranks, each with the shards of several adjacent
        ranks.

        Raises:
            ValueError: ``world_size`` does not divide the number of ranks.
        """
        count, left = divmod(self.world_size, world_size)
        if left:
            raise ValueError(f"{self.world_size} ranks cannot be merged to {world_size}")
        numels = [
            sum(self.shard_numels[first : first + count])
            for first in range(0, self.world_size, count)
        ]
        return replace(self, shard_numels=tuple(numels))

    @property
    def padding(self) -> int:
        """How many elements of the flat buffer belong to no parameter."""
        return self.numel - sum(spec.numel for spec in self.specs)

    def ranges(self, fqn: str) -> list[tuple[int, int, int]]:
        """Return ``(rank, start, stop)`` inside the flattened parameter, for each rank that holds
        any of it.

        Raises:
            KeyError: the param group has no parameter of that name.
        """
        return list(self._ranges[fqn])

    def range_of(self, fqn: str, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of what ``rank`` holds of a flattened parameter."""
        held = ((start, stop) for owner, start, stop in self._ranges[fqn] if owner == rank)
        return next(held, (0, 0))

    def places(self, rank: int) -> list[tuple[int, int]]:
        """Return where in the shard of ``rank`` each parameter begins, and how many elements it has
        there."""
        places = []
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            start, stop = self.range_of(spec.fqn, rank)
            first = offset + start - self.shard_starts[rank] if stop > start else 0
            places.append((first, stop - start))
        return places

    def owner(self, fqn: str) -> int | None:
        """Return the rank that holds all of a parameter. ``None`` if several ranks hold parts of
        it, or if it is empty.

        Raises:
            KeyError: the param group has no parameter of that name.
        """
        ranges = self._ranges[fqn]
        return ranges[0][0] if len(ranges) == 1 else None

    @cached_property
    def _ranges(self) -> dict[str, list[tuple[int, int, int]]]:
        ranges_of: dict[str, list[tuple[int, int, int]]] = {}
        starts, numels = self.shard_starts, self.shard_numels
        rank = 0
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            ranges = ranges_of.setdefault(spec.fqn, [])
            end = offset + spec.numel
            while rank < len(numels) and starts[rank] + numels[rank] <= offset:
                rank += 1
            at = rank
            while at < len(numels) and starts[at] < end:
                first = max(starts[at], offset)
                last = min(starts[at] + numels[at], end)
                if first < last:
                    ranges.append((at, first - offset, last - offset))
                at += 1
        return ranges_of

    def __str__(self) -> str:
        """Return a picture in text. Each rank has a line: a bar as long as its range, and the names
        of the parameters that lie there."""
        kind = "equal" if self.is_equal else "ragged"
        lines = [
            f"{len(self.specs)} parameters on {self.world_size} ranks, {self.numel:,} elements in "
            f"{kind} shards, {self.padding:,} of them padding"
        ]
        names: list[list[str]] = [[] for _ in self.shard_numels]
        for fqn, ranges in self._ranges.items():
            for rank, start, stop in ranges:
                names[rank].append(fqn if len(ranges) == 1 else f"{fqn}[{start:,}:{stop:,}]")
        largest = max(1, *self.shard_numels)
        for rank, numel in enumerate(self.shard_numels):
            bar = "#" * round(_PICTURE_COLUMNS * numel / largest)
            line = f"rank {rank:>4} {bar:<{_PICTURE_COLUMNS}} {numel:>13,}  "
            lines.append((line + ", ".join(names[rank])).rstrip())
        return "\n".join(lines)


def equal_shards(specs: Sequence[ParamSpec], world_size: int) -> ParamGroupPlan:
    """Return the plan of a param group whose parameters may be cut anywhere, in shards of equal
    size."""
    offsets = []
    end, alignment = 0, specs[0].alignment
    for spec in specs:
        offsets.append(align(end, alignment))
        end = offsets[-1] + spec.numel
    shard = align(-(-end // world_size), alignment)
    return ParamGroupPlan(tuple(specs), tuple(offsets), (shard,) * world_size)
