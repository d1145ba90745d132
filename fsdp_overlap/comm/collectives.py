"""Collectives that gather and reduce a param group, chosen once per param group for its backend.

These are for param groups of which each rank has one range. Those of rows, custom ones and
those of few bits wrap them. ``docs/performance.md`` holds the measurements behind the choices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from fsdp_overlap.comm.comm_streams import PendingCollective, has_streams
from fsdp_overlap.comm.process_groups import backend_name, communicates, is_in_python
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.tensor.comm_dtypes import COMM_DTYPES, as_comm_dtype, comm_dtype_ranges
from fsdp_overlap.torch_internals import AllgatherOptions

Op = dist.ReduceOp.RedOpType
AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def _reducing(options: Any, op: Op, async_op: bool = False) -> Any:
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = async_op
    return options


# Options for the process group's own methods. torch.distributed's functions around these take about
# as long on the host as the calls themselves. Without asyncOp a collective runs on the current
# stream.
GATHER = AllgatherOptions()
GATHER.asyncOp = False
REDUCE_SCATTER = {op: _reducing(dist.ReduceScatterOptions(), op) for op in (AVG, SUM)}
_GATHER_LIST = AllgatherOptions()
_GATHER_LIST.asyncOp = True
_REDUCE_SCATTER_LIST = {
    op: _reducing(dist.ReduceScatterOptions(), op, async_op=True) for op in (AVG, SUM)
}
_ALL_REDUCE = {
    (op, async_op): _reducing(dist.AllreduceOptions(), op, async_op)
    for op in (AVG, SUM)
    for async_op in (True, False)
}

_ALL_TO_ALL = {async_op: dist.AllToAllOptions() for async_op in (True, False)}
for _async_op, _options in _ALL_TO_ALL.items():
    _options.asyncOp = _async_op


@cache
def _from_rank(rank: int, async_op: bool = True) -> Any:
    """Return options for a broadcast from ``rank``, a place in the group."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = rank, 0, async_op
    return options


@cache
def _to_rank(rank: int, op: Op, async_op: bool) -> Any:
    """Return options for a reduction to ``rank``, a place in the group."""
    options = _reducing(dist.ReduceOptions(), op, async_op)
    options.rootRank, options.rootTensor = rank, 0
    return options


# Backends that cannot reduce to a mean, on any device.
_WITHOUT_MEANS = ("gloo", "mpi")


class Collectives(Protocol):
    """Gathers and reduces one param group, of a plan that is given before. ``full`` and
    ``gradients`` have shape ``[plan.numel]``, ``shard`` and the result of a reduction
    ``[plan.shard_numels[rank]]``. Each method is collective over ``group``."""

    @abstractmethod
    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        """Fill ``full`` in place from every rank's ``shard``, cast to ``full``'s dtype. The shard
        may lie in the host's memory. It is read from there in the order of the current stream."""
        ...

    @abstractmethod
    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        """Return this rank's range of the sum of all ranks' ``gradients``, divided by ``divisor``.
        ``None`` stands for the number of ranks, in whichever way the backend takes a mean.
        ``gradients`` may be overwritten."""
        ...


GatherTensors = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The outputs of coalesced all-gathers, and this rank's input to each. All are flat."""


class RangeCollectives(Collectives):
    """For a plan by which each rank has one range of the flat buffer."""

    def __init__(self, plan: ParamGroupPlan) -> None:
        self.plan = plan

    def for_plan(self, plan: ParamGroupPlan) -> RangeCollectives:
        """Return the same collectives for another plan."""
        return type(self)(plan)


class CoalescedGathers(Collectives):
    """On NCCL, which can run the all-gathers of several param groups as one."""

    @abstractmethod
    def gather_tensors(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> GatherTensors:
        """Copy this rank's shard to where it is sent from, and return what is to be gathered. The
        arguments are those of :meth:`all_gather`."""
        ...


class Transport:
    """Other collectives of a unit than those of its backend, which a user asked for."""

    name: ClassVar[str]
    """What the unit uses, in words."""
    is_capturable: ClassVar[bool] = True
    """Whether CUDA graphs may capture it."""

    def wrap(self, collectives: RangeCollectives, param_group: Any) -> RangeCollectives:
        """Return what gathers and reduces ``param_group`` in place of ``collectives``."""
        raise NotImplementedError


@dataclass(frozen=True)
class CollectivePair:
    """Gathers and reduces a param group, each of the two in its own way. See
    :class:`Collectives`."""

    all_gather: Callable[..., PendingCollective]
    reduce_scatter: Callable[..., PendingCollective]


def end(work: dist.Work | None) -> None:
    """End a synchronous collective, for which some backends return a work all the same."""
    if work is not None:
        work.wait()


def reduce_into(
    own: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, op: Op
) -> None:
    """Fill ``own`` with this rank's range of all ranks' ``gradients``, reduced by ``op``, which is
    a sum or a mean. Ranges are equal. Collective over ``group``."""
    if own.is_complex():
        own, gradients = as_real(own), as_real(gradients)
    work = group._reduce_scatter_base(own, gradients, REDUCE_SCATTER[op])
    if work is not None:  # as end(), without a call for each collective
        work.wait()


def gather_into(full: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``full`` with all ranks' ``own``. Ranges are equal. Collective over ``group``."""
    end(group._allgather_base(as_comm_dtype(full), as_comm_dtype(own), GATHER))


# ---- For each backend ----


class LocalCollectives(RangeCollectives):
    """One rank: nothing travels."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        full.copy_(shard, non_blocking=True)
        return PendingCollective((), lambda: full)

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        return PendingCollective((), lambda: divided(gradients.clone(), divisor))


class TensorCollectives(RangeCollectives):
    """For equal shards on a device with streams: one collective over the flat tensors."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        if shard.dtype != full.dtype or shard.is_cpu != full.is_cpu:
            shard = self._cast(full, shard, group)
        if full.dtype not in COMM_DTYPES:
            gather_into(full, shard, group)
        elif (work := group._allgather_base(full, shard, GATHER)) is not None:
            work.wait()  # as in reduce_into()
        return PendingCollective((), lambda: full)

    def _cast(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Copy ``shard``, of another dtype or on the host, to where it is sent from."""
        return own_range(full, self.plan, group).copy_(shard, non_blocking=True)

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        left = None if divisor is None else divide_early(gradients, divisor)
        own = gradients.new_empty(self.plan.shard_numels[group.rank()])
        self._reduce(own, gradients, group, AVG if divisor is None else SUM)
        return PendingCollective((), lambda: own if left is None else divided(own, left))

    _reduce = staticmethod(reduce_into)


class NcclCollectives(TensorCollectives, CoalescedGathers):
    """For equal shards on NCCL."""

    def gather_tensors(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> GatherTensors:
        if shard.dtype != full.dtype or shard.is_cpu != full.is_cpu:
            shard = self._cast(full, shard, group)
        return [as_comm_dtype(full)], [as_comm_dtype(shard)]


class RaggedTensorCollectives(TensorCollectives):
    """For ragged shards on NCCL: lists of ranges of different sizes. torch makes one NCCL group of
    broadcasts or reduces of a list; from 2.29 on, which comes with torch 2.13, NCCL runs the
    broadcasts as one.

    The calls are asynchronous, and the current stream waits at once. Of synchronous ones torch
    records the end of the group on a stream that they did not run on, so its watchdog would take
    one that hangs as done.
    """

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        own_range(full, self.plan, group).copy_(shard, non_blocking=True)
        self._gather(full, group)
        return PendingCollective((), lambda: full)

    def _gather(self, full: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``full``, which has this rank's range."""
        ranges = list(comm_dtype_ranges(full, self.plan.shard_numels))
        end(group.allgather([ranges], [ranges[group.rank()]], _GATHER_LIST))

    def _reduce(
        self, own: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, op: Op
    ) -> None:
        ranges = list(as_real(gradients).split(list(self.plan.shard_numels)))
        end(group.reduce_scatter([as_real(own)], [ranges], _REDUCE_SCATTER_LIST[op]))


class OwnerCollectives(RaggedTensorCollectives):
    """For ragged shards of which some are empty: a broadcast from each rank that holds something,
    or a reduce to it, in one launch.

    Of a list torch's NCCL group makes a call for each rank, also for those that hold nothing, and
    each costs the host as much as a collective. Calls that are coalesced are asynchronous, for the
    reason of :class:`RaggedTensorCollectives`, and the work of the whole alone can be waited for. A
    single call is synchronous: it runs on the current stream.
    """

    def __init__(self, plan: ParamGroupPlan) -> None:
        super().__init__(plan)
        self._owned = _owned(plan)

    def for_plan(self, plan: ParamGroupPlan) -> RangeCollectives:
        if plan.is_equal:
            return TensorCollectives(plan)
        return (type(self) if 0 in plan.shard_numels else RaggedTensorCollectives)(plan)

    def _gather(self, full: torch.Tensor, group: dist.ProcessGroup) -> None:
        is_async = len(self._owned) > 1
        calls = [
            (as_comm_dtype(full.narrow(0, start, numel)), _from_rank(rank, is_async))
            for rank, start, numel in self._owned
        ]
        _launch(group.broadcast, calls, group)

    def _reduce(
        self, own: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, op: Op
    ) -> None:
        is_async, here, calls = len(self._owned) > 1, group.rank(), []
        for rank, start, numel in self._owned:
            held = gradients.narrow(0, start, numel)
            if rank == here:
                held = own.copy_(held)  # reduced in place
            calls.append((as_real(held), _to_rank(rank, op, is_async)))
        _launch(group.reduce, calls, group)


def _owned(plan: ParamGroupPlan) -> Sequence[tuple[int, int, int]]:
    """Return the rank, the start and the size of each range that is not empty."""
    ranges = zip(plan.shard_starts, plan.shard_numels, strict=True)
    return [(rank, start, numel) for rank, (start, numel) in enumerate(ranges) if numel]


def _launch(
    call: Callable[[list[torch.Tensor], Any], dist.Work | None],
    calls: Sequence[tuple[torch.Tensor, Any]],
    group: dist.ProcessGroup,
) -> None:
    """Make several calls of ``group``, each with a tensor and its options, in one launch."""
    tensor, options = calls[0]
    if len(calls) == 1:
        end(call([tensor], options))
        return
    group._start_coalescing(tensor.device)
    try:
        for tensor, options in calls:
            call([tensor], options)
    finally:
        work = group._end_coalescing(tensor.device)
    end(work)


class GlooCollectives(RangeCollectives):
    """For equal or ragged shards on gloo: a broadcast of each rank's range in place, and two
    all-to-alls with a local sum.

    Gloo's own all-gather copies through lists of tensors. Its reduce-scatter is an all-reduce
    inside.
    """

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        own_range(full, self.plan, group).copy_(shard)
        ranges = comm_dtype_ranges(full, self.plan.shard_numels)
        works = [
            group.broadcast([held], _from_rank(rank))
            for rank, held in enumerate(ranges)
            if held.numel()
        ]
        return PendingCollective(works, lambda: full, group)

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        # One all-to-all to the ranks before this one, and one to the ranks after it. A single one
        # would also send this rank its own range, and so need memory for it twice.
        numels, rank = self.plan.shard_numels, group.rank()
        left = divide_early(gradients, len(numels) if divisor is None else divisor)
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
            # take half the time of sum(dim=0) here. The first makes a new tensor, so that the sum
            # does not keep what was received alive.
            of_each = [*lower.unbind(), mine, *higher.unbind()]
            total = of_each[0] + of_each[1]
            for other in of_each[2:]:
                total.add_(other)
            return divided(total, left)

        return PendingCollective(works, finish, group)


class GlooPairCollectives(GlooCollectives):
    """For two ranks on gloo: a reduction is one exchange, and what was received becomes the sum.

    A gather by one exchange would be slower where units are gathered ahead: gloo has two works of a
    group under way at once, so the next gather would take half of the link from this one.
    """

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        left = divide_early(gradients, 2 if divisor is None else divisor)
        ranges, rank = gradients.split(list(self.plan.shard_numels)), group.rank()
        mine, sent = ranges[rank], ranges[1 - rank]
        received, received_sizes, sent_sizes = torch.empty_like(mine), [0, 0], [0, 0]
        received_sizes[1 - rank], sent_sizes[1 - rank] = len(mine), len(sent)
        works = all_to_all(received, sent, received_sizes, sent_sizes, group).works
        return PendingCollective(works, lambda: divided(received.add_(mine), left), group)


def all_to_all(
    output: torch.Tensor,
    source: torch.Tensor,
    output_sizes: list[int],
    source_sizes: list[int],
    group: dist.ProcessGroup,
) -> PendingCollective:
    """Send ``source_sizes[r]`` elements of ``source`` to each rank ``r``, and fill ``output``
    with ``output_sizes[r]`` elements from each. Both are flat. Collective over ``group``."""
    is_host = not has_streams(output.device)  # elsewhere the current stream waits, not the host
    sent, received = as_real(source), as_real(output)
    if is_in_python(group, output.device.type):
        dist.all_to_all_single(received, sent, output_sizes, source_sizes, group)
        return PendingCollective((), lambda: output)
    work = group.alltoall_base(received, sent, output_sizes, source_sizes, _ALL_TO_ALL[is_host])
    if not is_host:
        end(work)
    return PendingCollective((work,) if is_host else (), lambda: output, group)


def all_reduce(
    values: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
) -> PendingCollective:
    """Replace ``values`` by their sum over ranks, divided by ``divisor``, which may be ``None`` as
    in :meth:`Collectives.reduce_scatter`. Collective over ``group``."""
    if divisor is None and backend_name(group, values.device.type) in _WITHOUT_MEANS:
        divisor = group.size()
    left = divide_early(values, divisor)
    is_host = not has_streams(values.device)  # elsewhere the current stream waits, not the host
    options = _ALL_REDUCE[AVG if divisor is None else SUM, is_host]
    work = group.allreduce([as_real(values)], options)
    if not is_host:
        end(work)
    return PendingCollective((work,) if is_host else (), lambda: divided(values, left), group)


def choose(group: dist.ProcessGroup, device_type: str, plan: ParamGroupPlan) -> RangeCollectives:
    """Return the fastest collectives known for ``plan`` on the backend of ``group`` on
    ``device_type``."""
    if not communicates(group):
        return LocalCollectives(plan)
    if device_type == "cpu" and backend_name(group, device_type) == "gloo":
        return GlooPairCollectives(plan) if group.size() == 2 else GlooCollectives(plan)
    if is_in_python(group, device_type):
        return RaggedTensorCollectives(plan)
    name = backend_name(group, device_type)
    if not plan.is_equal:
        return _choose_for_ragged(name, plan)
    return NcclCollectives(plan) if name == "nccl" else TensorCollectives(plan)


def _choose_for_ragged(backend: str, plan: ParamGroupPlan) -> RangeCollectives:
    owners = len(_owned(plan))
    # "nccl2", which torch 2.15 makes in NCCL's place, launches coalesced calls one by one. Its
    # lists are one launch, and a rank that holds nothing is no work of its own there.
    is_one_launch = (backend == "nccl" and owners < plan.world_size) or (
        backend == "nccl2" and owners == 1
    )
    return (OwnerCollectives if is_one_launch else RaggedTensorCollectives)(plan)


@cache
def coalesces() -> bool:
    """Return whether groups take many collectives as one. In torch 2.11 those of the debug level
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` do not, so at that level none is asked to. Asked once, when
    groups were made, because torch takes as long to tell as a call of a hook."""
    return dist.get_debug_level() != dist.DebugLevel.DETAIL


def all_gather_coalesced(tensors: GatherTensors, group: dist.ProcessGroup) -> None:
    """Gather ``tensors``, in one launch. Collective over ``group``."""
    outputs, inputs = tensors
    if coalesces():
        end(group.allgather_into_tensor_coalesced(outputs, inputs, GATHER))
        return
    for full, own in zip(outputs, inputs, strict=True):
        gather_into(full, own, group)


def divide_early(gradients: torch.Tensor, divisor: float | None) -> float | None:
    """Divide ``gradients`` in half precision by ``divisor`` in place, before they are summed,
    because the sum may overflow. Return what is left to divide the sum by."""
    if divisor is None or gradients.dtype not in (torch.float16, torch.complex32):
        return divisor
    as_real(gradients).div_(divisor)
    return None


def divided(total: torch.Tensor, divisor: float | None) -> torch.Tensor:
    """Divide ``total`` in place by ``divisor``, unless that is ``None``."""
    if divisor is not None and divisor != 1:
        as_real(total).div_(divisor)  # there is no division of half-precision complex numbers
    return total


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """View complex numbers as pairs of real ones, because backends reduce no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def own_range(full: torch.Tensor, plan: ParamGroupPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the part of ``full`` that this rank's shard fills."""
    rank = group.rank()
    return full.narrow(0, plan.shard_starts[rank], plan.shard_numels[rank])
