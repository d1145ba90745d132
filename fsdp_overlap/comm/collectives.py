"""How a param group is gathered and reduced, chosen once per param group from its backend.

Everything above says only "gather this", "reduce that". ``docs/performance.md`` holds the
measurements behind the choices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf, prod
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from fsdp_overlap.comm.process_groups import backend_name, communicates, is_in_python
from fsdp_overlap.comm.streams import has_streams
from fsdp_overlap.layout import ParamGroupPlan, Plan, RowsPlan
from fsdp_overlap.tensor.comm_dtypes import COMM_DTYPES, as_comm_dtype, comm_dtype_ranges
from fsdp_overlap.torch_internals import AllGather, AllgatherOptions, ReduceScatter

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def _reducing(options: Any, op: dist.ReduceOp.RedOpType, async_op: bool = False) -> Any:
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = async_op
    return options


# Options for the process group's own methods. torch.distributed's functions around these take about
# as long on the host as the calls themselves. Without asyncOp a collective runs on the current
# stream.
GATHER = AllgatherOptions()
GATHER.asyncOp = False
REDUCE_SCATTER = {op: _reducing(dist.ReduceScatterOptions(), op) for op in (AVG, SUM)}
_ALL_REDUCE = {
    (op, async_op): _reducing(dist.AllreduceOptions(), op, async_op)
    for op in (AVG, SUM)
    for async_op in (True, False)
}

_ALL_TO_ALL = {async_op: dist.AllToAllOptions() for async_op in (True, False)}
for _async_op, _options in _ALL_TO_ALL.items():
    _options.asyncOp = _async_op


@cache
def _from_rank(rank: int) -> Any:
    """Return options for an asynchronous broadcast from ``rank``, a place in the group."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = rank, 0, True
    return options


# Parameters of at least this size travel by themselves. The collectives of smaller ones take longer
# than a copy.
LARGE_BYTES = 256 * 1024

# Backends that cannot reduce to a mean, on any device.
_WITHOUT_MEANS = ("gloo", "mpi")


@dataclass(eq=False, slots=True)  # one is made for each collective, twice as fast as a NamedTuple
class PendingCollective:
    """A collective on its way: ``finish()`` gives its result once all ``works`` are done.

    ``works`` lists every piece. One handle for several pieces, which waits for the group alone, was
    seen to return before all outputs were written.
    """

    works: Sequence[dist.Work]
    finish: Callable[[], torch.Tensor]
    group: dist.ProcessGroup | None = None
    """The group that the works run on. ``None`` if there are none."""


P = TypeVar("P", contravariant=True)


class Collectives(Protocol[P]):
    """Gathers and reduces one param group. ``full`` and ``gradients`` have shape ``[plan.numel]``,
    ``shard`` and the result of a reduction ``[plan.shard_numels[rank]]``. Each method is collective
    over ``group``."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: P, group: dist.ProcessGroup
    ) -> PendingCollective:
        """Fill ``full`` in place from every rank's ``shard``, cast to ``full``'s dtype. The shard
        may lie in the host's memory. It is read from there in the order of the current stream."""
        ...

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: P,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        """Return this rank's range of the sum of all ranks' ``gradients``, divided by ``divisor``.
        ``None`` stands for the number of ranks, in whichever way the backend takes a mean.
        ``gradients`` may be overwritten."""
        ...


Coalesced = tuple[list[torch.Tensor], list[torch.Tensor]]
"""What a coalesced all-gather fills, and what this rank sends for each. Flat."""


class CoalescedAllGather(ABC):
    """Collectives whose all-gather NCCL can run as one with those of other param groups."""

    @abstractmethod
    def prepare_coalesced(
        self, full: torch.Tensor, shard: torch.Tensor, plan: Any, group: dist.ProcessGroup
    ) -> Coalesced:
        """Put this rank's shard where it is sent from, and return what is to be gathered. The
        arguments are those of :meth:`Collectives.all_gather`."""


class LocalCollectives:
    """One rank: nothing travels."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: Plan, group: dist.ProcessGroup
    ) -> PendingCollective:
        full.copy_(shard, non_blocking=True)
        return PendingCollective((), lambda: full)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: Plan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        return PendingCollective((), lambda: divided(gradients.clone(), divisor))


class TensorCollectives:
    """For equal shards on a device with streams: one collective over the flat tensors."""

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
    ) -> PendingCollective:
        sent = self._sent(full, shard, plan, group)
        if full.dtype in COMM_DTYPES:
            end(group._allgather_base(full, sent, GATHER))
        else:
            end(group._allgather_base(as_comm_dtype(full), as_comm_dtype(sent), GATHER))
        return PendingCollective((), lambda: full)

    def prepare_coalesced(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
    ) -> Coalesced:
        """Do as :meth:`CoalescedAllGather.prepare_coalesced`."""
        return [as_comm_dtype(full)], [as_comm_dtype(self._sent(full, shard, plan, group))]

    def _sent(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        if shard.dtype == full.dtype and shard.is_cpu == full.is_cpu:
            return shard
        return own_range(full, plan, group).copy_(shard, non_blocking=True)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        left = divide_early(gradients, divisor)
        own = gradients.new_empty(plan.shard_numels[group.rank()])
        reduce_into(own, gradients, group, AVG if divisor is None else SUM)
        return PendingCollective((), lambda: divided(own, left))


class NcclCollectives(TensorCollectives, CoalescedAllGather):
    """For equal shards on NCCL."""


class RaggedTensorCollectives:
    """For ragged shards on NCCL: lists of ranges of different sizes. NCCL makes one group of
    broadcasts or reduces of a list; from 2.29 on, which comes with torch 2.13, it runs the
    broadcasts as one.

    The calls are asynchronous, and the current stream waits at once. Of synchronous ones torch
    records the end of the group on a stream that they did not run on, so its watchdog would take
    one that hangs as done.
    """

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
    ) -> PendingCollective:
        own_range(full, plan, group).copy_(shard, non_blocking=True)
        ranges = comm_dtype_ranges(full, plan.shard_numels)
        end(dist.all_gather(list(ranges), ranges[group.rank()], group, async_op=True))
        return PendingCollective((), lambda: full)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        left = divide_early(gradients, divisor)
        own = gradients.new_empty(plan.shard_numels[group.rank()])
        ranges = list(as_real(gradients).split(list(plan.shard_numels)))
        op = AVG if divisor is None else SUM
        end(dist.reduce_scatter(as_real(own), ranges, op, group, async_op=True))
        return PendingCollective((), lambda: divided(own, left))


class GlooCollectives:
    """For equal or ragged shards on gloo: a broadcast of each rank's range in place, and two
    all-to-alls with a local sum.

    Gloo's own all-gather copies through lists of tensors. Its reduce-scatter is an all-reduce
    inside.
    """

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
    ) -> PendingCollective:
        own_range(full, plan, group).copy_(shard)
        ranges = comm_dtype_ranges(full, plan.shard_numels)
        works = [
            group.broadcast([held], _from_rank(rank))
            for rank, held in enumerate(ranges)
            if held.numel()
        ]
        return PendingCollective(works, lambda: full, group)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        # One all-to-all to the ranks before this one, and one to the ranks after it. A single one
        # would also send this rank its own range, and so need memory for it twice.
        numels, rank = plan.shard_numels, group.rank()
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
        self,
        gradients: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        left = divide_early(gradients, 2 if divisor is None else divisor)
        ranges, rank = gradients.split(list(plan.shard_numels)), group.rank()
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
    if divisor is None and backend_name(values.device.type, group) in _WITHOUT_MEANS:
        divisor = group.size()
    left = divide_early(values, divisor)
    is_host = not has_streams(values.device)  # elsewhere the current stream waits, not the host
    options = _ALL_REDUCE[AVG if divisor is None else SUM, is_host]
    work = group.allreduce([as_real(values)], options)
    if not is_host:
        end(work)
    return PendingCollective((work,) if is_host else (), lambda: divided(values, left), group)


def choose(
    device_type: str, group: dist.ProcessGroup, plan: ParamGroupPlan
) -> Collectives[ParamGroupPlan]:
    """Return the fastest collectives known for ``plan`` on the backend of ``group`` on
    ``device_type``."""
    if not communicates(group):
        return LocalCollectives()
    if device_type == "cpu" and backend_name(device_type, group) == "gloo":
        return GlooPairCollectives() if group.size() == 2 else GlooCollectives()
    if not plan.is_equal or is_in_python(group, device_type):
        return RaggedTensorCollectives()
    is_nccl = backend_name(device_type, group) == "nccl"
    return NcclCollectives() if is_nccl else TensorCollectives()


@cache
def coalesces() -> bool:
    """Return whether groups take many collectives as one. In torch 2.11 those of the debug level
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` do not, so at that level none is asked to. Asked once, when
    groups were made, because torch takes as long to tell as a call of a hook."""
    return dist.get_debug_level() != dist.DebugLevel.DETAIL


def all_gather_coalesced(tensors: Coalesced, group: dist.ProcessGroup) -> None:
    """Fill the first of ``tensors`` from the second, in one launch. Collective over ``group``."""
    received, sent = tensors
    if coalesces():
        end(group.allgather_into_tensor_coalesced(received, sent, GATHER))
        return
    for full, own in zip(received, sent, strict=True):
        end(group._allgather_base(full, own, GATHER))


def reduce_into(
    own: torch.Tensor,
    gradients: torch.Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType,
) -> None:
    """Fill ``own`` with this rank's range of all ranks' ``gradients``, reduced by ``op``, which is
    a sum or a mean. Ranges are equal. Collective over ``group``."""
    end(group._reduce_scatter_base(as_real(own), as_real(gradients), REDUCE_SCATTER[op]))


def end(work: dist.Work | None) -> None:
    """End a synchronous collective, for which some backends return a work all the same."""
    if work is not None:
        work.wait()


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


# ---- Rows: a rank has a chunk of each parameter. In a shard the chunks of one rank follow each
# other, and in a flat buffer the chunks of one parameter. ----


class InPlaceRows(CoalescedAllGather):
    """For NCCL, which runs many collectives as one: a collective for each parameter, in place in
    the flat buffer."""

    def __init__(self) -> None:
        self._regions = _Views(regions_of)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: RowsPlan, group: dist.ProcessGroup
    ) -> PendingCollective:
        all_gather_coalesced(self.prepare_coalesced(full, shard, plan, group), group)
        return PendingCollective((), lambda: full)

    def prepare_coalesced(
        self, full: torch.Tensor, shard: torch.Tensor, plan: RowsPlan, group: dist.ProcessGroup
    ) -> Coalesced:
        regions = self._regions.of(full, plan)
        own = [region[group.rank()] for region in regions]
        torch._foreach_copy_(own, chunks_of(shard, plan), non_blocking=True)
        received = [as_comm_dtype(region.view(-1)) for region in regions]
        return received, [as_comm_dtype(chunk) for chunk in own]

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: RowsPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        left = divide_early(gradients, divisor)
        own = _new(gradients, plan.shard_numels[group.rank()], plan)
        received = [as_real(chunk) for chunk in chunks_of(own, plan)]
        sent = [as_real(region.view(-1)) for region in self._regions.of(gradients, plan)]
        op = AVG if divisor is None else SUM
        if coalesces():
            end(group.reduce_scatter_tensor_coalesced(received, sent, REDUCE_SCATTER[op]))
        else:
            for mine, of_all in zip(received, sent, strict=True):
                reduce_into(mine, of_all, group, op)
        return PendingCollective((), lambda: divided(own, left))


class PackedRows:
    """For any backend: ``others`` gather into a packed buffer, where shards follow each other, and
    reduce one. Chunks are copied between it and the flat buffer.

    Parameters of at least ``large_bytes`` are left out of the packed buffer, which would take as
    much memory again. ``others`` gather and reduce each of them by itself, in place.
    """

    def __init__(self, others: Collectives[ParamGroupPlan], large_bytes: float = inf) -> None:
        self._others = others
        self._large_bytes = large_bytes
        self._regions = _Views(regions_of)
        self._divisions: dict[int, _Division] = {}
        """By the size of an element."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: RowsPlan, group: dist.ProcessGroup
    ) -> PendingCollective:
        division = self._division(plan, full)
        regions, chunks = self._regions.of(full, plan), chunks_of(shard, plan)
        parts = [
            self._others.all_gather(regions[index].view(-1), chunks[index], alone, group)
            for index, alone in division.large
        ]
        small = division.small
        if not small.specs:
            return _together(parts, lambda: full)
        packed = full.new_empty(small.packed.numel)
        if division.large:
            shard = packed.view(small.world_size, -1)[group.rank()]
            torch._foreach_copy_(chunks_of(shard, small), division.of_small(chunks))
        parts.append(self._others.all_gather(packed, shard, small.packed, group))

        def finish() -> torch.Tensor:
            for part in parts:
                part.finish()
            targets, sources = division.places.of(full, plan), _packed_chunks(packed, small)
            torch._foreach_copy_(targets, sources)
            return full

        return _together(parts, finish)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: RowsPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
        division = self._division(plan, gradients)
        regions = self._regions.of(gradients, plan)
        parts = [
            self._others.reduce_scatter(regions[index].view(-1), alone, group, divisor)
            for index, alone in division.large
        ]
        small = division.small
        if small.specs:
            packed = _new(gradients, small.packed.numel, small)
            targets, sources = _packed_chunks(packed, small), division.places.of(gradients, plan)
            torch._foreach_copy_(targets, sources)
            parts.append(self._others.reduce_scatter(packed, small.packed, group, divisor))

        def finish() -> torch.Tensor:
            if not division.large:
                return parts[0].finish()
            own = _new(gradients, plan.shard_numels[0], plan)
            chunks = chunks_of(own, plan)
            for part, (index, _) in zip(parts, division.large, strict=False):
                chunks[index].copy_(part.finish())
            if small.specs:
                shard = parts[-1].finish()
                torch._foreach_copy_(division.of_small(chunks), chunks_of(shard, small))
            return own

        return _together(parts, finish)

    def _division(self, plan: RowsPlan, flat: torch.Tensor) -> _Division:
        size = flat.element_size()
        if size not in self._divisions:
            self._divisions[size] = _Division(plan, self._large_bytes / size)
        return self._divisions[size]


def _together(
    parts: Sequence[PendingCollective], finish: Callable[[], torch.Tensor]
) -> PendingCollective:
    """Return several collectives of one group as one, whose result ``finish`` gives."""
    return PendingCollective(
        [work for part in parts for work in part.works], finish, parts[0].group
    )


class _Division:
    """Which parameters of a param group travel by themselves: those of at least ``large`` elements.
    The others are ``small``."""

    def __init__(self, plan: RowsPlan, large: float) -> None:
        ranks = plan.world_size
        sizes = list(zip(plan.specs, plan.chunks, strict=True))
        self.large = [
            (index, ParamGroupPlan((), (), (chunk,) * ranks))
            for index, (spec, chunk) in enumerate(sizes)
            if spec.cut_dim == 0 and chunk * ranks >= large
        ]
        """The number of each, and its plan."""
        alone = {index for index, _ in self.large}
        self._indices = [index for index in range(len(sizes)) if index not in alone]
        self.small = RowsPlan(tuple(plan.specs[index] for index in self._indices), ranks)
        self.places = _Views(partial(_chunks_in, indices=self._indices))
        """Where the chunks of :func:`_packed_chunks` lie in a flat buffer."""

    def of_small(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [chunks[index] for index in self._indices]


def choose_for_rows(
    device_type: str, group: dist.ProcessGroup, plan: RowsPlan
) -> Collectives[RowsPlan]:
    """Return the fastest collectives known for ``plan`` on the backend of ``group`` on
    ``device_type``."""
    if plan.is_in_place and backend_name(device_type, group) == "nccl":
        return InPlaceRows()
    return PackedRows(choose(device_type, group, plan.packed), LARGE_BYTES)


class _Views:
    """Views of the flat buffers of one param group, made once for each."""

    def __init__(self, make: Callable[[torch.Tensor, RowsPlan], list[torch.Tensor]]) -> None:
        self._make = make
        self._known: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def of(self, flat: torch.Tensor, plan: RowsPlan) -> list[torch.Tensor]:
        for known, views in self._known:
            if known is flat:
                return views
        with torch.inference_mode(False), torch.no_grad():
            views = self._make(flat, plan)
        self._known.append((flat, views))
        return views


def _new(like: torch.Tensor, numel: int, plan: RowsPlan) -> torch.Tensor:
    """Return memory for gradients. What no parameter fills is zero, because it travels too."""
    return like.new_empty(numel) if plan.is_even else like.new_zeros(numel)


def regions_of(flat: torch.Tensor, plan: RowsPlan) -> list[torch.Tensor]:
    """Return what each parameter takes of a flat buffer, with a row for each rank's chunk."""
    ranks = plan.world_size
    return [
        flat[offset : offset + ranks * chunk].view(ranks, chunk)
        for offset, chunk in zip(plan.offsets, plan.chunks, strict=True)
    ]


def chunks_of(shard: torch.Tensor, plan: RowsPlan) -> list[torch.Tensor]:
    """Return the chunks in a shard, flat."""
    parts = list(shard.split_with_sizes(plan.sizes))
    return parts[::2] if plan.has_gaps else parts


def _chunks_in(flat: torch.Tensor, plan: RowsPlan, indices: Sequence[int]) -> list[torch.Tensor]:
    """Return where the chunks of :func:`_packed_chunks` lie in a flat buffer: those of the
    parameters ``indices``."""
    found = []
    regions = regions_of(flat, plan)
    for index in indices:
        spec, offset = plan.specs[index], plan.offsets[index]
        if spec.cut_dim == 0:
            found.append(regions[index])
            continue
        whole = flat[offset : offset + spec.numel].view(spec.shape)
        for rank in range(plan.world_size):
            first, last = plan.held(spec, rank)
            found.append(whole.narrow(spec.cut_dim, first, last - first))
    return found


def _packed_chunks(packed: torch.Tensor, plan: RowsPlan) -> list[torch.Tensor]:
    """Return the chunks in a packed buffer: of all ranks together, with a row for each, or one by
    one if the parameter is not cut along its first dimension."""
    columns = list(packed.view(plan.world_size, -1).split_with_sizes(plan.sizes, 1))
    if plan.has_gaps:
        columns = columns[::2]
    if plan.is_in_place:
        return columns
    found: list[torch.Tensor] = []
    for spec, column in zip(plan.specs, columns, strict=True):
        if spec.cut_dim == 0:
            found.append(column)
            continue
        for rank, chunk in enumerate(column):
            shape = plan.chunk_shape(spec, rank)
            found.append(chunk[: prod(shape)].view(shape))
    return found


# ---- Collectives of the user's own ----


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

    def __init__(self, comms: CustomComms, others: Collectives[ParamGroupPlan]) -> None:
        self._comms = comms
        self._others = others

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
    ) -> PendingCollective:
        comm = self._comms.all_gather
        if comm is None:
            return self._others.all_gather(full, shard, plan, group)
        gathered = comm.allocate(full.shape, dtype=full.dtype, device=full.device)
        own = own_range(gathered, plan, group).copy_(shard, non_blocking=True)
        sent, received = as_comm_dtype(own), as_comm_dtype(gathered)
        end(comm(output_tensor=received, input_tensor=sent, group=group, async_op=False))
        full.copy_(gathered)
        return PendingCollective((), lambda: full)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: ParamGroupPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> PendingCollective:
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
        return PendingCollective((), lambda: mean)
