"""Collectives among ranks that one process plays, one after the other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import RangeCollectives
from fsdp_overlap.comm.comm_streams import PendingCollective
from fsdp_overlap.layout import ParamGroupPlan


class OneProcessCollectives(RangeCollectives):
    """What each rank sends is there once all have sent, in the order of ranks."""

    def __init__(self, plan: ParamGroupPlan | None = None) -> None:
        super().__init__(plan or ParamGroupPlan((), (), ()))
        self.sent: list[torch.Tensor] = []

    def for_plan(self, plan: ParamGroupPlan) -> OneProcessCollectives:
        other = OneProcessCollectives(plan)
        other.sent = self.sent
        return other

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        assert len(shard) == self.plan.shard_numels[group.rank()]
        self.sent.append(shard.clone())
        return PendingCollective((), lambda: full.copy_(torch.cat(self.sent)))

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        raise NotImplementedError
