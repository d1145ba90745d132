"""How a bucket is gathered and reduced, chosen once per bucket from its backend.

Everything above says only "gather this", "reduce that". ``docs/performance.md`` holds the
measurements behind the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_overlap.comm.pool import backend_name
from fsdp_overlap.layout import BucketPlan

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

# Of the process group's own methods: torch.distributed's functions around them take about as long
# on the host as the calls themselves. Synchronous is what runs on the current stream.
_GATHER = c10d.AllgatherOptions()
_GATHER.asyncOp = False
_MEAN = c10d.ReduceScatterOptions()
_MEAN.asyncOp = False
_MEAN.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
_SUM = c10d.ReduceScatterOptions()
_SUM.asyncOp = False


class Issued(NamedTuple):
    """A collective on its way: ``finish()`` gives its result once all ``works`` are done.

    ``works`` names every piece: a handle that stands for several and waits only for the group has
    been seen to return before all outputs were written.
    """

    works: Sequence[dist.Work]
    finish: Callable[[], torch.Tensor]
    group: dist.ProcessGroup | None = None
    """Of the works, if there are any."""


class Collectives(Protocol):
    """``full`` and ``gradients`` have shape ``[plan.numel]``, ``shard`` and the result of a
    reduction ``[plan.shard_numels[rank]]``. Collective over ``group``."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        """Fills ``full`` in place from every rank's ``shard``, cast to ``full``'s dtype. The shard
        may lie in the host's memory, and is read from there in the order of the current stream."""
        ...

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        """This rank's range of the sum of all ranks' ``gradients``, which may be overwritten,
        divided by ``divisor``. ``None`` stands for the number of ranks, in whichever way the
        backend takes a mean."""
        ...


class LocalCollectives:
    """One rank: nothing travels."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        full.copy_(shard, non_blocking=True)
        return Issued((), lambda: full)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        return Issued((), lambda: _divided(gradients.clone(), divisor))


class TensorCollectives:
    """One collective over the flat tensors, equal shards: NCCL."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        if shard.dtype != full.dtype or shard.is_cpu != full.is_cpu:
            shard = _own_range(full, plan, group).copy_(shard, non_blocking=True)
        _finish(group._allgather_base(_as_real(full), _as_real(shard), _GATHER))
        return Issued((), lambda: full)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        gradients, left = _divide_early(gradients, divisor)
        own = gradients.new_empty(plan.shard_numels[group.rank()])
        options = _MEAN if divisor is None else _SUM
        _finish(group._reduce_scatter_base(_as_real(own), _as_real(gradients), options))
        return Issued((), lambda: _divided(own, left))


class RaggedTensorCollectives:
    """Lists of ranges of different sizes, which NCCL makes one group of broadcasts or reduces
    of."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        own = _own_range(full, plan, group).copy_(shard, non_blocking=True)
        dist.all_gather(list(full.split(list(plan.shard_numels))), own, group)
        return Issued((), lambda: full)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        gradients, left = _divide_early(gradients, divisor)
        own = gradients.new_empty(plan.shard_numels[group.rank()])
        ranges = list(gradients.split(list(plan.shard_numels)))
        op = dist.ReduceOp.AVG if divisor is None else dist.ReduceOp.SUM
        dist.reduce_scatter(own, ranges, op, group)
        return Issued((), lambda: _divided(own, left))


class GlooCollectives:
    """Gloo, equal or ragged: a broadcast of each rank's range in place, and two all-to-alls with a
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
        return Issued(works, lambda: full, group)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        # Two all-to-alls, to the ranks before this one and to those after it: one would also send
        # this rank its own range, and so need memory for it twice.
        numels, rank = plan.shard_numels, group.rank()
        gradients, left = _divide_early(gradients, len(numels) if divisor is None else divisor)
        before, after = rank, len(numels) - rank - 1
        own = numels[rank]
        sent_down, mine, sent_up = gradients.split(
            [sum(numels[:rank]), own, sum(numels[rank + 1 :])]
        )
        lower, higher = gradients.new_empty(before, own), gradients.new_empty(after, own)
        works = [
            *all_to_all(
                higher.flatten(),
                sent_down,
                [0] * (before + 1) + [own] * after,
                [*numels[:rank], *[0] * (after + 1)],
                group,
            ).works,
            *all_to_all(
                lower.flatten(),
                sent_up,
                [own] * before + [0] * (after + 1),
                [*[0] * (before + 1), *numels[rank + 1 :]],
                group,
            ).works,
        ]

        def finish() -> torch.Tensor:
            # In rank order, so that the sum does not depend on who came first. Additions one by one
            # take half the time of sum(dim=0) here, and the sum must not keep what was received
            # alive.
            of_each = [*lower.unbind(), mine, *higher.unbind()]
            total = of_each[0] + of_each[1]
            for other in of_each[2:]:
                total.add_(other)
            return _divided(total, left)

        return Issued(works, finish, group)


@dataclass(frozen=True)
class CustomComms:
    """A user's collectives, of FSDP2's interfaces; ``None`` for those chosen here."""

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None


class CustomCollectives:
    """Equal shards by ``comms``, and what these leave open by ``others``.

    Parameters and gradients are views of memory that is given, so what travels is copied out of and
    into what the user's objects allocate, which they may use again for their next call. On a CPU
    each is waited for at once.
    """

    def __init__(self, comms: CustomComms, others: Collectives) -> None:
        self._comms = comms
        self._others = others

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        comm = self._comms.all_gather
        if comm is None:
            return self._others.all_gather(full, shard, plan, group)
        gathered = comm.allocate(full.shape, dtype=full.dtype, device=full.device)
        own = _own_range(gathered, plan, group).copy_(shard, non_blocking=True)
        _finish(comm(output_tensor=gathered, input_tensor=own, group=group, async_op=False))
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
        gradients, left = _divide_early(gradients, divisor)
        source, own = (
            comm.allocate((numel,), dtype=gradients.dtype, device=gradients.device)
            for numel in (plan.numel, plan.shard_numels[group.rank()])
        )
        source.copy_(gradients)
        op = dist.ReduceOp.AVG if divisor is None else dist.ReduceOp.SUM
        work = comm(output_tensor=own, input_tensor=source, group=group, op=op, async_op=False)
        _finish(work)
        mean = _divided(own.clone(), left)
        return Issued((), lambda: mean)


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
    return Issued((work,) if is_host else (), lambda: output, group)


def all_reduce(
    values: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
) -> Issued:
    """Makes ``values`` the sum over ranks, divided by ``divisor``, ``None`` as in
    :meth:`Collectives.reduce_scatter`. Collective over ``group``."""
    if values.device.type == "cpu":  # of whose backends none takes a mean
        values, left = _divide_early(values, group.size() if divisor is None else divisor)
        work = dist.all_reduce(_as_real(values), group=group, async_op=True)
        return Issued((work,), lambda: _divided(values, left), group)
    values, left = _divide_early(values, divisor)
    op = dist.ReduceOp.AVG if divisor is None else dist.ReduceOp.SUM
    dist.all_reduce(_as_real(values), op, group)
    return Issued((), lambda: _divided(values, left))


def choose(device_type: str, group: dist.ProcessGroup, plan: BucketPlan) -> Collectives:
    """The fastest collectives known for ``plan`` on the backend of ``group`` on ``device_type``."""
    if group.size() == 1:
        return LocalCollectives()
    if device_type == "cpu" and backend_name(device_type, group) == "gloo":
        return GlooCollectives()
    return TensorCollectives() if plan.is_equal else RaggedTensorCollectives()


def _finish(work: dist.Work | None) -> None:
    """Of a synchronous collective. Some backends return a work all the same."""
    if work is not None:
        work.wait()


def _divide_early(
    gradients: torch.Tensor, divisor: float | None
) -> tuple[torch.Tensor, float | None]:
    """``gradients`` to be summed, and what is left to divide the sum by: half precision, whose sum
    may overflow, is divided before."""
    if divisor is None or gradients.dtype is not torch.float16:
        return gradients, divisor
    return gradients.div_(divisor), None


def _divided(total: torch.Tensor, divisor: float | None) -> torch.Tensor:
    return total if divisor is None or divisor == 1 else total.div_(divisor)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as backends know it: most have no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _own_range(full: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup) -> torch.Tensor:
    rank = group.rank()
    return full.narrow(0, plan.shard_starts[rank], plan.shard_numels[rank])
