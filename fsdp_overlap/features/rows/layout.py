"""The layout under which parameters are cut as FSDP2 cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout.plan import ParamSpec, RowLayout


@dataclass(frozen=True)
class PerTensor(RowLayout):
    """Each parameter is cut along its first dimension into as many chunks as there are ranks, as
    FSDP2 cuts it. Sharded parameters are then DTensors placed as ``Shard(0)``, of which each rank
    has some rows, and all that works on FSDP2's parameters works on them.

    Chunks are those of ``torch.chunk``: all have the same number of rows, but the last ones may
    have fewer, or none. ``shard_placement_fn`` of :func:`~fsdp_overlap.fully_shard` may choose
    another dimension for a parameter.
    """

    def block_size(self, spec: ParamSpec) -> int:
        return max(1, prod(spec.shape[1:]))

    def plan(self, specs: Sequence[ParamSpec], world_size: int) -> RowsPlan:
        return RowsPlan(tuple(specs), world_size)
