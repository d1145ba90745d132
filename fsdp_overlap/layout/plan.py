"""What a layout decides about a bucket, and the entry point that plans whole units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Protocol

import torch

# Every parameter and every rank's range starts on a multiple of this many elements: 16 bytes in the
# narrowest compute dtype in use (bfloat16), which is what vectorized kernels ask of a pointer.
ALIGN_ELEMENTS = 8


def align(numel: int) -> int:
    """The smallest multiple of :data:`ALIGN_ELEMENTS` that is at least ``numel``."""
    return -(-numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


@dataclass(frozen=True)
class ParamSpec:
    """What a layout needs to know of a parameter. ``fqn`` is its name relative to its unit."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class BucketPlan:
    """Where each parameter of a bucket lies in its flat buffer, and which rank holds which range.

    All figures are elements. Rank ``r`` holds ``[shard_starts[r], shard_starts[r] +
    shard_numels[r])``.

    Raises:
        ValueError: parameters overlap or lie outside the buffer.
    """

    specs: tuple[ParamSpec, ...]
    offsets: tuple[int, ...]
    shard_numels: tuple[int, ...]

    def __post_init__(self) -> None:
        end = 0
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            if offset < end:
                raise ValueError(f"{spec.fqn} starts at {offset}, inside the parameter before it")
            end = offset + spec.numel
        if end > self.numel:
            raise ValueError(f"the shards hold {self.numel} elements, the parameters end at {end}")

    @property
    def world_size(self) -> int:
        return len(self.shard_numels)

    @cached_property
    def numel(self) -> int:
        """Size of the flat buffer."""
        return sum(self.shard_numels)

    @cached_property
    def shard_starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.shard_numels[:-1]))

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(spec.numel for spec in self.specs)

    def ranges(self, fqn: str) -> list[tuple[int, int, int]]:
        """``(rank, start, stop)`` inside the flattened parameter, for each rank that holds any of
        it.

        Raises:
            KeyError: the bucket has no parameter of that name.
        """
        return list(self._ranges[fqn])

    @cached_property
    def _ranges(self) -> dict[str, list[tuple[int, int, int]]]:
        found: dict[str, list[tuple[int, int, int]]] = {}
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            pieces = found.setdefault(spec.fqn, [])
            for rank, (start, numel) in enumerate(
                zip(self.shard_starts, self.shard_numels, strict=True)
            ):
                first = max(start, offset)
                last = min(start + numel, offset + spec.numel)
                if first < last:
                    pieces.append((rank, first - offset, last - offset))
        return found


class Layout(Protocol):
    """A rule that places the parameters of one bucket."""

    def plan(self, specs: Sequence[ParamSpec], world_size: int) -> BucketPlan: ...


def plan_units(
    units: Sequence[Sequence[ParamSpec]], world_size: int, layout: Layout
) -> list[BucketPlan]:
    """Plans the buckets of ``units`` in order: one for each dtype and trainability in a unit.

    Deterministic: the same input gives the same plan on every rank.

    Raises:
        ValueError: ``world_size`` is not positive.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} is not a number of ranks; use 1 or more")
    plans: list[BucketPlan] = []
    for specs in units:
        buckets: dict[tuple[torch.dtype, bool], list[ParamSpec]] = {}
        for spec in specs:
            buckets.setdefault((spec.dtype, spec.requires_grad), []).append(spec)
        plans.extend(layout.plan(bucket, world_size) for bucket in buckets.values())
    return plans
