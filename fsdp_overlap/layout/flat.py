"""Equal element ranges, cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_overlap.layout.plan import BucketPlan, ParamSpec, align


@dataclass(frozen=True)
class Flat:
    """Parameters one after the other, each rank an equal range of elements, cut anywhere.

    For element-wise optimizers. Pads fewer than :data:`ALIGN_ELEMENTS` elements per parameter and
    per rank.
    """

    def plan(self, specs: Sequence[ParamSpec], world_size: int) -> BucketPlan:
        offsets = []
        end = 0
        for spec in specs:
            start = align(end)
            offsets.append(start)
            end = start + spec.numel
        shard = align(-(-end // world_size))
        return BucketPlan(tuple(specs), tuple(offsets), (shard,) * world_size)
