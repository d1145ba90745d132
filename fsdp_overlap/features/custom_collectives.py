"""Custom collectives, with FSDP2's interfaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Op, RangeCollectives, Transport, as_real, end
from fsdp_overlap.comm.comm_streams import PendingCollective
from fsdp_overlap.features.staged_collectives import StagedCollectives
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.tensor.comm_dtypes import as_comm_dtype
from fsdp_overlap.torch_internals import AllGather, ReduceScatter


@dataclass(frozen=True)
class CustomComms(Transport):
    """A user's collectives. ``None`` stands for the library's own."""

    name: ClassVar[str] = "custom collectives"

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None

    def wrap(self, collectives: RangeCollectives, param_group: Any) -> RangeCollectives:
        return CustomCollectives(self, collectives)


class CustomCollectives(StagedCollectives):
    """The collectives of ``comms``, and those of ``others`` where it has none.

    The user's objects may use the memory that they allocate again for their next call. On a CPU
    each collective is waited for at once.
    """

    def __init__(self, comms: CustomComms, others: RangeCollectives) -> None:
        super().__init__(others.plan)
        self._comms = comms
        self._others = others

    def for_plan(self, plan: ParamGroupPlan) -> CustomCollectives:
        return CustomCollectives(self._comms, self._others.for_plan(plan))

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        if self._comms.all_gather is None:
            return self._others.all_gather(full, shard, group)
        return super().all_gather(full, shard, group)

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        if self._comms.reduce_scatter is None:
            return self._others.reduce_scatter(gradients, group, divisor)
        return super().reduce_scatter(gradients, group, divisor)

    def _gather_output(self, full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        comm = self._comms.all_gather
        assert comm is not None
        return comm.allocate(full.shape, dtype=full.dtype, device=full.device)

    def _gather(self, full: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        comm, sent, received = self._comms.all_gather, as_comm_dtype(own), as_comm_dtype(full)
        assert comm is not None
        end(comm(output_tensor=received, input_tensor=sent, group=group, async_op=False))

    def _reduce_buffers(
        self, gradients: torch.Tensor, group: dist.ProcessGroup
    ) -> Iterable[torch.Tensor]:
        comm = self._comms.reduce_scatter
        assert comm is not None
        return (
            comm.allocate((numel,), dtype=gradients.dtype, device=gradients.device)
            for numel in (self.plan.numel, self.plan.shard_numels[group.rank()])
        )

    def _reduce(
        self, own: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, op: Op
    ) -> None:
        comm, sent, received = self._comms.reduce_scatter, as_real(gradients), as_real(own)
        assert comm is not None
        end(comm(output_tensor=received, input_tensor=sent, group=group, op=op, async_op=False))
