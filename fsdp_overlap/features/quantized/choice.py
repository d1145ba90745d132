"""Chooses what quantizes a param group: Triton's kernels, or torch's operations."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.util import find_spec

import torch

from fsdp_overlap.comm.collectives import RangeCollectives
from fsdp_overlap.features.quantized.collectives import (
    QuantizedFormat,
    QuantizedGather,
    QuantizedRangesGather,
    QuantizedRangesReduction,
    QuantizedReduction,
    QuantizedRowsGather,
    QuantizedRowsReduction,
)
from fsdp_overlap.features.rows.plan import RowsPlan
from fsdp_overlap.layout import ParamGroupPlan


def gather_for(
    wire: QuantizedFormat,
    plan: ParamGroupPlan | RowsPlan,
    others: RangeCollectives,
    device: torch.device,
) -> QuantizedGather:
    """Return what gathers a param group to ``device``."""
    if _has_kernels(device):
        from fsdp_overlap.features.quantized.kernels import KernelGather

        return KernelGather(_by_kernels(wire), plan, others)
    if isinstance(plan, RowsPlan):
        return QuantizedRowsGather(wire, plan, others)
    return QuantizedRangesGather(wire, others)


def reduction_for(
    wire: QuantizedFormat, plan: ParamGroupPlan | RowsPlan, device: torch.device
) -> QuantizedReduction:
    """Return what reduces gradients on ``device``."""
    if _has_kernels(device):
        from fsdp_overlap.features.quantized.kernels import KernelReduction

        return KernelReduction(_by_kernels(wire), plan)
    if isinstance(plan, RowsPlan):
        return QuantizedRowsReduction(wire, plan)
    return QuantizedRangesReduction(wire, plan)


def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or not _has_triton():
        return False
    from fsdp_overlap.features.quantized.kernels import works_on

    return works_on(device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _by_kernels(wire: QuantizedFormat) -> QuantizedFormat:
    from fsdp_overlap.features.quantized.kernels import KernelFormat

    return KernelFormat(**{field.name: getattr(wire, field.name) for field in fields(wire)})
