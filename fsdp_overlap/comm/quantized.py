"""Gathers and reductions that travel in few bits: codes, and their scales.

What ranks send travels in a buffer of its own. A gather takes a pass over the shard before the
collective, and two over the full buffer after it. A reduction of ranges takes two passes over the
reduce input before, one of rows takes one; both take one over as much memory after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    Collectives,
    Issued,
    all_to_all,
    divide_early,
    divided,
    own_range,
)
from fsdp_overlap.comm.row_collectives import chunks_of, regions_of
from fsdp_overlap.comm.wire import Segments, Wire, copy_all, scales_of
from fsdp_overlap.layout import BucketPlan, RowsPlan
from fsdp_overlap.tensor.quantization import decode_into, multiply


class QuantizedGather:
    """Gathers a bucket of ranges in few bits. ``others`` carry the bytes."""

    def __init__(self, wire: Wire, others: Collectives[BucketPlan]) -> None:
        self._wire = wire
        self._segments = Segments(wire)
        self._others = others

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        segments = self._wire.plan.packed
        return _gather(self._wire, full, shard, segments, group, self._others, self._decode)

    def _decode(self, gathered: torch.Tensor, full: torch.Tensor) -> None:
        segments = self._segments
        for values, codes in zip(segments.shards(full), segments.codes(gathered), strict=True):
            decode_into(values, codes)
        scales = segments.scales(gathered)
        for run in self._wire.plan.all_runs:
            values = full[run.start : run.start + run.numel]
            multiply(values.view(run.shape), scales_of(scales, run))
        copy_all(segments.kept_in(full), segments.kept(gathered, full.dtype))


class QuantizedRowsGather:
    """Gathers a bucket of rows in few bits. ``others`` carry the bytes. The plan of ``wire`` is
    that of one rank, because all are alike: in a shard each chunk has room for as many rows."""

    def __init__(self, wire: Wire, others: Collectives[BucketPlan], ranks: int) -> None:
        self._wire = wire
        self._packed = BucketPlan((), (), wire.plan.packed.shard_numels * ranks)
        self._others = others

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: RowsPlan, group: dist.ProcessGroup
    ) -> Issued:
        def decode(gathered: torch.Tensor, full: torch.Tensor) -> None:
            self._decode(gathered.view(plan.world_size, -1), full, plan)

        return _gather(self._wire, full, shard, self._packed, group, self._others, decode)

    def _decode(self, segments: torch.Tensor, full: torch.Tensor, plan: RowsPlan) -> None:
        wire = self._wire
        codes, scales, kept = wire.parts_of(segments, full.dtype)
        regions = regions_of(full, plan)
        for run in wire.own.runs:
            first = run.start - plan.starts[run.index]
            values = regions[run.index][:, first : first + run.numel]
            decode_into(values, codes[:, run.start : run.start + run.numel])
            multiply(values.unflatten(1, run.shape), scales_of(scales, run))
        targets = [regions[place.index] for place in wire.own.kept]
        copy_all(targets, [kept[:, place.at : place.at + place.numel] for place in wire.own.kept])


class QuantizedReduction:
    """Reduces a bucket of ranges in few bits: what each rank sends arrives by an all-to-all, and is
    summed in the dtype of the gradients. A rank's own gradients do not travel, and are exact."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._segments = Segments(wire)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        sizes = list(self._wire.plan.packed.shard_numels)
        left = divide_early(gradients, len(sizes) if divisor is None else divisor)
        sent = self._encode(gradients)
        mine = own_range(gradients, plan, group)
        return _reduce(self._wire, sent, sizes, mine, group, left)

    def _encode(self, gradients: torch.Tensor) -> torch.Tensor:
        """The segments for all ranks."""
        wire, plan, segments = self._wire, self._wire.plan, self._segments
        sent = torch.zeros(plan.packed.numel, dtype=torch.uint8, device=gradients.device)
        codes = torch.zeros_like(gradients, dtype=wire.codes)
        scales = gradients.new_empty(sum(plan.scales_of_ranks), dtype=wire.scales or torch.uint8)
        wire.encode(gradients, plan.all_runs, codes, scales)
        copy_all(segments.codes(sent), segments.shards(codes))
        if wire.scales is not None:
            segments.put_scales(sent, scales)
        copy_all(segments.kept(sent, gradients.dtype), segments.kept_in(gradients))
        return sent


class QuantizedRowsReduction:
    """Reduces a bucket of rows as :class:`QuantizedReduction` does one of ranges. The plan of
    ``wire`` is that of one rank."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: RowsPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        ranks = plan.world_size
        left = divide_early(gradients, ranks if divisor is None else divisor)
        regions = regions_of(gradients, plan)
        sent = self._encode(regions, plan)
        mine = gradients.new_zeros(plan.shard_numels[0])
        own = [region[group.rank()] for region in regions]
        torch._foreach_copy_(chunks_of(mine, plan), own)
        return _reduce(self._wire, sent.flatten(), [sent.shape[1]] * ranks, mine, group, left)

    def _encode(self, regions: list[torch.Tensor], plan: RowsPlan) -> torch.Tensor:
        """The segments for all ranks, with a row for each."""
        wire = self._wire
        size = wire.plan.packed.numel
        sent = regions[0].new_zeros((plan.world_size, size), dtype=torch.uint8)
        codes, scales, kept = wire.parts_of(sent, regions[0].dtype)
        for run in wire.own.runs:
            first = run.start - plan.starts[run.index]
            values = regions[run.index][:, first : first + run.numel]
            wire.encode_run(values, run, codes[:, run.start : run.start + run.numel], scales)
        targets = [kept[:, place.at : place.at + place.numel] for place in wire.own.kept]
        copy_all(targets, [regions[place.index] for place in wire.own.kept])
        return sent


def _gather(
    wire: Wire,
    full: torch.Tensor,
    shard: torch.Tensor,
    segments: BucketPlan,
    group: dist.ProcessGroup,
    others: Collectives[BucketPlan],
    decode: Callable[[torch.Tensor, torch.Tensor], None],
) -> Issued:
    """Gathers what all ranks send into a buffer of the plan ``segments``, from which ``decode``
    fills ``full``."""
    gathered = torch.empty(segments.numel, dtype=torch.uint8, device=full.device)
    own = own_range(gathered, segments, group)
    wire.encode_own(shard.to(full.device, non_blocking=True), own, full.dtype)
    issued = others.all_gather(gathered, own, segments, group)

    def finish() -> torch.Tensor:
        issued.finish()
        decode(gathered, full)
        return full

    return Issued(issued.works, finish, issued.group)


def _reduce(
    wire: Wire,
    sent: torch.Tensor,
    sizes: list[int],
    mine: torch.Tensor,
    group: dist.ProcessGroup,
    divisor: float | None,
) -> Issued:
    """Sends each rank its segment of ``sent``, which have ``sizes``, and sums those that arrive
    with ``mine``. The sum is divided by ``divisor``."""
    rank = group.rank()
    arriving = [sizes[rank]] * len(sizes)
    received = sent.new_empty(sum(arriving))
    issued = all_to_all(received, sent, arriving, sizes, group)

    def finish() -> torch.Tensor:
        total = torch.zeros_like(mine)
        if len(mine):
            wire.add_up(received.view(len(sizes), -1), mine, rank, total)
        return divided(total, divisor)

    return Issued(issued.works, finish, issued.group)
