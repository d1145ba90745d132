"""How a bucket is gathered and reduced, chosen once per bucket from its backend.

Everything above says only "gather this", "reduce that". ``docs/performance.md`` holds the
measurements behind the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp_overlap.layout import BucketPlan

# torch 2.13 renames these two; 2.11 has the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Issued:
    """A collective on its way: ``finish()`` gives its result once all ``works`` are done.

    ``works`` names every piece: a handle that stands for several and waits only for the group has
    been seen to return before all outputs were written.
    """

    works: Sequence[dist.Work]
    finish: Callable[[], torch.Tensor]


class Collectives(Protocol):
    """``full`` and ``gradients`` have shape ``[plan.numel]``, ``shard`` and the result of a
    reduction ``[plan.shard_numels[rank]]``. Collective over ``group``."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        """Fills ``full`` in place from every rank's ``shard``, cast to ``full``'s dtype."""
        ...

    def reduce_scatter_mean(
        self, gradients: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        """This rank's range of the mean of all ranks' ``gradients``, which may be overwritten."""
        ...


class LocalCollectives:
    """One rank: nothing travels."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        full.copy_(shard)
        return Issued((), lambda: full)

    def reduce_scatter_mean(
        self, gradients: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        return Issued((), gradients.clone)


class TensorCollectives:
    """One collective over the flat tensors, equal shards: NCCL."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        if shard.dtype != full.dtype:
            shard = _own_range(full, plan, group).copy_(shard)
        _all_gather_single(full, shard, group)
        return Issued((), lambda: full)

    def reduce_scatter_mean(
        self, gradients: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        mean = torch.empty(
            plan.shard_numels[group.rank()], dtype=gradients.dtype, device=gradients.device
        )
        _reduce_scatter_single(mean, gradients, dist.ReduceOp.AVG, group)
        return Issued((), lambda: mean)


class RaggedTensorCollectives:
    """Lists of ranges of different sizes, which NCCL makes one group of broadcasts or reduces
    of."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        own = _own_range(full, plan, group).copy_(shard)
        dist.all_gather(list(full.split(list(plan.shard_numels))), own, group)
        return Issued((), lambda: full)

    def reduce_scatter_mean(
        self, gradients: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        mean = gradients.new_empty(plan.shard_numels[group.rank()])
        ranges = list(gradients.split(list(plan.shard_numels)))
        dist.reduce_scatter(mean, ranges, dist.ReduceOp.AVG, group)
        return Issued((), lambda: mean)


class GlooCollectives:
    """Gloo, equal or ragged: a broadcast of each rank's range in place, and an all-to-all with a
    local sum.

    Its own all-gather copies through lists of tensors, its reduce-scatter is an all-reduce inside.
    """

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        _own_range(full, plan, group).copy_(shard)
        ranges = full.split(list(plan.shard_numels))
        works = [
            dist.broadcast(held, group=group, group_src=rank, async_op=True)
            for rank, held in enumerate(ranges)
            if held.numel()
        ]
        return Issued(works, lambda: full)

    def reduce_scatter_mean(
        self, gradients: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        world, own = plan.world_size, plan.shard_numels[group.rank()]
        received = torch.empty(world * own, dtype=gradients.dtype, device=gradients.device)
        issued = all_to_all(received, gradients, [own] * world, list(plan.shard_numels), group)

        def finish() -> torch.Tensor:
            # In rank order, so that the sum does not depend on who came first. Additions one by one
            # take half the time of sum(dim=0) here, and the sum must not keep `received` alive.
            first, *others = received.view(world, own)
            mean = first + others[0]
            for other in others[1:]:
                mean.add_(other)
            return mean.div_(world)

        return Issued(issued.works, finish)


def all_to_all(
    output: torch.Tensor,
    source: torch.Tensor,
    output_sizes: list[int],
    source_sizes: list[int],
    group: dist.ProcessGroup,
) -> Issued:
    """Sends ``source_sizes[r]`` elements of ``source``, flat, to each rank ``r``, and fills
    ``output`` with ``output_sizes[r]`` elements of each. Collective over ``group``."""
    is_host = output.device.type == "cpu"  # elsewhere the current stream waits, not the host
    work = dist.all_to_all_single(
        output, source, output_sizes, source_sizes, group, async_op=is_host
    )
    return Issued((work,) if is_host else (), lambda: output)


def choose(device_type: str, group: dist.ProcessGroup, plan: BucketPlan) -> Collectives:
    """The fastest collectives known for ``plan`` on the backend of ``group`` on ``device_type``."""
    if group.size() == 1:
        return LocalCollectives()
    if device_type == "cpu" and backend_name(device_type, group) == "gloo":
        return GlooCollectives()
    return TensorCollectives() if plan.is_equal else RaggedTensorCollectives()


def backend_name(device_type: str, group: dist.ProcessGroup) -> str:
    """``"gloo"``, ``"nccl"``, ...: the backend that serves ``device_type`` in ``group``."""
    return group._get_backend(torch.device(device_type)).name().lower()


def _own_range(full: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup) -> torch.Tensor:
    rank = group.rank()
    return full.narrow(0, plan.shard_starts[rank], plan.shard_numels[rank])
