"""Triton's kernels beside torch's operations: what each rank sends, gathers and sums."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import fields, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.testing import assert_close

from fsdp_overlap import QuantizedCommPolicy
from fsdp_overlap.features.quantized.collectives import (
    QuantizedFormat,
    QuantizedRangesGather,
    QuantizedRangesReduction,
    QuantizedRowsGather,
    QuantizedRowsReduction,
)
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import LayoutRule, ParamSpec, Plan, plan_units
from support.one_process import OneProcessCollectives

HAS_TRITON = find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON and not os.environ.get("CI"), reason="needs Triton, whose interpreter runs here"
)


def plan_of(
    shapes: list[tuple[int, ...]], ranks: int, layout: LayoutRule, policy: QuantizedCommPolicy
) -> Plan:
    specs = [ParamSpec(f"p{n}", shape, torch.float32) for n, shape in enumerate(shapes)]
    [plan] = plan_units(
        [[replace(spec, block=policy.block_numel(spec)) for spec in specs]], ranks, layout
    )
    return plan


def wire_of(
    plan: Plan, rank: int, policy: QuantizedCommPolicy, dtype: torch.dtype, codes: torch.dtype
) -> QuantizedFormat:
    travels = policy.wire(plan, dtype, codes)
    own = travels.segment(0 if isinstance(plan, RowsPlan) else rank)
    return QuantizedFormat(travels, own, codes, policy.scale_dtype(dtype, codes))


def by_kernels(wire: QuantizedFormat) -> QuantizedFormat:
    from fsdp_overlap.features.quantized.kernels import KernelFormat

    return KernelFormat(**{field.name: getattr(wire, field.name) for field in fields(wire)})


def reductions_of(plan: Plan, wire: QuantizedFormat) -> tuple[Any, Any]:
    """Return what reduces by torch's operations, and by kernels."""
    from fsdp_overlap.features.quantized.kernels import KernelReduction

    kind = QuantizedRowsReduction if isinstance(plan, RowsPlan) else QuantizedRangesReduction
    return kind(wire, plan), KernelReduction(by_kernels(wire), plan)


def gathers_of(plan: Plan, wire: QuantizedFormat) -> tuple[Any, Any]:
    """Return what gathers by torch's operations, and by kernels. Each has collectives of its
    own."""
    from fsdp_overlap.features.quantized.kernels import KernelGather

    others = OneProcessCollectives()
    if isinstance(plan, RowsPlan):
        return QuantizedRowsGather(wire, plan, others), KernelGather(
            by_kernels(wire), plan, OneProcessCollectives()
        )
    return QuantizedRangesGather(wire, others), KernelGather(
        by_kernels(wire), plan, OneProcessCollectives()
    )


def numbers(plan: Plan, dtype: torch.dtype, seed: int, extremes: bool) -> torch.Tensor:
    """Return a flat buffer: parameters of different magnitudes, and with ``extremes`` some zeros,
    denormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(plan.numel)
    for index, (spec, offset) in enumerate(zip(plan.specs, plan.offsets, strict=True)):
        values = torch.randn(spec.numel, generator=generator) * 10.0 ** (index * 2 - 3)
        flat[offset : offset + spec.numel] = values
    if extremes and plan.numel:
        chosen = (0.0, -0.0, 1e-45, -1e-39, 2.0**-126, 3e38, -6e4, math.inf, -math.inf, math.nan)
        for value in chosen:
            here = torch.rand(plan.numel, generator=generator) < 0.02
            flat[here] = value
    return flat.to(dtype)


def sum_in_order(rows: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    assert dim == 0
    total = torch.zeros(rows.shape[1:], dtype=dtype or rows.dtype)
    for row in rows:
        total += row
    return total


def group_of(rank: int) -> Any:
    return SimpleNamespace(rank=lambda: rank)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that numbers are equal to the bit, or both NaN."""
    assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())


def compare_reduction(
    plan: Plan,
    policy: QuantizedCommPolicy,
    dtype: torch.dtype,
    seed: int = 0,
    extremes: bool = False,
    device: str = "cpu",
) -> None:
    """Reduce on all ranks, both ways."""
    ranks, codes = plan.world_size, policy.reduce_dtype
    assert codes is not None
    wires = [wire_of(plan, rank, policy, dtype, codes) for rank in range(ranks)]
    sizes = [*wires[0].plan.packed.shard_numels] * (ranks // wires[0].plan.plan.world_size)
    pairs = [reductions_of(plan, wire) for wire in wires]
    sent: list[list[torch.Tensor]] = []
    kept = []
    for rank, pair in enumerate(pairs):
        gradients = numbers(plan, dtype, 100 * seed + rank, extremes)
        of_both = [pair[0]._encode(gradients, group_of(rank))]
        by_kernels = pair[1]._encode(gradients.to(device), group_of(rank))
        of_both.append(tuple(tensor.cpu() for tensor in by_kernels))
        assert_same_bits(of_both[1][1], of_both[0][1])
        if not extremes:  # codes of a block that holds NaN may differ
            assert torch.equal(of_both[0][0], of_both[1][0])
        sent.append([segments for segments, _ in of_both])
        kept.append(of_both[0][1])
    for rank, pair in enumerate(pairs):
        totals = []
        for way, (each, place) in enumerate(zip(pair, ("cpu", device), strict=True)):
            received = [of_rank[way].split(sizes)[rank] for of_rank in sent]
            totals.append(torch.zeros_like(kept[rank], device=place))
            # From five rows on torch adds in an order of its own.
            order = patch.object(torch.Tensor, "sum", sum_in_order) if ranks > 4 else nullcontext()
            if not len(kept[rank]):
                continue
            with order:
                arrived, own = torch.stack(received).to(place), kept[rank].to(place)
                each._wire.add_up(arrived, own, rank, totals[-1])
        assert_same_bits(totals[1].cpu(), totals[0])


def compare_gather(
    plan: Plan,
    policy: QuantizedCommPolicy,
    dtype: torch.dtype,
    stored: torch.dtype,
    seed: int = 0,
    extremes: bool = False,
    device: str = "cpu",
) -> None:
    """Gather on all ranks, both ways. Shards are ``stored`` in another dtype than compute has."""
    assert policy.gather_dtype is not None
    whole = numbers(plan, stored, seed, extremes)
    shards: tuple[torch.Tensor, ...] = whole.split(plan.shard_numels)
    if isinstance(plan, RowsPlan):
        shards = tuple(
            torch.cat(
                [
                    torch.nn.functional.pad(
                        whole[offset + rank * chunk : offset + (rank + 1) * chunk],
                        (0, stop - start - chunk),
                    )
                    for offset, chunk, start, stop in zip(
                        plan.offsets,
                        plan.chunks,
                        plan.starts,
                        (*plan.starts[1:], plan.shard_numels[0]),
                        strict=True,
                    )
                ]
            )
            for rank in range(plan.world_size)
        )
    found = []
    for way, place in enumerate(("cpu", device)):
        sent: list[torch.Tensor] = []
        issued = []
        for rank, shard in enumerate(shards):
            wire = wire_of(plan, rank, policy, dtype, policy.gather_dtype)
            gather = gathers_of(plan, wire)[way]
            gather._others.sent = sent
            full = torch.full([plan.numel], 7.0, dtype=dtype, device=place)
            issued.append(gather.all_gather(full, shard, group_of(rank)))
        found.append([each.finish().cpu() for each in issued])
    places = list(zip(plan.specs, plan.offsets, strict=True))
    for torchs, kernels in zip(*found, strict=True):
        for spec, offset in places:
            here = slice(offset, offset + spec.numel)
            assert_same_bits(kernels[here], torchs[here])
