"""Gathers and reductions that travel in 8 bits: codes, and their scales.

What ranks send travels in a buffer of its own. A gather takes a pass over the shard before the
collective, and two over the full buffer after it. A reduction takes a pass over the reduce input
before, and one over as much memory after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

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
from fsdp_overlap.comm.row_collectives import regions_of
from fsdp_overlap.layout import BucketPlan, RowsPlan
from fsdp_overlap.layout.wire_plan import Place, Run, Segment, WirePlan
from fsdp_overlap.tensor.quantization import at_once, decode_into, encode, multiply


@dataclass(frozen=True)
class Wire:
    """How the shards of a bucket travel: where things lie, and in which dtypes. ``own`` is this
    rank's segment."""

    plan: WirePlan
    own: Segment
    codes: torch.dtype
    scales: torch.dtype

    def encode(self, shard: torch.Tensor, segment: torch.Tensor, dtype: torch.dtype) -> None:
        """Fills this rank's segment. ``dtype`` is that of what is not quantized."""
        segment.zero_()  # gaps travel, too
        codes, _, scales, _, kept, _ = segment.split_with_sizes(self.own.parts)
        _encode(shard, self.own.runs, codes.view(self.codes), scales.view(self.scales))
        _copy_out(shard, self.own.kept, kept.view(dtype))


class QuantizedGather:
    """Gathers a bucket of ranges in few bits. ``others`` carry the bytes."""

    def __init__(self, wire: Wire, others: Collectives[BucketPlan]) -> None:
        self._wire = wire
        self._sizes = list(chain.from_iterable(wire.plan.parts))
        self._others = others

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        segments = self._wire.plan.packed
        return _gather(self._wire, full, shard, segments, group, self._others, self._decode)

    def _decode(self, segments: torch.Tensor, full: torch.Tensor) -> None:
        wire, plan = self._wire, self._wire.plan
        numels = plan.plan.shard_numels
        parts = segments.split_with_sizes(self._sizes)
        if plan.plan.is_equal:
            shards = [full.view(len(numels), -1)]
            codes = [segments.view(len(numels), -1)[:, : numels[0]]]
        else:
            shards, codes = list(full.split_with_sizes(numels)), list(parts[0::6])
        for values, code in zip(shards, codes, strict=True):
            decode_into(values, code.view(wire.codes))
        scales = torch.cat(parts[2::6]).view(wire.scales)
        for run in plan.all_runs:
            multiply(_blocks(full, run), _scales(scales, run))
        if plan.all_kept:
            kept = torch.cat(parts[4::6]).view(full.dtype)
            targets = [full[place.start : place.stop] for place in plan.all_kept]
            sizes = [place.numel for place in plan.all_kept]
            torch._foreach_copy_(targets, list(kept.split_with_sizes(sizes)))


class QuantizedRowsGather:
    """Gathers a bucket of rows in few bits. ``others`` carry the bytes. The plan of ``wire`` is
    that of one rank, because all are alike: in a shard each chunk has room for as many rows."""

    def __init__(self, wire: Wire, others: Collectives[BucketPlan]) -> None:
        self._wire = wire
        self._others = others

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: RowsPlan, group: dist.ProcessGroup
    ) -> Issued:
        segments = BucketPlan((), (), self._wire.plan.packed.shard_numels * plan.world_size)

        def decode(gathered: torch.Tensor, full: torch.Tensor) -> None:
            self._decode(gathered.view(plan.world_size, -1), full, plan)

        return _gather(self._wire, full, shard, segments, group, self._others, decode)

    def _decode(self, segments: torch.Tensor, full: torch.Tensor, plan: RowsPlan) -> None:
        wire = self._wire
        codes, _, scales, _, kept, _ = segments.split_with_sizes(wire.own.parts, 1)
        codes, scales = codes.view(wire.codes), scales.view(wire.scales)
        kept = kept.view(full.dtype)
        regions = regions_of(full, plan)
        for run in wire.own.runs:
            first = run.start - plan.starts[run.index]
            values = regions[run.index][:, first : first + run.numel]
            decode_into(values, codes[:, run.start : run.start + run.numel])
            rows, _, blocks, _ = run.shape
            of_run = scales[:, run.scale : run.scale + run.scales].unflatten(1, (rows, blocks))
            multiply(values.unflatten(1, run.shape), of_run)
        at = 0
        for place in wire.own.kept:
            regions[place.index].copy_(kept[:, at : at + place.numel])
            at += place.numel


class QuantizedReduction:
    """Reduces a bucket of ranges in few bits: what each rank sends arrives by an all-to-all, and is
    summed in the dtype of the gradients. A rank's own gradients do not travel, and are exact."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._sizes = list(chain.from_iterable(wire.plan.parts))

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        sizes, rank = self._wire.plan.packed.shard_numels, group.rank()
        left = divide_early(gradients, len(sizes) if divisor is None else divisor)
        sent = self._encode(gradients)
        arriving = [sizes[rank]] * len(sizes)
        received = sent.new_empty(sum(arriving))
        issued = all_to_all(received, sent, arriving, list(sizes), group)
        mine = own_range(gradients, plan, group)

        def finish() -> torch.Tensor:
            total = torch.zeros_like(mine)
            if len(mine):
                self._sum(received.view(len(sizes), -1), mine, rank, total)
            return divided(total, left)

        return Issued(issued.works, finish, issued.group)

    def _encode(self, gradients: torch.Tensor) -> torch.Tensor:
        """The segments for all ranks."""
        wire, plan = self._wire, self._wire.plan
        segments = torch.zeros(plan.packed.numel, dtype=torch.uint8, device=gradients.device)
        parts = segments.split_with_sizes(self._sizes)
        codes = torch.zeros_like(gradients, dtype=torch.uint8).view(wire.codes)
        scales = torch.empty(plan.scales, dtype=wire.scales, device=gradients.device)
        kept = gradients.new_empty(sum(place.numel for place in plan.all_kept))
        _encode(gradients, plan.all_runs, codes, scales)
        _copy_out(gradients, plan.all_kept, kept)
        for number, source in enumerate((codes, scales, kept)):
            targets = parts[2 * number :: 6]
            sources = source.view(torch.uint8).split_with_sizes([len(part) for part in targets])
            torch._foreach_copy_(list(targets), list(sources))
        return segments

    def _sum(
        self, segments: torch.Tensor, mine: torch.Tensor, rank: int, total: torch.Tensor
    ) -> None:
        """Fills ``total`` with the sum over ``segments``, a row of each rank, and ``mine`` in place
        of this rank's."""
        wire, ranks = self._wire, len(segments)
        codes, _, scales, _, kept, _ = segments.split_with_sizes(wire.own.parts, 1)
        codes, scales, kept = (
            codes.view(wire.codes),
            scales.view(wire.scales),
            kept.view(mine.dtype),
        )
        for run in wire.own.runs:
            rows, height, blocks, width = run.shape
            numel = height * blocks * width
            some = min(ranks, max(1, at_once(mine) // numel))  # ranks at once
            step = max(1, at_once(mine) // (some * numel))  # rows of blocks at once
            for first in range(0, rows, step):
                count = min(step, rows - first)
                start, scale = run.start + first * numel, run.scale + first * blocks
                here = slice(start, start + count * numel)
                of_these = scales[:, scale : scale + count * blocks]
                for lowest in range(0, ranks, some):
                    senders = slice(lowest, lowest + some)
                    values = torch.empty_like(codes[senders, here], dtype=mine.dtype)
                    decode_into(values, codes[senders, here])
                    multiply(
                        values.unflatten(1, (count, height, blocks, width)),
                        of_these[senders].unflatten(1, (count, blocks)),
                    )
                    if lowest <= rank < lowest + some:
                        values[rank - lowest] = mine[here]
                    total[here] += values.sum(0)
        at = 0
        for place in wire.own.kept:
            values = kept[:, at : at + place.numel]
            values[rank] = mine[place.start : place.stop]
            torch.sum(values, 0, out=total[place.start : place.stop])
            at += place.numel


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
    wire.encode(shard.to(full.device, non_blocking=True), own, full.dtype)
    issued = others.all_gather(gathered, own, segments, group)

    def finish() -> torch.Tensor:
        issued.finish()
        decode(gathered, full)
        return full

    return Issued(issued.works, finish, issued.group)


def _encode(
    flat: torch.Tensor, runs: Sequence[Run], codes: torch.Tensor, scales: torch.Tensor
) -> None:
    for run in runs:
        encode(_blocks(flat, run), _blocks(codes, run), _scales(scales, run))


def _copy_out(flat: torch.Tensor, places: Sequence[Place], target: torch.Tensor) -> None:
    """Fills ``target`` with what lies in ``places`` of ``flat``, one after the other."""
    if places:
        sources = [flat[place.start : place.stop] for place in places]
        sizes = [place.numel for place in places]
        torch._foreach_copy_(list(target.split_with_sizes(sizes)), sources)


def _blocks(flat: torch.Tensor, run: Run) -> torch.Tensor:
    return flat[run.start : run.start + run.numel].view(run.shape)


def _scales(scales: torch.Tensor, run: Run) -> torch.Tensor:
    rows, _, blocks, _ = run.shape
    return scales[run.scale : run.scale + run.scales].view(rows, blocks)
