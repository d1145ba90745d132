"""The plan of a param group whose parameters are cut into chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from fsdp_overlap.layout.plan import ParamGroupPlan, ParamSpec, align


@dataclass(frozen=True)
class RowsPlan:
    """Where each parameter of a param group lies if every rank has a chunk of each.

    All numbers are in elements. The chunks of a parameter take the same memory on each rank, even
    if the last ranks have fewer rows or none. In the flat buffer parameter ``i`` begins at
    ``offsets[i]``, and rank ``r``'s chunk of it ``r * chunks[i]`` later. In a shard, this rank's
    chunk of it begins at ``starts[i]``.

    In the flat buffer parameters are contiguous. So the chunks of one that is cut along another
    dimension than its first are no ranges there, and the param group is not :attr:`is_in_place`.

    ``print(plan)`` says how many rows each rank has.
    """

    specs: tuple[ParamSpec, ...]
    world_size: int

    def rows(self, spec: ParamSpec) -> int:
        """Return how many rows of a parameter fit into a chunk."""
        return -(-spec.shape[spec.cut_dim] // self.world_size)

    def held(self, spec: ParamSpec, rank: int) -> tuple[int, int]:
        """Return ``(first, last)``: ``rank`` holds the rows ``[first, last)`` of a parameter."""
        size, rows = spec.shape[spec.cut_dim], self.rows(spec)
        return min(rank * rows, size), min((rank + 1) * rows, size)

    def chunk_shape(self, spec: ParamSpec, rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s chunk of a parameter."""
        first, last = self.held(spec, rank)
        return (*spec.shape[: spec.cut_dim], last - first, *spec.shape[spec.cut_dim + 1 :])

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        return tuple(
            self.rows(spec) * prod(spec.shape[: spec.cut_dim] + spec.shape[spec.cut_dim + 1 :])
            for spec in self.specs
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return self._aligned_starts(self.chunks)[:-1]

    @cached_property
    def shard_numels(self) -> tuple[int, ...]:
        return (self._aligned_starts(self.chunks)[-1],) * self.world_size

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that split a shard into chunks. If it :attr:`has_gaps`, chunks and gaps
        alternate."""
        if not self.has_gaps:
            return self.chunks
        ends = (*self.starts[1:], self.shard_numels[0])
        parts = zip(self.chunks, self.starts, ends, strict=True)
        return tuple(size for chunk, at, end in parts for size in (chunk, end - at - chunk))

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some chunks of a shard do not end where the next one begins."""
        return sum(self.chunks) < self.shard_numels[0]

    @cached_property
    def is_even(self) -> bool:
        """Whether no rank's shard has padding."""
        return not self.has_gaps and all(
            spec.shape[spec.cut_dim] % self.world_size == 0 for spec in self.specs
        )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return self._aligned_starts([chunk * self.world_size for chunk in self.chunks])[:-1]

    @cached_property
    def numel(self) -> int:
        """The size of the flat buffer, which is a multiple of the number of ranks."""
        end = self._aligned_starts([chunk * self.world_size for chunk in self.chunks])[-1]
        return align(end, self.specs[0].alignment * self.world_size)

    @property
    def is_equal(self) -> bool:
        """Whether all shards have the same size."""
        return True

    @cached_property
    def is_in_place(self) -> bool:
        """Whether every chunk is a range of the flat buffer."""
        return all(spec.cut_dim == 0 for spec in self.specs)

    @cached_property
    def packed(self) -> ParamGroupPlan:
        """The plan of a buffer of all shards, one after the other, as collectives see them."""
        return ParamGroupPlan((), (), self.shard_numels)

    def places(self, rank: int) -> list[tuple[int, int]]:
        sizes = [prod(self.chunk_shape(spec, rank)) for spec in self.specs]
        return list(zip(self.starts, sizes, strict=True))

    def with_specs(self, specs: tuple[ParamSpec, ...]) -> RowsPlan:
        return replace(self, specs=specs)

    def merged(self, world_size: int) -> ParamGroupPlan:
        """Return the flat buffer in equal ranges on fewer ranks.

        Raises:
            ValueError: ``world_size`` does not divide the number of ranks.
        """
        if self.world_size % world_size:
            raise ValueError(f"{self.world_size} ranks cannot be merged to {world_size}")
        return ParamGroupPlan((), (), (self.numel // world_size,) * world_size)

    @property
    def padding(self) -> int:
        """How many elements of the flat buffer belong to no parameter."""
        return self.numel - sum(spec.numel for spec in self.specs)

    def __str__(self) -> str:
        lines = [
            f"{len(self.specs)} parameters in rows on {self.world_size} ranks, {self.numel:,} "
            f"elements, {self.padding:,} of them padding"
        ]
        for spec in self.specs:
            size, rows = spec.shape[spec.cut_dim], max(1, self.rows(spec))
            full, rest = divmod(size, rows)
            last = f", {rest} on the next" if rest else ""
            lines.append(
                f"{spec.fqn} {list(spec.shape)}: {rows} of dimension {spec.cut_dim} on {full} "
                f"ranks{last}"
            )
        return "\n".join(lines)

    def _aligned_starts(self, numels: Sequence[int]) -> tuple[int, ...]:
        """Return the start of each of ``numels`` elements, one after the other, and the end."""
        alignment, starts = self.specs[0].alignment, [0]
        for numel in numels:
            starts.append(align(starts[-1] + numel, alignment))
        return tuple(starts)
