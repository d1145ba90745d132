"""Gathers that travel in 8 bits: each rank sends codes of its shard, and their scales.

What ranks send travels in a buffer of its own, from which the full buffer is filled. So there is a
pass over the shard before the collective, and two over the full buffer after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Collectives, Issued, own_range
from fsdp_overlap.comm.row_collectives import regions_of
from fsdp_overlap.layout import BucketPlan, RowsPlan
from fsdp_overlap.layout.wire_plan import Run, Segment, WirePlan
from fsdp_overlap.tensor.quantization import decode_into, encode, multiply


@dataclass(frozen=True)
class Wire:
    """How the shards of a bucket travel: where things lie, and in which dtypes. ``own`` is this
    rank's segment. ``others`` carry the segments."""

    plan: WirePlan
    own: Segment
    codes: torch.dtype
    scales: torch.dtype
    others: Collectives[BucketPlan]

    def gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        segments: BucketPlan,
        group: dist.ProcessGroup,
        decode: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> Issued:
        """Gathers the segments of all ranks into a buffer of the plan ``segments``, from which
        ``decode`` fills ``full``."""
        gathered = torch.empty(segments.numel, dtype=torch.uint8, device=full.device)
        own = own_range(gathered, segments, group)
        self._encode(shard.to(full.device, non_blocking=True), own, full.dtype)
        issued = self.others.all_gather(gathered, own, segments, group)

        def finish() -> torch.Tensor:
            issued.finish()
            decode(gathered, full)
            return full

        return Issued(issued.works, finish, issued.group)

    def _encode(self, shard: torch.Tensor, segment: torch.Tensor, kept_dtype: torch.dtype) -> None:
        codes, _, scales, _, kept, _ = segment.split_with_sizes(self.own.parts)
        codes, scales = codes.view(self.codes), scales.view(self.scales)
        for run in self.own.runs:
            encode(_blocks(shard, run), _blocks(codes, run), _scales(scales, run))
        if self.own.kept:
            sources = [shard[place.start : place.stop] for place in self.own.kept]
            sizes = [place.numel for place in self.own.kept]
            torch._foreach_copy_(list(kept.view(kept_dtype).split_with_sizes(sizes)), sources)


class QuantizedCollectives:
    """Gathers a bucket of ranges in few bits. ``others`` reduce it."""

    def __init__(self, wire: Wire, others: Collectives[BucketPlan]) -> None:
        self._wire = wire
        self._sizes = list(chain.from_iterable(wire.plan.parts))
        self.reduce_scatter = others.reduce_scatter

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        wire = self._wire
        return wire.gather(full, shard, wire.plan.packed, group, self._decode)

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


class QuantizedRows:
    """Gathers a bucket of rows in few bits. ``others`` reduce it. The plan of ``wire`` is that of
    one rank, because all are alike: in a shard each chunk has room for as many rows."""

    def __init__(self, wire: Wire, others: Collectives[RowsPlan]) -> None:
        self._wire = wire
        self.reduce_scatter = others.reduce_scatter

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: RowsPlan, group: dist.ProcessGroup
    ) -> Issued:
        segments = BucketPlan((), (), self._wire.plan.packed.shard_numels * plan.world_size)

        def decode(gathered: torch.Tensor, full: torch.Tensor) -> None:
            self._decode(gathered.view(plan.world_size, -1), full, plan)

        return self._wire.gather(full, shard, segments, group, decode)

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


def _blocks(flat: torch.Tensor, run: Run) -> torch.Tensor:
    return flat[run.start : run.start + run.numel].view(run.shape)


def _scales(scales: torch.Tensor, run: Run) -> torch.Tensor:
    rows, _, blocks, _ = run.shape
    return scales[run.scale : run.scale + run.scales].view(rows, blocks)
