"""Gathers that travel in 8 bits: each rank sends codes of its shard, and their scales."""

from __future__ import annotations

from functools import cached_property
from itertools import chain

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import Collectives, Issued, own_range
from fsdp_overlap.layout import BucketPlan
from fsdp_overlap.layout.wire_plan import Run, WirePlan
from fsdp_overlap.tensor.quantization import decode_into, encode, multiply


class QuantizedCollectives:
    """Gathers a bucket as ``wire`` says, in codes of ``code_dtype`` with scales of ``scale_dtype``.
    ``others`` carry the bytes, and reduce.

    Segments travel in a buffer of their own, from which the full buffer is filled. So there is a
    pass over the shard before the collective, and two over the full buffer after it.
    """

    def __init__(
        self,
        wire: WirePlan,
        rank: int,
        code_dtype: torch.dtype,
        scale_dtype: torch.dtype,
        others: Collectives[BucketPlan],
    ) -> None:
        self._wire = wire
        self._rank = rank
        self._code_dtype = code_dtype
        self._scale_dtype = scale_dtype
        self._others = others
        self._own_runs = wire.runs(rank)
        self._own_kept = wire.kept(rank)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, plan: BucketPlan, group: dist.ProcessGroup
    ) -> Issued:
        packed = self._wire.packed
        segments = torch.empty(packed.numel, dtype=torch.uint8, device=full.device)
        own = own_range(segments, packed, group)
        self._encode(shard.to(full.device, non_blocking=True), own, full.dtype)
        issued = self._others.all_gather(segments, own, packed, group)

        def finish() -> torch.Tensor:
            issued.finish()
            self._decode(segments, full)
            return full

        return Issued(issued.works, finish, issued.group)

    def reduce_scatter(
        self,
        gradients: torch.Tensor,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        divisor: float | None = None,
    ) -> Issued:
        return self._others.reduce_scatter(gradients, plan, group, divisor)

    def _encode(self, shard: torch.Tensor, segment: torch.Tensor, kept_dtype: torch.dtype) -> None:
        codes, _, scales, _, kept, _ = segment.split_with_sizes(self._wire.parts[self._rank])
        codes, scales = codes.view(self._code_dtype), scales.view(self._scale_dtype)
        for run in self._own_runs:
            encode(_blocks(shard, run), _blocks(codes, run), _scales(scales, run))
        if self._own_kept:
            sizes = [stop - start for start, stop in self._own_kept]
            targets = list(kept.view(kept_dtype).split_with_sizes(sizes))
            torch._foreach_copy_(targets, [shard[start:stop] for start, stop in self._own_kept])

    def _decode(self, segments: torch.Tensor, full: torch.Tensor) -> None:
        wire, numels = self._wire, self._wire.plan.shard_numels
        parts = segments.split_with_sizes(self._sizes)
        if wire.plan.is_equal:
            shards = [full.view(len(numels), -1)]
            codes = [segments.view(len(numels), -1)[:, : numels[0]]]
        else:
            shards, codes = list(full.split_with_sizes(numels)), list(parts[0::6])
        for values, code in zip(shards, codes, strict=True):
            decode_into(values, code.view(self._code_dtype))
        scales = torch.cat(parts[2::6]).view(self._scale_dtype)
        for run in wire.all_runs:
            multiply(_blocks(full, run), _scales(scales, run))
        if wire.all_kept:
            kept = torch.cat(parts[4::6]).view(full.dtype)
            sizes = [stop - start for start, stop in wire.all_kept]
            targets = [full[start:stop] for start, stop in wire.all_kept]
            torch._foreach_copy_(targets, list(kept.split_with_sizes(sizes)))

    @cached_property
    def _sizes(self) -> list[int]:
        """What splits the buffer of all segments into their parts."""
        return list(chain.from_iterable(self._wire.parts))


def _blocks(flat: torch.Tensor, run: Run) -> torch.Tensor:
    return flat[run.start : run.start + run.numel].view(run.shape)


def _scales(scales: torch.Tensor, run: Run) -> torch.Tensor:
    rows, _, blocks, _ = run.shape
    return scales[run.scale : run.scale + run.scales].view(rows, blocks)
