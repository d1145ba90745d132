"""Collectives of param groups of rows, of which a rank has a chunk of each parameter.

In a shard the chunks of one rank follow each other, and in a flat buffer the chunks of one
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    AVG,
    REDUCE_SCATTER,
    SUM,
    CoalescedGathers,
    Collectives,
    GatherTensors,
    RangeCollectives,
    all_gather_coalesced,
    as_real,
    choose,
    coalesces,
    divide_early,
    divided,
    end,
    reduce_into,
)
from fsdp_overlap.comm.comm_streams import PendingCollective
from fsdp_overlap.comm.process_groups import backend_name
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import ParamGroupPlan
from fsdp_overlap.tensor.comm_dtypes import as_comm_dtype

# Parameters of at least this size travel by themselves. The collectives of smaller ones take longer
# than a copy.
MIN_UNPACKED_BYTES = 256 * 1024


class InPlaceRows(CoalescedGathers):
    """For NCCL, which runs many collectives as one: a collective for each parameter, in place in
    the flat buffer."""

    def __init__(self, plan: RowsPlan) -> None:
        self._plan = plan
        self._regions = _Views(partial(regions_of, plan=plan))

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        all_gather_coalesced(self.gather_tensors(full, shard, group), group)
        return PendingCollective((), lambda: full)

    def gather_tensors(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> GatherTensors:
        regions = self._regions.of(full)
        own = [region[group.rank()] for region in regions]
        torch._foreach_copy_(own, chunks_of(shard, self._plan), non_blocking=True)
        received = [as_comm_dtype(region.view(-1)) for region in regions]
        return received, [as_comm_dtype(chunk) for chunk in own]

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        plan, left = self._plan, divide_early(gradients, divisor)
        own = _new(gradients, plan.shard_numels[group.rank()], plan)
        received = [as_real(chunk) for chunk in chunks_of(own, plan)]
        sent = [as_real(region.view(-1)) for region in self._regions.of(gradients)]
        op = AVG if divisor is None else SUM
        if coalesces():
            end(group.reduce_scatter_tensor_coalesced(received, sent, REDUCE_SCATTER[op]))
        else:
            for mine, of_all in zip(received, sent, strict=True):
                reduce_into(mine, of_all, group, op)
        return PendingCollective((), lambda: divided(own, left))


class PackedRows(Collectives):
    """For any backend: ``others`` gather into a packed buffer, where shards follow each other, and
    reduce one. Chunks are copied between it and the flat buffer.

    Parameters of at least ``large_bytes`` are left out of the packed buffer, which would take as
    much memory again. Each of them is gathered and reduced by itself, in place.
    """

    def __init__(self, plan: RowsPlan, others: RangeCollectives, large_bytes: float = inf) -> None:
        self._plan = plan
        self._others = others
        self._large_bytes = large_bytes
        self._regions = _Views(partial(regions_of, plan=plan))
        self._divisions: dict[int, _Division] = {}
        """By the size of an element."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        division = self._division(full)
        regions, chunks = self._regions.of(full), chunks_of(shard, self._plan)
        parts = [
            alone.all_gather(regions[index].view(-1), chunks[index], group)
            for index, alone in division.large
        ]
        small = division.small
        if not small.specs:
            return _together(parts, lambda: full)
        packed = full.new_empty(small.packed.numel)
        if division.large:
            shard = packed.view(small.world_size, -1)[group.rank()]
            torch._foreach_copy_(chunks_of(shard, small), division.of_small(chunks))
        parts.append(division.packed.all_gather(packed, shard, group))

        def finish() -> torch.Tensor:
            for part in parts:
                part.finish()
            targets, sources = division.places.of(full), _packed_chunks(packed, small)
            torch._foreach_copy_(targets, sources)
            return full

        return _together(parts, finish)

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        division, plan = self._division(gradients), self._plan
        regions = self._regions.of(gradients)
        parts = [
            alone.reduce_scatter(regions[index].view(-1), group, divisor)
            for index, alone in division.large
        ]
        small = division.small
        if small.specs:
            packed = _new(gradients, small.packed.numel, small)
            targets, sources = _packed_chunks(packed, small), division.places.of(gradients)
            torch._foreach_copy_(targets, sources)
            parts.append(division.packed.reduce_scatter(packed, group, divisor))

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

    def _division(self, flat: torch.Tensor) -> _Division:
        size = flat.element_size()
        if size not in self._divisions:
            self._divisions[size] = _Division(self._plan, self._others, self._large_bytes / size)
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

    def __init__(self, plan: RowsPlan, others: RangeCollectives, large: float) -> None:
        ranks = plan.world_size
        sizes = list(zip(plan.specs, plan.chunks, strict=True))
        self.large = [
            (index, others.for_plan(ParamGroupPlan((), (), (chunk,) * ranks)))
            for index, (spec, chunk) in enumerate(sizes)
            if spec.cut_dim == 0 and chunk * ranks >= large
        ]
        """The number of each, and its collectives."""
        alone = {index for index, _ in self.large}
        self._indices = [index for index in range(len(sizes)) if index not in alone]
        self.small = RowsPlan(tuple(plan.specs[index] for index in self._indices), ranks)
        self.packed = others.for_plan(self.small.packed) if self.small.specs else others
        self.places = _Views(partial(_chunks_in, plan=plan, indices=self._indices))
        """Where the chunks of :func:`_packed_chunks` lie in a flat buffer."""

    def of_small(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [chunks[index] for index in self._indices]


def choose_for_rows(group: dist.ProcessGroup, device_type: str, plan: RowsPlan) -> Collectives:
    """Return the fastest collectives known for ``plan`` on the backend of ``group`` on
    ``device_type``."""
    if plan.is_in_place and backend_name(group, device_type) == "nccl":
        return InPlaceRows(plan)
    return PackedRows(plan, choose(group, device_type, plan.packed), MIN_UNPACKED_BYTES)


class _Views:
    """Views of the flat buffers of one param group, made once for each."""

    def __init__(self, make: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        self._make = make
        self._known: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        for known, views in self._known:
            if known is flat:
                return views
        with torch.inference_mode(False), torch.no_grad():
            views = self._make(flat)
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
