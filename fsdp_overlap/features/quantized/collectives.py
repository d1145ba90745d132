"""Quantized all-gathers and reductions, which send codes and their scales.

What ranks send travels in a buffer of its own. A gather takes a pass over the shard before the
collective, and two over the full buffer after it. A reduction of ranges takes two passes over the
reduce input before, one of rows takes one; both take one over as much memory after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_overlap.comm.collectives import (
    RangeCollectives,
    all_to_all,
    divide_early,
    divided,
    own_range,
)
from fsdp_overlap.comm.comm_streams import PendingCollective
from fsdp_overlap.features.quantized.codes import at_once, decode_into, encode, multiply
from fsdp_overlap.features.quantized.plan import QuantizedPlan, QuantizedRun, Segment
from fsdp_overlap.features.rows.collectives import chunks_of, regions_of
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import ParamGroupPlan

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class QuantizedFormat:
    """How the shards of a param group travel: where things lie, and in which dtypes. ``own`` is
    this rank's segment. Codes without ``scales`` are numbers of a narrower dtype."""

    plan: QuantizedPlan
    own: Segment
    codes: torch.dtype
    scales: torch.dtype | None

    def encode_own(self, shard: torch.Tensor, segment: torch.Tensor, dtype: torch.dtype) -> None:
        """Fill this rank's segment. ``dtype`` is that of what is not quantized."""
        segment.zero_()  # gaps travel, too
        codes, scales, kept = self.parts_of(segment, dtype)
        self.encode(shard, self.own.runs, codes, scales)
        targets = [kept[place.at : place.at + place.numel] for place in self.own.kept]
        copy_all(targets, [shard[place.start : place.stop] for place in self.own.kept])

    def parts_of(
        self, segments: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the codes, the scales, and what is not quantized, which has ``dtype``.
        ``segments``: one like this rank's, or several of that size, with a row for each."""
        codes, _, scales, _, kept, _ = segments.split_with_sizes(self.own.parts, -1)
        return codes.view(self.codes), scales.view(self.scales or torch.uint8), kept.view(dtype)

    def encode(
        self,
        values: torch.Tensor,
        runs: Sequence[QuantizedRun],
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Fill ``codes`` and ``scales`` with those of ``runs``, which lie at the same places of
        ``values`` and ``codes``. All are flat."""
        for run in runs:
            place = slice(run.start, run.start + run.numel)
            self.encode_run(values[place], run, codes[place], scales)

    def encode_run(
        self, values: torch.Tensor, run: QuantizedRun, codes: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Fill ``codes`` and the scales of ``run`` from ``values``, which are those of the run
        alone. Each is flat, or has a row for each rank."""
        if self.scales is None:
            codes.copy_(values)
        else:
            blocks, coded = values.unflatten(-1, run.shape), codes.unflatten(-1, run.shape)
            encode(blocks, coded, scales_of(scales, run))

    def add_up(
        self, segments: torch.Tensor, mine: torch.Tensor, rank: int, total: torch.Tensor
    ) -> None:
        """Fill ``total`` with the sum of what ``segments`` stand for, a row of each rank. In place
        of the row of ``rank``, this rank, ``mine`` is added. Half precision is added in float32."""
        ranks, wide = len(segments), torch.promote_types(mine.dtype, torch.float32)
        codes, scales, kept = self.parts_of(segments, mine.dtype)
        for run in self.own.runs:
            rows, height, blocks, width = run.shape
            numel = height * blocks * width
            some = min(ranks, max(1, at_once(mine) // numel))  # ranks at once
            step = max(1, at_once(mine) // (some * numel))  # rows of blocks at once
            for first in range(0, rows, step):
                count = min(step, rows - first)
                start, scale = run.start + first * numel, run.scale + first * blocks
                here = slice(start, start + count * numel)
                added = torch.zeros_like(mine[here], dtype=wide)
                for lowest in range(0, ranks, some):
                    senders = slice(lowest, lowest + some)
                    values = torch.empty_like(codes[senders, here], dtype=wide)
                    decode_into(values, codes[senders, here])
                    if self.scales is not None:
                        of_these = scales[senders, scale : scale + count * blocks]
                        multiply(
                            values.unflatten(1, (count, height, blocks, width)),
                            of_these.unflatten(1, (count, blocks)),
                        )
                    if lowest <= rank < lowest + some:
                        values[rank - lowest] = mine[here]
                    added += values.sum(0)
                total[here] = added
        for place in self.own.kept:
            values = kept[:, place.at : place.at + place.numel]
            values[rank] = mine[place.start : place.stop]
            total[place.start : place.stop] = values.sum(0, dtype=wide)


class Segments:
    """Finds codes, scales and what is kept in a buffer that holds all ranks' segments.

    Each method takes that whole buffer, or the whole flat buffer. None takes longer on more ranks
    if shards are equal and no matrix that is kept is cut.
    """

    def __init__(self, wire: QuantizedFormat) -> None:
        plan = wire.plan
        self._wire = wire
        self._numels = plan.plan.shard_numels
        self._is_equal = plan.plan.is_equal
        starts = plan.packed.shard_starts
        ranks = range(len(starts))
        self._codes = [(starts[rank], plan.parts[rank][0]) for rank in ranks]
        before_scales = [starts[rank] + sum(plan.parts[rank][:2]) for rank in ranks]
        self._scales = [
            (before, count * plan.scale_bytes)
            for before, count in zip(before_scales, plan.scales_of_ranks, strict=True)
        ]
        self._kept = [
            (place.start, place.numel, starts[rank] + sum(plan.parts[rank][:4]), place.at)
            for rank, place in plan.kept_of_ranks
        ]
        # Which scales are no padding, where each rank's have room for as many.
        self._real: torch.Tensor | None = None
        counts = plan.scales_of_ranks
        if self._is_equal and min(counts) < max(counts):
            room = torch.arange(max(counts), device="cpu").expand(len(counts), -1)
            is_real = room < torch.tensor(counts, device="cpu")[:, None]
            self._real = is_real.flatten().nonzero().squeeze(1)

    def shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the shards, flat, or all in one tensor with a row for each."""
        if self._is_equal:
            return [flat.view(len(self._numels), -1)]
        return [part for part in flat.split_with_sizes(self._numels) if len(part)]

    def codes(self, segments: torch.Tensor) -> list[torch.Tensor]:
        """Return the codes, of shape as :meth:`shards`."""
        if self._is_equal:
            return [self._rows(segments, self._codes[0][1], 0).view(self._wire.codes)]
        parts = [segments[start : start + size] for start, size in self._codes if size]
        return [part.view(self._wire.codes) for part in parts]

    def scales(self, segments: torch.Tensor) -> torch.Tensor:
        """Return all scales, one after the other."""
        dtype = self._wire.scales
        assert dtype is not None
        if not self._is_equal:
            return torch.cat(self._scales_of_ranks(segments)).view(dtype)
        room = self._room(segments)
        if self._real is None:
            return room.flatten().view(dtype)
        return room.flatten().index_select(0, self._real_on(segments)).view(dtype)

    def put_scales(self, segments: torch.Tensor, scales: torch.Tensor) -> None:
        """Write what :meth:`scales` reads."""
        if not self._is_equal:
            targets = self._scales_of_ranks(segments)
            sizes = [len(target) for target in targets]
            copy_all(targets, scales.view(torch.uint8).split_with_sizes(sizes))
            return
        room = self._room(segments)
        numbers = scales.view(room.dtype)
        if self._real is not None:
            padded = numbers.new_zeros(room.numel())
            numbers = padded.index_copy_(0, self._real_on(segments), numbers)
        room.copy_(numbers.view(room.shape))

    def kept(self, segments: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return what travels in full, in pieces of which each lies on one rank."""
        size = dtype.itemsize
        return [
            segments[part + at * size : part + (at + numel) * size].view(dtype)
            for _, numel, part, at in self._kept
        ]

    def kept_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return where the pieces of :meth:`kept` lie in a flat buffer."""
        return [flat[start : start + numel] for start, numel, _, _ in self._kept]

    def _rows(self, segments: torch.Tensor, size: int, start: int) -> torch.Tensor:
        return segments.view(len(self._numels), -1).narrow(1, start, size)

    def _room(self, segments: torch.Tensor) -> torch.Tensor:
        """Return the scales of equal segments with their padding, as integers, which torch can
        index."""
        size = max(size for _, size in self._scales)
        integer = _INTEGER[self._wire.plan.scale_bytes]
        return self._rows(segments, size, self._scales[0][0]).view(integer)

    def _scales_of_ranks(self, segments: torch.Tensor) -> list[torch.Tensor]:
        return [segments[start : start + size] for start, size in self._scales if size]

    def _real_on(self, segments: torch.Tensor) -> torch.Tensor:
        assert self._real is not None
        if self._real.device != segments.device:
            self._real = self._real.to(segments.device)
        return self._real


def copy_all(targets: list[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, list(sources))


def scales_of(scales: torch.Tensor, run: QuantizedRun) -> torch.Tensor:
    """Return the scales of ``run``: its rows of blocks, and the blocks in a row. ``scales`` are
    flat, or have a row for each rank."""
    rows, _, blocks, _ = run.shape
    return scales[..., run.scale : run.scale + run.scales].unflatten(-1, (rows, blocks))


class QuantizedGather(ABC):
    """Gathers a param group in few bits: what all ranks send arrives in a buffer of the plan
    ``segments``. ``others`` carry the bytes."""

    def __init__(
        self, wire: QuantizedFormat, segments: ParamGroupPlan, others: RangeCollectives
    ) -> None:
        self._wire = wire
        self._plan = segments
        self._others = others.for_plan(segments)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> PendingCollective:
        wire = self._wire
        gathered = torch.empty(self._plan.numel, dtype=torch.uint8, device=full.device)
        own = own_range(gathered, self._plan, group)
        wire.encode_own(shard.to(full.device, non_blocking=True), own, full.dtype)
        issued = self._others.all_gather(gathered, own, group)

        def finish() -> torch.Tensor:
            issued.finish()
            self._decode(gathered, full)
            return full

        return PendingCollective(issued.works, finish, issued.group)

    @abstractmethod
    def _decode(self, gathered: torch.Tensor, full: torch.Tensor) -> None:
        """Fill ``full`` from what all ranks have sent."""


class QuantizedRangesGather(QuantizedGather):
    """Gathers a param group of ranges in few bits."""

    def __init__(self, wire: QuantizedFormat, others: RangeCollectives) -> None:
        super().__init__(wire, wire.plan.packed, others)
        self._segments = Segments(wire)

    def _decode(self, gathered: torch.Tensor, full: torch.Tensor) -> None:
        segments = self._segments
        for values, codes in zip(segments.shards(full), segments.codes(gathered), strict=True):
            decode_into(values, codes)
        scales = segments.scales(gathered)
        for run in self._wire.plan.all_runs:
            values = full[run.start : run.start + run.numel]
            multiply(values.view(run.shape), scales_of(scales, run))
        copy_all(segments.kept_in(full), segments.kept(gathered, full.dtype))


class QuantizedRowsGather(QuantizedGather):
    """Gathers a param group of rows in few bits. The plan of ``wire`` is that of one rank, because
    all are alike: in a shard each chunk has room for as many rows."""

    def __init__(self, wire: QuantizedFormat, plan: RowsPlan, others: RangeCollectives) -> None:
        numels = wire.plan.packed.shard_numels * plan.world_size
        super().__init__(wire, ParamGroupPlan((), (), numels), others)
        self._rows = plan

    def _decode(self, gathered: torch.Tensor, full: torch.Tensor) -> None:
        wire, plan = self._wire, self._rows
        codes, scales, kept = wire.parts_of(gathered.view(plan.world_size, -1), full.dtype)
        regions = regions_of(full, plan)
        for run in wire.own.runs:
            first = run.start - plan.starts[run.index]
            values = regions[run.index][:, first : first + run.numel]
            decode_into(values, codes[:, run.start : run.start + run.numel])
            multiply(values.unflatten(1, run.shape), scales_of(scales, run))
        targets = [regions[place.index] for place in wire.own.kept]
        copy_all(targets, [kept[:, place.at : place.at + place.numel] for place in wire.own.kept])


class QuantizedReduction(ABC):
    """Reduces a param group in few bits: each rank gets a segment from every rank by an all-to-all,
    and sums them in the dtype of the gradients. ``sizes`` are those of the ranks' segments. A
    rank's own gradients do not travel, and are exact."""

    def __init__(self, wire: QuantizedFormat, sizes: Sequence[int]) -> None:
        self._wire = wire
        self._sizes = list(sizes)

    def reduce_scatter(
        self, gradients: torch.Tensor, group: dist.ProcessGroup, divisor: float | None = None
    ) -> PendingCollective:
        wire, sizes, rank = self._wire, self._sizes, group.rank()
        left = divide_early(gradients, len(sizes) if divisor is None else divisor)
        sent, mine = self._encode(gradients, group)
        arriving = [sizes[rank]] * len(sizes)
        received = sent.new_empty(sum(arriving))
        issued = all_to_all(received, sent, arriving, sizes, group)

        def finish() -> torch.Tensor:
            total = torch.zeros_like(mine)
            if len(mine):
                wire.add_up(received.view(len(sizes), -1), mine, rank, total)
            return divided(total, left)

        return PendingCollective(issued.works, finish, issued.group)

    @abstractmethod
    def _encode(
        self, gradients: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the segments for all ranks, and what this rank keeps of ``gradients``."""


class QuantizedRangesReduction(QuantizedReduction):
    """Reduces a param group of ranges in few bits."""

    def __init__(self, wire: QuantizedFormat, plan: ParamGroupPlan) -> None:
        super().__init__(wire, wire.plan.packed.shard_numels)
        self._plan = plan
        self._segments = Segments(wire)

    def _encode(
        self, gradients: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wire, plan, segments = self._wire, self._wire.plan, self._segments
        sent = torch.zeros(plan.packed.numel, dtype=torch.uint8, device=gradients.device)
        codes = torch.zeros_like(gradients, dtype=wire.codes)
        scales = gradients.new_empty(sum(plan.scales_of_ranks), dtype=wire.scales or torch.uint8)
        wire.encode(gradients, plan.all_runs, codes, scales)
        copy_all(segments.codes(sent), segments.shards(codes))
        if wire.scales is not None:
            segments.put_scales(sent, scales)
        copy_all(segments.kept(sent, gradients.dtype), segments.kept_in(gradients))
        return sent, own_range(gradients, self._plan, group)


class QuantizedRowsReduction(QuantizedReduction):
    """Reduces a param group of rows in few bits. The plan of ``wire`` is that of one rank."""

    def __init__(self, wire: QuantizedFormat, plan: RowsPlan) -> None:
        super().__init__(wire, [wire.plan.packed.numel] * plan.world_size)
        self._plan = plan

    def _encode(
        self, gradients: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wire, plan = self._wire, self._plan
        regions = regions_of(gradients, plan)
        sent = gradients.new_zeros((len(self._sizes), self._sizes[0]), dtype=torch.uint8)
        codes, scales, kept = wire.parts_of(sent, gradients.dtype)
        for run in wire.own.runs:
            first = run.start - plan.starts[run.index]
            values = regions[run.index][:, first : first + run.numel]
            wire.encode_run(values, run, codes[:, run.start : run.start + run.numel], scales)
        targets = [kept[:, place.at : place.at + place.numel] for place in wire.own.kept]
        copy_all(targets, [regions[place.index] for place in wire.own.kept])
        return sent.flatten(), own_rows(gradients, plan, group)


def own_rows(gradients: torch.Tensor, plan: RowsPlan, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's chunks of ``gradients``, as they lie in a shard."""
    mine = gradients.new_zeros(plan.shard_numels[0])
    own = [region[group.rank()] for region in regions_of(gradients, plan)]
    torch._foreach_copy_(chunks_of(mine, plan), own)
    return mine
