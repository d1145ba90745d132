"""Collectives of the user's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    AVG,
    SUM,
    Collectives,
    Issued,
    as_real,
    divide_early,
    divided,
    end,
    own_range,
)
from fsdp_overlap.layout import BucketPlan
from fsdp_overlap.tensor.carried import as_carried
from fsdp_overlap.torch_internals import AllGather, ReduceScatter


@dataclass(frozen=True)
class CustomComms:
    """A user's collectives, with FSDP2's interfaces. ``None`` stands for the library's own."""

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None


class CustomCollectives:
    """For equal shards: the collectives of ``comms``, and those of ``others`` where it has none.

    The user's objects work on memory that they allocate, and may use it again for their next call.
    Parameters and gradients are views of other memory, so what travels is copied. On a CPU each
    collective is waited for at once.
    """

    def __init__(self, comms: CustomComms, others: Collectives[BucketPlan]) -> None:
        self._comms = comms
        self._others = others

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        comm = self._comms.all_gather
        if comm is None:
            return self._others.all_gather(full, shard, plan, group)
        gathered = comm.allocate(full.shape, dtype=full.dtype, device=full.device)
        own = own_range(gathered, plan, group).copy_(shard, non_blocking=True)
        sent, received = as_carried(own), as_carried(gathered)
        end(comm(output_tensor=received, input_tensor=sent, group=group, async_op=False))
        full.copy_(gathered)
        return Issued((), lambda: full)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        comm = self._comms.reduce_scatter
        if comm is None:
            return self._others.reduce_scatter(gradients, plan, group, divisor)
        left = divide_early(gradients, divisor)
        source, own = (
            comm.allocate((numel,), dtype=gradients.dtype, device=gradients.device)
            for numel in (plan.numel, plan.shard_numels[group.rank()])
        )
        source.copy_(gradients)
        op = AVG if divisor is None else SUM
        sent, received = as_real(source), as_real(own)
        work = comm(output_tensor=received, input_tensor=sent, group=group, op=op, async_op=False)
        end(work)
        mean = divided(own.clone(), left)
        return Issued((), lambda: mean)
